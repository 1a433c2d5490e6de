"""Turns of interleaved conversations: each joins the longest sample that its prompt continues."""

import pytest

from reinforge.algorithms.samples import samples_from_trajectory
from reinforge.types.request import TokenLogprobs
from reinforge.types.trajectory import EpisodeItem, EpisodeItemRole, Trajectory

CASES = {
    "one conversation": (
        [([1], [2]), ([1, 2, 3], [4])],
        [([1, 2, 3, 4], [0, 1, 0, 1])],
    ),
    "a rewritten history": (
        [([1], [2]), ([1, 9], [4])],
        [([1, 2], [0, 1]), ([1, 9, 4], [0, 0, 1])],
    ),
    "a team of two takes turns": (
        [([1], [2]), ([5], [6]), ([1, 2, 3], [4]), ([5, 6, 7], [8]), ([1, 2, 3, 4], [9]), ([5, 6, 7, 8], [9])],
        [([1, 2, 3, 4, 9], [0, 1, 0, 1, 1]), ([5, 6, 7, 8, 9], [0, 1, 0, 1, 1])],
    ),
    "a title call before the first turn": (
        [([7], [8]), ([1], [2]), ([1, 2, 3], [4])],
        [([7, 8], [0, 1]), ([1, 2, 3, 4], [0, 1, 0, 1])],
    ),
    "a sub-agent that begins with its parent's words": (
        [([1], [2]), ([1, 2, 5], [6]), ([1, 2, 5, 6, 7], [8]), ([1, 2, 3], [4])],
        [([1, 2, 5, 6, 7, 8], [0, 1, 0, 1, 0, 1]), ([1, 2, 3, 4], [0, 0, 0, 1])],
    ),
    "the longest of two that fit": (
        [([1], [2]), ([1, 2, 3], [4]), ([1], [2]), ([1, 2, 3, 4, 5], [6])],
        [([1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 0, 1]), ([1, 2], [0, 1])],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_turn_joins_the_longest_sample_that_it_continues(name):
    calls, expected = CASES[name]
    turns = []
    for prompt, reply in calls:
        tokens = TokenLogprobs(tuple(prompt), tuple(reply), (-0.5,) * len(reply))
        turns.append(EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="", logprobs=tokens))
    samples = samples_from_trajectory(Trajectory(episode=turns, reward=1.0))
    assert [(each.token_ids.tolist(), each.loss_mask.astype(int).tolist()) for each in samples] == expected
    assert sum(each.num_trained for each in samples) == sum(len(reply) for _, reply in calls), "each token once"
