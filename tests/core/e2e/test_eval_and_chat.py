"""`eval` and `chat` on whole projects: the base model, the result of a run, and invalid input."""

import json
import shutil

import pytest

from reinforge.registry import REGISTRY
from reinforge.tasks.starters import Recipe, home
from tests.exports.gguf_files import write_gguf
from tests.project import call


def evaluate(project, *arguments):
    project.save()
    result = call("eval", "run.yml", "--json", *arguments, code=0)
    return json.loads(result.stdout)


def test_an_evaluation_alone_has_intervals_and_writes_nothing(project):
    project.save()
    before = sorted(path.name for path in project.folder.iterdir())
    result = call("eval", "run.yml", code=0)
    lines = result.stdout.splitlines()
    assert lines[0].startswith("model     /"), lines
    assert lines[1] == "examples  10 of select", "15 % of 64, the same examples as in a run"
    assert lines[2].startswith("vowels 0."), lines
    assert "] on 10 examples" in lines[2]
    assert lines[3] == "episodes  10 ok"
    after = sorted(path.name for path in project.folder.iterdir() if path.name != "__pycache__")
    assert after == before


def test_split_limit_and_output(project):
    evaluation = evaluate(project, "--split", "all", "--limit", "3", "--output", "out.jsonl")
    assert (evaluation["split"], evaluation["num_examples"], evaluation["outcomes"]) == ("all", 3, {"ok": 3})
    rows = [json.loads(line) for line in (project.folder / "out.jsonl").read_text().splitlines()]
    assert [row["example_id"] for row in rows] == ["0", "1", "2"]
    mean = sum(row["scores"]["vowels"]["score"] for row in rows) / 3
    assert evaluation["metrics"]["vowels"]["mean"] == pytest.approx(mean)
    sizes = {split: evaluate(project, "--split", split)["num_examples"] for split in ("train", "select", "confirm")}
    assert sizes == {"train": 38, "select": 10, "confirm": 16}


def test_without_training_the_whole_dataset_is_evaluated(project):
    project.settings["finetuning"] |= {"enabled": False}
    assert evaluate(project)["num_examples"] == 64


def test_a_model_in_the_place_of_the_configured_one_has_its_own_revision(project, tiny_model_dir):
    project.settings["finetuning"]["policy"] |= {"model": "some/model", "revision": "v1"}
    assert evaluate(project, "--model", str(tiny_model_dir), "--limit", "2")["model"] == str(tiny_model_dir)


@pytest.mark.slow
def test_the_result_of_a_run_is_evaluated_and_chats(project):
    project.learn().finetune("--require_improvement", code=0)
    base = evaluate(project, "--split", "confirm")
    tuned = evaluate(project, "--split", "confirm", "--model", "r")
    assert tuned["model"].endswith("r/model (the promoted model)")
    assert tuned["metrics"]["vowels"]["ci_low"] > base["metrics"]["vowels"]["ci_high"]
    by_path = evaluate(project, "--split", "confirm", "--model", "runs/r/model")
    assert by_path["metrics"] == tuned["metrics"], "same seed, same weights, same samples"

    arguments = ("--output_dir", "runs", "--device", "cpu", "--max_tokens", "4", "--seed", "1")
    result = call("chat", "last", *arguments, input="say 1\n\nsay 2\n/reset\nsay 1\n/exit\nsay 3\n", code=0)
    first, _, again = result.stdout.splitlines()
    assert first == again, "the same seed and, after /reset, the same history"
    assert "r/model (the promoted model): /reset starts a new conversation" in result.stderr

    (project.run / "model").rename(project.run / "away")
    evaluation = evaluate(project, "--model", "last", "--limit", "2")
    assert "(the best checkpoint, not promoted)" in evaluation["model"]
    (project.run / "summary.json").write_text("{}")
    evaluation = evaluate(project, "--model", "r", "--limit", "2")
    assert "(the best checkpoint, not promoted)" in evaluation["model"], "as validated so far"
    (project.run / "checkpoints").rename(project.run / "gone")
    result = call("eval", "run.yml", "--model", "r")
    assert (result.exit_code, "has no model: none was promoted" in result.output) == (2, True)


def test_chat_reports_a_conversation_that_is_too_long(tiny_model_dir):
    result = call(
        "chat", str(tiny_model_dir), "--device", "cpu", "--max_tokens", "2", input="word " * 400 + "\nhi\n", code=0
    )
    assert "/reset starts a new conversation" in result.stderr.splitlines()[1]
    assert len(result.stdout.splitlines()) >= 1


