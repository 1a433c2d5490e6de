"""From trajectories to training samples: turns whose prompt extends the tokens so far become one row of tokens.

    prompt [1,2] -> [4]; prompt [1,2,4,8] -> [5]   =>  token_ids [1,2,4,8,5], loss_mask [0,0,1,0,1]
    prompt [9]   -> [7]  (history rewritten)       =>  a second sample [9,7], [0,1]

Nothing is tokenised here: the ids are the sampler's own. A token whose support was cut (top-p, top-k, min-p) is trained
over the words that it was drawn from; one whose words are not recorded is context, and counted: greedy decoding, a
support of more than `MAX_SUPPORT` words, a policy server that does not tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from reinforge.types.request import TokenLogprobs
from reinforge.types.sample import FloatArray, TrainingSample
from reinforge.types.seeding import stable_random
from reinforge.types.supports import Supports
from reinforge.types.trajectory import OTHER_CHOICES, Trajectory, TrajectoryGroup

SAID = {"role", "content", "prompt", "chosen_response", "rejected_response"}
"""What two items must share to be equal."""


@dataclass(slots=True)
class _Row:
    """A sample while it grows."""

    token_ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    supports: dict[int, NDArray[np.int32]] = field(default_factory=dict)

    def extends_to(self, prompt: Sequence[int]) -> bool:
        """True if the prompt begins with every token of the row."""
        length = len(self.token_ids)
        return len(prompt) >= length and list(prompt[:length]) == self.token_ids

    def add_context(self, ids: Iterable[int]) -> None:
        ids = list(ids)
        self.token_ids += ids
        self.mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.temperatures += [1.0] * len(ids)
        self.versions += [-1] * len(ids)
        self.turns += [-1] * len(ids)

    def add_reply(self, tokens: TokenLogprobs, turn: int) -> None:
        if tokens.restricted:
            self._add_restricted(tokens, turn)
        else:
            self._add_sampled(tokens.token_ids, tokens.logprobs, tokens, turn)

    def _add_restricted(self, tokens: TokenLogprobs, turn: int) -> None:
        if tokens.supports is None:
            self.add_context(tokens.token_ids)
            return
        drawn = zip(tokens.token_ids, tokens.processed_logprobs, tokens.supports.sets, strict=True)
        for token, logprob, words in drawn:
            if len(words):
                self.supports[len(self.token_ids)] = words
                self._add_sampled((token,), (logprob,), tokens, turn)
            else:
                self.add_context((token,))

    def _add_sampled(
        self, token_ids: Sequence[int], logprobs: Sequence[float], tokens: TokenLogprobs, turn: int
    ) -> None:
        count = len(token_ids)
        self.token_ids += token_ids
        self.mask += [True] * count
        self.logprobs += logprobs
        self.temperatures += [tokens.temperature or 1.0] * count
        self.versions += [tokens.policy_version] * count
        self.turns += [turn] * count

    def sample(self) -> TrainingSample:
        every_word, places = np.zeros(0, np.int32), range(len(self.token_ids))
        supports = Supports.of(self.supports.get(place, every_word) for place in places) if self.supports else None
        return TrainingSample(
            token_ids=np.asarray(self.token_ids, dtype=np.int64),
            loss_mask=np.asarray(self.mask, dtype=np.bool_),
            sampling_logprobs=np.asarray(self.logprobs, dtype=np.float32),
            temperatures=np.asarray(self.temperatures, dtype=np.float32),
            policy_versions=np.asarray(self.versions, dtype=np.int64),
            turn_ids=np.asarray(self.turns, dtype=np.int64),
            supports=supports,
        )


def to_samples(trajectory: Trajectory) -> list[TrainingSample]:
    """Returns the samples of one trajectory, in order; turns that are not trained are context or left out."""
    rows: list[_Row] = []
    for index, turn in enumerate(trajectory.turns):
        tokens = turn.tokens
        if tokens is None:
            continue
        if not rows or not rows[-1].extends_to(tokens.prompt_token_ids):
            rows.append(_Row())
        row = rows[-1]
        row.add_context(tokens.prompt_token_ids[len(row.token_ids) :])
        if turn.is_trained:
            row.add_reply(tokens, index)
        else:
            row.add_context(tokens.token_ids)
    samples = [row.sample() for row in rows if any(row.mask)]
    for sample in samples:
        sample.reward = trajectory.reward
        sample.turn_rewards = trajectory.shaped_rewards
        sample.agent, sample.agent_weight = trajectory.agent or "", trajectory.agent_weight
    return samples


def samples_of_groups(groups: Sequence[TrajectoryGroup]) -> list[TrainingSample]:
    """Returns the samples of all groups, with `group_id`, `group_rewards` and `trajectory_index` set."""
    samples: list[TrainingSample] = []
    index = 0
    for group in groups:
        rewards = tuple(group.rewards)
        for trajectory in group.trajectories:
            for sample in to_samples(trajectory):
                sample.group_id, sample.group_rewards, sample.trajectory_index = group.group_id, rewards, index
                samples.append(sample)
            index += 1
    return samples


def num_left_out(groups: Sequence[TrajectoryGroup]) -> int:
    """Returns how many sampled tokens of trained turns are context: what they were drawn from is not recorded."""
    turns = [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]
    found = [turn.tokens for turn in turns if turn.is_trained]
    return sum(_num_unrecorded(tokens) for tokens in found if tokens is not None and tokens.restricted)


def _num_unrecorded(tokens: TokenLogprobs) -> int:
    if tokens.supports is None:
        return len(tokens.token_ids)
    return int((tokens.supports.counts == 0).sum())


def num_of_other_choices(groups: Sequence[TrajectoryGroup]) -> int:
    """Returns how many tokens were sampled for choices that the agents did not go on with."""
    told = (trajectory.metadata or {} for group in groups for trajectory in group.trajectories)
    return sum(metadata.get(OTHER_CHOICES, 0) for metadata in told)


def weigh_by_trajectory(samples: Sequence[TrainingSample]) -> None:
    """Sets each sample's weight to 1 / (trained tokens of its trajectory): every trajectory counts the same."""
    lengths: dict[int, int] = {}
    for sample in samples:
        lengths[sample.trajectory_index] = lengths.get(sample.trajectory_index, 0) + sample.num_trained
    for sample in samples:
        sample.weight = 1.0 / lengths[sample.trajectory_index]


