"""What all judges share: settings, quoted material, and replies that are valid verdicts or none.

Text that others wrote stands between markers with a key made from a hash of all of it, so no text can contain its own
markers, and the judge can tell it from its instructions. A judge has no tools. A reply that is not exactly the expected
JSON object is asked for again; if none is valid, there is no verdict. Nothing is guessed or clamped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import Field

from reinforge.bounded import replace_surrogates
from reinforge.config.schema import EvaluatorConfig
from reinforge.errors import ConfigError, EvaluationError, Problem, did_you_mean
from reinforge.evaluation.answers import parse_answer
from reinforge.evaluation.evaluators.base import check_output
from reinforge.interfaces import Builder, ChatModel
from reinforge.types.request import Grammar, Message, ModelRequest, SamplingParams

V = TypeVar("V")

LIMITS = ("minimum", "maximum", "maxLength")  # keywords of a schema that only a model in this process gets
MAX_REASON_CHARACTERS = 300  # of a judge in this process, so that its reply ends before the token limit
MAX_SHOWN_CHARACTERS = 500  # of the last invalid reply, in the record


class JudgeConfig(EvaluatorConfig):
    """Settings of every judge."""

    llm: str = Field(description="The judge: an entry of llms that is not trained.")
    rubric: str = Field(
        min_length=1, description="What makes a good answer, and what the lowest and highest score mean."
    )
    retries: int = Field(default=2, ge=0, description="How many times to ask again after an invalid reply.")
    temperature: float = Field(default=0.0, ge=0, description="The judge's temperature.")
    max_tokens: int = Field(default=512, ge=16, description="Maximum tokens of the judge's reply.")
    max_chars: int = Field(
        default=20_000, ge=100, description="Longer text is cut to this many characters, with a note to the judge."
    )
    response_format: Literal["json_schema", "json_object", "none"] = Field(
        default="json_schema", description="Format that the endpoint is asked to enforce; replies are always validated."
    )


class InvalidVerdictError(ValueError):
    """A judge's reply that is not a valid verdict."""


class NoVerdictError(EvaluationError):
    """None of a judge's replies is a valid verdict; `reply` is the beginning of the last one."""

    def __init__(self, message: str, reply: str):
        super().__init__(message)
        self.reply = reply


class Quotation:
    """Untrusted strings by kind, each between markers that none of them contains; longer texts are cut, with a note.

    The markers have a `key` in common, a hash of the rubric and all texts, so none of them can have been written to
    contain it.
    """

    def __init__(self, rubric: str, texts: Mapping[str, str], max_chars: int):
        self.texts, self.max_chars = dict(texts), max_chars
        self.key = hashlib.sha256(json.dumps([rubric, self.texts]).encode()).hexdigest()[:20]

    def quote(self, kind: str) -> str:
        """Returns one of the texts between its markers."""
        text, limit = self.texts[kind], self.max_chars
        if len(text) > limit:
            text = f"{text[:limit]}\n[cut here: {len(text) - limit} more characters]"
        return f'<material-{self.key} kind="{kind}">\n{text}\n</material-{self.key}>'


def format_material(value: Any) -> str:
    """Returns a value as text that any request can hold; empty for None."""
    plain = value is None or isinstance(value, str)
    text = value or "" if plain else json.dumps(value, ensure_ascii=False, default=str)
    return replace_surrogates(text)


def format_output(value: Any) -> str:
    """Returns an agent's output as text; raises `UnusableOutputError` if it cannot be written."""
    check_output(value)
    return format_material(value)


