"""Turns the arguments of OpenAI's `chat.completions.create` into a request, and messages into plain data.

{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    => {"role": "user", "content": "ab"}
choices[0].message                       => the same as a dict, without fields that are None
{"role": "user", "content": [{"type": "image_url", ...}]}   refused: the model reads text only

Messages for a model behind an endpoint keep their blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reinforge.dialects.families.detection import spell_switch
from reinforge.errors import InvalidCall
from reinforge.limits import get_limits
from reinforge.rollout.handle.arguments import FORMATS, CallArguments
from reinforge.rollout.handle.completion import to_plain_data
from reinforge.types.request import Message, ModelRequest, SamplingParams

_UNFORWARDED_ARGUMENTS = frozenset({"model", "timeout", "tools", "n", "stream_options", "extra_headers", "extra_query"})
_TEMPLATE_VALUES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_TEMPLATE_ARGUMENTS = ("reasoning_effort", "verbosity", "enable_thinking")
"""Arguments that a chat template may read; one that does not know them renders the same prompt without them."""
_THINKING_TYPES = {"enabled": True, "disabled": False}
_NO_TEMPLATE_ARGUMENTS: dict[str, Any] = {}  # shared by the requests without any
_SAMPLING_ARGUMENTS = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "stop", "seed", "n",
        "frequency_penalty", "presence_penalty", "logit_bias",
    }
)  # fmt: skip
MAX_CHOICES = 128  # maximum choices of one request, the same as OpenAI's
MAX_TOP_LOGPROBS = 20  # maximum tokens that a reply names at each position, the same as OpenAI's


def build_request(
    messages: Sequence[Any] | None,
    arguments: CallArguments,
    *,
    sampling: SamplingParams | None,
    seed: int,
    known: Sequence[Message] = (),
) -> ModelRequest:
    """Returns the request for one call to a model in this process.

    Args:
        messages: The history; None if the arguments have a `prompt`.
        sampling: The run's temperature, top_p, top_k and min_p for a trained policy; None: use the agent's.
        known: What the first of the messages are, if they were read before.
    """
    if arguments.given.keys() <= _SAMPLING_ARGUMENTS:  # nothing else to read
        params = _build_params(arguments, sampling, seed)
        return ModelRequest(read_messages(messages or (), known), params, template_kwargs=_NO_TEMPLATE_ARGUMENTS)
    from reinforge.rollout.handle.tool_arguments import read_tools

    arguments.check_names()
    prompt = _read_prompt(arguments)
    if prompt is not None and messages is None:
        # what stands for a raw prompt in the record
        shown = prompt if isinstance(prompt, str) else f"(a prompt of {len(prompt)} token ids)"
        messages = [{"role": "user", "content": shown}]
    elif prompt is not None:
        raise arguments.bad("prompt", "cannot be combined with messages: pass one of them")
    tools, tool_choice = read_tools(arguments)
    is_forced = tool_choice not in ("auto", "none")
    grammar = None
    if any(name in arguments.given for name in FORMATS):
        from reinforge.rollout.handle.response_format import read_grammar

        grammar = read_grammar(arguments)
    return ModelRequest(
        read_messages(messages or (), known),
        _build_params(arguments, sampling, seed),
        tools,
        _read_template_arguments(arguments),
        tool_choice=tool_choice,
        parallel_tool_calls=arguments.get("parallel_tool_calls") is not False,
        grammar=None if is_forced else grammar,  # a forced call leaves no text that the format could describe
        prompt=prompt,
        num_top_logprobs=_read_num_top_logprobs(arguments),
    )


def build_forwarded_request(
    messages: Sequence[Any] | None, arguments: CallArguments, known: Sequence[Message] = ()
) -> ModelRequest:
    """Returns the request for one call to a model behind an endpoint, which gets the agent's arguments unchanged."""
    arguments.check_forwarded()
    if not messages:
        raise arguments.bad("messages", "must have at least one message")
    plain = [*known, *(normalize_message(message) for message in messages[len(known) :])]
    given, tools = arguments.given, to_plain_data(arguments.get("tools"))
    forwarded = {name: to_plain_data(value) for name, value in given.items() if name not in _UNFORWARDED_ARGUMENTS}
    return ModelRequest(plain, _build_params(arguments, None, given.get("seed") or 0), tools or None, {}, forwarded)


