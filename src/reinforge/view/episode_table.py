"""The list of a run's episodes: filtered, sorted and cut into pages in memory.

What opens the list are a few columns of the journal, 100,000 rows of which take well below a second. The excerpts,
which are in the JSON of each episode, are read for the rows in view, and then for the others in the background; a
filter or an order that needs all of them waits for the rest.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from reinforge.runs.episodes import EpisodeExcerpt, format_prompt, make_excerpt
from reinforge.runs.journal.packing import read_packed
from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.rows import BASELINE, EpisodeExtent, ListedEpisode
from reinforge.safe_text import to_printable

COLLECT, FAILED = "collect", "failed"
DEFAULT_ORDER, BASELINE_NAME = "when", "baseline"
MAX_CELL = 160  # characters of a string in a row
NUM_READ = 1000  # episodes whose excerpts are read at once
_SPLITS = {"collect": "train", "validate": "select"}
_DAMAGE = (ValueError, LookupError, TypeError, AttributeError)
"""Raised by what an episode holds if that is damaged; its own page says so."""
_Group = tuple[int, int, str]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the list, and what orders its rows; None comes last."""

    title: str
    measure: Callable[[EpisodeTable, ListedEpisode], Any]
    is_number: bool = False
    has_excerpt: bool = False


COLUMNS = {
    "question": Column("question", lambda table, each: table.excerpt(each).question.lower() or None, has_excerpt=True),
    "reply": Column("reply", lambda table, each: table.excerpt(each).reply.lower() or None, has_excerpt=True),
    "expected": Column("expected", lambda table, each: table.excerpt(each).expected.lower() or None, has_excerpt=True),
    "reward": Column("reward", lambda table, each: each.reward, True),
    "relative": Column("± group", lambda table, each: table.measure_relative(each), True),
    "evaluators": Column("evaluators", lambda table, each: table.excerpt(each).first_score, has_excerpt=True),
    "outcome": Column("outcome", lambda table, each: each.outcome),
    "when": Column("epoch", lambda table, each: each.number),
    "turns": Column("turns", lambda table, each: table.excerpt(each).turns, True, True),
    "tokens": Column("tokens", lambda table, each: table.excerpt(each).tokens, True, True),
    "time": Column("time, s", lambda table, each: table.excerpt(each).seconds, True, True),
    "example": Column("example", lambda table, each: (each.example_id, each.generation)),
}
"""By the name in the address; the cells that `EpisodeTable.build_rows` returns after the key. Epochs are ordered by the
time at which their episodes ended, from the baseline to the verdict."""


def name_split(phase: str) -> str:
    """Returns the split that a phase runs on: `collect` -> `train`, `confirm_base` -> `confirm, base`."""
    return _SPLITS.get(phase, phase.replace("_", ", "))


def name_epoch(epoch: int) -> str:
    return BASELINE_NAME if epoch == BASELINE else str(epoch)


def describe_place(episode: ListedEpisode) -> str:
    """Returns when an episode ran: `train 3`, `select baseline`, `confirm, tuned`."""
    where = "" if episode.phase.startswith("confirm") else f" {name_epoch(episode.epoch)}"
    return f"{name_split(episode.phase)}{where}" + (f", refill {episode.round}" if episode.round else "")


@dataclass(frozen=True, slots=True)
class EpisodeQuery:
    """Which episodes to list, and how; the same in the address of the page. Empty or None: all.

    Attributes:
        text: Only episodes whose question, reply, expected answer or example id contains it.
        epoch: -1 is `baseline` in the address.
        outcome: `failed`: all but `ok`.
        low, high: The least and the greatest reward.
        example: The whole id.
        agent: One of the agents of a multi-agent episode, or functions and `llms` that called the model.
        worker: One of those that sampled its replies.
        order: One of `COLUMNS`; with a minus in front, the greatest first.
    """

    text: str = ""
    phase: str = ""
    epoch: int | None = None
    outcome: str = ""
    low: float | None = None
    high: float | None = None
    example: str = ""
    agent: str = ""
    worker: str = ""
    order: str = DEFAULT_ORDER

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> EpisodeQuery:
        """Returns the query of an address; a `ValueError` names a value that is not allowed."""
        values: dict[str, Any] = {
            name: given.get(name, "") for name in ("text", "phase", "outcome", "example", "agent", "worker")
        }
        order = given.get("order") or DEFAULT_ORDER
        if order.removeprefix("-") not in COLUMNS:
            raise ValueError(f'order: found "{order}", expected one of {", ".join(COLUMNS)}, or -reward and so on')
        parts: tuple[tuple[str, Callable[[str], Any], str], ...] = (
            ("epoch", _parse_epoch, f"a whole number or {BASELINE_NAME}"),
            ("low", float, "a number"),
            ("high", float, "a number"),
        )
        for name, parse, expected in parts:
            text = given.get(name, "").strip()
            try:
                values[name] = parse(text) if text else None
            except ValueError:
                raise ValueError(f'{name}: found "{text}", expected {expected}') from None
        return cls(**values, order=order)

    def as_dict(self) -> dict[str, str]:
        values = asdict(self) | {"low": write_number(self.low), "high": write_number(self.high)}
        values["epoch"] = "" if self.epoch is None else name_epoch(self.epoch)
        values["order"] = self.order if self.order != DEFAULT_ORDER else ""
        return {name: value for name, value in values.items() if value}

    @property
    def column(self) -> Column:
        return COLUMNS[self.order.removeprefix("-")]

    @property
    def needs_excerpts(self) -> bool:
        return bool(self.text or self.agent or self.worker or self.column.has_excerpt)


