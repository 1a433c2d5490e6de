"""Tinker's service as the engine of a run: jobs of our loop become its gradients and optimizer steps.

begin_job -> update: for each step forward_backward, optim_step -> end_job -> publish: a sampler of the new weights
rollback: back to the checkpoint from before the job
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reinforge.adapters.hosted_model import HOSTED_MODEL, HostedModel
from reinforge.config.policy import PolicyConfig
from reinforge.errors import BackendError, ConfigError, EngineError, Problem
from reinforge.interfaces import PolicyServer
from reinforge.protocols.tinker.service import OpenService, ServiceDatum, TinkerAdapterConfig, TinkerService
from reinforge.types.request import Message, ModelReply, ModelRequest, SamplingParams, TokenLogprobs
from reinforge.types.sample import AdamSettings, FloatArray, LossSpec, Needs, TrainingSample, UpdateReport

if TYPE_CHECKING:
    from reinforge.engine.request_codec import RequestCodec


TOLERANCE = 0.5  # the service samples and trains with other kernels, in bfloat16
FIXED = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "logit_bias": ()}
"""Settings that must have these values: the service's losses are over the whole vocabulary."""


class TinkerPolicy(PolicyServer):
    tolerance = TOLERANCE

    def __init__(self, service: TinkerService, codec: RequestCodec, name: str):
        self._service, self._codec, self._name, self._version = service, codec, name, 0
        self.max_model_len = codec.max_model_len

    @property
    def version(self) -> int:
        return self._version

    @property
    def model_name(self) -> str:
        return self._name

    @property
    def chat_template(self) -> str | None:
        return self._codec.renderer.chat_template

    async def sample(self, request: ModelRequest) -> ModelReply:
        params = request.sampling
        _check_params(request)
        sampled = self._codec.build_request(request, None)
        asked = SamplingParams(params.temperature, max_tokens=sampled.limit, stop=params.stop, seed=params.seed)
        sampled.version = self._version
        reply = await self._service.sample(sampled.prompt, asked)
        sampled.token_ids, sampled.logprobs = tuple(reply.token_ids), tuple(reply.logprobs)
        sampled.finish_reason = reply.stop_reason
        return self._codec.build_reply(request, sampled)

    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[FloatArray]:
        return [await self._service.score(row) for row in token_ids]

    async def encode(self, request: ModelRequest, reply: Message) -> TokenLogprobs:
        return await self._codec.encode(request, reply)

    async def publish(self, version: int) -> None:
        await asyncio.to_thread(self._service.publish)
        self._version = version

    async def fingerprint(self) -> str:
        return f"tinker-{self._version}"


def _check_params(request: ModelRequest) -> None:
    for name, value in FIXED.items():
        if getattr(request.sampling, name) != value:
            raise ValueError(f"{name} is {getattr(request.sampling, name)}; with Tinker's service it must be {value}")
    if request.sampling.temperature not in (0, 1):
        raise ValueError(
            f"temperature is {request.sampling.temperature}; with Tinker's service it must be 1 (or 0 in validation): "
            "its losses compute log-probs at temperature 1"
        )
    if request.grammar is not None or request.tool_choice not in ("auto", "none"):
        raise ValueError("Tinker's service enforces no grammar: leave response_format and tool_choice out")
    if request.num_top_logprobs:
        raise ValueError("top_logprobs is not available with Tinker's service")


ALGORITHM = "finetuning.algorithm"
UNUSED: dict[str, tuple[Any, ...]] = {
    "dual_clip": (None,),
    "constant_length": (None,),
    "kl_coef": (0, 0.0),
    "entropy_coef": (0, 0.0),
}
"""Settings of our losses that the service does not have, with the values at which they do nothing."""
IGNORED = ("tis_cap", "kl_estimator")  # settings that matter only for what the service does not do
CLIPPED = {"clipped_pg": ("ppo", 0.2, 0.2), "cispo": ("cispo", None, 4.0), "gspo": ("gspo", 3e-4, 4e-4)}
"""Our name -> the service's, and our defaults of `clip_low` and `clip_high`."""


