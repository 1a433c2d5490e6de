"""Sampler and learner agree on every trained token, each job reports how well, and a run stops if they do not."""

import json
import math

import numpy as np
import pytest

from reinforge.adapters.local import LocalAdapter
from reinforge.adapters.local_config import LocalAdapterConfig
from reinforge.algorithms.samples import samples_from_trajectory
from reinforge.config.policy import LoRAConfig, PolicyConfig
from reinforge.engine import Engine
from reinforge.registry import register_trainer_adapter
from reinforge.types.request import ModelRequest
from reinforge.types.sample import LossSpec
from reinforge.types.trajectory import EpisodeItem, EpisodeItemRole, Trajectory
from tests.fault.test_token_fidelity import Wrapped
from tests.samples import ask, random_samples, request

TOLERANCE = 1e-5
"""Nats, in float32."""


def dialogs(policy, count):
    histories = [[{"role": "user", "content": f"say {i}"}] for i in range(count)]
    turns = [[] for _ in range(count)]
    for turn in range(3):
        asked = [i for i in range(count) if i % 3 >= turn]
        sampling = [
            request(max_tokens=4 + i % 9, temperature=(1.0, 0.7, 1.4)[i % 3], seed=1000 * turn + i).sampling
            for i in asked
        ]
        requests = [ModelRequest(list(histories[i]), params) for i, params in zip(asked, sampling, strict=True)]
        for i, reply in zip(asked, ask(policy, requests), strict=True):
            item = EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="", logprobs=reply.tokens)
            turns[i].append(item)
            histories[i] += [reply.message, {"role": "user", "content": "and then?"}]
    return [sample for episode in turns for sample in samples_from_trajectory(Trajectory(episode=episode, reward=1.0))]


@pytest.mark.parametrize("count", [50, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("lora", [None, LoRAConfig(r=4)], ids=["full", "lora"])
def test_the_learner_scores_sampled_dialogues_as_the_sampler_did(tiny_model_dir, lora, count):
    config = PolicyConfig(model=str(tiny_model_dir), lora=lora, max_num_seqs=64)
    config.optimizer.learning_rate = 1e-2
    with Engine.load(config, seed=0, device="cpu") as engine:
        engine.begin_job()
        engine.update(random_samples(8), LossSpec("cross_entropy"), progress_start=0.5, progress_end=0.5)
        engine.end_job()
        engine.policy.open(1)
        samples = dialogs(engine.policy, count)
        assert len(samples) >= count
        assert sum(sample.num_trained for sample in samples) > 8 * count
        for sample, logprobs in zip(samples, engine.logprobs(samples), strict=True):
            assert np.abs((logprobs - sample.sampling_logprobs)[sample.loss_mask]).max() <= TOLERANCE


class Offset(Wrapped):
    """The embedded policy with an offset in the log-probs of its replies."""

    offset = 0.05

    async def sample(self, request):
        reply = await super().sample(request)
        object.__setattr__(reply.tokens, "logprobs", tuple(each + self.offset for each in reply.tokens.logprobs))
        return reply


class OffsetConfig(LocalAdapterConfig, name="test_offset"):
    """The local adapter with such a policy."""


class OffsetAdapter(LocalAdapter):
    def policy(self):
        return Offset(super().policy()) if super().policy() is not None else None


@register_trainer_adapter(config_type=OffsetConfig)
async def offset_adapter(config, builder):
    adapter = OffsetAdapter(config, await builder.get_algorithm())
    yield adapter
    await adapter.cleanup()


@pytest.fixture
def run(project):
    project.set("finetuning.num_epochs", 2).set("trajectory_builders.builder.examples_per_epoch", 4)
    project.rows = project.rows[:24]
    return project


@pytest.mark.slow
def test_each_job_reports_how_well_the_two_agree(run):
    assert run.finetune().exit_code == 0
    rows = [json.loads(line) for line in (run.run / "training_metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert 0 <= row["canary_mean_difference"] <= row["canary_difference"] <= TOLERANCE
        assert abs(row["canary_k3"]) <= TOLERANCE**2


@pytest.mark.slow
def test_a_job_reports_the_mean_difference_and_the_divergence(run, monkeypatch):
    """All tokens are off by 0.05, which the canary tolerates here: k3 = exp(-0.05) - 1 + 0.05."""
    monkeypatch.setattr(Offset, "tolerance", 1.0, raising=False)
    assert run.set("trainer_adapters.adapter._type", "test_offset").finetune().exit_code == 0
    row = json.loads((run.run / "training_metrics.jsonl").read_text().splitlines()[0])
    assert row["canary_mean_difference"] == pytest.approx(0.05, abs=1e-5)
    assert row["canary_k3"] == pytest.approx(math.exp(-0.05) - 0.95, abs=1e-6)


@pytest.mark.parametrize("offset", [0.005, pytest.param(-0.05, marks=pytest.mark.slow)])
def test_an_offset_stops_the_run_in_one_step(run, monkeypatch, offset):
    monkeypatch.setattr(Offset, "offset", offset)
    result = run.set("trainer_adapters.adapter._type", "test_offset").finetune()
    assert (result.exit_code, f"differ by up to {abs(offset):.2e} nats" in result.output) == (3, True), result.output
    assert run.summary["status"] == "failed"
    assert "the policy does not serve the trained weights" in run.summary["reason"]
    assert not (run.run / "training_metrics.jsonl").exists(), "it ends in the first epoch"


@pytest.mark.fault
def test_an_offset_that_is_not_checked_goes_unnoticed(run, monkeypatch):
    """Mutation check: a canary that accepts any difference."""
    monkeypatch.setattr(Offset, "tolerance", math.inf, raising=False)
    assert run.set("trainer_adapters.adapter._type", "test_offset").finetune().exit_code == 0
