"""Unsupported settings are rejected by name, before any work and without a request."""

from __future__ import annotations

from typing import Any

import pytest

from reinforge.algorithms.dpo import DPO, DPOConfig
from reinforge.algorithms.expert_iteration import ExpertIteration, ExpertIterationConfig
from reinforge.algorithms.grpo import GRPO
from reinforge.algorithms.ipo import IPO
from reinforge.algorithms.malt import MALT, MALTConfig
from reinforge.algorithms.rejection_sampling import RejectionSampling
from reinforge.algorithms.sft import SFT
from reinforge.config.loader import build_config
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import ConfigError
from reinforge.interfaces import Algorithm
from reinforge.protocols.openai.adapter import OpenAIAdapter, OpenAIAdapterConfig
from reinforge.trainer.setup.check import check_config
from tests.scripted_run import ScriptedRun

NOWHERE = "http://127.0.0.1:9/v1"


def find_problems(
    algorithm: Algorithm | None = None, adapter: dict[str, Any] | None = None, **finetuning: Any
) -> list[str]:
    config = OpenAIAdapterConfig(**({"base_model": "gpt-test"} if adapter is None else adapter))
    made = OpenAIAdapter(config, algorithm or SFT(), NOWHERE)
    return [str(problem) for problem in made.validate(FinetuneConfig.model_validate(finetuning))]


@pytest.mark.parametrize(
    "algorithm", [SFT(), RejectionSampling(), ExpertIteration(), DPO(), MALT(MALTConfig(sft_coef=0.0))]
)
def test_defaults_are_supported(algorithm: Algorithm) -> None:
    assert find_problems(algorithm) == []


def test_weighted_rows_and_sft_coef_are_rejected() -> None:
    weighted = ExpertIteration(ExpertIterationConfig(rollout_selection_method="weighted_sampling"))
    [problem] = find_problems(weighted)
    assert "finetuning.algorithm.rollout_selection_method" in str(problem)
    [problem] = find_problems(MALT(MALTConfig(sft_coef=0.0, num_initial_ei_epochs=1, initial_ei=weighted.config)))
    assert "finetuning.algorithm.initial_ei.rollout_selection_method" in str(problem)
    [problem] = find_problems(MALT())
    assert "finetuning.algorithm.sft_coef: is 1.0, but" in str(problem)


@pytest.mark.parametrize(
    ("finetuning", "path", "fix"),
    [
        ({"policy": {"lora": {"r": 4}}}, "finetuning.policy.lora", "leave it out"),
        (
            {"policy": {"optimizer": {"learning_rate": 1e-5}}},
            "policy.optimizer.learning_rate",
            "learning_rate_multiplier",
        ),
        ({"policy": {"optimizer": {"name": "sgd"}}}, "policy.optimizer.name", "leave it out"),
        ({"policy": {"schedule": {"warmup_steps": 0}}}, "policy.schedule.warmup_steps", "leave it out"),
        ({"policy": {"batch": {"batch_size": 8}}}, "policy.batch.batch_size", "adapter's batch_size"),
        ({"policy": {"batch": {"num_iterations": 2}}}, "policy.batch.num_iterations", "n_epochs"),
        ({"policy": {"batch": {"steps_per_job": 1}}}, "policy.batch.steps_per_job", "--smoke"),
        ({"policy": {"dtype": "bfloat16"}}, "policy.dtype", "leave it out"),
        ({"policy": {"chat_template": "{{ x }}"}}, "policy.chat_template", "leave it out"),
        ({"policy": {"init": "random"}}, "policy.init", "leave it out"),
        ({"deterministic": True}, "finetuning.deterministic", "_type: local"),
        ({"device": "cuda"}, "finetuning.device", "leave it out"),
        ({"sampling": {"top_k": 5}}, "finetuning.sampling.top_k", "top_p"),
        ({"sampling": {"min_p": 0.1}}, "finetuning.sampling.min_p", "top_p"),
        ({"sampling": {"temperature": 2.5}}, "finetuning.sampling.temperature", "2 or less"),
        ({"limits": {"max_skipped_steps": 9}}, "finetuning.limits.max_skipped_steps", "leave it out"),
    ],
)
def test_local_settings_are_rejected(finetuning: dict[str, Any], path: str, fix: str) -> None:
    (problem,) = find_problems(**finetuning)
    assert path in problem.partition(":")[0]
    assert fix in problem.partition("fix:")[2]


