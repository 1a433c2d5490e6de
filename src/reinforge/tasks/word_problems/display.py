"""Formats a few problems with the agent's replies before and after training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reinforge.runs.journal.reader import JournalReader

NUM_SOLVED, NUM_UNSOLVED = 4, 1  # problems that are shown: newly solved ones, and one that is still wrong
MAX_KEYS = 10_000


def format_problems(folder: Path) -> list[str]:
    """Returns confirm problems of a run as lines of text, each with both models' replies and the right answer."""
    before, after = read_episodes(folder, "confirm_base"), read_episodes(folder, "confirm_tuned")
    lines = []
    for example in choose_problems(before, after):
        old, new = before[example], after[example]
        lines += [
            "",
            str(old["calls"][0]["messages"][1]["content"]).partition("\n")[0],
            *(
                f"  {when:<7} {format_replies(each['calls'])}   ({'right' if is_solved(each) else 'wrong'})"
                for when, each in (("before", old), ("after", new))
            ),
        ]
    return lines


def read_episodes(folder: Path, phase: str) -> dict[str, dict[str, Any]]:
    """Returns the first episode of each example in a phase of a run, by example, without those that have no score."""
    reader, found = JournalReader(folder), {}
    for key in reader.episode_keys(MAX_KEYS, phase, None):
        episode = reader.find_episode(key)
        if episode is not None and episode.data["generation"] == 0 and "correct" in episode.data["scores"]:
            found[str(episode.data["example_id"])] = episode.data
    return found


def choose_problems(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Returns the examples that are shown: newly solved ones first, then one that is wrong after training."""
    both = [example for example in sorted(before) if example in after]
    solved = [each for each in both if not is_solved(before[each]) and is_solved(after[each])]
    unsolved = [each for each in both if not is_solved(after[each])]
    return [*solved[:NUM_SOLVED], *unsolved[:NUM_UNSOLVED]]


def is_solved(episode: Mapping[str, Any]) -> bool:
    return episode["scores"]["correct"]["score"] == 1.0


def format_replies(calls: list[dict[str, Any]]) -> str:
    """Returns the replies of an episode in one line; a tool call is shown with its result, such as `12 + 5 -> 17`."""
    parts = []
    for number, call in enumerate(calls):
        reply = call["reply"]
        if reply.get("tool_calls") and number + 1 < len(calls):
            result = calls[number + 1]["messages"][-1]["content"]
            arguments = json.loads(reply["tool_calls"][0]["function"]["arguments"])
            parts.append(f"{', '.join(map(str, arguments.values()))} -> {result}")
        elif reply.get("content"):
            parts.append(" ".join(str(reply["content"]).split()))
    return "; ".join(parts)
