"""From a file to a validated configuration, and the messages for an invalid one."""

from pathlib import Path

import pytest

from reinforge.config.loader import build_config, load_config
from reinforge.config.schema import FinetuneConfig, FinetuneRunConfig
from reinforge.errors import ConfigError
from tests.core.config.components import (
    COMPLETE,
    KEY,
    MyAdapterConfig,
    MyBuilderConfig,
    MyTrainerConfig,
    OpenAIConfig,
    registry,
)


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write_file(text):
        Path("f.yml").write_text(text)
        return Path("f.yml")

    return write_file


def load(path, *overrides, **environ):
    return load_config(path, overrides=overrides, registry=registry(), environ={**KEY, **environ})


def problems(path, *overrides, **environ):
    with pytest.raises(ConfigError) as caught:
        load(path, *overrides, **environ)
    return caught.value.problems


def the_problem(path, *overrides, **environ):
    found = problems(path, *overrides, **environ)
    assert len(found) == 1, [str(p) for p in found]
    return found[0]


def test_the_guides_complete_configuration_loads(write, tmp_path):
    loaded = load(write(COMPLETE))
    config = loaded.config
    adapter, builder = config.trainer_adapters["my_adapter"], config.trajectory_builders["my_builder"]
    assert isinstance(adapter, MyAdapterConfig)
    assert (adapter.backend.api_key, adapter.backend.learning_rate, adapter.backend.timeout) == (
        "sk-canary-1",
        1e-5,
        3600,
    )
    assert isinstance(builder, MyBuilderConfig)
    assert builder.num_generations == 4
    assert config.eval.general.dataset.file_path == Path("data/train.json")
    assert config.finetuning.curriculum_learning.expansion_interval == 5
    assert config.finetuning.reward_function is not None
    assert loaded.project_root == tmp_path
    assert loaded.placeholders == {("trainer_adapters", "my_adapter", "backend", "api_key"): "${TRAINING_API_KEY}"}
    assert "sk-canary-1" not in repr(loaded).replace(repr(adapter), "")


def test_an_empty_file_and_empty_sections_use_the_defaults(write):
    assert load(write("")).config.finetuning == FinetuneConfig()
    assert load(write("functions:\nllms:\neval:\n  evaluators:\nfinetuning:\n")).config.llms == {}


REWARD = COMPLETE.replace("name: my_reward", "name: my_rewrad")
PROBLEMS = [
    ("trainers:\n  t:\n    _type: my_trianer\n", "f.yml:3:5", "trainers.t._type",
     'no trainer named "my_trianer", did you mean "my_trainer"? registered: my_trainer'),
    ("finetuning:\n  num_epochs: 2\n  epcohs: 3\n", "f.yml:3:3", "finetuning.epcohs",
     'unknown key "epcohs", did you mean "num_epochs"? allowed: enabled, trainer, '),
    ("finetuning:\n  run_configuration:\n    endpiont: http://x\n", "f.yml:3:5",
     "finetuning.run_configuration.endpiont", 'unknown key "endpiont", did you mean "endpoint"?'),
    ("trainers:\n  t:\n    type: my_trainer\n", "f.yml:2:3", "trainers.t", 'the required key "_type" is missing'),
    (REWARD, "f.yml:43:5", "finetuning.reward_function.name",
     'eval.evaluators has no entry "my_rewrad", did you mean "my_reward"? it has my_reward'),
    ("trainers: {t: {_type: my_trainer, note: break}}", "f.yml:1:12", "trainers.t",
     "the validator of MyTrainerConfig failed: KeyError: 'broken'"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "location", "path", "message"), PROBLEMS, ids=[row[2] for row in PROBLEMS])
def test_a_problem_has_its_place_and_the_nearest_name(write, text, location, path, message):
    found = the_problem(write(text))
    assert (found.location, found.path) == (location, path)
    assert found.message.startswith(message)


def test_the_fix_of_a_misspelt_key_is_its_name(write):
    assert the_problem(write("finetuning:\n  epcohs: 3\n  num_epochs: 2\n")).fix == "rename it to num_epochs"
    assert the_problem(write("trainers:\n  t:\n    type: my_trainer\n")).fix == 'rename "type" to "_type"'


