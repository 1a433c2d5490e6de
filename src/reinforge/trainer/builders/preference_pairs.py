"""The trajectory builder `_type: dpo_traj_builder`: scored candidates of a turn become preference pairs.

    context.mark(TTCEventData(turn_id="t1", candidate_index=0, score=0.9, input="q", output="a"))
    context.mark(TTCEventData(turn_id="t1", candidate_index=1, score=0.2, input="q", output="b"))
        => DPOItem(prompt="q", chosen_response="a", rejected_response="b"), reward 0.7

Two candidates make a pair if their scores differ, by at least `min_score_diff`, and so do their texts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from reinforge.config.schema import Config
from reinforge.errors import Problem
from reinforge.interfaces import Algorithm, Builder
from reinforge.registry import register_trajectory_builder
from reinforge.rollout.episode import extract_text
from reinforge.trainer.builders.group import GroupTrajectoryBuilder, GroupTrajectoryBuilderConfig, find_policy_entries
from reinforge.types.episode import EpisodeRecord, Mark
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.steps import IntermediateStepType, TTCEventData
from reinforge.types.trajectory import DPOItem, OpenAIMessage, Trajectory

ROUNDING = 1e-9  # differences of scores closer than this are equal


class DPOTrajectoryBuilderConfig(GroupTrajectoryBuilderConfig, name="dpo_traj_builder"):
    """Which candidates make preference pairs."""

    num_generations: int = Field(default=1, ge=1, description="Episodes per example.")
    ttc_step_name: str = Field(
        default="dpo_candidate_move",
        description="Name of the steps that are candidates; a TTCEventData that the agent marks counts without one.",
    )
    exhaustive_pairs: bool = Field(
        default=True, description="true: every two candidates of a turn; false: its best and its worst."
    )
    min_score_diff: float = Field(default=0.0, ge=0, description="Minimum difference of scores; equal ones never pair.")
    max_pairs_per_turn: int | None = Field(
        default=None, ge=1, description="Keep the pairs of a turn with the largest differences; null: all."
    )
    reward_from_score_diff: bool = Field(
        default=True, description="Reward of a pair. true: the difference of scores; false: the preferred one's score."
    )
    require_multiple_candidates: bool = Field(
        default=True, description="Must be true: a single candidate has nothing to be compared with."
    )


@dataclass(frozen=True, slots=True)
class CandidateStep:
    """One scored candidate."""

    example_id: str
    turn_id: str  # the turn; candidates of one turn answer the same prompt
    candidate_index: int
    prompt: list[OpenAIMessage] | str
    response: str
    score: float  # higher is better


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two candidates of a turn, one with the higher score."""

    chosen: CandidateStep
    rejected: CandidateStep

    @property
    def score_diff(self) -> float:
        return self.chosen.score - self.rejected.score

    @property
    def content(self) -> tuple[str, str, str]:
        return str(self.chosen.prompt), self.chosen.response, self.rejected.response


class DPOTrajectoryBuilder(GroupTrajectoryBuilder):
    """Collects candidates and returns one trajectory per pair, grouped by example."""

    rewards_are_scores = False
    trajectory_builder_config: DPOTrajectoryBuilderConfig

    def __init__(
        self,
        trajectory_builder_config: DPOTrajectoryBuilderConfig,
        policies: Sequence[str] | Mapping[str, str | None] = (),
    ):
        super().__init__(trajectory_builder_config, policies)
        self._notes: list[str] = []

    def validate(
        self, config: Config, algorithm: Algorithm, examples: Sequence[EvalInputItem], row_locations: Mapping[str, str]
    ) -> list[Problem]:
        problems = list[Problem]()
        if not self.trajectory_builder_config.require_multiple_candidates:
            message = "is false, but a single candidate has nothing to be compared with"
            problems.append(Problem("require_multiple_candidates", message, "leave it out"))
        adapter = config.trainer_adapters.get(str(config.finetuning.trainer_adapter))
        if adapter is not None and adapter.static_type in ("local", "ray"):
            message = f"makes pairs of strings, but `_type: {adapter.static_type}` trains on sampled tokens"
            fix = (
                "use the trajectory builder `_type: tree` with `algorithm: {_type: dpo}`, or a service that takes pairs"
            )
            problems.append(Problem("", message, fix))
        return problems

    def take_notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes

    async def _build_groups(self, records: Sequence[EpisodeRecord], meta: dict[str, Any]) -> list[list[Trajectory]]:
        config = self.trajectory_builder_config
        left_out: Counter[str] = Counter()
        groups: dict[str, list[Trajectory]] = {}
        known: set[tuple[str, str, str]] = set()
        for record in records:
            if record.outcome.is_missing:
                continue
            for turn in group_by_turn(find_candidates(record, config.ttc_step_name, left_out)):
                for pair in make_turn_pairs(turn, config, left_out):
                    if pair.content in known:
                        left_out["pairs twice"] += 1
                        continue
                    known.add(pair.content)
                    siblings = groups.setdefault(record.key.example_id, [])
                    siblings.append(self._build_trajectory(record, pair, len(siblings)))
        if left_out:
            listed = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
            self._notes.append(f"{sum(map(len, groups.values()))} preference pairs; left out: {listed}")
        return list(groups.values())

    def _build_trajectory(self, record: EpisodeRecord, pair: PreferencePair, number: int) -> Trajectory:
        chosen, rejected = pair.chosen, pair.rejected
        item = DPOItem(prompt=chosen.prompt, chosen_response=chosen.response, rejected_response=rejected.response)
        metadata = {
            "example_id": chosen.example_id,
            "turn_id": chosen.turn_id,
            "chosen_score": chosen.score,
            "rejected_score": rejected.score,
            "score_diff": pair.score_diff,
            "chosen_index": chosen.candidate_index,
            "rejected_index": rejected.candidate_index,
        }
        from_diff = self.trajectory_builder_config.reward_from_score_diff
        return Trajectory(
            episode=[item],
            reward=pair.score_diff if from_diff else chosen.score,
            metadata=metadata,
            group_id=record.key.example_id,
            episode_id=f"{record.key}/{number}",
        )


