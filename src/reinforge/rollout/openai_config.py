"""Configuration of endpoints that speak OpenAI's API: URLs, keys, timeouts."""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator

from reinforge.config.schema import LLMConfig
from reinforge.errors import ConfigError, Problem
from reinforge.registry import TypedConfig

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)

OPENAI_URL = "https://api.openai.com/v1"


METADATA_HOSTS = frozenset({"fd00:ec2::254", "100.100.100.200", "metadata.google.internal"})


LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class EndpointConfig(TypedConfig):
    """Where an endpoint is that speaks OpenAI's API, and how patiently it is asked."""

    base_url: str | None = Field(
        default=None, description="URL up to /v1; null: OPENAI_BASE_URL, or OpenAI's own with OPENAI_API_KEY."
    )
    api_key: SecretStr | None = Field(
        default=None, description="Sent as a bearer token; write ${VAR}, never the key itself. Null: none is sent."
    )
    timeout_s: float = Field(default=60.0, gt=0, description="Seconds that one attempt may take.")
    max_retries: int = Field(
        default=2, ge=0, description="Further attempts after 408, 409, 429, 5xx and lost connections."
    )
    max_connections: int = Field(default=64, ge=1, description="Calls in flight at the same time.")

    @field_validator("base_url")
    @classmethod
    def _is_an_endpoint(cls, url: str | None) -> str | None:
        return None if url is None else checked_url(url)


class OpenAILLMConfig(EndpointConfig, LLMConfig, name="openai"):
    """A model behind any OpenAI-compatible URL; arguments of the agent's own win over those given here."""

    model_name: str = Field(min_length=1, description="The model's name at the endpoint.")
    temperature: float | None = Field(default=None, ge=0, description="Where the agent asks for none.")
    top_p: float | None = Field(default=None, gt=0, le=1, description="Where the agent asks for none.")
    max_tokens: int | None = Field(default=None, ge=1, description="Longest reply where the agent asks for none.")
    extra_body: dict[str, Any] = Field(default_factory=dict, description="Further arguments of the endpoint's own.")


def checked_url(url: str) -> str:
    """Returns an endpoint's URL without a slash at its end.

    Raises:
        ValueError: It is none, holds a password, or points at a cloud's metadata service.
    """
    url = url.strip().rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("expected a URL such as http://localhost:8000/v1")
    if parts.username or parts.password:
        raise ValueError("the URL holds a user or password, which would end up in logs; use api_key")
    if parts.query or parts.fragment:
        raise ValueError("the URL holds ? or #; give it up to /v1")
    if parts.path.endswith("/completions"):
        raise ValueError("give the URL up to /v1, without /chat/completions")
    if is_metadata(parts.hostname):
        raise ValueError(f"{parts.hostname} is a link-local address or a cloud's metadata service; it is never called")
    return url


def is_metadata(host: str) -> bool:
    """True for hosts that answer a machine's own secrets: link-local addresses and clouds' metadata services."""
    if host.lower().rstrip(".") in METADATA_HOSTS:
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_link_local


def endpoint_of(config: EndpointConfig, environ: Mapping[str, str] = os.environ) -> tuple[str, SecretStr | None]:
    """Returns URL and key; the environment's key goes only where the environment or the default says.

    Raises:
        ConfigError: OpenAI's own endpoint, and no key; or the environment's URL is none.
    """
    if config.base_url is not None:
        return config.base_url, config.api_key
    try:
        url = checked_url(environ.get("OPENAI_BASE_URL") or OPENAI_URL)
    except ValueError as error:
        raise ConfigError(Problem("base_url", f"the environment variable OPENAI_BASE_URL: {error}")) from None
    key = config.api_key or (SecretStr(environ["OPENAI_API_KEY"]) if environ.get("OPENAI_API_KEY") else None)
    if key is None and url == OPENAI_URL:
        fix = "set it, write api_key: ${VAR}, or give the base_url of another endpoint"
        raise ConfigError(Problem("api_key", "OPENAI_API_KEY is not set, and OpenAI's endpoint needs a key", fix))
    return url, key


def warn_of_key(config: EndpointConfig, url: str, path: tuple[str, str], builder: Any) -> None:
    """Says what a careful person would not do with a key.

    Args:
        config: The endpoint.
        url: Where it is.
        path: Where the configuration stands, such as `("llms", "judge")`.
        builder: Of the run.
    """
    where = ".".join(path)
    if config.api_key is not None and (*path, "api_key") not in builder.loaded.placeholders:
        logger.warning("%s.api_key stands in the configuration itself; write ${VAR} and set the variable", where)
    parts = urlsplit(url)
    if config.api_key is not None and parts.scheme == "http" and parts.hostname not in LOOPBACK:
        logger.warning("%s: the key goes to %s without encryption; use https", where, parts.hostname)


def entry_of(entries: Mapping[str, Any], config: Any) -> str:
    """Returns the name under which a component's configuration stands in its section."""
    return next((name for name, entry in entries.items() if entry is config), "?")
