"""A disk that is full, broken or read-only stops the run cleanly, with the path and the bytes that it needs."""

import builtins
import errno
import io
import itertools
import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from reinforge import files
from reinforge.cli import main
from reinforge.errors import StorageError
from reinforge.files import replace_file, storage_boundary
from reinforge.runs import checkpoints as checkpoints_module
from reinforge.runs.checkpoints import Checkpoints
from reinforge.runs.journal.journal import RunJournal
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from tests.doubles import RecordingAdapter, ScriptedPolicy, examples
from tests.journal_rows import read_rows
from tests.scripted_run import ScriptedRun

ERRORS = [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EDQUOT]


class Disk:
    """Fails one of the calls that write: opening for writing, fsync, replace, rename, mkdir; counts them all."""

    def __init__(self, monkeypatch):
        self.fails_at, self.number, self.num_calls = None, errno.ENOSPC, 0
        for place, name in ((os, "fsync"), (os, "replace"), (os, "rename"), (os, "mkdir")):
            monkeypatch.setattr(place, name, self._shim(getattr(place, name), lambda arguments: True))
        for place in (builtins, io):  # pathlib uses io.open
            monkeypatch.setattr(
                place, "open", self._shim(place.open, lambda arguments: set("wax+") & set(arguments[1]))
            )

    def _shim(self, call, writes):
        def shim(*arguments, **options):
            if self.fails_at is not None and writes((*arguments, options.get("mode", "r"))):
                self.num_calls += 1
                if self.num_calls == self.fails_at:
                    raise OSError(self.number, os.strerror(self.number))
            return call(*arguments, **options)

        return shim

    @contextmanager
    def failing(self, at, number=errno.ENOSPC):
        self.fails_at, self.number, self.num_calls = at, number, 0
        try:
            yield
        finally:
            self.fails_at = None


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def each_failure(disk):
    """Yields (call, errno) for every writing call of a run without failures, and every error."""
    assert disk.num_calls >= 3
    return itertools.product(range(1, disk.num_calls + 1), ERRORS)


class ThreeFiles(RecordingAdapter):
    letter = "a"

    async def save(self, folder, version):
        with storage_boundary(folder, 30):
            folder.mkdir()
            for name in ("model.safetensors", "config.json", "tokenizer.json"):
                (folder / name).write_text(self.letter * 10)
        return True

    async def restore(self, folder, version):
        return False


def contents(folder):
    """Returns the files of a folder, hidden ones too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def check_commits(tmp_path, disk, version):
    adapter, checkpoints = ThreeFiles(ScriptedPolicy()), Checkpoints(tmp_path)
    checkpoints.folder.mkdir()
    first = await checkpoints.write(adapter, 1, {"epoch": 1})
    with disk.failing(at=0):
        await checkpoints.write(adapter, version, {"epoch": version})
    for at, number in each_failure(disk):
        checkpoints.remove_except([first])
        before = contents(tmp_path / first)
        adapter.letter = "b" if adapter.letter == "a" else "a"
        with disk.failing(at, number), pytest.raises(StorageError) as raised:
            await checkpoints.write(adapter, version, {"epoch": version})
        said = str(raised.value)
        assert str(tmp_path / checkpoints.name(version)) in said
        assert " bytes): " in said
        assert os.strerror(number) in said
        assert (" are free on its disk" in said) == (number in (errno.ENOSPC, errno.EDQUOT))
        assert checkpoints.has(1), f"call {at}: {said}"
        assert [checkpoints.find_damage(name) for name in checkpoints.names()] == [None] * len(checkpoints.names())
        assert version == 1 or contents(tmp_path / first) == before, f"call {at}: the previous checkpoint changed"
        left = [path for path in checkpoints.folder.iterdir() if path.name.startswith(".tmp-")]
        assert not left, f"call {at}: a staging folder is left"


@pytest.mark.parametrize("version", [1, 2], ids=["the same version again", "the next version"])
async def test_a_commit_that_fails_at_any_call_leaves_the_previous_checkpoint(tmp_path, disk, version):
    await check_commits(tmp_path, disk, version)


@contextmanager
def untranslated(path, num_bytes=None):
    yield


async def test_a_staging_folder_that_is_not_removed_is_left(tmp_path, disk, monkeypatch):
    """Mutation check."""
    monkeypatch.setattr(checkpoints_module.shutil, "rmtree", lambda folder, ignore_errors=False: None)
    with pytest.raises(AssertionError, match="a staging folder is left"):
        await check_commits(tmp_path, disk, 2)


async def test_a_checkpoint_that_is_not_put_back_is_lost(tmp_path, disk, monkeypatch):
    """Mutation check: the commit of a version that has a checkpoint moves the old one aside first."""
    rename = os.rename

    def keep_aside(source, target):
        if not Path(source).name.startswith(".trash-"):
            rename(source, target)

    monkeypatch.setattr(os, "rename", keep_aside)
    with pytest.raises(AssertionError, match=r"call \d+: cannot write .*step-000001 "):
        await check_commits(tmp_path, disk, 1)


async def test_errors_that_are_not_translated_carry_no_path_and_no_size(tmp_path, disk, monkeypatch):
    """Mutation check."""
    for module in (files, checkpoints_module):
        monkeypatch.setattr(module, "storage_boundary", untranslated)
    with pytest.raises(OSError, match=r"^\[Errno \d+\] [^/]*$"):
        await check_commits(tmp_path, disk, 2)


def check_replacements(tmp_path, disk, replace=replace_file):
    path = tmp_path / "summary.json"
    with disk.failing(at=0):
        replace(path, "old")
    for at, number in each_failure(disk):
        with disk.failing(at, number), pytest.raises(StorageError, match=r"summary.json \(3 bytes\)"):
            replace(path, "new")
        left = contents(tmp_path)
        assert left.pop("summary.json") == b"old", f"call {at}: the file changed"
        assert not left, f"call {at}: a temporary file is left"


def test_a_file_that_cannot_be_replaced_is_unchanged(tmp_path, disk):
    check_replacements(tmp_path, disk)


def test_a_file_that_is_written_in_place_changes(tmp_path, disk):
    """Mutation check."""

    def write_in_place(path, text):
        with storage_boundary(path, len(text)):
            for _ in range(3):  # as many calls that can fail as a replacement has
                with open(path, "w") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())

    with pytest.raises(AssertionError, match="the file changed"):
        check_replacements(tmp_path, disk, write_in_place)


def test_a_temporary_file_that_is_not_removed_is_left(tmp_path, disk, monkeypatch):
    """Mutation check."""
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: None)
    with pytest.raises(AssertionError, match="a temporary file is left"):
        check_replacements(tmp_path, disk)


def test_a_folder_that_cannot_be_created_is_a_storage_error(tmp_path, disk):
    with (
        disk.failing(1, errno.EACCES),
        pytest.raises(StorageError, match=r"cannot create the run folder .*/r .*Permission"),
    ):
        RunJournal(tmp_path / "r")


@contextmanager
def no_file_above(num_bytes):
    """Makes every write beyond this file size fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def episode(number):
    item = examples(1)[0].copy_with_updates(output_obj="x" * 5000)
    return EpisodeRecord(EpisodeKey("collect", 0, "0", number), item, reward=0.5)


