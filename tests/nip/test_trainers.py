"""Experiments as configurations of the training loop."""

import random
import re
from string import Template

import pytest

from reinforge.algorithms.malt import MALT
from reinforge.config.loader import build_config
from reinforge.errors import ConfigError
from reinforge.multiagent import (
    DialogueProblem,
    ExperimentSettings,
    HyperParameters,
    build_agents,
    build_protocol,
    experiment_config,
)
from reinforge.multiagent.decisions import read_decision
from reinforge.multiagent.nip.rollouts import encode_dialogues
from reinforge.multiagent.nip.trainers import build_settings
from reinforge.protocols.openai.settings import find_unsupported_settings
from tests.groups import dialogue

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


def test_malt_begins_with_expert_iteration():
    data = made(
        "pure_text_malt",
        pure_text_malt={"num_initial_ei_iterations": 2},
        pure_text_ei={"reward_threshold": 0.5},
        agents={"prover": {"use_supervisor_message": "all", "supervisor_name": "Chair"}},
    )
    expected = {"_type": "malt", "num_initial_ei_epochs": 2, "initial_ei": {"reward_threshold": 0.5}}
    assert data["finetuning"]["algorithm"] == expected
    algorithm = build_config(data).config.finetuning.algorithm
    assert MALT(algorithm).for_epoch(1).config.reward_threshold == 0.5
    prover = data["workflow"]["agents"]["prover"]
    assert (prover["use_supervisor_message"], prover["supervisor_name"]) == ("all", "Chair")


@pytest.mark.parametrize(
    ("scale", "strongest", "value_of"),
    [
        ("likert_scale_4", ("strongly agree", "strongly disagree"), {"agree": 0.5, "disagree": -0.5}),
        ("likert_scale_5", ("strongly agree", "strongly disagree"), {"neither agree nor disagree": 0}),
        ("likert_scale_6", ("strongly agree", "strongly disagree"), {"somewhat disagree": -0.333}),
        ("likert_scale_7", ("strongly agree", "strongly disagree"), {"neither agree nor disagree": 0, "agree": 0.667}),
        ("likert_int_scale_11", ("10", "0"), {"5": 0, "7": 0.4}),
        ("out_of_10", ("10", "0"), {"1": -0.8}),
        ("out_of_100", ("100", "0"), {"50": 0, "1": -0.98}),
    ],
)
@pytest.mark.parametrize("name", ["verifier_decision_scale", "verifier_decision_spectrum"])
def test_a_verifier_that_decides_on_a_scale(name, scale, strongest, value_of):
    common = {name: scale, "verifier_reward": 3.0}
    params = HyperParameters("code_validation", "pure_text_ei", "d.jsonl", protocol_common=common)
    config = build_protocol(params).config
    assert {word: config.decision_values[word] for word in value_of} == pytest.approx(value_of)
    assert config.verifier_no_guess_reward == 1.0, "the mean of 3 and -1"
    handler = build_protocol(params)
    assert tuple(map(handler.format_decision, ("accept", "reject"))) == strongest
    prompt = config.agents["verifier"].prompt
    assert f"{strongest[1]}," in prompt
    assert prompt.endswith(f"or {strongest[0]}.")


def test_malt_grows_trees():
    data = made("pure_text_malt", pure_text_malt={"num_responses_per_timestep": 3}, text_rl={"test_scheme": "all"})
    assert data["workflow"]["num_responses"] == 3
    assert data["finetuning"]["algorithm"] == {"_type": "malt"}
    assert data["finetuning"]["run_configuration"] == {"validation_interval": 1}
    build_config(data)


def test_grpo_compares_dialogues_of_an_example_and_goes_on_from_its_weights():
    data = made("pure_text_grpo", rl={"rollouts_per_iteration": 16, "num_epochs": 2})
    assert data["trajectory_builders"]["builder"] == {"_type": "agents", "num_generations": 8, "examples_per_epoch": 2}
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


def test_agents_of_one_group_have_one_model():
    group = {"shared_model_group": "both"}
    with pytest.raises(ConfigError, match=r"model_name: differs within the group both, which has one model"):
        made(agents={"prover": {**group, "model_name": "x"}, "verifier": group})


@pytest.mark.parametrize("field", ["temperature", "lora_rank", "fine_tune_from_scratch"])
def test_trained_agents_must_agree_where_a_run_has_one_value(field):
    other = {"temperature": 0.1, "lora_rank": 4, "fine_tune_from_scratch": False}[field]
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


