"""How an agent of `tests/clients/agents` reaches its model: two clients of this process, or a URL and a key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Connection:
    """A way to the model.

    Attributes:
        base_url: Base URL of OpenAI's API.
        api_key: The key.
        http_client: The HTTP client that the framework should use; None: its own.
        async_http_client: The same for async code.
    """

    base_url: str
    api_key: str
    http_client: Any = None
    async_http_client: Any = None

    @classmethod
    def in_process(cls, context: Any, library: str | None = None) -> Connection:
        """Returns the way without a server."""
        clients = (context.http_client(library), context.async_http_client(library))
        return cls("http://anywhere/v1", "unused", *clients)

    @property
    def openai(self) -> dict[str, Any]:
        """Arguments of `openai.OpenAI`."""
        return {"base_url": self.base_url, "api_key": self.api_key, "http_client": self.http_client}

    @property
    def async_openai(self) -> dict[str, Any]:
        """Arguments of `openai.AsyncOpenAI`."""
        return {"base_url": self.base_url, "api_key": self.api_key, "http_client": self.async_http_client}
