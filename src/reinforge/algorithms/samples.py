"""Makes training samples of trajectories; a turn joins the longest sample whose tokens its prompt begins with.

    prompt [1,2] -> [4]                                =>  token_ids [1,2,4],     loss_mask [0,0,1]
    prompt [9]   -> [7]  (rewritten, or a sub-agent)   =>  a second sample [9,7], [0,1]
    prompt [1,2,4,8] -> [5]                            =>  the first: [1,2,4,8,5], [0,0,1,0,1]

Nothing is tokenized here: the ids are the sampler's own. A token sampled with a filter (top-p, top-k, min-p) or under a
grammar is trained over the tokens that it was sampled from. If those were not recorded, the token becomes context and
counts as untrainable: greedy decoding, a filter that keeps more than `MAX_SUPPORT` tokens, penalties and logit biases,
which change the distribution itself, or a policy server that does not report them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from reinforge.types.request import TokenLogprobs
from reinforge.types.sample import FloatArray, TrainingSample
from reinforge.types.seeding import stable_random
from reinforge.types.supports import Support, Supports
from reinforge.types.trajectory import OTHER_CHOICES, Trajectory, TrajectoryGroup

COMPARED_FIELDS = {"role", "content", "prompt", "chosen_response", "rejected_response"}
"""Fields of an episode item that are compared to find duplicates."""


@dataclass(slots=True)
class _Row:
    """A sample under construction."""

    token_ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    supports: dict[int, Support] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.token_ids)

    def extends_to(self, prompt: Sequence[int]) -> bool:
        length = len(self)
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
            self._add_sampled(tokens.token_ids, tokens.logprobs, tokens.list_versions(), tokens, turn)

    def _add_restricted(self, tokens: TokenLogprobs, turn: int) -> None:
        if tokens.supports is None:
            self.add_context(tokens.token_ids)
            return
        versions = tokens.list_versions()
        sampled = zip(tokens.token_ids, tokens.processed_logprobs, versions, tokens.supports.sets, strict=True)
        for token, logprob, version, kept in sampled:
            if len(kept):
                self.supports[len(self.token_ids)] = kept
                self._add_sampled((token,), (logprob,), (version,), tokens, turn)
            else:
                self.add_context((token,))

    def _add_sampled(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        tokens: TokenLogprobs,
        turn: int,
    ) -> None:
        count = len(token_ids)
        self.token_ids += token_ids
        self.mask += [True] * count
        self.logprobs += logprobs
        self.temperatures += [tokens.temperature or 1.0] * count
        self.versions += versions
        self.turns += [turn] * count

    def build_sample(self) -> TrainingSample:
        whole_vocabulary: Support = np.zeros(0, np.int32)
        kept = (self.supports.get(position, whole_vocabulary) for position in range(len(self.token_ids)))
        supports = Supports.from_sets(kept) if self.supports else None
        return TrainingSample(
            token_ids=np.asarray(self.token_ids, dtype=np.int64),
            loss_mask=np.asarray(self.mask, dtype=np.bool_),
            sampling_logprobs=np.asarray(self.logprobs, dtype=np.float32),
            temperatures=np.asarray(self.temperatures, dtype=np.float32),
            policy_versions=np.asarray(self.versions, dtype=np.int64),
            turn_ids=np.asarray(self.turns, dtype=np.int64),
            supports=supports,
        )


def samples_from_trajectory(trajectory: Trajectory) -> list[TrainingSample]:
    """Returns the samples of one trajectory, in order; untrained turns are context or left out."""
    rows: list[_Row] = []
    for index, turn in enumerate(trajectory.turns):
        tokens = turn.tokens
        if tokens is None:
            continue
        # the longest one: sub-agents and teams take turns, so that the latest row may be another conversation's
        row = max((each for each in rows if each.extends_to(tokens.prompt_token_ids)), key=len, default=None)
        if row is None:
            row = _Row()
            rows.append(row)
        row.add_context(tokens.prompt_token_ids[len(row.token_ids) :])
        if turn.is_trained:
            row.add_reply(tokens, index)
        else:
            row.add_context(tokens.token_ids)
    samples = [row.build_sample() for row in rows if any(row.mask)]
    for sample in samples:
        sample.reward = trajectory.reward
        sample.turn_rewards = trajectory.shaped_rewards
        sample.agent, sample.agent_weight = trajectory.agent or "", trajectory.agent_weight
    return samples


def samples_from_groups(groups: Sequence[TrajectoryGroup]) -> list[TrainingSample]:
    """Returns the samples of all groups, with `group_id`, `group_rewards` and `trajectory_index` set."""
    samples: list[TrainingSample] = []
    index = 0
    for group in groups:
        rewards = tuple(group.rewards)
        for trajectory in group.trajectories:
            for sample in samples_from_trajectory(trajectory):
                sample.group_id, sample.group_rewards, sample.trajectory_index = group.group_id, rewards, index
                samples.append(sample)
            index += 1
    return samples


def count_untrainable_tokens(groups: Sequence[TrajectoryGroup]) -> int:
    """Returns the number of sampled tokens of trained turns whose kept tokens were not recorded."""
    turns = [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]
    replies = [turn.tokens for turn in turns if turn.is_trained]
    return sum(_count_unrecorded(tokens) for tokens in replies if tokens is not None and tokens.restricted)


def _count_unrecorded(tokens: TokenLogprobs) -> int:
    if tokens.supports is None:
        return len(tokens.token_ids)
    return int((tokens.supports.counts == 0).sum())


def count_tokens_of_other_choices(groups: Sequence[TrajectoryGroup]) -> int:
    """Returns the number of tokens sampled for completion choices that the agents did not use."""
    trajectories = (trajectory for group in groups for trajectory in group.trajectories)
    return sum((trajectory.metadata or {}).get(OTHER_CHOICES, 0) for trajectory in trajectories)


def weight_by_trajectory(samples: Sequence[TrainingSample]) -> None:
    lengths: dict[int, int] = {}
    for sample in samples:
        lengths[sample.trajectory_index] = lengths.get(sample.trajectory_index, 0) + sample.num_trained
    for sample in samples:
        sample.weight = 1.0 / lengths[sample.trajectory_index]


def weight_by_agent(samples: Sequence[TrainingSample]) -> None:
    """Scales weights so that each agent's share of the loss is its `agent_weight`, whatever its number of tokens.

    An agent's share is the sum of its samples' weights over their trained tokens, or over the samples if they are
    pairs or KTO's, whose loss is one number each. The total stays the same; a single agent's weights are unchanged.

    Example: a prover with 9 trained tokens and a verifier with 3, weights 1 -> 2/3 and 2: 6 and 6 of 12; with an
    `agent_weight` of 3 and 1: 1 and 1.
    """
    counts: dict[str, float] = {}
    for sample in samples:
        counts[sample.agent] = counts.get(sample.agent, 0.0) + _total_weight(sample)
    shares = {sample.agent: sample.agent_weight for sample in samples if counts[sample.agent] > 0}
    if len(shares) < 2 or not any(shares.values()):
        return
    scale = sum(counts.values()) / sum(shares.values())
    for sample in samples:
        if sample.agent in shares:
            sample.weight *= shares[sample.agent] / counts[sample.agent] * scale


def balance_agents(groups: Sequence[Sequence[Trajectory]], seed: int) -> list[list[Trajectory]]:
    """Returns a subset of the groups in which each agent has its share, for backends without sample weights.

    Duplicates count once. The seed alone decides which groups of an agent are kept; their order does not change.

    Example: a prover's 9 groups and a verifier's 3, weights 1 -> 3 and 3; with an `agent_weight` of 2 and 1 -> 6 and 3.
    """
    by_agent: dict[str, dict[str, int]] = {}
    weights: dict[str, float] = {}
    for place, siblings in enumerate(groups):
        first = siblings[0]
        if first.agent_weight > 0:
            content = str(
                [(t.reward, [item.model_dump(include=COMPARED_FIELDS) for item in t.episode]) for t in siblings]
            )
            by_agent.setdefault(first.agent or "", {}).setdefault(content, place)
            weights[first.agent or ""] = first.agent_weight
    unit = min((len(places) / weights[agent] for agent, places in by_agent.items()), default=0.0)
    kept: list[int] = []
    for agent, places in by_agent.items():
        count = min(len(places), max(1, round(unit * weights[agent])))
        kept += stable_random(seed, "balance", agent).sample(list(places.values()), count)
    return [list(groups[place]) for place in sorted(kept)]


def _total_weight(sample: TrainingSample) -> float:
    has_one_loss = sample.pair_id is not None or sample.mismatched is not None
    return sample.weight * (1 if has_one_loss else sample.num_trained)


def drop_duplicate_samples(samples: Sequence[TrainingSample], *, add_up: bool = False) -> list[TrainingSample]:
    """Returns the samples without duplicates: same agent, same tokens; of pairs, both samples must be equal.

    Example: a prover answers [4] to [1, 2] twice, a verifier once -> one sample of each.
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


def fill_trained_tokens(sample: TrainingSample, value: float) -> FloatArray:
    """Returns an array `[T]` with `value` at the sample's trained tokens and 0 elsewhere."""
    return np.where(sample.loss_mask, np.float32(value), np.float32(0))