def find_candidates(record: EpisodeRecord, step_name: str, left_out: Counter[str]) -> list[CandidateStep]:
    """Returns the candidates that an agent marked in one episode."""
    found = []
    for number, mark in enumerate(record.marks):
        data = _read_candidate(mark, step_name)
        if data is None:
            continue
        if reason := _find_gap(data):
            left_out[reason] += 1
            continue
        turn = data.turn_id if data.turn_id is not None else f"turn {data.turn_index or 0}"
        index = number if data.candidate_index is None else data.candidate_index
        prompt, response = _read_prompt(data.input), extract_text(data.output)
        turn_key = f"{record.key.generation}/{turn}"  # candidates of other episodes answer other prompts
        assert data.score is not None
        found.append(CandidateStep(record.key.example_id, turn_key, index, prompt, response, float(data.score)))
    return found


def group_by_turn(candidates: Iterable[CandidateStep]) -> list[list[CandidateStep]]:
    turns: dict[str, list[CandidateStep]] = {}
    for candidate in candidates:
        turns.setdefault(candidate.turn_id, []).append(candidate)
    return list(turns.values())


def make_turn_pairs(
    turn: Sequence[CandidateStep], config: DPOTrajectoryBuilderConfig, left_out: Counter[str]
) -> list[PreferencePair]:
    """Returns the pairs of one turn, the largest difference of scores first.

    Example: scores a 0.9, b 0.5, c 0.2 -> (a, c), (a, b), (b, c); with exhaustive_pairs false -> (a, c); with
    min_score_diff 0.4 -> (a, c), (a, b).
    """
    if len(turn) < 2:
        left_out["turns with a single candidate"] += 1
        return []
    if len({str(candidate.prompt) for candidate in turn}) > 1:
        left_out["turns whose candidates answer different prompts"] += 1
        return []
    ranked = sorted(turn, key=lambda candidate: (-candidate.score, candidate.candidate_index))
    ends = [(ranked[0], ranked[-1])]
    every = [(high, low) for place, high in enumerate(ranked) for low in ranked[place + 1 :]]
    kept = []
    for chosen, rejected in every if config.exhaustive_pairs else ends:
        pair = PreferencePair(chosen, rejected)
        if pair.score_diff <= ROUNDING or pair.score_diff < config.min_score_diff - ROUNDING:
            left_out["pairs whose scores are too close"] += 1
        elif chosen.response == rejected.response:
            left_out["pairs of equal replies"] += 1
        else:
            kept.append(pair)
    kept.sort(key=lambda pair: -pair.score_diff)
    cut = len(kept) if config.max_pairs_per_turn is None else config.max_pairs_per_turn
    if len(kept) > cut:
        left_out["pairs above max_pairs_per_turn"] += len(kept) - cut
    return kept[:cut]


def _find_gap(data: TTCEventData) -> str:
    """Returns why a candidate cannot be compared, or trained as text; empty: it can."""
    if not isinstance(data.score, int | float) or data.input is None or data.output is None:
        return "candidates without score, input or output"
    if not math.isfinite(data.score):
        return "candidates whose score is not finite"
    if any(map(_has_tool_call, [*(data.input if isinstance(data.input, list) else ()), data.output])):
        return "candidates with tool calls, which a pair of strings cannot hold"
    return ""


def _has_tool_call(message: Any) -> bool:
    given = message.model_dump() if isinstance(message, BaseModel) else message
    return isinstance(given, Mapping) and bool(given.get("tool_calls") or given.get("tool_call_id"))


def _read_candidate(mark: Mark, step_name: str) -> TTCEventData | None:
    """Returns the candidate in a mark: a `TTCEventData`, or a step of the configured name that holds one.

    Episodes that a resumed run reads from the journal have them as plain values.
    """
    data: Any = mark.data.model_dump(serialize_as_any=True) if isinstance(mark.data, BaseModel) else mark.data
    if isinstance(data, dict) and "event_type" in data:
        is_target = data["event_type"] == IntermediateStepType.TTC_END and data.get("name") == step_name
        data = data.get("data") if is_target else None
    if not isinstance(data, dict) or not {"turn_id", "score", "output"} <= set(data):
        return None
    try:
        return TTCEventData.model_validate(data)
    except ValidationError:
        return None


def _read_prompt(given: Any) -> list[OpenAIMessage] | str:
    if not isinstance(given, list):
        return extract_text(given)
    messages = [each if isinstance(each, dict) else each.model_dump() for each in given]
    return [OpenAIMessage(role=str(m.get("role", "user")), content=extract_text(m.get("content"))) for m in messages]


@register_trajectory_builder(config_type=DPOTrajectoryBuilderConfig)
async def dpo_builder(config: DPOTrajectoryBuilderConfig, builder: Builder) -> AsyncIterator[DPOTrajectoryBuilder]:
    yield DPOTrajectoryBuilder(config, find_policy_entries(builder))
