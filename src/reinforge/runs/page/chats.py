"""An episode as a chat whose sampled tokens are coloured by log-prob or by relative reward, or marked as trained.

Colours are classes of the style sheet, chosen by the reader with radio buttons; nothing on the page is a script.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.etree.ElementTree import Element

from reinforge.runs.episodes import format_content
from reinforge.runs.page.elements import Content, build, build_details
from reinforge.runs.page.token_texts import TokenTexts
from reinforge.runs.page.trained_tokens import TrainedTokens
from reinforge.runs.rows import EpisodeRow

MAX_TEXT = 4000
"""Longer texts are cut; `reinforge runs show RUN --episode KEY` prints them whole."""
MAX_TOKENS = 1500
"""Tokens of one reply that are coloured; the rest is plain text."""
LOGPROB_STEPS = (-0.1, -0.5, -1.0, -2.0, -4.0)
"""Borders of the colours: p above 0.90, 0.61, 0.37, 0.14, 0.02, and below."""
RELATIVE_STEPS = (0.05, 0.25)


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """How the replies of an episode are split and coloured.

    Attributes:
        texts: Splits replies into tokens.
        trained: Tells which tokens training uses.
        baseline: Mean reward of the group, for a training episode; None: not one.
    """

    texts: TokenTexts = field(default_factory=TokenTexts)
    trained: TrainedTokens = field(default_factory=TrainedTokens)
    baseline: float | None = None


def build_chat(row: EpisodeRow, style: ChatStyle) -> Element:
    """Returns an episode: how it ended, its scores, its messages and tool calls, and the agent's output.

    Args:
        style: How its replies are split and coloured.
    """
    data = row.data
    relative = None
    if style.baseline is not None and data["reward"] is not None:
        relative = data["reward"] - style.baseline
    chat = build("div", _build_facts(row, relative), class_="chat")
    shown: list[dict[str, Any]] = []
    for call in data["calls"]:
        messages = call["messages"]
        continues = messages[: len(shown)] == shown
        if not continues:
            chat.append(build("p", "The agent starts another conversation.", class_="note"))
        for message in messages[len(shown) if continues else 0 :]:
            chat.append(_build_message(message))
        chat.append(_build_reply(call, style, relative))
        shown = [*messages, call["reply"]]
    chat.append(build_details("output of the agent", build("pre", _shorten(_format(data["output"])))))
    return chat


def _build_facts(row: EpisodeRow, relative: float | None) -> Element:
    data = row.data
    parts: list[Content] = [
        build("code", row.key),
        f"outcome {data['outcome']}" + (f": {data['reason']}" if data["reason"] else ""),
    ]
    parts.append("no reward" if data["reward"] is None else f"reward {data['reward']:.4g}")
    if relative is not None:
        parts.append(f"relative reward {relative:+.4g}")
    for name, score in data["scores"].items():
        why = "; ".join(str(score[key]) for key in ("reasoning", "error") if score.get(key) is not None)
        value = f"{score['score']:.4g}" if isinstance(score["score"], int | float) else "no score"
        parts.append(f"{name} {value}" + (f" ({_shorten(why, 300)})" if why else ""))
    return build("ul", (build("li", part) for part in parts), class_="facts")


def _build_message(message: dict[str, Any]) -> Element:
    role = str(message.get("role", "?"))
    name = message.get("name") or message.get("tool_call_id")
    text = _format(message.get("content"))
    body: list[Element] = [build("pre", _shorten(text))] if text else []
    if role == "tool":
        body = [build_details(f"result of {name or 'a tool'}, {len(text):,} characters", *body)]
    return build(
        "section",
        build("p", f"{role}{f' {name}' if name and role != 'tool' else ''}", class_="role"),
        *body,
        *_build_tool_calls(message),
        class_=f"message {role if role in ('system', 'user', 'assistant', 'tool') else 'other'}",
    )


def _build_tool_calls(message: dict[str, Any]) -> list[Element]:
    found = []
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        arguments = _format(function.get("arguments", ""))
        found.append(build_details(f"calls {function.get('name', '?')}", build("pre", _shorten(arguments))))
    return found


def _build_reply(call: dict[str, Any], style: ChatStyle, relative: float | None) -> Element:
    reply, ids, logprobs = call["reply"], call["token_ids"], call["logprobs"]
    facts = [str(call["llm"]), f"{call['num_completion_tokens']} tokens", str(call["finish_reason"])]
    if call["policy_version"] is not None:
        facts.append(f"version {call['policy_version']}")
    if logprobs and None in logprobs:  # tokens that were given, not sampled
        logprobs = None
    if logprobs:
        facts.append(f"mean log-prob {statistics.fmean(logprobs):.2f}")
    pieces = style.texts.split(ids[:MAX_TOKENS]) if ids and logprobs else None
    section = build(
        "section", build("p", "reply ", build("small", ", ".join(facts)), class_="role"), class_="message reply"
    )
    if pieces is None:
        text = _format(reply.get("content"))
        section.append(build("pre", _shorten(text) if text else "(no text)"))
    else:
        marks = style.trained.mark(call) if relative is not None else None
        section.append(build("pre", _build_tokens(pieces, logprobs, marks or [False] * len(ids), relative)))
        if len(ids) > MAX_TOKENS:
            section.append(build("p", f"{len(ids) - MAX_TOKENS:,} more tokens are not shown.", class_="note"))
    section.extend(_build_tool_calls(reply))
    return section


def _build_tokens(
    pieces: Sequence[tuple[str, int]], logprobs: Sequence[float], marks: Sequence[bool], relative: float | None
) -> list[Element]:
    """Returns a span per token with the classes of its log-prob, and of the relative reward if training uses it."""
    spans, place = [], 0
    for text, count in pieces:
        logprob, is_trained = sum(logprobs[place : place + count]), any(marks[place : place + count])
        place += count
        names, tip = [choose_logprob_class(logprob)], f"log-prob {logprob:.3f}"
        if is_trained and relative is not None:
            names, tip = [*names, "m", choose_relative_class(relative)], f"{tip}, relative reward {relative:+.3f}"
        spans.append(build("span", text, class_=" ".join(names), title=tip))
    return spans


def choose_logprob_class(logprob: float) -> str:
    return f"p{sum(logprob < border for border in LOGPROB_STEPS)}"


def choose_relative_class(relative: float) -> str:
    size = sum(abs(relative) > border for border in RELATIVE_STEPS)
    return "a0" if size == 0 else f"{'g' if relative > 0 else 'n'}{size}"


def _format(content: Any) -> str:
    return "" if content is None else format_content(content)


def _shorten(text: str, most: int = MAX_TEXT) -> str:
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} more characters)"
