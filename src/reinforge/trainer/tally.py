"""What the episodes of one stage have in common: a constant reward, outputs that are all None, why some are missing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from reinforge.evaluation.reasons import ReasonCounts, describe_failure, shorten_line
from reinforge.types.episode import EpisodeRecord
from reinforge.types.trajectory import Outcome

MIN_EPISODES = 4
"""With fewer episodes, equal rewards say nothing about the evaluator."""
MAX_SHOWN_CHARACTERS = 160


@dataclass
class EpisodeTally:
    """Counts the episodes of one stage as they finish.

    Attributes:
        num_scored: Episodes with a reward.
        num_failed: Those of them that the policy failed.
        num_finished: Episodes whose agent returned.
        num_none: Those of them that returned None.
        num_clipped: Those of them with a reply that was cut off at `max_tokens`.
    """

    num_scored: int = 0
    num_failed: int = 0
    num_finished: int = 0
    num_none: int = 0
    missing: ReasonCounts = field(default_factory=ReasonCounts)
    failures: ReasonCounts = field(default_factory=ReasonCounts)
    rewards: list[float] = field(default_factory=list)
    num_completion_tokens: int = 0
    num_clipped: int = 0
    scores: dict[str, list[float]] = field(default_factory=dict)
    _first: EpisodeRecord | None = None

    def add(self, record: EpisodeRecord) -> None:
        if record.outcome.is_missing:
            self.missing.add(describe_failure(record))
        elif record.reward is not None:
            self.num_scored += 1
            self._measure(record, record.reward)
            if record.outcome.is_policy_failure:
                self.num_failed += 1
                self.failures.add(describe_failure(record))
            elif self._first is None:
                self._first = record
        if record.outcome in (Outcome.OK, Outcome.JUDGE_ERROR):
            self.num_finished += 1
            self.num_none += record.item.output_obj is None

    def _measure(self, record: EpisodeRecord, reward: float) -> None:
        self.rewards.append(reward)
        self.num_completion_tokens += record.num_completion_tokens
        self.num_clipped += any(reply.finish_reason == "length" for call in record.calls for reply in call.choices)
        for name, item in record.scores.items():
            score = item.as_reward()
            if score is not None:
                self.scores.setdefault(name, []).append(score)

    def summarize(self) -> dict[str, Any]:
        """Returns the fields of `EpochMetrics` that follow from the episodes; empty: none is scored.

        Example: rewards 0, 1 with 10 and 30 sampled tokens -> reward_std 0.5, completion_tokens 20. The sums do not
        depend on the order in which the episodes finished.
        """
        if not self.rewards:
            return {}
        count = len(self.rewards)
        mean = math.fsum(self.rewards) / count
        return {
            "reward_std": math.sqrt(math.fsum((reward - mean) ** 2 for reward in self.rewards) / count),
            "completion_tokens": self.num_completion_tokens / count,
            "clipped_share": self.num_clipped / count,
            "scores": {name: math.fsum(values) / len(values) for name, values in sorted(self.scores.items())},
        }

    def describe_none_outputs(self, agent: str) -> str | None:
        """Returns that the agent has returned nothing but None; None: it returned something."""
        if self.num_finished < MIN_EPISODES or self.num_none < self.num_finished:
            return None
        return f"{agent} returned None in all {self.num_finished:,} episodes: is a `return` missing?"

    def describe_constant_reward(self, metric: str, agent: str) -> str | None:
        """Returns that all episodes have the same reward, with one of them; None: the rewards differ."""
        if self.num_scored < MIN_EPISODES or len(set(self.rewards)) != 1:
            return None
        reward = self.rewards[0]
        if self._first is None:
            reason = self.failures.find_commonest()
            return f"all {self.num_scored:,} episodes failed by the policy's own fault (reward {reward:g}): {reason}"
        head = f"all {self.num_scored:,} episodes have the reward {reward:g}"
        if (nothing := self.describe_none_outputs(agent)) is not None:
            return f"{head}; {nothing}"
        return f"{head}; {_describe_episode(self._first)}. {_suggest(reward, metric)}"


def _describe_episode(record: EpisodeRecord) -> str:
    item = record.item
    parts = [f"question {_quote(item.input_obj)}", f"answer {_quote(item.output_obj)}"]
    if item.expected_output_obj is not None:
        parts.append(f"expected {_quote(item.expected_output_obj)}")
    return f"example {shorten_line(item.id, 40)}: {', '.join(parts)}"


def _suggest(reward: float, metric: str) -> str:
    if reward == 1:
        return (
            f"If such answers are right, the model solves every example already: use harder ones; if not, the "
            f"evaluator {metric} accepts too much"
        )
    test = "`reinforge check FILE --sample 3` scores the expected answers"
    if reward == 0:
        return (
            f"If that answer should earn something, correct the evaluator {metric} or the form of the answer ({test}); "
            "if not, the task is too hard for this model: use easier examples or a reward that counts partial success"
        )
    return f"The evaluator {metric} does not distinguish the answers ({test})"


def _quote(value: object) -> str:
    return f'"{shorten_line(value, MAX_SHOWN_CHARACTERS)}"'
