"""Configuration of OpenAI-compatible endpoints: URL, key, timeouts."""

from __future__ import annotations

import logging
import os
import re
import socket
import unicodedata
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Annotated, Any
from urllib.parse import SplitResult, unquote, urlsplit

from pydantic import AfterValidator, ConfigDict, Field, SecretStr, field_validator

from reinforge.errors import ConfigError, Problem
from reinforge.interfaces import Builder
from reinforge.registry import TypedConfig

logger = logging.getLogger(__name__)

OPENAI_URL = "https://api.openai.com/v1"
METADATA_NAMES = frozenset({"metadata", "metadata.google.internal", "metadata.goog", "instance-data.ec2.internal"})
METADATA_ADDRESSES = frozenset(
    map(ip_address, ("fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "192.0.0.192", "168.63.129.16"))
)
"""Of AWS, Google, Alibaba, Oracle and Azure, besides the link-local ones of nearly every cloud."""
WITH_IPV4_AT_THE_END = tuple(
    map(IPv6Network, ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48"))
)
"""IPv6 networks whose last 32 bits are an IPv4 address: compatible, mapped, translated, NAT64."""
DOTS = str.maketrans(dict.fromkeys("\u3002\uff0e\uff61", "."))
SURROUNDED = "begins or ends with whitespace, such as a line break, which is not sent"
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class EndpointConfig(TypedConfig):
    """Settings of an OpenAI-compatible endpoint: where it is, as `check` shows, and how often calls are retried."""

    model_config = ConfigDict(hide_input_in_errors=True)  # a key with a line break must not end up in a message

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

    @field_validator("api_key")
    @classmethod
    def _check_key(cls, key: SecretStr | None) -> SecretStr | None:
        return None if key is None else validate_key(key)


def validate_url(url: str) -> str:
    """Returns an endpoint's URL without a trailing slash."""
    url = url.strip().rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("expected a URL such as http://localhost:8000/v1")
    check_authority(parts, "api_key")
    if parts.query or parts.fragment:
        raise ValueError("the URL contains ? or #; write it only up to /v1")
    if parts.path.endswith("/completions"):
        raise ValueError("write the URL only up to /v1, without /chat/completions")
    return url


Url = Annotated[str, AfterValidator(validate_url)]  # a setting that is an endpoint's URL


def check_authority(parts: SplitResult, instead: str) -> None:
    """Refuses a password in a URL, for which there is a setting `instead`, and hosts that hand out secrets."""
    if parts.username or parts.password:
        raise ValueError(f"the URL contains a user or password, which would end up in logs; use {instead}")
    if is_metadata_host(parts.hostname or ""):
        raise ValueError(f"{parts.hostname} is a link-local address or a cloud's metadata service, which is blocked")


def validate_key(key: SecretStr) -> SecretStr | None:
    """Returns a key without whitespace around it, such as the line break of a file; None for an empty one."""
    text = key.get_secret_value().strip()
    if (found := re.search(r"[^!-~]", text)) is not None:
        kind = "a line break" if found[0] in "\r\n" else "a space" if found[0].isspace() else "not plain ASCII"
        where = f"character {found.start() + 1} of {len(text)} (U+{ord(found[0]):04X}) is {kind}"
        raise ValueError(f"this is not an API key: {where}; copy the key again (it is not shown here)")
    return SecretStr(text) if text else None


def is_metadata_host(host: str) -> bool:
    """Returns True for hosts that hand out a machine's secrets: link-local addresses and cloud metadata services.

    Knows the other spellings of such an address: `0xA9FEA9FE`, `::ffff:169.254.169.254`, `64:ff9b::a9fe:a9fe`.
    """
    name = unicodedata.normalize("NFKC", unquote(host)).translate(DOTS).lower().rstrip(".")
    if name in METADATA_NAMES:
        return True
    address = _parse_address(name)
    return address is not None and any(
        each.is_link_local or each in METADATA_ADDRESSES for each in (address, *_list_embedded(address))
    )


def _parse_address(name: str) -> IPv4Address | IPv6Address | None:
    """Returns the address that a host is a spelling of, or None for a name.

    Example: "169.254.169.254", "2852039166", "0251.0376.0251.0376" and "0xa9fea9fe" are the same.
    """
    try:
        return ip_address(name.partition("%")[0])
    except ValueError:
        pass
    try:
        return IPv4Address(socket.inet_aton(name))
    except (OSError, ValueError):
        return None


def _list_embedded(address: IPv4Address | IPv6Address) -> list[IPv4Address]:
    """Returns the IPv4 addresses that an IPv6 address stands for or is reached through."""
    if isinstance(address, IPv4Address):
        return []
    found = [IPv4Address(int(address) & 0xFFFFFFFF)] if any(address in net for net in WITH_IPV4_AT_THE_END) else []
    return [*found, *filter(None, (address.sixtofour, *(address.teredo or ())))]


def resolve_endpoint(config: EndpointConfig, environ: Mapping[str, str] | None = None) -> tuple[str, SecretStr | None]:
    """Returns the URL and the key; OPENAI_API_KEY is only used with OPENAI_BASE_URL or OpenAI's endpoint."""
    if config.base_url is not None:
        return config.base_url, config.api_key
    environ = os.environ if environ is None else environ
    try:
        url = validate_url(environ.get("OPENAI_BASE_URL") or OPENAI_URL)
    except ValueError as error:
        raise ConfigError(Problem("base_url", f"the environment variable OPENAI_BASE_URL: {error}")) from None
    key = config.api_key or _read_key(environ)
    if key is None and url == OPENAI_URL:
        fix = "set OPENAI_API_KEY or api_key: ${VAR}, or set the base_url of another endpoint"
        raise ConfigError(Problem("api_key", "OPENAI_API_KEY is not set, but OpenAI's endpoint needs a key", fix))
    return url, key


def _read_key(environ: Mapping[str, str]) -> SecretStr | None:
    written = environ.get("OPENAI_API_KEY", "")
    try:
        key = validate_key(SecretStr(written))
    except ValueError as error:
        raise ConfigError(Problem("api_key", f"the environment variable OPENAI_API_KEY: {error}")) from None
    if written != written.strip():
        logger.warning("OPENAI_API_KEY %s", SURROUNDED)
    return key


def warn_about_api_key(config: EndpointConfig, url: str, path: tuple[str, str], builder: Builder) -> None:
    """Warns if an API key has whitespace around it or would be sent unencrypted."""
    where = ".".join(path)
    written = builder.loaded.data.get(path[0], {}).get(path[1], {}).get("api_key")
    if isinstance(written, str) and written != written.strip():
        variable = builder.loaded.placeholders.get((*path, "api_key"))
        logger.warning("%s.api_key%s %s", where, f" ({variable})" if variable else "", SURROUNDED)
    parts = urlsplit(url)
    if config.api_key is not None and parts.scheme == "http" and parts.hostname not in LOOPBACK:
        logger.warning("%s: the API key is sent to %s unencrypted; use https", where, parts.hostname)


def find_entry_name(entries: Mapping[str, Any], config: Any) -> str:
    return next((name for name, entry in entries.items() if entry is config), "?")
