"""Standard output that is closed or full: a run continues, and other commands say so."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, threading, time
from reinforge.cli import process
{mutation}
def work():
    print("first", flush=True)
    opened = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
    os.write(opened, f"{{opened}}".encode())
    print("second", flush=True)
    print("said", file=sys.stderr)
    {last}
process.run_process(work, keeps_results={keeps})
"""


def run(tmp_path, redirection, *, keeps=True, last="sys.exit(5)", mutation=""):
    """Returns how a small program ended, and the descriptor of the file that it opened."""
    text = PROGRAM.format(keeps=keeps, last=last, mutation=mutation)
    (tmp_path / "program.py").write_text(text)
    command = f"{sys.executable} program.py opened {redirection}"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    return done, (tmp_path / "opened").read_text() if (tmp_path / "opened").exists() else None


@pytest.mark.parametrize("redirection", [">/dev/full", "2>/dev/full", ">&- 2>&-"])
def test_a_command_ends_with_its_own_exit_code(tmp_path, redirection):
    done, _ = run(tmp_path, redirection)
    assert (done.returncode, "Traceback" in done.stderr) == (5, False), done.stderr


def test_a_reader_that_leaves_is_no_failure(tmp_path):
    read, write = os.pipe()
    os.close(read)
    (tmp_path / "program.py").write_text(PROGRAM.format(keeps=False, last="pass", mutation=""))
    command = [sys.executable, "program.py", "opened"]
    done = subprocess.run(command, cwd=tmp_path, stdout=write, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"said\n")


def test_a_result_that_was_lost_is_an_environment_failure(tmp_path):
    done, _ = run(tmp_path, ">/dev/full", keeps=False, last="pass")
    assert (done.returncode, done.stderr) == (
        4,
        "said\nerror: cannot write to standard output: No space left on device\n",
    )
    assert run(tmp_path, ">/dev/full", keeps=True, last="pass")[0].returncode == 0, "the run folder has the results"
    assert run(tmp_path, ">/dev/full", keeps=False)[0].returncode == 5, "the failure of the work comes first"


PRINTED = "os.write(1, b'third')"
"""As a library that is not written in Python does."""


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path):
    """What is printed would go into it, for example into the journal."""
    assert int(run(tmp_path, "<&- >&- 2>&-", last=PRINTED)[1]) > 2


OFF = {
    "descriptors": "process.open_missing_descriptors = lambda: None",
    "streams": "process.make_tolerant = lambda stream, number: None",
}


@pytest.mark.slow
def test_without_open_descriptors_a_file_gets_the_output(tmp_path):
    """Mutation check."""
    assert run(tmp_path, ">&-", mutation="\n".join(OFF.values()), last=PRINTED)[1] == "1third"


@pytest.mark.slow
def test_without_tolerant_streams_the_work_ends(tmp_path):
    """Mutation check."""
    done, _ = run(tmp_path, ">/dev/full", mutation=OFF["streams"])
    assert done.returncode == 1
    assert "OSError: [Errno 28] No space left on device" in done.stderr


HELD = "threading.Thread(target=time.sleep, args=(3600,)).start(); sys.exit(5)"


def test_a_thread_that_never_ends_does_not_keep_the_process(tmp_path):
    done, _ = run(tmp_path, "", last=HELD, mutation="process.LEAVE_S = 0.5")
    assert (done.returncode, done.stdout) == (5, "first\nsecond\n")


@pytest.mark.slow
def test_optimized_python_without_docstrings_is_refused_with_the_reason(project):
    project.write_files()
    command = [sys.executable, "-OO", "-m", "reinforge", "finetune", "run.yml", "--run_name", "r"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "-OO or PYTHONOPTIMIZE=2, which removes the docstrings that transformers needs" in done.stderr
    assert not project.run.exists()


@pytest.mark.slow
def test_optimized_python_runs(project):
    """No assertion of reinforge does what the run needs."""
    project.set("finetuning.num_epochs", 1)
    project.write_files()
    command = [sys.executable, "-O", "-m", "reinforge", "finetune", "run.yml", "--run_name", "r"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert project.summary["status"] == "completed"


@pytest.mark.slow
@pytest.mark.parametrize(
    "redirection",
    [
        *(pytest.param(each, marks=pytest.mark.fault) for each in (">&-", ">/dev/full 2>/dev/full")),
        "<&- >&- 2>&-",
        "| head -1",
    ],
)
def test_a_whole_run_needs_no_output(project, redirection):
    project.set("finetuning.num_epochs", 1)
    project.write_files()
    command = f"set -o pipefail; {sys.executable} -m reinforge finetune run.yml --run_name r {redirection}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert project.summary["status"] == "completed"
