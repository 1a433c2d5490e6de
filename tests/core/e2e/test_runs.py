"""`reinforge runs`: list, show, verify and rm, on runs that ended well, that were killed, and that are damaged."""

import json
import os
import pty
import random
import re
import shutil
import sqlite3
import subprocess
import sys
from itertools import zip_longest

import pytest

from reinforge.cli import main
from reinforge.runs.episodes import FoundEpisode, format_episode
from reinforge.runs.journal import verify
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.journal.schema import SCHEMA_VERSION
from reinforge.runs.journal.verify import verify_run
from tests.fault.kit import KILLED, Child
from tests.journal_rows import read_rows
from tests.project import Project
from tests.project import call as call_main

KILLED_AT = "batch.sealed:2"
"""After the second epoch is collected: the first is durable, the second is in the journal."""


def call(*arguments, code=None):
    return call_main("runs", *arguments, "--output_dir", "runs", code=code)


def as_json(*arguments):
    result = call(*arguments, "--json", code=0)
    return json.loads(result.output)


def contents(folder):
    """Returns every file of a folder; SQLite's own side files come and go with each look."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("run.sqlite-"))
    return {str(path): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_model_dir):
    folder = tmp_path_factory.mktemp("runs")
    project = Project(folder, tiny_model_dir).shrink(2)
    project.save()
    for name, site, code in (("done", None, 0), ("killed", KILLED_AT, KILLED)):
        child = Child(folder, ["run.yml", "--run_name", name], site)
        assert child.wait() == code, child.said
    return folder


@pytest.fixture
def runs(made, tmp_path, monkeypatch):
    """The folder of the two runs, to be changed at will."""
    shutil.copytree(made, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    sys.modules.pop("task", None)  # each project has its own
    return tmp_path / "project" / "runs"


def spoil(path, at=4000):
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


def test_list_shows_name_status_epochs_and_reward_the_latest_last(runs):
    lines = call("list").output.splitlines()
    assert lines[0].split() == ["name", "status", "epochs", "reward", "started", "size"]
    assert lines[1].startswith("done    completed    2 of 2  ")
    assert "promoted" in lines[1] or " -> " in lines[1], "the verdict, or else the rewards on select"
    assert lines[2].startswith("killed  interrupted  1 of 2  0.154 ")
    assert lines[3] == "resume killed with: reinforge finetune --resume runs/killed"
    done, killed = as_json("list")["runs"]
    assert (done["status"], done["epochs_done"], done["num_epochs"], done["resume"]) == ("completed", 2, 2, None)
    assert (killed["status"], killed["owner"], killed["last"]) == ("interrupted", None, None)
    assert killed["started"] >= done["started"], "in whole seconds"
    assert killed["num_bytes"] > 100_000


def test_list_of_a_folder_without_runs_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("list").output == "no runs in runs: the folder does not exist\n"
    (tmp_path / "runs" / "empty").mkdir(parents=True)
    assert call("list").output == "no runs in runs\n"
    assert as_json("list") == {"runs": [], "partially_removed": []}
    for arguments in (("show", "last"), ("verify", "empty"), ("rm", "empty", "--yes")):
        result = call(*arguments)
        assert (result.exit_code, "there is no run" in result.output) == (2, True), result.output
    assert (tmp_path / "runs" / "empty").is_dir()


def test_a_run_in_use_is_running_and_is_neither_checked_nor_removed(runs):
    journal = RunJournal.open(runs / "killed")
    try:
        (runs / "killed" / "checkpoints" / ".tmp-1-1").mkdir()
        assert "killed  running" in call("list").output
        assert f"(process {os.getpid()} on " in call("show", "killed").output
        report = as_json("verify", "killed")
        assert (report["findings"], report["run"]["status"], report["run"]["resume"]) == ([], "running", None)
        result = call("rm", "done", "killed", "--yes", code=4)
        assert f"in use by process {os.getpid()} on " in result.output
        assert (runs / "done").is_dir(), "all are looked at before the first is removed"
    finally:
        journal.close()
    assert "killed  interrupted" in call("list").output


def test_show_of_a_completed_run(runs):
    text = call("show", "done").output
    for said in ("before training: guard held_out_metric warned", "baseline: validated 0.154 [",
                 "epoch 0: collected 16 trajectories (0 missing), kept 4 of 4 groups",
                 "trained 4 steps, published version 2, validated", "step-000000  base", "  reward ", "  promoted ",
                 " started\n"):  # fmt: skip
        assert said in text, text
    assert "resume with" not in text
    shown = as_json("show", "done")
    assert shown["summary"]["status"] == "completed"
    assert [row["stage"] for row in shown["stages"]][:7] == [
        "GUARD", "BASELINE", "COLLECT", "SELECT", "SUBMIT", "AWAIT", "ADOPT"
    ]  # fmt: skip
    assert [row["epoch"] for row in shown["snapshots"]] == [1, 0, -1]
    assert shown["sessions"][0]["ended"].startswith("completed")


def test_show_of_a_killed_run_and_after_it_is_resumed(runs):
    text = call("show", "killed").output
    assert "the process was killed, or the machine went down" in text
    assert "the run resumes after epoch 0 from checkpoints/step-000001" in text
    assert text.endswith("resume with: reinforge finetune --resume runs/killed\n")
    call_main("finetune", "--resume", "runs/killed", "--project_root", ".", code=0)
    text = call("show", "last").output
    assert "resumed after epoch 0" in text
    assert text.index("was killed, or the machine") < text.index("resumed after epoch 0") < text.index("completed")
    assert as_json("verify", "killed")["findings"] == []


def test_show_of_an_episode(runs):
    key, data = read_rows(runs / "done", "SELECT key, data FROM episodes WHERE phase = 'collect' ORDER BY rowid")[3]
    lines = call("show", "done", "--episode", "3", "--phase", "collect").output.splitlines()
    assert lines[0] == f"{key}  (episode 3 of 32)"
    asked = json.loads(data)["calls"][0]["messages"][0]["content"]
    assert lines[lines.index("[user]") + 1] == f"  {asked}"
    assert call("show", "done", "--episode", key).output.splitlines()[1:] == lines[1:]
    assert as_json("show", "done", "--episode", key)["reward"] == json.loads(data)["reward"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--episode", "9999"), "there is no episode 9999: there are"),
        (("--episode", "collect/0/0/x/0"), 'there is no episode "collect/0/0/x/0", did you mean "collect/0/0/'),
        (("--episode", "0", "--epoch", "7"), "has no episodes of epoch 7"),
        (("--epoch", "7"), "need --episode N"),
    ],
)
def test_an_unknown_episode_is_refused_with_those_that_exist(runs, arguments, said):
    result = call("show", "done", *arguments)
    assert (result.exit_code, said in result.output) == (2, True), result.output


def test_each_message_of_a_conversation_with_tools_is_shown_once():
    asked = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "2+2"}]}]
    tool_call = {"id": "c1", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
    first = {"role": "assistant", "content": None, "tool_calls": [tool_call]}
    answer = {"role": "tool", "tool_call_id": "c1", "content": "4"}
    base = {"llm": "agent", "finish_reason": "stop", "policy_version": 3, "logprobs": [-1.0, -2.0]}
    calls = [
        {**base, "messages": asked, "reply": first, "num_completion_tokens": 7},
        {**base, "messages": [*asked, first, answer], "reply": {"role": "assistant", "content": "4"},
         "num_completion_tokens": 2},
        {**base, "messages": asked[:1], "reply": {"role": "assistant", "content": "x"}, "num_completion_tokens": 2},
    ]  # fmt: skip
    data = {
        "outcome": "policy_error", "reason": "no answer", "reward": -0.5, "wall_s": 1.5, "attempt": 0,
        "output": {"a": 4},
        "scores": {"right": {"score": None, "reasoning": None, "error": "no figure"}}, "calls": calls,
        "marks": [{"after_call": 1, "step_reward": 0.25, "data": None}],
    }  # fmt: skip
    assert format_episode(FoundEpisode("collect/0/0/7/1", data, None, 1)) == [
        "collect/0/0/7/1  (episode)",
        "  outcome   policy_error: no answer",
        "  reward    -0.5",
        "  score     right missing: no figure",
        "  calls     3, 11 sampled tokens, 1.50 s",
        "", "[system]", "  be brief",
        "", "[user]", "  2+2",
        "", "[assistant]  agent, 7 tokens, finish_reason stop, version 3, mean log-prob -1.50",
        '  -> add({"a": 2, "b": 2})  c1',
        "(mark: step reward 0.25)",
        "", "[tool c1]", "  4",
        "", "[assistant]  agent, 2 tokens, finish_reason stop, version 3, mean log-prob -1.50", "  4",
        "", "(call 2 starts from a different history)",
        "", "[system]", "  be brief",
        "", "[assistant]  agent, 2 tokens, finish_reason stop, version 3, mean log-prob -1.50", "  x",
        "", "[output of the agent]", '  {"a":4}',
    ]  # fmt: skip


def test_verify_finds_nothing_in_intact_runs_and_changes_nothing(runs):
    before = contents(runs)
    for name in ("done", "killed"):
        result = call("verify", name)
        assert (result.exit_code, f"runs/{name} is sound" in result.output) == (0, True), result.output
        assert as_json("verify", name)["findings"] == []
    assert as_json("verify", "killed")["resume_point"]["checkpoint"] == "checkpoints/step-000001"
    call("list"), call("show", "killed")
    assert contents(runs) == before


def test_verify_distinguishes_leftovers_from_damage(runs):
    run = runs / "killed"
    (run / "checkpoints" / ".tmp-7-1").mkdir()
    (run / "checkpoints" / ".trash-step-000009-7-1").mkdir()
    (run / ".summary.json.tmp-7").write_text("{")
    db = sqlite3.connect(run / "run.sqlite")
    with db:  # as if the process had died between the checkpoint and its entry
        db.execute("DELETE FROM snapshots WHERE epoch = 0")
        db.execute("DELETE FROM policy_versions WHERE version = 1")
    db.close()
    result = call("verify", "killed", code=0)
    for said in (
        ".tmp-7-1: left behind by a process that was killed while writing it",
        "--resume removes it",
        ".trash-step-000009-7-1: left behind by a process that was killed while removing it",
        ".summary.json.tmp-7: left behind by a process that was killed while writing it",
        "step-000001: it is not in the journal",
        "--resume adopts it and resumes after epoch 0",
    ):
        assert said in result.output, result.output


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda run: spoil(run / "checkpoints/step-000001/model.safetensors"),
         "step-000001: model.safetensors was changed.*--resume skips it and resumes at epoch 0"),
        (lambda run: shutil.rmtree(run / "checkpoints/step-000001"),
         "step-000001: it is missing, but the journal lists it.*resumes at epoch 0"),
        (lambda run: (run / "checkpoints/step-000000/manifest.json").unlink(), "step-000000: manifest.json is missing"),
        (lambda run: [shutil.rmtree(path) for path in (run / "checkpoints").iterdir()],
         "restarts from the beginning: no other checkpoint is usable"),
        (lambda run: (run / "episodes/epoch-0000.jsonl.zst").write_bytes(b"x"),
         "epoch-0000.jsonl.zst: it cannot be read"),
        (lambda run: os.truncate(run / "episodes/epoch-0000.jsonl.zst", 500),
         "epoch-0000.jsonl.zst: it.*the journal holds the 16 episodes; --resume exports them again"),
        (lambda run: (run / "config.yml").write_text("a: [b"), "config.yml: it is missing or cannot be read"),
        (lambda run: [path.write_bytes(b"none" * 99) for path in run.glob("run.sqlite*")],
         "run.sqlite: .*not a database.*recoverable: 0 intact rows"),
    ],
)  # fmt: skip
def test_verify_names_what_is_damaged_and_how_to_fix_it(runs, damage, said):
    damage(runs / "killed")
    result = call("verify", "killed", code=4)
    assert re.search(said, result.output, re.DOTALL), result.output
    report = json.loads(call("verify", "killed", "--json").output)
    assert report["sound"] is False
    assert "killed" in call("list").output


@pytest.mark.slow
def test_a_flipped_bit_of_any_file_is_found_and_named(runs):
    """Also in bytes that nothing reads: pages of the journal that no row uses, or a plot."""
    done, rng = runs / "done", random.Random(0)
    paths = [path for path in sorted(done.rglob("*")) if path.is_file() and path.stat().st_size]
    names = {path.relative_to(done).as_posix() for path in paths}
    assert {"config.yml", "summary.json", "report.html", "report.md", "run.log", "run.sqlite", "manifest.json",
            "training_metrics.jsonl", "reward_history.json", "episodes/epoch-0000.jsonl.zst"} <= names  # fmt: skip
    # of a folder with its own manifest the check names the first damaged file; what it starts from is spoiled alone
    alone = [done / "manifest.json", done / "run.sqlite"]
    folders = {path: next(each for each in path.parents if (each / "manifest.json") in paths) for path in paths}
    groups = [[path for path in paths if folders[path] == each] for each in set(folders.values()) - {done}]
    groups += [[path] * 4 for path in paths if folders[path] == done and path not in alone]
    for round_ in [*([path] for path in alone * 2), *zip_longest(*groups)]:
        whole = {path: path.read_bytes() for path in round_ if path is not None}
        for path, data in whole.items():
            at = rng.randrange(len(data))
            path.write_bytes(bytes([*data[:at], data[at] ^ 1 << rng.randrange(8), *data[at + 1 :]]))
        said = [f"{each.what}: {each.problem}" for each in verify_run(done).findings if each.is_damage]
        for path, data in whole.items():
            names = {path.name, folders[path].name} if folders[path] != done else {path.name}
            assert any(all(name in text for name in names) for text in said), f"{path.relative_to(done)}: {said}"
            path.write_bytes(data)
    assert verify_run(done).is_sound


def test_without_the_manifest_a_changed_summary_is_sound(runs, monkeypatch):
    monkeypatch.setattr(verify, "list_damage", lambda folder: [])
    summary = runs / "done" / "summary.json"
    summary.write_text(summary.read_text().replace(": ", ":  ", 1))
    assert verify_run(runs / "done").is_sound


@pytest.mark.slow
def test_a_report_that_is_written_again_is_listed_again(runs):
    for name in ("done", "killed"):
        page = runs / name / "report.html"
        assert call_main("report", name, "--output_dir", "runs").exit_code == 0
        call("verify", name, code=0)
        page.write_text(page.read_text() + " ")
        assert "report.html: it has" in call("verify", name, code=4).output


@pytest.mark.slow
def test_verify_of_a_completed_run_says_how_to_export_an_epoch_again(runs):
    export = runs / "done" / "episodes" / "epoch-0001.jsonl.zst"
    before = export.read_bytes()
    export.unlink()
    result = call("verify", "done")
    assert (result.exit_code, "epoch-0001.jsonl.zst: it is missing" in result.output) == (4, True), result.output
    assert ".export_epoch(1) exports them again" in result.output
    journal = RunJournal.open(runs / "done")
    journal.export_epoch(1)
    journal.close()
    assert export.read_bytes() == before
    call("verify", "done", code=0)


def test_a_damaged_or_unstarted_run_is_listed_as_such(runs):
    for name, data in (("junk", b"no database" * 100), ("unborn", b""), ("old", None)):
        (runs / name).mkdir()
        if data is not None:
            (runs / name / "run.sqlite").write_bytes(data)
    db = sqlite3.connect(runs / "old" / "run.sqlite")
    db.execute("PRAGMA user_version = 99")
    db.close()
    text = call("list").output
    assert "junk is damaged: runs/junk/run.sqlite is damaged: DatabaseError: file is not a database" in text
    assert f"has format 99, and this reinforge reads format {SCHEMA_VERSION}" in text
    statuses = {run["name"]: run["status"] for run in as_json("list")["runs"]}
    assert statuses == {
        "junk": "damaged", "old": "damaged", "unborn": "interrupted", "done": "completed", "killed": "interrupted",
    }  # fmt: skip
    assert "the run stopped during startup" in call("show", "unborn").output
    call("verify", "unborn", code=0)
    assert "Traceback" not in call("show", "junk").output
    call("show", "junk", code=4)
    call("rm", "junk", "unborn", "old", "--yes", code=0)
    assert sorted(path.name for path in runs.iterdir()) == ["done", "killed"]


def test_rm_removes_the_named_runs_and_needs_yes_without_a_terminal(runs):
    result = call("rm", "killed")
    assert (result.exit_code, "fix: pass --yes" in result.output) == (2, True), result.output
    result = call("rm", "killed", "nowhere", "--yes")
    assert (result.exit_code, 'there is no run "nowhere"' in result.output) == (2, True), result.output
    assert (runs / "killed").is_dir()
    assert as_json("rm", "killed", "runs/killed", "--yes") == {"removed": ["runs/killed"]}
    assert [path.name for path in runs.iterdir()] == ["done"]


def test_rm_finishes_an_interrupted_removal_and_refuses_links(runs):
    (runs / "killed").rename(runs / ".trash-killed-12-0")
    os.symlink(runs / "done", runs / "link")
    assert "a run whose removal was interrupted" in call("list").output
    assert "killed" not in {run["name"] for run in as_json("list")["runs"]}
    call("rm", ".trash-killed-12-0", "--yes", code=0)
    result = call("rm", "link", "--yes")
    assert (result.exit_code, "link is a symbolic link" in result.output) == (2, True), result.output
    assert sorted(path.name for path in runs.iterdir()) == ["done", "link"]


def test_rm_asks_at_a_terminal(runs, monkeypatch, capsys):
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        for answer, is_left in (("n\n", True), ("y\n", False)):
            os.write(ours, answer.encode())
            with pytest.raises(SystemExit) as ended:
                main(["runs", "rm", "killed", "--output_dir", "runs"])
            assert not ended.value.code
            assert "runs/killed  interrupted, resumable, " in capsys.readouterr().out
            assert (runs / "killed").is_dir() is is_left
    os.close(ours)


@pytest.mark.slow
def test_checks_and_looks_at_runs_import_no_torch(runs):
    code = (
        "import sys\nfrom reinforge.cli import main\n"
        "for arguments in (['check', 'run.yml', '-o', 'finetuning.seed', 'x'], ['runs', 'verify', 'runs/killed']):\n"
        "    try: main(arguments, prog_name='reinforge')\n"
        "    except SystemExit as ended: print(ended.code, bool({'torch', 'transformers'} & sys.modules.keys()))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    lines = ended.stdout.splitlines()
    assert ("2 False" in lines, lines[-1]) == (True, "0 False"), ended.stderr


@pytest.mark.slow
def test_a_run_that_stopped_early_is_judged_after_the_epochs_that_it_has_trained(runs):
    call("verdict", "killed", "--project_root", ".", code=0)
    judged = json.loads((runs / "killed" / "summary.json").read_text())
    assert (judged["status"], judged["num_jobs"]) == ("completed", 1)
    assert judged["improvement"] is not None or "no checkpoint beat the base model" in judged["reason"]
    assert as_json("list")["runs"][1]["num_epochs"] == 1, "it is now a run of the one epoch that it has trained"
    resume = ["--resume", "runs/killed", "--project_root", ".", "-o", "finetuning.num_epochs", "2"]
    call_main("finetune", *resume, code=0)
    assert json.loads((runs / "killed" / "summary.json").read_text())["num_jobs"] == 2
