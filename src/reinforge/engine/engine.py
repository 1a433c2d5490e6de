"""The engine: one model that samples and learns, behind plain blocking calls.

engine = Engine.load(config, seed=0)
await engine.policy.sample(request)          # any number at once, from any loop
engine.begin_job()                           # admission closes, replies in flight finish
engine.score(samples, needs)
report = engine.update(samples, loss, progress_start=0.0, progress_end=0.1)     # or one step at a time, by a loss of
metrics = engine.step(samples, lambda batch, logprobs_BT: -logprobs_BT)         # the caller's own
engine.end_job()
await engine.policy.publish(version)         # or engine.rollback()
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from reinforge.config.schema import PolicyConfig
from reinforge.engine import checkpoint
from reinforge.engine.batch import plain_sample
from reinforge.engine.critic import PREFIX, ValueHead, sample_values
from reinforge.engine.learner import Learner, Progress
from reinforge.engine.logprobs import sample_logprobs
from reinforge.engine.losses import Loss
from reinforge.engine.memory import is_out_of_memory
from reinforge.engine.model import CausalModel, load_model, load_tokenizer
from reinforge.engine.policy import EmbeddedPolicy
from reinforge.engine.prefix import sharing_masks
from reinforge.engine.prompts import PromptRenderer
from reinforge.engine.replies import Replies, score_replies
from reinforge.errors import EngineError, OutOfMemory
from reinforge.files import commit_folder, staging_folder
from reinforge.interfaces import Needs
from reinforge.types.request import TokenLogprobs
from reinforge.types.sample import FloatArray, LossSpec, TrainingSample, UpdateReport
from reinforge.types.seeding import stable_seed

T = TypeVar("T")


@dataclass(slots=True)
class Snapshot:
    """The weights and the optimizer as they were before a job."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    num_steps: int


