"""Training under a grammar: the learner's log-probs are those that were sampled from, and a reward is learned."""

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.model.loading import load_module
from reinforge.engine.training import logprobs as logprobs_module
from reinforge.engine.training.collate import collate
from reinforge.engine.training.logprobs import token_logprobs
from reinforge.types.request import Grammar, ModelRequest
from tests.device import DEVICE
from tests.engines import load_engine
from tests.models import make_tiny_model
from tests.samples import ask, random_samples, request, trained_samples

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["bug", "idea"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["text", "kind", "tags"],
    "additionalProperties": False,
}
JSON = Grammar("json_schema", json.dumps(SCHEMA))
WIDTH = 2045
BANS = ((40, -100.0), (250, -100.0))


def held(text: str = "hello", grammar: Grammar = JSON, **params) -> ModelRequest:
    return replace(request(text, **{"max_tokens": 120, **params}), grammar=grammar)


@pytest.fixture(scope="module")
def wide_model_dir(tmp_path_factory):
    """A vocabulary of which a text in JSON keeps more tokens than are recorded as ids, wider than the tokenizer's."""
    return make_tiny_model(tmp_path_factory.mktemp("wide") / "model", vocab_size=WIDTH, initializer_range=0.02)


@pytest.fixture(scope="module")
def engine(wide_model_dir):
    with load_engine(wide_model_dir) as engine:
        yield engine


@pytest.fixture(scope="module")
def samples(engine):
    replies = ask(engine.policy, [held(seed=seed) for seed in range(3)])
    return [sample for reply in replies for sample in trained_samples(reply.tokens)]


def test_every_token_is_trained_over_what_it_was_sampled_from(engine):
    """The learner's log-probs equal `processed_logprobs`; no token is left out; masks and ids are both used."""
    kinds = [
        {}, {"temperature": 0.6}, {"top_p": 0.5}, {"top_k": 30, "temperature": 1.4}, {"min_p": 0.2},
        {"logit_bias": BANS},
    ]  # fmt: skip
    replies = ask(engine.policy, [held(seed=seed, **params) for params in kinds for seed in range(3)])
    samples = [sample for reply in replies for sample in trained_samples(reply.tokens)]
    assert len(samples) == len(replies)
    for reply, one, found in zip(replies, samples, engine.logprobs(samples), strict=True):
        tokens = reply.tokens
        assert (tokens.restricted, one.num_trained) == (True, len(tokens.token_ids))
        assert np.abs(found[one.loss_mask] - tokens.processed_logprobs).max() <= 1e-5
        assert (np.array(tokens.processed_logprobs) >= np.array(tokens.logprobs) - 1e-5).all()
    for number, params in enumerate(kinds):
        counts = np.concatenate([one.supports.counts[one.loss_mask] for one in samples[3 * number :][:3]])
        assert (counts == 1).any(), "forced tokens are recorded as one id"
        is_filtered = not params.keys() <= {"temperature", "logit_bias"}
        assert (counts < 0).any() != is_filtered, "texts as masks, unless filtered"


def test_without_the_masks_the_learner_disagrees(engine, samples, monkeypatch):
    """Mutation check: over the whole vocabulary the same tokens have other log-probs."""
    monkeypatch.setattr(logprobs_module, "_get_supports", lambda *_: None)
    for one, found in zip(samples, engine.logprobs(samples), strict=True):
        assert np.abs(found - one.sampling_logprobs).max() > 0.1


