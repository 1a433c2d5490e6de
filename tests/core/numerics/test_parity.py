"""One model, one number: sampler = learner = plain transformers forward, shared prefixes = rows, saved = reloaded.

For each family at a tiny size from its real configuration, in float32, with the fast paths and without them.
"""

from dataclasses import replace

import numpy as np
import pytest

from reinforge.engine.training.collate import collate
from reinforge.engine.training.logprobs import sample_logprobs
from reinforge.engine.training.micro_batches import make_micro_batches
from tests.engines import (
    assert_close,
    compute_gradients,
    compute_plainly,
    compute_sample_plainly,
    load_engine,
    measure_difference,
)
from tests.models import FAMILIES, make_tiny_model
from tests.samples import ask, request, sibling_samples, trained_samples

SIZES = (6, 1, 3, 4, 1, 2)
QUICK = ("llama", "gpt2")
CASES = [
    pytest.param((name, True), id=f"{name}-fast", marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES
]
CASES += [
    pytest.param((name, False), id=f"{name}-general", marks=pytest.mark.slow) for name in ("llama", "gemma2", "gpt2")
]


@pytest.fixture(scope="module", params=CASES)
def engine(request, tmp_path_factory):
    name, fast_paths = request.param
    folder = make_tiny_model(tmp_path_factory.mktemp(name), name, **FAMILIES[name])
    with load_engine(folder, max_num_seqs=5, fast_paths=fast_paths) as engine:
        yield engine


def test_the_sampler_is_the_plain_forward(engine):
    requests = [
        request("a" * (1 + i // 3), temperature=(1.0, 0.6, 1.7, 0.0)[i % 4], max_tokens=3 + 5 * (i % 5))
        for i in range(14)
    ]
    for reply in ask(engine.policy, requests):
        tokens = reply.tokens
        ids, first = tokens.prompt_token_ids + tokens.token_ids, len(tokens.prompt_token_ids)
        plain = compute_plainly(engine.model.module, ids, first, tokens.temperature)
        assert np.abs(plain - tokens.logprobs).max() <= 1e-5


def test_filtered_replies_are_scored_over_the_kept_tokens(engine):
    """Sampler = learner = plain forward over the tokens that top-p, top-k and min-p keep, to 1e-5.

    Mutation check: over the whole vocabulary the learner's log-probs differ by more than 0.01.
    """
    filters = [
        {"top_p": 0.9},
        {"top_k": 3, "temperature": 0.7},
        {"min_p": 0.2},
        {"top_p": 0.8, "top_k": 20, "min_p": 0.05, "temperature": 1.6},
        {},
    ]
    requests = [request("a" * (1 + i // 4), **filters[i % 5], max_tokens=2 + 5 * (i % 3)) for i in range(20)]
    replies = ask(engine.policy, requests)
    samples = [sample for reply in replies for sample in trained_samples(reply.tokens)]
    assert [sample.supports is None for sample in samples] == [not filters[i % 5] for i in range(20)]
    learned = engine.logprobs(samples)
    rows = sample_logprobs(engine.model, samples, 1000)
    full = engine.logprobs([replace(sample, supports=None) for sample in samples])
    for i, sample in enumerate(samples):
        assert np.abs(learned[i] - sample.sampling_logprobs).max() <= 1e-5
        assert np.abs(rows[i] - sample.sampling_logprobs).max() <= 1e-5, "prefixes shared or not"
        if sample.supports is None:
            continue
        assert np.abs(full[i] - sample.sampling_logprobs).max() > 0.01
        ids, first = sample.token_ids.tolist(), int(sample.loss_mask.argmax())
        plain = compute_plainly(engine.model.module, ids, first, replies[i].tokens.temperature, sample.supports.sets)
        assert np.abs(learned[i][first:] - plain).max() <= 1e-5


def test_the_learner_is_the_plain_forward(engine):
    samples = sibling_samples()
    plain = [compute_sample_plainly(engine.model.module, sample) for sample in samples]
    assert measure_difference(engine.logprobs(samples), plain) <= 1e-5


@pytest.mark.parametrize(
    ("stem", "sizes", "in_place"),
    [(0, SIZES, False), (0, (20, 20, 20), True), (80, SIZES, False), (80, (6, 6, 6, 6), True)],
    ids=["prefixes repeated", "in place", "after stems", "in place, after stems"],
)
def test_shared_prefixes_equal_whole_rows(engine, stem, sizes, in_place):
    """Log-probs to 1e-5, every parameter's gradient to 1e-4 of its size; and prefixes and stems are really shared."""
    samples = sibling_samples(stem=stem, sizes=sizes)
    masks, model = engine.learner.masks, engine.model
    assert masks is not None
    assert masks.shares_stems
    batches = [collate([samples[i] for i in batch], model.device) for batch in make_micro_batches(samples, 2000)]
    assert any(batch.prefixes for batch in batches)
    assert any(batch.prefixes.runs is not None for batch in batches if batch.prefixes) == in_place
    assert any(batch.stems for batch in batches) == bool(stem)
    rows, shared = sample_logprobs(model, samples, 2000), sample_logprobs(model, samples, 2000, masks)
    assert measure_difference(rows, shared) <= 1e-5
    max_tokens = 2000 if stem or in_place else 200
    assert_close(compute_gradients(engine, samples, max_tokens, masks), compute_gradients(engine, samples, max_tokens))


def test_saved_is_reloaded(engine, tmp_path):
    samples = sibling_samples()
    engine.save(tmp_path / "saved", 1)
    with load_engine(tmp_path / "saved", fast_paths=engine.config.fast_paths) as again:
        assert again.fingerprint() == engine.fingerprint()
        assert measure_difference(engine.logprobs(samples), again.logprobs(samples)) <= 1e-6
