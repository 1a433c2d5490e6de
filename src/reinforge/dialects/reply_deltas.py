r"""Splits a reply that is still being sampled into reasoning and text, by the model family's format.

    pieces "<thi", "nk>2+", "3</think>\n\n", "5 <tool", "_call>{...}"
    => reasoning "2+", "3"; content "5"; the call itself is sent once it is whole

A text is held back while it may be the beginning of a tag or a call. What is left at the end of the reply, the finished
message has.
"""

from __future__ import annotations

import enum

from reinforge.dialects.families.detection import find_family, find_thinking, opens_thinking
from reinforge.types.request import ModelRequest, ReplyDelta, ReplyPiece
from reinforge.types.text_markers import count_held, find_marker


class ReplyPart(enum.Enum):
    """The part of a reply that the next text belongs to.

    BEGINNING -> THINKING -> AFTER_THINKING -> TEXT -> CALLS; a reply may skip any of them.
    """

    BEGINNING = "beginning"
    THINKING = "thinking"
    AFTER_THINKING = "after_thinking"
    TEXT = "text"
    CALLS = "calls"


class DeltaReader:
    def __init__(self, request: ModelRequest, chat_template: str | None):
        is_raw = request.prompt is not None
        family = None if is_raw else find_family(chat_template)
        may_call = bool(request.tools) and request.tool_choice != "none"
        self._tags = None if is_raw else find_thinking(chat_template)
        self._is_open = self._tags is not None and opens_thinking(chat_template, request.template_kwargs)
        self._starts = family.call_starts if family is not None and may_call else ()
        self._trims = may_call and family is not None
        holds_all = family is not None and (family.reads_channels or (may_call and not self._starts))
        self._part = ReplyPart.TEXT if self._tags is None else ReplyPart.BEGINNING
        if holds_all:  # nothing tells a call from a text before it is whole
            self._part = ReplyPart.CALLS
        self._held = ""
        self._has_reasoning = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts whose special tokens must stay in the text of the pieces."""
        return (*self._starts, *(() if self._tags is None else (self._tags.start, self._tags.end)))

    def read(self, piece: ReplyPiece, index: int = 0) -> ReplyDelta:
        """Returns what a piece adds to the message; the texts may be empty."""
        self._held += piece.text
        reasoning = content = ""
        if self._part is ReplyPart.BEGINNING:
            self._begin()
        if self._part is ReplyPart.THINKING:
            reasoning = self._think()
        if self._part is ReplyPart.AFTER_THINKING:
            self._held = self._held.lstrip("\n")
            if self._held:
                self._part = ReplyPart.TEXT
        if self._part is ReplyPart.TEXT:
            content = self._write()
        return ReplyDelta(content, reasoning, piece.tokens, index)

    def _begin(self) -> None:
        assert self._tags is not None
        body, start = self._held.lstrip(), self._tags.start
        if body.startswith(start):
            self._held, self._part = body.removeprefix(start), ReplyPart.THINKING
        elif not start.startswith(body):
            self._part = ReplyPart.THINKING if self._is_open else ReplyPart.TEXT

    def _think(self) -> str:
        assert self._tags is not None
        thought, end, rest = self._held.partition(self._tags.end)
        if end:
            self._held, self._part = rest, ReplyPart.AFTER_THINKING
        else:
            kept = len(thought) - count_held(thought, (self._tags.end,))
            kept = len(thought[:kept].rstrip("\n"))
            thought, self._held = thought[:kept], thought[kept:]
        thought = thought.rstrip("\n") if end else thought
        if not self._has_reasoning:
            thought = thought.lstrip("\n")
            self._has_reasoning = bool(thought)
        return thought

    def _write(self) -> str:
        if (place := find_marker(self._held, self._starts)) >= 0:
            self._part = ReplyPart.CALLS
            text, self._held = self._held[:place].rstrip(), ""
            return text
        text = self._held[: len(self._held) - count_held(self._held, self._starts)]
        if self._trims:  # the text around calls is sent without the white space between them
            text = text.rstrip()
        self._held = self._held[len(text) :]
        return text
