"""One model, one number: sampler = learner = plain transformers forward, shared prefixes = rows, saved = reloaded.

For each family at a tiny size from its real configuration, in float32, with the fast paths and without them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from reinforge.config.policy import PolicyConfig
from reinforge.engine import Engine
from reinforge.engine.training.collate import collate
from reinforge.engine.training.logprobs import sample_logprobs, token_logprobs
from reinforge.engine.training.micro_batches import make_micro_batches
from tests.device import DEVICE
from tests.models import FAMILIES, make_tiny_model
from tests.samples import ask, request, sibling_samples, trained_samples

SIZES = (6, 1, 3, 4, 1, 2)


QUICK = ("llama", "gemma2", "gpt2")
"""Families that run without the fast paths in the quick tests too."""
CASES = [
    pytest.param((name, fast_paths), id=f"{name}-{kind}", marks=[] if fast_paths or name in QUICK else pytest.mark.slow)
    for name in FAMILIES
    for fast_paths, kind in ((True, "fast"), (False, "general"))
]


@pytest.fixture(scope="module", params=CASES)
def engine(request, tmp_path_factory):
    name, fast_paths = request.param
    folder = make_tiny_model(tmp_path_factory.mktemp(name), name, **FAMILIES[name])
    config = PolicyConfig(model=str(folder), max_num_seqs=5, fast_paths=fast_paths)
    with Engine.load(config, seed=0, device=DEVICE) as engine:
        yield engine


def plain_logprobs(engine, ids, first, temperature=1.0):
    """log p of the tokens from `first` on, by one call of the Hugging Face module."""
    tokens = torch.tensor([ids], device=engine.model.device)
    with torch.no_grad():
        logits = engine.model.module(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits[0].cpu().double()
    logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)
    return np.array([logprobs[t - 1, ids[t]].item() for t in range(first, len(ids))])


def test_the_sampler_is_the_plain_forward(engine):
    requests = [
        request("a" * (1 + i // 3), temperature=(1.0, 0.6, 1.7, 0.0)[i % 4], max_tokens=3 + 5 * (i % 5))
        for i in range(14)
    ]
    for reply in ask(engine.policy, requests):
        tokens = reply.tokens
        ids, first = tokens.prompt_token_ids + tokens.token_ids, len(tokens.prompt_token_ids)
        assert np.abs(plain_logprobs(engine, ids, first, tokens.temperature) - tokens.logprobs).max() <= 1e-5


def plain_over(engine, ids, kept, temperature):
    """log p of the last token over the kept tokens alone, by one call of the Hugging Face module."""
    with torch.no_grad():
        tokens = torch.tensor([ids[:-1]], device=engine.model.device)
        logits = engine.model.module(input_ids=tokens).logits[0, -1].cpu().double() / temperature
    return (logits[ids[-1]] - logits[kept.tolist()].logsumexp(0)).item()


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
    assert [sample.supports is None for sample in samples] == [
        not asked.sampling.restricts_support for asked in requests
    ]
    learned = engine.logprobs(samples)
    rows = sample_logprobs(engine.model, samples, 1000)
    full = engine.logprobs([replace(sample, supports=None) for sample in samples])
    for i, sample in enumerate(samples):
        assert np.abs(learned[i] - sample.sampling_logprobs).max() <= 1e-5
        assert np.abs(rows[i] - sample.sampling_logprobs).max() <= 1e-5, "prefixes shared or not"
        if sample.supports is None:
            continue
        assert np.abs(full[i] - sample.sampling_logprobs).max() > 0.01
        first, temperature = int(sample.loss_mask.argmax()), replies[i].tokens.temperature
        for t, kept in list(enumerate(sample.supports.sets))[first:]:
            plain = plain_over(engine, sample.token_ids[: t + 1].tolist(), kept, temperature)
            assert learned[i][t] == pytest.approx(plain, abs=1e-5)


def test_the_learner_is_the_plain_forward(engine):
    samples = sibling_samples()
    for sample, logprobs in zip(samples, engine.logprobs(samples), strict=True):
        for t in np.flatnonzero(sample.loss_mask):
            ids = sample.token_ids[: t + 1].tolist()
            assert logprobs[t] == pytest.approx(
                plain_logprobs(engine, ids, t, float(sample.temperatures[t]))[0], abs=1e-5
            )


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
    for row, other in zip(rows, shared, strict=True):
        assert np.abs(row - other).max() <= 1e-5
    gradients = []
    for way in (None, masks):
        model.module.zero_grad()
        for indices in make_micro_batches(samples, 2000 if stem or in_place else 200, share=way is not None):
            logprobs, entropies = token_logprobs(
                model, collate([samples[i] for i in indices], model.device), masks=way, entropy_grad=True
            )
            (logprobs.sum() + 0.1 * entropies.sum()).backward()
        gradients.append({name: p.grad.clone() for name, p in engine.learner.parameters.items()})
    model.module.zero_grad()
    for name, gradient in gradients[0].items():
        error = (gradients[1][name] - gradient).abs().max()
        assert error <= 1e-4 * max(gradient.abs().max().item(), 1e-3), name


def test_saved_is_reloaded(engine, tmp_path):
    samples = sibling_samples()
    engine.save(tmp_path / "saved", 1)
    config = PolicyConfig(model=str(tmp_path / "saved"), fast_paths=engine.config.fast_paths)
    with Engine.load(config, seed=0, device=DEVICE) as again:
        assert again.fingerprint() == engine.fingerprint()
        for before, after in zip(engine.logprobs(samples), again.logprobs(samples), strict=True):
            assert np.abs(before - after).max() <= 1e-6