def test_log_probs_and_gradients_against_arithmetic(samples, wide_model_dir):
    """Token by token on the model's own logits; gradients are finite, and those of never allowed tokens are 0."""
    model = CausalModel(load_module(wide_model_dir, torch.float64))
    found, entropies = token_logprobs(model, collate([*samples, *random_samples(2)]), entropy_grad=True)
    allowed = set()
    for one, row in zip(samples, found, strict=False):
        logits = model.module(input_ids=torch.from_numpy(one.token_ids)[None]).logits[0]
        sets = one.supports.sets
        for t in np.flatnonzero(one.loss_mask):
            kept = sets[t]
            if isinstance(kept, bytes):  # bit by bit, the lowest token first
                kept = [token for token in range(WIDTH) if kept[token // 8] >> token % 8 & 1]
            allowed |= set(map(int, kept))
            z = logits[t - 1, list(kept)]
            expected = logits[t - 1, one.token_ids[t]] - z.logsumexp(0)
            assert row[t].item() == pytest.approx(expected.item(), abs=1e-5)
    model.module.zero_grad()
    (found[: len(samples)].sum() + 0.1 * entropies[: len(samples)].sum()).backward()
    gradients = [p.grad for p in model.module.parameters() if p.grad is not None]
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    rows = model.head.weight.grad.abs().sum(dim=1)
    assert {token for token in range(WIDTH) if rows[token] > 0} <= allowed
    assert len(allowed) > 300


def test_chunks_of_the_head_share_masks(samples, wide_model_dir, monkeypatch):
    results = []
    for chunk in (2**24, WIDTH * 5):
        monkeypatch.setattr(logprobs_module, "split_tokens", make_split(chunk // WIDTH))
        model = CausalModel(load_module(wide_model_dir, torch.float32))
        values, _ = token_logprobs(model, collate(samples))
        values.sum().backward()
        results.append((values, model.head.weight.grad.clone()))
    for whole, chunked in zip(*results, strict=True):
        assert torch.allclose(whole, chunked, atol=1e-5)


def make_split(size):
    """Chunks of this many tokens, whatever the vocabulary."""
    return lambda count, _: [slice(start, min(start + size, count)) for start in range(0, count, size)]


def test_a_penalty_or_a_bias_changes_what_is_sampled_and_is_not_trained(engine, caplog):
    """The recorded log-prob is that of the changed distribution; the reason is said once."""
    with caplog.at_level(logging.WARNING):
        replies = ask(engine.policy, [request(seed=1, **params) for params in PENALTIES for _ in range(2)])
    for reply in replies:
        tokens = reply.tokens
        assert (tokens.restricted, tokens.supports) == (True, None)
        assert trained_samples(tokens) == []
    assert sum("are recorded but not trained" in message for message in caplog.messages) == 1
    tokens = replies[-1].tokens  # token 9 has +50: p(9) is 1 to the last bit
    assert set(tokens.token_ids) == {9}
    assert np.allclose(tokens.processed_logprobs, 0, atol=1e-5)
    assert max(tokens.logprobs) < -5


PENALTIES = ({"presence_penalty": 1.0}, {"frequency_penalty": -0.5, "top_p": 0.9}, {"logit_bias": ((9, 50.0),)})


def test_a_penalty_is_applied_to_each_token_of_the_reply_so_far(engine):
    """Log-probs by arithmetic: raw logits, minus presence once and frequency for each earlier time."""
    (reply,) = ask(
        engine.policy, [request(seed=4, presence_penalty=2.0, frequency_penalty=-2.0, logit_bias=((9, 9.0),))]
    )
    tokens = reply.tokens
    ids = [*tokens.prompt_token_ids, *tokens.token_ids]
    with torch.no_grad():
        logits = engine.model.module(input_ids=torch.tensor([ids], device=DEVICE)).logits[0]
    for place, token in enumerate(tokens.token_ids):
        row = logits[len(tokens.prompt_token_ids) + place - 1].clone()
        row[9] += 9.0
        for earlier in set(tokens.token_ids[:place]):
            row[earlier] -= 2.0 - 2.0 * tokens.token_ids[:place].count(earlier)
        assert tokens.processed_logprobs[place] == pytest.approx(row.log_softmax(0)[token].item(), abs=1e-5)
    assert tokens.token_ids.count(9) > 2
