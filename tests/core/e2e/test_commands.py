"""The commands around a run: check, --dry_run, --smoke, components, config show, config schema, help pages."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from reinforge.cli import COMMANDS as LISTED
from reinforge.cli import main
from reinforge.cli.exits import run_and_exit
from reinforge.config.loader import load_config
from reinforge.registry import REGISTRY
from reinforge.runs.summary import RunSummary
from reinforge.trainer.setup.check import check_config
from reinforge.version import __version__
from tests.journal_rows import read_rows
from tests.project import call


@pytest.fixture
def written(project):
    """The project with its files on disk, ready for any command."""
    return project.save()


def test_check_of_a_valid_file_lists_the_settings_in_effect(written):
    result = call("check", "run.yml", code=0)
    for expected in ("38 train, 10 select, 16 confirm", "GiB free", "run.yml is valid", "num_generations 8"):
        assert expected in result.output
    assert not (written.folder / "runs").exists(), "nothing is started"


def test_check_tries_the_rewards_on_samples(written):
    written.set("eval.evaluators.exact", {"_type": "exact_match"}).save()
    result = call("check", "run.yml", "--sample", "2", "--json")
    report = json.loads(result.output)
    assert report["ok"] is True
    assert [(row["evaluator"], row["on_expected"], row["on_empty"]) for row in report["rewards"]] == [
        ("vowels", 1.0, 0.0), ("exact", 1.0, 0.0)
    ] * 2  # fmt: skip
    assert report["disk"]["needed"] > 0


def test_check_notes_a_reward_that_cannot_tell_right_from_wrong(written):
    written.write("task.py", (written.folder / "task.py").read_text() + "\ndef flat(output, expected):\n    return 1\n")
    written.set("eval.evaluators.vowels.function", "task:flat").save()
    assert "cannot tell right from wrong" in call("check", "run.yml", "--sample", "3").output


@pytest.mark.parametrize(
    ("settings", "copies", "memory"),
    [
        ({}, 3, None),  # weights and two moments, three times, and the promoted model
        ({"optimizer": {"name": "sgd"}}, 1, None),
        ({"optimizer": {"name": "rmsprop", "momentum": 0.9}}, 3, None),
        ({"activation_checkpointing": True}, 3, "activation checkpointing"),
        ({"dtype": "bfloat16"}, 7, "bfloat16 with float32 master weights"),
    ],
)
async def test_check_counts_the_optimizer_state(written, settings, copies, memory):
    for name, value in settings.items():
        written.set(f"finetuning.policy.{name}", value)
    written.save()
    report = await check_config(load_config("run.yml"))
    [file] = Path(written.settings["finetuning"]["policy"]["model"]).glob("*.safetensors")
    assert report.disk.needed == (3 * copies + 1) * file.stat().st_size
    assert dict(report.settings).get("memory") == memory


async def test_check_reports_a_full_disk(written):
    report = await check_config(load_config("run.yml"), free_bytes=lambda folder: 1)
    assert "the checkpoints need" in str(report.problems[0])
    assert report.problems[0].path == "finetuning.output_dir"


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("workflow.function", "task:agnt", "\nerror: -o workflow.function: "),
        ("eval.evaluators.vowels", "{_type: python, function: x:y}", "\nerror: -o eval.evaluators.vowels eval.eval"),
        ("eval.evaluators.valid", "{_type: json_schema, schema: no.json}", "no.json; looked in {folder}\n"),  # once
        ("trainer_adapters.adapter.backend", "{}", 'unknown key "backend"; allowed: fine_tune_from_scratch'),
    ],
)
def test_check_locates_a_problem_at_its_override(written, path, value, expected):
    result = call("check", "run.yml", "-o", path, value, code=2)
    assert expected.format(folder=written.folder.resolve()) in f"\n{result.output}", result.output


def test_dry_run_writes_the_resolved_configuration_and_nothing_else(written):
    call("finetune", "run.yml", "--dry_run", "--run_name", "r", "-o", "finetuning.num_epochs", "7", code=0)
    assert [
        str(path.relative_to(written.folder)) for path in (written.folder / "runs").rglob("*") if path.is_file()
    ] == ["runs/r-dry/config.yml"]
    resolved = yaml.safe_load((written.folder / "runs" / "r-dry" / "config.yml").read_text())
    assert resolved["finetuning"]["num_epochs"] == 7
    assert resolved["finetuning"]["algorithm"]["_type"] == "grpo"
    assert json.loads(call("finetune", "run.yml", "--dry-run", "--run-name", "r", "--json").output)["ok"] is True


def test_smoke_runs_every_stage_once(written):
    call("finetune", "run.yml", "--smoke", "--run_name", "r", code=0)
    summary = json.loads((written.folder / "runs" / "r-smoke" / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert [version["num_updates"] for version in summary["policy_versions"]] == [0, 1]
    assert (summary["baseline"]["num_examples"], summary["final"]["num_examples"]) == (2, 2)
    assert sum(summary["episodes"].values()) <= 2 * 2 + 2 + 2 + 2 * 2
    resolved = yaml.safe_load((written.folder / "runs" / "r-smoke" / "config.yml").read_text())
    assert resolved["trajectory_builders"]["builder"]["num_generations"] == 2


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--endpoint", "http://169.254.169.254/run"], "a cloud's metadata service, which is blocked"),
        (["--endpoint", "not a url"], '"not a url" is not a URL'),
        (["--endpoint_timeout", "5"], "--endpoint_timeout applies to a deployed agent"),
        (["--endpoint-timeout", "-5"], "expected a number of seconds > 0, found -5"),
        (["--result_json_path", "$.answer"], "--result_json_path applies to a deployed agent"),
        (["--result_json_path", "answer"], '"answer" is not a JSONPath'),
        (["--validation_config_file", "other.yml"], "there is no file other.yml"),
        (["-o", "finetuning.run_configuration.override", "[[a, b]]"], "override is a command-line option"),
        (["--validation_interval", "0"], "expected a number ≥ 1, found 0"),
    ],
)
def test_unsupported_and_invalid_flags_are_rejected_by_name(written, flags, expected):
    result = call("finetune", "run.yml", "--run_name", "r", *flags, code=2)
    assert expected in result.output
    assert not (written.folder / "runs").exists()


@pytest.mark.parametrize(
    ("command", "flag", "path"),
    [
        ("finetune", "--epochs", "finetuning.num_epochs"),
        ("check", "--lr", "finetuning.policy.optimizer.learning_rate"),
        ("improve", "--temperature", "finetuning.sampling.temperature"),
    ],
)
def test_an_unknown_option_that_is_a_setting_names_how_to_set_it(command, flag, path):
    result = call(command, "run.yml", flag, "3", code=2)
    assert f"No such option '{flag}'. It is a setting of the file: -o {path} VALUE." in result.output
    assert "-o" not in call(command, "run.yml", "--nothing_like_it", code=2).output
    assert "Did you mean" in call("finetune", "run.yml", "--run_nme", "r", code=2).output


def test_check_takes_another_dataset_like_finetune(written):
    written.write("other.jsonl", '{"id": "1"}\n')
    assert "is valid" in call("check", "run.yml", code=0).output
    assert "other.jsonl" in call("check", "run.yml", "--dataset", "other.jsonl", code=2).output


def test_a_hub_id_that_cannot_be_fetched_leaves_no_folder(written, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = call("finetune", "run.yml", "--run_name", "r", "--model", "owner/absent", code=4)
    assert "HF_HUB_OFFLINE is set, and the cache" in result.output
    assert "does not have owner/absent" in result.output
    assert not (written.folder / "runs").exists()


def test_with_a_validation_dataset_the_whole_dataset_is_trained_on(written):
    rows = [{"id": str(i), "question": f"hear {i}", "answer": "a"} for i in range(16)]
    written.write("validation.json", json.dumps(rows))
    result = call("check", "run.yml", "-o", "finetuning.run_configuration.validation_dataset", "validation.json")
    assert "64 train, 6 select, 10 confirm" in result.output, result.output
    written.shrink().save()
    result = call("finetune", "run.yml", "--run_name", "r", "--validation_dataset", "validation.json", code=0)
    assert written.summary["final"]["num_examples"] == 6


OTHER_FILE = """
eval:
  general: {dataset: {_type: jsonl, file_path: held_out.jsonl}}
  evaluators: {vowels: {_type: python, function: "task:half"}}
