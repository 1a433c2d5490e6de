"""Which algorithms can learn from the rows of a file, as they are."""

from __future__ import annotations

from dataclasses import dataclass

from reinforge.algorithms.dpo import DPO, DPOConfig
from reinforge.algorithms.kto import KTO
from reinforge.algorithms.rejection_sampling import RejectionSampling, RejectionSamplingConfig
from reinforge.algorithms.sft import SFT, SFTConfig
from reinforge.evaluation.row_statistics import LoadedRows
from reinforge.interfaces import Algorithm
from reinforge.trainer.builders.offline import (
    find_unclear_rewards,
    refuse_algorithm,
    refuse_rewards,
    uses_rewards,
)

GOOD = 0.5
"""Reward from which a reply with a thumb is good."""


@dataclass(frozen=True)
class OfflineChoice:
    """An algorithm for rows with replies."""

    algorithm: str
    settings: str = ""
    problem: str = ""


def list_offline_choices(loaded: LoadedRows) -> list[OfflineChoice]:
    """Returns whether SFT, rejection sampling, KTO and DPO can train on rows, and with which settings."""
    if not any(loaded.parse()):
        why = f"no: rows of the shape {loaded.shape} bring no replies; the agent samples them (`_type: group`)"
        return [OfflineChoice(name, problem=why) for name in ("sft", "rejection_sampling", "kto", "dpo")]
    has_rewards = loaded.row_format.has_rewards
    sft = SFTConfig(min_reward=GOOD) if has_rewards else SFTConfig()
    choices: list[tuple[str, Algorithm, str]] = [
        ("sft", SFT(sft), f"yes, with min_reward: {GOOD}" if has_rewards else "yes"),
        (
            "rejection_sampling",
            RejectionSampling(RejectionSamplingConfig(min_reward=GOOD)),
            f"yes, with min_reward: {GOOD}",
        ),
        ("kto", KTO(), "yes"),
        ("dpo", DPO(DPOConfig()), "yes"),
    ]
    return [OfflineChoice(name, settings, _refuse(algorithm, loaded)) for name, algorithm, settings in choices]


def _refuse(algorithm: Algorithm, loaded: LoadedRows) -> str:
    """Returns why an algorithm cannot train on rows; empty: it can."""
    row_format, rows = loaded.row_format, {str(item.id): item.full_dataset_entry for item in loaded.items}
    locations = [loaded.locations[id_] for id_ in rows]
    unclear = row_format.is_rewardable and row_format.reward_key is None and uses_rewards(algorithm)
    problems = find_unclear_rewards(list(rows.values()), locations) if unclear else []
    problems = problems or refuse_algorithm(algorithm, row_format)
    if not problems:
        groups = row_format.group(rows)
        problems = refuse_rewards(
            algorithm, [[each.reward for id_ in group for each in row_format.parse(rows[id_])] for group in groups]
        )
    if not problems:
        return ""
    first = problems[0]
    where = f"{first.location}: " if first.location else ""
    more = " (and other rows)" if len(problems) > 1 else ""
    return f"no: {where}{first.message}{more}; {first.fix}" if first.fix else f"no: {where}{first.message}{more}"
