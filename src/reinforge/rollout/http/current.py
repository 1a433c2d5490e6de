"""Clients that an agent may build once, where its module is imported; each call finds the episode that it is made in.

    client = reinforge.current_openai()

    def agent(item, llm, context):
        reply = client.chat.completions.create(model="agent", messages=[...])

The episode is found by a context variable; see `reinforge.rollout.context` about threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reinforge.rollout.context import get_episode
from reinforge.rollout.http.clients import (
    build_async_http_client,
    build_async_openai,
    build_http_client,
    build_openai,
)
from reinforge.rollout.http.endpoint import EpisodeEndpoint

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI


def current_openai(**options: Any) -> OpenAI:
    """Returns a client of the `openai` package that an agent may build once, before any episode.

    Each call is a model call of the episode in which it is made; see `EpisodeContext.openai`.
    """
    return build_openai(_find_current, options)


def current_async_openai(**options: Any) -> AsyncOpenAI:
    return build_async_openai(_find_current, options)


def current_http_client(library: str | None = None, **options: Any) -> Any:
    """Returns an `httpx.Client` that an agent may build once; the episode in which a request is made answers it."""
    return build_http_client(_find_current, library, options)


def current_async_http_client(library: str | None = None, **options: Any) -> Any:
    return build_async_http_client(_find_current, library, options)


def _find_current() -> EpisodeEndpoint:
    return get_episode().context.endpoint
