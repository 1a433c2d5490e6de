"""Copies of a run in object storage: what they hold after any cut, what they cost, and who may write them."""

import sqlite3
from contextlib import closing

import fsspec
import pytest
from click.testing import CliRunner
from fsspec.implementations.local import LocalFileSystem

from reinforge.cli import main
from reinforge.config.loader import build_config
from reinforge.errors import BackendError, ConfigError, StorageError
from reinforge.files import write_folder
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.journal.reader import JournalReader
from reinforge.trackers import mirror as module
from reinforge.trackers.mirror import MirrorConfig, MirrorFolder, MirrorTracker, fetch_run
from reinforge.types.tracking import MetricPoint, TrackedRun

POINT = MetricPoint(1, {"loss": 1.0}, 0.0)


class FailingStorage(LocalFileSystem):
    """A folder of this machine that cuts off the write after `writes_left` of them."""

    protocol, cachable = "failing", False
    writes_left, num_writes = 10**9, 0

    def pipe_file(self, path, value, **options):
        FailingStorage.writes_left -= 1
        FailingStorage.num_writes += 1
        if FailingStorage.writes_left < 0:
            super().pipe_file(path, value[: len(value) // 2])
            raise OSError("connection reset")
        super().pipe_file(path, value)


fsspec.register_implementation("failing", FailingStorage, clobber=True)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run folder that a process works on, with pieces of 4,096 bytes."""
    monkeypatch.setattr(module, "PIECE_BYTES", 4096)
    monkeypatch.setattr(FailingStorage, "writes_left", 10**9)
    monkeypatch.setattr(FailingStorage, "num_writes", 0)
    with closing(RunJournal(tmp_path / "runs" / "r")) as journal:
        journal.set_facts(status="running", epoch=0)
        journal.flush()
        add_checkpoint(journal.folder, 0)
        yield journal


def add_checkpoint(folder, number):
    content = bytes([number]) * 10_000
    write_folder(folder / "checkpoints" / f"step-{number:06d}", lambda staged: fill(staged, content))


def fill(staged, content):
    (staged / "training").mkdir(parents=True)
    (staged / "model.safetensors").write_bytes(content)
    (staged / "training" / "run.json").write_text("{}")


def start(run, tmp_path, key="0123456789abcdef"):
    tracker = MirrorTracker(MirrorConfig(location=f"failing://{tmp_path}/bucket"))
    tracker.start(TrackedRun("r", run.folder, key))
    return tracker


def fetch(tmp_path, name="fetched"):
    return fetch_run(f"failing://{tmp_path}/bucket/r", tmp_path / name)


def read(folder):
    """Returns the fact `epoch` and the checkpoints of a run folder, which must be whole."""
    names = [path.name for path in sorted((folder / "checkpoints").iterdir())]
    for name in names:
        content = (folder / "checkpoints" / name / "model.safetensors").read_bytes()
        assert content == bytes([int(name[-6:])]) * 10_000
    return JournalReader(folder).facts()["epoch"], names


def advance(run):
    run.set_facts(epoch=1)
    run.flush()
    add_checkpoint(run.folder, 1)


def test_a_copy_is_a_run_folder_that_only_its_owner_reads(run, tmp_path):
    start(run, tmp_path)
    folder = fetch(tmp_path)
    assert folder == tmp_path / "fetched" / "r"
    assert read(folder) == (0, ["step-000000"])
    assert not (folder / ".lock").exists()
    for path in [folder, *folder.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    assert not list(run.folder.glob(".tmp-*"))
    with pytest.raises(ConfigError, match="already exists: resume that one"):
        fetch(tmp_path)


def test_a_copy_sends_what_has_changed(run, tmp_path):
    tracker = start(run, tmp_path)
    before = FailingStorage.num_writes
    tracker.log(POINT)
    assert FailingStorage.num_writes == before, "nothing has changed"
    add_checkpoint(run.folder, 1)
    tracker.log(POINT)  # two full pieces that are equal, a third, its manifest, and the copy's own
    assert FailingStorage.num_writes == before + 4
    again = start(run, tmp_path)  # after a resume
    assert FailingStorage.num_writes == before + 5
    (run.folder / "checkpoints" / "step-000000" / "model.safetensors").unlink()
    again.log(POINT)
    again.log(MetricPoint(2, {"loss": 1.0}, 0.0))
    add_checkpoint(run.folder, 2)
    again.log(POINT)
    pieces = {piece for manifest in again._kept for piece in manifest.pieces}
    assert {path.name for path in (tmp_path / "bucket" / "r" / "pieces").iterdir()} == pieces
    assert len(list((tmp_path / "bucket" / "r" / "manifests").iterdir())) == 2


def try_each_cut(run, tmp_path):
    """Cuts the second copy off at each of its writes; each time the first one must still be whole."""
    tracker = start(run, tmp_path)
    advance(run)
    for number in range(100):
        FailingStorage.writes_left = number
        try:
            tracker.log(POINT)
        except BackendError as error:
            assert "connection reset" in str(error)  # noqa: PT017
            FailingStorage.writes_left = 10**9
            assert read(fetch(tmp_path, f"fetched-{number}")) == (0, ["step-000000"])
        else:
            break
    assert number > 3
    assert read(fetch(tmp_path, "whole")) == (1, ["step-000000", "step-000001"])


def test_a_copy_that_is_cut_off_anywhere_leaves_the_one_before(run, tmp_path):
    try_each_cut(run, tmp_path)


def test_a_manifest_that_is_written_before_its_pieces_names_some_that_are_missing(run, tmp_path, monkeypatch):
    """Mutation check."""
    late, write_piece, write_manifest = [], MirrorFolder.write_piece, MirrorFolder.write_manifest

    def publish(mirror, manifest):
        write_manifest(mirror, manifest)
        while late:
            write_piece(mirror, *late.pop())

    monkeypatch.setattr(MirrorFolder, "write_piece", lambda mirror, name, data: late.append((name, data)))
    monkeypatch.setattr(MirrorFolder, "write_manifest", publish)
    with pytest.raises((AssertionError, StorageError)):
        try_each_cut(run, tmp_path)


def test_a_lost_answer_is_not_another_process_and_another_process_is(run, tmp_path, monkeypatch):
    first = start(run, tmp_path)
    write = MirrorFolder.write_manifest

    def lose_the_answer(mirror, manifest):
        write(mirror, manifest)
        raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(MirrorFolder, "write_manifest", lose_the_answer)
        advance(run)
        with pytest.raises(BackendError, match="TimeoutError"):
            first.log(POINT)
    first.log(POINT)
    add_checkpoint(run.folder, 2)
    second = start(run, tmp_path)
    add_checkpoint(run.folder, 3)
    with pytest.raises(BackendError, match="another process copies the same run: it was resumed elsewhere"):
        first.log(POINT)
    second.log(POINT)
    assert len(read(fetch(tmp_path))[1]) == 4
    with pytest.raises(BackendError, match="has a copy of another run"):
        start(run, tmp_path, key="another")


def test_a_copy_is_read_with_care(run, tmp_path):
    tracker = start(run, tmp_path)
    folder = tmp_path / "bucket" / "r"
    [piece] = tracker._kept[0].files["checkpoints/step-000000/training/run.json"]["pieces"]
    (folder / "pieces" / piece).write_text("[]")
    with pytest.raises(StorageError, match=f"the piece {piece} is damaged"):
        fetch(tmp_path)
    for name in ("../r.py", "checkpoints/step-000001/../../../r.py", "task.py"):
        tracker._kept[0].files = {name: {"bytes": 2, "pieces": [piece]}}
        tracker._mirror.write_manifest(tracker._kept[0])
        with pytest.raises(StorageError, match="which no run has written"):
            fetch(tmp_path)
    assert list((tmp_path / "fetched").iterdir()) == []
    (folder / "manifests" / "000001.json").write_text('{"format": 1}')
    assert fetch(tmp_path) is None


def test_a_location_is_checked_and_told(tmp_path):
    trackers = {"there": {"_type": "mirror", "location": "s3://bucket/runs"}}
    from reinforge.trainer.setup.reach import list_reach

    assert list_reach(build_config({"finetuning": {"trackers": trackers}})).hosts == {
        "s3://bucket/runs": ["finetuning.trackers.there"]
    }
    assert MirrorConfig(location=str(tmp_path)).url == MirrorConfig(location=f"file://{tmp_path}").url == ""
    with pytest.raises(ConfigError, match="s4"):
        MirrorFolder("s4://bucket/runs")
    with pytest.raises(ConfigError, match="cannot be the name of a run"):
        fetch_run(f"{tmp_path}/bucket/a b", tmp_path)


def test_the_command_fetches_a_run(run, tmp_path):
    start(run, tmp_path)
    arguments = ["runs", "fetch", str(tmp_path / "bucket" / "r"), "--output_dir", str(tmp_path / "fetched")]
    found = CliRunner().invoke(main, arguments)
    assert found.exit_code == 0, found.output
    assert f"resume with: reinforge finetune --resume {tmp_path / 'fetched' / 'r'}" in found.output
    assert read(tmp_path / "fetched" / "r") == (0, ["step-000000"])
    for more, code, says in (([], 4, "no copy of a run found at"), (["--allow_missing"], 0, "no copy found at")):
        found = CliRunner().invoke(main, ["runs", "fetch", str(tmp_path / "nothing"), *more])
        assert (found.exit_code, says in found.output) == (code, True), found.output


def test_the_journal_is_copied_as_it_is_at_one_moment(run, tmp_path):
    with closing(sqlite3.connect(run.folder / "run.sqlite")) as other:
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM run").fetchone()  # a reader keeps the log from being moved
        advance(run)
        start(run, tmp_path)
    assert read(fetch(tmp_path)) == (1, ["step-000000", "step-000001"])