def translate_loss(spec: LossSpec) -> tuple[str, dict[str, float]]:
    """Returns the service's name and settings of a loss.

    Example: clipped_pg with clip_low 0.2 and clip_high 0.3 -> ppo with thresholds 0.8 and 1.3.
    """
    if spec.name == "cross_entropy":
        return spec.name, {}
    if spec.name not in CLIPPED:
        message = f"Tinker's service has no loss like {spec.name}"
        fix = "use an algorithm with clipped_pg, cispo, gspo or cross_entropy, such as grpo, or _type: local"
        raise ConfigError(Problem(ALGORITHM, message, fix))
    for name, value in spec.params.items():
        if name in UNUSED and value not in UNUSED[name]:
            message = f"{name} is {value}, which the losses of Tinker's service do not have"
            raise ConfigError(Problem(f"{ALGORITHM}.{name}", message, "remove it, or use _type: local"))
    name, default_low, default_high = CLIPPED[spec.name]
    low, high = spec.params.get("clip_low", default_low), spec.params.get("clip_high", default_high)
    if math.isinf(high):
        return "importance_sampling", {}
    return name, {"clip_low_threshold": 1 - (1.0 if low is None else low), "clip_high_threshold": 1 + high}


def build_data(samples: Sequence[TrainingSample], loss: str) -> list[ServiceDatum]:
    """Returns the samples of one optimizer step; the service sums over tokens where ours is a mean.

    sum_t w_s l_t / sum_t w_s   =   the service's sum, with each advantage times w_s / sum_t w_s
    """
    total = sum(sample.weight * sample.num_trained for sample in samples)
    data = []
    for sample in samples:
        share = np.float32(sample.weight / total)
        advantages = sample.loss_mask if sample.advantages is None else sample.advantages
        scaled = np.where(sample.loss_mask, advantages, 0).astype(np.float32) * share
        old = sample.sampling_logprobs if sample.old_logprobs is None else sample.old_logprobs
        numbers: dict[str, FloatArray] = {"logprobs": np.where(sample.loss_mask, old, 0)[1:], "advantages": scaled[1:]}
        if loss == "cross_entropy":
            numbers = {"weights": (sample.loss_mask * share).astype(np.float32)[1:]}
        elif loss == "gspo":
            numbers["sequence_ratio_mask"] = sample.loss_mask[1:].astype(np.float32)
        data.append(make_datum(sample, numbers))
    return data


def make_datum(sample: TrainingSample, numbers: Mapping[str, FloatArray] | None = None) -> ServiceDatum:
    """Returns a sample in the service's form: the input without its last token, the targets without the first."""
    tokens = sample.token_ids.tolist()
    return ServiceDatum(tokens[:-1], tokens[1:], dict(numbers or {}))


NAME = "default"
SERVICE = "tinker"


