"""Files that are published for the NeMo Agent Toolkit: what has no counterpart is refused with what to write."""

import pytest

import reinforge
from reinforge.config.loader import build_config, load_config
from reinforge.config.toolkit_names import TYPES
from reinforge.errors import ConfigError
from reinforge.finetuning import TrainerAdapterConfig, TrainerConfig
from reinforge.registry import REGISTRY

PUBLISHED = """\
general:
  use_uvloop: true
llms:
  agent: {_type: nim, model_name: meta/llama-3.1-8b-instruct, temperature: 0.0}
  judge: {_type: openai, model: gpt, base_url: "http://localhost:1/v1", request_timeout: 9, logprobs: true}
functions:
  clock: {_type: current_datetime}
ttc_strategies:
  selector: {_type: llm_based_plan_selection, selection_llm: judge}
workflow:
  _type: react_agent
  tool_names: [clock]
  llm_name: agent
eval:
  general:
    output: {dir: .tmp/out, cleanup: true}
    dataset: {_type: xls, file_path: data.xlsx}
  evaluators:
    accuracy: {_type: ragas, metric: AnswerAccuracy, llm_name: judge}
    path: {_type: trajectory, llm_name: judge}
finetuning:
  reward_function: {name: acuracy}
  num_epoch: 3
"""


def test_everything_that_is_wrong_is_reported_at_once_with_the_words_to_use(tmp_path):
    path = tmp_path / "published.yml"
    path.write_text(PUBLISHED)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    found = {problem.path: problem for problem in caught.value.problems}
    lines = {path: int(problem.location.split(":")[-2]) for path, problem in found.items()}
    assert lines == {
        "general": 1,
        "llms.agent._type": 4,
        "functions.clock._type": 7,
        "ttc_strategies": 8,
        "workflow._type": 11,
        "eval.general.output": 16,
        "eval.general.dataset._type": 17,
        "eval.evaluators.accuracy._type": 19,
        "eval.evaluators.path._type": 20,
        "finetuning.reward_function.name": 22,
        "finetuning.num_epoch": 23,
    }
    assert "use `_type: openai` with model_name, base_url and api_key" in found["llms.agent._type"].fix
    assert "trajectory builder `_type: tree`" in found["ttc_strategies"].fix
    assert "`_type: python`" in found["workflow._type"].fix
    assert "`_type: llm_judge`" in found["eval.evaluators.accuracy._type"].fix
    assert all(problem.fix for problem in found.values())


def test_a_type_of_the_toolkit_that_somebody_registers_is_used():
    """The table says what is missing, not what is forbidden."""
    registry = REGISTRY.child()

    class NimConfig(TrainerConfig, name="nim"):
        model_name: str

    async def nim(config, builder):
        yield config

    registry.add("llm", NimConfig, nim)
    loaded = build_config({"llms": {"m": {"_type": "nim", "model_name": "x"}}}, registry=registry)
    assert loaded.config.llms["m"].model_name == "x"


def test_no_type_in_the_table_exists_here():
    for kind, names in TYPES.items():
        assert not set(names) & set(REGISTRY.names(kind))


class TypedAdapterConfig(TrainerAdapterConfig, name="test_typed"):
    width: int = 1


class OwnTypeConfig(TrainerAdapterConfig, name="test_own_type"):
    type: str = "lora"


def test_a_configuration_takes_and_tells_its_type():
    assert TypedAdapterConfig(type="test_typed", width=2) == TypedAdapterConfig(**{"_type": "test_typed", "width": 2})
    assert (TypedAdapterConfig().type, TypedAdapterConfig(type="test_typed", width=2).width) == ("test_typed", 2)
    assert TypedAdapterConfig(type="test_typed") == TypedAdapterConfig()
    assert TypedAdapterConfig(type="test_typed").model_dump() == {"reward": None, "width": 1}
    assert TrainerConfig(type="anything").type == "anything"
    assert (TrainerConfig().type, OwnTypeConfig().type, OwnTypeConfig(type="full").type) == (None, "lora", "full")
    with pytest.raises(
        ValueError, match='the type is "other", but TypedAdapterConfig is the configuration of "test_ty'
    ):
        TypedAdapterConfig(type="other")
    with pytest.raises(AttributeError, match="typo"):
        _ = TypedAdapterConfig().typo


