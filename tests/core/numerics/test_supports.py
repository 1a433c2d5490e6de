"""Training over the kept tokens of filtered sampling: arithmetic, gradients, a bandit, and tokens left out."""

import asyncio
import math
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from reinforge.adapters.local import LocalAdapter
from reinforge.adapters.local_config import LocalAdapterConfig
from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.engine.model import heads as head_module
from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.model.loading import load_module
from reinforge.engine.training.collate import collate
from reinforge.engine.training.logprobs import token_logprobs
from reinforge.types.sample import TrainingSample
from reinforge.types.supports import MAX_SUPPORT, Supports
from reinforge.types.trajectory import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryCollection
from tests.device import DEVICE
from tests.engines import load_engine
from tests.models import make_tiny_model
from tests.samples import ask, random_samples, request, trained_samples


def with_supports(samples: list[TrainingSample], seed: int = 0) -> list[TrainingSample]:
    """Gives two of three trained tokens a support: one to five tokens, itself among them."""
    rng = np.random.default_rng(seed)
    for sample in samples:
        sets = [np.zeros(0, np.int32)] * len(sample)
        for t in np.flatnonzero(sample.loss_mask):
            if rng.random() < 2 / 3:
                others = rng.integers(6, 320, rng.integers(0, 5))
                sets[t] = np.unique(np.append(others, sample.token_ids[t])).astype(np.int32)
        sample.supports = Supports.from_sets(sets)
    return samples


def test_log_probs_and_entropy_are_over_the_kept_tokens(tiny_model_dir):
    """Against arithmetic on the model's logits, token by token; tokens without a support use the whole vocabulary."""
    model = CausalModel(load_module(tiny_model_dir, torch.float64))
    samples = with_supports(random_samples(6))
    with torch.no_grad():
        found, entropies = token_logprobs(model, collate(samples))
        sizes = set()
        for sample, row, entropy in zip(samples, found, entropies, strict=True):
            logits = model.module(input_ids=torch.from_numpy(sample.token_ids)[None]).logits[0]
            for t in np.flatnonzero(sample.loss_mask):
                kept = sample.supports.sets[t].tolist() or range(model.vocab_size)
                z = [logits[t - 1, token].item() / sample.temperatures[t] for token in kept]
                total = math.fsum(math.exp(x) for x in z)
                own = logits[t - 1, sample.token_ids[t]].item() / sample.temperatures[t]
                assert row[t].item() == pytest.approx(own - math.log(total), abs=1e-5)
                expected = -math.fsum(math.exp(x) / total * (x - math.log(total)) for x in z)
                assert entropy[t].item() == pytest.approx(expected, abs=1e-5)
                sizes.add(len(kept))
    assert {1, 2, 320} <= sizes


def test_the_gradient_is_the_slope_over_the_kept_tokens(tiny_model_dir):
    """Finite differences, entropies included; and the head's rows of tokens that were never kept have no gradient."""
    model = CausalModel(load_module(tiny_model_dir, torch.float64))
    samples = with_supports(random_samples(4, seed=2))
    for sample in samples:  # no token uses the whole vocabulary
        sets = [np.append(kept, sample.token_ids[t]) for t, kept in enumerate(sample.supports.sets)]
        sample.supports = Supports.from_sets(np.unique(kept).astype(np.int32) for kept in sets)
    batch = collate(samples)

    def value():
        found, entropies = token_logprobs(model, batch, entropy_grad=True)
        return found.sum() + 0.3 * entropies.sum()

    value().backward()
    parameters = [p for p in model.module.parameters() if p.grad is not None]
    gradients = [p.grad.clone() for p in parameters]
    norm = math.sqrt(sum((g**2).sum().item() for g in gradients))
    values = []
    for size in (1e-4, -2e-4):
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter += size * gradient / norm
            values.append(value().item())
    assert (values[0] - values[1]) / 2e-4 == pytest.approx(norm, rel=1e-4)
    kept = set(np.concatenate([sample.supports.token_ids for sample in samples]).tolist())
    rows = model.head.weight.grad.abs().sum(dim=1)
    assert {token for token in range(320) if rows[token] > 0} <= kept
    assert any(rows[token] > 0 for token in kept)


