"""Experiments as configurations of the training loop."""

import pytest

from reinforge.config.loader import build_config
from reinforge.errors import ConfigError
from reinforge.multiagent import ExperimentSettings, HyperParameters, build_agents, build_protocol, experiment_config

SETTINGS = ExperimentSettings("r", num_rollout_workers=2)
ROWS = [{"id": "1", "question": "q", "answer": "accept"}]
PARAMS = {"model_name": "m", "prompt": "P $question"}


def experiment(trainer="pure_text_ei", agents=None, **fields):
    names = ("prover", "verifier")
    params = {name: {**PARAMS, **(agents or {}).get(name, {})} for name in names}
    return HyperParameters("s", trainer, "rows.jsonl", agents=params, **fields)


def made(*arguments, settings=SETTINGS, overrides=None, **fields):
    return experiment_config(experiment(*arguments, **fields), settings, ROWS, overrides=overrides)


def test_expert_iteration():
    data = made(
        agents={"verifier": {"agent_weight": 2.0}},
        rl={"num_iterations": 3, "rollouts_per_iteration": 10, "lr": 1e-4},
        text_rl={
            "num_epochs": 2,
            "verifier_guess_replacement_proportion": 0.5,
            "verifier_guess_replacement_annealing": "linear",
            "transcript_format": "json",
            "fine_tune_on_all_previous_rollouts": True,
        },
        pure_text_ei={"rollout_selection_method": "weighted_sampling", "weighting_epsilon": 0.1},
        protocol_common={"shared_reward": True},
        nip_protocol={"max_message_rounds": 4},
        seed=5,
        test_size=0.5,
    )
    assert data["llms"] == {
        "prover": {"_type": "policy", "adapter": "prover"},
        "verifier": {"_type": "policy", "adapter": "verifier"},
    }
    agent = {"llm": "prover", "freeze_agent": False, "prompt": "P $question"}
    agent |= {"max_response_words": 150, "num_invalid_generation_retries": 20}
    assert data["workflow"] == {
        "_type": "nip",
        "shared_reward": True,
        "max_message_rounds": 4,
        "agents": {"prover": agent, "verifier": {**agent, "llm": "verifier"}},
    }
    assert data["eval"]["general"] == {"max_concurrency": 32, "dataset": {"_type": "rows", "rows": ROWS}}
    assert data["trajectory_builders"]["builder"] == {
        "_type": "agents",
        "num_generations": 1,
        "examples_per_epoch": 10,
        "agent_weights": {"verifier": 2.0},
        "fine_tune_on_all_previous_rollouts": True,
        "verifier_guess_replacement_proportion": 0.5,
        "verifier_guess_replacement_annealing": "linear",
    }
    assert data["trainer_adapters"]["adapter"] == {"_type": "local", "fine_tune_from_scratch": True}
    finetuning = data["finetuning"]
    assert finetuning["algorithm"] == {
        "_type": "expert_iteration",
        "rollout_selection_method": "weighted_sampling",
        "weighting_epsilon": 0.1,
    }
    assert finetuning["policy"] == {
        "model": "m",
        "optimizer": {"learning_rate": 1e-4},
        "batch": {"num_iterations": 2},
        "lora": {"r": 16, "lora_alpha": 32},
    }
    assert finetuning["splits"] == {"train": pytest.approx(0.425), "select": pytest.approx(0.075), "confirm": 0.5}
    assert (finetuning["num_epochs"], finetuning["seed"]) == (3, 5)
    assert finetuning["transcripts"] == {"save": True, "format": "json"}
    assert finetuning["run_configuration"] == {"validation_interval": 3}
    loaded = build_config(data)
    assert loaded.config.finetuning.policy.lora.lora_alpha == 32
    assert loaded.config.workflow.max_message_rounds == 4


def test_malt_grows_trees():
    data = made("pure_text_malt", pure_text_malt={"num_responses_per_timestep": 3}, text_rl={"test_scheme": "all"})
    assert data["workflow"]["num_responses"] == 3
    assert data["finetuning"]["algorithm"] == {"_type": "malt"}
    assert data["finetuning"]["run_configuration"] == {"validation_interval": 1}
    build_config(data)


