"""Runs on the device `strict` alone; `tests/core/engine/test_devices.py` starts it in a process of its own."""

import numpy as np
import pytest
import torch

from reinforge.config.policy import PolicyConfig
from reinforge.engine import Engine
from reinforge.engine.training import learner
from reinforge.engine.training.collate import collate
from reinforge.types.sample import LossSpec
from tests.device import DEVICE
from tests.samples import ask, request, trained_samples
from tests.strict_device import copies

LOSS = LossSpec("clipped_pg", {"clip_low": 0.2, "clip_high": 0.2})


def sample_and_train(folder, device):
    """Returns the tokens of replies, their log-probs before and after a step, and the step's report."""
    config = PolicyConfig(model=str(folder), max_num_seqs=3)
    with Engine.load(config, seed=0, device=device) as engine:
        assert engine.model.device.type == device
        filters = [{}, {"top_p": 0.8}, {"temperature": 0.0}]
        replies = ask(engine.policy, [request("a" * (1 + i // 2), max_tokens=5, **filters[i % 3]) for i in range(6)])
        samples = [each for reply in replies for each in trained_samples(reply.tokens)]
        for number, each in enumerate(samples):
            each.advantages = np.where(each.loss_mask, 1.0 - number % 2 * 2, 0.0).astype(np.float32)
        before = engine.logprobs(samples)
        engine.begin_job()
        report = engine.update(samples, LOSS, progress_start=0.0, progress_end=0.1)
        engine.end_job()
        return [reply.tokens.token_ids for reply in replies], before, engine.logprobs(samples), report


def test_the_engine_computes_there_what_it_computes_on_the_cpu(tiny_model_dir):
    assert DEVICE == "strict"
    (tokens, *logprobs, report), (cpu_tokens, *cpu_logprobs, cpu_report) = (
        sample_and_train(tiny_model_dir, device) for device in ("strict", "cpu")
    )
    assert tokens == cpu_tokens
    for rows, cpu_rows in zip(logprobs, cpu_logprobs, strict=True):
        assert max(np.abs(row - cpu_row).max() for row, cpu_row in zip(rows, cpu_rows, strict=True)) <= 1e-4
    assert report.num_updates == cpu_report.num_updates == 1
    assert report.metrics["grad_norm"] == pytest.approx(cpu_report.metrics["grad_norm"], rel=1e-3)
    assert report.metrics["mismatch"] <= 1e-5


@pytest.mark.parametrize("fast_paths", [True, False])
def test_a_step_of_any_number_of_replies_makes_three_copies(tiny_model_dir, fast_paths):
    """Tokens with positions, and temperatures with random numbers, go there; tokens with log-probs come back."""
    config = PolicyConfig(model=str(tiny_model_dir), max_num_seqs=8, fast_paths=fast_paths)
    with Engine.load(config, seed=0, device="strict") as engine:
        for _ in range(2):  # the second time the slots are large enough
            before, steps = copies.copy(), engine.policy.sampler.stats().steps
            ask(engine.policy, [request(f"hello {n}", max_tokens=12, ignore_eos=True) for n in range(6)])
        assert engine.policy.sampler.stats().steps - steps == 11
    assert copies["to_cpu"] - before["to_cpu"] == 12, "of the first token, and of each step"
    assert copies["to_device"] - before["to_device"] <= 2 * 12 + 12, "at most 12 for the prompts"


def test_a_batch_that_stays_on_the_cpu_is_found(tiny_model_dir, monkeypatch):
    monkeypatch.setattr(learner, "collate", lambda samples, device: collate(samples, torch.device("cpu")))
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        sample_and_train(tiny_model_dir, "strict")


def test_the_device_refuses_what_fails_on_a_gpu():
    there, here = torch.ones(3, device="strict"), torch.ones(3)
    assert (there + torch.tensor(1.0)).tolist() == [2, 2, 2], "one number may be on the CPU"
    with pytest.raises(RuntimeError, match="on the same device"):
        there + here
    with pytest.raises(TypeError, match="no float64"):
        torch.ones(3, device="strict", dtype=torch.float64)
    with pytest.raises(RuntimeError, match="non_blocking"):
        here.to("strict", non_blocking=True)
    with pytest.raises(RuntimeError, match="numpy"):
        there.numpy()
