"""Problems of the file, of data and of components are one list, whichever command or function meets them."""

import json

import pytest
from click.testing import CliRunner

import reinforge
from reinforge.cli import main
from reinforge.config.loader import load_config
from reinforge.config.schema import Config
from reinforge.errors import ConfigError
from reinforge.trainer.setup.check import check_config
from tests.project import Project

WRONG = """\
llms:
  agent: {_type: policy}
  judge: {_type: openai, model_name: m, base_url: "http://localhost:1/v1", temprature: 1}
workflow: {_type: python, function: "task:no_such_agent"}
eval:
  general:
    dataset: {_type: jsonl, file_path: gone.jsonl}
  evaluators:
    vowels: {_type: python, function: "task:no_such_function"}
    judged: {_type: llm_judge, llm: judge, rubric: "Is it good?"}
trajectory_builders:
  builder: {_type: group, num_generations: 1}
trainer_adapters:
  adapter: {_type: openai, base_url: "http://localhost:1/v1", api_key: k, job: {poll_interval_s: 0}}
  unused: {_type: nonsense}
trainers:
  trainer: {_type: epoch}
finetuning:
  enabled: true
  trainer: trainr
  trajectory_builder: builder
  trainer_adapter: adapter
  reward_function: {name: vowels}
  num_epoch: 5
  policy: {model: nowhere}
  gate: {guard_metrics: {missing: 0.1}}
"""

OF_THE_FILE = {
    "llms.judge.temprature",
    "trainer_adapters.adapter.job",
    "trainer_adapters.unused._type",
    "finetuning.trainer",
    "finetuning.num_epoch",
    "finetuning.gate.guard_metrics.missing",
}
OF_DATA_AND_COMPONENTS = {
    "workflow.function",
    "eval.general.dataset.file_path",
    "eval.evaluators.vowels.function",
    "trajectory_builders.builder.num_generations",
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = Project(tmp_path, "nowhere")
    (tmp_path / "run.yml").write_text(WRONG)
    return made


def call(*arguments):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2, result.output
    return result.output


def test_check_lists_the_problems_of_file_data_and_components(project):
    found = json.loads(call("check", "run.yml", "--json"))["problems"]
    paths = [problem["path"] for problem in found]
    assert set(paths) == OF_THE_FILE | OF_DATA_AND_COMPONENTS
    assert len(paths) == len(set(paths)), "each once"
    assert set(paths[: len(OF_THE_FILE)]) == OF_THE_FILE
    lines = [problem["location"].split(":")[1] for problem in found[: len(OF_THE_FILE)]]
    assert lines == sorted(lines, key=int)


@pytest.mark.parametrize("flags", [[], ["--dry_run"]])
def test_finetune_lists_the_same_and_makes_no_run(project, flags):
    output = call("finetune", "run.yml", *flags)
    assert f"{len(OF_THE_FILE | OF_DATA_AND_COMPONENTS)} problems" in output
    for path in OF_THE_FILE | OF_DATA_AND_COMPONENTS:
        assert f"{path}: " in output
    assert not (project.folder / ".reinforge").exists()


def test_eval_lists_those_that_concern_it(project):
    output = call("eval", "run.yml")
    needed = (OF_THE_FILE | OF_DATA_AND_COMPONENTS) - {"trajectory_builders.builder.num_generations"}
    assert f"{len(needed)} problems" in output
    for path in needed:
        assert f"{path}: " in output


def test_without_importing_only_the_problems_of_the_file_are_listed(project):
    output = call("check", "run.yml", "--no_import")
    assert "finetuning.num_epoch" in output
    assert "no_such_function" not in output.partition("problems")[2]


def test_finetune_from_python_lists_them_too(project):
    with pytest.raises(ConfigError) as caught:
        reinforge.finetune("task:agent", "gone.jsonl", "exact_match", "nowhere", settings={"num_epoch": 5})
    paths = {problem.path for problem in caught.value.problems}
    assert paths == {"finetuning.num_epoch", "eval.general.dataset.file_path", "finetuning.policy.model"}


def test_a_disabled_run_still_names_its_bad_keys(project):
    (project.folder / "run.yml").write_text("finetuning: {enabled: false, num_epoch: 5}\n")
    paths = [problem["path"] for problem in json.loads(call("check", "run.yml", "--json"))["problems"]]
    assert paths == ["finetuning.num_epoch", "finetuning.enabled"]


@pytest.mark.parametrize("section", ["llms", "trainer_adapters", "trajectory_builders", "trainers", "eval.evaluators"])
def test_a_component_of_an_unknown_type_hides_nothing_else(project, section):
    """Whatever it is: another component may look at it, or need it."""
    project.settings["finetuning"]["num_epoch"] = 5
    project.settings["eval"]["general"]["dataset"]["file_path"] = "gone.jsonl"
    (project.folder / "run.yml").unlink()
    block = project.settings
    for key in section.split("."):
        block = block[key]
    [name] = block
    block[name] = {"_type": "nonsense"}
    project.rows = None
    project.write_files()
    paths = {problem["path"] for problem in json.loads(call("check", "run.yml", "--json"))["problems"]}
    expected = {f"{section}.{name}._type", "finetuning.num_epoch", "eval.general.dataset.file_path"}
    assert paths - {"finetuning.policy.model"} == expected


DAMAGES = {
    "no mapping": ("llms: 3", {"llms"}),
    "a component that is a list": ("workflow: [1]", {"workflow"}),
    "no workflow": ("", {"workflow", "eval.general.dataset"}),
    "a block that is text": ("finetuning: off", {"finetuning"}),
    "two keys in one block": ("eval: {general: {max_concurrency: none, output_dir: {}}}", {"eval.general.output_dir"}),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_whatever_is_wrong_validation_reaches_its_end(project, damage):
    text, expected = DAMAGES[damage]
    base = "finetuning: {enabled: true, seed: 7}\n" if "finetuning" not in text else ""
    (project.folder / "run.yml").write_text(f"{base}{text}\n")
    loaded = load_config(project.folder / "run.yml", keep_going=True)
    assert isinstance(loaded.config, Config)
    assert expected <= {problem.path for problem in loaded.problems}
    assert not base or loaded.config.finetuning.seed == 7, "what is valid stays"
    report = await check_config(loaded)
    assert not report.ok
    assert report.problems[: len(loaded.problems)] == loaded.problems


def test_a_file_without_problems_is_loaded_as_before(project):
    project.rows = project.rows[:8]
    (project.folder / "run.yml").unlink()
    project.write_files()
    strict, lenient = load_config("run.yml"), load_config("run.yml", keep_going=True)
    assert (lenient.config, lenient.problems, lenient.invalid) == (strict.config, [], frozenset())
    with pytest.raises(ConfigError):
        load_config("run.yml", overrides=[("finetuning.num_epoch", "1")])
