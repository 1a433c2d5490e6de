"""An episode as a chat whose sampled tokens are coloured by log-prob, by advantage, or by what was trained.

Colours are classes of the style sheet, chosen by the reader with radio buttons; nothing on the page is a script.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any
from xml.etree.ElementTree import Element

from reinforge.runs.episodes import format_content
from reinforge.runs.page.elements import Content, build, build_details
from reinforge.runs.page.token_texts import TokenTexts
from reinforge.runs.rows import EpisodeRow

MAX_TEXT = 4000
"""Longer texts are cut; `reinforge runs show RUN --episode KEY` prints them whole."""
MAX_TOKENS = 1500
"""Tokens of one reply that are coloured; the rest is plain text."""
LOGPROB_STEPS = (-0.1, -0.5, -1.0, -2.0, -4.0)
"""Borders of the colours: p above 0.90, 0.61, 0.37, 0.14, 0.02, and below."""
ADVANTAGE_STEPS = (0.05, 0.25)


def build_chat(row: EpisodeRow, texts: TokenTexts, baseline: float | None) -> Element:
    """Returns an episode: how it ended, its scores, its messages and tool calls, and the agent's output.

    Args:
        row: The episode.
        texts: Splits replies into tokens.
        baseline: Mean reward of its group, for a training episode; None: it was not trained on.
    """
    data = row.data
    chat = build("div", _build_facts(row, baseline), class_="chat")
    advantage = data["reward"] - baseline if baseline is not None and data["reward"] is not None else None
    shown: list[dict[str, Any]] = []
    for call in data["calls"]:
        messages = call["messages"]
        continues = messages[: len(shown)] == shown
        if not continues:
            chat.append(build("p", "The agent starts another conversation.", class_="note"))
        for message in messages[len(shown) if continues else 0 :]:
            chat.append(_build_message(message))
        chat.append(_build_reply(call, texts, advantage))
        shown = [*messages, call["reply"]]
    chat.append(build_details("output of the agent", build("pre", _shorten(_format(data["output"])))))
    return chat


def _build_facts(row: EpisodeRow, baseline: float | None) -> Element:
    data = row.data
    parts: list[Content] = [
        build("code", row.key),
        f"outcome {data['outcome']}" + (f": {data['reason']}" if data["reason"] else ""),
    ]
    parts.append("no reward" if data["reward"] is None else f"reward {data['reward']:.4g}")
    if baseline is not None and data["reward"] is not None:
        parts.append(f"advantage {data['reward'] - baseline:+.4g}")
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


def _build_reply(call: dict[str, Any], texts: TokenTexts, advantage: float | None) -> Element:
    reply, ids, logprobs = call["reply"], call["token_ids"], call["logprobs"]
    facts = [str(call["llm"]), f"{call['num_completion_tokens']} tokens", str(call["finish_reason"])]
    if call["policy_version"] is not None:
        facts.append(f"version {call['policy_version']}")
    if logprobs and None in logprobs:  # tokens that were given, not sampled
        logprobs = None
    if logprobs:
        facts.append(f"mean log-prob {statistics.fmean(logprobs):.2f}")
    pieces = texts.split(ids[:MAX_TOKENS]) if ids and logprobs else None
    section = build(
        "section", build("p", "reply ", build("small", ", ".join(facts)), class_="role"), class_="message reply"
    )
    if pieces is None:
        text = _format(reply.get("content"))
        section.append(build("pre", _shorten(text) if text else "(no text)"))
    else:
        is_trained = advantage is not None and not (call.get("restricted") and call.get("supports") is None)
        section.append(build("pre", _build_tokens(pieces, logprobs, advantage if is_trained else None)))
        if len(ids) > MAX_TOKENS:
            section.append(build("p", f"{len(ids) - MAX_TOKENS:,} more tokens are not shown.", class_="note"))
    section.extend(_build_tool_calls(reply))
    return section


def _build_tokens(
    pieces: Sequence[tuple[str, int]], logprobs: Sequence[float], advantage: float | None
) -> list[Element]:
    """Returns a span per token with the classes of its log-prob, of its advantage and of being trained."""
    spans, place = [], 0
    of_advantage = [] if advantage is None else ["m", choose_advantage_class(advantage)]
    for text, count in pieces:
        logprob = sum(logprobs[place : place + count])
        place += count
        tip = f"log-prob {logprob:.3f}" + ("" if advantage is None else f", advantage {advantage:+.3f}, trained")
        spans.append(build("span", text, class_=" ".join([choose_logprob_class(logprob), *of_advantage]), title=tip))
    return spans


def choose_logprob_class(logprob: float) -> str:
    """Returns the class of a log-prob: `p0` for a sure token, to `p5` for an unlikely one."""
    return f"p{sum(logprob < border for border in LOGPROB_STEPS)}"


def choose_advantage_class(advantage: float) -> str:
    """Returns the class of an advantage: `n2`, `n1`, `a0`, `g1` or `g2`, from bad to good."""
    size = sum(abs(advantage) > border for border in ADVANTAGE_STEPS)
    return "a0" if size == 0 else f"{'g' if advantage > 0 else 'n'}{size}"


def _format(content: Any) -> str:
    return "" if content is None else format_content(content)


def _shorten(text: str, most: int = MAX_TEXT) -> str:
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} more characters)"
