"""Scripts that run an experiment for each point of a grid."""

import json
import logging

import pytest

from reinforge.errors import ConfigError, EvaluationError
from reinforge.multiagent import (
    ExperimentFunctionArguments,
    RunIDFunctionArguments,
    SequentialHyperparameterExperiment,
    get_env_var,
    unflatten_dict_keys,
)
from reinforge.multiagent.nip.experiment_grid import read_grid


def script(param_grid=None, **changes):
    seen = []
    experiment = SequentialHyperparameterExperiment(
        **{"param_grid": param_grid, "experiment_fn": seen.append, "experiment_name": "EI", **changes}
    )
    return experiment, seen


def test_each_point_of_the_grid_is_run_under_a_name_of_its_own():
    prepared = []
    grid = {"rounds": [4, 8], "model": ["m"], "name": ["a", "b"]}
    experiment, seen = script(grid, run_preparer_fn=lambda combo, args: prepared.append((combo, args.num_workers)))
    experiment.parser.add_argument("--num-workers", type=int, default=4)
    experiment.run(["--num-workers", "2", "--run-infix", "x"])
    points = [{"model": "m", "name": name, "rounds": rounds} for name in ("a", "b") for rounds in (4, 8)]
    assert [each.combo for each in seen] == points
    assert [each.run_id for each in seen] == ["ei_0", "ei_1", "ei_2", "ei_3"]
    assert prepared == [(point, 2) for point in points]
    [first, *_] = seen
    assert isinstance(first, ExperimentFunctionArguments)
    assert (first.cmd_args.run_infix, first.common_run_name, first.log_level) == ("x", "ei", logging.INFO)
    assert list(first.tqdm_func([1, 2], desc="steps")) == [1, 2]


def test_names_by_a_function_points_to_skip_and_the_log_level():
    def name(combo_index, cmd_args):
        return "all" if combo_index is None else f"ei_{cmd_args.run_infix}_{combo_index}"

    experiment, seen = script({"a": [1, 2, 3]}, run_id_fn=name)
    experiment.run(["--num-skip", "2", "--debug"])
    [last] = seen
    assert (last.run_id, last.combo, last.common_run_name, last.log_level) == ("ei_a_2", {"a": 3}, "all", logging.DEBUG)


def test_a_run_that_fails_leaves_the_others(caplog):
    done = []

    def run(arguments):
        if arguments.combo["a"] == 1:
            raise EvaluationError("no dialogue finished")
        done.append(arguments.combo)

    experiment, _ = script({"a": [1, 2]}, experiment_fn=run)
    with pytest.raises(SystemExit, match="1 of 2 runs failed: ei_0"):
        experiment.run([])
    assert done == [{"a": 2}]
    assert "ei_0 failed: no dialogue finished" in caplog.text


def test_nothing_runs_if_a_point_is_not_valid():
    def refuse(combo, cmd_args):
        if combo["a"] == 2:
            raise ConfigError("a: 2")

    experiment, seen = script({"a": [1, 2]}, run_preparer_fn=refuse)
    with pytest.raises(ConfigError, match="a: 2"):
        experiment.run([])
    assert not seen


@pytest.mark.parametrize("ending", ["json", "yaml"])
def test_the_grid_may_be_in_a_file(tmp_path, ending):
    single = {"kind": "single_experiment", "parameters": {"a": 1, "b": [2, 3]}}
    (tmp_path / f"one.{ending}").write_text(json.dumps(single))
    experiment, seen = script(config_file_base_path=tmp_path, default_config_filename=f"one.{ending}")
    experiment.run([])
    assert [each.combo for each in seen] == [{"a": 1, "b": [2, 3]}]
    (tmp_path / f"grid.{ending}").write_text(json.dumps({"kind": "grid", "parameters": {"a": [1, 2]}}))
    experiment, seen = script(config_file_base_path=tmp_path)
    experiment.run(["--config-file", f"grid.{ending}"])
    assert [each.combo for each in seen] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (None, "", "--config-file: is missing"),
        ("none.json", None, "file not found"),
        ("a.json5", "{a: 1 // only a comment", r"a\.json5:1:8: .*while parsing a flow mapping"),
        ("a.txt", "{}", r"\.txt is not supported"),
        ("a.json", "{", "Expecting property name"),
        ("a.yaml", "[1]", "has no grid"),
        ("a.json", '{"kind": "grid", "parameters": {"a": 1}}', r"parameters\.a: .*a grid needs a list of values"),
    ],
)
def test_a_file_without_a_grid_is_refused(tmp_path, name, text, message):
    if name and text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_grid(tmp_path, name)