def _build_params(arguments: CallArguments, sampling: SamplingParams | None, seed: int) -> SamplingParams:
    get = arguments.given.get
    if not arguments.given:
        own = sampling or SamplingParams()
        return SamplingParams(own.temperature, own.top_p, own.top_k, own.min_p, seed=seed)
    if sampling is None:
        top_k = get("top_k", 0)
        chosen = get("temperature", 1.0), get("top_p", 1.0), 0 if top_k == -1 else top_k, get("min_p", 0.0)
    else:
        chosen = sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p
    stop = get("stop", ())
    if not isinstance(stop, (str, list, tuple)):
        raise arguments.bad("stop", f"must be a string or a list of strings, found {type(stop).__name__}")
    return SamplingParams(
        *chosen,
        max_tokens=get("max_completion_tokens", get("max_tokens")),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        seed=seed,
        frequency_penalty=get("frequency_penalty", 0.0),
        presence_penalty=get("presence_penalty", 0.0),
        logit_bias=_read_logit_bias(arguments),
    )


def _read_num_top_logprobs(arguments: CallArguments) -> int:
    number = arguments.get("top_logprobs", 0)
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= MAX_TOP_LOGPROBS:
        raise arguments.bad("top_logprobs", f"must be a whole number from 0 to {MAX_TOP_LOGPROBS}, found {number!r}")
    return number


def _read_logit_bias(arguments: CallArguments) -> tuple[tuple[int, float], ...]:
    """Returns the biases by token id; those of 0 change nothing.

    Example: `{"11": -100, "9": 0, "5": 1.5}` -> `((5, 1.5), (11, -100))`.
    """
    given = arguments.get("logit_bias")
    if not given:
        return ()
    if not isinstance(given, Mapping):
        raise arguments.bad("logit_bias", f"must map token ids to numbers, found {type(given).__name__}")
    if len(given) > (most := get_limits().logit_biases):
        raise arguments.bad("logit_bias", f"may have {most} entries, found {len(given)}")
    biases = []
    for token, bias in given.items():
        is_id = isinstance(token, int) or (isinstance(token, str) and token.isascii() and token.isdigit())
        if not is_id or isinstance(bias, bool) or not isinstance(bias, int | float):
            raise arguments.bad("logit_bias", f"must map token ids to numbers, found {token!r}: {bias!r}")
        if bias:
            biases.append((int(token), bias))
    return tuple(sorted(biases))


def _read_template_arguments(arguments: CallArguments) -> dict[str, Any]:
    """Returns what the chat template gets besides the messages and tools.

    `thinking: {type: disabled}` and `reasoning: {effort: low}` are other APIs' forms. An effort of "none" also turns
    thinking off, for templates that read only `enable_thinking`.
    """
    read = {name: arguments.given[name] for name in _TEMPLATE_ARGUMENTS if name in arguments.given}
    for name in ("thinking", "reasoning"):
        if not isinstance(given := arguments.get(name, {}), Mapping):
            raise arguments.bad(name, f"must be an object, found {type(given).__name__}")
        if (asked := given.get("enabled", _THINKING_TYPES.get(str(given.get("type"))))) is not None:
            read.setdefault("enable_thinking", bool(asked))
        if (effort := given.get("effort")) is not None:
            read.setdefault("reasoning_effort", effort)
    if read.get("reasoning_effort") == "none":
        read.setdefault("enable_thinking", False)
    own = arguments.get("chat_template_kwargs", {})
    if not isinstance(own, Mapping):
        raise arguments.bad("chat_template_kwargs", f"must be a dict, found {type(own).__name__}")
    if reserved := sorted(_TEMPLATE_VALUES & set(own)):
        raise arguments.bad("chat_template_kwargs", f"must not have {', '.join(reserved)}")
    return spell_switch(read | dict(own))


def _read_prompt(arguments: CallArguments) -> str | tuple[int, ...] | None:
    prompt = arguments.get("prompt")
    if prompt is None or (isinstance(prompt, str) and prompt):
        return prompt
    is_ids = isinstance(prompt, list | tuple) and prompt
    if not is_ids or not all(isinstance(each, int) and not isinstance(each, bool) for each in prompt):
        raise arguments.bad("prompt", "must be a string or a list of token ids, and not empty")
    return tuple(prompt)


def read_num_choices(arguments: CallArguments) -> int:
    n = arguments.get("n", 1)
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_CHOICES:
        raise arguments.bad("n", f"must be between 1 and {MAX_CHOICES}, found {n!r}")
    return n