def test_a_journal_that_does_not_fit_holds_what_it_acknowledged_and_continues_later(tmp_path):
    journal, acknowledged = RunJournal(tmp_path / "r"), 0

    def record_until_it_fails():
        nonlocal acknowledged
        for number in range(1000):
            journal.record_episode(episode(number))
            journal.flush()
            acknowledged = number + 1

    with no_file_above(200_000), pytest.raises(StorageError, match=r"run\.sqlite: .* bytes are free on its disk"):
        record_until_it_fails()
    assert 0 < acknowledged < 100
    with pytest.raises(StorageError):
        journal.close()
    journal = RunJournal.open(tmp_path / "r")
    for number in range(acknowledged, 100):
        journal.record_episode(episode(number))
    journal.flush()
    assert read_rows(journal.folder, "SELECT count(*), max(generation) FROM episodes") == [(100, 99)]
    assert read_rows(journal.folder, "PRAGMA integrity_check") == [("ok",)]
    journal.close()


async def test_a_run_whose_disk_is_full_ends_with_the_reason_and_releases_its_folder(tmp_path):
    run = ScriptedRun(tmp_path, script=lambda request: f"{'x' * 2000} {request.sampling.seed % 7}")
    with no_file_above(100_000), pytest.raises(StorageError, match=str(tmp_path / "r")):
        await run.run()
    assert run.events == ["open", "closed"]
    RunJournal.open(tmp_path / "r").close()


@pytest.mark.fault
def test_a_run_without_room_for_its_checkpoint_resumes_once_there_is_some(project, tmp_path, tiny_model_dir):
    """After the first job the optimizer state is larger than the weights: the second checkpoint does not fit."""
    project.set("finetuning.num_epochs", 1).set("trajectory_builders.builder.examples_per_epoch", 4)
    project.rows = project.rows[:24]
    project.finetune("--dataset", "nowhere.jsonl")  # fails, but writes the files
    size = (tiny_model_dir / "model.safetensors").stat().st_size
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10_000, resource.RLIM_INFINITY))  # noqa: E731
    command = [sys.executable, "-m", "reinforge", "finetune", "run.yml", "--run_name", "r"]
    full = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, check=False)
    assert full.returncode == 4, full.stderr
    assert f"cannot write {project.run.relative_to(tmp_path)}/checkpoints/step-000001 (" in full.stderr
    assert " bytes)" in full.stderr
    checkpoints = Checkpoints(project.run)
    assert checkpoints.names() == ["checkpoints/step-000000"]
    assert checkpoints.find_damage("checkpoints/step-000000") is None
    done = CliRunner().invoke(main, ["finetune", "run.yml", "--resume", "r"])
    assert done.exit_code == 0, done.output
    assert project.summary["status"] == "completed"