"""


@pytest.mark.slow
def test_the_eval_section_of_a_validation_file_is_used_for_validation(written):
    """Its dataset is held out, and its evaluators score it, here with half the score of the training file's."""
    written.write(
        "task.py", (written.folder / "task.py").read_text() + "\ndef half(o, e):\n    return vowels(o, e) / 2\n"
    )
    written.write(
        "held_out.jsonl", "".join(json.dumps({"id": f"h{i}", "question": f"hear {i}"}) + "\n" for i in range(16))
    )
    written.write("other.yml", OTHER_FILE)
    written.shrink().save()
    result = call("finetune", "run.yml", "--run_name", "r", "--validation_config_file", "other.yml", code=0)
    assert "with vowels on the examples of other.yml" in result.output
    assert written.summary["final"]["num_examples"] == 6
    episodes = [json.loads(row[0]) for row in read_rows(written.run, "SELECT data FROM episodes WHERE outcome = 'ok'")]
    for episode in episodes:
        share = sum(letter in "aeiou" for letter in episode["output"]) / max(1, len(episode["output"]))
        assert episode["reward"] == pytest.approx(share if episode["phase"] == "collect" else share / 2)
    assert {e["example_id"][0] for e in episodes if e["phase"] != "collect"} == {"h"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OTHER_FILE.replace("vowels:", "other:"), 'other.yml:4.*needs the evaluator "vowels".*only other'),
        ("eval: {evaluators: {vowels: {_type: python, function: 'task:vowels'}}}", "has no eval.general.dataset"),
        (OTHER_FILE.replace("jsonl,", "jsonl, nonsense: 1,"), "other.yml:3.*nonsense"),
    ],
)
def test_problems_of_the_validation_file_are_reported_once_with_their_line(written, text, expected):
    written.write("held_out.jsonl", '{"question": "x"}\n{"question": "y"}\n')
    written.write("other.yml", text)
    result = call("finetune", "run.yml", "--run_name", "r", "--validation_config_file", "other.yml", code=2)
    assert len(re.findall(expected, " ".join(result.output.split()))) == 1, result.output
    assert not (written.folder / "runs").exists()


