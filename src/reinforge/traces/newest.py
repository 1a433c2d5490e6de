"""The newest requests of a log, kept apart as a test of drift: a model is trained on older ones only.

    1,000 requests of 9 days    the newest 100, in whole groups, get `transfer: true` and `task: newest requests`
    1,000 requests of one day   none: a day shows no drift

A group is a conversation, or several whose questions nearly repeat each other, and is as old as its first request. So
the newest requests differ from the older ones as much as the confirm examples do from those that are trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from reinforge.evaluation.contamination import group_near_duplicates
from reinforge.evaluation.datasets import RowDataset
from reinforge.evaluation.non_inferiority import MIN_OF_SLICE
from reinforge.evaluation.splits import group_by_column, merge_groups

NEWEST = "newest requests"
SHARE, SHORTEST = 0.1, timedelta(days=2)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class NewestRequests:
    """Which requests are kept apart, and why not more."""

    num_rows: int
    text: str  # for the user


def keep_newest_apart(rows: Sequence[Row]) -> tuple[list[Row], NewestRequests]:
    """Returns the rows, the newest ones marked, and which these are.

    Args:
        rows: With `id`, `conversation` and, where it is known, `time` in ISO 8601.
    """
    times = {str(row["id"]): datetime.fromisoformat(row["time"]) for row in rows if "time" in row}
    if len(times) < len(rows):
        return list(rows), _keep_none(f"{len(rows) - len(times):,} of {len(rows):,} rows have no time")
    span = max(times.values()) - min(times.values())
    if span < SHORTEST:
        length = f"{span.days} days" if span.days > 1 else f"{span.total_seconds() / 3600:.1f} hours"
        return list(rows), _keep_none(f"the log spans {length}, and it takes {SHORTEST.days} days")
    items = RowDataset(rows).load()
    similar = [*group_near_duplicates(items), *group_by_column(items, "conversation").values()]
    groups = merge_groups([[id_] for id_ in times], similar)
    begun = sorted(((min(times[id_] for id_ in group), group) for group in groups), reverse=True)
    newest = dict[str, datetime]()
    for time, group in begun:
        if len(newest) + len(group) > SHARE * len(rows):
            break
        newest |= dict.fromkeys(group, time)
    if len(newest) < MIN_OF_SLICE:
        few = f"{len(newest)} of the newest tenth repeat no older request, and it takes {MIN_OF_SLICE}"
        return list(rows), _keep_none(few)
    since = f"{min(newest.values()):%Y-%m-%d %H:%M}"
    text = f"the {len(newest):,} since {since} are trained on by nothing, and compared apart from the verdict"
    mark = {"transfer": True, "task": NEWEST}
    marked = [row | mark if str(row["id"]) in newest else row for row in rows]
    return marked, NewestRequests(len(newest), text)


def _keep_none(why: str) -> NewestRequests:
    return NewestRequests(0, f"none are kept apart as a test of drift: {why}")
