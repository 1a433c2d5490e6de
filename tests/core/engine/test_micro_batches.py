"""How samples are split into micro-batches: siblings stay together if sharing their prefix pays."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from reinforge.algorithms.samples import samples_from_groups
from reinforge.engine.training import micro_batches
from reinforge.engine.training.collate import PASS_OVERHEAD_TOKENS, collate, find_stems, get_prefix
from reinforge.engine.training.micro_batches import choose_micro_batch_tokens, make_micro_batches
from reinforge.types.request import TokenLogprobs
from reinforge.types.trajectory import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryGroup
from tests.samples import make_sample, sibling_samples


def sample(prompt, reply):
    return make_sample(TokenLogprobs(tuple(prompt), tuple(reply), (-1.0,) * len(reply)))


@pytest.mark.parametrize(
    ("given", "device", "memory", "tokens"),
    [
        (100, "cpu", 1, 100),
        (None, "cuda", 1, 8192),
        (None, "cpu", None, 4096),
        (None, "cpu", 4 * 4096 * 8192, 4096),
        (None, "cpu", 4 * 4096 * 8192 - 4, 2048),
        (None, "cpu", 4 * 600 * 8192, 512),
        (None, "cpu", 1, 256),
    ],
)
def test_passes_on_a_cpu_fit_a_quarter_of_its_memory(given, device, memory, tokens, monkeypatch):
    """Two layers keep 16 vectors of 64 numbers of four bytes each: 8,192 bytes a token."""
    config = SimpleNamespace(hidden_size=64)
    model = SimpleNamespace(device=torch.device(device), dtype=torch.float32, num_layers=2, config=config)
    monkeypatch.setattr(micro_batches, "measure_machine", lambda: memory)
    assert choose_micro_batch_tokens(given, model) == tokens


def test_siblings_share_a_long_prompt_and_others_are_batched_alone():
    siblings = [sample([1, 2, 3, 4, 5, 6], [7, 8 + n]) for n in range(3)]
    assert make_micro_batches([*siblings, sample([9] * 6, [1, 2, 3])], 12) == [[3], [0, 1, 2]]


def test_siblings_that_do_not_fit_one_batch_repeat_their_prefix():
    """Prefix 6, suffixes of 2: four members in 14 tokens, the other two in a batch of their own."""
    family = [sample([1, 2, 3, 4, 5, 6], [7, 8 + n]) for n in range(6)]
    assert make_micro_batches(family, 14) == [[0, 1, 2, 3], [4, 5]]


def test_siblings_of_a_prompt_that_fills_a_batch_share_it_nevertheless():
    """Prefix 20 of at most 24 tokens, suffixes of 4: three rows in 20 + 12 tokens, instead of one in 24."""
    family = [sample([1] * 20, [2, 3, 4, n]) for n in range(5)]
    assert make_micro_batches(family, 24) == [[0, 1, 2], [3, 4]]
    assert make_micro_batches(family, 24, share=False) == [[0], [1], [2], [3], [4]]


def test_a_short_prompt_is_not_worth_a_second_pass():
    """Prefix 1, suffixes of 20: 41 tokens shared, 42 as rows."""
    assert collate([sample([1], range(20)), sample([1], range(20))]).prefixes is not None
    assert make_micro_batches([sample([1], range(20)), sample([2], range(9)), sample([1], range(20))], 100) == [
        [1, 0, 2]
    ]


def make_turn(prompt, reply, *, trained):
    tokens = TokenLogprobs(tuple(prompt), tuple(reply), (-1.0,) * len(reply))
    return EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="", logprobs=tokens, trained=trained)


def test_children_of_a_node_share_the_whole_path_to_it():
    """A tree: [1, 2] -> 3 4, then [.., 5] -> 6 7 is the path; three children extend [.., 8, 9]."""
    path = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    above = [make_turn(path[:2], path[2:4], trained=False), make_turn(path[:5], path[5:7], trained=False)]
    episodes = [[*above, make_turn(path, [10 + n, 20], trained=True)] for n in range(3)]
    children = [Trajectory(episode=episode, reward=float(n)) for n, episode in enumerate(episodes)]
    samples = samples_from_groups([TrajectoryGroup(group_id="node", trajectories=children)])
    assert [get_prefix(child) for child in samples] == [tuple(path)] * 3
    assert [child.token_ids[child.loss_mask].tolist() for child in samples] == [[10, 20], [11, 20], [12, 20]]
    assert make_micro_batches(samples, 15) == [[0, 1, 2]], "9 tokens once and 2 for each"
    prefixes = collate(samples).prefixes
    assert (prefixes.token_ids.tolist(), prefixes.groups.tolist()) == ([path], [0, 0, 0])


@pytest.mark.parametrize("max_tokens", [1, 16, 60, 10_000])
@pytest.mark.parametrize("share", [True, False])
def test_each_sample_is_in_exactly_one_batch_which_is_not_too_large(max_tokens, share):
    samples = sibling_samples(seed=3)
    batches = make_micro_batches(samples, max_tokens, share=share)
    assert sorted(index for batch in batches for index in batch) == list(range(len(samples)))
    for chosen in ([samples[i] for i in batch] for batch in batches):
        padded = len(chosen) * max(map(len, chosen))
        prefixes = {get_prefix(sample) for sample in chosen}
        suffix = max(len(sample) - len(get_prefix(sample)) for sample in chosen)
        shared = len(prefixes) * max(map(len, prefixes)) + len(chosen) * suffix
        assert min(padded, shared if share else padded) <= max_tokens or len(chosen) == 1


def test_the_prefixes_of_a_batch():
    batch = collate([sample([1, 2, 3], [4]), sample([5, 6], [7, 8]), sample([1, 2, 3], [9, 9])])
    assert batch.prefixes.token_ids.tolist() == [[1, 2, 3], [5, 6, 0]]
    assert (batch.prefixes.lengths.tolist(), batch.prefixes.groups.tolist()) == ([3, 2], [0, 1, 0])
    assert collate([sample([1, 2], [3]), sample([1, 3], [3])]).prefixes is None
    assert np.array_equal(batch.token_ids[1].tolist(), [5, 6, 7, 8, 0])


def pair(name, *samples):
    for reward, member in zip((1.0, 0.0), samples, strict=True):
        member.pair_id, member.reward = name, reward
    return samples


def test_a_pair_stays_together_among_rows():
    """Rows of 3, 9, 4, 8 tokens of which the first two are a pair: 2 x 9 tokens go together, too many or not."""
    rows = [sample([n], range(length - 1)) for n, length in enumerate((3, 9, 4, 8), start=1)]
    pair("p", *rows[:2])
    assert make_micro_batches(rows, 16) == [[2, 3], [0, 1]]
    assert make_micro_batches(rows, 1) == [[2], [3], [0, 1]]


def test_a_sample_without_siblings_joins_families_of_similar_length():
    """One pass more or less counts as 128 tokens: 20 + 20 + 4 x 2 and two passes, against two more for the one."""
    family = [sample([1] * 20, [i, i]) for i in range(3)]
    assert make_micro_batches([*family, sample([2] * 20, [5, 6])], 100) == [[0, 1, 2, 3]]
    assert make_micro_batches([*family, sample([2] * 300, [5, 6])], 2000) == [[3], [0, 1, 2]], (
        "all prefixes would be padded to 300"
    )


def test_a_pair_stays_together_in_a_family_that_is_split():
    """Prefix 6, suffixes of 2: three rows in 12 tokens; the pair 0 and 3 is not split."""
    family = [sample([1, 2, 3, 4, 5, 6], [7, 8 + n]) for n in range(5)]
    pair("p", family[0], family[3])
    assert make_micro_batches(family, 12) == [[0, 3, 1], [2, 4]]
    assert make_micro_batches(family, 8) == [[0, 3], [1, 2], [4]]


def test_the_pairs_of_a_batch_name_the_preferred_row_first():
    better, worse = pair("p", sample([1], [2]), sample([1], [3]))
    alone, _ = pair("q", sample([1], [4]), sample([1], [5]))
    assert collate([worse, alone, better]).pairs.tolist() == [[2, 0]]
    assert collate([worse, alone]).pairs is None


def found(prompts, width):
    stems = find_stems(prompts, width, None)
    return None if stems is None else (stems.token_ids.tolist(), stems.groups.tolist())


def test_common_instructions_of_all_prompts():
    """20 prompts of 10 common tokens and one own token each: 190 of 220 tokens saved."""
    prompts = [(*range(10), 50 + i) for i in range(20)]
    assert found(prompts, 11) == ([list(range(10))], [0] * 20)


def test_the_length_that_saves_most_tokens():
    """40 rows of 2 stems of 6 tokens save 38 x 6 = 228, of 10 stems of 7 tokens 30 x 7 = 210."""
    prompts = [(*[i % 2] * 6, i % 10, i, i) for i in range(40)]
    token_ids, groups = found(prompts, 9)
    assert token_ids == [[0] * 6, [1] * 6]
    assert groups == [i % 2 for i in range(40)]


def test_rows_with_one_stem_need_not_be_adjacent():
    prompts = [(*[7 + i % 3] * 12, 100 + i) for i in range(30)]
    token_ids, groups = found(prompts, 13)
    assert [token_ids[group] for group in groups] == [list(prompt[:12]) for prompt in prompts]


@pytest.mark.parametrize(
    ("prompts", "width"),
    [
        ([(i, *range(20)) for i in range(40)], 21),
        ([(*range(10), i) for i in range(PASS_OVERHEAD_TOKENS // 10)], 11),
        ([(*range(20), i) for i in range(20)], 300),
        ([(1,)] * 200, 5),
        ([(1, 2, 3)], 400),
    ],
    ids=["no two begin alike", "too few tokens", "too small a share", "no token before the last", "one prompt"],
)
def test_nothing_is_shared_if_that_saves_little(prompts, width):
    assert found(prompts, width) is None


def test_a_stem_ends_before_the_last_token_of_the_shortest_prompt():
    """Its reply is predicted from there."""
    prompts = [(1,) * 9] + [(*[1] * 9, i) for i in range(30)]
    assert found(prompts, 11)[0] == [[1] * 8]


def test_a_batch_has_the_stems_of_its_prefixes_or_of_its_samples():
    siblings = collate(sibling_samples(stem=50))
    assert siblings.prefixes is not None
    assert siblings.stems is not None
    assert len(siblings.stems.groups) == len(siblings.prefixes.lengths) == 6
    assert siblings.stems.token_ids.shape == (2, 50)
    alone = collate([make_sample(TokenLogprobs((*range(9), i), (1, 2), (0.0, 0.0))) for i in range(30)])
    assert alone.prefixes is None
    assert alone.stems is not None
    assert torch.equal(alone.stems.groups, torch.zeros(30, dtype=torch.long))


def test_a_beginning_that_all_prompts_have_counts_once():
    """A stem of 200, 10 tokens of its own and 4 of the reply in each of 9 rows: 200 + 9 x (200 / 5 + 14) = 686."""
    stem = list(range(200))
    rows = [sample([*stem, *[1000 + n] * 10], [7, 8, 9, 10]) for n in range(9)]
    assert [len(batch) for batch in make_micro_batches(rows, 686, share_stems=True)] == [9]
    assert [len(batch) for batch in make_micro_batches(rows, 685, share_stems=True)] == [8, 1]
    assert [len(batch) for batch in make_micro_batches(rows, 686)] == [3, 3, 3]


def test_siblings_below_a_stem_share_both():
    """Two families of three, prompts of 200 + 10: 200 + 2 x (200 / 5 + 10) + 6 x 4 = 324; without the stem 444."""
    stem = list(range(200))
    rows = [sample([*stem, *[1000 + n // 3] * 10], [7, 8, 9, 10 + n]) for n in range(6)]
    assert make_micro_batches(rows, 400, share_stems=True) == make_micro_batches(rows, 444) == [[0, 1, 2, 3, 4, 5]]
    assert make_micro_batches(rows, 443) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("length", [100, 300])
def test_a_short_stem_and_one_that_fills_a_batch_are_not_counted(length):
    rows = [sample([*range(length), 1000 + n], [7, 8]) for n in range(6)]
    assert make_micro_batches(rows, 400, share_stems=True) == make_micro_batches(rows, 400)