def test_every_flag_of_the_run_config_is_on_the_command_line():
    from reinforge.cli.finetune import command
    from reinforge.finetuning import FinetuneRunConfig

    flags = {name for parameter in command.params for name in parameter.opts}
    for name in FinetuneRunConfig.model_fields:
        assert f"--{name}" in flags, name
        assert f"--{name.replace('_', '-')}" in flags, name


def test_config_show_prints_a_file_that_loads_again(written):
    result = call("config", "show", "run.yml", "-o", "finetuning.seed", "3")
    assert yaml.safe_load(result.output)["finetuning"]["seed"] == 3
    written.write("again.yml", result.output)
    assert call("config", "show", "again.yml").output == result.output
    assert json.loads(call("config", "show", "run.yml", "--json").output)["llms"] == {
        "agent": {"_type": "policy", "match": [], "train": True, "adapter": None}
    }


def test_config_show_origin_prints_file_command_line_or_default(written):
    overrides = ["-o", "finetuning.seed", "3", "-o", "trainers.second", "{_type: epoch, save_every: 2}"]
    result = call("config", "show", "run.yml", "--origin", "--json", *overrides)
    origin = {row["path"]: row["origin"] for row in json.loads(result.output)}
    assert origin["finetuning.seed"] == "-o finetuning.seed"
    assert origin["trainers.second.save_every"] == "-o trainers.second"
    assert origin["trainers.trainer.save_every"] == origin["finetuning.gate.num_samples"] == "default"
    assert origin["finetuning.num_epochs"].startswith("run.yml:")
    assert "default" in call("config", "show", "run.yml", "--origin").output