def weigh_agents(samples: Sequence[TrainingSample]) -> None:
    """Scales weights so that each agent counts as its `agent_weight` says, however much it said and was chosen.

    What an agent counts is the sum of its samples' weights over their trained tokens, or over the samples where they
    are pairs, whose loss is one number each. All together count what they did before; one agent alone stays as it is.

    Example: a prover with 9 trained tokens and a verifier with 3, weights 1 -> 2/3 and 2: 6 and 6 of 12; with an
    `agent_weight` of 3 and 1: 1 and 1.
    """
    counts: dict[str, float] = {}
    for sample in samples:
        counts[sample.agent] = counts.get(sample.agent, 0.0) + _count_of(sample)
    wanted = {sample.agent: sample.agent_weight for sample in samples if counts[sample.agent] > 0}
    if len(wanted) < 2 or not any(wanted.values()):
        return
    scale = sum(counts.values()) / sum(wanted.values())
    for sample in samples:
        if sample.agent in wanted:
            sample.weight *= wanted[sample.agent] / counts[sample.agent] * scale


def balanced(groups: Sequence[Sequence[Trajectory]], seed: int) -> list[list[Trajectory]]:
    """Returns as many groups as leave each agent its share: for backends that cannot weigh what they train on.

    Equal ones count once. Which of an agent's stay depends on the seed alone, and all stay in their order.

    Example: a prover's 9 groups and a verifier's 3, weights 1 -> 3 and 3; with an `agent_weight` of 2 and 1 -> 6 and 3.

    Args:
        groups: Of one agent each.
        seed: The run's.
    """
    by_agent: dict[str, dict[str, int]] = {}
    weights: dict[str, float] = {}
    for place, siblings in enumerate(groups):
        first = siblings[0]
        if first.agent_weight > 0:
            said = str([(t.reward, [item.model_dump(include=SAID) for item in t.episode]) for t in siblings])
            by_agent.setdefault(first.agent or "", {}).setdefault(said, place)
            weights[first.agent or ""] = first.agent_weight
    unit = min((len(found) / weights[agent] for agent, found in by_agent.items()), default=0.0)
    kept: list[int] = []
    for agent, found in by_agent.items():
        count = min(len(found), max(1, round(unit * weights[agent])))
        kept += stable_random(seed, "balance", agent).sample(list(found.values()), count)
    return [list(groups[place]) for place in sorted(kept)]


def _count_of(sample: TrainingSample) -> float:
    return sample.weight * (sample.num_trained if sample.pair_id is None else 1)


def without_duplicates(samples: Sequence[TrainingSample], *, add_up: bool = False) -> list[TrainingSample]:
    """Returns the samples that are equal to the token, of the same agent, once each; of pairs both must be equal.

    Example: a prover says [4] to [1, 2] twice, a verifier says it too -> one sample of each.

    Args:
        samples: Of a job.
        add_up: The one that stays weighs as much as all of them.
    """
    rows: dict[str | int, list[TrainingSample]] = {}
    for number, sample in enumerate(samples):
        rows.setdefault(number if sample.pair_id is None else sample.pair_id, []).append(sample)
    kept: dict[tuple[tuple[str, bytes, bytes], ...], list[TrainingSample]] = {}
    for row in rows.values():
        key = tuple((sample.agent, sample.token_ids.tobytes(), sample.loss_mask.tobytes()) for sample in row)
        first = kept.setdefault(key, row)
        if add_up and first is not row:
            for sample, other in zip(first, row, strict=True):
                sample.weight += other.weight
    return [sample for row in kept.values() for sample in row]


def on_mask(sample: TrainingSample, value: float) -> FloatArray:
    """Returns `[T]`: `value` where the sample is trained, 0 elsewhere."""
    return np.where(sample.loss_mask, np.float32(value), np.float32(0))
