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

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from reinforge.config.schema import PolicyConfig
from reinforge.engine import checkpoint
from reinforge.engine.losses.base import Loss
from reinforge.engine.memory import is_out_of_memory
from reinforge.engine.model.causal_model import DEFAULT, CausalModel
from reinforge.engine.model.chat_template import PromptRenderer
from reinforge.engine.model.fingerprint import Fingerprints
from reinforge.engine.model.loading import load_model, load_tokenizer
from reinforge.engine.model.preflight import check_adapters
from reinforge.engine.model.value_head import ValueHead
from reinforge.engine.policy import EmbeddedPolicy, deliver, end_tokens
from reinforge.engine.sampling.sampler import Sampler
from reinforge.engine.training.collate import plain_sample
from reinforge.engine.training.job import Job
from reinforge.engine.training.learner import Learner, Progress
from reinforge.engine.training.reply_logprobs import Replies
from reinforge.engine.training.scoring import Scorer
from reinforge.engine.training.shared_prefix import sharing_masks
from reinforge.engine.training.snapshot import Snapshot
from reinforge.errors import ConfigError, EngineError, OutOfMemory
from reinforge.files import write_folder
from reinforge.interfaces import Needs
from reinforge.types.request import TokenLogprobs
from reinforge.types.sample import FloatArray, LossSpec, TrainingSample, UpdateReport
from reinforge.types.seeding import stable_seed

T = TypeVar("T")