class TinkerEngine:
    """Has the methods of `Engine` that a job calls."""

    missing_reference: None = None  # None: the service has no reference
    samples_elsewhere = True

    def __init__(self, config: PolicyConfig, adapter: TinkerAdapterConfig, seed: int, open_service: OpenService):
        from reinforge.engine.model.loading import load_tokenizer
        from reinforge.engine.model_description import make_codec

        self.config, self._adapter, self._seed = config, adapter, seed
        self.tokenizer = load_tokenizer(config)
        self._service = open_service(adapter, seed % 2**31)
        codec = make_codec(
            self.tokenizer,
            ends=[self.tokenizer.eos_token_id],
            max_model_len=config.max_model_len or 4096,
            vocab_size=len(self.tokenizer),
            history=config.history,
        )
        self.policy = TinkerPolicy(self._service, codec, adapter.base_model)
        self.policies = {NAME: self.policy}
        self._peak = config.optimizer.peak
        self._num_steps, self._is_changed = 0, False
        self._saved, self._saved_steps = self._service.save("step-0"), 0
        self._service.publish()
        self._num_saves = 0

    def begin_job(self, *names: str) -> None:
        self._is_changed = False

    def score(self, samples: Sequence[TrainingSample], needs: Needs, adapter: str | None = None, **_: Any) -> None:
        """Sets `old_logprobs` where the algorithm needs the learner's own; else those of the sampler count."""
        if needs.old_logprobs is True:
            for sample, logprobs in zip(samples, self.logprobs(samples), strict=True):
                sample.old_logprobs = logprobs

    def logprobs(self, samples: Sequence[TrainingSample], adapter: str | None = None) -> list[FloatArray]:
        """Returns log p of each sample's trained tokens under the current weights, 0 elsewhere."""
        if not samples:
            return []
        rows = self._service.forward([make_datum(sample) for sample in samples])
        return [
            np.where(sample.loss_mask, np.append(np.float32(0), row), 0).astype(np.float32)
            for sample, row in zip(samples, rows, strict=True)
        ]

    def update(
        self,
        samples: Sequence[TrainingSample],
        loss: LossSpec,
        *,
        progress_start: float,
        progress_end: float,
        epoch: int = 0,
        **_: Any,
    ) -> UpdateReport:
        from reinforge.engine.training.micro_batches import plan_steps
        from reinforge.engine.training.scheduled_optimizer import learning_rate_factor

        (name, settings), own = translate_loss(loss), self.config.optimizer
        _check_samples(samples)
        steps = plan_steps(samples, self.config.batch, self._seed, epoch)
        made: list[dict[str, float]] = []
        for i, indices in enumerate(steps):
            progress = progress_start + (progress_end - progress_start) * i / len(steps)
            rate = self._peak * learning_rate_factor(self.config.schedule, self._num_steps, progress)
            self._is_changed = True
            chosen = [samples[index] for index in indices]
            metrics = self._service.forward_backward(build_data(chosen, name), name, settings)
            adam = AdamSettings(rate, own.betas, own.eps, own.weight_decay, own.max_grad_norm)
            stepped = self._service.optim_step(adam)
            self._num_steps += 1
            norms = [value for key, value in stepped.items() if "grad" in key and math.isfinite(value)]
            norm = {"grad_norm": norms[0]} if norms else {}
            made.append({"loss": metrics.get("loss:sum", math.nan), "lr": rate, **norm})
        trained = {index for indices in steps for index in indices}
        return UpdateReport(
            num_updates=len(steps),
            num_skipped_steps=0,
            num_samples=len(trained),
            num_tokens=sum(samples[index].num_trained for index in trained),
            metrics={key: float(np.mean([each[key] for each in made if key in each])) for key in (made or [{}])[0]},
        )

    def end_job(self) -> None:
        """Ends the job: its weights are saved, and served from the next `publish` on."""
        self._num_saves += 1
        self._saved = self._service.save(f"step-{self._num_steps}-{self._num_saves}")
        self._saved_steps = self._num_steps
        self._is_changed = False

    def rollback(self) -> None:
        if self._is_changed:
            self._service.load(self._saved)
            self._num_steps, self._is_changed = self._saved_steps, False

    def write(self, folder: Path, version: int, adapter: str | None = None) -> None:
        place = self._adapter.base_url or SERVICE
        HostedModel(f"{self._saved}#{self._saved_steps}", self._adapter.base_model, place).write(folder)

    def load_weights(self, folder: str | Path, adapter: str | None = None) -> None:
        saved, _, steps = HostedModel.read(Path(folder)).model.partition("#")
        if not saved.startswith("tinker://") or not steps.isdecimal():
            raise BackendError(f"{Path(folder) / HOSTED_MODEL} names no checkpoint of Tinker's service")
        self._service.load(saved)
        self._saved, self._saved_steps = saved, int(steps)
        self._num_steps, self._is_changed = int(steps), False

    def reset(self, adapter: str | None = None) -> None:
        raise EngineError("reset: Tinker's service keeps no first weights for the run")

    def use_stage(self, stage: str, adapter: str | None = None) -> None:
        raise EngineError(f"use_stage: pipelines ({stage}) are not offered with Tinker's service")

    def close(self) -> None:
        self._service.close()


def _check_samples(samples: Sequence[TrainingSample]) -> None:
    for sample in samples:
        if sample.supports is not None or (sample.temperatures[sample.loss_mask] != 1).any():
            raise BackendError(
                "Tinker's service trains tokens that were sampled at temperature 1 from the whole vocabulary only; set "
                "finetuning.sampling.temperature: 1 without top_p, top_k and min_p"
            )
