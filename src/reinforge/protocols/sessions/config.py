"""The configuration of `_type: http`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import ConfigDict, Field, SecretStr, field_validator

from reinforge.config.schema import TrainerAdapterConfig
from reinforge.rollout.models.openai_config import EndpointConfig, validate_key, validate_url


class HttpAdapterConfig(TrainerAdapterConfig, name="http"):
    """Samples and trains on a `reinforge serve --sessions` elsewhere, which has the model."""

    model_config = ConfigDict(hide_input_in_errors=True)  # a key with a line break must not end up in a message
    key_aliases: ClassVar[dict[str, str]] = {"base_url": "url"}

    url: str = Field(description="URL of the server, such as http://gpu1:8000. `base_url` is also accepted.")
    api_key: SecretStr | None = Field(
        default=None, description="Key of the server. Write ${VAR}, not the key itself; null: no key is sent."
    )
    base_model: str | None = Field(
        default=None,
        min_length=1,
        description="The server's name of the model to train; null: finetuning.policy.model.",
    )
    timeout_s: float = Field(default=600.0, gt=0, description="Time limit of one attempt at a request in seconds.")
    max_retries: int = Field(default=4, ge=0, description="Retries after 408, 409, 429, 5xx and lost connections.")
    max_connections: int = Field(default=64, ge=1, description="Maximum number of concurrent requests.")

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        return validate_url(url).removesuffix("/v1")

    @field_validator("api_key")
    @classmethod
    def _check_key(cls, key: SecretStr | None) -> SecretStr | None:
        return None if key is None else validate_key(key)

    @property
    def endpoint(self) -> EndpointConfig:
        """The same settings as those of an endpoint."""
        return EndpointConfig(
            timeout_s=self.timeout_s, max_retries=self.max_retries, max_connections=self.max_connections
        )