class Engine:
    """Owns the model, its sampler and its learner. Calls block; run them in a worker thread.

    Attributes:
        policy: Samples from the weights as they are published.
        tokenizer: The Hugging Face tokenizer with its chat template.
        model: The model that is trained.
        reference: A frozen copy of the weights that were loaded; None unless asked for, and with adapters, whose
            model without them is the reference.
        critic: The value head; None unless asked for.
    """

    def __init__(
        self,
        config: PolicyConfig,
        model: CausalModel,
        tokenizer: Any,
        *,
        seed: int,
        keep_reference: bool = False,
        critic: bool = False,
        deterministic: bool = False,
    ):
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.keeps_reference = keep_reference
        self.reference = model.frozen_copy() if keep_reference and not model.has_adapters else None
        self._frozen_digest: bytes | None = None
        self.critic = ValueHead(model, shares_trunk=config.critic.shares_trunk) if critic else None
        self._in_job = False
        self._snapshot: Snapshot | None = None
        self.policy = EmbeddedPolicy(
            model,
            PromptRenderer(tokenizer),
            config.model or model.config.model_type,
            max_batch=config.max_batch,
            deterministic=deterministic,
            seed=stable_seed(seed, "sampler"),
            score=self._score_tokens,
            fingerprint=self.fingerprint,
            published=self._forget_snapshot,
        )
        self._masks = self._call(lambda: sharing_masks(model))
        self.learner = Learner(model, config, seed, self._masks, self.critic)
        self._threads_before: int | None = None
        if deterministic:  # sums over several threads depend on how many there are
            self._threads_before = torch.get_num_threads()
            self._call(lambda: torch.set_num_threads(1))
            torch.set_num_threads(1)

    @classmethod
    def load(
        cls,
        config: PolicyConfig,
        *,
        seed: int,
        device: str = "auto",
        keep_reference: bool = False,
        critic: bool = False,
        deterministic: bool = False,
    ) -> Engine:
        """Returns an engine whose policy serves version 0.

        Args:
            config: The model, its tokenizer, and how it learns; `init: random` draws the weights.
            seed: Of the weights drawn, the draws of replies, and the order of samples.
            device: `auto`, `cpu`, `cuda` or `mps`.
            keep_reference: Keep a frozen copy for `Needs.ref_logprobs`.
            critic: Train a value head for `Needs.values`.
            deterministic: The same bits whatever else is drawn at the same time: one thread, each prompt read alone.

        Raises:
            ConfigError: The configuration cannot work here.
            EngineError: The model cannot be loaded or sampled from.
        """
        with checkpoint.quiet(), ThreadPoolExecutor(1) as thread:  # its libgomp pool ends with it
            model = thread.submit(load_model, config, seed, device).result()
        tokenizer = load_tokenizer(config)
        torch.manual_seed(stable_seed(seed, "torch"))  # dropout draws from torch's own stream
        return cls(
            config,
            model,
            tokenizer,
            seed=seed,
            keep_reference=keep_reference,
            critic=critic,
            deterministic=deterministic,
        )

    @property
    def num_parameters(self) -> int:
        """Number of weights; tied ones count once."""
        return sum(parameter.numel() for parameter in self.model.module.parameters())

    def _call(self, function: Callable[[], T]) -> T:
        """Returns what `function` returns, computed in the sampler's thread."""
        try:
            return self.policy.sampler.call(function)
        except (MemoryError, RuntimeError) as cause:
            if not is_out_of_memory(cause):
                raise
            fix = "lower finetuning.policy.batch.micro_batch_tokens, policy.max_context or policy.max_batch"
            raise OutOfMemory(f"too little memory: {cause}; {fix}") from cause

    def begin_job(self) -> None:
        """Closes admission and waits until no reply is in flight."""
        self.policy.close_gate()
        self._in_job, self._snapshot = True, None

    def score(self, samples: Sequence[TrainingSample], needs: Needs) -> None:
        """Fills what an algorithm asks for: `old_logprobs` by the weights as they are, `ref_logprobs`, `values`.

        Raises:
            EngineError: There is no reference, or no critic.
        """
        if needs.values and self.critic is None:
            raise EngineError("values need a critic: load the engine with critic=True")
        if needs.ref_logprobs and not self.keeps_reference:
            raise EngineError("ref_logprobs need a reference: load the engine with keep_reference=True")
        if needs.old_logprobs is True or (needs.old_logprobs and self.model.dtype.itemsize < 4):
            for sample, logprobs in zip(samples, self.logprobs(samples), strict=True):
                sample.old_logprobs = logprobs
        if needs.ref_logprobs:
            with nullcontext(self.reference) if self.reference else self.model.without_adapters() as reference:
                found = self._logprobs(reference, samples)
            for sample, logprobs in zip(samples, found, strict=True):
                sample.ref_logprobs = logprobs
        if needs.values and self.critic is not None:
            critic, tokens = self.critic, self.config.batch.micro_batch_tokens
            values = self._call(lambda: sample_values(self.model, critic, samples, tokens, self._masks))
            for sample, row in zip(samples, values, strict=True):
                sample.values = row

    def update(
        self,
        samples: Sequence[TrainingSample],
        loss: LossSpec,
        *,
        progress_start: float,
        progress_end: float,
        epoch: int = 0,
    ) -> UpdateReport:
        """Trains on the samples, within a job.

        Args:
            samples: With credit.
            loss: The loss by name.
            progress_start: Share of the run that is done before the job, in [0, 1].
            progress_end: Share that is done after it.
            epoch: Orders of samples derive from it.

        Raises:
            ConfigError: There is no such loss.
            EngineError: No job is open, or the weights were no finite numbers after it.
        """
        if not self._in_job:
            raise EngineError("update: no job is open; begin_job() first")
        progress = Progress(progress_start, progress_end, epoch)
        return self._call(lambda: self._update(samples, loss, progress))

    def _update(self, samples: Sequence[TrainingSample], loss: LossSpec, progress: Progress) -> UpdateReport:
        self._take_snapshot()
        report = self.learner.update(samples, loss, progress)
        moved = {**self._named_weights(), **self.learner.state()}
        broken = [name for name, value in moved.items() if not torch.isfinite(value).all()]
        if report.num_updates and broken:
            raise EngineError(
                f"after the job {len(broken)} of {len(moved)} tensors are not finite, {broken[0]} among them; a lower "
                "finetuning.policy.optimizer.learning_rate may do, or a checkpoint from before"
            )
        return report

    def step(
        self, samples: Sequence[TrainingSample], loss: Loss, *, progress: float = 0.0, entropy_grad: bool = False
    ) -> dict[str, float] | None:
        """Makes one optimizer step on all of the samples by a loss of the caller's own, within a job.

        It is the step that `update` makes: micro-batches, shared prefixes, clipping, and a loss or a gradient that is
        not finite changes no bit.

        Args:
            samples: With what the loss reads; whole pairs, where it compares.
            loss: `loss(batch, logprobs_BT)` returns `[B, T]`, `[B]` or one number with gradient, alone, with a dict of
                metrics, or as a `LossOutput`. One number is taken for the mean over the samples it saw.
            progress: Share of the run that is done, in [0, 1]; it moves the learning rate.
            entropy_grad: The loss reads `batch.entropies` with gradient.

        Returns:
            `loss`, `grad_norm`, `lr` and what the loss reports; None if the step was refused.

        Raises:
            EngineError: No job is open, nothing can be trained, or the loss has another shape.
        """
        if not self._in_job:
            raise EngineError("step: no job is open; begin_job() first")
        usable = [sample for sample in samples if sample.num_trained and sample.weight > 0]
        if not usable:
            raise EngineError("step: no sample has a trained token and a weight")

        def step() -> dict[str, float] | None:
            self._take_snapshot()
            return self.learner.step(usable, loss, progress, entropy_grad=entropy_grad)

        return self._call(step)

    def end_job(self) -> None:
        """Ends the job; admission opens when somebody publishes, or by itself for the first request."""
        if not self._in_job:
            raise EngineError("end_job: no job is open")
        self._in_job = False
        self.policy.end_job()

    def rollback(self) -> None:
        """Puts weights and optimizer back to before `begin_job` and opens admission with the old version.

        Raises:
            EngineError: No job has begun since the last version was published.
        """
        if not self._in_job and self._snapshot is None:
            raise EngineError("rollback: no job has begun since the last version was published")
        self._call(self._restore_snapshot)
        self._in_job, self._snapshot = False, None
        self.policy.end_job(self.policy.version)
        self.policy.open(self.policy.version)

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Returns log p of each sample's trained tokens at their temperatures, `[T]` each, 0 elsewhere."""
        return self._logprobs(self.model, samples)

    def _logprobs(self, model: CausalModel, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        return self._call(lambda: sample_logprobs(model, samples, self.config.batch.micro_batch_tokens, self._masks))

    def replies(self, said: Sequence[TokenLogprobs], *, reference: bool = False, values: bool = False) -> Replies:
        """Returns log-probs of given replies as rows, with gradient where it is on and the model is the trained one.

        Args:
            said: Prompt, tokens and temperature of each.
            reference: By the model as it was loaded, without gradient.
            values: By the critic too.

        Raises:
            EngineError: There is no reference, or no critic.
        """
        if reference and not self.keeps_reference:
            raise EngineError("there is no reference: load the engine with keep_reference=True")
        if values and self.critic is None:
            raise EngineError("values need a critic: load the engine with critic=True")
        tokens, critic, grad = self.config.batch.micro_batch_tokens, self.critic if values else None, False
        if not reference:
            grad = torch.is_grad_enabled()

        def score() -> Replies:
            lent = self.model.without_adapters() if reference and self.reference is None else nullcontext()
            with lent, torch.set_grad_enabled(grad):
                return score_replies(
                    self.reference if reference and self.reference else self.model, said, tokens, self._masks, critic
                )

        return self._call(score)

    def _score_tokens(self, token_ids: Sequence[Sequence[int]]) -> list[FloatArray]:
        return self.logprobs([plain_sample(row) for row in token_ids])

    def save(self, folder: str | Path, version: int) -> None:
        """Writes a checkpoint that transformers loads as it is, with what training needs beside it.

        One that stands there already is replaced once the new one is whole and on disk.

        Raises:
            StorageError: It cannot be written.
        """
        staged = staging_folder(Path(folder).parent)
        try:
            self.write(staged, version)
            commit_folder(staged, Path(folder), version=version)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise

    def write(self, folder: Path, version: int) -> None:
        """Writes a checkpoint's files into a new folder, without making them durable."""
        begun = self.policy.sampler.num_begun
        self._call(lambda: checkpoint.write(folder, self.model, self.tokenizer, self.learner, version, begun))

    def load_weights(self, folder: str | Path) -> None:
        """Loads a checkpoint or a plain model into this engine, in place, when no reply is in flight.

        The optimizer goes on where the checkpoint left it, and starts anew from a plain model. Within a job the job
        stays open. Otherwise it is a job of its own, which ends: `publish` opens admission, or the first request
        does, on the checkpoint's version.

        Raises:
            EngineError: The folder holds another model; weights and job are as they were.
        """
        own_job = not self._in_job
        if own_job:
            self.begin_job()
        try:
            version = self._call(lambda: self._load(Path(folder)))
        except BaseException:
            if own_job:
                self.rollback()
            raise
        if own_job:
            self._in_job = False
            self.policy.end_job(version)

    def _load(self, folder: Path) -> int | None:
        self._take_snapshot()
        training = checkpoint.load_training(folder)
        checkpoint.load_weights(folder, self.model)
        if self.critic is not None:
            checkpoint.load_critic(folder, self.critic)
        if training is None:
            self.learner.reset()
            return None
        moments, state = training
        self.learner.restore(moments, state.num_steps)
        checkpoint.restore_rng(state)
        self.policy.sampler.num_begun = max(self.policy.sampler.num_begun, state.num_begun)
        return state.version

    def fingerprint(self) -> str:
        """Returns 16 hex digits of a SHA-256 over names and bytes of all parameters."""
        return self._call(self._fingerprint)

    def _fingerprint(self) -> str:
        trained = self.model.trained_parameters
        if self._frozen_digest is None:  # frozen weights are hashed once
            frozen = {name: p for name, p in self.model.module.named_parameters() if name not in trained}
            self._frozen_digest = _digest(frozen) if frozen else b""
        return hashlib.sha256(self._frozen_digest + _digest(trained)).hexdigest()[:16]

    def close(self) -> None:
        """Ends a job at its next micro-batch, fails what waits and joins the sampler's thread."""
        self.learner.stopping.set()
        self.policy.sampler.close()
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forget_snapshot(self) -> None:
        self._snapshot = None

    def _named_weights(self) -> dict[str, Tensor]:
        """Returns everything that a job changes, the critic included."""
        weights: dict[str, Tensor] = dict(self.model.trained_parameters)
        if self.critic is not None:
            weights |= {f"{PREFIX}{name}": p for name, p in self.critic.named_parameters()}
        return weights

    @torch.no_grad()
    def _take_snapshot(self) -> None:
        if self._snapshot is None:
            weights = {name: p.detach().clone() for name, p in self._named_weights().items()}
            moments = {name: value.clone() for name, value in self.learner.state().items()}
            self._snapshot = Snapshot(weights, moments, self.learner.num_steps)

    @torch.no_grad()
    def _restore_snapshot(self) -> None:
        if self._snapshot is not None:
            for name, parameter in self._named_weights().items():
                parameter.copy_(self._snapshot.weights[name])
            self.learner.restore(self._snapshot.optimizer, self._snapshot.num_steps)


def _digest(parameters: Mapping[str, Tensor]) -> bytes:
    """Returns the SHA-256 over names and bytes of parameters."""
    digest = hashlib.sha256()
    for name, parameter in sorted(parameters.items()):
        digest.update(name.encode())
        content: Any = parameter.detach().cpu().contiguous().view(torch.uint8).numpy()
        digest.update(content)
    return digest.digest()