class OwnSFT(SFT):
    """A subclass, which may assign credit differently."""


@pytest.mark.parametrize("algorithm", [GRPO(), IPO(), OwnSFT()])
def test_an_unsupported_algorithm_is_rejected(algorithm: Algorithm) -> None:
    (problem,) = find_problems(algorithm)
    name = type(algorithm).__name__
    assert problem.startswith(f"finetuning.algorithm: the fine-tuning API does not support {name}\n")


@pytest.mark.parametrize("setting", [{"label_smoothing": 0.1}, {"sft_coef": 1.0}, {"length_normalized": True}])
def test_unsupported_dpo_settings_are_rejected(setting: dict[str, Any]) -> None:
    (problem,) = find_problems(DPO(DPOConfig(**setting)))
    assert f"finetuning.algorithm.{next(iter(setting))}" in problem


@pytest.mark.parametrize(
    ("adapter", "policy", "message"),
    [
        ({}, {}, "no model is named"),
        ({}, {"model": "bundled:tic_tac_toe"}, "is a model on this machine"),
        ({}, {"model": "."}, "is a model on this machine"),
        ({"base_model": "gpt-a"}, {"model": "gpt-b"}, "gpt-b, but the trainer adapter's base_model is gpt-a"),
    ],
)
def test_a_local_or_missing_model_is_rejected(adapter: dict[str, Any], policy: dict[str, Any], message: str) -> None:
    (problem,) = find_problems(adapter=adapter, policy=policy)
    assert message in problem


@pytest.mark.parametrize("adapter", [{"base_model": "gpt-a"}, {}])
def test_the_model_can_be_named_in_either_place(adapter: dict[str, Any]) -> None:
    assert find_problems(adapter=adapter, policy={"model": "gpt-a"}) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_epochs": 0},
        {"batch_size": "all"},
        {"learning_rate_multiplier": 0},
        {"suffix": "x" * 65},
        {"min_examples": 0},
        {"max_wait_s": 0},
        {"base_url": "http://169.254.169.254/v1"},
        {"beta": 0.1},
    ],
)
def test_settings_out_of_range_are_rejected_with_their_path(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"trainer_adapters\.a\.{next(iter(wrong))}"):
        build_config({"trainer_adapters": {"a": {"_type": "openai", "base_model": "m", **wrong}}})


async def test_check_lists_every_problem_without_a_call(tmp_path: Any) -> None:
    run = ScriptedRun(tmp_path, count=24)
    run.settings["trainer_adapters"]["adapter"] = {"_type": "openai", "base_model": "gpt-test", "base_url": NOWHERE}
    run.settings["finetuning"] |= {"policy": {"dtype": "bfloat16"}}
    run.settings["llms"]["agent"] = {"_type": "openai", "model_name": "m", "base_url": NOWHERE}
    report = await check_config(build_config(run.settings))
    paths = [problem.path for problem in report.problems]
    assert paths == ["finetuning.algorithm", "finetuning.policy.dtype", "llms"]


async def test_a_missing_key_for_openais_endpoint_is_reported(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    run = ScriptedRun(tmp_path, count=24)
    run.settings["trainer_adapters"]["adapter"] = {"_type": "openai", "base_model": "gpt-test"}
    report = await check_config(build_config(run.settings))
    assert "trainer_adapters.adapter.api_key" in [problem.path for problem in report.problems]


async def test_a_key_written_in_the_file_logs_a_warning(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    run = ScriptedRun(tmp_path, count=24)
    block = {"_type": "openai", "base_model": "m", "base_url": "http://far.example/v1", "api_key": "sk-canary-1"}
    run.settings["trainer_adapters"]["adapter"] = block
    await check_config(build_config(run.settings))
    assert "trainer_adapters.adapter.api_key is written in the configuration" in caplog.text
    assert "trainer_adapters.adapter: the API key is sent to far.example unencrypted" in caplog.text
    assert "sk-canary" not in caplog.text
