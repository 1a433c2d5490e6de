"""Finds episodes in the journal of a run, and formats one as a readable conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforge.errors import ConfigError, Problem, did_you_mean
from reinforge.files import to_json
from reinforge.runs.journal.reader import JournalReader

MAX_COMPARED = 2000  # keys that a misspelled key is compared with
MAX_EXCERPT = 500  # characters of a question, a reply or an expected answer that lists show and search


@dataclass(frozen=True, slots=True)
class FoundEpisode:
    """An episode of the journal."""

    key: str  # its name, `phase/epoch/round/example/generation`
    data: dict[str, Any]  # as `episode_json.dump_episode` wrote it
    number: int | None  # its position among the `total` matching episodes, from 0; None: it was found by its key
    total: int


@dataclass(frozen=True, slots=True)
class ComparedExample:
    """One example in two runs, or before and after training."""

    example_id: str
    first: float  # mean score of its episodes
    second: float  # the same in the other run, or after training
    keys: tuple[str, str]  # the key of its first episode in each

    @property
    def change(self) -> float:
        return self.second - self.first

    def rank(self) -> tuple[float, str]:
        return (-self.change, self.example_id)


@dataclass(slots=True)  # not frozen: 100,000 of them are made for one list
class EpisodeExcerpt:
    """What a list shows of an episode: one line of each text."""

    question: str = ""  # the last message of the user in the first prompt
    reply: str = ""
    expected: str = ""
    scores: tuple[tuple[str, float | None], ...] = ()  # of each evaluator; None: it has none
    agents: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()  # that sampled its replies; empty: there is one place to sample from
    turns: int = 0  # model calls
    tokens: int = 0  # sampled
    seconds: float = 0.0

    @property
    def searched(self) -> str:
        return f"{self.question}\n{self.reply}\n{self.expected}"

    @property
    def first_score(self) -> float | None:
        return self.scores[0][1] if self.scores else None

    @property
    def evaluators(self) -> str:
        return ", ".join(f"{name} {'-' if score is None else f'{score:.3g}'}" for name, score in self.scores)


def make_excerpt(data: dict[str, Any]) -> EpisodeExcerpt:
    """Returns an excerpt of an episode as the journal holds it."""
    calls = data["calls"]
    if _is_dialogue(data):
        agents = [message["agent"] for message in data["output"]["messages"]]
    else:
        agents = [(call["functions"] or [call["llm"]])[-1] for call in calls]
    return EpisodeExcerpt(
        _take_excerpt(find_question(data)),
        _take_excerpt(find_reply(data)),
        _take_excerpt("" if data.get("expected") is None else format_content(data["expected"])),
        tuple((name, _read_score(score["score"])) for name, score in data["scores"].items()),
        tuple(dict.fromkeys(agents)),
        tuple(sorted({call["worker"] for call in calls if call.get("worker")})),
        len(calls),
        sum(reply["num_completion_tokens"] or 0 for call in calls for reply in (call, *call.get("others", ()))),
        data["wall_s"],
    )


def find_question(data: dict[str, Any]) -> str:
    """Returns the question of a dialogue, or else the last message of the user in the first prompt."""
    if _is_dialogue(data):
        return format_content(data["output"]["question"])
    messages = data["calls"][0]["messages"] if data["calls"] else []
    asked = [message.get("content") for message in messages if message.get("role") == "user"]
    return format_content(asked[-1]) if asked and asked[-1] is not None else ""


def find_reply(data: dict[str, Any]) -> str:
    """Returns the output of the agent if it is a string, else the last reply of a model, else the output as JSON."""
    output, calls = data["output"], data["calls"]
    last = calls[-1]["reply"].get("content") if calls and not isinstance(output, str) else None
    found = last or output
    return "" if found is None else format_content(found)


def _is_dialogue(data: dict[str, Any]) -> bool:
    return isinstance(data["output"], dict) and {"protocol", "question", "messages"} <= data["output"].keys()


def _take_excerpt(text: str) -> str:
    return " ".join(text[: 2 * MAX_EXCERPT].split())[:MAX_EXCERPT]


def _read_score(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None


def format_prompt(data: dict[str, Any]) -> str:
    """Returns the messages of an episode's first call as text; empty: it made none."""
    messages = data["calls"][0]["messages"] if data["calls"] else []
    return "\n".join(f"{message.get('role')}: {format_content(message.get('content'))}" for message in messages)


def count_changes(examples: Sequence[ComparedExample]) -> tuple[int, int, int]:
    changes = [example.change for example in examples]
    return sum(each > 0 for each in changes), sum(each == 0 for each in changes), sum(each < 0 for each in changes)


def choose_changed(examples: Sequence[ComparedExample], most: int) -> tuple[list[ComparedExample], ...]:
    """Returns at most so many examples that score higher and that score lower, the largest changes first."""
    better = [example for example in examples if example.change > 0]
    worse = [example for example in reversed(examples) if example.change < 0]
    return better[:most], worse[:most]


def find_episode(folder: Path, number_or_key: str, phase: str | None = None, epoch: int | None = None) -> FoundEpisode:
    """Returns one episode of a run; a number counts only the episodes of `phase` and `epoch`, if they are given.

    Raises:
        ConfigError: There is no such episode.
        StorageError: The journal cannot be read.
    """
    reader = JournalReader(folder)
    total = reader.count_episodes(phase, epoch)
    number = int(number_or_key) if number_or_key.isdecimal() else None
    found = reader.find_episode(number_or_key) if number is None else reader.episode_at(number, phase, epoch)
    if found is not None:
        return FoundEpisode(found.key, found.data, number, total)
    keys = reader.episode_keys(MAX_COMPARED, phase, epoch)
    given = {"phase": phase, "epoch": epoch}
    scope = " and ".join(f"{name} {value}" for name, value in given.items() if value is not None)
    raise ConfigError(_build_problem(folder, number_or_key, keys, total, f" of {scope}" if scope else ""))


