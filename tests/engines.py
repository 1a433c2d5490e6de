"""Engines of tiny models: loaded, trained by one job, and compared with a plain forward pass."""

import asyncio
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from reinforge.config.policy import PolicyConfig
from reinforge.engine import Engine
from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.model.loading import load_module
from reinforge.engine.training.collate import collate
from reinforge.engine.training.learner import Learner
from reinforge.engine.training.logprobs import token_logprobs
from reinforge.engine.training.micro_batches import make_micro_batches
from reinforge.types.request import ModelReply
from reinforge.types.sample import LossSpec, TrainingSample, UpdateReport
from tests.device import DEVICE

CLIPPED, LIKELIHOOD = LossSpec("clipped_pg"), LossSpec("cross_entropy")
OPTIONS = inspect.signature(Engine.load).parameters.keys() - {"config"}


def load_engine(folder: Any, **settings: Any) -> Engine:
    """Loads a model; the settings are arguments of `Engine.load` and fields of its policy."""
    options = {name: settings.pop(name) for name in OPTIONS & settings.keys()}
    return Engine.load(PolicyConfig(model=str(folder), **settings), **{"seed": 0, "device": DEVICE, **options})


def make_learner(model: Any, dtype: torch.dtype = torch.float32, **policy: Any) -> Learner:
    """A learner without warm-up, of a folder's model or of a module."""
    module = model if isinstance(model, torch.nn.Module) else load_module(model, dtype)
    return Learner(CausalModel(module), PolicyConfig(**{"schedule": {"warmup_steps": 0}, **policy}), seed=0)


def train(
    engine: Engine,
    samples: Sequence[TrainingSample],
    loss: LossSpec = CLIPPED,
    *,
    adapters: Sequence[str] = (),
    progress: float = 0.0,
    ends: bool = True,
) -> UpdateReport:
    """Makes a job of one update and returns the report of the update."""
    engine.begin_job(*adapters)
    report = engine.update(samples, loss, progress_start=progress, progress_end=progress + 0.1)
    if ends:
        engine.end_job()
    return report


def copy_weights(learner: Any) -> dict[str, torch.Tensor]:
    """The trained weights, of a learner or of a model, by name."""
    parameters = getattr(learner, "parameters", None) or learner.trained_parameters
    return {name: p.detach().clone() for name, p in parameters.items()}


def measure_difference(first: Iterable[Any], second: Iterable[Any]) -> float:
    """The largest difference between the numbers of arrays, pair by pair."""
    return max(float(abs(a - b).max()) for a, b in zip(first, second, strict=True))


def measure_error(engine: Engine, replies: Iterable[Any], adapter: str | None = None) -> float:
    """The largest difference between sampled log-probs and the learner's, in nats.

    Args:
        replies: What `sample_replies` or `ask` returns.
        adapter: The adapter of what `ask` returns; None: the first one.
    """
    sampled = [
        (reply.tokens.prompt_token_ids, reply.tokens, engine.policies[adapter] if adapter else engine.policy)
        if isinstance(reply, ModelReply)
        else (reply.prompt, reply, engine.policies[reply.adapter])
        for reply in replies
    ]
    scored = [asyncio.run(policy.score([[*prompt, *tokens.token_ids]]))[0] for prompt, tokens, policy in sampled]
    pairs = zip(sampled, scored, strict=True)
    return max(float(np.abs(row[len(prompt) :] - tokens.logprobs).max()) for (prompt, tokens, _), row in pairs)


@torch.no_grad()
def compute_plainly(
    module: Any, ids: Sequence[int], first: int = 1, temperature: float = 1.0, kept: Sequence[Any] | None = None
) -> np.ndarray:
    """Log-probs of the tokens from `first` on, by one call of a module of transformers without a cache, in float64.

    Args:
        kept: The tokens that each token of the row was sampled from; None: all.
    """
    tokens = torch.tensor([list(ids)], device=module.device)
    logits = module(input_ids=tokens, use_cache=False).logits[0].cpu().double() / (temperature or 1.0)
    rows = [logits[t - 1] if kept is None else logits[t - 1, kept[t].tolist()] for t in range(first, len(ids))]
    own = [logits[t - 1, ids[t]] for t in range(first, len(ids))]
    return np.array([(logit - row.logsumexp(0)).item() for logit, row in zip(own, rows, strict=True)])


def measure_plain_error(module: Any, replies: Iterable[Any]) -> float:
    """The largest difference between the log-probs of `sample_replies` and a plain forward pass, in nats."""
    plain = [(compute_plainly(module, reply.prompt + reply.token_ids, len(reply.prompt)), reply) for reply in replies]
    return max(float(np.abs(logprobs - reply.logprobs).max()) for logprobs, reply in plain)


def compute_sample_plainly(module: Any, sample: TrainingSample) -> np.ndarray:
    """The same for the trained tokens of a sample, `[T]`; 0 elsewhere."""
    temperature = float(sample.temperatures[sample.loss_mask][0])
    logprobs = np.append(0.0, compute_plainly(module, sample.token_ids.tolist(), 1, temperature))
    return np.where(sample.loss_mask, logprobs, 0.0)


def compute_gradients(engine: Engine, samples: Sequence[TrainingSample], max_tokens: int, masks: Any = None) -> Any:
    """Gradients of the summed log-probs and a tenth of the entropies; with masks, siblings share their prefixes."""
    model = engine.model
    model.module.zero_grad()
    for indices in make_micro_batches(samples, max_tokens, share=masks is not None):
        batch = collate([samples[i] for i in indices], model.device)
        logprobs, entropies = token_logprobs(model, batch, masks=masks, entropy_grad=True)
        (logprobs.sum() + 0.1 * entropies.sum()).backward()
    gradients = {name: p.grad.clone() for name, p in engine.learner.parameters.items() if p.grad is not None}
    model.module.zero_grad()
    return gradients


def assert_close(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], least: float = 1e-3) -> None:
    """Checks that each tensor is the other to 1e-4 of its largest number, or of `least`."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        error = (found[name] - value).abs().max()
        assert error <= 1e-4 * max(value.abs().max().item(), least), name