def test_invalid_utf8_does_not_end_the_conversation(tiny_model_dir):
    result = call("chat", str(tiny_model_dir), "--device", "cpu", "--max_tokens", "2", input=b"caf\xe9\n", code=0)
    assert "error" not in result.stderr


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({}, ["--model", "nowhere"], 'there is no run and no folder "nowhere"'),
        ({}, ["--model", "empty"], "empty is neither a run folder (no run.sqlite) nor a model (no config.json)"),
        ({}, ["--output", "no/such/out.jsonl"], "cannot write no/such/out.jsonl: the folder does not exist"),
        ({"trainer_adapter": None, "enabled": False}, [], "nothing serves the entry of llms that is `_type: policy`"),
        ({"policy": {"model": "./nowhere"}}, [], "there is no folder ./nowhere"),
    ],
)
def test_what_cannot_be_evaluated_is_rejected(project, change, arguments, message):
    (project.folder / "empty").mkdir()
    project.settings["finetuning"] |= change
    project.save()
    result = call("eval", "run.yml", *arguments, code=2)
    assert message in result.output
    assert "Traceback" not in result.output


def test_an_agent_that_always_fails_is_an_error_and_not_a_zero(project):
    project.write("task.py", "async def agent(item, llm, context):\n    1 / 0\n\ndef vowels(o, e):\n    return 1\n")
    project.set("finetuning.outcomes", {"retries": 0})
    project.save()
    result = call("eval", "run.yml", "--limit", "2", code=3)
    assert "no example could be scored: 2 of 2 episodes have no score because of tool_error" in result.output


# Bundled models.


def test_chat_with_a_bundled_model(monkeypatch, tmp_path, tiny_model_dir):
    """The models are made once per cache folder; here a tiny one lies where the tic-tac-toe starter would be made."""
    monkeypatch.setenv("REINFORGE_HOME", str(tmp_path))
    shutil.copytree(tiny_model_dir, home() / "models" / f"tic_tac_toe-{Recipe().sha256[:12]}")
    result = call("chat", "bundled:tic_tac_toe", "--device", "cpu", "--max_tokens", "2", input="hi\n", code=0)
    assert "bundled:tic_tac_toe: /reset starts a new conversation" in result.stderr
    assert len(result.stdout.splitlines()) >= 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bundled:tic_tac_to", 'RUN|PATH: there is no bundled model "tic_tac_to", did you mean "tic_tac_toe"?'),
        ("tickets", 'there is no run and no folder "tickets", did you mean "bundled:tickets"?'),
        ("nothing", "a bundled model (bundled:debate, bundled:front_desk, bundled:front_desk_visitor, "),
    ],
)
def test_an_unknown_bundled_model_is_refused_with_a_suggestion(name, message, tmp_path):
    result = call("chat", name, "--output_dir", str(tmp_path))
    assert (result.exit_code, message in result.output) == (2, True), result.output


def test_the_bundled_models_are_listed_by_the_names_that_commands_take():
    lines = call("components", "model").stdout.splitlines()
    names = [line.split()[0] for line in lines if line.startswith("  bundled:")]
    assert names == [f"bundled:{name}" for name in REGISTRY.names("model")]
    about = "A small model that speaks as any debater of the debate task; trained on first use."
    assert lines[0] == f"  bundled:debate               {about}"


@pytest.mark.slow
def test_a_gguf_file_is_checked_evaluated_and_chats(project, tiny_model_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("REINFORGE_HOME", str(tmp_path / "home"))
    file = str(write_gguf(tmp_path / "tiny.gguf", tiny_model_dir))
    project.save()
    result = call("check", "run.yml", "-o", "finetuning.policy.model", file, code=0)
    assert f"model      {file} (license apache-2.0)" in result.output
    assert not (tmp_path / "home").exists()  # nothing is converted before a run
    assert evaluate(project, "--model", file)["model"] == file
    plain = call(
        "chat", str(tiny_model_dir), "--device", "cpu", "--temperature", "0", "--max_tokens", "5", input="hi\n"
    )
    result = call("chat", file, "--device", "cpu", "--temperature", "0", "--max_tokens", "5", input="hi\n", code=0)
    assert result.stdout == plain.stdout
