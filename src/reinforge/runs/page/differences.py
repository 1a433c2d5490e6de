"""Two versions of a string beside each other, with the words that differ marked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import SequenceMatcher
from xml.etree.ElementTree import Element

from reinforge.evaluation.reasons import shorten_line
from reinforge.runs.page.elements import Content, build

MAX_QUESTION = 500  # characters of a question
MAX_WORDS = 300  # words of each string that are compared, since the time grows with their product


@dataclass(frozen=True, slots=True)
class ChangedReply:
    """One of the two replies to a question."""

    title: Content
    text: str


def mark_difference(before: str, after: str) -> tuple[list[Content], list[Content]]:
    """Returns two strings as the parts of elements.

    Example: "a black cat", "a cat" -> ["a ", <del>black </del>, "cat"], ["a ", "cat"].
    """
    old, new = (re.findall(r"\S+\s*|\s+", text) for text in (before, after))
    marked: tuple[list[Content], list[Content]] = ([], [])
    first, second = ([word.strip() for word in words[:MAX_WORDS]] for words in (old, new))
    matcher = SequenceMatcher(None, first, second, autojunk=False)
    for kind, *places in matcher.get_opcodes():
        for parts, words, tag, (start, end) in zip(
            marked, (old, new), ("del", "ins"), (places[:2], places[2:]), strict=True
        ):
            text = "".join(words[start:end])
            if text:
                parts.append(text if kind == "equal" else build(tag, text))
    for parts, words in zip(marked, (old, new), strict=True):
        if len(words) > MAX_WORDS:
            parts.append(f"… ({len(words) - MAX_WORDS:,} more words)")
    return marked


def build_change(title: Content, question: str, replies: tuple[ChangedReply, ChangedReply], *more: Content) -> Element:
    """Returns the question of an example and two replies to it beside each other."""
    asked = build("div", build("h3", title), build("p", shorten_line(question, MAX_QUESTION), class_="note"))
    pair = zip(replies, mark_difference(*(each.text for each in replies)), strict=True)
    sides = (build("div", build("h4", each.title), build("pre", text or ["(nothing)"])) for each, text in pair)
    return build("article", asked, sides, more, class_="change")
