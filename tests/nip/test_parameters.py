"""Parameters of experiments: fields, defaults and validation."""

import inspect
import json
from dataclasses import fields
from itertools import pairwise

import pytest

from reinforge.errors import ConfigError
from reinforge.multiagent import (
    AgentsParameters,
    CodeValidationAgentParameters,
    ExperimentSettings,
    HyperParameters,
    PureTextAgentParameters,
    RlTrainerParameters,
    TextRlParameters,
)
from reinforge.multiagent.nip.experiment import BLOCKS, reject_unsupported_fields
from reinforge.multiagent.nip.parameters import get_changed_fields

AGENTS = {"prover": {"model_name": "m"}, "verifier": {"model_name": "m"}}


def experiment(**changes):
    return HyperParameters("s", "pure_text_ei", "d.jsonl", **{"agents": AGENTS, **changes})


def test_blocks_may_be_dicts():
    params = experiment(text_rl={"num_epochs": 2}, nip_protocol={"max_message_rounds": 4})
    assert params.text_rl == TextRlParameters(num_epochs=2)
    assert params.agents["prover"] == PureTextAgentParameters("m")
    assert (params.seed, params.test_size, params.interaction_protocol) == (6198, 0.2, "nip")
    assert params.nip_protocol.min_message_rounds == 1


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"rl": {"learning_rate": 1}}, "rl.learning_rate"),
        ({"trainer": "ppo"}, "trainer"),
        ({"test_size": 1.0}, "test_size"),
        ({"agents": {"prover": {}}}, "agents.prover.model_name"),
    ],
)
def test_unknown_fields_and_bad_values_are_refused(wrong, named):
    given = {"scenario": "s", "trainer": "pure_text_ei", "dataset": "d", **wrong}
    with pytest.raises(ValueError, match=named.replace(".", r"\.")):
        HyperParameters(**given)


def test_alpha_is_rank_times_factor():
    assert PureTextAgentParameters("m").lora_alpha == 32
    assert PureTextAgentParameters("m", lora_rank=4, lora_alpha_factor=0.5).lora_alpha == 2
    assert PureTextAgentParameters("m", lora_rank=None).lora_alpha is None


def test_unsupported_fields_are_refused_by_name():
    agents = {**AGENTS, "verifier": {"model_name": "m", "use_dummy_api": True}}
    params = experiment(
        agents=agents,
        text_rl={"test_on_whole_dataset": False},
        protocol_common={"force_guess": "accept"},
        code_validation={"apps_difficulty": "competition"},
        base_run={"base_run_type": "rerun_tests"},
    )
    settings = ExperimentSettings("r", num_api_generation_timeouts=5)
    with pytest.raises(ConfigError) as refused:
        reject_unsupported_fields(params, settings)
    assert [problem.path for problem in refused.value.problems] == [
        "hyper_params.agents.verifier.use_dummy_api",
        "hyper_params.text_rl.test_on_whole_dataset",
        "hyper_params.protocol_common.force_guess",
        "hyper_params.code_validation.apps_difficulty",
        "hyper_params.base_run.base_run_type",
        "settings.num_api_generation_timeouts",
    ]


def test_blocks_that_nothing_reads_are_named_once(caplog):
    """Scripts of neural-interactive-proofs give the blocks of every trainer and protocol."""
    every = {
        "debate_protocol": {"sequential": True},
        "pure_text_malt": {"num_responses_per_timestep": 3},
        "zk_protocol": {"simulator_reward_coefficient": 2.0},
    }
    reject_unsupported_fields(experiment(**every), ExperimentSettings("r"))
    assert [record.getMessage() for record in caplog.records] == [
        "nothing reads pure_text_malt.num_responses_per_timestep, debate_protocol.sequential, "
        "zk_protocol.simulator_reward_coefficient: they are for another trainer or protocol"
    ]
    caplog.clear()
    debate = {"interaction_protocol": "debate", "protocol_common": {"zero_knowledge": True}, **every}
    reject_unsupported_fields(HyperParameters("s", "pure_text_malt", "d", **debate), ExperimentSettings("r"))
    assert not caplog.records


