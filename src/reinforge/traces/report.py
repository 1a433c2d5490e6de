"""What an import read, and what it could not read and why, by count and line."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reinforge.errors import Problem
from reinforge.evaluation.rows import RowProblems
from reinforge.traces.store import RatingSummary

MAX_REASONS, MAX_PLACES, MAX_REASON_CHARS = 40, 5, 400


class ReadProblems(RowProblems):
    """Problems with the records of an export: counted by their reason, with the first few places of each."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.places: dict[str, list[str]] = {}

    def add(self, location: str, message: str, fix: str = "") -> None:
        reason = (f"{message}; {fix}" if fix else message)[:MAX_REASON_CHARS]
        if reason not in self.counts and len(self.counts) >= MAX_REASONS:
            reason = "other reasons"
        self.counts[reason] += 1
        places = self.places.setdefault(reason, [])
        if len(places) < MAX_PLACES:
            places.append(location)

    def list_problems(self) -> list[Problem]:
        return [
            Problem("", f"{count} × {reason}" if count > 1 else reason, "", self.places[reason][0])
            for reason, count in self.counts.most_common()
        ]


@dataclass
class ImportReport:
    """The outcome of an import."""

    output: Path
    num_files: int = 0
    num_rows: int = 0
    num_conversations: int = 0
    records: Counter[str] = field(default_factory=Counter)  # format -> records
    ignored: Counter[str] = field(default_factory=Counter)  # kind -> records that hold nothing to learn from
    unread: ReadProblems = field(default_factory=ReadProblems)
    labels: Counter[bool] = field(default_factory=Counter)  # rows with a thumb up, and with a thumb down
    num_rewarded: int = 0
    ratings: list[RatingSummary] = field(default_factory=list)
    label_names: list[str] = field(default_factory=list)
    reward_name: str | None = None
    num_unused_ratings: int = 0  # ratings of nothing that was read
    num_contradictory: int = 0  # rows with a thumb up and a thumb down, which get no label
    num_repeated: int = 0
    num_trimmed: int = 0  # rows whose last messages, which have no reply, were left out
    num_unrated: int = 0  # rows left out since they have no label and no reward (`--rated`)
    num_masked: int = 0
    shapes: Counter[str] = field(default_factory=Counter)  # shape -> rows; a dataset has one shape

    def ignore(self, kind: str) -> None:
        """Counts a record that holds nothing to learn from; kinds come from the records, so their number is limited."""
        kind = kind[:MAX_REASON_CHARS]
        self.ignored[kind if kind in self.ignored or len(self.ignored) < MAX_REASONS else "records of other kinds"] += 1

    def as_dict(self) -> dict[str, Any]:
        reasons = self.unread.counts.most_common()
        unread = [{"reason": each, "count": count, "places": self.unread.places[each]} for each, count in reasons]
        ratings = [
            {"name": each.name, "count": each.count, "min": each.low, "max": each.high, "mean": each.mean}
            for each in self.ratings
        ]
        counts = {key: value for key, value in vars(self).items() if key.startswith("num_")}
        return {
            "output": str(self.output),
            **counts,
            "shapes": dict(self.shapes),
            "records": dict(self.records),
            "ignored": dict(self.ignored),
            "unread": unread,
            "labels": {"true": self.labels[True], "false": self.labels[False]},
            "label_names": self.label_names,
            "reward_name": self.reward_name,
            "ratings": ratings,
        }

    def format_lines(self) -> list[str]:
        read = ", ".join(f"{name} {count:,}" for name, count in self.records.most_common()) or "none"
        rows = f"{count_noun(self.num_rows, 'row')} of {count_noun(self.num_conversations, 'conversation')}"
        lines = [f"{self.output}: {rows} (records read: {read}; files: {self.num_files:,})"]
        if len(self.shapes) > 1:
            found = ", ".join(f"{count:,} {shape}" for shape, count in self.shapes.most_common())
            lines.append(f"  shapes    {found}; a dataset has one shape: import these files one by one")
        if self.label_names:
            up, down = self.labels[True], self.labels[False]
            names, without = ", ".join(self.label_names), self.num_rows - up - down
            hint = "; --rated leaves these out" if without else ""
            lines.append(f"  label     {up:,} true, {down:,} false, {without:,} without{hint} (from {names})")
        if self.reward_name is not None:
            lines.append(f"  reward    {count_noun(self.num_rewarded, 'row')} (from {self.reward_name})")
        for each in self.ratings:
            if each.name not in (*self.label_names, self.reward_name):
                values = f"{each.count:,} values from {each.low:g} to {each.high:g}, mean {each.mean:.3g}"
                lines.append(f"  score     {each.name}: {values}; --reward {each.name} makes it the reward")
        return lines + self._format_left_out()

    def _format_left_out(self) -> list[str]:
        lines = [f"  ignored   {count:,} {kind}" for kind, count in self.ignored.most_common()]
        counts = {
            "records that are identical to an earlier one": self.num_repeated,
            "rows without a label and without a reward (--rated)": self.num_unrated,
            "ratings of records that were not read": self.num_unused_ratings,
        }
        lines += [f"  left out  {count:,} {what}" for what, count in counts.items() if count]
        rows = {
            "  trimmed   {}: the last messages have no reply": self.num_trimmed,
            "  no label  {} with thumbs up and thumbs down": self.num_contradictory,
            "  masked    something in {} (--redact)": self.num_masked,
        }
        lines += [text.format(count_noun(count, "row")) for text, count in rows.items() if count]
        if self.unread.counts:
            lines.append(f"  unread    {count_noun(sum(self.unread.counts.values()), 'record')}:")
        for reason, count in self.unread.counts.most_common():
            places = self.unread.places[reason]
            more = ", ..." if count > len(places) else ""
            lines.append(f"    {count:,} × {reason} ({', '.join(places)}{more})")
        return lines


def count_noun(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