def test_grpo_compares_dialogues_of_an_example_and_goes_on_from_its_weights():
    data = made("pure_text_grpo", rl={"rollouts_per_iteration": 16, "num_epochs": 2})
    assert data["trajectory_builders"]["builder"] == {
        "_type": "agents",
        "num_generations": 8,
        "examples_per_epoch": 2,
    }
    assert data["trainer_adapters"]["adapter"] == {"_type": "local"}
    assert data["finetuning"]["policy"]["batch"] == {"num_iterations": 2}
    build_config(data)
    with pytest.raises(ConfigError, match=r"rollouts_per_iteration: 12 is not a multiple of"):
        made("pure_text_grpo", rl={"rollouts_per_iteration": 12})


def test_agents_of_one_group_share_an_entry_and_one_role_of_it_may_be_frozen():
    shared = {"shared_model_group": "both"}
    data = made(agents={"prover": shared, "verifier": {**shared, "freeze_agent": True, "temperature": 0.5}})
    assert data["llms"] == {"both": {"_type": "policy"}}, "a single trained group needs no adapter name"
    verifier = data["workflow"]["agents"]["verifier"]
    assert (verifier["llm"], verifier["freeze_agent"], verifier["temperature"]) == ("both", True, 0.5)


def test_a_frozen_agent_of_its_own_is_a_model_that_stays():
    data = made(agents={"verifier": {"freeze_agent": True, "model_name": "other", "top_p": 0.9}})
    assert data["llms"] == {"prover": {"_type": "policy"}, "verifier": {"_type": "local", "model": "other"}}
    assert data["workflow"]["agents"]["verifier"]["top_p"] == 0.9
    assert data["finetuning"]["policy"]["model"] == "m"


def test_sampling_settings_of_trained_agents_become_the_runs():
    drawn = {"temperature": 0.7, "top_p": 0.9}
    data = made(agents={"prover": drawn, "verifier": drawn})
    assert data["finetuning"]["sampling"] == drawn
    assert "temperature" not in data["workflow"]["agents"]["prover"]
    build_config(data)


@pytest.mark.parametrize("field", ["model_name", "temperature", "lora_rank", "fine_tune_from_scratch"])
def test_trained_agents_must_agree_where_a_run_has_one_value(field):
    other = {"model_name": "x", "temperature": 0.1, "lora_rank": 4, "fine_tune_from_scratch": False}[field]
    with pytest.raises(ConfigError, match=rf"agents\.\*\.{field}: must be equal for all trained agents of a run"):
        made(agents={"prover": {field: other}})


def test_an_experiment_without_a_trained_agent_is_refused():
    frozen = {"freeze_agent": True}
    with pytest.raises(ConfigError, match="no agent can be trained"):
        made(agents={"prover": frozen, "verifier": frozen})


def test_overrides_win_and_a_service_gets_what_it_can_honour():
    overrides = {
        "finetuning": {"device": "cpu", "policy": {"batch": {"steps_per_job": 2}}},
        "trainer_adapters": {"adapter": {"_type": "openai", "base_model": "gpt-test"}},
    }
    data = made(overrides=overrides)
    assert data["finetuning"]["policy"] == {"model": "m", "batch": {"steps_per_job": 2}}, "the service chooses the rest"
    assert data["finetuning"]["device"] == "cpu"
    openai = {"_type": "openai", "base_model": "gpt-test", "n_epochs": 1, "fine_tune_from_scratch": True}
    assert data["trainer_adapters"]["adapter"] == openai


def test_handlers_and_agents_for_groups_that_are_used_by_themselves(tmp_path):
    (tmp_path / "v.txt").write_text("V $question")
    shared = {"prover": {"shared_model_group": "both"}, "verifier": {"prompt": None, "prompt_file": "v.txt"}}
    params = experiment(agents=shared, interaction_protocol="debate", debate_protocol={"sequential": True})
    handler = build_protocol(params)
    assert type(handler).__name__ == "Debate"
    assert handler.config.sequential
    agents = build_agents(params, tmp_path)
    assert [(agent.name, agent.model_group) for agent in agents.values()] == [
        ("prover", "both"),
        ("verifier", "verifier"),
    ]
    assert agents["verifier"].parameters.prompt == "V $question"
    with pytest.raises(ConfigError, match="interaction_protocol: python is not a protocol"):
        build_protocol(experiment(interaction_protocol="python"))
