"""The configuration of `_type: tinker`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, SecretStr, field_validator

from reinforge.config.schema import TrainerAdapterConfig
from reinforge.rollout.models.openai_config import validate_url


class TinkerAdapterConfig(TrainerAdapterConfig, name="tinker"):
    """Samples and trains on Tinker's service, or on a server of its protocol (`reinforge serve MODEL --tinker`)."""

    fine_tune_from_scratch: ClassVar[bool] = False

    base_model: str = Field(min_length=1, description="The service's name of the model to train an adapter of.")
    base_url: str | None = Field(
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

    @field_validator("base_url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        return None if url is None else validate_url(url)