def write_number(value: float | None) -> str:
    """Returns a number as an address has it: exactly, since rewards are compared with it."""
    return "" if value is None else repr(value).removesuffix(".0")


def _parse_epoch(text: str) -> int:
    return BASELINE if text == BASELINE_NAME else int(text)


class EpisodeTable:
    def __init__(self, folder: Path):
        self._reader = JournalReader(folder)
        self._extent: EpisodeExtent | None = None
        self._clear()

    def _clear(self) -> None:
        self._episodes: list[ListedEpisode] = []
        self._by_key: dict[str, ListedEpisode] = {}
        self._sums: dict[_Group, list[float]] = {}
        self._selected: tuple[EpisodeQuery, Sequence[ListedEpisode]] | None = None
        self._excerpts: dict[int, EpisodeExcerpt] = {}
        self.agents: Counter[str] = Counter()
        self.workers: Counter[str] = Counter()
        self.epochs: Counter[int] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.phases: Counter[str] = Counter()

    def update(self) -> None:
        extent = self._reader.find_extent()
        if extent == self._extent:
            return
        gc.disable()  # else it would search all these rows, none of which is garbage, again and again: half of the time
        try:
            self._read(extent)
        finally:
            gc.enable()

    def _read(self, extent: EpisodeExtent) -> None:
        known = self._extent
        added = self._reader.list_episodes(after=known.newest) if known is not None else []
        is_longer = known is not None and extent.session_s == known.session_s
        if known is None or not is_longer or len(added) != extent.count - known.count:
            self._clear()  # episodes were replaced or removed, or nothing was read yet
            added = self._reader.list_episodes()
        self._add(added)
        self._selected, self._extent = None, self._measure(extent.session_s)

    def _measure(self, session_s: float) -> EpisodeExtent:
        newest = self._episodes[-1].number if self._episodes else 0
        return EpisodeExtent(len(self._episodes), newest, session_s)

    def _add(self, episodes: list[ListedEpisode]) -> None:
        self._episodes += episodes
        self._by_key.update(zip(map(attrgetter("key"), episodes), episodes, strict=True))
        for counter, name in ((self.outcomes, "outcome"), (self.phases, "phase"), (self.epochs, "epoch")):
            counter.update(map(attrgetter(name), episodes))
        for episode in episodes:
            if episode.phase == COLLECT and episode.reward is not None:
                known = self._sums.setdefault(_find_group(episode), [0.0, 0])
                known[0] += episode.reward
                known[1] += 1

    def __len__(self) -> int:
        return len(self._episodes)

    def find(self, key: str) -> ListedEpisode | None:
        return self._by_key.get(key)

    def __iter__(self) -> Iterator[ListedEpisode]:
        return iter(self._episodes)

    def excerpt(self, episode: ListedEpisode) -> EpisodeExcerpt:
        """Returns the excerpt of an episode; an empty one if it was not read, or is damaged."""
        return self._excerpts.get(episode.number, _NOTHING)

    def read_excerpts(self, episodes: Iterable[ListedEpisode] | None = None) -> int:
        """Reads the excerpts of episodes, or the next ones of all; returns how many it has read."""
        wanted = (each.number for each in self._episodes if each.number not in self._excerpts)
        if episodes is not None:
            wanted = (each.number for each in episodes if each.number not in self._excerpts)
        numbers = list(islice(wanted, NUM_READ))
        found = self._reader.read_data(numbers) if numbers else {}
        for number in numbers:
            excerpt = _NOTHING
            with contextlib.suppress(*_DAMAGE):
                excerpt = make_excerpt(read_packed(found[number]))
            self._excerpts[number] = excerpt
            self.agents.update(excerpt.agents)
            self.workers.update(excerpt.workers)
        return len(numbers)

    def read_prompts(self, episodes: Sequence[ListedEpisode]) -> dict[int, str]:
        """Returns the first prompt of episodes by their number, without those that cannot be read."""
        found = {}
        for number, packed in self._reader.read_data(each.number for each in episodes).items():
            with contextlib.suppress(*_DAMAGE):
                found[number] = format_prompt(read_packed(packed))
        return found

    def select(self, query: EpisodeQuery) -> Sequence[ListedEpisode]:
        """Returns the episodes that a query asks for, in its order; what is missing comes last."""
        if self._selected is None or self._selected[0] != query:
            while query.needs_excerpts and self.read_excerpts():
                pass
            self._selected = (query, self._sort(self._filter(query), query))
        return self._selected[1]

    def _filter(self, query: EpisodeQuery) -> list[ListedEpisode]:
        found, low, high = self._episodes, query.low, query.high
        if query.phase:
            found = [each for each in found if each.phase == query.phase]
        if query.epoch is not None:
            found = [each for each in found if each.epoch == query.epoch]
        if query.outcome:
            found = [
                each
                for each in found
                if (each.outcome != "ok" if query.outcome == FAILED else each.outcome == query.outcome)
            ]
        if query.example:
            found = [each for each in found if each.example_id == query.example]
        if low is not None:
            found = [each for each in found if each.reward is not None and each.reward >= low]
        if high is not None:
            found = [each for each in found if each.reward is not None and each.reward <= high]
        if query.agent:
            found = [each for each in found if query.agent in self.excerpt(each).agents]
        if query.worker:
            found = [each for each in found if query.worker in self.excerpt(each).workers]
        if text := query.text.lower():
            found = [each for each in found if text in f"{each.example_id}\n{self.excerpt(each).searched}".lower()]
        return found

    def _sort(self, episodes: list[ListedEpisode], query: EpisodeQuery) -> list[ListedEpisode]:
        if query.order == DEFAULT_ORDER:
            return episodes
        measure = query.column.measure
        measured = [(measure(self, episode), episode) for episode in episodes]
        known = [each for each in measured if each[0] is not None]
        known.sort(key=itemgetter(0), reverse=query.order.startswith("-"))
        return [episode for _, episode in known] + [episode for value, episode in measured if value is None]

    def find_baseline(self, episode: ListedEpisode) -> float | None:
        """Returns the mean reward of a training episode's group; None: it was not collected for training."""
        total, count = self._sums.get(_find_group(episode), [0.0, 0]) if episode.phase == COLLECT else [0.0, 0]
        return total / count if count else None

    def measure_relative(self, episode: ListedEpisode) -> float | None:
        """Returns the reward minus the mean of the group; None: unknown, or not a training episode."""
        baseline = self.find_baseline(episode)
        return None if baseline is None or episode.reward is None else episode.reward - baseline

    def list_siblings(self, episode: ListedEpisode) -> list[ListedEpisode]:
        group, phase = _find_group(episode), episode.phase
        found = [each for each in self._episodes if each.phase == phase and _find_group(each) == group]
        return sorted(found, key=lambda each: each.generation)

    def list_others(self, episode: ListedEpisode) -> list[ListedEpisode]:
        """Returns the first episode of the same example in each other phase and epoch, in the order they ended."""
        found: dict[tuple[str, int], ListedEpisode] = {}
        for each in self._episodes:
            if each.example_id == episode.example_id and (each.phase, each.epoch) != (episode.phase, episode.epoch):
                found.setdefault((each.phase, each.epoch), each)
        return list(found.values())

    def build_rows(self, episodes: Sequence[ListedEpisode]) -> list[list[str]]:
        """Returns the key of each episode, then the cells of its row, as `view.js` reads them."""
        self.read_excerpts(episodes)
        return [self._build_row(episode) for episode in episodes]

    def _build_row(self, episode: ListedEpisode) -> list[str]:
        relative, found = self.measure_relative(episode), self.excerpt(episode)
        cells = (
            found.question or f"example {episode.example_id}",
            found.reply,
            found.expected,
            format_number(episode.reward),
            "" if relative is None else f"{relative:+.3g}",
            found.evaluators,
            episode.outcome,
            describe_place(episode),
            str(found.turns or ""),
            f"{found.tokens:,}" if found.tokens else "",
            f"{found.seconds:.2f}" if found.seconds else "",
            f"{episode.example_id} #{episode.generation}",
        )
        return [episode.key, *(to_printable(cell[:MAX_CELL]) for cell in cells)]


def format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _find_group(episode: ListedEpisode) -> _Group:
    return (episode.epoch, episode.round, episode.example_id)


_NOTHING = EpisodeExcerpt()