def test_frames_and_test_iterations_are_episodes():
    data = made(rl={"frames_per_batch": 1600, "num_test_iterations": 3}, nip_protocol={"max_message_rounds": 8})
    assert data["trajectory_builders"]["builder"]["examples_per_epoch"] == 200
    assert data["finetuning"]["gate"] == {"num_samples": 3}
    assert "gate" not in made()["finetuning"], "10, the default there, is not 10 episodes per example here"
    steps = {"frames_per_batch": 12, "steps_per_env_per_iteration": 4}
    assert made(rl=steps)["trajectory_builders"]["builder"]["examples_per_epoch"] == 3
    with pytest.raises(ConfigError, match="12 is not a multiple of 8, the rounds of an episode"):
        made(rl={"frames_per_batch": 12})
    with pytest.raises(ConfigError, match="is 8, but rollouts_per_iteration is 2\n.*set one of them to None"):
        made(rl={"frames_per_batch": 8, "rollouts_per_iteration": 2})


def test_agents_of_openai_train_at_the_service_and_malt_has_what_that_accepts():
    theirs = {key: {"model_provider": "OpenAI", "shared_model_group": "both"} for key in ("prover", "verifier")}
    data = made("pure_text_malt", agents=theirs)
    adapter = {"_type": "openai", "n_epochs": 1, "fine_tune_from_scratch": True}
    assert data["trainer_adapters"]["adapter"] == adapter
    assert data["finetuning"]["algorithm"] == {"_type": "malt", "sft_coef": 0.0}
    assert data["finetuning"]["policy"] == {"model": "m"}
    config = build_config(data).config
    malt = MALT(config.finetuning.algorithm)
    assert find_unsupported_settings(config.finetuning, malt) == []
    [problem] = find_unsupported_settings(config.finetuning, MALT())
    assert "sft_coef: is 1.0" in str(problem)
    assert "set it to 0.0" in str(problem), "it is malt's default, so it cannot be left out"


def test_a_frozen_agent_of_openai_is_an_endpoint():
    data = made(agents={"verifier": {"model_provider": "OpenAI", "model_name": "gpt-x", "freeze_agent": True}})
    assert data["llms"]["verifier"] == {"_type": "openai", "model_name": "gpt-x"}
    data = made(agents={"verifier": {"model_provider": "OpenRouter", "freeze_agent": True}})
    assert data["llms"]["verifier"] == {
        "_type": "openai",
        "model_name": "m",
        "base_url": "${OPENROUTER_BASE_URL:-https://openrouter.ai/api/v1}",
        "api_key": "${OPENROUTER_API_KEY}",
    }
    with pytest.raises(
        ConfigError, match="prover.model_provider: OpenRouter does not fine-tune models\n.*OPENAI_BASE_URL"
    ):
        made(agents={"prover": {"model_provider": "OpenRouter"}})


def test_the_beta_of_dpo_and_the_device():
    strong = {key: {"dpo_beta": 0.3} for key in ("prover", "verifier")}
    data = made("pure_text_malt", agents=strong, settings=ExperimentSettings("r", device="cpu"))
    assert data["finetuning"]["algorithm"] == {"_type": "malt", "beta": 0.3}
    assert data["finetuning"]["device"] == "cpu"
    with pytest.raises(ConfigError, match=r"agents\.\*\.dpo_beta: must be equal for all trained agents"):
        made("pure_text_malt", agents={"prover": {"dpo_beta": 0.3}})


@pytest.mark.parametrize("protocol", ["debate", "merlin_arthur"])
def test_provers_under_their_names_in_neural_interactive_proofs(protocol):
    agents = dict.fromkeys(("prover0", "prover1", "verifier"), PARAMS)
    params = HyperParameters("s", "pure_text_ei", "rows.jsonl", protocol, agents=agents)
    handler = build_protocol(params)
    assert handler.agent_names == ("prover0", "prover1", "verifier")
    problem = DialogueProblem("q", None)
    assert handler.stances(problem, random.Random(0)) == {"prover0": "reject", "prover1": "accept"}
    assert not handler.needs_truth
    build_config(experiment_config(params, SETTINGS, ROWS))
    default = HyperParameters("s", "pure_text_ei", "rows.jsonl", protocol, agents={"_default": PARAMS})
    assert list(build_agents(default)) == ["prover0", "prover1", "verifier"]
    assert list(experiment_config(default, SETTINGS, ROWS)["workflow"]["agents"]) == ["prover0", "prover1", "verifier"]


def test_the_second_prover_may_speak_first():
    agents = dict.fromkeys(("prover0", "prover1", "verifier"), PARAMS)
    turn = {"sequential": True, "prover0_first": False}
    params = HyperParameters("s", "pure_text_ei", "d", "debate", agents=agents, debate_protocol=turn)
    assert build_protocol(params).turns() == [[("verifier", "main")], [("prover1", "main")], [("prover0", "main")]]


