"""`llms.<name>._type: policy`: the model that is being trained."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing

from pydantic import Field, field_validator

from reinforge.config.schema import Config, LLMConfig
from reinforge.dialects.tool_calls import ToolFormat, detect_tool_format, parse_reply, prepare_request
from reinforge.errors import ConfigError, Problem
from reinforge.interfaces import Builder, PolicyServer, ServesSeveral
from reinforge.registry import register_llm
from reinforge.types.request import ModelReply, ModelRequest, ReplyDelta

logger = logging.getLogger(__name__)

RESERVED = "training"  # a checkpoint's folder for the training state, so no adapter can have this name


class PolicyLLMConfig(LLMConfig, name="policy"):
    """The model that the trainer adapter trains and serves."""

    adapter: str | None = Field(
        default=None,
        description="Name of the LoRA adapter; entries with the same name share it; null: the only policy.",
    )

    @field_validator("adapter")
    @classmethod
    def _check_name(cls, adapter: str | None) -> str | None:
        if adapter is not None and (not adapter.isidentifier() or adapter == RESERVED):
            allowed = f'letters, digits and _, but not the name "{RESERVED}"'
            raise ValueError(f"{adapter!r} is not a valid adapter name; allowed: {allowed}")
        return adapter


def find_adapters(llms: Mapping[str, LLMConfig]) -> dict[str, str]:
    """Returns the adapter name of each entry of `llms` that has one.

    Example: planner: {_type: policy, adapter: a}, worker: {_type: policy, adapter: b}, judge: {_type: openai} ->
    {"planner": "a", "worker": "b"}.
    """
    return {
        entry: llm.adapter
        for entry, llm in llms.items()
        if isinstance(llm, PolicyLLMConfig) and llm.adapter is not None
    }


def find_served_entries(config: Config) -> list[str]:
    """Returns the entries of `llms` that name the trained model as its backend does; they are the policy.

    Example: agent: {_type: openai, model_name: run-1}, judge: {_type: openai, model_name: gpt}, a trainer adapter that
    trains `run-1` -> ["agent"].
    """
    adapter = config.trainer_adapters.get(str(config.finetuning.trainer_adapter))
    names = {entry: getattr(llm, "model_name", None) for entry, llm in config.llms.items()}
    served = adapter.served_models if adapter is not None else ()
    if any(isinstance(llm, PolicyLLMConfig) for llm in config.llms.values()):
        served = served[:1]  # an entry with the name of the base model may then be a judge
    served = [name for name in served if name in names.values()]
    return [entry for entry, name in names.items() if name in served[:1]]


class PolicyLLM:
    """Sends calls to the trainer adapter's policy server."""

    is_policy = True

    def __init__(self, find: Callable[[], PolicyServer | None], adapter: str | None = None):
        self._find, self.adapter = find, adapter
        self._knows_tool_format = False

    @property
    def server(self) -> PolicyServer:
        server = self._find()
        if server is None:
            raise ConfigError(
                "llms: `_type: policy` needs a trainer adapter that serves the policy, but this one does not; "
                "use the trainer adapter `_type: local`, or point the agent at the model that your backend serves"
            )
        if self.adapter is None:
            return server
        if not isinstance(server, ServesSeveral):
            message = f"{type(server).__name__} serves a single policy, none named {self.adapter}"
            fix = "leave `adapter` out, or use the trainer adapter `_type: local`"
            raise ConfigError(Problem("llms", message, fix))
        return server.get_policy(self.adapter)

    @property
    def model_name(self) -> str:
        return self.server.model_name

    @property
    def splices_history(self) -> bool:
        return self.server.history == "splice"

    async def sample(self, request: ModelRequest) -> ModelReply:
        server = self.server
        if request.tools and server.chat_template and not self._knows_tool_format:
            self._check_tool_format(server.chat_template)
        request = prepare_request(request, server.chat_template)
        return parse_reply(await server.sample(request), request, server.chat_template)

    async def stream(self, request: ModelRequest, index: int = 0) -> AsyncGenerator[ReplyDelta | ModelReply, None]:
        """Yields what each piece of one reply adds to its message, and then the reply; closing it stops sampling."""
        from reinforge.dialects.reply_deltas import DeltaReader

        server, template = self.server, self.server.chat_template
        if request.tools and template and not self._knows_tool_format:
            self._check_tool_format(template)
        request = prepare_request(request, template)
        reader = DeltaReader(request, template)
        async with aclosing(server.stream(request, reader.markers)) as pieces:
            async for piece in pieces:
                if isinstance(piece, ModelReply):
                    yield parse_reply(piece, request, template)
                else:
                    yield reader.read(piece, index)

    async def count_prompt(self, request: ModelRequest) -> int | None:
        return await self.server.count_prompt(prepare_request(request, self.server.chat_template))

    def _check_tool_format(self, chat_template: str) -> None:
        self._knows_tool_format = True
        if detect_tool_format(chat_template) is None:
            logger.warning(
                "the agent passes tools, but the chat template of %s shows no known format of tool calls (known: %s), "
                "so its calls stay text in message.content; parse them in the agent, or use another model or template",
                self.model_name,
                ", ".join(ToolFormat),
            )


@register_llm(config_type=PolicyLLMConfig)
async def policy_llm(config: PolicyLLMConfig, builder: Builder) -> AsyncIterator[PolicyLLM]:
    """Yields the policy, which is available once the trainer adapter is initialized."""
    named = find_adapters(builder.config.llms)
    if named and config.adapter is None:
        others = ", ".join(f"{entry}: {adapter}" for entry, adapter in named.items())
        message = f"not set, but other entries of llms name an adapter ({others})"
        raise ConfigError(Problem("adapter", message, "set it here too, or in none of the entries"))
    yield PolicyLLM(builder.policy, config.adapter)
