"""The run folder: only its owner may read it, only a run's own files are removed, one bad folder never hides others."""

import asyncio
import contextlib
import json
import os
import shutil
import sqlite3
import stat

import filelock
import pytest

from reinforge import files
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import ConfigError
from reinforge.files import commit_folder, find_damage, make_staging_path
from reinforge.runs import removal
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.removal import find_obstacle
from reinforge.runs.run_folder import check_run_name, read_runs
from reinforge.trainer.options import RunOptions
from tests.project import call as call_main
from tests.project import leave_out_plots_and_pages
from tests.scripted_run import ScriptedRun


def call(*arguments, code=None):
    return call_main("runs", *arguments, "--output_dir", "runs", code=code)


@contextlib.contextmanager
def umask(mask):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(folder):
    """Returns the modes of everything in a folder, itself included: path -> `0o600`."""
    paths = [folder, *folder.rglob("*")]
    return {path.relative_to(folder.parent).as_posix(): oct(stat.S_IMODE(path.lstat().st_mode)) for path in paths}


class Saving(ScriptedRun):
    def __init__(self, folder):
        super().__init__(folder, reward=lambda output, expected: float(output[-1]), count=60)
        self.settings["finetuning"] |= {"num_epochs": 1, "gate": {"num_samples": 1}}
        self.settings["trajectory_builders"]["builder"]["examples_per_epoch"] = 4
        adapter = self.adapter
        adapter.server.script = lambda request: f"answer {9 if adapter.server.version else request.sampling.seed % 3}"

        async def save(staged, version):
            staged.mkdir()
            (staged / "config.json").write_text("{}")
            (staged / "model.safetensors").write_bytes(b"weights")
            (staged / "model.safetensors").chmod(0o640)
            return True

        async def restore(folder, version):
            await adapter.server.publish(version)

        adapter.save, adapter.restore = save, restore


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "runs"
    with umask(0o022), pytest.MonkeyPatch.context() as patch:
        leave_out_plots_and_pages(patch)
        summary = asyncio.run(Saving(folder).run())
    assert (summary.status, summary.promoted) == ("completed", True)
    return folder