async def ask_for_verdict(
    llm: ChatModel,
    config: JudgeConfig,
    messages: Sequence[Message],
    schema: Mapping[str, Any],
    parse: Callable[[str], V],
) -> V:
    """Returns the judge's verdict; after an invalid reply the judge is told why and asked again.

    Args:
        schema: JSON schema of the verdict, for endpoints that enforce one.
        parse: Returns the verdict of a reply, or raises `InvalidVerdictError`.
    """
    asked, reason, text = list(messages), "", ""
    for _ in range(config.retries + 1):
        reply = await llm.sample(build_request(config, asked, schema))
        content = reply.message.get("content")
        text = content if isinstance(content, str) else ""
        try:
            if reply.finish_reason == "length":
                raise InvalidVerdictError(f"the reply was cut off at max_tokens ({config.max_tokens})")
            return parse(text)
        except InvalidVerdictError as error:
            reason = str(error)
        again = f"That reply cannot be used: {reason}. Reply with the JSON object and nothing else."
        asked = [*asked, {"role": "assistant", "content": text}, {"role": "user", "content": again}]
    replies = f"{config.retries + 1} replies"
    message = f"the judge {llm.model_name} gave no valid verdict in {replies}: {reason}"
    raise NoVerdictError(message, text[:MAX_SHOWN_CHARACTERS])


def build_schema(**properties: Mapping[str, Any]) -> dict[str, Any]:
    reason = {"type": "string", "maxLength": MAX_REASON_CHARACTERS}
    return build_object_schema({"reason": reason, **properties})


def build_object_schema(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


def build_request(config: JudgeConfig, messages: list[Message], schema: Mapping[str, Any]) -> ModelRequest:
    """Returns the request for a verdict: no tools, and the reply's format, for an endpoint or a model in this process.

    Endpoints do not all accept limits in a schema, so only a model in this process gets them.
    """
    arguments: dict[str, Any] = {"temperature": config.temperature, "max_tokens": config.max_tokens}
    if config.response_format == "json_schema":
        named = {"name": "verdict", "strict": True, "schema": _drop_limits(schema)}
        arguments["response_format"] = {"type": "json_schema", "json_schema": named}
    elif config.response_format == "json_object":
        arguments["response_format"] = {"type": "json_object"}
    sampling = SamplingParams(temperature=config.temperature, max_tokens=config.max_tokens)
    grammar = None if config.response_format == "none" else Grammar("json_schema", json.dumps(schema))
    return ModelRequest(messages, sampling, arguments=arguments, grammar=grammar)


def _drop_limits(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    return {key: _drop_limits(value) for key, value in schema.items() if key not in LIMITS}


def parse_reply(text: str, keys: Sequence[str]) -> dict[str, Any]:
    """Returns the JSON object of a judge's reply, which has `reason` and these keys; further keys are ignored."""
    try:
        verdict = parse_answer(text, allow_fence=True)
    except json.JSONDecodeError:
        raise InvalidVerdictError(f"expected one JSON object, found {text[:80]!r}") from None
    except ValueError as error:
        raise InvalidVerdictError(f"expected one JSON object: {error}") from None
    if not isinstance(verdict, dict) or not {"reason", *keys} <= set(verdict):
        has = ", ".join(map(str, verdict))[:80] if isinstance(verdict, dict) else type(verdict).__name__
        raise InvalidVerdictError(f"expected the keys {' and '.join(['reason', *keys])}, found {has or 'none'}")
    return verdict


def check_reason(verdict: Mapping[str, Any]) -> str:
    if not isinstance(verdict["reason"], str):
        raise InvalidVerdictError("the reason is not a string")
    return verdict["reason"]


def check_score(score: Any, low: float, high: float, what: str = "the score") -> float:
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise InvalidVerdictError(f"{what} is {json.dumps(score)[:80]}, not a number")
    if not low <= score <= high:
        raise InvalidVerdictError(f"{what} {str(score)[:20]} is outside the range {low:g} to {high:g}")
    return float(score)


async def get_judge(name: str, builder: Builder) -> ChatModel:
    """Returns the entry of `llms` that judges; it must exist, and not be the trained policy."""
    entries = builder.config.llms
    if name not in entries:
        hint = did_you_mean(name, entries)
        message = f'llms has no entry "{name}"{hint or ";"} it has {", ".join(entries) or "none"}'
        raise ConfigError(Problem("llm", message, "add an entry with `_type: openai`"))
    llm = await builder.get_llm(name)
    if llm.is_policy:
        message = f"{name} is the trained policy, which would learn to give itself good scores"
        raise ConfigError(Problem("llm", message, "use an entry with `_type: openai`"))
    return llm