def test_several_grids_and_names_below_names():
    """Both are taken there: a list of grids runs one after the other, and names are joined by dots."""
    experiment, seen = script([{"rl": {"lr": [1, 2]}}, {"a": (3,), "b": range(2)}])
    experiment.run([])
    assert [each.combo for each in seen] == [{"rl.lr": 1}, {"rl.lr": 2}, {"a": 3, "b": 0}, {"a": 3, "b": 1}]
    assert [each.run_id for each in seen] == ["ei_0", "ei_1", "ei_2", "ei_3"]


@pytest.mark.parametrize("value", ["text", 3])
def test_a_value_that_is_no_list_is_refused(value):
    experiment, seen = script({"a": value})
    with pytest.raises(ConfigError, match=r"param_grid\.a: is .*, not a list of values"):
        experiment.run([])
    assert seen == []


@pytest.mark.parametrize(
    ("name", "text", "grid"),
    [
        ("A.YAML", "kind: grid\nparameters: {rl: {lr: [1, 2]}}", {"rl.lr": [1, 2]}),
        ("a.yml", "kind: single_experiment\nparameters: {frozen: no}", {"frozen": [False]}),
        ("a.json", '{"kind": "single_experiment", "parameters": {"rl": {"lr": 1e-5}}}', {"rl.lr": [1e-5]}),
        ("a.json5", "{kind:'grid',\n\tparameters:{\n\t\tlr:[1e-5, .5],},\n}", {"lr": [1e-5, 0.5]}),
        (
            "a.json5",
            "{kind: 'single_experiment', parameters: {a: 'it\\'s \"so\"', b: \"x: 'y'\\t\", c: 0x10}}",
            {"a": ['it\'s "so"'], "b": ["x: 'y'\t"], "c": [16]},
        ),
        (
            "a.json5",
            '// A file.\n{"kind": "single_experiment", /* not\n a grid */ parameters: {\n'
            '"url": "http://host:1/v1", // two slashes\n\'note\': \'text // no comment\', "model": null, "on": true,}}',
            {"url": ["http://host:1/v1"], "note": ["text // no comment"], "model": [None], "on": [True]},
        ),
    ],
)
def test_files_are_read_as_there(tmp_path, name, text, grid):
    (tmp_path / name).write_text(text)
    assert read_grid(tmp_path, name) == grid


def test_environment_variables(monkeypatch):
    monkeypatch.setenv("TEST_PROJECT", "mine")
    assert get_env_var("TEST_PROJECT") == get_env_var("TEST_PROJECT", "other") == "mine"
    monkeypatch.delenv("TEST_PROJECT")
    assert (get_env_var("TEST_PROJECT", ""), get_env_var("TEST_PROJECT", None)) == ("", None)
    with pytest.raises(ConfigError, match="TEST_PROJECT: the environment variable is not set"):
        get_env_var("TEST_PROJECT")


def test_names_by_a_function_of_one_object(tmp_path):
    """As in the current scripts, which nest the values of a point again."""

    def name(arguments: RunIDFunctionArguments):
        return f"{arguments.config_file_stem}_{arguments.cmd_args.run_infix}_{arguments.combo_index}"

    grid = {"kind": "grid", "parameters": {"prover": {"model": ["m", "n"]}, "seed": [1]}}
    (tmp_path / "sweep.json5").write_text(json.dumps(grid))
    experiment, seen = script(run_id_fn=name, config_file_base_path=tmp_path)
    experiment.run(["-c", "sweep.json5"])
    assert [each.run_id for each in seen] == ["sweep_a_0", "sweep_a_1"]
    assert seen[1].common_run_name == "sweep_a_None"
    assert unflatten_dict_keys(seen[1].combo) == {"prover": {"model": "n"}, "seed": 1}