class Engine:
    """Owns the model, its sampler and its learner. Calls block; run them in a worker thread.

    Attributes:
        policy: Samples from the weights as they are published; of several adapters, by the first.
        policies: The policy of each adapter, by its name; "default" alone, where none are named.
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
        adapters: Sequence[str] = (DEFAULT,),
        keep_reference: bool = False,
        keep_initial: bool = False,
        critic: bool = False,
        deterministic: bool = False,
    ):
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.reference = model.frozen_copy() if keep_reference and not model.has_adapters else None
        self.critic = ValueHead(model, shares_trunk=config.critic.shares_trunk) if critic else None
        self._job: Job | None = None
        renderer = PromptRenderer(tokenizer)
        self._sampler = Sampler(
            model,
            end_tokens(model, tokenizer),
            max_batch=config.max_batch,
            seed=stable_seed(seed, "sampler"),
            deliver=deliver,
            adapters=adapters,
            kept_bytes=config.kv_cache_mb * 2**20,
            deterministic=deterministic,
        )
        self.policies = {
            name: EmbeddedPolicy(
                self._sampler,
                renderer,
                (config.model or model.config.model_type) if len(adapters) == 1 else name,
                adapter=name,
                score=partial(self._score_tokens, adapter=name),
                fingerprint=partial(self.fingerprint, name),
                published=partial(self._published, name),
            )
            for name in adapters
        }
        self.policy = self.policies[adapters[0]]
        masks = self._call(lambda: sharing_masks(model))
        self._scorer = Scorer(
            model,
            masks,
            config.batch.micro_batch_tokens,
            keeps_reference=keep_reference,
            reference=self.reference,
            critic=self.critic,
        )
        self._learners = {
            name: self._call(lambda: Learner(model, config, seed, masks, self.critic), name) for name in adapters
        }
        kept = self._learners.items() if keep_initial else ()
        self._initial = {name: self._call(partial(Snapshot, learner), name) for name, learner in kept}
        self._fingerprints = Fingerprints(
            model, [p for each in self._learners.values() for p in each.parameters.values()]
        )
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
        keep_initial: bool = False,
        critic: bool = False,
        deterministic: bool = False,
        adapters: Sequence[str] = (),
    ) -> Engine:
        """Returns an engine whose policy serves version 0.

        Args:
            config: The model, its tokenizer, and how it learns; `init: random` draws the weights.
            seed: Of the weights drawn, the draws of replies, and the order of samples.
            device: `auto`, `cpu`, `cuda` or `mps`.
            keep_reference: Keep a frozen copy for `Needs.ref_logprobs`.
            keep_initial: Keep what is trained as it is now, for `reset`.
            critic: Train a value head for `Needs.values`.
            deterministic: The same bits whatever else is drawn at the same time: one thread, each prompt read alone.
            adapters: Names of adapters that sample together and learn apart, by `policy.lora`; none: one policy.

        Raises:
            ConfigError: The configuration cannot work here.
            EngineError: The model cannot be loaded or sampled from.
        """
        if problems := check_adapters(config, adapters, critic=critic):
            raise ConfigError(problems)
        names = tuple(adapters) or (DEFAULT,)
        with checkpoint.quiet(), ThreadPoolExecutor(1) as thread:  # its libgomp pool ends with it
            model = thread.submit(load_model, config, seed, device, names).result()
        tokenizer = load_tokenizer(config)
        torch.manual_seed(stable_seed(seed, "torch"))  # dropout draws from torch's own stream
        return cls(
            config,
            model,
            tokenizer,
            seed=seed,
            keep_reference=keep_reference,
            keep_initial=keep_initial,
            critic=critic,
            deterministic=deterministic,
            adapters=names,
        )

    @property
    def learner(self) -> Learner:
        """What trains the first adapter of the open job; of the first adapter, where no job is open."""
        return self._learners[self._name(None)]

    @property
    def num_parameters(self) -> int:
        """Number of weights; tied ones count once."""
        return sum(parameter.numel() for parameter in self.model.module.parameters())

    def _call(self, function: Callable[[], T], adapter: str | None = None) -> T:
        """Returns what `function` returns, computed in the sampler's thread, by an adapter or else by the job's."""

        def compute() -> T:
            self.model.use_adapter(self._name(adapter))
            return function()

        try:
            return self._sampler.call(compute)
        except (MemoryError, RuntimeError) as cause:
            if not is_out_of_memory(cause):
                raise
            fix = "lower finetuning.policy.batch.micro_batch_tokens, policy.max_context or policy.max_batch"
            raise OutOfMemory(f"too little memory: {cause}; {fix}") from cause

    def begin_job(self, *adapters: str) -> None:
        """Closes admission and waits until no reply is in flight.

        Args:
            adapters: What the job trains, while others go on to serve; none: the first.

        Raises:
            EngineError: A job is open already.
        """
        job = Job(tuple(map(self._name, adapters)) or (self.policy.adapter,))
        if self._open_job is not None and self._open_job.adapters != job.adapters:
            raise EngineError(f"a job of {self._open_job} is open already; end_job() or rollback() it first")
        for name in job.adapters:
            self.policies[name].close_gate()
        self._job = job

    @property
    def _open_job(self) -> Job | None:
        return self._job if self._job is not None and self._job.is_open else None

    def _name(self, adapter: str | None) -> str:
        """Returns the name of an adapter; None: the first of the open job, or else the first."""
        name = adapter or (self._open_job.adapters[0] if self._open_job is not None else self.policy.adapter)
        if name not in self.policies:
            raise EngineError(f"there is no adapter {name}, only {', '.join(self.policies)}")
        return name

    def _in_job(self, what: str, adapter: str | None) -> str:
        """Returns the name of an adapter that the open job may change; None: its first."""
        if self._open_job is None:
            raise EngineError(f"{what}: no job is open; begin_job() first")
        if adapter is not None and adapter not in self._open_job.adapters:
            raise EngineError(f"{what}: the open job is one of {self._open_job}, not of {adapter}")
        return self._name(adapter)

    def score(self, samples: Sequence[TrainingSample], needs: Needs, adapter: str | None = None) -> None:
        """Fills what an algorithm asks for: `old_logprobs` by the weights as they are, `ref_logprobs`, `values`.

        Args:
            samples: The samples.
            needs: What is asked for; with adapters the reference is the model without any, whatever they began from.
            adapter: By which; None: the open job's first, or else the first.

        Raises:
            EngineError: There is no reference, or no critic.
        """
        self._scorer.require(reference=needs.ref_logprobs, values=needs.values)
        if needs.old_logprobs is True or (needs.old_logprobs and self.model.dtype.itemsize < 4):
            for sample, logprobs in zip(samples, self.logprobs(samples, adapter), strict=True):
                sample.old_logprobs = logprobs
        if needs.ref_logprobs:
            found = self._call(lambda: self._scorer.ref_logprobs(samples))
            for sample, logprobs in zip(samples, found, strict=True):
                sample.ref_logprobs = logprobs
        if needs.values:
            values = self._call(lambda: self._scorer.values(samples))
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
        adapter: str | None = None,
    ) -> UpdateReport:
        """Trains on the samples, within a job.

        Args:
            samples: With credit.
            loss: The loss by name.
            progress_start: Share of the run that is done before the job, in [0, 1].
            progress_end: Share that is done after it.
            epoch: Orders of samples derive from it.
            adapter: Which of the job's adapters learns; None: its first.

        Raises:
            ConfigError: There is no such loss.
            EngineError: No job of the adapter is open, or the weights were no finite numbers after it.
        """
        name, progress = self._in_job("update", adapter), Progress(progress_start, progress_end, epoch)
        return self._call(lambda: self._update(name, samples, loss, progress), name)

    def _update(self, name: str, samples: Sequence[TrainingSample], loss: LossSpec, progress: Progress) -> UpdateReport:
        learner = self._changing(name)
        report = learner.update(samples, loss, progress)
        moved = {**learner.parameters, **learner.state()}
        # a sum takes a third of the time of a look at each number; finite ones may overflow it, hence both
        doubtful = {name: value for name, value in moved.items() if not torch.isfinite(value.sum())}
        broken = [name for name, value in doubtful.items() if not torch.isfinite(value).all()]
        if report.num_updates and broken:
            raise EngineError(
                f"after the job {len(broken)} of {len(moved)} tensors are not finite, {broken[0]} among them; a lower "
                "finetuning.policy.optimizer.learning_rate may do, or a checkpoint from before"
            )
        return report

    def step(
        self,
        samples: Sequence[TrainingSample],
        loss: Loss,
        *,
        progress: float = 0.0,
        entropy_grad: bool = False,
        adapter: str | None = None,
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
            adapter: Which of the job's adapters learns; None: its first.

        Returns:
            `loss`, `grad_norm`, `lr` and what the loss reports; None if the step was refused.

        Raises:
            EngineError: No job of the adapter is open, nothing can be trained, or the loss has another shape.
        """
        name = self._in_job("step", adapter)
        usable = [sample for sample in samples if sample.num_trained and sample.weight > 0]
        if not usable:
            raise EngineError("step: no sample has a trained token and a weight")

        return self._call(lambda: self._changing(name).step(usable, loss, progress, entropy_grad=entropy_grad), name)

    def end_job(self) -> None:
        """Ends the job; admission opens when somebody publishes, or by itself for the first request."""
        if (job := self._open_job) is None:
            raise EngineError("end_job: no job is open")
        job.is_open = False
        for name in job.adapters:
            self.policies[name].end_job()

    def rollback(self) -> None:
        """Puts all of a job's weights and optimizers back to before `begin_job`; the old versions serve again.

        Raises:
            EngineError: No job has begun since the last version was published.
        """
        job = self._job
        if job is None or not (job.is_open or job.is_changed):
            raise EngineError("rollback: no job has begun since the last version was published")
        if job.is_changed:
            self._call(job.restore)
        self._job = None
        for policy in map(self.policies.__getitem__, job.adapters):
            policy.end_job(policy.version)
            policy.open(policy.version)

    def logprobs(self, samples: Sequence[TrainingSample], adapter: str | None = None) -> list[FloatArray]:
        """Returns log p of each sample's trained tokens at their temperatures, `[T]` each, 0 elsewhere.

        Args:
            samples: The samples.
            adapter: By which; None: the open job's first, or else the first.
        """
        return self._call(lambda: self._scorer.logprobs(samples), adapter)

    def replies(self, said: Sequence[TokenLogprobs], *, reference: bool = False, values: bool = False) -> Replies:
        """Returns log-probs of given replies as rows, with gradient where it is on and the model is the trained one.

        Args:
            said: Prompt, tokens and temperature of each.
            reference: By the model as it was loaded, without gradient.
            values: By the critic too.

        Raises:
            EngineError: There is no reference, or no critic.
        """
        self._scorer.require(reference=reference, values=values)
        grad = torch.is_grad_enabled() and not reference  # as it is here, not in the sampler's thread
        return self._call(lambda: self._scorer.replies(said, reference=reference, values=values, grad=grad))

    def _score_tokens(self, token_ids: Sequence[Sequence[int]], adapter: str | None = None) -> list[FloatArray]:
        return self.logprobs([plain_sample(row) for row in token_ids], adapter)

    def save(self, folder: str | Path, version: int, adapter: str | None = None) -> None:
        """Writes a checkpoint that transformers loads as it is, with what training needs beside it.

        One that stands there already is replaced once the new one is whole and on disk.

        Args:
            folder: Where to.
            version: Version of the weights.
            adapter: Which adapter, in a folder of its own; None: the open job's first, or else the first.

        Raises:
            StorageError: It cannot be written.
        """
        write_folder(Path(folder), lambda staged: self.write(staged, version, adapter), version=version)

    def write(self, folder: Path, version: int, adapter: str | None = None) -> None:
        """Writes a checkpoint's files into a new folder, without making them durable."""
        name, begun = self._name(adapter), self._sampler.num_begun
        learner = self._learners[name]
        self._call(lambda: checkpoint.write(folder, self.model, self.tokenizer, learner, version, begun), name)

    def load_weights(self, folder: str | Path, adapter: str | None = None) -> None:
        """Loads a checkpoint or a plain model into this engine, in place, when no reply is in flight.

        The optimizer goes on where the checkpoint left it, and starts anew from a plain model. Within a job the job
        stays open. Otherwise it is a job of its own, which ends: `publish` opens admission, or the first request
        does, on the checkpoint's version.

        Args:
            folder: The checkpoint, or the model.
            adapter: Which adapter gets them; None: the open job's first, or else the first.

        Raises:
            EngineError: The folder holds another model; weights and job are as they were.
        """
        own_job = self._open_job is None
        if own_job:
            self.begin_job(self._name(adapter))
        name = self._in_job("load_weights", adapter)
        try:
            version = self._call(lambda: self._load(name, Path(folder)), name)
        except BaseException:
            if own_job:
                self.rollback()
            raise
        if own_job and self._job is not None:
            self._job.is_open = False
            self.policies[name].end_job(version)

    def _load(self, name: str, folder: Path) -> int | None:
        learner, training = self._changing(name), checkpoint.load_training(folder)
        checkpoint.load_weights(folder, self.model)
        if self.critic is not None:
            checkpoint.load_critic(folder, self.critic)
        if training is None:
            learner.reset()
            return None
        moments, state = training
        learner.restore(moments, state.num_steps)
        checkpoint.restore_rng(state)
        self._sampler.num_begun = max(self._sampler.num_begun, state.num_begun)
        return state.version

    def reset(self, adapter: str | None = None) -> None:
        """Puts weights and optimizer to what they were when the engine was loaded, within a job.

        Args:
            adapter: Which of the job's adapters; None: its first.

        Raises:
            EngineError: No job of the adapter is open, or what was loaded is not kept.
        """
        name = self._in_job("reset", adapter)
        if name not in self._initial:
            raise EngineError("reset: load the engine with keep_initial=True")
        self._call(lambda: self._reset(name), name)

    def _reset(self, name: str) -> None:
        self._changing(name)
        self._initial[name].restore()

    def fingerprint(self, adapter: str | None = None) -> str:
        """Returns 16 hex digits of a SHA-256 over names and bytes of all parameters, other adapters left out."""
        return self._call(self._fingerprints.of_active, adapter)

    def close(self) -> None:
        """Ends a job at its next micro-batch, fails what waits and joins the sampler's thread."""
        for learner in self._learners.values():
            learner.stopping.set()
        self._sampler.close()
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _published(self, adapter: str) -> None:
        if self._job is not None:
            self._job.forget(adapter)

    def _changing(self, name: str) -> Learner:
        """Returns the learner of an adapter of the open job, which can be rolled back from here on."""
        assert self._job is not None
        self._job.keep(name, self._learners[name])
        return self._learners[name]