def test_agents_may_have_a_default_and_blocks_may_be_none():
    common = PureTextAgentParameters("m")
    agents = AgentsParameters(verifier=PureTextAgentParameters("v"), _default=common)
    params = experiment(agents=agents, rl=None)
    assert isinstance(params.agents, AgentsParameters)
    assert params.agents["verifier"].model_name == "v"
    assert params.agents["prover"] is common
    assert "prover" in params.agents
    assert params.rl == RlTrainerParameters()
    with pytest.raises(KeyError, match="prover"):
        AgentsParameters(verifier=common)["prover"]


def test_agents_of_code_validation_have_a_model_of_openai():
    params = HyperParameters("code_validation", "pure_text_ei", "d.jsonl")
    assert params.agents["prover"] == CodeValidationAgentParameters()
    assert (params.agents["prover"].model_provider, experiment().agents["prover"].model_provider) == (
        "OpenAI",
        "SelfHosted",
    )
    given = HyperParameters("code_validation", "pure_text_ei", "d.jsonl", agents={"prover": {"model_name": "m"}})
    assert given.agents["prover"] == CodeValidationAgentParameters(model_name="m")


def test_defaults_are_always_taken():
    params, settings = experiment(), ExperimentSettings("r")
    reject_unsupported_fields(params, settings)
    assert get_changed_fields(settings) == {"run_id": "r"}
    assert [name for name in get_changed_fields(params) if name not in ("scenario", "trainer", "dataset")] == ["agents"]


def test_every_field_is_documented():
    """Beside it or below it; a block by its own, an unsupported field by what to use instead."""
    for owner in (HyperParameters, ExperimentSettings, PureTextAgentParameters, TextRlParameters):
        lines = inspect.getsource(owner).splitlines()
        documented = {a.split(":")[0].strip() for a, b in pairwise(lines) if "  # " in a or b.startswith('    """')}
        missing = {each.name for each in fields(owner)} - documented
        assert missing <= {*owner.UNSUPPORTED, *BLOCKS}, owner


@pytest.mark.parametrize("scenario", ["cells", "code_validation"])
def test_an_experiment_as_a_dict_and_back(scenario):
    agents = {"_default": {"model_name": "m", "temperature": 0.5}, "verifier": {"model_name": "v"}}
    params = HyperParameters(scenario, "pure_text_ei", "d.jsonl", agents=agents, rl={"num_iterations": 3})
    as_dict = json.loads(json.dumps(params.to_dict()))
    assert as_dict["agents"]["_default"]["temperature"] == 0.5
    assert as_dict["rl"]["num_iterations"] == 3
    assert HyperParameters.from_dict(as_dict) == params


NO_TENSORS = dict.fromkeys(
    ("ppo", "vanilla_ppo", "spg", "reinforce", "solo_agent", "image_classification", "message_regression")
)


def test_blocks_of_tensor_trainers_are_taken_if_they_are_none():
    params = HyperParameters("s", "pure_text_ei", "d", **NO_TENSORS, pretrain_agents=False, d_representation=16)
    reject_unsupported_fields(params, ExperimentSettings("r"))
    assert HyperParameters.from_dict(params.to_dict()) == params


@pytest.mark.parametrize(
    ("name", "value"), [("ppo", {"clip_epsilon": 0.2}), ("solo_agent", {"num_epochs": 3}), ("pretrain_agents", True)]
)
def test_settings_of_tensor_trainers_are_refused_by_name(name, value):
    params = HyperParameters("s", "pure_text_ei", "d", **{name: value})
    with pytest.raises(ConfigError, match=rf"hyper_params.{name}: is .*not supported\n.*it is for networks on tensors"):
        reject_unsupported_fields(params, ExperimentSettings("r"))
