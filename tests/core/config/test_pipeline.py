"""The stages of a run in its file: which epochs belong to which, what each inherits, and what is refused where."""

import pytest
import yaml

from reinforge.config.describe import build_config_schema
from reinforge.config.dump import dump_config
from reinforge.config.loader import load_config
from reinforge.config.pipeline import find_stage, list_stages
from reinforge.errors import ConfigError
from reinforge.registry import REGISTRY

FILE = """\
llms: {agent: {_type: policy}}
workflow: {_type: python, function: "json:dumps"}
eval:
  general: {dataset: {_type: rows, rows: [{id: "1", question: a, answer: b}]}}
  evaluators: {right: {_type: exact_match}}
trajectory_builders:
  rows: {_type: dataset}
  groups: {_type: group}
trainer_adapters: {local: {_type: local}}
trainers: {epochs: {_type: epoch}}
finetuning:
  enabled: true
  trainer: epochs
  trajectory_builder: groups
  trainer_adapter: local
  reward_function: {name: right}
  policy:
    model: m
    optimizer: {name: sgd, learning_rate: 0.1, momentum: 0.5}
  pipeline:
    sft:
      num_epochs: 2
      algorithm: {_type: sft}
      trajectory_builder: rows
      dataset: shown.jsonl
      policy:
        optimizer: {learning_rate: 0.01}
    grpo:
      num_epochs: 3
      algorithm: {_type: grpo, clip_high: 0.3}
"""


@pytest.fixture
def load(tmp_path):
    def load(text=FILE, **arguments):
        (tmp_path / "run.yml").write_text(text)
        return load_config(tmp_path / "run.yml", **arguments)

    return load


def problems_of(load, old, new, **arguments):
    assert FILE.count(old) == 1
    with pytest.raises(ConfigError) as caught:
        load(FILE.replace(old, new), **arguments)
    return [(each.location.split(":")[1], each.path, each.message) for each in caught.value.problems]


def test_each_epoch_belongs_to_the_stage_that_covers_it(load):
    config = load().config.finetuning
    assert config.num_epochs == 5
    assert [(each.name, each.first, each.last) for each in list_stages(config)] == [("sft", 0, 1), ("grpo", 2, 4)]
    assert [find_stage(config, epoch).name for epoch in range(6)] == ["sft", "sft", "grpo", "grpo", "grpo", "grpo"]


def test_a_run_without_a_pipeline_has_no_stages(load):
    config = load(FILE.partition("  pipeline:")[0]).config.finetuning
    assert (config.num_epochs, list_stages(config), find_stage(config, 0)) == (1, [], None)


def test_a_stage_inherits_what_it_leaves_out_of_a_block(load):
    config = load().config.finetuning
    sft, grpo = (stage.complete_policy(config.policy).optimizer for stage in list_stages(config))
    assert (sft.name, sft.learning_rate, sft.momentum) == ("sgd", 0.01, 0.5)
    assert (grpo.name, grpo.learning_rate, grpo.momentum) == ("sgd", 0.1, 0.5)


def test_the_resolved_file_spells_out_each_stage_and_reads_back_as_the_same(load):
    text = dump_config(load())
    stages = yaml.safe_load(text)["finetuning"]["pipeline"]
    assert stages["sft"]["policy"]["optimizer"]["momentum"] == 0.5
    assert stages["grpo"]["algorithm"]["_type"] == "grpo"
    assert stages["grpo"]["algorithm"]["clip_low"] == 0.2
    assert dump_config(load(text)) == text


def test_an_override_of_a_stage_counts_its_epochs_again(load):
    resolved = dump_config(load())
    config = load(resolved, overrides=[("finetuning.pipeline.grpo.num_epochs", "7")]).config.finetuning
    assert config.num_epochs == 9


def test_another_sum_of_epochs_is_refused(load):
    (found,) = problems_of(load, "  pipeline:", "  num_epochs: 4\n  pipeline:")
    assert found[1:] == ("finetuning.num_epochs", "is 4, but the stages of the pipeline have 2 + 3 epochs")


@pytest.mark.parametrize(
    ("old", "new", "line", "path"),
    [
        ("_type: grpo, clip_high: 0.3", "_type: grpo, clip_hihg: 0.3", "30", "grpo.algorithm.clip_hihg"),
        ("_type: grpo, clip_high: 0.3", "_type: grop", "30", "grpo.algorithm._type"),
        ("      trajectory_builder: rows", "      trajectory_builder: row", "24", "sft.trajectory_builder"),
        ("    grpo:", '    "a b":', "28", "a b"),
        ("      num_epochs: 3", "      epochs: 3", "29", "grpo.epochs"),
        ("      num_epochs: 3", "      num_epochs: 0", "29", "grpo.num_epochs"),
    ],
)
def test_a_problem_of_a_stage_is_reported_with_its_line(load, old, new, line, path):
    (found,) = problems_of(load, old, new)
    assert found[:2] == (line, f"finetuning.pipeline.{path}")


def test_a_problem_of_one_stage_leaves_the_others_to_be_validated(load):
    loaded = load(FILE.replace("clip_high: 0.3", "clip_hihg: 0.3"), keep_going=True)
    assert [each.path for each in loaded.problems] == ["finetuning.pipeline.grpo.algorithm.clip_hihg"]
    assert ("finetuning", "pipeline", "grpo", "algorithm") in loaded.invalid
    assert loaded.config.finetuning.pipeline["sft"].algorithm.static_type == "sft"


def test_a_misplaced_setting_is_still_found_in_its_one_place(load):
    (found,) = problems_of(load, "  trainer: epochs", "  learning_rate: 1\n  trainer: epochs")
    assert 'did you mean "finetuning.policy.optimizer.learning_rate"?' in found[2]


def test_the_schema_for_editors_knows_the_algorithms_of_a_stage():
    stage = build_config_schema(REGISTRY)["$defs"]["StageConfig"]
    names = [each.get("$ref", "") for each in stage["properties"]["algorithm"]["oneOf"]]
    assert "#/$defs/algorithm.distill" in names
