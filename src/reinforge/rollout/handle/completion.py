"""The reply that an agent gets, with the attributes and methods of the objects of OpenAI's Python client.

Each object is also a dict with the same entries, so `call.function.name` and `call["function"]["name"]` both work, and
an object can be put into `messages` or into `json.dumps` unchanged. Fields that are absent read as None.

    reply.choices[0].message.tool_calls[0].function.name    "add"
    reply.choices[0].message                                {"role": "assistant", "content": None, "tool_calls": [...]}
    reply.choices[0].message.refusal                        None
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Literal, Self

from reinforge.dialects.reply_tokens import read_tokens
from reinforge.errors import did_you_mean
from reinforge.types.episode import ModelCall
from reinforge.types.request import Message, ModelReply, TokenLogprobs


class ReplyObject(dict[str, Any]):
    """A dict whose entries are attributes too."""

    absent: ClassVar[tuple[str, ...]] = ()  # fields of OpenAI's object that read as None while they have no entry
    other: ClassVar[tuple[str, ...]] = ()
    """Fields of other servers that read as None while they have no entry, and that `model_dump` then leaves out."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name in self.absent or name in self.other:
            return None
        hint = "" if name.startswith("__") else did_you_mean(name, [*self, *self.absent])
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        del self[name]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self, *self.absent})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.items())})"

    def model_dump(
        self,
        *,
        mode: str = "python",
        include: Collection[str] | None = None,
        exclude: Collection[str] | None = None,
        exclude_none: bool = False,
        exclude_unset: bool = False,
        exclude_defaults: bool = False,
        **_: Any,
    ) -> dict[str, Any]:
        """Returns plain dicts and lists; fields that are absent are None, unless an argument excludes them."""
        absent = () if exclude_unset or exclude_defaults else (name for name in self.absent if name not in self)
        values = {**self, **dict.fromkeys(absent)}
        nested = {"exclude_none": exclude_none, "exclude_unset": exclude_unset, "exclude_defaults": exclude_defaults}
        return {
            name: _dump(value, nested)
            for name, value in values.items()
            if (include is None or name in include)
            and (exclude is None or name not in exclude)
            and not (exclude_none and value is None)
        }

    def model_dump_json(self, *, indent: int | None = None, **arguments: Any) -> str:
        separators = (",", ":") if indent is None else None
        return json.dumps(self.model_dump(**arguments), ensure_ascii=False, indent=indent, separators=separators)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        return type(self)({**(copy.deepcopy(self) if deep else self), **(update or {})})

    def to_dict(self, *, exclude_unset: bool = True, **arguments: Any) -> dict[str, Any]:
        """Returns `model_dump` without the fields that are absent."""
        return self.model_dump(exclude_unset=exclude_unset, **arguments)

    def to_json(self, *, indent: int | None = 2, exclude_unset: bool = True, **arguments: Any) -> str:
        return self.model_dump_json(indent=indent, exclude_unset=exclude_unset, **arguments)


def _dump(value: Any, arguments: Mapping[str, Any]) -> Any:
    if isinstance(value, ReplyObject):
        return value.model_dump(**arguments)
    if isinstance(value, TokenLogprobs):
        return _dump_logprobs(value, with_refusal=not arguments["exclude_none"])
    if isinstance(value, dict):
        return {name: _dump(entry, arguments) for name, entry in value.items()}
    return [_dump(entry, arguments) for entry in value] if isinstance(value, list | tuple) else value


def _dump_logprobs(tokens: TokenLogprobs, *, with_refusal: bool) -> dict[str, Any]:
    read = read_tokens({"logprobs": tokens})
    content = [] if read is None else read.build_content()
    return {"content": content, "refusal": None} if with_refusal else {"content": content}


class CalledFunction(ReplyObject):
    """`tool_calls[i].function`: the name, and the arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(ReplyObject):
    """`message.tool_calls[i]`."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(ReplyObject):
    """`choices[i].message` of a completion; append it to `messages` unchanged."""

    absent = ("refusal", "annotations", "audio", "function_call", "tool_calls")
    other = ("reasoning_content",)

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None
    tool_calls: list[ToolCall] | None
    refusal: str | None


