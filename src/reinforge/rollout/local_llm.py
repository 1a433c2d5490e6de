"""`llms.<name>._type: local`: a model in this process that is not trained: a target, an opponent, a baseline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from reinforge.config.schema import FinetuneConfig, LLMConfig, PolicyConfig
from reinforge.dialects.tool_calls import with_tool_calls
from reinforge.errors import ConfigError, Problem
from reinforge.registry import register_llm
from reinforge.rollout.threads import in_daemon_thread
from reinforge.types.request import ModelReply, ModelRequest
from reinforge.types.sample import FloatArray

if TYPE_CHECKING:
    from reinforge.engine import Engine


class LocalLLMConfig(LLMConfig, name="local"):
    """A frozen model in this process; it draws as the agent asks, and is never trained."""

    model: str = Field(min_length=1, description="Folder, hub id, or the name of a bundled model, bundled:NAME.")
    tokenizer: str | None = Field(default=None, description="Folder or hub id; null: the model's.")
    chat_template: str | None = Field(default=None, description="Jinja text or a file; null: the tokenizer's.")
    precision: Literal["float32", "bfloat16"] = Field(default="float32", description="Type of the weights.")
    max_context: int | None = Field(default=None, ge=8, description="Longest prompt and reply; null: the model's.")
    max_batch: int = Field(default=64, ge=1, description="Replies drawn at the same time.")


class LocalLLM:
    """Calls go to an engine of its own, which never learns; it is loaded by the first call.

    Args:
        policy: The model.
        run: Seed, device and whether replies are to be the same bits.
    """

    is_policy = False

    def __init__(self, policy: PolicyConfig, run: FinetuneConfig):
        self.policy, self.run = policy, run
        self._engine: Engine | None = None
        self._loading = asyncio.Lock()

    @property
    def model_name(self) -> str:
        """The model's name."""
        return str(self.policy.model)

    async def sample(self, request: ModelRequest) -> ModelReply:
        """Draws one reply; tool calls in its text are read in the family's format."""
        server = (await self._loaded()).policy
        return with_tool_calls(await server.sample(request), request, server.chat_template)

    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Returns log p of each token given those before it, at temperature 1: one `[T]` each, 0 for the first."""
        return await (await self._loaded()).policy.score(token_ids)

    async def close(self) -> None:
        """Gives the model back."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await in_daemon_thread(engine.close, "llm-close")

    async def _loaded(self) -> Engine:
        async with self._loading:
            if self._engine is None:
                from reinforge.engine import Engine  # torch is loaded here and nowhere before

                run = self.run
                self._engine = await in_daemon_thread(
                    lambda: Engine.load(self.policy, seed=run.seed, device=run.device, deterministic=run.deterministic),
                    "llm-load",
                )
        return self._engine


@register_llm(config_type=LocalLLMConfig)
async def local_llm(config: LocalLLMConfig, builder: Any) -> AsyncIterator[LocalLLM]:
    """Yields the model, looked at but not yet loaded, and gives it back at the end."""
    from reinforge.engine.model.preflight import check_policy

    wanted = config.model_dump()
    wanted["model"] = await builder.get_bundled(config.model)
    policy = PolicyConfig(**wanted)
    if problems := check_policy(policy):
        raise ConfigError([Problem(p.path.removeprefix("finetuning.policy."), p.message, p.fix) for p in problems])
    model = LocalLLM(policy, builder.config.finetuning)
    try:
        yield model
    finally:
        await model.close()
