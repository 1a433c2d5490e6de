"""What the rows of a dataset hold: their shape, conversations, lengths, labels and rewards, and repetitions."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reinforge.evaluation.contamination import find_near_duplicates, read_question
from reinforge.evaluation.datasets import FileDataset, choose_format
from reinforge.evaluation.demonstrations import DEMONSTRATION_SHAPES, LABEL, Demonstration, RowFormat, detect_format
from reinforge.evaluation.rows import RowProblems
from reinforge.evaluation.shapes import InvalidRowError, read_label
from reinforge.types.evaluation import EvalInputItem

CONVERSATION = "conversation"
REPLY_KEYS = ("messages", "completion", "chosen", "rejected", "preferred_output", "non_preferred_output", "answer")


@dataclass(frozen=True)
class LoadedRows:
    """The rows of a file; `locations` has the place of each row by example id."""

    items: list[EvalInputItem]
    shape: str
    row_format: RowFormat
    locations: dict[str, str]

    @property
    def rows(self) -> list[Any]:
        return [item.full_dataset_entry for item in self.items]

    def parse(self) -> list[list[Demonstration]]:
        """Returns the replies to train on of each row; none of a row without one."""
        if self.row_format.shape not in DEMONSTRATION_SHAPES or self.shape.startswith("messages (prompts"):
            return [[] for _ in self.items]
        return [self.row_format.parse(row) for row in self.rows]


def load_rows(path: Path) -> LoadedRows:
    """Returns the rows of a file; a `ConfigError` has all problems."""
    dataset = FileDataset(choose_format(path)(file_path=path), Path.cwd())
    items = dataset.load()
    row_format = detect_format([item.full_dataset_entry for item in items])
    loaded = LoadedRows(items, dataset.shape or "", row_format, dataset.row_locations)
    found = RowProblems()
    for item in items if any_replies(loaded) else ():
        try:
            row_format.parse(item.full_dataset_entry)
        except InvalidRowError as error:
            found.add(dataset.row_locations[str(item.id)], str(error))
    found.raise_all()
    return loaded


def any_replies(loaded: LoadedRows) -> bool:
    return loaded.row_format.shape in DEMONSTRATION_SHAPES and not loaded.shape.startswith("messages (prompts")


@dataclass
class RowStatistics:
    """Statistics of a dataset."""

    shape: str
    num_rows: int
    num_conversations: int  # rows without one count as one each
    num_prompts: int = 0
    num_pairs: int = 0  # prompts with replies of different rewards, which make preference pairs
    num_repeated: int = 0  # rows whose prompt and replies are those of an earlier row
    num_tools: int = 0  # rows with tools
    labels: Counter[bool] = field(default_factory=Counter)
    reward_key: str | None = None
    rewards: list[float] = field(default_factory=list)
    num_replies: list[int] = field(default_factory=list)  # to train on, of each row
    prompt_chars: list[int] = field(default_factory=list)
    reply_chars: list[int] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        lists = {
            name: _summarize(getattr(self, name)) for name in ("rewards", "num_replies", "prompt_chars", "reply_chars")
        }
        labels = {"true": self.labels[True], "false": self.labels[False]}
        return {key: value for key, value in vars(self).items() if key not in lists} | lists | {"labels": labels}

    def format_rows(self) -> list[tuple[str, str]]:
        rows = [
            ("shape", self.shape),
            ("rows", f"{self.num_rows:,} of {self.num_conversations:,} conversations"),
            ("prompts", f"{self.num_prompts:,} different; {self.num_pairs:,} with better and worse replies"),
        ]
        if self.num_repeated:
            rows.append(("repeated", f"{self.num_repeated:,} rows; `reinforge data dedupe` removes them"))
        if any(self.labels.values()):
            without = self.num_rows - sum(self.labels.values())
            rows.append((LABEL, f"{self.labels[True]:,} true, {self.labels[False]:,} false, {without:,} without"))
        if self.reward_key is not None and self.reward_key != LABEL:
            rows.append(("reward", f"{self.reward_key}: {_format(self.rewards)}"))
        if self.num_tools:
            rows.append(("tools", f"{self.num_tools:,} rows"))
        if any(self.num_replies):
            rows.append(("replies", f"{sum(self.num_replies):,} to train on; per row: {_format(self.num_replies)}"))
        rows.append(("prompt", f"characters: {_format(self.prompt_chars)}"))
        if self.reply_chars:
            rows.append(("reply", f"characters: {_format(self.reply_chars)}"))
        return rows


def compute_row_statistics(loaded: LoadedRows) -> RowStatistics:
    rows = loaded.rows
    found = RowStatistics(loaded.shape, len(rows), len({get_conversation(item) for item in loaded.items}))
    found.reward_key = loaded.row_format.reward_key
    prompts: dict[str, list[float]] = {}
    seen: set[str] = set()
    for item, row, replies in zip(loaded.items, rows, loaded.parse(), strict=True):
        found.prompt_chars.append(len(read_question(item.input_obj)))
        found.num_replies.append(sum(len(each.replies()) for each in replies))
        found.reply_chars += [len(_read_reply(each, index)) for each in replies for index in each.replies()]
        prompt = replies[0].describe_prompt(last_only=True) if replies else json.dumps(item.input_obj, default=repr)
        rewards = prompts.setdefault(prompt, [])
        if loaded.row_format.has_rewards:
            rewards += [each.reward for each in replies]
            found.rewards += [each.reward for each in replies]
        if isinstance(row, Mapping):
            found.num_tools += bool(row.get("tools"))
            if (label := read_label(row)) is not None:
                found.labels[label] += 1
        key = describe_content(item)
        found.num_repeated += key in seen
        seen.add(key)
    found.num_prompts = len(prompts)
    found.num_pairs = sum(max(each) > min(each) for each in prompts.values() if each)
    return found


def find_repeated_rows(loaded: LoadedRows, threshold: float) -> dict[int, tuple[int, float]]:
    """Returns rows to leave out: index -> the earlier row that stays, and the similarity of the two.

    With a `threshold` of 1, only rows with the same prompt and the same replies.
    """
    first: dict[str, int] = {}
    left_out: dict[int, tuple[int, float]] = {}
    for index, item in enumerate(loaded.items):
        earlier = first.setdefault(describe_content(item), index)
        if earlier != index:
            left_out[index] = (earlier, 1.0)
    if threshold < 1:
        kept = [index for index in range(len(loaded.items)) if index not in left_out]
        texts = [read_question(_list_content(loaded.items[index])) for index in kept]
        for one, other, similarity in find_near_duplicates(texts, threshold):
            if kept[one] not in left_out:
                left_out.setdefault(kept[other], (kept[one], similarity))
    return left_out


def describe_content(item: EvalInputItem) -> str:
    """Returns what is equal for rows with the same prompt and the same replies, whatever their ids and scores are."""
    row = item.full_dataset_entry
    tools = row.get("tools") if isinstance(row, Mapping) else None
    return json.dumps([_list_content(item), tools], sort_keys=True, default=repr)


def _list_content(item: EvalInputItem) -> list[Any]:
    """Returns the prompt and the replies of a row: not its id, its scores, or the tools that all rows may share."""
    row = item.full_dataset_entry
    replies = [row.get(key) for key in REPLY_KEYS] if isinstance(row, Mapping) else []
    return [item.input_obj, item.expected_output_obj if not any(replies) else None, replies]


def get_conversation(item: EvalInputItem) -> tuple[str, str]:
    """Returns what is equal for rows of one conversation; a row without one is its own."""
    row = item.full_dataset_entry
    name = row.get(CONVERSATION) if isinstance(row, Mapping) else None
    return (CONVERSATION, str(name)) if isinstance(name, str | int) else ("row", str(item.id))


def _read_reply(demonstration: Demonstration, index: int) -> str:
    message = demonstration.messages[index]
    return read_question(message.get("content")) + "".join(json.dumps(call) for call in message.get("tool_calls") or ())


def _summarize(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {
        "min": min(values),
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "max": max(values),
    }


def _format(values: Sequence[float]) -> str:
    if not values:
        return "none"
    return f"median {statistics.median(values):g}, from {min(values):g} to {max(values):g}"
