"""A folder that appears complete or not at all, and never over files of somebody else."""

import os
import signal
import subprocess
import sys

import pytest

from reinforge.errors import ConfigError
from reinforge.exports import staging
from reinforge.exports.staging import check_target, stage_folder
from reinforge.files import MANIFEST, find_damage


def write(target, name="model.txt", text="weights"):
    with stage_folder(target, "merged") as staged:
        (staged / name).write_text(text)


def test_a_folder_appears_when_it_is_complete(tmp_path):
    target = tmp_path / "deep" / "out"
    with stage_folder(target, "gguf") as staged:
        (staged / "model.txt").write_text("weights")
        assert not target.exists()
    assert {path.name for path in target.iterdir()} == {"model.txt", MANIFEST}
    assert find_damage(target) is None
    assert [path.name for path in target.parent.iterdir()] == ["out"]


def fail(target):
    with stage_folder(target, "merged") as staged:
        (staged / "model.txt").write_text("half")
        raise RuntimeError("the disk is full")


def test_a_failure_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="full"):
        fail(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_failure_keeps_the_earlier_export(tmp_path):
    write(tmp_path / "out", text="old")
    with pytest.raises(RuntimeError, match="full"):
        fail(tmp_path / "out")
    assert (tmp_path / "out" / "model.txt").read_text() == "old"
    write(tmp_path / "out", text="new")
    assert (tmp_path / "out" / "model.txt").read_text() == "new"


def test_without_staging_a_failure_leaves_half_a_folder(tmp_path, monkeypatch):
    """Mutation check."""
    monkeypatch.setattr(staging, "STAGED", "")
    monkeypatch.setattr(staging.os, "getpid", lambda: "")
    monkeypatch.setattr(staging.shutil, "rmtree", lambda *args, **kwargs: None)
    with pytest.raises(RuntimeError, match="full"):
        fail(tmp_path / "out")
    assert (tmp_path / "out-" / "model.txt").read_text() == "half", "a folder with an ordinary name"


WRITE = """
import sys
from pathlib import Path
from reinforge.exports.staging import stage_folder
with stage_folder(Path(sys.argv[1]), "merged") as staged:
    (staged / "model.txt").write_text(sys.argv[2])
"""


def write_and_die(target, text, site):
    environment = {**os.environ, "REINFORGE_CRASH_AT": site}
    return subprocess.run([sys.executable, "-c", WRITE, str(target), text], env=environment, check=False).returncode


@pytest.mark.slow
@pytest.mark.parametrize("site", ["ckpt.after_tensor", "ckpt.after_manifest"])
def test_a_killed_export_leaves_no_half_folder(tmp_path, site):
    target = tmp_path / "out"
    assert write_and_die(target, "half", site) == -signal.SIGKILL
    assert [path.name.startswith(".tmp-out-") for path in tmp_path.iterdir()] == [True], "it is out of sight"
    write(target, text="old")
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "the next export removes it"
    assert write_and_die(target, "new", site) == -signal.SIGKILL
    assert (target / "model.txt").read_text() == "old", "the earlier export stays"
    assert find_damage(target) is None


def test_what_killed_exports_left_is_removed(tmp_path):
    gone, alive, other = tmp_path / ".tmp-out-999999999", tmp_path / f".tmp-out-{os.getppid()}", tmp_path / ".tmp-o-1"
    for path in (gone, alive, other):
        path.mkdir()
    write(tmp_path / "out")
    assert not gone.exists()
    assert alive.exists(), "another process may still be writing"
    assert other.exists(), "of another export, or of something else"


def test_an_empty_folder_is_used(tmp_path):
    (tmp_path / "out").mkdir()
    check_target(tmp_path / "out")
    write(tmp_path / "out")
    assert (tmp_path / "out" / "model.txt").is_file()


def be_overtaken(target):
    with stage_folder(target, "merged") as staged:
        (staged / "model.txt").write_text("weights")
        target.mkdir()
        (target / "mine").write_text("kept")


def test_files_that_came_in_the_meantime_are_kept(tmp_path):
    with pytest.raises(ConfigError, match=r"no export has written: mine"):
        be_overtaken(tmp_path / "out")
    assert (tmp_path / "out" / "mine").read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("damage", "says"),
    [("foreign", "mine"), ("changed", "changed since"), ("checkpoint", ""), ("file", ""), ("link", "symbolic link")],
)
def test_other_things_are_refused(tmp_path, damage, says):
    target = tmp_path / "out"
    if damage in ("foreign", "changed"):
        write(target)
        (target / ("mine" if damage == "foreign" else "model.txt")).write_text("mine")
    elif damage == "checkpoint":
        from reinforge.files import write_folder

        write_folder(target, lambda staged: (staged.mkdir(), (staged / "model.txt").write_text("weights")))
    elif damage == "file":
        target.write_text("mine")
    else:
        (tmp_path / "elsewhere").mkdir()
        target.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError) as refused:
        check_target(target)
    assert all(text in str(refused.value) for text in ("--output", says))