def test_agents_know_what_they_are():
    agents = build_agents(experiment(agents={"prover": {"shared_model_group": "both"}}))
    prover, verifier = agents["prover"], agents["verifier"]
    assert (prover.agent_name, prover.agent_id, prover.is_prover, prover.is_verifier) == ("prover", 0, True, False)
    assert (verifier.agent_id, verifier.is_prover, verifier.is_verifier) == (1, False, True)
    assert prover.agent_params.shared_model_group == "both"
    assert prover.shared_model_group is None


def test_the_data_of_an_agent_as_messages():
    params = experiment(nip_protocol={"max_message_rounds": 4})
    agents, handler = build_agents(params), build_protocol(params)
    rollouts = encode_dialogues([dialogue(1, decision="reject", truth="accept")], handler)
    asked, said = {"role": "user", "content": "P q1\nverifier: is it 1"}, {"role": "assistant", "content": "it is 1"}
    assert agents["prover"].build_fine_tune_dataset(rollouts) == [{"messages": [asked, said]}]
    assert agents["prover"].build_fine_tune_dataset(rollouts[:, -1]) == [{"messages": [asked, said]}]
    assert agents["prover"].build_fine_tune_dataset(rollouts[:, 0]) == [], "it has not spoken yet"
    open_end = agents["prover"].build_fine_tune_dataset(rollouts[:, 0], ensure_last_message_is_assistant=False)
    assert open_end == [{"messages": [asked]}]
    [row] = agents["verifier"].build_fine_tune_dataset(rollouts, replace_verifier_guess_with_true_label=True)
    assert row["messages"][-1] == {"role": "assistant", "content": "accept"}
    [row] = agents["verifier"].build_fine_tune_dataset(rollouts)
    assert row["messages"][-1] == {"role": "assistant", "content": "reject"}
    with pytest.raises(ValueError, match="the guess is the last message"):
        agents["verifier"].build_fine_tune_dataset(rollouts, False, True)


def test_role_prompts_of_code_validation():
    params = HyperParameters("code_validation", "pure_text_ei", "rows.jsonl")
    agents = experiment_config(params, SETTINGS, ROWS)["workflow"]["agents"]
    row = {"question": "Add two.", "solution": "x + 2", "answer": "accept"}
    values = {**row, "stance": "accept", "max_response_words": 150}
    verifier, prover = (Template(agents[name]["prompt"]).substitute(values) for name in ("verifier", "prover"))
    for prompt in (verifier, prover):
        assert "Problem:\nAdd two.\n\nProgram:\nx + 2\n" in prompt
        assert "at most 150 words" in prompt
    assert "Argue that its decision should be: accept." in prover
    said = re.findall('"(.*?)"', verifier)
    assert [read_decision(each, {"accept": "accept", "reject": "reject"}) for each in said] == ["accept", "reject"]
    assert "prompt" not in made(agents={"prover": {"prompt": None}})["workflow"]["agents"]["prover"]


def test_a_template_of_neural_interactive_proofs(tmp_path):
    def prompt(text):
        (tmp_path / "p.txt").write_text(text)
        agents = {"prover": {"prompt": None, "system_prompt_template_path": str(tmp_path / "p.txt")}}
        return made(agents=agents)["workflow"]["agents"]["prover"]["prompt"]

    assert prompt("Say {{ agent_stance_string }}: {{question}}s cost $5") == "Say ${stance}: ${question}s cost $$5"
    assert prompt("Is $question right?") == "Is $question right?"
    with pytest.raises(ConfigError, match=r"has the statement '{% if x %}yes'; only {{ names }} are filled in"):
        prompt("{% if x %}yes")
    with pytest.raises(ConfigError, match="prover.system_prompt_template_path: file not found: none.txt"):
        made(agents={"prover": {"system_prompt_template_path": "none.txt"}})


def test_settings_may_be_keywords():
    settings = build_settings(None, {"run_id": "r", "num_rollout_workers": 2, "tqdm_func": print, "use_wandb": False})
    assert settings == ExperimentSettings("r", num_rollout_workers=2)
    with pytest.raises(TypeError, match="run_experiment has no argument 'runid'"):
        build_settings(None, {"runid": "r"})
    with pytest.raises(TypeError, match="got settings and, besides them, run_id"):
        build_settings(SETTINGS, {"run_id": "r"})
    with pytest.raises(
        ConfigError, match=r"use_wandb: is True, but this is not supported\n.*remove it(.|\n)*profiler: is"
    ):
        build_settings(None, {"use_wandb": True, "profiler": object()})