class EndpointToken(ReplyObject):
    """`logprobs.content[i]`: one token of a reply of a model behind an endpoint."""

    absent = ("bytes",)

    token: str
    logprob: float
    top_logprobs: list[EndpointToken]


class EndpointLogprobs(ReplyObject):
    """`choices[i].logprobs` of a model behind an endpoint, as it returned them.

    `token_ids` and `prompt_token_ids` are not fields of OpenAI's; some servers return them, such as vLLM.
    """

    absent = ("content", "refusal", "token_ids", "prompt_token_ids")

    content: list[EndpointToken] | None
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None


class ChatChoice(ReplyObject):
    """One of a completion's `choices`.

    `logprobs` is a `TokenLogprobs` for a model in this process, and `EndpointLogprobs` for one behind an endpoint; both
    have `.content[i].token` and `.content[i].logprob`.
    """

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: TokenLogprobs | EndpointLogprobs | None


class ChatUsage(ReplyObject):
    """Token counts of one call."""

    absent = ("completion_tokens_details", "prompt_tokens_details")

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatCompletion(ReplyObject):
    absent = ("service_tier", "system_fingerprint")

    id: str
    choices: list[ChatChoice]
    created: int
    model: str
    object: Literal["chat.completion"]
    usage: ChatUsage


def build_completion(call: ModelCall) -> ChatCompletion:
    """Returns a call as a chat completion, which shares nothing that can change with the record of the call.

    Its usage counts the prompt once, as OpenAI does.
    """
    prompt, completion = call.reply.num_prompt_tokens, call.num_completion_tokens
    return ChatCompletion(
        id=call.call_id,
        choices=[_build_choice(index, reply) for index, reply in enumerate(call.choices)],
        created=int(call.started_s),
        model=call.model,
        object="chat.completion",
        usage=ChatUsage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion),
    )


def _build_choice(index: int, reply: ModelReply) -> ChatChoice:
    message = ChatMessage(role=reply.message["role"], content=reply.message.get("content"))
    if reasoning := reply.message.get("reasoning_content"):
        message["reasoning_content"] = reasoning
    if calls := reply.message.get("tool_calls"):
        message["tool_calls"] = [_build_call(call) for call in calls]
    if refusal := reply.message.get("refusal"):
        message["refusal"] = refusal
    return ChatChoice(finish_reason=reply.finish_reason, index=index, logprobs=build_logprobs(reply), message=message)


def build_logprobs(reply: ModelReply) -> TokenLogprobs | EndpointLogprobs | None:
    """Returns the tokens of a reply, or the log-probs that its endpoint returned; None: there are neither."""
    if reply.tokens is not None or reply.logprobs is None:
        return reply.tokens
    built = EndpointLogprobs(copy.deepcopy(reply.logprobs))
    if built.content is not None:
        built["content"] = [build_token(each) for each in built["content"]]
    return built


def build_token(entry: Message) -> EndpointToken:
    return EndpointToken({**entry, "top_logprobs": [EndpointToken(each) for each in entry.get("top_logprobs") or []]})


def _build_call(call: Message) -> ToolCall:
    """Returns a tool call; parts that are not OpenAI's, of another service, are kept unchanged."""
    built = ToolCall(copy.deepcopy(call))
    if isinstance(built.get("function"), dict):
        built["function"] = CalledFunction(built["function"])
    return built


def to_plain_data(value: Any) -> Any:
    """Returns dicts and lists instead of the objects of this module, of OpenAI's client or of another pydantic model.

    Example: `{"role": "assistant", "tool_calls": message.tool_calls}` -> the same with plain dicts in its list.
    """
    if isinstance(value, dict):
        return {name: to_plain_data(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain_data(entry) for entry in value]
    is_object = hasattr(value, "model_dump") and not isinstance(value, type)
    return to_plain_data(value.model_dump()) if is_object else value