@pytest.mark.slow
def test_config_schema_describes_shipped_files(written):
    import jsonschema

    schema = json.loads(call("config", "schema").output)
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    from reinforge.tasks.tic_tac_toe import DEMO

    for text in (DEMO.read_text(), yaml.safe_dump(written.settings)):
        from reinforge.config.document import parse_yaml

        assert list(validator.iter_errors(parse_yaml(text).data)) == []
    wrong = {"finetuning": {"num_epcohs": 1}, "trainers": {"t": {"_type": "epoc"}}}
    assert len(list(validator.iter_errors(wrong))) == 2


def test_components_lists_fields_defaults_and_origin():
    result = call("components", "trajectory_builder", "--json")
    listed = {component["name"]: component for component in json.loads(result.output)["components"]}
    group = listed["group"]
    assert group["origin"] == "reinforge.trainer.builders.group"
    assert group["fields"][0] == {
        "path": "num_generations", "kind": "whole number ≥ 1", "default": "8",
        "description": "Episodes per example: the siblings of a group.",
    }  # fmt: skip
    assert "openpipe_art_traj_builder" in call("components").output
    *lines, last = call("components", "trajectory_builder").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(listed), "a line each"
    assert last == "settings and defaults: reinforge components NAME"
    details = call("components", "group").stdout.splitlines()
    assert details[0] == "trajectory_builder group  reinforge.trainer.builders.group"
    assert details[2] == "      num_generations = 8   Episodes per example: the siblings of a group."
    assert 'did you mean "evaluator"' in call("components", "evaluators").output


def test_an_unknown_command_or_kind_lists_the_known_ones():
    for arguments, expected in (
        (["evla"], 'unknown command "evla", did you mean "eval"? allowed: demo, init, data, check,'),
        (["validate"], 'unknown command "validate"; allowed: demo,'),
        (
            ["components", "evalator"],
            'unknown kind or name "evalator", did you mean "evaluator"? the kinds are algorithm,',
        ),
    ):
        result = call(*arguments)
        assert (result.exit_code, expected in result.output) == (2, True), result.output


def test_a_plugin_that_fails_to_import_is_listed_with_its_error(monkeypatch):
    """ART 19: there both plugins have the name of another one, so that an error blames the wrong plugin."""
    monkeypatch.setitem(REGISTRY._plugin_errors, "my_plugin", "ModuleNotFoundError: No module named 'nowhere'")
    assert 'plugin "my_plugin" failed to import: ModuleNotFoundError' in call("components").output
    assert json.loads(call("components", "--json").output)["plugin_errors"] == {
        "my_plugin": "ModuleNotFoundError: No module named 'nowhere'"
    }


COMMANDS = [
    *("finetune", "check", "components", "config show", "config schema", "eval", "chat", "demo"),
    *("runs list", "runs show", "runs transcripts", "runs verify", "runs rm", "redteam train", "redteam eval"),
]


