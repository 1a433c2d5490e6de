"""`llms.<name>._type: local`: a frozen model in this process, such as a target, an opponent or a baseline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from reinforge.config.policy import PolicyConfig
from reinforge.config.schema import FinetuneConfig, LLMConfig
from reinforge.dialects.tool_calls import parse_reply, prepare_request
from reinforge.engine import import_engine
from reinforge.engine.model.source import FAMILY, find_token_difference
from reinforge.engine.packages import check_packages
from reinforge.errors import ConfigError, EngineError, Problem
from reinforge.interfaces import Builder
from reinforge.registry import register_llm
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.types.request import ModelReply, ModelRequest
from reinforge.types.sample import FloatArray, TrainingSample

if TYPE_CHECKING:
    from reinforge.engine import Engine


class LocalLLMConfig(LLMConfig, name="local"):
    """A frozen model in this process, sampled with the agent's own settings."""

    model: str = Field(
        min_length=1,
        description="Folder (such as RUN/model of another run), hub id, GGUF file, pip:PACKAGE, or bundled:NAME for a "
        "bundled model.",
    )
    tokenizer: str | None = Field(default=None, description="Folder or hub id; null: the model's.")
    chat_template: str | None = Field(default=None, description="Jinja text or a file; null: the tokenizer's.")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Type of the weights.")
    max_model_len: int | None = Field(
        default=None, ge=8, description="Maximum tokens of prompt and reply; null: the model's."
    )
    max_num_seqs: int = Field(default=64, ge=1, description="Replies sampled at the same time.")


class LocalLLM:
    """Sends calls to its own engine, which is loaded on the first call and never trained."""

    is_policy = False

    def __init__(self, policy: PolicyConfig, run: FinetuneConfig):
        self.policy, self.run = policy, run
        self._engine: Engine | None = None
        self._loading = asyncio.Lock()

    @property
    def model_name(self) -> str:
        return str(self.policy.model)

    async def sample(self, request: ModelRequest) -> ModelReply:
        server = (await self._load_engine()).policy
        request = prepare_request(request, server.chat_template)
        return parse_reply(await server.sample(request), request, server.chat_template)

    async def count_prompt(self, request: ModelRequest) -> int | None:
        server = (await self._load_engine()).policy
        return await server.count_prompt(prepare_request(request, server.chat_template))

    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Returns the log-prob of each token given those before it, at temperature 1: `[T]` per sequence, first 0."""
        return await (await self._load_engine()).policy.score(token_ids)

    async def prepare(self, tokenizer: Any) -> None:
        engine = await self._load_engine()
        difference = find_token_difference(tokenizer.get_vocab(), engine.tokenizer.get_vocab())
        if difference is not None:
            message = f"the teacher {self.model_name} has a different tokenizer than the policy: {difference}"
            raise ConfigError(Problem("finetuning.algorithm.teacher", message, FAMILY))

    async def score_samples(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Returns log p of each sample's trained tokens, `[T]` each, 0 elsewhere.

        They are at the temperature of each token, over the tokens that it was sampled from.
        """
        engine = await self._load_engine()
        limit, size = engine.policy.max_model_len, engine.model.vocab_size
        for sample in samples:
            if len(sample) > limit:
                message = f"an episode has {len(sample)} tokens, but the context of {self.model_name} has {limit}"
                raise EngineError(f"{message}; lower finetuning.policy.max_model_len to {limit}")
            if (token := int(sample.token_ids.max())) >= size:
                raise EngineError(f"{self.model_name} has {size} tokens, so it cannot score token {token}")
        return await run_in_daemon_thread(lambda: engine.logprobs(samples), "llm-score")

    async def close(self) -> None:
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await run_in_daemon_thread(engine.close, "llm-close")

    async def _load_engine(self) -> Engine:
        async with self._loading:
            if self._engine is None:
                engine_class, run = import_engine(), self.run  # imports torch
                self._engine = await run_in_daemon_thread(
                    lambda: engine_class.load(
                        self.policy, seed=run.seed, device=run.device, deterministic=run.deterministic, frozen=True
                    ),
                    "llm-load",
                )
        return self._engine


@register_llm(config_type=LocalLLMConfig)
async def local_llm(config: LocalLLMConfig, builder: Builder) -> AsyncIterator[LocalLLM]:
    from reinforge.engine.model.preflight import check_policy, has_adapters

    settings = config.model_dump(exclude=set(LLMConfig.model_fields))
    settings["model"] = await builder.get_bundled(config.model)
    policy = PolicyConfig(**settings)
    if problems := [*check_policy(policy), *check_packages(lora=has_adapters(policy))]:
        raise ConfigError([Problem(p.path.removeprefix("finetuning.policy."), p.message, p.fix) for p in problems])
    model = LocalLLM(policy, builder.config.finetuning)
    try:
        yield model
    finally:
        await model.close()
