"""Tinker's service as a few calls: gradients, optimizer steps, checkpoints, sampling. The rest of the adapter uses only
these, so a test double has nothing else to imitate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field, SecretStr

from reinforge.config.schema import TrainerAdapterConfig
from reinforge.errors import BackendError, BackendUnavailable, ConfigError, Problem
from reinforge.rollout.models.endpoint_config import Url
from reinforge.types.request import SamplingParams
from reinforge.types.sample import AdamSettings, FloatArray

if TYPE_CHECKING:
    from collections.abc import Iterator


class TinkerAdapterConfig(TrainerAdapterConfig, name="tinker"):
    """Samples and trains on Tinker's service, or on a server of its protocol (`reinforge serve MODEL --tinker`)."""

    fine_tune_from_scratch: ClassVar[bool] = False

    base_model: str = Field(min_length=1, description="The service's name of the model to train an adapter of.")
    base_url: Url | None = Field(
        default=None, description="URL of the service. Null: TINKER_BASE_URL if set, else Tinker's own."
    )
    api_key: SecretStr | None = Field(
        default=None, description="Key of the service. Write ${VAR}, not the key itself; null: TINKER_API_KEY."
    )
    rank: int = Field(default=32, ge=1, description="Rank of the adapter.")
    train_mlp: bool = Field(default=True, description="Train adapters of the MLP layers.")
    train_attn: bool = Field(default=True, description="Train adapters of the attention layers.")
    train_unembed: bool = Field(default=True, description="Train an adapter of the output layer.")
    checkpoint_ttl_s: int | None = Field(
        default=None, ge=3600, description="Seconds after which the service may delete a checkpoint; null: never."
    )


SDK = "0.38"  # the version of the SDK that this was made for


@dataclass(frozen=True, slots=True)
class ServiceDatum:
    """One sequence for the service: position i of the input predicts target i."""

    token_ids: Sequence[int]
    targets: Sequence[int]
    numbers: Mapping[str, FloatArray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServiceReply:
    """One sampled sequence: its tokens, their log-probs, and `stop` or `length`."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: str


class TinkerService:
    """What the adapter asks of the service. Calls block, but for `sample` and `score`."""

    def __init__(self, config: TinkerAdapterConfig, seed: int):
        self._tinker = import_sdk()
        key = None if config.api_key is None else config.api_key.get_secret_value()
        self._ttl = config.checkpoint_ttl_s
        with self._translate("the service"):
            self._client = self._tinker.ServiceClient(base_url=config.base_url, api_key=key)
            self._training = self._client.create_lora_training_client(
                base_model=config.base_model,
                rank=config.rank,
                seed=seed,
                train_mlp=config.train_mlp,
                train_attn=config.train_attn,
                train_unembed=config.train_unembed,
            ).result()
        self._sampler: Any = None

    @contextmanager
    def _translate(self, what: str) -> Iterator[None]:
        """Raises our errors for those of the SDK, which has already tried again."""
        try:
            yield
        except self._tinker.APIConnectionError as error:
            raise BackendUnavailable(f"Tinker: {what}: {error}") from error
        except (self._tinker.TinkerError, ValueError, RuntimeError) as error:
            raise BackendError(f"Tinker: {what}: {error}") from error

    def forward_backward(
        self, data: Sequence[ServiceDatum], loss: str, config: Mapping[str, float]
    ) -> dict[str, float]:
        """Adds the gradient of a loss, summed over tokens, to those since the last step; returns its metrics."""
        with self._translate("forward_backward"):
            made = [self._make_datum(datum) for datum in data]
            return dict(self._training.forward_backward(made, loss, dict(config) or None).result().metrics)

    def forward(self, data: Sequence[ServiceDatum]) -> list[FloatArray]:
        with self._translate("forward"):
            made = [self._make_datum(datum) for datum in data]
            outputs = self._training.forward(made, "cross_entropy").result().loss_fn_outputs
            return [np.asarray(output["logprobs"].to_numpy(), np.float32) for output in outputs]

    def _make_datum(self, datum: ServiceDatum) -> Any:
        tinker = self._tinker
        inputs: dict[str, Any] = {"target_tokens": np.asarray(datum.targets, np.int64)}
        inputs |= {name: np.asarray(values, np.float32) for name, values in datum.numbers.items()}
        if not datum.numbers:
            inputs["weights"] = np.zeros(len(datum.targets), np.float32)
        return tinker.Datum(model_input=tinker.ModelInput.from_ints(list(datum.token_ids)), loss_fn_inputs=inputs)

    def optim_step(self, settings: AdamSettings) -> dict[str, float]:
        with self._translate("optim_step"):
            (beta1, beta2), limit = settings.betas, settings.max_grad_norm
            params = self._tinker.AdamParams(
                learning_rate=settings.learning_rate,
                beta1=beta1,
                beta2=beta2,
                eps=settings.eps,
                weight_decay=settings.weight_decay,
                grad_clip_norm=limit or 0.0,
            )
            return dict(self._training.optim_step(params).result().metrics or {})

    def save(self, name: str) -> str:
        with self._translate("save_state"):
            return str(self._training.save_state(name, ttl_seconds=self._ttl, overwrite=True).result().path)

    def load(self, path: str) -> None:
        with self._translate(f"loading {path}"):
            self._training = self._client.create_training_client_from_state_with_optimizer(path).result()

    def publish(self) -> None:
        with self._translate("save_weights_for_sampler"):
            self._sampler = self._training.save_weights_and_get_sampling_client().result()

    async def sample(self, prompt: Sequence[int], params: SamplingParams) -> ServiceReply:
        asked = self._tinker.SamplingParams(
            max_tokens=params.max_tokens,
            seed=params.seed,
            stop=list(params.stop) or None,
            temperature=params.temperature,
        )
        with self._translate("sample"):
            response = await self._sampler.sample(self._tinker.ModelInput.from_ints(list(prompt)), 1, asked)
        [sequence] = response.sequences
        return ServiceReply(tuple(sequence.tokens), tuple(sequence.logprobs or ()), sequence.stop_reason)

    async def score(self, token_ids: Sequence[int]) -> FloatArray:
        """Returns log p of each token under the published weights; 0 for the first."""
        with self._translate("compute_logprobs"):
            row = await self._sampler.compute_logprobs(self._tinker.ModelInput.from_ints(list(token_ids)))
        return np.asarray([0.0 if value is None else value for value in row], np.float32)

    def close(self) -> None:
        with self._translate("close"):
            self._client.close("success").result()


OpenService = Callable[["TinkerAdapterConfig", int], TinkerService]  # opens the service with a configuration and a seed


def import_sdk() -> Any:
    try:
        import tinker
    except ModuleNotFoundError:
        fix = 'pip install "reinforge[tinker]"'
        raise ConfigError(Problem("", f"the trainer adapter `tinker` needs the package tinker {SDK}", fix)) from None
    return tinker