def test_unknown_keys_are_rejected_in_nested_models_of_users_unless_allowed(write):
    text = COMPLETE.replace("batch_size: 8", "bath_size: 8\n    mirrors: [{endpoint: x, api_key: y, timeuot: 3}]")
    found = problems(write(text))
    assert [(p.location, p.path) for p in found] == [
        ("f.yml:32:7", "trainer_adapters.my_adapter.backend.bath_size"),
        ("f.yml:33:41", "trainer_adapters.my_adapter.mirrors.0.timeuot"),
    ]
    assert 'did you mean "batch_size"?' in found[0].message
    allowed = COMPLETE.replace("    validate_traj", "    open_backend: {anything: 1}\n    validate_traj")
    adapter = load(write(allowed)).config.trainer_adapters["my_adapter"]
    assert adapter.open_backend.anything == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("finetuning: {num_epochs: many}", 'expected a whole number, found "many"'),
        ("finetuning: {num_epochs: 0}", "expected a number ≥ 1, found 0"),
        ("finetuning: {policy: {optimizer: {learning_rate: .inf}}}", "expected a finite number, found inf"),
        ("finetuning: {enabled: perhaps}", 'expected true or false, found "perhaps"'),
        ("finetuning: {trainer: 5}", "expected a string, found 5"),
        ("finetuning: {target_functions: f}", 'expected a list, found "f"'),
        ("finetuning: {policy: tiny}", 'expected a mapping of keys to values, found "tiny"'),
        ("finetuning: {device: gpu}", "expected 'auto', 'cpu', 'cuda' or 'mps', found \"gpu\", did you mean \"cpu\"?"),
        ("finetuning: {policy: {optimizer: {learning_rate: 1e-4x}}}", 'expected a number, found "1e-4x"'),
        ("finetuning: {policy: {optimizer: {betas: [0.9]}}}", "the list is too short"),
        (
            "finetuning: {policy: {optimizer: {name: sgd, betas: [0.9, 0.99]}}}",
            "sgd has no betas; only adamw and adam use it. Remove it, or choose another optimizer",
        ),
        (
            "finetuning: {policy: {optimizer: {momentum: 0.9}}}",
            "adamw has no momentum; only sgd and rmsprop use it. Remove it, or choose another optimizer",
        ),
        ("finetuning: {policy: {optimizer: {name: sdg}}}", 'did you mean "sgd"?'),
        ("llms: {a: openai}", 'expected a mapping with a `_type`, found "openai"'),
        ("llms: {a: {model_name: m}}", 'the required key "_type" is missing; registered: openai'),
        ("llms: {a: {_type: 5}}", "expected a name, found 5"),
        ("llms: {a: {_type: openai}}", 'the required key "model_name" is missing'),
        ("llms: {a: {_type: openai, model_name: m, api_key: 12345}}", "expected a string, found a secret (not shown)"),
        ("- a", "expected a mapping of sections (llms, workflow, eval, finetuning, ...), found a list"),
    ],
)
def test_a_wrong_value_is_reported_with_what_is_expected(write, text, message):
    assert message in the_problem(write(text)).message


def test_an_unset_variable_is_located(write):
    path = write(COMPLETE)
    with pytest.raises(ConfigError) as caught:
        load_config(path, registry=registry(), environ={"TRAINING_APIKEY": "x"})
    (found,) = caught.value.problems
    assert found.location == "f.yml:30:7"
    assert found.message == 'the environment variable TRAINING_API_KEY is not set, did you mean "TRAINING_APIKEY"?'


def test_every_reference_is_checked(write):
    text = COMPLETE.replace("trainer: my_trainer\n", "trainer: my_trianer\n")
    text = text.replace("trajectory_builder: my_builder", "trajectory_builder: bilder")
    text = text.replace("trainer_adapter: my_adapter", "trainer_adapter: adapter")
    text += "  target_model: gpt-5\n  gate: {metric: accuracy, guard_metrics: {my_reward: 0.1, length: 1}}\n"
    assert [(p.location, p.path) for p in problems(write(text))] == [
        ("f.yml:39:3", "finetuning.trainer"),
        ("f.yml:40:3", "finetuning.trajectory_builder"),
        ("f.yml:41:3", "finetuning.trainer_adapter"),
        ("f.yml:51:3", "finetuning.target_model"),
        ("f.yml:52:10", "finetuning.gate.metric"),
        ("f.yml:52:60", "finetuning.gate.guard_metrics.length"),
    ]
    for model in ("my_model", "gpt-4"):
        assert load(write(COMPLETE + f"  target_model: {model}\n")).config.finetuning.target_model == model


def test_enabled_finetuning_requires_its_components(write):
    found = problems(write("finetuning:\n  enabled: true\n"))
    assert [p.path for p in found] == [
        "finetuning.trainer",
        "finetuning.trajectory_builder",
        "finetuning.trainer_adapter",
        "finetuning.reward_function",
        "workflow",
        "eval.general.dataset",
    ]
    with pytest.raises(ValueError, match="these are required: trainer, trajectory_builder"):
        FinetuneConfig(enabled=True)


def test_a_variable_never_injects_a_key_or_a_type(write):
    text = "llms:\n  a:\n    _type: openai\n    model_name: ${M}\n    base_url: ${U:-http://x}\n"
    llm = load(write(text), M="x\ntemperature: 9").config.llms["a"]
    assert isinstance(llm, OpenAIConfig)
    assert (llm.model_name, llm.temperature, llm.base_url) == ("x\ntemperature: 9", 1.0, "http://x")
    assert load(write(text), M="5", U="null").config.llms["a"].model_name == "5"
    assert load(write(text), M="5", U="null").config.llms["a"].base_url == "null"


def test_text_from_a_variable_becomes_what_the_schema_asks_for(write):
    config = load(write("finetuning: {seed: '${SEED:-7}', num_epochs: '${N}'}"), N="3").config
    assert (config.finetuning.seed, config.finetuning.num_epochs) == (7, 3)


