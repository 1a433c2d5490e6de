"""The shapes of the fine-tuning API's answers: files, jobs, and pages of them."""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar

from pydantic import BeforeValidator, ConfigDict

from reinforge.rollout.models.openai_answers import Answer, Count, ErrorText, Name

E = TypeVar("E", bound="Entry")


class Entry(Answer):
    """What every entry of a list has; the id of a page's last entry leads to the next page. It may be a number."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    id: Name


class FileAnswer(Entry):
    """An uploaded file."""

    filename: str | None = None
    bytes: int | None = None
    status: str | None = None


class JobAnswer(Entry):
    """A fine-tuning job."""

    status: Name
    fine_tuned_model: str | None = None
    error: ErrorText = None
    trained_tokens: Count = None
    metadata: dict[str, Any] | None = None


class Page(Answer, Generic[E]):
    """One page of a list, newest entry first; some services send null for an empty list."""

    data: list[E] | None
    has_more: Annotated[bool, BeforeValidator(lambda value: False if value is None else value)] = False
