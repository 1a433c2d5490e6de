"""Damaged run folders: each command says what is wrong, and never takes damage for a bug of its own."""

import shutil
import sqlite3
import sys
from contextlib import closing, suppress

import pytest
from click.testing import CliRunner
from hypothesis import strategies as st

from reinforge.cli import main
from tests.fuzz.fuzzing import VALUES, fuzzed, to_bytes
from tests.project import Project

BUG = "bug in reinforge"
COMMANDS = {
    ("runs", "list", "--output_dir", "runs"): {0},
    ("runs", "show", "runs/r"): {0, 2, 4},
    ("runs", "verify", "runs/r"): {0, 2, 3, 4},
    ("finetune", "run.yml", "--resume", "runs/r"): {0, 2, 3, 4},
}
"""Command -> the exit codes that it may end with, whatever is in the folder."""

Damage = st.tuples(
    st.integers(0, 10_000),  # which file
    st.one_of(
        st.just("delete"),
        st.just("folder"),
        st.tuples(st.just("cut"), st.floats(0, 1)),
        st.tuples(st.just("flip"), st.floats(0, 1), st.integers(0, 7)),
        st.tuples(st.just("replace"), st.binary(max_size=200) | VALUES.map(to_bytes)),
    ),
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_model_dir):
    """A project whose run ended, with two epochs and its model."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("sys.path", [*sys.path])
        project = Project(folder, tiny_model_dir)
        project.rows = project.rows[:24]
        project.set("finetuning.num_epochs", 2).set("trajectory_builders.builder.examples_per_epoch", 4)
        done = project.finetune()
        assert done.exit_code == 0, done.output
    return folder


def damage(run, number, how):
    """Changes one file of a run."""
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.name != ".lock")
    path = files[number % len(files)]
    content = path.read_bytes()
    if how == "delete":
        path.unlink()
    elif how == "folder":
        path.unlink()
        path.mkdir()
    elif how[0] == "cut":
        path.write_bytes(content[: int(len(content) * how[1])])
    elif how[0] == "replace":
        path.write_bytes(how[1])
    elif content:
        at = min(int(len(content) * how[1]), len(content) - 1)
        path.write_bytes(content[:at] + bytes([content[at] ^ (1 << how[2])]) + content[at + 1 :])
    return path.relative_to(run)


def check_commands(folder, where):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("sys.path", [*sys.path])
        for command, codes in COMMANDS.items():
            done = CliRunner().invoke(main, command)
            said = f"{where}: {' '.join(command)} ended with {done.exit_code}: {done.output[-1500:]} {done.exception!r}"
            assert done.exit_code in codes, said
            assert BUG not in done.output, said


def copy_of(finished, tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    shutil.copytree(finished, folder, dirs_exist_ok=True)
    return folder


@pytest.mark.slow
def test_every_command_says_what_is_damaged(finished, tmp_path_factory):
    @fuzzed(st.lists(Damage, min_size=1, max_size=3), quick=12)
    def check(damages):
        folder = copy_of(finished, tmp_path_factory)
        where = [str(damage(folder / "runs" / "r", *each)) for each in damages]
        check_commands(folder, where)
        shutil.rmtree(folder)

    check()


def change_row(database, table, column, row, value):
    """Puts a value into one cell, if there is a row and its table takes it."""
    names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    name = names[table % len(names)]
    facts = list(database.execute(f"PRAGMA table_info({name})"))
    columns, key = [each[1] for each in facts], [each[1] for each in facts if each[5]] or ["rowid"]
    column = columns[column % len(columns)]
    rows = list(database.execute(f"SELECT {', '.join(key)} FROM {name}"))
    if rows:
        place = " AND ".join(f"{each} = ?" for each in key)
        with suppress(sqlite3.IntegrityError):
            database.execute(f"UPDATE {name} SET {column} = ? WHERE {place}", (value, *rows[row % len(rows)]))
    return f"{name}.{column} = {value!r}"


@pytest.mark.slow
def test_every_command_says_which_row_is_damaged(finished, tmp_path_factory):
    @fuzzed(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000), VALUES.map(to_bytes), quick=3)
    def check(table, column, row, value):
        folder = copy_of(finished, tmp_path_factory)
        with closing(sqlite3.connect(folder / "runs" / "r" / "run.sqlite")) as database:
            where = change_row(database, table, column, row, value.decode("utf-8", "replace"))
            database.commit()
        check_commands(folder, where)
        shutil.rmtree(folder)

    check()