def test_the_value_of_a_variable_is_not_shown(write):
    found = the_problem(write("finetuning:\n  seed: ${SEED}\n"), SEED="sk-canary-2")
    assert found.message == "expected a whole number, found the value of ${SEED}"


def test_an_invalid_variable_is_rejected_and_can_be_escaped(write):
    text = "trainers: {t: {_type: my_trainer, note: '%s'}}"
    assert '"${x+1}" is not a variable' in the_problem(write(text % "${x+1}")).message
    assert load(write(text % "$${x+1} ${KEY} $HOME"), KEY="k").config.trainers["t"].note == "${x+1} k $HOME"


def test_overrides_take_precedence_and_are_parsed_as_yaml(write):
    config = load(
        write(COMPLETE),
        ("finetuning.num_epochs", "3"),
        ("finetuning.policy.optimizer.learning_rate", "1e-6"),
        ("finetuning.policy.optimizer.betas", "[0.8, 0.9]"),
        ("finetuning.policy.optimizer.betas.1", "0.99"),
        ("trainers.second", "{_type: my_trainer, note: hi}"),
        ("trainers.third._type", "my_trainer"),
        ("finetuning.trainer", "second"),
        ("llms.my_model.model_name", "${M:-other}"),
    ).config
    assert config.finetuning.num_epochs == 3
    assert config.finetuning.policy.optimizer.learning_rate == 1e-6
    assert config.finetuning.policy.optimizer.betas == (0.8, 0.99)
    assert isinstance(config.trainers["third"], MyTrainerConfig)
    assert config.llms["my_model"].model_name == "other"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (("finetuning.epcohs", "3"), 'unknown key "epcohs", did you mean "num_epochs"?'),
        (("finetuning.num_epochs", "x"), 'expected a whole number, found "x"'),
        (("finetuning.num_epochs.x", "3"), "finetuning.num_epochs is a single value"),
        (("trainers.my_trianer.note", "x"), 'trainers has no entry "my_trianer", did you mean "my_trainer"?'),
        (("finetuning..seed", "1"), '"finetuning..seed" is not a path'),
        (("finetuning.seed", "[1"), "not valid YAML"),
        (("finetuning.target_functions", "[f, 5]"), "expected a string, found 5"),
    ],
)
def test_a_wrong_override_is_located_on_the_command_line(write, override, message):
    found = the_problem(write(COMPLETE), override)
    assert found.location in ("-o", f"-o {override[0]}")
    assert f"-o {override[0]}" in str(found)
    assert message in found.message


def test_a_missing_file_names_the_path_and_the_nearest(write):
    write(COMPLETE)
    assert 'there is no file g.yml, did you mean "f.yml"?' in the_problem(Path("g.yml")).message
    Path("latin.yml").write_bytes(b"a: 1\nb: \xe9\n")
    assert the_problem(Path("latin.yml")).location == "latin.yml:2"


def test_data_from_python_takes_instances_and_objects(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def agent(item, llm, context):
        return "hi"

    data = {
        "llms": {"a": OpenAIConfig(model_name="m")},
        "workflow": {"_type": "my_agent_workflow", "function": agent},
        "finetuning": FinetuneConfig(num_epochs=4),
    }
    loaded = build_config(data, registry=registry())
    assert loaded.config.workflow.function is agent
    assert loaded.config.llms["a"] is data["llms"]["a"]
    assert loaded.types == {("llms", "a"): "openai", ("workflow",): "my_agent_workflow"}
    assert loaded.config.finetuning.num_epochs == 4
    assert (loaded.path, loaded.project_root) == (None, tmp_path)
    with pytest.raises(ConfigError, match=r"llms\.a: MyTrainerConfig is not the configuration of a registered llm"):
        build_config({"llms": {"a": MyTrainerConfig()}}, registry=registry())
    with pytest.raises(ConfigError, match=r"^finetuning\.sede: unknown key"):
        build_config({"finetuning": {"sede": 4}}, registry=registry())


def test_an_enabled_configuration_spells_out_what_a_run_uses_by_default() -> None:
    data = {
        "llms": {"agent": {"_type": "policy"}},
        "workflow": {"_type": "python", "function": print, "llm": "agent"},
        "eval": {"general": {"dataset": {"_type": "rows", "rows": []}}, "evaluators": {"e": {"_type": "exact_match"}}},
        "trajectory_builders": {"b": {"_type": "group"}},
        "trainer_adapters": {"a": {"_type": "local"}},
        "trainers": {"t": {"_type": "epoch"}},
        "finetuning": {
            "enabled": True,
            "trainer": "t",
            "trajectory_builder": "b",
            "trainer_adapter": "a",
            "reward_function": {"name": "e"},
        },
    }
    loaded = build_config(data)
    assert loaded.types["finetuning", "algorithm"] == loaded.config.finetuning.algorithm.static_type == "grpo"
    assert loaded.config.finetuning.run_configuration == FinetuneRunConfig()
