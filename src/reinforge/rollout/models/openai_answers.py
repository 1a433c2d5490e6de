"""The shapes of an endpoint's answers; each is validated before anything reads it.

Strict is what decides: ids, statuses, the names of models, a message's text. What only informs, such as token counts,
is read as far as possible, so that an odd number never costs a reply or a finished job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    StrictInt,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import ErrorDetails

from reinforge.config.problems import EXPECTED as SETTINGS
from reinforge.rollout.models.openai_http import UnexpectedAnswer

MAX_SHOWN = 40  # characters of a string that a message shows
MAX_COUNT = 10**12  # token counts above this are taken as unreadable; the journal stores 64-bit numbers
EXPECTED = {
    **{kind: text for kind, text in SETTINGS.items() if "{" not in text},
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object"),
    "missing": "a value",
    "string_too_short": "a non-empty string",
    "string_too_long": "a string of at most 1024 characters",
    "too_short": "a list that is not empty",
}


def read_count(value: Any) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT
    return value if is_count else None


def read_error(value: Any) -> str | None:
    """Returns the text of an error in whatever shape it comes.

    Example: `{"code": "server_error", "message": "broken"}` -> "server_error: broken"; "boom" -> "boom"; {} -> None.
    """
    if isinstance(value, Mapping):
        known = ": ".join(str(value[key]) for key in ("code", "message") if value.get(key))
        value = known or (describe_json(value) if any(value.values()) else None)
    return str(value) if value else None


NEEDS_LOGPROBS = "needs_logprobs"
"""Key of the context of a validation: whether log-probs were requested, so that unreadable ones are an error."""


def read_if_readable(value: Any, read: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    """Returns what the endpoint added to its answer, or None for something unreadable that was not requested."""
    try:
        return read(value)
    except ValidationError:
        if (info.context or {}).get(NEEDS_LOGPROBS):
            raise
        return None


Count = Annotated[int | None, BeforeValidator(read_count)]
TokenIds = Annotated[list[StrictInt] | None, WrapValidator(read_if_readable)]
ErrorText = Annotated[str | None, BeforeValidator(read_error)]
Name = Annotated[str, Field(min_length=1, max_length=1024)]


class Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class FunctionAnswer(Answer):
    name: Name
    arguments: str | dict[str, Any] | None = None


class ToolCallAnswer(Answer):
    """One tool call; calls of other kinds than functions have no `function`."""

    function: FunctionAnswer | None = None


class MessageAnswer(Answer):
    content: str | None = None
    tool_calls: list[ToolCallAnswer] | None = None
    refusal: str | None = None


class TopTokenAnswer(Answer):
    """One of the most likely tokens at a position; fields beside these are kept."""

    model_config = ConfigDict(extra="allow", frozen=True)

    token: str
    logprob: FiniteFloat


class TokenAnswer(TopTokenAnswer):
    top_logprobs: list[TopTokenAnswer] | None = None


class LogprobsAnswer(Answer):
    content: list[TokenAnswer] | None = None


class ChoiceAnswer(Answer):
    message: MessageAnswer
    finish_reason: str | None = None
    logprobs: Annotated[LogprobsAnswer | None, WrapValidator(read_if_readable)] = None
    token_ids: TokenIds = None


class UsageAnswer(Answer):
    """Token counts; None where they are absent or unreadable."""

    prompt_tokens: Count = None
    completion_tokens: Count = None


class ChatAnswer(Answer):
    choices: list[ChoiceAnswer] = Field(min_length=1)
    prompt_token_ids: TokenIds = None
    model: Any = None
    usage: Annotated[UsageAnswer, BeforeValidator(lambda value: value if isinstance(value, dict) else {})] = (
        UsageAnswer()
    )


TOKEN_ID = "token_id:"  # how a server spells a token that it returns as its id (vLLM's `return_tokens_as_token_ids`)


def read_logprobs(answer: ChatAnswer, index: int) -> dict[str, Any] | None:
    """Returns the log-probs and the token ids of one choice, as far as the endpoint returned them; None: neither.

    Example: content of token "token_id:7" with log-prob -0.5, and `prompt_token_ids` [1, 2] ->
    {"content": [{"token": "token_id:7", "logprob": -0.5}], "token_ids": [7], "prompt_token_ids": [1, 2]}
    """
    choice = answer.choices[index]
    content = choice.logprobs.content if choice.logprobs is not None else None
    token_ids = choice.token_ids
    if token_ids is None and content:
        spelled = [each.token.removeprefix(TOKEN_ID) for each in content if each.token.startswith(TOKEN_ID)]
        if len(spelled) == len(content) and all(text.isascii() and text.isdigit() for text in spelled):
            token_ids = [int(text) for text in spelled]
    values = {
        "content": None if content is None else [each.model_dump(exclude_unset=True) for each in content],
        "token_ids": token_ids,
        "prompt_token_ids": answer.prompt_token_ids if token_ids is not None else None,
    }
    found = {name: value for name, value in values.items() if value is not None}
    return found or None


A = TypeVar("A", bound=Answer)


def parse_answer(kind: type[A], value: Any, where: str, what: str, *, needs_logprobs: bool = False) -> A:
    try:
        return kind.model_validate(value, context={NEEDS_LOGPROBS: needs_logprobs})
    except ValidationError as error:
        problem = _describe_problem(error.errors(include_url=False, include_context=False)[0])
    raise UnexpectedAnswer(f"{where}: the response is not {what}: {problem}")


def describe_json(value: Any) -> str:
    """Returns a short description of a JSON value, in ASCII.

    Example: None -> "null"; "boom" -> '"boom"'; [1, 2] -> "a list of 2"; {"a": 1} -> "an object with a".
    """
    if isinstance(value, Mapping):
        keys = ", ".join(describe_json(str(key))[1:-1] for key in list(value)[:5])
        return f"an object with {keys}{', ...' if len(value) > 5 else ''}" if value else "an empty object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, str):
        return json.dumps(value if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]}...")
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MAX_COUNT:
        return "a huge number"
    return json.dumps(value)


def _describe_problem(error: ErrorDetails) -> str:
    field = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in error["loc"]).lstrip(".")
    found = "nothing" if error["type"] == "missing" else describe_json(error["input"])
    return f"{f'{field}: ' if field else ''}expected {EXPECTED.get(error['type'], error['msg'])}, found {found}"
