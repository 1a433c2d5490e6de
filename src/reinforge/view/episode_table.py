"""The list of a run's episodes: filtered, sorted and cut into pages in memory, without reading what they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.rows import EpisodeExtent, ListedEpisode
from reinforge.safe_text import escape_controls

COLLECT, FAILED = "collect", "failed"
ORDERS = {
    "oldest": "oldest first",
    "newest": "newest first",
    "best": "highest reward",
    "worst": "lowest reward",
    "above": "most above its group",
    "below": "most below its group",
}
HEADER = ("episode", "phase", "epoch", "example", "sample", "outcome", "reward", "relative reward")
"""The columns of the cells that `EpisodeTable.build_row` returns after the key."""
_Group = tuple[int, int, str]


@dataclass(frozen=True, slots=True)
class EpisodeQuery:
    """Which episodes to list, and how; the same in the address of the page. Empty or None: all.

    Attributes:
        outcome: `failed`: all but `ok`.
        example: Only examples whose id contains this string.
        order: One of `ORDERS`.
    """

    phase: str = ""
    epoch: int | None = None
    outcome: str = ""
    example: str = ""
    order: str = "oldest"

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> EpisodeQuery:
        """Returns the query of an address; a `ValueError` names a value that is not allowed."""
        order = given.get("order") or "oldest"
        if order not in ORDERS:
            raise ValueError(f'order: found "{order}", expected one of {", ".join(ORDERS)}')
        epoch = given.get("epoch", "").strip()
        try:
            number = int(epoch) if epoch else None
        except ValueError:
            raise ValueError(f'epoch: found "{epoch}", expected a whole number, -1 for the baseline') from None
        return cls(given.get("phase", ""), number, given.get("outcome", ""), given.get("example", ""), order)

    def as_dict(self) -> dict[str, str]:
        values = {"phase": self.phase, "epoch": "" if self.epoch is None else str(self.epoch), "outcome": self.outcome}
        values |= {"example": self.example, "order": "" if self.order == "oldest" else self.order}
        return {name: value for name, value in values.items() if value}


class EpisodeTable:
    def __init__(self, folder: Path):
        self._reader = JournalReader(folder)
        self._extent: EpisodeExtent | None = None
        self._clear()

    def _clear(self) -> None:
        self._episodes: list[ListedEpisode] = []
        self._by_key: dict[str, ListedEpisode] = {}
        self._sums: dict[_Group, tuple[float, int]] = {}
        self._selected: tuple[EpisodeQuery, Sequence[ListedEpisode]] | None = None
        self.outcomes: Counter[str] = Counter()
        self.phases: Counter[str] = Counter()

    def update(self) -> None:
        extent = self._reader.find_extent()
        if extent == self._extent:
            return
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
        self._by_key.update((episode.key, episode) for episode in episodes)
        self.outcomes.update(episode.outcome for episode in episodes)
        self.phases.update(episode.phase for episode in episodes)
        for episode in episodes:
            if episode.phase == COLLECT and episode.reward is not None:
                group = _find_group(episode)
                total, count = self._sums.get(group, (0.0, 0))
                self._sums[group] = (total + episode.reward, count + 1)

    def __len__(self) -> int:
        return len(self._episodes)

    def find(self, key: str) -> ListedEpisode | None:
        return self._by_key.get(key)

    def select(self, query: EpisodeQuery) -> Sequence[ListedEpisode]:
        """Returns the episodes that a query asks for, in its order; missing rewards come last."""
        if self._selected is None or self._selected[0] != query:
            found = [episode for episode in self._episodes if _is_asked_for(episode, query)]
            self._selected = (query, self._sort(found, query.order))
        return self._selected[1]

    def _sort(self, episodes: list[ListedEpisode], order: str) -> list[ListedEpisode]:
        if order in ("oldest", "newest"):
            return episodes if order == "oldest" else episodes[::-1]
        sign = -1 if order in ("best", "above") else 1
        measure: Callable[[ListedEpisode], float | None]
        measure = (lambda episode: episode.reward) if order in ("best", "worst") else self.measure_relative
        measured = [(measure(episode), episode) for episode in episodes]
        known = [(value * sign, episode.number, episode) for value, episode in measured if value is not None]
        known.sort(key=lambda each: each[:2])
        return [episode for _, _, episode in known] + [episode for value, episode in measured if value is None]

    def find_baseline(self, episode: ListedEpisode) -> float | None:
        """Returns the mean reward of a training episode's group; None: it was not collected for training."""
        total, count = self._sums.get(_find_group(episode), (0.0, 0)) if episode.phase == COLLECT else (0.0, 0)
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

    def build_row(self, episode: ListedEpisode) -> list[Any]:
        """Returns the key of an episode, then the cells of its row, as `view.js` reads them."""
        relative = self.measure_relative(episode)
        return [
            episode.key,
            escape_controls(episode.key),
            episode.phase,
            episode.epoch,
            escape_controls(episode.example_id),
            episode.generation,
            episode.outcome,
            format_number(episode.reward),
            "" if relative is None else f"{relative:+.3g}",
        ]


def format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _find_group(episode: ListedEpisode) -> _Group:
    return (episode.epoch, episode.round, episode.example_id)


def _is_asked_for(episode: ListedEpisode, query: EpisodeQuery) -> bool:
    return (
        query.phase in ("", episode.phase)
        and query.epoch in (None, episode.epoch)
        and (query.outcome in ("", episode.outcome) or (query.outcome == FAILED and episode.outcome != "ok"))
        and query.example.lower() in episode.example_id.lower()
    )
