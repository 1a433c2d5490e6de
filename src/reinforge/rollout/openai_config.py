"""Configuration of OpenAI-compatible endpoints: URL, key, timeouts."""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator

from reinforge.config.schema import LLMConfig
from reinforge.errors import ConfigError, Problem
from reinforge.interfaces import Builder
from reinforge.registry import TypedConfig

logger = logging.getLogger(__name__)

OPENAI_URL = "https://api.openai.com/v1"
METADATA_HOSTS = frozenset({"fd00:ec2::254", "100.100.100.200", "metadata.google.internal"})
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class EndpointConfig(TypedConfig):
    """Settings of an OpenAI-compatible endpoint: where it is and how often calls are retried."""

    base_url: str | None = Field(
        default=None,
        description="URL up to /v1. Null: OPENAI_BASE_URL if set, else OpenAI's endpoint; both use OPENAI_API_KEY.",
    )
    api_key: SecretStr | None = Field(
        default=None, description="Sent as a bearer token. Write ${VAR}, not the key itself; null: no key is sent."
    )
    timeout_s: float = Field(default=60.0, gt=0, description="Time limit of one attempt in seconds.")
    max_retries: int = Field(default=2, ge=0, description="Retries after 408, 409, 429, 5xx and lost connections.")
    max_connections: int = Field(default=64, ge=1, description="Maximum number of concurrent calls.")

    @field_validator("base_url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        return None if url is None else validate_url(url)


class OpenAILLMConfig(EndpointConfig, LLMConfig, name="openai"):
    """A model behind any OpenAI-compatible URL; the agent's own arguments take precedence over these defaults."""

    model_name: str = Field(min_length=1, description="The model's name at the endpoint.")
    temperature: float | None = Field(default=None, ge=0, description="Default temperature.")
    top_p: float | None = Field(default=None, gt=0, le=1, description="Default top_p.")
    max_tokens: int | None = Field(default=None, ge=1, description="Default max_tokens.")
    extra_body: dict[str, Any] = Field(default_factory=dict, description="Additional fields of the request body.")


def validate_url(url: str) -> str:
    """Returns an endpoint's URL without a trailing slash.

    Raises:
        ValueError: It is not a URL, contains a password, or points to a cloud's metadata service.
    """
    url = url.strip().rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("expected a URL such as http://localhost:8000/v1")
    if parts.username or parts.password:
        raise ValueError("the URL contains a user or password, which would end up in logs; use api_key")
    if parts.query or parts.fragment:
        raise ValueError("the URL contains ? or #; write it only up to /v1")
    if parts.path.endswith("/completions"):
        raise ValueError("write the URL only up to /v1, without /chat/completions")
    if is_metadata_host(parts.hostname):
        raise ValueError(f"{parts.hostname} is a link-local address or a cloud's metadata service, which is blocked")
    return url


def is_metadata_host(host: str) -> bool:
    """Returns True for hosts that hand out a machine's secrets: link-local addresses and cloud metadata services."""
    if host.lower().rstrip(".") in METADATA_HOSTS:
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_link_local


def resolve_endpoint(config: EndpointConfig, environ: Mapping[str, str] | None = None) -> tuple[str, SecretStr | None]:
    """Returns the URL and the key; OPENAI_API_KEY is only used with OPENAI_BASE_URL or OpenAI's endpoint.

    Raises:
        ConfigError: There is no key for OpenAI's endpoint, or OPENAI_BASE_URL is invalid.
    """
    if config.base_url is not None:
        return config.base_url, config.api_key
    environ = os.environ if environ is None else environ
    try:
        url = validate_url(environ.get("OPENAI_BASE_URL") or OPENAI_URL)
    except ValueError as error:
        raise ConfigError(Problem("base_url", f"the environment variable OPENAI_BASE_URL: {error}")) from None
    key = config.api_key or (SecretStr(environ["OPENAI_API_KEY"]) if environ.get("OPENAI_API_KEY") else None)
    if key is None and url == OPENAI_URL:
        fix = "set OPENAI_API_KEY or api_key: ${VAR}, or set the base_url of another endpoint"
        raise ConfigError(Problem("api_key", "OPENAI_API_KEY is not set, but OpenAI's endpoint needs a key", fix))
    return url, key


def warn_about_api_key(config: EndpointConfig, url: str, path: tuple[str, str], builder: Builder) -> None:
    """Warns if an API key is written in the configuration or would be sent unencrypted.

    Args:
        config: The endpoint's settings.
        url: Its URL.
        path: The path of the settings in the configuration, such as `("llms", "judge")`.
        builder: The run's builder.
    """
    where = ".".join(path)
    if config.api_key is not None and (*path, "api_key") not in builder.loaded.placeholders:
        logger.warning("%s.api_key is written in the configuration; use ${VAR} and set the variable", where)
    parts = urlsplit(url)
    if config.api_key is not None and parts.scheme == "http" and parts.hostname not in LOOPBACK:
        logger.warning("%s: the API key is sent to %s unencrypted; use https", where, parts.hostname)


def find_entry_name(entries: Mapping[str, Any], config: Any) -> str:
    """Returns the name of a component's entry in its section of the configuration."""
    return next((name for name, entry in entries.items() if entry is config), "?")
