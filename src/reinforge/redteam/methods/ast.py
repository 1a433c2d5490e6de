"""Adaptive stress testing on the engine: the tester is the policy, the baseline is the model it started from.

`texts.py` has the strings that carry tokens, `targets.py` what can be attacked.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from reinforge.config.policy import OptimizerConfig, PolicyConfig, ScheduleConfig
from reinforge.errors import ConfigError, ContextOverflow, EngineError, Problem
from reinforge.redteam.core.scorer import Scorer
from reinforge.redteam.core.system import T, ValueFunctionSystem
from reinforge.redteam.methods.ast_system import ASTEvaluator, ASTNode, ASTSampler, ASTSystem
from reinforge.redteam.methods.targets import (
    FunctionTarget,
    Target,
    WorkflowTarget,
    openai_target,
    resolve_model_folder,
    sample_all,
)
from reinforge.redteam.methods.texts import Conversation, GeneratedText
from reinforge.redteam.scorers.texts import KeywordScorer
from reinforge.redteam.turns import build_attacker_messages, build_target_messages
from reinforge.rollout.isolation.threads import LoopThread
from reinforge.types.request import Message, ModelReply, ModelRequest, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from reinforge.engine import Engine
    from reinforge.engine.training.reply_logprobs import ReplyLogprobs
    from reinforge.engine.training.scheduled_optimizer import ScheduledOptimizer


MARKER = "quibbern"  # the made-up word that the bundled target should not say


class ASTProblem(ASTSystem, ValueFunctionSystem[str, str]):
    """A tester on the engine against a target in this process, behind a URL, or in a function.

    A conversation is a `Conversation` and a probe a `GeneratedText`: strings that carry the exact sampled tokens, so
    log-probs are those of the tokens that were sampled. The tester sees the opening and the target's responses as user
    messages and its own probes as assistant messages; the target sees the reverse (`redteam/turns.py`).

    Example:
        problem = ASTProblem()  # the bundled visitor against the bundled front desk
        problem = ASTProblem("path/to/tester", "path/to/target", RegexScorer("zorp"), policy={"lora": {"r": 8}})
        problem = ASTProblem("path/to/tester", lambda messages: my_agent(messages[-1]["content"]))

    Args:
        attacker: The tester: folder, hub id or `bundled:NAME`.
        target: A frozen model, named in the same way; an object with `async sample(request)`, such as
            `openai_target(...)`; or `function(messages)`.
        scorer: None: 1 where the bundled target's marker word occurs. For the weights and `likelihood` see `ASTSystem`.
        baseline: Folder or hub id of the baseline; None: the tester before training, or without its adapters.
        policy: Other settings of the tester, those of `finetuning.policy`: `lora`, `dtype`, `max_model_len`, ...;
            `max_num_seqs` applies to all models.
        temperature: Of the tester; `max_tokens` is for its probes.
        value_head: Add a critic to the tester, which PPO needs.
        seed: Seeds the sampling of requests without a seed.
        deterministic: Make results independent, to the bit, of what else runs in the same batch; slower.
    """

    def __init__(
        self,
        attacker: str | Path = "bundled:front_desk_visitor",
        target: Target = "bundled:front_desk",
        scorer: Scorer[str, str] | None = None,
        ppl_weight: float = 0.025,
        combined_weight: float = 0.1,
        defense_toxicity_weight: float = 0.1,
        *,
        likelihood: Literal["baseline", "target"] = "baseline",
        baseline: str | Path | None = None,
        policy: Mapping[str, Any] | None = None,
        temperature: float = 1.0,
        max_tokens: int = 48,
        target_temperature: float = 1.0,
        target_max_tokens: int = 48,
        value_head: bool = True,
        device: str = "auto",
        seed: int = 0,
        deterministic: bool = False,
    ):
        super().__init__(
            scorer or KeywordScorer(MARKER), ppl_weight, combined_weight, defense_toxicity_weight, likelihood=likelihood
        )
        if temperature <= 0:
            message = f"is {temperature:g}, but greedy probes are all equal, and their log-probs are not the policy's"
            raise ConfigError(Problem("temperature", message, "set it above 0"))
        self._probe_params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
        self._response_params = SamplingParams(temperature=target_temperature, max_tokens=target_max_tokens)
        self._loop = LoopThread(f"reinforge-redteam-{id(self):x}")
        self._resources = ExitStack()
        self._resources.callback(self._loop.close)

        def load(named: str | Path, settings: Mapping[str, Any], **kwargs: Any) -> Engine:
            from reinforge.engine import Engine

            folder = self._loop.run(resolve_model_folder(named))
            config = PolicyConfig(**{**self._default_settings(folder), **settings, "model": folder})
            engine = Engine.load(config, seed=seed, device=device, deterministic=deterministic, **kwargs)
            self._resources.callback(engine.close)
            return engine

        try:
            settings = dict(policy or {})
            self.engine = load(attacker, settings, keep_reference=baseline is None, critic=value_head)
            shared = {name: value for name, value in settings.items() if name == "max_num_seqs"}
            self._baseline = None if baseline is None else load(baseline, shared)
            self._check_same_vocabulary()
            self._target_engine = load(target, shared) if isinstance(target, str | Path) else None
        except BaseException:
            self.close()
            raise
        chosen: Any = target if self._target_engine is None else self._target_engine.policy
        self._target = chosen if hasattr(chosen, "sample") else FunctionTarget(chosen)
        self._changes = WeightChanges(self.parameters())
        self._resources.callback(self._changes.close)
        self._published = self._changes.count()

    def _default_settings(self, model: str) -> dict[str, Any]:
        return {}

    def _check_same_vocabulary(self) -> None:
        if self._baseline is None:
            return
        ours, theirs = (engine.tokenizer.get_vocab() for engine in (self.engine, self._baseline))
        if ours != theirs:
            message = "its vocabulary differs from the tester's, so their log-probs cannot be compared"
            fix = "leave it out: the baseline is then the tester before training"
            raise ConfigError(Problem("baseline", message, fix))

    def rollout_prompt_with_tester(self, x: Sequence[str]) -> list[str]:
        return self._sample_probes(x, [None] * len(x), may_be_full=False)

    def rollout_prompt_with_target(self, x: Sequence[str]) -> list[str]:
        return self._sample_responses(x, [None] * len(x), may_be_full=False)

    def sample_probes(self, context: Sequence[str], seeds: Sequence[int]) -> list[str | None]:
        return self._sample_probes(context, seeds, may_be_full=True)

    def sample_responses(self, x: Sequence[str], seeds: Sequence[int]) -> list[str | None]:
        return self._sample_responses(x, seeds, may_be_full=True)

    def _sample_probes(self, x: Sequence[str], seeds: Sequence[int | None], *, may_be_full: bool) -> list[Any]:
        self._publish_changed_weights()
        params = [replace(self._probe_params, seed=seed) for seed in seeds]
        replies = self._request(self.engine.policy, map(_tester_view, x), params, may_be_full)
        return [reply and GeneratedText(_get_text(reply), reply.tokens) for reply in replies]

    def _sample_responses(self, x: Sequence[str], seeds: Sequence[int | None], *, may_be_full: bool) -> list[Any]:
        params = [replace(self._response_params, seed=seed) for seed in seeds]
        replies = self._request(self._target, map(_target_view, x), params, may_be_full)
        return [reply and GeneratedText(_get_text(reply), message=reply.message) for reply in replies]

    def _request(
        self, model: Any, views: Iterable[list[Message]], params: Sequence[SamplingParams], may_be_full: bool
    ) -> list[ModelReply | None]:
        """Returns a model's replies, None where the context is full if that may be; raises the first other error."""
        requests = [ModelRequest(*pair) for pair in zip(views, params, strict=True)]
        replies = self._loop.run(sample_all(model, requests))
        for reply in replies:
            if isinstance(reply, BaseException) and not (may_be_full and isinstance(reply, ContextOverflow)):
                raise reply
        return [None if isinstance(reply, BaseException) else reply for reply in replies]

    def get_tester_logprobs(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        """Returns the tester's log-probs, `[B, T]`, with gradient; equal prompts are computed once."""
        return self.engine.reply_logprobs(self._encode_replies(self.engine, context, continuation)).logprobs

    def get_baseline_logprobs(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        replies = self._encode_replies(self.engine, context, continuation)
        if self._baseline is None:
            return self.engine.reply_logprobs(replies, reference=True).logprobs
        return _score_frozen(self._baseline, replies).logprobs.to(self.engine.model.device)

    def get_target_logprobs(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        """Returns the target's log-probs of the probes, `[B, T]`, without gradient, from the tester's view."""
        if self._target_engine is None:
            message = f"{self._target.model_name} cannot score given text; only a model loaded in this process can"
            fix = 'keep likelihood="baseline", or set the target to a folder or hub id'
            raise ConfigError(Problem("target", message, fix))
        plain = [str(text) for text in continuation]
        replies = self._encode_replies(self._target_engine, context, plain)
        return _score_frozen(self._target_engine, replies).logprobs.to(self.engine.model.device)

    def get_sampling_logprobs(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        """Returns the log-probs that the sampler reported, `[B, T]`; recomputed if a probe carries no tokens."""
        import torch

        if (tokens := _list_tokens(continuation)) is None:
            return super().get_sampling_logprobs(context, continuation)
        rows = [torch.tensor(each.logprobs, device=self.engine.model.device) for each in tokens]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def token_mask(self, context: Sequence[str], continuation: Sequence[str], logprobs: Tensor) -> Tensor:
        """Returns the mask of the continuations' tokens, `[B, T]`, from their exact lengths if all carry tokens."""
        import torch

        if (tokens := _list_tokens(continuation)) is None:
            return super().token_mask(context, continuation, logprobs)
        counts_B = torch.tensor([len(each.token_ids) for each in tokens], device=logprobs.device)
        return torch.arange(logprobs.shape[1], device=logprobs.device) < counts_B[:, None]

    def value(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        return self.logprobs_and_values(context, continuation)[1]

    def logprobs_and_values(self, context: Sequence[str], continuation: Sequence[str]) -> tuple[Tensor, Tensor]:
        if self.engine.critic is None:
            raise ConfigError(Problem("value_head", "the tester has no critic", "set value_head=True"))
        output = self.engine.reply_logprobs(self._encode_replies(self.engine, context, continuation), values=True)
        assert output.values is not None
        return output.logprobs, output.values

    def _encode_replies(
        self, engine: Engine, context: Sequence[str], continuation: Sequence[str]
    ) -> list[TokenLogprobs]:
        return [self._encode_reply(engine, text, probe) for text, probe in zip(context, continuation, strict=True)]

    def _encode_reply(self, engine: Engine, context: str, probe: str) -> TokenLogprobs:
        request = ModelRequest(_tester_view(context))
        sampled = getattr(probe, "tokens", None)
        if sampled is None:
            return self._loop.run(engine.policy.encode(request, {"role": "assistant", "content": str(probe)}))
        prompt = engine.policy.renderer.render(request)
        return TokenLogprobs(prompt, sampled.token_ids, sampled.logprobs, temperature=sampled.temperature)

    def parameters(self) -> Iterator[Parameter]:
        yield from self.engine.learner.parameters.values()

    def compute(self, work: Callable[[], T]) -> T:
        return self.engine.policy.sampler.call(work)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Waits for replies in flight, then holds new ones until the block ends; they come from the new weights."""
        self.engine.begin_job()
        try:
            yield
        finally:
            self.engine.end_job()
            self._publish()

    def _publish(self) -> None:
        self._loop.run(self.engine.policy.publish(self.engine.policy.version + 1))
        self._published = self._changes.count()

    def _publish_changed_weights(self) -> None:
        if self._changes.count() != self._published:
            with self.updating():
                pass

    def make_scheduled_optimizer(self, settings: OptimizerConfig, schedule: ScheduleConfig) -> ScheduledOptimizer:
        """Returns the engine's learner with these settings, so that the engine's checkpoints include the optimizer."""
        self.engine.config.optimizer, self.engine.config.schedule = settings, schedule
        self.engine.learner.configure(settings, schedule, self.engine.config.critic)
        return self.engine.learner

    def write(self, folder: Path, optimizer: ScheduledOptimizer) -> None:
        self.engine.write(folder, self.engine.policy.version)

    def read(self, folder: Path, optimizer: ScheduledOptimizer, num_steps: int) -> None:
        self.engine.load_weights(folder)
        self._publish()
        if self.engine.learner.num_steps != num_steps:
            steps = self.engine.learner.num_steps
            raise EngineError(f"{folder}: found a tester after {steps} optimizer steps, expected {num_steps}")

    def save(self, folder: str | Path) -> None:
        self.engine.save(folder, self.engine.policy.version)

    def close(self) -> None:
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _score_frozen(engine: Engine, replies: Sequence[TokenLogprobs]) -> ReplyLogprobs:
    import torch

    with torch.no_grad():
        return engine.reply_logprobs(replies)


def _tester_view(context: str) -> list[Message]:
    conversation = Conversation(context)
    return build_attacker_messages(str(conversation.turns[0]), [(str(p), str(r)) for p, r in conversation.exchanges])


def _target_view(text: str) -> list[Message]:
    conversation = Conversation(text)
    if conversation.open_probe is None:  # plain text: its turns are unknown
        return [{"role": "user", "content": str(text)}]
    turns = [(str(p), str(r)) for p, r in conversation.exchanges]
    return build_target_messages(str(conversation.turns[0]), turns, str(conversation.open_probe))


def _get_text(reply: ModelReply) -> str:
    return str(reply.message.get("content") or "")


def _list_tokens(continuation: Sequence[str]) -> list[TokenLogprobs] | None:
    tokens = [getattr(probe, "tokens", None) for probe in continuation]
    return None if any(each is None for each in tokens) else tokens  # type: ignore[return-value]


SAMPLE_SIZE = 64  # about so many numbers of each parameter are compared


class WeightChanges:
    """Counts changes of parameters, whichever code makes them: a sampler that keeps copies and caches must notice each.

    torch counts operations in place itself (`_version`), but not the steps of fused optimizers; a hook counts those. It
    counts no change through `parameter.data` either, as a loop without optimizer makes it: a sample of the numbers of
    each parameter shows those.
    """

    def __init__(self, parameters: Iterable[Parameter]):
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._parameters = list(parameters)
        self._ids = set(map(id, self._parameters))
        self._num_steps = self._num_unseen = 0
        self._sample = self._take_sample()
        watcher = weakref.ref(self)  # torch keeps the hook for good if `close` is not called

        def count_step(optimizer: Optimizer, *_: Any) -> None:
            stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if (changes := watcher()) is not None and stepped & changes._ids:
                changes._num_steps += 1

        self._hook = register_optimizer_step_post_hook(count_step)

    def count(self) -> int:
        import torch

        sample = self._take_sample()
        if any(not torch.equal(one, other) for one, other in zip(sample, self._sample, strict=True)):
            self._num_unseen += 1
            self._sample = sample
        return self._num_steps + self._num_unseen + sum(parameter._version for parameter in self._parameters)

    def _take_sample(self) -> list[Tensor]:
        flat = [parameter.detach().reshape(-1) for parameter in self._parameters]
        return [values[:: max(1, values.numel() // SAMPLE_SIZE)].clone() for values in flat]

    def close(self) -> None:
        self._hook.remove()


__all__ = [
    "ASTEvaluator",
    "ASTNode",
    "ASTProblem",
    "ASTSampler",
    "ASTSystem",
    "Conversation",
    "GeneratedText",
    "WorkflowTarget",
    "openai_target",
]
