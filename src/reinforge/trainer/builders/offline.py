"""Which algorithms can learn from the rows of a dataset, and what to use instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reinforge.algorithms.dpo import DPO, DPOConfig
from reinforge.algorithms.expert_iteration import ExpertIteration
from reinforge.algorithms.kto import KTO
from reinforge.algorithms.preference import Preference
from reinforge.algorithms.rejection_sampling import RejectionSampling, RejectionSamplingConfig
from reinforge.algorithms.sft import SFT, SFTConfig
from reinforge.errors import Problem
from reinforge.evaluation.demonstrations import LABEL, REWARD_KEYS, RowFormat, find_unlabeled, find_unrewarded
from reinforge.evaluation.row_statistics import LoadedRows
from reinforge.evaluation.rows import RowProblems
from reinforge.interfaces import Algorithm

PATH = "finetuning.algorithm"
ADD_REWARDS = f"give every row a number in a column {' or '.join(REWARD_KEYS)}, or name the column in reward_key"


def refuse_algorithm(algorithm: Algorithm, rows: RowFormat) -> list[Problem]:
    """Returns why an algorithm cannot learn from rows of this format, whatever their rewards are."""
    name = type(algorithm).__name__
    if not algorithm.offline:
        message = f"{name} needs the sampler's log-prob of each token, but the tokens of a dataset were not sampled"
        fix = "use `_type: sft`, dpo or kto, or run the agent with the trajectory builder `_type: group`"
        return [
            Problem(PATH, message, f"{fix}; if your own algorithm does not need log-probs, set its `offline = True`")
        ]
    if isinstance(algorithm, SFT) and algorithm.config.min_reward is None and rows.marks_bad_replies:
        what = "rejected replies" if rows.is_paired else "replies with the label false"
        message = f"the rows have the shape {rows.shape}, so sft would also train on the {what}"
        return [Problem(f"{PATH}.min_reward", message, "set min_reward: 0.5 to leave them out (their reward is 0)")]
    if rows.has_rewards:
        return []
    if isinstance(algorithm, KTO):
        message = f"{name} learns from good and bad replies, but the rows do not say which are good"
        return [Problem(PATH, message, f"use rows of prompt/completion/label; or {ADD_REWARDS}; or `_type: sft`")]
    if _get_floor(algorithm) is not None:
        setting = "reward_threshold" if isinstance(algorithm, ExpertIteration) else "min_reward"
        message = "the rows carry no reward to compare with it, so every row would be trained"
        return [
            Problem(f"{PATH}.{setting}", message, f"{ADD_REWARDS}; to train on every row, use `_type: sft` without it")
        ]
    if isinstance(algorithm, RejectionSampling):
        message = f"{name} keeps the best replies by their rewards, but the rows carry none"
        return [Problem(PATH, message, f"{ADD_REWARDS}; to train on every row, use `_type: sft`")]
    if isinstance(algorithm, Preference):
        message = f"{name} learns from pairs of a better and a worse reply, but each row has one reply without a reward"
        fix = (
            f"use rows of prompt/chosen/rejected; or several rows with the same prompt: {ADD_REWARDS}; or `_type: sft`"
        )
        return [Problem(PATH, message, fix)]
    return []


def refuse_rewards(algorithm: Algorithm, rewards: Sequence[Sequence[float]]) -> list[Problem]:
    """Returns why nothing can be learned from these rewards."""
    name, floor = type(algorithm).__name__, _get_floor(algorithm)
    highest = max(map(max, rewards))
    if isinstance(algorithm, KTO):
        threshold = algorithm.config.threshold
        message = f"no row is good: the highest reward is {highest:g} (a label counts as 0 or 1), below {threshold:g}"
        fix = "add good replies, or lower it"
        return [] if highest >= threshold else [Problem(f"{PATH}.threshold", message, fix)]
    if floor is not None:
        if highest >= floor:
            return []
        setting = "reward_threshold" if isinstance(algorithm, ExpertIteration) else "min_reward"
        return [
            Problem(f"{PATH}.{setting}", f"no row reaches {floor:g}; the highest reward is {highest:g}", "lower it")
        ]
    if not algorithm.needs_groups or any(max(each) > min(each) for each in rewards):
        return []
    several = sum(len(each) > 1 for each in rewards)
    found = f"{several} of {len(rewards)} prompts have several replies, and none of them different rewards"
    found = found if several else f"each of the {len(rewards)} prompts has one reply"
    if isinstance(algorithm, Preference):
        message = f"{name} learns from two replies to the same prompt with different rewards, but {found}"
        fix = "add replies, or train on the good ones alone: `_type: sft` with min_reward"
        return [Problem(PATH, message, fix)]
    message = f"{name} compares several replies to the same prompt, but {found}"
    return [Problem(PATH, message, "add replies, or set min_reward, which compares each reply with a number")]


def uses_rewards(algorithm: Algorithm) -> bool:
    """Returns False if every row is trained, whatever its reward."""
    return not isinstance(algorithm, SFT) or _get_floor(algorithm) is not None


def find_unclear_rewards(rows: Sequence[Any], locations: Sequence[str]) -> list[Problem]:
    """Returns why it is not clear which column holds the rewards: two might, or one does for some rows only."""
    unlabeled = find_unlabeled(rows)
    missing = {key: find_unrewarded(rows, key) for key in REWARD_KEYS}
    present = [key for key, indices in missing.items() if len(indices) < len(rows)]
    if len(present) > 1:
        message = f"the rows have numbers in {' and '.join(present)}; one of them is the reward"
        return [Problem("reward_key", message, f"set reward_key: {present[0]}, or reward_key: {present[1]}")]
    if not present and len(unlabeled) < len(rows):
        return find_missing_labels(rows, locations)
    found = RowProblems()
    for key in present:
        for index in missing[key]:
            found.add(locations[index], f'no number in the field "{key}"; other rows have one, so every row needs it')
    return found.first


def find_missing_labels(rows: Sequence[Any], locations: Sequence[str]) -> list[Problem]:
    """Returns which rows have no thumb, for an algorithm that learns from thumbs."""
    found, unlabeled = RowProblems(), find_unlabeled(rows)
    several = "; other rows have one, so every row needs it" if len(unlabeled) < len(rows) else ""
    fix = "leave these rows out; `reinforge data import --rated` does so" if several else "add label: true or false"
    for index in unlabeled:
        found.add(locations[index], f'no true or false in the field "{LABEL}"{several}', fix)
    return found.first


def _get_floor(algorithm: Algorithm) -> float | None:
    """Returns the reward that a trajectory must reach; None: any."""
    if isinstance(algorithm, ExpertIteration) and algorithm.is_weighted:
        return None
    if isinstance(algorithm, SFT):
        return algorithm.config.min_reward
    return algorithm.min_reward if isinstance(algorithm, RejectionSampling) else None


GOOD = 0.5  # reward from which a reply with a thumb is good


@dataclass(frozen=True)
class OfflineChoice:
    algorithm: str
    settings: str = ""
    problem: str = ""


def list_offline_choices(loaded: LoadedRows) -> list[OfflineChoice]:
    """Returns whether SFT, rejection sampling, KTO and DPO can train on rows, and with which settings."""
    if not any(loaded.parse()):
        names, sampled = ("sft", "rejection_sampling", "kto", "dpo"), "yes: the agent samples replies (`_type: group`)"
        refused = [OfflineChoice(name, problem="no: the rows have no replies") for name in names]
        return [OfflineChoice("grpo", sampled), *refused]
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