def _build_problem(folder: Path, number_or_key: str, keys: list[str], total: int, scope: str) -> Problem:
    if total == 0:
        return Problem("--episode", f"{folder} has no episodes{scope}", "`reinforge runs show` lists its stages")
    fix = f"use a number from 0 to {total - 1}, or a key such as {keys[0]}"
    if number_or_key.isdecimal():
        return Problem("--episode", f"there is no episode {number_or_key}{scope}: there are {total:,}", fix)
    message = f'there is no episode "{number_or_key}"{did_you_mean(number_or_key, keys)}'
    return Problem("--episode", message, fix)


def format_episode(found: FoundEpisode) -> list[str]:
    """Returns an episode as lines of text: how it ended, then every message once, with its role and its tool calls.

    Messages are indented, so that none of their lines can be mistaken for a heading.
    """
    data = found.data
    where = f"episode {found.number} of {found.total:,}" if found.number is not None else "episode"
    calls = data["calls"]
    replies = [reply for call in calls for reply in (call, *call.get("others", ()))]
    sampled = sum(reply["num_completion_tokens"] or 0 for reply in replies)
    lines = [
        f"{found.key}  ({where})",
        f"  outcome   {data['outcome']}" + (f": {data['reason']}" if data["reason"] else ""),
        f"  reward    {_format_value(data['reward'])}",
    ]
    for name, score in data["scores"].items():
        why = "; ".join(str(score[key]) for key in ("reasoning", "error") if score.get(key) is not None)
        lines.append(f"  score     {name} {_format_value(score['score'])}" + (f": {why}" if why else ""))
    attempt = f", attempt {data['attempt'] + 1}" if data["attempt"] else ""
    lines.append(f"  calls     {len(calls)}, {sampled:,} sampled tokens, {data['wall_s']:.2f} s{attempt}")
    shown: list[dict[str, Any]] = []
    for number, call in enumerate(calls):
        messages = call["messages"]
        if messages[: len(shown)] != shown:
            lines += ["", f"(call {number} starts from a different history)"]
            shown = []
        for message in messages[len(shown) :]:
            lines += ["", *_format_message(message)]
        lines += ["", *_format_message(call["reply"], _describe_reply(call))]
        shown = [*messages, call["reply"]]
        lines += _format_marks(data["marks"], number + 1)
    lines += ["", "[output of the agent]", *_indent(format_content(data["output"]))]
    return lines


def read_outputs(folder: Path, phase: str) -> dict[str, Any]:
    """Returns what the agent returned on each example of a phase of a run, such as `confirm_base`, by example id."""
    return JournalReader(folder).outputs(phase)


def _format_value(value: Any) -> str:
    return "missing" if value is None else f"{value:g}" if isinstance(value, int | float) else to_json(value)


def describe_versions(call: Mapping[str, Any]) -> str:
    """Returns `version 3`, or `versions 3, 4` where newer weights continued the reply."""
    later = call.get("later_versions") or ()
    versions = (call["policy_version"], *(version for _, version in later))
    return f"version{'s' * bool(later)} {', '.join(map(str, versions))}"


def _describe_reply(call: dict[str, Any]) -> str:
    facts = [f"{call['llm']}", f"{call['num_completion_tokens']} tokens", f"finish_reason {call['finish_reason']}"]
    if call["policy_version"] is not None:
        facts.append(describe_versions(call))
    if call.get("others"):
        facts.append(f"choice {call['choice'] + 1} of {len(call['others']) + 1}")
    if call["logprobs"]:
        facts.append(f"mean log-prob {sum(call['logprobs']) / len(call['logprobs']):.2f}")
    return ", ".join(facts)


def _format_message(message: dict[str, Any], facts: str = "") -> list[str]:
    name = message.get("name") or message.get("tool_call_id")
    head = f"[{message.get('role', '?')}{f' {name}' if name else ''}]"
    lines = [f"{head}  {facts}".rstrip()]
    content = message.get("content")
    if content is not None and content != "":
        lines += _indent(format_content(content))
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        arguments = format_content(function.get("arguments", ""))
        lines += _indent(f"-> {function.get('name', '?')}({arguments})  {call.get('id', '')}".rstrip())
    return lines


def format_content(content: Any) -> str:
    """Returns a string unchanged, the text of OpenAI's content parts, and anything else as JSON."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content and all(isinstance(part, dict) and "type" in part for part in content):
        return "\n".join(str(part["text"]) if "text" in part else to_json(part) for part in content)
    return to_json(content)


def _indent(text: str) -> list[str]:
    return [f"  {line}" for line in text.split("\n")]


def _format_marks(marks: list[dict[str, Any]], after_call: int) -> list[str]:
    lines = []
    for mark in marks:
        if mark["after_call"] == after_call:
            reward = "" if mark["step_reward"] is None else f" step reward {mark['step_reward']:g}"
            value = "" if mark["data"] is None else f" {to_json(mark['data'])}"
            lines.append(f"(mark:{reward}{value})")
    return lines
