"""Reads the arguments of one `chat.completions.create` call: which there are, which change nothing, which are refused.

    temperature=None, user="u1"                         absent, or changes no token: ignored
    frequency_penalty=0.5, extra_body={"top_k": 5}      honored
    audio={...}, extra_body={"repetition_penalty": 2}   refused by name, with what to do instead

`extra_body` holds the fields that OpenAI's API does not have; other servers for open models use these names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reinforge.errors import InvalidCall, did_you_mean

FORMATS = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip
"""Arguments that say what the reply must match."""
HONORED = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "stop", "seed", "n",
        "frequency_penalty", "presence_penalty", "logit_bias", "tools", "tool_choice", "parallel_tool_calls",
        "reasoning_effort", "verbosity", "chat_template_kwargs", "enable_thinking", "prompt", "return_token_ids",
        "top_logprobs", "thinking", "reasoning", *FORMATS,
    }
)  # fmt: skip
IGNORED = frozenset(
    {
        "model", "user", "metadata", "store", "timeout", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_options", "prompt_cache_retention", "prediction", "logprobs", "stream_options",
        "extra_headers", "extra_query", "request_id", "priority", "cache_salt",
    }
)  # fmt: skip
"""Arguments that change no token; log-probs are part of every reply."""
_USE_TOOLS = "OpenAI has replaced it with `tools` and `tool_choice`"
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "modalities": ((["text"],), 'the model writes text only: leave it out, or pass ["text"]'),
    "audio": ((), "the model writes text only"),
    "moderation": ((), "this model's replies are not moderated: call a moderation endpoint in the agent"),
    "web_search_options": ((), "the model cannot search by itself: give it a search function in `tools`"),
    "functions": (([],), _USE_TOOLS),
    "function_call": (("auto", "none"), _USE_TOOLS),
    "repetition_penalty": ((1,), "use frequency_penalty or presence_penalty"),
    "length_penalty": ((1,), "replies are sampled, not searched"),
    "use_beam_search": ((False,), "replies are sampled"),
    "best_of": ((1,), "ask for n choices and choose one in the agent"),
    "min_tokens": ((0,), "a reply cannot be forced to continue after its end token"),
    "ignore_eos": ((False,), "a reply ends at the model's end token"),
    "stop_token_ids": (([],), "use stop, which takes strings"),
    "bad_words": (([],), "use logit_bias"),
    "allowed_token_ids": (([],), "use response_format or logit_bias"),
    "echo": ((False,), "the prompt is not part of a reply"),
    "continue_final_message": ((False,), "a reply always starts a new message"),
    "add_generation_prompt": ((True,), "a reply always starts a new message"),
    "include_stop_str_in_output": ((False,), "the stop string is removed"),
    "skip_special_tokens": ((True,), "message.content never has special tokens, but the token ids do"),
    "spaces_between_special_tokens": ((True, False), "message.content has no special tokens"),
    "return_tokens_as_token_ids": ((False,), "use return_token_ids"),
    "documents": (([],), "put the documents into a message"),
    "chat_template": ((), "the model's own template is used"),
    "truncate_prompt_tokens": ((), "a prompt is used whole; shorten it in the agent"),
}
"""Arguments that are accepted with these values only, which ask for nothing, and what to do instead of another one."""
KNOWN = HONORED | IGNORED | _NEUTRAL.keys() | {"messages", "extra_body"}
UNUSED = IGNORED - {"model", "logprobs", "stream_options", "timeout"}
MAX_NAMES, MAX_NAME_CHARS = 20, 100  # what a message shows of arguments that are not supported
_ENDPOINT_SETTINGS = ("extra_headers", "extra_query")
_PLAIN = frozenset({str, int, float, bool, list, dict, tuple})
_SENTINELS = frozenset({"NotGiven", "Omit"})


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The arguments of a call, with those in `extra_body` in their place.

    Example: `{"temperature": 1, "seed": None, "extra_body": {"top_k": 5}}`
        => given {"temperature": 1, "top_k": 5}, extra {"top_k"}
    """

    given: dict[str, Any]  # the arguments that are set, without those that are None or OpenAI's `NOT_GIVEN`
    extra: frozenset[str] = frozenset()  # names of those that came in `extra_body`

    def get(self, name: str, default: Any = None) -> Any:
        return self.given.get(name, default)

    def path(self, name: str) -> str:
        """Returns an argument's name as the caller wrote it, such as `extra_body.top_k`."""
        return f"extra_body.{name}" if name in self.extra else name

    def bad(self, name: str, message: str) -> InvalidCall:
        path = self.path(name)
        return InvalidCall(f"chat.completions.create: {path} {message}", path)

    def check_names(self) -> None:
        """Refuses arguments that would change the reply and that a model in this process does not support."""
        if self.given.keys() <= HONORED:
            return
        rejected = [name for name, value in self.given.items() if not _changes_nothing(name, value)]
        if rejected:
            shown = sorted(rejected)[:MAX_NAMES]
            named = ", ".join(self.path(name)[:MAX_NAME_CHARS] + _explain(name) for name in shown)
            named += ", ..." * (len(rejected) > MAX_NAMES)
            allowed = f"; extra_body may have {', '.join(sorted(HONORED))}" if self.extra & set(rejected) else ""
            path = self.path(rejected[0])[:MAX_NAME_CHARS]
            raise InvalidCall(f"chat.completions.create does not support: {named}{allowed}", path)

    def check_forwarded(self) -> None:
        """Refuses arguments that only the configuration or another argument may set, for a model behind an endpoint."""
        refused = [name for name in _ENDPOINT_SETTINGS if self.given.get(name)]
        refused += sorted(self.extra & {"messages"})
        if refused:
            named = ", ".join(self.path(name) for name in refused)
            message = f"chat.completions.create does not support: {named}; the configuration sets endpoint and key"
            raise InvalidCall(message, self.path(refused[0]))
        if "prompt" in self.given:
            raise self.bad("prompt", "needs a model in this process; this one is behind a chat endpoint: use messages")


def read_arguments(arguments: Mapping[str, Any]) -> CallArguments:
    given = {name: value for name, value in arguments.items() if value is not None and not is_sentinel(value)}
    extra = given.pop("extra_body", None)
    if not extra:
        return CallArguments(given)
    if not isinstance(extra, Mapping):
        message = f"chat.completions.create: extra_body must be a dict, found {type(extra).__name__}"
        raise InvalidCall(message, "extra_body")
    extra = {name: value for name, value in extra.items() if value is not None and not is_sentinel(value)}
    return CallArguments(given | extra, frozenset(extra))


def is_sentinel(value: Any) -> bool:
    """Returns True for `NOT_GIVEN` and `omit` of OpenAI's client, with which its users leave an argument out."""
    kind = type(value)
    if kind in _PLAIN:  # nearly always
        return False
    return kind.__name__ in _SENTINELS and kind.__module__.partition(".")[0] in ("openai", "anthropic")


def _changes_nothing(name: str, value: Any) -> bool:
    if name in HONORED or name in IGNORED:
        return True
    return name in _NEUTRAL and any(value == each for each in _NEUTRAL[name][0])


def _explain(name: str) -> str:
    if name in _NEUTRAL:
        return f" ({_NEUTRAL[name][1]})"
    hint = did_you_mean(name, sorted(HONORED))
    return f" ({hint.removeprefix(', ')})" if hint else ""