def test_chunks_of_the_head_change_nothing(tiny_model_dir, monkeypatch):
    results = []
    for chunk in (2**22, 320 * 4):
        monkeypatch.setattr(head_module, "CHUNK_LOGITS", chunk)
        model = CausalModel(load_module(tiny_model_dir, torch.float32))
        batch = collate([*with_supports(random_samples(5)), *random_samples(3, seed=9)])
        values, entropies = token_logprobs(model, batch, entropy_grad=True)
        (values.sum() + entropies.sum()).backward()
        results.append((values, entropies, model.head.weight.grad.clone()))
    for whole, chunked in zip(*results, strict=True):
        assert torch.allclose(whole, chunked, atol=1e-5)


def test_without_a_support_no_mask_is_made():
    """Unfiltered samples cost nothing: the batch holds no supports at all."""
    assert collate(random_samples(4)).supports is None


def by_token(token_ids):
    """A reward that differs between most tokens: the mean of their last digit."""
    return float(np.mean([token % 10 for token in token_ids])) / 9


def sample_groups(policy, prompts, **params):
    requests = [request(prompt, max_tokens=2, **params) for prompt in prompts for _ in range(8)]
    trajectories = []
    for reply in ask(policy, requests):
        turn = EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="x", logprobs=reply.tokens)
        trajectories.append(Trajectory(episode=[turn], reward=by_token(reply.tokens.token_ids)))
    return [trajectories[i : i + 8] for i in range(0, len(trajectories), 8)]


def settings(folder, **sampling):
    policy = {
        "model": str(folder),
        "optimizer": {"learning_rate": 3e-3},
        "schedule": {"warmup_steps": 0},
        "batch": {"steps_per_job": 2},
    }
    return FinetuneConfig.model_validate({"policy": policy, "device": DEVICE, "sampling": sampling})


async def job(adapter, siblings, number):
    ref = await adapter.submit(TrajectoryCollection(trajectories=siblings, run_id="r", epoch=number))
    status = await adapter.wait_until_complete(ref)
    await adapter.policy().publish(number + 1)
    return status


@asynccontextmanager
async def open_adapter(folder, **sampling):
    adapter = LocalAdapter(LocalAdapterConfig(), GRPO(GRPOConfig()))
    await adapter.initialize(settings(folder, **sampling))
    try:
        yield adapter
    finally:
        await adapter.cleanup()


async def test_greedy_tokens_are_left_out_and_said(tiny_model_dir):
    async with open_adapter(tiny_model_dir) as adapter:
        greedy = await asyncio.to_thread(sample_groups, adapter.policy(), ["a"], temperature=0)
        tokens = greedy[0][0].turns[0].tokens
        assert (tokens.restricted, tokens.supports, set(tokens.processed_logprobs)) == (True, None, {0.0})
        status = await job(adapter, greedy, 0)
    assert status.status == "failed"
    assert "16 sampled tokens cannot be trained: they were sampled at temperature 0" in status.message


async def test_a_job_leaves_out_penalized_replies_and_counts_them(tiny_model_dir):
    async with open_adapter(tiny_model_dir) as adapter:
        groups = await asyncio.to_thread(sample_groups, adapter.policy(), ["a", "b"])
        groups[1] = (await asyncio.to_thread(sample_groups, adapter.policy(), ["b"], presence_penalty=1.0))[0]
        status = await job(adapter, groups, 0)
    assert status.status == "completed", status.message
    assert status.metadata["num_tokens_left_out"] == sum(len(t.turns[0].tokens.token_ids) for t in groups[1])


def test_a_support_too_wide_to_record_is_left_out_token_by_token(tmp_path):
    """A vocabulary of 2048 with a flat distribution: 0.9 of it is more than 1024 tokens, 0.2 is fewer."""
    folder = make_tiny_model(tmp_path / "wide", vocab_size=2048, initializer_range=0.02)
    with load_engine(folder) as engine:
        wide, narrow = ask(engine.policy, [request(top_p=0.9, seed=1), request(top_p=0.2, seed=1)])
        assert wide.tokens.restricted
        assert (wide.tokens.supports.counts == 0).all()
        assert trained_samples(wide.tokens) == []
        (sample,) = trained_samples(narrow.tokens)
        counts = sample.supports.counts[sample.loss_mask]
        assert 200 < counts.min() <= counts.max() <= MAX_SUPPORT
        assert np.abs(engine.logprobs([sample])[0] - sample.sampling_logprobs).max() <= 1e-5
