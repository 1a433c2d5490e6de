"""The engine: one model that samples and trains, behind plain blocking calls.

engine = Engine.load(config, seed=0)
await engine.policy.sample(request)          # any number of requests at once, from any event loop
engine.begin_job()                           # closes admission and waits for replies in flight
engine.score(samples, needs)
report = engine.update(samples, loss, progress_start=0.0, progress_end=0.1)
metrics = engine.step(samples, lambda batch, logprobs_BT: -logprobs_BT)         # or single steps with your own loss
engine.accumulate(samples, loss); engine.apply(AdamSettings(1e-4))              # or one step from several calls
engine.end_job()
await engine.policy.publish(version)         # or engine.rollback()
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakMethod

import numpy as np
import torch

from reinforge.config.finetuning_blocks import InFlight
from reinforge.config.policy import PolicyConfig
from reinforge.engine import checkpoint
from reinforge.engine.callers import deliver_replies, report_tokens
from reinforge.engine.devices import Destination, is_out_of_memory, repeat_sums
from reinforge.engine.jobs import EngineJobs
from reinforge.engine.learning_rate import count_weights, fill_in_learning_rate, fill_in_stages
from reinforge.engine.losses.base import Loss, find_loss
from reinforge.engine.model.causal_model import DEFAULT_ADAPTER, CausalModel, Fingerprinter
from reinforge.engine.model.dtype import fill_in_dtype
from reinforge.engine.model.heads import ValueHead
from reinforge.engine.model.loading import DTYPES, load_model, load_tokenizer, pick_device
from reinforge.engine.model.preflight import check_adapters
from reinforge.engine.policy import EmbeddedPolicy
from reinforge.engine.prompts.chat_template import PromptRenderer
from reinforge.engine.request_codec import RequestCodec, find_end_tokens
from reinforge.engine.sampling.sampler import ReplySampler
from reinforge.engine.training.collate import make_plain_sample
from reinforge.engine.training.job import LearnerSnapshot
from reinforge.engine.training.learner import JobProgress, Learner
from reinforge.engine.training.micro_batches import choose_micro_batch_tokens
from reinforge.engine.training.pipeline import PipelineStages
from reinforge.engine.training.scoring import LogprobScorer, choose_unscored
from reinforge.engine.training.shared_prefix import make_sharing_masks
from reinforge.errors import BackendUnavailable, ConfigError, EngineError, OutOfMemory
from reinforge.files import write_folder
from reinforge.types.request import TokenLogprobs
from reinforge.types.sample import (
    AdamSettings,
    FloatArray,
    GradientReport,
    LossSpec,
    Needs,
    Sharding,
    TrainingSample,
    UpdateReport,
    add_mismatched_samples,
)
from reinforge.types.seeding import stable_seed

if TYPE_CHECKING:
    from reinforge.engine.model.adapter_weights import AdapterWeights
    from reinforge.engine.model.served_copy import ServedCopy
    from reinforge.engine.model_description import ModelDescription
    from reinforge.engine.sampling.grammar import GrammarCompiler
    from reinforge.engine.training.data_parallel import DataParallel
    from reinforge.engine.training.reply_logprobs import ReplyLogprobs

T = TypeVar("T")


class Engine:
    """Owns the model, its sampler and its learner. Calls block; run them in a worker thread.

    Where a method takes an `adapter`, None means the first one of the open job, or the first of all. A method that
    changes its weights needs an open job for it, and raises an `EngineError` without.

    Attributes:
        policy: Samples from the published weights; with several adapters, with the first one.
        policies: The policy of each adapter by name; only "default" if the adapters have no names.
        tokenizer: The Hugging Face tokenizer with its chat template.
        model: The trained model.
        reference: A frozen copy of the loaded weights; None without `keep_reference`, and with adapters, where the
            model without its adapters is the reference.
        critic: The value head; None without `critic`.
    """

    def __init__(
        self,
        config: PolicyConfig,
        model: CausalModel,
        tokenizer: Any,
        *,
        seed: int,
        adapters: Sequence[str] = (DEFAULT_ADAPTER,),
        keep_reference: bool = False,
        keep_initial: bool = False,
        critic: bool = False,
        deterministic: bool = False,
        stages: Mapping[str, PolicyConfig] | None = None,
        replica: int = 0,
        serves_during_jobs: bool = False,
        in_flight: InFlight = "wait",
        samples_elsewhere: bool = False,
        goes_to: Destination | None = None,
    ):
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.samples_elsewhere, self._goes_to = samples_elsewhere, goes_to
        self._copies_reference = keep_reference and not model.has_adapters
        waits = goes_to is not None
        self.reference = model.make_frozen_copy() if self._copies_reference and not waits else None
        self.critic = ValueHead(model, shares_trunk=config.critic.shares_trunk) if critic else None
        self._has_trained = False
        ends = find_end_tokens(model.module, tokenizer)
        self._renderer = PromptRenderer(tokenizer, ends, history=config.history)
        self._grammars: GrammarCompiler | None = None
        self._grammars_lock = threading.Lock()
        self._served: ServedCopy | None = None
        if serves_during_jobs:
            from reinforge.engine.model.served_copy import ServedCopy  # for overlap alone

            self._served = ServedCopy(model, adapters)
        sampler_type = ReplySampler
        if model.fast_paths.serving and model.device.type == "cpu":
            from reinforge.engine.sampling.guessing_sampler import GuessingSampler as sampler_type  # for servers alone
        self._sampler = sampler_type(
            model if self._served is None else self._served.model,
            ends,
            max_num_seqs=config.max_num_seqs,
            seed=stable_seed(seed, "sampler", replica) if replica else stable_seed(seed, "sampler"),
            deliver=deliver_replies,
            report=report_tokens,
            adapters=adapters,
            prefix_cache_bytes=config.kv_cache_mb * 2**20,
            deterministic=deterministic,
            is_used=not samples_elsewhere,
        )
        self.policies: dict[str, EmbeddedPolicy] = {}
        self._jobs = EngineJobs(self.policies, adapters[0])
        for name in adapters:
            model_name = (config.model or model.config.model_type) if len(adapters) == 1 else name
            copy_weights = None if self._served is None else partial(self._served.update, name)
            self.policies[name] = self._make_policy(name, model_name, copy_weights, in_flight)
        self._turns = None if self._served is None else self._served.make_turns(self._sampler.run_for)
        self.policy = self.policies[adapters[0]]
        masks = None if waits else self._call(lambda: make_sharing_masks(model))
        self._scorer = LogprobScorer(
            model,
            masks,
            choose_micro_batch_tokens(config.batch.micro_batch_tokens, model),
            keeps_reference=keep_reference,
            reference=self.reference,
            critic=self.critic,
            take_turns=self._turns,
        )
        moves_reference = keep_reference and len(adapters) == 1
        self._stages = PipelineStages(stages or {}, self._scorer, moves_reference=moves_reference)
        self._learners = {
            name: self._call(lambda: Learner(model, config, seed, masks, self.critic, waits=waits), name)
            for name in adapters
        }
        for learner in self._learners.values():
            learner.take_turns = self._turns
        self._keeps_initial, self._initial = keep_initial, dict[str, LearnerSnapshot]()
        if not waits:
            self._keep_initial()
        trained = [self._call(lambda: model.trained_parameters.values(), name) for name in adapters]
        self._fingerprints = Fingerprinter(model, [parameter for each in trained for parameter in each])
        self._threads_before: int | None = None
        if deterministic:  # the order of a sum depends on the number of threads
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
        loss: LossSpec | None = None,
        stages: Mapping[str, tuple[PolicyConfig, LossSpec]] | None = None,
        frozen: bool = False,
        replica: int = 0,
        serves_during_jobs: bool = False,
        in_flight: InFlight = "wait",
        samples_elsewhere: bool = False,
        serves_only: bool = False,
        divides: bool = False,
    ) -> Engine:
        """Returns an engine whose policy serves version 0.

        Args:
            config: The model, its tokenizer and its training; `init: random` draws random weights.
            seed: Seed of random weights, of sampling and of the order of samples.
            device: `auto`, `cpu`, `cuda` or `mps`.
            keep_reference: Keep a frozen copy of the weights for `Needs.ref_logprobs`.
            keep_initial: Keep a copy of the trained weights for `reset`.
            critic: Train a value head for `Needs.values`.
            deterministic: Sample the same bits whatever else runs in the batch: one thread, one prompt per prefill.
            adapters: Names of LoRA adapters that share one sampler and are trained separately; none: one policy.
            loss: The loss of the jobs, for the default learning rate.
            stages: Stages of a pipeline by name: the policy with the optimizer, schedule and batches of each, and its
                loss.
            frozen: Leave torch's global generator alone: dropout of another engine draws from it, at a position that
                a resumed run has restored.
            replica: Number of this engine among those that hold the same weights; each has its own random stream for
                requests without a seed.
            serves_during_jobs: Sample from a copy of the trained weights, which serves the published version while a
                job trains: with adapters a copy of these alone.
            in_flight: What happens to the replies in flight when weights are published; see `LimitsConfig`.
            samples_elsewhere: Another program samples, whose log-probs are never exactly the learner's.
            serves_only: Nothing is trained, so log-probs may differ a little where that is faster on a CPU: decode
                with float16 copies of float32 weights, and several tokens of a reply at once; never if deterministic.
            divides: `join_peers` comes next, and will probably shard the model: until then its weights stay in their
                files, which the processes of a machine share. Takes effect with `samples_elsewhere`.

        Raises:
            ConfigError: The configuration is not valid for this model or machine.
            EngineError: The model cannot be loaded or sampled from.
        """
        if problems := check_adapters(config, adapters, critic=critic):
            raise ConfigError(problems)
        names, rng = tuple(adapters) or (DEFAULT_ADAPTER,), torch.get_rng_state()
        config = fill_in_dtype(config, device, deterministic=deterministic)
        if deterministic:
            repeat_sums(pick_device(device), enabled=True)
        with checkpoint.hide_progress_bars(), ThreadPoolExecutor(1) as thread:  # whose libgomp pool ends with it
            waits = divides and samples_elsewhere
            load = partial(load_model, config, seed, device, names, deterministic=deterministic, stays_in_files=waits)
            model = thread.submit(load).result()
        model.fast_paths = replace(model.fast_paths, serving=serves_only and not deterministic)
        tokenizer, config = load_tokenizer(config), fill_in_learning_rate(config, model, loss)
        if frozen:
            torch.set_rng_state(rng)
        else:
            torch.manual_seed(stable_seed(seed, "torch"))  # for dropout, which uses torch's global generator
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
            stages=fill_in_stages(stages or {}, config, model),
            replica=replica,
            serves_during_jobs=serves_during_jobs,
            in_flight=in_flight,
            samples_elsewhere=samples_elsewhere,
            goes_to=Destination(pick_device(device), DTYPES[config.dtype]) if waits else None,
        )

    @property
    def device(self) -> torch.device:
        """Where the model trains."""
        return self.model.device if self._goes_to is None else self._goes_to.device

    def _keep_initial(self) -> None:
        """Keeps a copy of the trained weights for `reset`, if one is wanted."""
        for name, learner in self._learners.items() if self._keeps_initial else ():
            self._initial[name] = self._call(partial(LearnerSnapshot, learner), name)

    def describe_model(self) -> ModelDescription:
        from reinforge.engine.model_description import describe_model  # for another program that samples

        return describe_model(self.model, self.config, self.policy.ends)

    def get_codec(self, name: str) -> RequestCodec:
        """Returns what renders the requests of an adapter and decodes its replies, in this process."""
        return self.policies[name].codec

    def join_peers(
        self, peers: DataParallel | None, sharding: Sharding = "replicate", processes_here: int = 1
    ) -> Sharding:
        """Shares every optimizer step from now on with other processes, which make the same calls.

        Args:
            peers: The processes; None: this one trains alone.
            sharding: `replicate`: each trains the whole model; `full`: weights, gradients and optimizer state are
                sharded across them while they train; `auto`: so only if one of them has too little memory otherwise.
            processes_here: Processes that share this machine's memory.

        Returns:
            What was chosen of `replicate` and `full`.

        Raises:
            BackendUnavailable: The model is sharded across other processes already.
            EngineError: The model cannot be sharded.
        """
        if self.is_sharded:
            raise BackendUnavailable(
                "the model is sharded across the processes that it began with, and part of its optimizer state is lost "
                "with each of them; resume the run from its last checkpoint with --resume"
            )
        for learner in self._learners.values():
            learner.peers = peers
        obstacle = self._find_sharding_obstacle()
        fits = peers is None or sharding == "replicate" or (sharding == "auto" and bool(obstacle))
        if fits or (sharding == "auto" and not self._call(partial(self._needs_sharding, processes_here))):
            self._call(self._settle_whole)
            return "replicate"
        if obstacle:
            raise EngineError(f"sharding: full is not possible: {obstacle}")
        self._call(self._settle_divided)
        self._keep_initial()
        return "full"

    def _settle_whole(self) -> None:
        """Takes the weights out of the files in which they waited; prefixes are not shared then."""
        if self._goes_to is None:
            return
        from reinforge.engine.training.sharding import place_weights

        place_weights(self.model.module, self._goes_to)
        self.model.device = self._goes_to.device
        self.model.module.to(self.model.device)  # what else it has
        self._settle()
        if self._copies_reference:
            self.reference = self._scorer.reference = self.model.make_frozen_copy()
        for name, learner in self._learners.items():
            self.model.use_adapter(name)
            learner.use_parameters(self.model.trained_parameters)
        self._keep_initial()

    def _settle_divided(self) -> None:
        from reinforge.engine.training.sharding import ShardedModel

        goes_to = self._goes_to
        self.learner.shard(stays_divided=self.samples_elsewhere, goes_to=goes_to)
        sharded = self.learner.sharded
        if sharded is None or not sharded.stays_divided:
            return
        self._scorer.sharded, self._fingerprints.join = sharded, sharded.join
        if self._copies_reference:
            reference = ShardedModel(self.reference or self.model, sharded.peers, stays_divided=True, goes_to=goes_to)
            self.reference, self._scorer.reference, self._scorer.sharded_reference = None, None, reference
            reference.divide()
        sharded.divide()
        if goes_to is not None:
            self._settle()

    def _settle(self) -> None:
        """Adapts what depends on where the model is, and on its data type."""
        self._goes_to = None
        if self.critic is not None:
            self.critic.to(self.model.device)
        tokens = choose_micro_batch_tokens(self.config.batch.micro_batch_tokens, self.model)
        self._scorer.max_tokens = tokens
        for learner in self._learners.values():
            learner.micro_batch_tokens = tokens

    @property
    def is_sharded(self) -> bool:
        """True if other processes hold parts of the optimizer state, without which no checkpoint can be written."""
        return any(learner.sharded is not None for learner in self._learners.values())

    def _needs_sharding(self, processes_here: int) -> bool:
        from reinforge.engine.training.memory_need import needs_sharding  # for several processes alone

        return needs_sharding(self.learner, processes_here, has_trained=self._has_trained)

    def _find_sharding_obstacle(self) -> str:
        if len(self._learners) > 1:
            return f"{len(self._learners)} adapters are trained separately, and only one set of weights can be sharded"
        if self.config.quantization is not None:
            return f"weights in {self.config.quantization} (finetuning.policy.quantization) cannot be sharded by rows"
        if self._served is not None:
            return "replies are sampled while a job trains (max_staleness), from weights that would be sharded"
        return ""

    @property
    def learner(self) -> Learner:
        return self._learners[self._jobs.resolve_adapter(None)]

    @property
    def num_parameters(self) -> int:
        return sum(map(count_weights, self.model.module.parameters()))

    def _call(self, function: Callable[[], T], adapter: str | None = None) -> T:
        """Runs `function` in the sampler's thread, with an adapter (or the job's) active, and returns its result."""

        def compute() -> T:
            self.model.use_adapter(self._jobs.resolve_adapter(adapter))
            with nullcontext() if self._turns is None else self._turns.share_thread():
                return function()

        try:
            return self._sampler.call(compute)
        except (MemoryError, RuntimeError) as cause:
            if not is_out_of_memory(cause):
                raise
            fix = "lower finetuning.policy.batch.micro_batch_tokens, policy.max_model_len or policy.max_num_seqs"
            raise OutOfMemory(f"out of memory: {cause}; {fix}") from cause

    def begin_job(self, *adapters: str) -> None:
        """Closes admission and waits until no reply is in flight; with `serves_during_jobs` replies continue.

        Args:
            adapters: The adapters that the job trains, while the others keep serving; none: the first.

        Raises:
            EngineError: A job is already open.
        """
        self._jobs.begin(*adapters)
        for learner in self._learners.values():
            learner.share_done = 0.0

    @property
    def has_job(self) -> bool:
        """True if `rollback` has something to undo: a job has begun since the last version was published."""
        return self._jobs.can_undo

    @property
    def share_done(self) -> float:
        """How much of the open or last job is done, in [0, 1], by the optimizer steps of all adapters."""
        return float(np.mean([learner.share_done for learner in self._learners.values()]))

    def use_stage(self, stage: str, adapter: str | None = None) -> None:
        """Trains by the settings of a stage from now on, within an open job.

        A new stage begins with a new optimizer, and its reference is the current weights (with several adapters: the
        model without them).

        Args:
            stage: Its name, as given to `load`.
        """
        name = self._jobs.require_adapter("use_stage", adapter)
        self._stages.require(stage)
        learner, version = self._learners[name], self.policies[name].version
        if learner.stage != stage:
            self._call(lambda: self._stages.begin(stage, self._snapshot_learner(name), version), name)
        else:
            self._stages.require_reference(learner)

    @property
    def missing_reference(self) -> int | None:
        """Version of the reference that the current stage needs and does not have; None: it has it, or needs none."""
        return self._stages.find_missing_reference(self.learner)

    def load_reference(self, folder: str | Path, version: int) -> None:
        """Makes a checkpoint's weights the reference of the current stage.

        Raises:
            EngineError: The folder holds another model.
        """
        self._call(lambda: self._stages.load_reference(Path(folder)))
        self._stages.reference_version = version

    def score(
        self, samples: Sequence[TrainingSample], needs: Needs, adapter: str | None = None, *, defer: bool = False
    ) -> None:
        """Sets what the algorithm needs on each sample: `old_logprobs`, `ref_logprobs`, `values`.

        Args:
            needs: What to compute; with adapters the reference is the model without any adapter.
            defer: Leave `inexact` log-probs to the next `update`, whose first step computes them anyway.

        Raises:
            EngineError: There is no reference, or no critic.
        """
        self._scorer.require(reference=needs.ref_logprobs, values=needs.values)
        is_inexact = self.samples_elsewhere or self.model.dtype.itemsize < 4
        unscored = choose_unscored(samples, needs, is_inexact=is_inexact, defer=defer)
        if unscored or self._scorer.sharded is not None:  # the passes of a divided model are made by all processes
            for sample, logprobs in zip(unscored, self.logprobs(unscored, adapter), strict=True):
                sample.old_logprobs = logprobs
        if needs.ref_logprobs:
            scored = add_mismatched_samples(samples)
            reference = self._call(lambda: self._scorer.ref_logprobs(scored))
            for sample, logprobs in zip(scored, reference, strict=True):
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
        """Trains on the samples, within an open job.

        Args:
            progress_start: Share of the run that is done before the job, in [0, 1].
            epoch: Seeds the order of samples.

        Raises:
            ConfigError: No loss has that name.
            EngineError: Weights are not finite after the update.
        """
        name, progress = self._jobs.require_adapter("update", adapter), JobProgress(progress_start, progress_end, epoch)
        return self._call(lambda: self._update(name, samples, loss, progress), name)

    def _update(
        self, name: str, samples: Sequence[TrainingSample], loss: LossSpec, progress: JobProgress
    ) -> UpdateReport:
        learner, self._has_trained = self._snapshot_learner(name), True
        report = learner.update(samples, loss, progress)
        broken = learner.describe_broken_tensors()
        if report.num_updates and broken:
            raise EngineError(
                f"after the job {broken}; lower finetuning.policy.optimizer.learning_rate, or resume from an earlier "
                "checkpoint"
            )
        return report

    def accumulate(
        self, samples: Sequence[TrainingSample], loss: LossSpec, *, backward: bool = True, adapter: str | None = None
    ) -> GradientReport | None:
        """Adds the gradient of a loss, summed over the trained tokens, to those of earlier calls, for `apply`.

        Changes no weights, so replies are sampled before and after it, and no job need be open.

        Args:
            samples: Samples with what the loss reads; how they are spread over calls does not change the sum.
            backward: False: return loss and log-probs, and add no gradient.

        Returns:
            The sums of this call; None if a number is not finite, which leaves the earlier gradients as they were.

        Raises:
            ConfigError: No loss has that name.
            EngineError: No sample has a trained token.
        """
        usable = [replace(sample, weight=1.0) for sample in samples]
        if not usable or not all(sample.num_trained for sample in usable):
            raise EngineError("accumulate: every sample needs a trained token")
        bound, name = partial(find_loss(loss), **loss.params), self._jobs.resolve_adapter(adapter)
        return self._call(lambda: self._learners[name].accumulate(usable, bound, backward=backward), name)

    def apply(self, settings: AdamSettings, adapter: str | None = None) -> dict[str, float] | None:
        """Makes one optimizer step with the gradients that `accumulate` has added up, within an open job.

        Args:
            settings: Of this step; the configuration's learning rate and schedule play no part.

        Returns:
            `grad_norm` before clipping and `lr`; None if the gradient was not finite: no step was made, and the
            gradients are gone.

        Raises:
            EngineError: Weights are not finite after the step.
        """
        name = self._jobs.require_adapter("apply", adapter)

        def apply() -> dict[str, float] | None:
            learner = self._snapshot_learner(name)
            metrics = learner.apply(settings)
            if metrics is not None and (broken := learner.describe_broken_tensors()):
                raise EngineError(f"after the step {broken}; lower the learning rate")
            return metrics

        return self._call(apply, name)

    def clear_gradients(self, adapter: str | None = None) -> None:
        """Drops the gradients that `accumulate` has added up."""
        name = self._jobs.resolve_adapter(adapter)
        self._call(self._learners[name].clear_gradients, name)

    def make_adapter(self, *, rank: int, seed: int, alpha: float = 32.0) -> AdapterWeights:
        """Returns the first weights of an adapter of this rank, which leave the model unchanged; see `put_adapter`."""
        from reinforge.engine.model.adapter_weights import make_adapter_weights  # for sessions alone

        name = self.policy.adapter
        return self._call(lambda: make_adapter_weights(self.model, name, rank=rank, seed=seed, alpha=alpha), name)

    def read_adapter(self, adapter: str | None = None) -> AdapterWeights:
        from reinforge.engine.model.adapter_weights import read_adapter_weights  # for sessions alone

        name = self._jobs.resolve_adapter(adapter)
        return self._call(lambda: read_adapter_weights(self.model, name), name)

    def read_adapter_folder(self, folder: str | Path) -> AdapterWeights:
        """Returns the weights of a saved adapter, without loading it into the model.

        Raises:
            EngineError: The folder holds none, or one of other layers.
        """
        from reinforge.engine.model.adapter_weights import load_adapter_weights  # for sessions alone

        name = self.policy.adapter
        return self._call(lambda: load_adapter_weights(self.model, name, Path(folder)), name)

    def put_adapter(self, weights: AdapterWeights, adapter: str | None = None) -> None:
        """Gives an adapter other weights, and an empty optimizer without gradients, within an open job.

        Raises:
            EngineError: The weights are those of other layers.
        """
        from reinforge.engine.model.adapter_weights import write_adapter_weights  # for sessions alone

        name = self._jobs.require_adapter("put_adapter", adapter)

        def put() -> None:
            learner = self._snapshot_learner(name)
            write_adapter_weights(self.model, name, weights)
            learner.clear_gradients()
            learner.reset()

        self._call(put, name)

    def step(
        self,
        samples: Sequence[TrainingSample],
        loss: Loss,
        *,
        progress: float = 0.0,
        entropy_grad: bool = False,
        adapter: str | None = None,
    ) -> dict[str, float] | None:
        """Makes one optimizer step on all of the samples with your own loss, within an open job.

        The step is the one that `update` makes: micro-batches, shared prefixes and gradient clipping; a loss or a
        gradient that is not finite changes no bit of the weights.

        Args:
            samples: Samples with what the loss reads; whole pairs, for a preference loss.
            loss: `loss(batch, logprobs_BT)` returns `[B, T]`, `[B]` or one number with gradient: alone, in a tuple with
                a dict of metrics, or as a `LossOutput`. One number is taken as the mean over the batch's samples.
            progress: Share of the run that is done, in [0, 1]; it sets the learning rate.
            entropy_grad: The loss reads `batch.entropies` with gradient.

        Returns:
            `loss`, `grad_norm`, `lr` and the loss's metrics; None if the step was skipped.

        Raises:
            EngineError: No sample can be trained, or the loss has the wrong shape.
        """
        name = self._jobs.require_adapter("step", adapter)
        usable = [sample for sample in samples if sample.num_trained and sample.weight > 0]
        if not usable:
            raise EngineError("step: no sample has a trained token and a weight above 0")

        def step() -> dict[str, float] | None:
            return self._snapshot_learner(name).step(usable, loss, progress, entropy_grad=entropy_grad)

        return self._call(step, name)

    def set_learning_rate(self, rate: float, adapter: str | None = None) -> None:
        """Sets the peak learning rate of the next jobs; the optimizer keeps its state."""
        learner = self._learners[self._jobs.resolve_adapter(adapter)]
        self._call(lambda: learner.set_learning_rate(rate), adapter)

    def end_job(self) -> None:
        """Ends the job; `publish` opens admission again, or else the first request does."""
        self._jobs.end()

    def rollback(self) -> None:
        """Restores the weights and optimizers from before `begin_job` and serves the old versions again.

        Raises:
            EngineError: No job has begun since the last version was published.
        """
        self._jobs.undo(self._call)

    def logprobs(self, samples: Sequence[TrainingSample], adapter: str | None = None) -> list[FloatArray]:
        """Returns log p of each sample's trained tokens at their temperatures, `[T]` each, 0 elsewhere."""
        return self._call(lambda: self._scorer.logprobs(samples), adapter)

    def reply_logprobs(
        self, replies: Sequence[TokenLogprobs], *, reference: bool = False, values: bool = False
    ) -> ReplyLogprobs:
        """Returns log-probs of given replies, one row per reply, with gradient if grad mode is on.

        Args:
            replies: Prompt, tokens and temperature of each.
            reference: Score with the reference model, without gradient.
            values: Add the critic's values.

        Raises:
            EngineError: There is no reference, or no critic.
        """
        self._scorer.require(reference=reference, values=values)
        grad = torch.is_grad_enabled() and not reference  # of this thread, not of the sampler's
        return self._call(lambda: self._scorer.reply_logprobs(replies, reference=reference, values=values, grad=grad))

    def _score_tokens(self, token_ids: Sequence[Sequence[int]], adapter: str | None = None) -> list[FloatArray]:
        vocab_size = self.model.vocab_size
        for row in token_ids:
            if any(not 0 <= token < vocab_size for token in row):
                raise ValueError(f"cannot score tokens that the model does not have; it has {vocab_size}")
        samples = [make_plain_sample(row) if len(row) > 1 else None for row in token_ids]  # a first token has no log p
        scored = iter(self.logprobs([sample for sample in samples if sample is not None], adapter))
        return [
            np.zeros(len(row), np.float32) if sample is None else next(scored)
            for row, sample in zip(token_ids, samples, strict=True)
        ]

    def save(self, folder: str | Path, version: int, adapter: str | None = None, *, with_training: bool = True) -> None:
        """Writes a checkpoint that transformers (or PEFT) can load, with the training state next to it.

        An existing checkpoint is replaced only after the new one is complete and on disk.

        Args:
            with_training: False: write the model alone, without the training state.

        Raises:
            StorageError: The checkpoint cannot be written.
        """
        write_folder(Path(folder), lambda staged: self.write(staged, version, adapter, with_training), version=version)

    def write(self, folder: Path, version: int, adapter: str | None = None, with_training: bool = True) -> None:
        """Writes a checkpoint's files into a new folder, without making them durable.

        Where the model is sharded, all processes call it together, and each writes its part.
        """
        name, num_begun = self._jobs.resolve_adapter(adapter), self._sampler.num_begun
        what = self.tokenizer, self._learners[name], version, num_begun
        self._call(lambda: checkpoint.write(folder, *what, with_training=with_training), name)

    def write_base(self, folder: Path) -> None:
        """Writes the model without its adapters, and its tokenizer, into a new folder, for another program."""
        from reinforge.engine.model_description import write_base_model

        self._call(lambda: write_base_model(folder, self.model, self.tokenizer, self.learner.sharded))

    def load_weights(self, folder: str | Path, adapter: str | None = None) -> None:
        """Loads a checkpoint or a plain model into this engine, in place, when no reply is in flight.

        The optimizer state comes from the checkpoint; a plain model starts with a fresh one. Inside an open job, the
        job stays open. Otherwise this is a separate job: afterwards `publish`, or else the first request, opens
        admission with the checkpoint's version.

        Raises:
            EngineError: The folder holds another model; weights and job are unchanged.
        """
        own_job = self._jobs.open_job is None
        if own_job:
            self.begin_job(self._jobs.resolve_adapter(adapter))
        name = self._jobs.require_adapter("load_weights", adapter)
        try:
            version = self._call(lambda: self._load(name, Path(folder)), name)
        except BaseException:
            if own_job:
                self.rollback()
            raise
        if own_job:
            self._jobs.end(version)

    def _load(self, name: str, folder: Path) -> int | None:
        learner = self._snapshot_learner(name)
        is_scarce = learner.sharded is not None  # then no memory holds the older state, or both parts of the new one
        if is_scarce:
            learner.reset()
        training = None if is_scarce else checkpoint.load_training(folder, learner)
        checkpoint.load_weights(folder, self.model, learner.sharded)
        training = checkpoint.load_training(folder, learner) if is_scarce else training
        if self.critic is not None:
            checkpoint.load_critic(folder, self.critic)
        if training is None:
            learner.load_state({}, 0)
            return None
        moments, state = training
        self._stages.restore(state.stage, learner, state.stage_version, self.config)
        learner.load_state(moments, state.num_steps)
        checkpoint.restore_rng(state)
        self._sampler.num_begun = max(self._sampler.num_begun, state.num_begun)
        return state.version

    def reset(self, adapter: str | None = None) -> None:
        """Restores weights and optimizer to their state after loading, within an open job.

        Raises:
            EngineError: The engine was loaded without `keep_initial`.
        """
        name = self._jobs.require_adapter("reset", adapter)
        if name not in self._initial:
            raise EngineError("reset: the initial weights were not kept; load the engine with keep_initial=True")
        self._call(lambda: self._reset(name), name)

    def _reset(self, name: str) -> None:
        self._snapshot_learner(name)
        self._initial[name].restore()

    def fingerprint(self, adapter: str | None = None) -> str:
        """Returns 16 hex digits of a SHA-256 over names and bytes of all parameters, except other adapters'."""
        return self._call(self._fingerprints.compute, adapter)

    def add_adapter(self, name: str, folder: str | Path, model_name: str | None = None) -> EmbeddedPolicy:
        """Serves a saved LoRA adapter beside the others, in the same batch, from now on; it cannot be trained.

        Replies that are being sampled continue.

        Raises:
            EngineError: The name is taken, the engine has no adapters, or the folder belongs to another model.
        """
        if name in self.policies or not name.isidentifier():
            in_use = ", ".join(self.policies)
            raise EngineError(f"add_adapter: {name} is taken or is not an identifier; in use: {in_use}")
        if self._served is not None:
            raise EngineError("add_adapter: an engine that serves during jobs has the adapters that it was loaded with")

        from reinforge.engine.served_adapters import add_saved_adapter  # for a server alone

        def add() -> None:
            add_saved_adapter(self.model, name, Path(folder))
            self._sampler.add_adapter(name)

        self._call(add)
        policy = self.policies[name] = self._make_policy(name, model_name or name)
        return policy

    def _make_policy(
        self,
        adapter: str,
        model_name: str,
        copy_weights: Callable[[], None] | None = None,
        in_flight: InFlight = "wait",
    ) -> EmbeddedPolicy:
        return EmbeddedPolicy(
            self._sampler,
            self._renderer,
            model_name,
            adapter=adapter,
            grammars=partial(_call_weakly, WeakMethod(self._open_grammars)),
            score=partial(_call_weakly, WeakMethod(self._score_tokens), adapter=adapter),
            fingerprint=partial(_call_weakly, WeakMethod(self.fingerprint), adapter),
            published=partial(_call_weakly, WeakMethod(self._jobs.drop_snapshot), adapter),
            copy_weights=copy_weights,
            in_flight=in_flight,
        )

    def _open_grammars(self) -> GrammarCompiler:
        """Returns what compiles grammars; most runs need none."""
        from reinforge.engine.sampling.grammar import GrammarCompiler

        with self._grammars_lock:
            if self._grammars is None:
                self._grammars = GrammarCompiler(self.tokenizer, self.model.vocab_size, self.policy.ends)
            return self._grammars

    def remove_adapter(self, name: str) -> None:
        """Frees an adapter of `add_adapter` once no reply of it is in flight; requests that wait for it fail.

        Raises:
            EngineError: There is none of this name, or it is one that the engine trains.
        """
        if name not in self.policies or name in self._learners:
            raise EngineError(f"remove_adapter: {name} was not added by add_adapter")
        from reinforge.engine.served_adapters import remove_adapter

        del self.policies[name]
        self._sampler.pause(name)

        def remove() -> None:
            self.model.use_adapter(self.policy.adapter)
            self._sampler.remove_adapter(name)
            remove_adapter(self.model, name)

        self._call(remove)

    def close(self) -> None:
        """Stops a running job at its next micro-batch, fails waiting requests and joins the sampler's thread."""
        for learner in self._learners.values():
            learner.stopping.set()
        self._sampler.close()
        if self._grammars is not None:
            self._grammars.close()
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            repeat_sums(self.model.device, enabled=False)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _snapshot_learner(self, name: str) -> Learner:
        self._jobs.take_snapshot(name, self._learners[name])
        return self._learners[name]


def _call_weakly(method: WeakMethod[Callable[..., T]], *arguments: Any, **settings: Any) -> T:
    """Calls a method without keeping its object alive, which keeps the caller: only a garbage collection frees both."""
    if (found := method()) is None:
        raise EngineError("the engine is closed")
    return found(*arguments, **settings)
