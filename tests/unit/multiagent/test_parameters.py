"""Parameters of experiments: fields, defaults and validation."""

from dataclasses import fields

import pytest

from reinforge.errors import ConfigError
from reinforge.multiagent import ExperimentSettings, HyperParameters, PureTextAgentParameters, TextRlParameters
from reinforge.multiagent.nip.parameters import get_changed_fields, reject_unsupported_fields

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
    params = experiment(agents=agents, rl={"num_test_iterations": 3}, pure_text_malt={"num_responses_per_timestep": 3})
    settings = ExperimentSettings("r", num_api_generation_timeouts=5)
    with pytest.raises(ConfigError) as refused:
        reject_unsupported_fields(params, settings)
    assert [problem.path for problem in refused.value.problems] == [
        "hyper_params.agents.verifier.use_dummy_api",
        "hyper_params.rl.num_test_iterations",
        "settings.num_api_generation_timeouts",
        "hyper_params.pure_text_malt.num_responses_per_timestep",
    ]


def test_a_block_of_another_protocol_is_refused():
    with pytest.raises(ConfigError, match="debate_protocol.sequential: is True, but only applies to the protocol"):
        reject_unsupported_fields(experiment(debate_protocol={"sequential": True}), ExperimentSettings("r"))
    debate = experiment(interaction_protocol="debate", debate_protocol={"sequential": True})
    reject_unsupported_fields(debate, ExperimentSettings("r"))


def test_defaults_are_always_taken():
    params, settings = experiment(), ExperimentSettings("r")
    reject_unsupported_fields(params, settings)
    assert get_changed_fields(settings) == {"run_id": "r"}
    assert [name for name in get_changed_fields(params) if name not in ("scenario", "trainer", "dataset")] == ["agents"]


def test_every_field_is_documented():
    """Every field is documented in its class."""
    for owner in (HyperParameters, ExperimentSettings, PureTextAgentParameters, TextRlParameters):
        missing = [each.name for each in fields(owner) if f"    {each.name}: " not in owner.__doc__]
        blocks = {"rl", "text_rl"} | {name for name in missing if name.startswith("pure_text_")}
        blocks |= {name for name in missing if name.endswith(("_protocol", "protocol_common"))}
        assert not set(missing) - blocks, owner
