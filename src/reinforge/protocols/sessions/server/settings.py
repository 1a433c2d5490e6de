"""What a client may choose for its session, as a configuration and an algorithm; the rest is the server's."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

from pydantic import ValidationError

from reinforge.config.blocks import LimitsConfig
from reinforge.config.policy import PolicyConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import ConfigError, ReinforgeError, describe_error
from reinforge.interfaces import Algorithm
from reinforge.protocols.sessions.wire import CLIENT_SETTINGS, OpenSession
from reinforge.registry import REGISTRY
from reinforge.serving.api_error import ApiError
from reinforge.serving.base_models import BaseModels

OWN_MODULES = "reinforge.algorithms."
TEACHER = "distill"
"""The algorithm with a model of the client's configuration, which is not here."""


def read_settings(opened: OpenSession, bases: BaseModels, device: str) -> FinetuneConfig:
    """Returns the configuration of a session.

    Args:
        opened: What the client asks for.
        bases: What may be trained.
        device: The server's choice.

    Raises:
        ApiError: A setting is wrong, or not the client's to choose.
    """
    policy = read_policy(opened.policy, bases.find(opened.model, "model"))
    limits = LimitsConfig(max_skipped_steps=opened.max_skipped_steps)
    return FinetuneConfig(policy=policy, seed=opened.seed, num_epochs=opened.num_epochs, device=device, limits=limits)


def read_policy(given: Mapping[str, Any], base: PolicyConfig) -> PolicyConfig:
    """Returns the policy: the server's model with a client's settings.

    Example: {"lora": {"r": 4}} -> the base's model, tokenizer, data type and limits, with adapters of rank 4.

    Args:
        given: The client's settings.
        base: The model, as the server's owner configures it.

    Raises:
        ApiError: A setting is wrong, or not the client's to choose.
    """
    if others := sorted(set(given) - set(CLIENT_SETTINGS)):
        allowed = ", ".join(CLIENT_SETTINGS)
        message = f"policy.{others[0][:100]} is the server's to choose; a client may set: {allowed}"
        raise ApiError(422, message, param="policy")
    try:
        asked = PolicyConfig(**{**given, "model": base.model})
    except (ValidationError, ConfigError, TypeError) as error:
        raise ApiError(422, f"policy: {_describe(error)}", param="policy") from None
    chosen = {name: getattr(asked, name) for name in CLIENT_SETTINGS}
    batch = asked.batch
    fitting = min(batch.micro_batch_tokens, base.batch.micro_batch_tokens)  # memory alone; the result is the same
    chosen["batch"] = batch.model_copy(update={"micro_batch_tokens": fitting})
    limits = [each for each in (asked.max_model_len, base.max_model_len) if each is not None]
    chosen["max_model_len"] = min(limits) if limits else None
    return base.model_copy(update=chosen)


@asynccontextmanager
async def make_algorithm(block: Mapping[str, Any], seed: int) -> AsyncIterator[Algorithm]:
    """Yields the algorithm of a block `{"_type": ..., ...}`; only those that come with reinforge are made.

    Args:
        block: Its type and settings.
        seed: Of the run.

    Raises:
        ApiError: There is none of that name here, or its settings are wrong.
    """
    components = {each.name: each for each in REGISTRY.components("algorithm") if each.origin.startswith(OWN_MODULES)}
    components.pop(TEACHER, None)
    name = block.get("_type")
    if name not in components:
        message = f"no algorithm {str(name)[:100]!r} is available to sessions; there are: {', '.join(components)}"
        raise ApiError(422, message, param="algorithm")
    builder = SimpleNamespace(config=SimpleNamespace(finetuning=FinetuneConfig(seed=seed)))
    try:
        config = components[name].config_type(**{key: value for key, value in block.items() if key != "_type"})
        generator = cast("AsyncGenerator[Algorithm]", components[name].factory(config, builder))
        made = await anext(generator)
    except (ValidationError, ReinforgeError, TypeError) as error:
        raise ApiError(422, f"algorithm {name}: {_describe(error)}", param="algorithm") from None
    try:
        yield made
    finally:
        await generator.aclose()


def _describe(error: Exception) -> str:
    if isinstance(error, ValidationError):
        found = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return f"{'.'.join(map(str, found['loc']))}: {found['msg']}"
    return describe_error(error)