def find_overridden(arguments: CallArguments, sampling: SamplingParams) -> dict[str, tuple[Any, Any]]:
    """Returns what the agent asks for and the run's own value, by name, where a trained policy's sampling differs.

    Example: `{"temperature": 0, "max_tokens": 9}` and a run with temperature 1 -> `{"temperature": (0, 1.0)}`.
    """
    names = ("temperature", "top_p", "top_k", "min_p")
    found = {name: (arguments.given[name], getattr(sampling, name)) for name in names if name in arguments.given}
    return {name: (asked, own) for name, (asked, own) in found.items() if asked != own}


_TEXT_BLOCKS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of blocks of text, and the field that holds it."""
_MEDIA = {"image": "an image", "audio": "audio", "video": "a video", "file": "a file", "document": "a document"}


def normalize_message(message: Any) -> Message:
    """Returns a message as plain data; agents may also pass message objects such as `choices[0].message`."""
    if hasattr(message, "model_dump"):
        message = message.model_dump()
    plain = {key: value for key, value in dict(message).items() if value is not None or key == "content"}
    return plain if all(isinstance(value, str | None) for value in plain.values()) else to_plain_data(plain)


def send_messages(messages: Sequence[Any]) -> list[Any]:
    """Returns messages as plain data, for the run; what is not a message stays unchanged, for the run to refuse."""
    if not _is_list(messages):
        return to_plain_data(messages)
    is_message = (hasattr(each, "model_dump") or isinstance(each, Mapping) for each in messages)
    return [normalize_message(each) if known else each for each, known in zip(messages, is_message, strict=True)]


def read_messages(messages: Sequence[Any], known: Sequence[Message] = ()) -> list[Message]:
    """Returns the messages for a model in this process, which reads text only; blocks of text become one text."""
    if not messages or (type(messages) is not list and not _is_list(messages)):
        found = type(messages).__name__ if messages else "none"
        raise _error("messages", f'needs a list of at least one message: [{{"role": "user", ...}}], found {found}')
    count = len(known)
    new = messages[count:] if count else messages
    return [*known, *[_read_message(message, index) for index, message in enumerate(new, count)]]


def _is_list(messages: Any) -> bool:
    return isinstance(messages, Sequence) and not isinstance(messages, (str, bytes))


def _read_message(message: Any, index: int) -> Message:
    if type(message) is dict and len(message) == 2:  # nearly always, and there is nothing to read
        content, role = message.get("content"), message.get("role")
        if type(content) is str and type(role) is str and role != "function":
            return dict(message)
    try:
        read = normalize_message(message)
    except (TypeError, ValueError):
        found = f"is a {type(message).__name__}"
        raise _error(f"messages[{index}]", f'{found}; expected {{"role": ..., "content": ...}}') from None
    content = read.get("content")
    if isinstance(content, list):
        path = f"messages[{index}].content"
        read["content"] = "".join(_read_block(block, f"{path}[{number}]") for number, block in enumerate(content))
    elif content is not None and not isinstance(content, str):
        raise _error(
            f"messages[{index}].content", f"is a {type(content).__name__}; expected a string or a list of blocks"
        )
    role = read.get("role")
    if not isinstance(role, str):
        raise _error(f"messages[{index}].role", f"is {role!r}; expected system, user, assistant or tool")
    if read.get("content") is None:
        if role != "assistant":  # templates would write it as the text "None"
            found = "is null" if "content" in read else "is missing"
            raise _error(f"messages[{index}].content", f"{found}; expected a string or a list of blocks")
        read["content"] = None
    if role == "function" or "function_call" in read:
        what = 'has the role "function"' if role == "function" else "has a function_call"
        raise _error(f"messages[{index}]", f'{what}, which OpenAI has replaced: use tool_calls and the role "tool"')
    return read


def _read_block(block: Any, path: str) -> str:
    if isinstance(block, str):
        return block
    kind = block.get("type") if isinstance(block, dict) else None
    text = block.get(_TEXT_BLOCKS[kind]) if isinstance(block, dict) and kind in _TEXT_BLOCKS else None
    if isinstance(text, str):
        return text
    what = next((name for part, name in _MEDIA.items() if part in str(kind)), "not text")
    raise _error(
        path,
        f"is a block of the type {kind!r}, which is {what}, but the model in this process reads text only: describe "
        "its content as text, send it to a model behind an endpoint (llms: `_type: openai`), or let a note stand for "
        "it: `finetuning.outcomes.unsupported_content: omit`",
    )


def _error(path: str, message: str) -> InvalidCall:
    return InvalidCall(f"chat.completions.create: {path} {message}", path)