@pytest.mark.parametrize("command", ["", "config", "runs", "redteam", *COMMANDS])
def test_help_has_an_example_and_no_shortened_text(command):
    result = call(*command.split(), "--help", code=0)
    assert "Example:" in result.output
    assert "..." not in result.output.replace("RUN...", "").replace("[ARGS]...", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_every_option_once(command):
    text = call(*command.split(), "--help").output
    names = re.findall(r"^  (?:-\w, )?--([\w-]+)", text, re.MULTILINE)
    assert len(names) == len(set(names)) > 0
    assert not [name for name in names if "-" in name], "the spelling with dashes is not listed"
    assert text.count("--debug") == 1


def test_help_groups_options():
    titles = re.findall(r"^(\w+):$", call("finetune", "--help").output, re.MULTILINE)
    assert titles == ["Data", "Run", "Limits", "Output", "Options"]


def test_commands_are_listed_by_what_one_wants_each_with_an_example():
    text = call("--help", code=0).output
    titles = re.findall(r"^(\w+):$", text, re.MULTILINE)
    assert titles == ["Options", "Start", "Run", "Look", "Judge", "Serve", "Maintain"], "each once"
    examples = [example for _, _, example, _ in LISTED.values()]
    assert [example.split()[0] for example in examples] == list(LISTED)
    assert all(f"\n  {example} " in text for example in examples)
    for example in examples:
        name, *rest = example.split()
        found = main.get_command(None, name)
        assert not hasattr(found, "commands") or found.get_command(None, rest[0]) is not None, example
        options = {each for parameter in found.params for each in parameter.opts}
        assert {word for word in rest if word.startswith("--")} <= options, example


@pytest.mark.slow
def test_alone_in_a_folder_with_a_configuration_it_says_what_can_be_done_next(written, monkeypatch, tmp_path):
    (written.folder / "run.yml").rename(written.folder / "mine.yml")
    text = call(code=0).output
    commands = re.findall(r"^  (reinforge .*?)(?:  .*)?$", text, re.MULTILINE)
    assert [each.split()[1] for each in commands] == ["check", "preflight", "finetune", "improve"]
    assert commands[2] == "reinforge finetune mine.yml"
    (written.folder / "other.yml").write_text((written.folder / "mine.yml").read_text())
    assert call(code=0).output.startswith("Usage:"), "two files, and none is run.yml"
    runs = written.folder / ".reinforge" / "runs"
    call("finetune", "mine.yml", "--smoke", "--run_name", "tried", "-o", "finetuning.output_dir", str(runs), code=0)
    (written.folder / "other.yml").unlink()
    text = call(code=0).output
    assert text.startswith("The last run here, tried-smoke: passed its smoke test")
    assert "  reinforge runs show last  " in text
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert call(code=0).output.startswith("Usage:")


@pytest.mark.parametrize(
    ("shell", "words", "index", "found"),
    [
        ("bash", "reinforge fi", "1", "plain,finetune"),
        ("bash", "reinforge finetune run.", "2", "file,run."),
        ("bash", "reinforge finetune --max_m", "2", "plain,--max_minutes"),
        ("bash", "reinforge fintune x", "2", ""),
        ("zsh", "reinforge runs comp", "2", "plain\ncompare\nCompare two runs"),
        ("fish", "reinforge runs comp", "comp", "plain,compare\tCompare two runs"),
    ],
)
def test_shells_complete_commands_options_and_files(shell, words, index, found):
    environment = {"_REINFORGE_COMPLETE": f"{shell}_complete", "COMP_WORDS": words, "COMP_CWORD": index}
    result = CliRunner().invoke(main, env=environment, prog_name="reinforge", complete_var="_REINFORGE_COMPLETE")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.stdout.startswith(found), result.stdout


@pytest.mark.parametrize(("no_color", "is_colored"), [("", True), ("1", False)])
def test_color_needs_a_terminal_that_has_not_refused_it(monkeypatch, no_color, is_colored):
    monkeypatch.setattr(sys, "stdout", terminal := TTY())
    monkeypatch.setenv("NO_COLOR", no_color)
    run_and_exit(lambda: RunSummary("r", "completed", Path("r"), promoted=True))
    assert ("\x1b[" in terminal.getvalue()) == is_colored
    assert "improved the agent" in terminal.getvalue()


class TTY(io.StringIO):
    def isatty(self):
        return True


def test_env_prints_versions_and_machine():
    result = call("env", "--json", code=0)
    found = json.loads(result.output)
    assert found["reinforge"]["version"] == __version__
    assert sys.executable in found["reinforge"]["python"]
    assert found["packages"]["torch"][0].isdigit()
    assert found["packages"]["flash-attn"] == "not installed"
    assert "CPUs" in found["machine"]["processor"]
    text = call("env").output
    for section, lines in found.items():
        assert f"\n{section}\n" in f"\n{text}"
        assert all(f"  {name} " in text for name in lines)


def test_env_names_secrets_without_their_values():
    secret = "sk-" + "a1" * 20
    result = call("env", env={"OPENAI_API_KEY": secret, "HF_TOKEN": "hf_abc", "LANG": "C"})
    assert secret not in result.output
    assert "hf_abc" not in result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert ["OPENAI_API_KEY", "set"] in lines
    assert ["LANG", "C"] in lines


@pytest.mark.slow
def test_env_works_where_torch_does_not():
    code = "import sys\nsys.modules['torch'] = None\nfrom reinforge.cli import main\nmain(['env', '--json'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["machine"]["accelerators"] == "unknown: torch is not installed"
