"""One episode of a run's journal, and its conversation as text to read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforge.errors import ConfigError, Problem, StorageError, boundary, did_you_mean
from reinforge.files import to_json
from reinforge.runs.journal import read_rows

MAX_COMPARED = 2000
"""Keys among which the nearest to a misspelt one is looked for."""


@dataclass(frozen=True, slots=True)
class FoundEpisode:
    """An episode of the journal.

    Attributes:
        key: Its name, `phase/epoch/round/example/generation`.
        data: As `records.episode_json` wrote it.
        number: Where it stands among those asked for, from 0; None where it was asked for by its key.
        total: How many were asked for.
    """

    key: str
    data: dict[str, Any]
    number: int | None
    total: int


def find_episode(folder: Path, named: str, phase: str | None = None, epoch: int | None = None) -> FoundEpisode:
    """Returns an episode.

    Args:
        folder: The run folder.
        named: A number from 0, in the order in which the episodes ended, or a key.
        phase: Count those of this phase only.
        epoch: Count those of this epoch only.

    Raises:
        ConfigError: There is none.
        StorageError: The journal cannot be read.
    """
    limits: list[tuple[str, str | int]] = []
    if phase is not None:
        limits.append(("phase = ?", phase))
    if epoch is not None:
        limits.append(("epoch = ?", epoch))
    where = f" WHERE {' AND '.join(limit for limit, _ in limits)}" if limits else ""
    values = tuple(value for _, value in limits)
    with boundary(StorageError, f"reading {folder / 'run.sqlite'}"):
        [[total]] = read_rows(folder, f"SELECT count(*) FROM episodes{where}", values)
        if named.isdecimal():
            query = f"SELECT key, data FROM episodes{where} ORDER BY rowid LIMIT 1 OFFSET ?"
            found = read_rows(folder, query, (*values, int(named)))
        else:
            found = read_rows(folder, "SELECT key, data FROM episodes WHERE key = ?", (named,))
        if found:
            key, data = found[0]
            return FoundEpisode(key, json.loads(data), int(named) if named.isdecimal() else None, total)
        keys = read_rows(folder, f"SELECT key FROM episodes{where} LIMIT ?", (*values, MAX_COMPARED))
    asked = " and ".join(limit.replace("= ?", str(value)) for limit, value in limits)
    raise ConfigError(_not_there(folder, named, [key for (key,) in keys], total, asked))


def _not_there(folder: Path, named: str, keys: list[str], total: int, asked: str) -> Problem:
    of_those = f" of {asked}" if asked else ""
    if total == 0:
        return Problem("--episode", f"{folder} holds no episodes{of_those}", "reinforge runs show tells its stages")
    if named.isdecimal():
        message = f"there is no episode {named}{of_those}: there are {total:,}"
        return Problem("--episode", message, f"0 to {total - 1}, or a key such as {keys[0]}")
    message = f'there is no episode "{named}"{did_you_mean(named, keys)}'
    return Problem("--episode", message, f"a number from 0 to {total - 1}, or a key such as {keys[0]}")


def episode_lines(found: FoundEpisode) -> list[str]:
    """Returns an episode as lines of text: how it ended, then every message once, with its role and its tool calls.

    What was said is indented, so that it cannot pass for a heading.
    """
    data = found.data
    where = f"episode {found.number} of {found.total:,}" if found.number is not None else "episode"
    calls = data["calls"]
    replies = [reply for call in calls for reply in (call, *call.get("others", ()))]
    sampled = sum(reply["num_completion_tokens"] or 0 for reply in replies)
    lines = [
        f"{found.key}  ({where})",
        f"  outcome   {data['outcome']}" + (f": {data['reason']}" if data["reason"] else ""),
        f"  reward    {_figure(data['reward'])}",
    ]
    for name, score in data["scores"].items():
        why = "; ".join(str(score[key]) for key in ("reasoning", "error") if score.get(key) is not None)
        lines.append(f"  score     {name} {_figure(score['score'])}" + (f": {why}" if why else ""))
    num_calls = f"{len(calls)} call{'' if len(calls) == 1 else 's'}"
    attempt = f", attempt {data['attempt'] + 1}" if data["attempt"] else ""
    lines.append(f"  made      {num_calls}, {sampled:,} sampled tokens, {data['wall_s']:.2f} s{attempt}")
    shown: list[dict[str, Any]] = []
    for number, call in enumerate(calls):
        messages = call["messages"]
        if messages[: len(shown)] != shown:
            lines += ["", f"(call {number} asks with another history than the calls before)"]
            shown = []
        for message in messages[len(shown) :]:
            lines += ["", *_message_lines(message)]
        lines += ["", *_message_lines(call["reply"], _reply_facts(call))]
        shown = [*messages, call["reply"]]
        lines += _mark_lines(data["marks"], number + 1)
    lines += ["", "[what the agent returned]", *_indented(_text(data["output"]))]
    return lines


def _figure(value: Any) -> str:
    return "missing" if value is None else f"{value:g}" if isinstance(value, int | float) else to_json(value)


def _reply_facts(call: dict[str, Any]) -> str:
    facts = [f"{call['llm']}", f"{call['num_completion_tokens']} tokens", f"finish_reason {call['finish_reason']}"]
    if call["policy_version"] is not None:
        facts.append(f"version {call['policy_version']}")
    if call.get("others"):
        facts.append(f"choice {call['choice'] + 1} of {len(call['others']) + 1}")
    if call["logprobs"]:
        facts.append(f"mean log-prob {sum(call['logprobs']) / len(call['logprobs']):.2f}")
    return ", ".join(facts)


def _message_lines(message: dict[str, Any], facts: str = "") -> list[str]:
    name = message.get("name") or message.get("tool_call_id")
    head = f"[{message.get('role', '?')}{f' {name}' if name else ''}]"
    lines = [f"{head}  {facts}".rstrip()]
    content = message.get("content")
    if content is not None and content != "":
        lines += _indented(_text(content))
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        lines += _indented(
            f"-> {function.get('name', '?')}({_text(function.get('arguments', ''))})  {call.get('id', '')}".rstrip()
        )
    return lines


def _text(content: Any) -> str:
    """Returns text as it is, the text of OpenAI's content parts, and anything else as JSON."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content and all(isinstance(part, dict) and "type" in part for part in content):
        return "\n".join(str(part["text"]) if "text" in part else to_json(part) for part in content)
    return to_json(content)


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.split("\n")]


def _mark_lines(marks: list[dict[str, Any]], after_call: int) -> list[str]:
    lines = []
    for mark in marks:
        if mark["after_call"] == after_call:
            reward = "" if mark["step_reward"] is None else f" step reward {mark['step_reward']:g}"
            held = "" if mark["data"] is None else f" {to_json(mark['data'])}"
            lines.append(f"(the agent marks:{reward}{held})")
    return lines