@pytest.fixture
def ran(made, tmp_path, monkeypatch):
    """The run in the folder `runs` of a project, to be changed at will."""
    shutil.copytree(made, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "r"


def test_only_the_owner_can_read_a_run_folder(ran):
    found = modes(ran)
    for name in ("run.sqlite", "config.yml", "run.log", "summary.json", "report.md", "training_metrics.jsonl",
                 "validation_history.json", "episodes/epoch-0000.jsonl.zst", "checkpoints/step-000000/manifest.json",
                 "checkpoints/step-000000/model.safetensors", "checkpoints/step-000000/training/run.json",
                 "model/config.json", "model/model.safetensors", ".lock"):  # fmt: skip
        assert found[f"r/{name}"] == "0o600", name
    folders = {f"r/{path.relative_to(ran).as_posix()}" for path in ran.rglob("*") if path.is_dir()} | {"r"}
    assert {name: mode for name, mode in found.items() if mode != ("0o700" if name in folders else "0o600")} == {}


def test_the_log_beside_a_journal_that_is_written_is_private_too(tmp_path):
    with umask(0o022):
        journal = RunJournal(tmp_path / "r")
        journal.set_facts(status="running")
        journal.flush()
        assert {modes(tmp_path / "r")[f"r/run.sqlite{suffix}"] for suffix in ("", "-wal", "-shm")} == {"0o600"}
        journal.close()


def test_without_the_private_modes_a_run_folder_can_be_read_by_others(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PRIVATE_FILE", 0o666)
    monkeypatch.setattr(files, "PRIVATE_FOLDER", 0o777)
    with umask(0o022):
        RunJournal(tmp_path / "r").close()
        files.replace_file(tmp_path / "r" / "config.yml", "x")
    found = modes(tmp_path / "r")
    assert (found["r"], found["r/config.yml"], found["r/run.sqlite"]) == ("0o755", "0o644", "0o644")


def test_a_finished_run_is_one_database_and_a_log_of_what_was_shown(ran):
    assert sorted(path.name for path in ran.glob("run.sqlite*")) == ["run.sqlite"]
    call("show", "r", code=0)
    assert call("verify", "r").exit_code == 0, call("verify", "r").output
    assert sorted(path.name for path in ran.glob("run.sqlite*")) == ["run.sqlite"], "nor does reading leave any"
    lines = (ran / "run.log").read_text().splitlines()
    said = [line.split(": ", 1)[1] for line in lines]
    assert all(line[:4].isdecimal() and line[4] == "-" for line in lines), "each line has its time"
    assert any(line.startswith("run r in ") for line in said), said
    assert any(line.startswith("epoch 0 (1/1): reward ") for line in said), said
    assert any(line.startswith("  validation after epoch 0: reward 9.000") for line in said), said
    assert any(line.startswith("  promoted    yes") for line in said), "and how it ended"


def test_rm_removes_runs_of_the_output_folder_only(ran, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "run.sqlite").touch()
    (victim / "thesis.tex").write_text("years of work")
    for name in ("../victim", "runs/../victim", str(victim), "victim"):
        result = call("rm", name, "--yes", code=2)
        assert "victim is not a run in the output folder runs; nothing was removed" in result.output
        assert f"--output_dir {tmp_path}" in result.output
    assert (victim / "thesis.tex").read_text() == "years of work"


def test_rm_refuses_a_folder_with_files_that_no_run_has_written(ran, tmp_path):
    for name in ("thesis.tex", "checkpoints/step-000000-copy", "episodes/notes.txt"):
        (ran / name).write_text("x")
    result = call("rm", "r", "--yes", code=2)
    assert "holds files that no run has written: thesis.tex, episodes/notes.txt, checkpoints/step-000000-copy" in (
        result.output
    )
    assert "fix: nothing was removed; move them elsewhere first" in result.output
    assert (ran / "thesis.tex").exists()
    assert (ran / "run.sqlite").exists()


def test_without_looking_for_foreign_files_rm_removes_them(ran, monkeypatch):
    monkeypatch.setattr(removal, "find_foreign_files", lambda folder: [])
    (ran / "thesis.tex").write_text("x")
    call("rm", "r", "--yes", code=0)
    assert not ran.exists()


def test_rm_does_not_follow_links(ran, tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("x")
    (ran / "checkpoints" / "step-000009").symlink_to(tmp_path / "kept")
    (ran.parent / "link").symlink_to(ran)
    assert "link is a symbolic link" in call("rm", "link", "--yes", code=2).output
    call("rm", "r", "--yes", code=0)
    assert (tmp_path / "kept" / "file").read_text() == "x"


@pytest.mark.parametrize("name", ["r", "A.b_c-9", "x" * 128])
def test_a_name_that_a_run_can_have(name):
    check_run_name(name)


@pytest.mark.parametrize("name", ["", " ", ".", "..", "last", "-x", "a b", "a\n", "\x1b[2J", "a/b", "a\\b", "\u202ex"])
def test_a_name_that_a_run_cannot_have(name):
    with pytest.raises(ConfigError, match="cannot be the name of a run"):
        check_run_name(name, "run_name")


def test_a_name_from_python_is_checked_too(tmp_path):
    with pytest.raises(
        ConfigError, match=r"^--run_name: '-x' cannot be the name of a run\n.*fix: use up to 128 letters"
    ):
        RunOptions("-x").choose_folder(FinetuneConfig(reward_function={"name": "r"}, output_dir=tmp_path))


def rewrite(name, text):
    return lambda folder: (folder / name).write_text(text)


def link(name, target):
    def spoil(folder):
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return spoil


def bad_row(statement):
    def spoil(folder):
        database = sqlite3.connect(folder / "run.sqlite")
        with database:
            database.execute(statement)
        database.close()

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        rewrite("config.yml", "[" * 500),
        rewrite("config.yml", "finetuning: {num_epochs: [[1]]}"),
        link("config.yml", "/dev/zero"),
        link("checkpoints/step-000001/manifest.json", "/dev/zero"),
        link("episodes/epoch-0000.jsonl.zst", "/dev/zero"),
        bad_row("UPDATE sessions SET started_s = 'yesterday', checksum = NULL"),
        bad_row("UPDATE run SET value = '[', checksum = NULL"),
        rewrite("summary.json", "[" * 5000),
    ],
)
def test_one_bad_run_folder_never_hides_the_others(ran, spoil):
    RunJournal(ran.parent / "good").close()
    spoil(ran)
    result = call("list", code=0)
    assert {line.split()[0] for line in result.output.splitlines()} >= {"good", "r"}
    assert {run.folder.name for run in read_runs(ran.parent)} == {"good", "r"}
    call("list", "--json", code=0)
    assert call("verify", "r").exit_code in (0, 4), call("verify", "r").output
    assert call("show", "r").exit_code in (0, 4), call("show", "r").output


def write_checkpoint(folder):
    staged = make_staging_path(folder.parent)
    (staged / "training").mkdir(parents=True)
    (staged / "weights").write_bytes(b"1234")
    (staged / "training" / "state").write_bytes(b"12")
    commit_folder(staged, folder, version=1)
    assert find_damage(folder) is None
    return folder


def with_files(change):
    def craft(folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        del manifest["sha256"]
        manifest["files"] = change(manifest["files"])
        (folder / "manifest.json").write_text(files.format_manifest(manifest))

    return craft


def move_training_elsewhere(folder):
    (folder / "training").rename(folder.parent / "elsewhere")
    (folder / "training").symlink_to(folder.parent / "elsewhere")


ENTRY = {"bytes": 0, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("craft", "said"),
    [
        (with_files(lambda found: {**found, "/dev/zero": ENTRY}), "'/dev/zero' is not a file of the folder"),
        (with_files(lambda found: {**found, "../c": ENTRY}), "'../c' is not a file of the folder"),
        (with_files(lambda found: {**found, "training/../weights": found["weights"]}), "is not a file of the folder"),
        (with_files(lambda found: {**found, "": ENTRY}), "'' is not a regular file"),
        (with_files(lambda found: {**found, "a\0b": ENTRY}), "is missing"),
        (with_files(lambda found: []), "manifest.json lists no files"),
        (with_files(lambda found: ["weights"]), "manifest.json cannot be read"),
        (with_files(lambda found: {**found, "weights": 7}), "manifest.json has no size of 'weights'"),
        (
            with_files(lambda found: {"weights": {**found["weights"], "bytes": 10**40}}),
            "weights has 4 bytes instead of 1",
        ),
        (rewrite("manifest.json", "[" * 100_000), "manifest.json cannot be read"),
        (link("manifest.json", "/dev/zero"), "manifest.json cannot be read"),
        (link("weights", "/dev/zero"), "'weights' is not a file of the folder, or is a link"),
        (link("weights", "training/state"), "'weights' is not a file of the folder, or is a link"),
        (link("weights", "weights"), "weights is missing"),
        (move_training_elsewhere, "'training/state' is not a file of the folder, or is a link"),
    ],
)
def test_a_crafted_manifest_is_damage_and_names_the_file(tmp_path, craft, said):
    folder = write_checkpoint(tmp_path / "c")
    craft(folder)
    assert said in find_damage(folder)


def test_without_looking_at_the_path_a_crafted_manifest_is_followed(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "c")
    (tmp_path / "secret").write_bytes((folder / "weights").read_bytes())
    with_files(lambda found: {"../secret": found["weights"]})(folder)
    assert "is not a file of the folder" in find_damage(folder)
    monkeypatch.setattr(files, "is_inside", lambda folder, name: True)
    assert find_damage(folder) is None, "it has been read"


def test_a_pipe_in_a_checkpoint_is_damage_and_is_not_waited_for(tmp_path):
    folder = write_checkpoint(tmp_path / "c")
    (folder / "weights").unlink()
    os.mkfifo(folder / "weights")
    assert find_damage(folder) == "'weights' is not a regular file"


def test_a_run_folder_below_a_link_is_not_damaged(tmp_path):
    write_checkpoint(tmp_path / "c")
    (tmp_path / "there").symlink_to(tmp_path)
    assert find_damage(tmp_path / "there" / "c") is None


@pytest.mark.slow
def test_a_refill_is_told_with_its_number_of_trajectories(tmp_path):
    run = ScriptedRun(tmp_path / "runs", count=40)
    run.settings["trajectory_builders"]["builder"]["examples_per_epoch"] = 4
    run.settings["eval"]["evaluators"]["reward"]["function"] = lambda output, expected: float(int(output[-1]) > 5)
    run.settings["finetuning"] |= {"num_epochs": 1, "limits": {"max_refills": 3, "min_groups": 1.0}}
    asyncio.run(run.run())
    stages = [row.stage for row in JournalReader(tmp_path / "runs" / "r").stages() if row.epoch == 0]
    assert stages.count("COLLECT") > 1, "there was a refill"
    text = call_main("runs", "show", "r", "--output_dir", str(tmp_path / "runs")).output
    assert "?" not in text.partition("what happened")[2].partition("checkpoints")[0], text
    assert f"collected 16 trajectories (0 missing){', collected ' in text and ', collected '}" in text


def test_a_usable_folder_has_no_obstacle_and_is_left_as_it_was(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").write_text("mine")
    assert find_obstacle(tmp_path / "runs") is None
    assert find_obstacle(tmp_path / "new" / "deep" / "runs") is None
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mine", "runs"]


def test_a_file_where_a_folder_is_expected_is_named(tmp_path):
    (tmp_path / "taken").write_text("a file")
    found = find_obstacle(tmp_path / "taken" / "runs")
    assert found is not None
    assert found.startswith(("NotADirectoryError: ", "FileExistsError: "))
    assert "taken" in found
    assert (tmp_path / "taken").read_text() == "a file"


@contextlib.contextmanager
def no_locks(path, timeout):
    raise NotImplementedError("FileSystem does not appear to support flock")
    yield


def no_database(path):
    raise sqlite3.OperationalError("locking protocol")


@pytest.mark.parametrize(
    ("module", "name", "broken", "expected"),
    [
        (filelock, "FileLock", no_locks, "NotImplementedError: FileSystem does not appear to support flock"),
        (removal, "_write_database", no_database, "OperationalError: locking protocol"),
    ],
)
def test_a_file_system_without_locks_or_databases_is_reported(tmp_path, monkeypatch, module, name, broken, expected):
    monkeypatch.setattr(module, name, broken)
    assert find_obstacle(tmp_path / "new" / "runs") == expected
    assert list(tmp_path.iterdir()) == [], "what it made is removed"