def test_in_a_file_the_type_is_written_once():
    with pytest.raises(ConfigError, match='trainer_adapters.a.type: unknown key "type"'):
        build_config({"trainer_adapters": {"a": {"_type": "local", "type": "local"}}})


LEARNING_RATE = "finetuning.policy.optimizer.learning_rate"
FILE = """\
trajectory_builders:
  groups:
    _type: group
finetuning:
  num_epochs: 3
"""


def refuse(tmp_path, text=FILE, override=None):
    file = tmp_path / "run.yml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides=[override] if override else [])
    (problem,) = caught.value.problems
    return f"{problem.message}\nfix: {problem.fix}"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("limits.max_minutes", "finetuning.limits.max_minutes"),
        ("max_minutes", "finetuning.limits.max_minutes"),
        ("learning_rate", LEARNING_RATE),
        ("finetuning.learning_rate", LEARNING_RATE),
        ("finetuning.policy.learning_rate", LEARNING_RATE),
        ("finetuning.policy.critic.optimizer.learning_rate", LEARNING_RATE),
        ("trajectory_builders.groups.learning_rate", LEARNING_RATE),
        ("optimizer.learning_rate", LEARNING_RATE),
        ("lerning_rate", LEARNING_RATE),
        ("finetuning.policy.lr", LEARNING_RATE),
        ("optimizer.lr", LEARNING_RATE),
        ("seed", "finetuning.seed"),
        ("output_dir", "finetuning.output_dir"),
        ("eval.output_dir", "eval.general.output_dir"),
        ("finetuning.num_generations", "trajectory_builders.groups.num_generations"),
    ],
)
def test_an_override_names_the_setting_that_was_meant(tmp_path, path, meant):
    text = refuse(tmp_path, override=(path, "5"))
    assert f'did you mean "{meant}"?' in text
    assert text.endswith(f"fix: -o {meant} VALUE")


def test_a_key_of_a_file_is_to_be_moved(tmp_path):
    text = refuse(tmp_path, f"{FILE}  learning_rate: 0.1\n")
    assert f'unknown key "learning_rate", did you mean "{LEARNING_RATE}"? allowed: ' in text
    assert text.endswith(f"fix: move it to {LEARNING_RATE}")


def test_settings_from_python_are_written_as_python():
    with pytest.raises(ConfigError) as caught:
        build_config({"finetuning": {"learning_rate": 0.1}})
    fix = 'pass settings={"policy": {"optimizer": {"learning_rate": ...}}}'
    assert [problem.fix for problem in caught.value.problems] == [fix]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("learning_rate", '; pass settings={"policy": {"optimizer": {"learning_rate": ...}}}'),
        ("lr", '; pass settings={"policy": {"optimizer": {"learning_rate": ...}}}'),
        ("seed", '; pass settings={"seed": ...}'),
        ("epoch", ', did you mean "epochs"?'),
        ("verbose", ""),
    ],
)
def test_an_unknown_argument_of_finetune_names_the_argument_or_setting(given, expected):
    with pytest.raises(TypeError) as caught:
        reinforge.finetune(None, [], "exact_match", "model", **{given: 1})
    assert str(caught.value) == f"finetune() has no argument '{given}'{expected}"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (("finetuning.num_epcohs", "5"), 'did you mean "num_epochs"?'),  # spelled nearly like a key of the same place
        (("finetuning.name", "x"), 'unknown key "name"; allowed: '),  # too many places have it
        (("finetuning.nonsense", "x"), 'unknown key "nonsense"; allowed: '),
    ],
)
def test_what_no_other_place_explains_is_told_as_before(tmp_path, override, expected):
    assert expected in refuse(tmp_path, override=override)
