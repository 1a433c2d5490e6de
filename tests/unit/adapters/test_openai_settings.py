"""What the fine-tuning service cannot honour is refused by name, before any work and without a call."""

from __future__ import annotations

from typing import Any

import pytest

from reinforge.adapters.openai import OpenAIAdapter
from reinforge.adapters.openai_config import OpenAIAdapterConfig
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
from reinforge.trainer.setup.check import check_config
from tests.scripted_run import ScriptedRun

NOWHERE = "http://127.0.0.1:9/v1"


def refused(algorithm: Algorithm | None = None, adapter: dict[str, Any] | None = None, **finetuning: Any) -> list[str]:
    config = OpenAIAdapterConfig(**({"base_model": "gpt-test"} if adapter is None else adapter))
    made = OpenAIAdapter(config, algorithm or SFT(), NOWHERE)
    return [str(problem) for problem in made.preflight(FinetuneConfig.model_validate(finetuning))]


@pytest.mark.parametrize(
    "algorithm", [SFT(), RejectionSampling(), ExpertIteration(), DPO(), MALT(MALTConfig(sft_coef=0.0))]
)
def test_defaults_are_honoured(algorithm: Algorithm) -> None:
    assert refused(algorithm) == []


def test_what_the_services_rows_cannot_say_is_refused() -> None:
    drawn = ExpertIteration(ExpertIterationConfig(rollout_selection_method="weighted_sampling"))
    [problem] = refused(drawn)
    assert "finetuning.algorithm.rollout_selection_method" in str(problem)
    [problem] = refused(MALT())
    assert "finetuning.algorithm.sft_coef: 1.0" in str(problem)


@pytest.mark.parametrize(
    ("finetuning", "path", "fix"),
    [
        ({"policy": {"lora": {"rank": 4}}}, "finetuning.policy.lora", "leave it out"),
        (
            {"policy": {"optimizer": {"learning_rate": 1e-5}}},
            "policy.optimizer.learning_rate",
            "learning_rate_multiplier",
        ),
        ({"policy": {"optimizer": {"name": "sgd"}}}, "policy.optimizer.name", "leave it out"),
        ({"policy": {"schedule": {"warmup_steps": 0}}}, "policy.schedule.warmup_steps", "leave it out"),
        ({"policy": {"batch": {"batch_size": 8}}}, "policy.batch.batch_size", "adapter's batch_size"),
        ({"policy": {"batch": {"passes": 2}}}, "policy.batch.passes", "n_epochs"),
        ({"policy": {"batch": {"steps_per_job": 1}}}, "policy.batch.steps_per_job", "--smoke"),
        ({"policy": {"precision": "bfloat16"}}, "policy.precision", "leave it out"),
        ({"policy": {"chat_template": "{{ x }}"}}, "policy.chat_template", "leave it out"),
        ({"policy": {"init": "random"}}, "policy.init", "leave it out"),
        ({"deterministic": True}, "finetuning.deterministic", "_type: local"),
        ({"device": "cuda"}, "finetuning.device", "leave it out"),
        ({"sampling": {"top_k": 5}}, "finetuning.sampling.top_k", "top_p"),
        ({"sampling": {"min_p": 0.1}}, "finetuning.sampling.min_p", "top_p"),
        ({"sampling": {"temperature": 2.5}}, "finetuning.sampling.temperature", "lower it"),
        ({"limits": {"max_refused_steps": 9}}, "finetuning.limits.max_refused_steps", "leave it out"),
    ],
)
def test_a_setting_of_weights_on_this_machine_is_refused(finetuning: dict[str, Any], path: str, fix: str) -> None:
    (problem,) = refused(**finetuning)
    assert path in problem.partition(":")[0]
    assert fix in problem.partition("fix:")[2]


def test_everything_is_told_at_once() -> None:
    told = refused(GRPO(), policy={"precision": "bfloat16", "lora": {}}, deterministic=True)
    assert len(told) == 4


class OwnSFT(SFT):
    """Credit of its own, which no service knows of."""


@pytest.mark.parametrize("algorithm", [GRPO(), IPO(), OwnSFT()])
def test_an_algorithm_that_the_service_does_not_have_is_refused(algorithm: Algorithm) -> None:
    (problem,) = refused(algorithm)
    assert problem.startswith(
        f"finetuning.algorithm: {type(algorithm).__name__}: the fine-tuning service trains by sft"
    )


@pytest.mark.parametrize("setting", [{"label_smoothing": 0.1}, {"sft_coef": 1.0}, {"length_normalised": True}])
def test_what_the_services_dpo_does_not_have_is_refused(setting: dict[str, Any]) -> None:
    (problem,) = refused(DPO(DPOConfig(**setting)))
    assert f"finetuning.algorithm.{next(iter(setting))}" in problem


@pytest.mark.parametrize(
    ("adapter", "policy", "said"),
    [
        ({}, {}, "no model is named"),
        ({}, {"model": "bundled:tic_tac_toe"}, "is a model on this machine"),
        ({}, {"model": "."}, "is a model on this machine"),
        ({"base_model": "gpt-a"}, {"model": "gpt-b"}, "is gpt-b, and the trainer adapter's base_model is gpt-a"),
    ],
)
def test_the_model_must_be_one_of_the_services(adapter: dict[str, Any], policy: dict[str, Any], said: str) -> None:
    (problem,) = refused(adapter=adapter, policy=policy)
    assert said in problem


@pytest.mark.parametrize("adapter", [{"base_model": "gpt-a"}, {}])
def test_the_model_may_stand_in_either_place(adapter: dict[str, Any]) -> None:
    assert refused(adapter=adapter, policy={"model": "gpt-a"}) == []


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
def test_settings_out_of_range_are_refused_with_their_place(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"trainer_adapters\.a\.{next(iter(wrong))}"):
        build_config({"trainer_adapters": {"a": {"_type": "openai", "base_model": "m", **wrong}}})


async def test_check_names_everything_without_a_call(tmp_path: Any) -> None:
    run = ScriptedRun(tmp_path)
    run.settings["trainer_adapters"]["adapter"] = {"_type": "openai", "base_model": "gpt-test", "base_url": NOWHERE}
    run.settings["finetuning"] |= {"policy": {"precision": "bfloat16"}}
    run.settings["llms"]["agent"] = {"_type": "openai", "model_name": "m", "base_url": NOWHERE}
    report = await check_config(build_config(run.settings))
    paths = [problem.path for problem in report.problems]
    assert paths == ["finetuning.algorithm", "finetuning.policy.precision", "llms"]


async def test_a_missing_key_of_openais_own_endpoint_is_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    run = ScriptedRun(tmp_path)
    run.settings["trainer_adapters"]["adapter"] = {"_type": "openai", "base_model": "gpt-test"}
    report = await check_config(build_config(run.settings))
    assert "trainer_adapters.adapter.api_key" in [problem.path for problem in report.problems]


async def test_a_key_that_stands_in_the_file_is_warned_about(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    run = ScriptedRun(tmp_path)
    block = {"_type": "openai", "base_model": "m", "base_url": "http://far.example/v1", "api_key": "sk-canary-1"}
    run.settings["trainer_adapters"]["adapter"] = block
    await check_config(build_config(run.settings))
    assert "trainer_adapters.adapter.api_key stands in the configuration itself" in caplog.text
    assert "trainer_adapters.adapter: the key goes to far.example without encryption" in caplog.text
    assert "sk-canary" not in caplog.text
