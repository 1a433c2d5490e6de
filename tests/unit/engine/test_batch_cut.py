"""How samples are cut into micro-batches: siblings stay together where sharing their prefix pays."""

from __future__ import annotations

import numpy as np
import pytest

from reinforge.algorithms.samples import samples_of_groups
from reinforge.engine.training.collate import collate, prefix_of
from reinforge.engine.training.micro_batches import cut
from reinforge.types.request import TokenLogprobs
from reinforge.types.trajectory import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryGroup
from tests.samples import sample_of, sibling_samples


def sample(prompt, reply):
    return sample_of(TokenLogprobs(tuple(prompt), tuple(reply), (-1.0,) * len(reply)))


def test_siblings_of_a_long_prompt_share_it_and_the_other_goes_alone():
    siblings = [sample([1, 2, 3, 4, 5, 6], [7, 8 + n]) for n in range(3)]
    assert cut([*siblings, sample([9] * 6, [1, 2, 3])], 12) == [[3], [0, 1, 2]]


def test_a_family_that_is_too_big_is_cut_and_its_prefix_repeated():
    """Prefix 6, suffixes of 2: four members in 14 tokens, the other two in a batch of their own."""
    family = [sample([1, 2, 3, 4, 5, 6], [7, 8 + n]) for n in range(6)]
    assert cut(family, 14) == [[0, 1, 2, 3], [4, 5]]


def test_a_short_prompt_is_not_worth_a_second_pass():
    """Prefix 1, suffixes of 20: 41 tokens shared, 42 as rows."""
    assert collate([sample([1], range(20)), sample([1], range(20))]).prefixes is not None
    assert cut([sample([1], range(20)), sample([2], range(9)), sample([1], range(20))], 100) == [[1, 0, 2]]


def said(prompt, reply, *, trained):
    tokens = TokenLogprobs(tuple(prompt), tuple(reply), (-1.0,) * len(reply))
    return EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="", logprobs=tokens, trained=trained)


def test_children_of_a_node_share_the_whole_path_to_it():
    """A tree: [1, 2] -> 3 4, then [.., 5] -> 6 7 is the path; three children go on from [.., 8, 9]."""
    path = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    above = [said(path[:2], path[2:4], trained=False), said(path[:5], path[5:7], trained=False)]
    children = [Trajectory(episode=[*above, said(path, [10 + n, 20], trained=True)], reward=float(n)) for n in range(3)]
    samples = samples_of_groups([TrajectoryGroup(group_id="node", trajectories=children)])
    assert [prefix_of(child) for child in samples] == [tuple(path)] * 3
    assert [child.token_ids[child.loss_mask].tolist() for child in samples] == [[10, 20], [11, 20], [12, 20]]
    assert cut(samples, 15) == [[0, 1, 2]], "9 tokens once and 2 for each"
    prefixes = collate(samples).prefixes
    assert (prefixes.token_ids.tolist(), prefixes.groups.tolist()) == ([path], [0, 0, 0])


@pytest.mark.parametrize("max_tokens", [1, 16, 60, 10_000])
@pytest.mark.parametrize("share", [True, False])
def test_each_sample_is_in_exactly_one_batch_which_is_not_too_large(max_tokens, share):
    samples = sibling_samples(seed=3)
    batches = cut(samples, max_tokens, share=share)
    assert sorted(index for batch in batches for index in batch) == list(range(len(samples)))
    for chosen in ([samples[i] for i in batch] for batch in batches):
        padded = len(chosen) * max(map(len, chosen))
        prefixes = {prefix_of(sample) for sample in chosen}
        suffix = max(len(sample) - len(prefix_of(sample)) for sample in chosen)
        shared = len(prefixes) * max(map(len, prefixes)) + len(chosen) * suffix
        assert min(padded, shared if share else padded) <= max_tokens or len(chosen) == 1


def test_the_prefixes_of_a_batch():
    batch = collate([sample([1, 2, 3], [4]), sample([5, 6], [7, 8]), sample([1, 2, 3], [9, 9])])
    assert batch.prefixes.token_ids.tolist() == [[1, 2, 3], [5, 6, 0]]
    assert (batch.prefixes.lengths.tolist(), batch.prefixes.groups.tolist()) == ([3, 2], [0, 1, 0])
    assert collate([sample([1, 2], [3]), sample([1, 3], [3])]).prefixes is None
    assert np.array_equal(batch.token_ids[1].tolist(), [5, 6, 7, 8, 0])


def pair(name, *samples):
    """Gives two samples a pair id and rewards 1 and 0."""
    for reward, member in zip((1.0, 0.0), samples, strict=True):
        member.pair_id, member.reward = name, reward
    return samples


def test_a_pair_stays_together_among_rows():
    """Rows of 3, 9, 4, 8 tokens of which the first two are a pair: 2 x 9 tokens go together, too many or not."""
    rows = [sample([n], range(length - 1)) for n, length in enumerate((3, 9, 4, 8), start=1)]
    pair("p", *rows[:2])
    assert cut(rows, 16) == [[2, 3], [0, 1]]
    assert cut(rows, 1) == [[2], [3], [0, 1]]


def test_one_without_siblings_goes_with_families_that_are_about_as_long():
    """One pass more or less counts as 128 tokens: 20 + 20 + 4 x 2 and two passes, against two more for the one."""
    family = [sample([1] * 20, [i, i]) for i in range(3)]
    assert cut([*family, sample([2] * 20, [5, 6])], 100) == [[0, 1, 2, 3]]
    assert cut([*family, sample([2] * 300, [5, 6])], 2000) == [[3], [0, 1, 2]], "all prefixes would be padded to 300"


def test_a_pair_stays_together_in_a_family_that_is_cut():
    """Prefix 6, suffixes of 2: three rows in 12 tokens; the pair 0 and 3 is not parted."""
    family = [sample([1, 2, 3, 4, 5, 6], [7, 8 + n]) for n in range(5)]
    pair("p", family[0], family[3])
    assert cut(family, 12) == [[0, 3, 1], [2, 4]]
    assert cut(family, 8) == [[0, 3], [1], [2], [4]]


def test_the_pairs_of_a_batch_name_the_preferred_row_first():
    better, worse = pair("p", sample([1], [2]), sample([1], [3]))
    alone, _ = pair("q", sample([1], [4]), sample([1], [5]))
    assert collate([worse, alone, better]).pairs.tolist() == [[2, 0]]
    assert collate([worse, alone]).pairs is None
