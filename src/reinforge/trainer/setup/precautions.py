"""What is wrong with the measure of a run before it trains.

Held-out examples that repeat training examples, and a verdict without a metric apart from the reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reinforge.config.schema import FinetuneConfig, GateConfig, SplitsConfig
from reinforge.errors import Problem
from reinforge.evaluation.contamination import Repetition, find_repetitions, is_trained_on
from reinforge.evaluation.splits import PATH
from reinforge.runs.rows import BASELINE, GuardEvent
from reinforge.types.evaluation import EvalInputItem

MAX_COMPARED = 20_000
"""Datasets with more examples are not searched for near-duplicates when a run starts; it would take minutes."""
MAX_SHOWN = 3
NEAR_DUPLICATES = f"{PATH}.near_duplicates"
Splits = Mapping[str, Sequence[EvalInputItem]]


def list_held_out_metrics(gate: GateConfig, reward: str) -> list[str]:
    named = [gate.metric or reward, *gate.guard_metrics]
    return [name for name in dict.fromkeys(named) if name != reward]


def find_warnings(
    config: FinetuneConfig, splits: Splits, reward: str, evaluators: Sequence[str], *, trains_on_reward: bool = True
) -> list[GuardEvent]:
    """Returns what to know about the measure of a run before it trains.

    Args:
        trains_on_reward: False if the rows of the dataset are trained on, which no reward was computed for.
    """
    events = []
    if trains_on_reward and not list_held_out_metrics(config.gate, reward):
        events.append(GuardEvent(BASELINE, "held_out_metric", "warn", _describe_missing_metric(reward, evaluators)))
    if config.splits.near_duplicates == "warn" and (found := _search(splits, config.splits)):
        text = (
            f"{describe_repetitions(found, splits)}. The verdict then measures what the model has seen. Remove them "
            f"(`reinforge data dedupe`), or set {NEAR_DUPLICATES}: group, which puts them into one split"
        )
        events.append(GuardEvent(BASELINE, "contamination", "warn", text))
    return events


def refuse_repetitions(splits: Splits, config: SplitsConfig) -> list[Problem]:
    """Returns the problem of held-out examples that repeat training examples, where these are to be refused."""
    if config.near_duplicates not in ("refuse", "group") or not (found := _search(splits, config)):
        return []
    fix = "remove them: `reinforge data dedupe`"
    if config.near_duplicates == "group":
        fix += "; they cannot be put into one split, since the dataset itself says which examples are held out"
    return [Problem(NEAR_DUPLICATES, describe_repetitions(found, splits), fix)]


def _search(splits: Splits, config: SplitsConfig) -> list[Repetition]:
    items = [item for examples in splits.values() for item in examples]
    if len(items) > MAX_COMPARED or (config.key is not None and all(_is_id(item, config.key) for item in items)):
        return []
    return find_repetitions(splits, config.near_duplicate_similarity)


def _is_id(item: EvalInputItem, key: str) -> bool:
    row = item.full_dataset_entry
    return isinstance(row, Mapping) and str(row.get(key)) == str(item.id)


def describe_repetitions(found: Sequence[Repetition], splits: Splits) -> str:
    num_held_out = sum(len(items) for name, items in splits.items() if not is_trained_on(name))
    worst = sorted(found, key=lambda each: (-each.similarity, each.id))[:MAX_SHOWN]
    shown = ", ".join(
        f"{each.id} ({each.split}) repeats {each.train_id}, {each.similarity:.0%} similar" for each in worst
    )
    more = f", and {len(found) - len(worst)} more" if len(found) > len(worst) else ""
    many = (
        f"{len(found)} of {num_held_out} held-out examples repeat" if len(found) > 1 else "a held-out example repeats"
    )
    return f"{many} a training example under another id: {shown}{more}"


def _describe_missing_metric(reward: str, evaluators: Sequence[str]) -> str:
    others = [name for name in evaluators if name != reward]
    choice = f"such as {others[0]}" if others else "such as a judge, or a check that the reward does not make"
    return (
        f"no metric apart from the reward {reward} is held out, so answers that only please the reward would look like "
        f"an improvement. Name an evaluator in finetuning.gate.metric or finetuning.gate.guard_metrics, {choice}"
    )
