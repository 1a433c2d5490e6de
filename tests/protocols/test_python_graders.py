"""Graders in Python run only where they are allowed, in a process with few rights that never outlives its call."""

import os
import time

import pytest

from reinforge.protocols.openai.graders import python_grader
from reinforge.protocols.openai.graders.python_grader import PythonFailed, find_landlock, open_python_graders
from reinforge.protocols.openai.graders.templates import GradedSample
from reinforge.rollout.isolation.processes import list_processes


async def run(source, text="4", item=None, timeout_s=20.0):
    async with open_python_graders(timeout_s) as graders:
        return await graders.grade(source, item or {"answer": 4}, GradedSample(text))


async def test_a_grader_gets_the_answer_and_the_row():
    source = (
        "import re, json\n"
        "def grade(sample, item):\n"
        "    assert sample['output_json'] == 4 and sample['output_tools'] == []\n"
        "    print('noise')\n"
        "    return 0.5 if int(sample['output_text']) == item['answer'] else 0\n"
    )
    assert await run(source) == 0.5
    assert await run(source.replace("== 4 and", "in (4, 5) and"), "5") == 0.0


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError('odd row')", "odd row"),
        ("return 'x'", "grade returned str, not a number"),
        pytest.param("return None", "grade returned NoneType", marks=SLOW),
        pytest.param("return float('nan')", "nan, not a finite number", marks=SLOW),
        pytest.param("return 1e12", "beyond the largest score", marks=SLOW),
        ("import socket; socket.create_connection(('127.0.0.1', 9))", "a grader may not use socket"),
        pytest.param("import subprocess; subprocess.run(['true'])", "a grader may not use", marks=SLOW),
        pytest.param("import _posixsubprocess as p; p.fork_exec([b'true'])", "may not use os.fork", marks=SLOW),
        ("import os; os.fork()", "a grader may not use os.fork"),
        pytest.param("import os; os.kill(os.getppid(), 9)", "a grader may not use os.kill", marks=SLOW),
        ("return len('x' * (1 << 30))", "MemoryError"),
        pytest.param("open('big', 'wb').write(b'x' * (1 << 25))", "File too large|exit code -25", marks=SLOW),
        pytest.param("import sys; sys.exit(3)", "exit code 3", marks=SLOW),
        pytest.param("import os; os._exit(0)", "instead of a number", marks=SLOW),
    ],
)
async def test_what_a_grader_may_not_do(body, message):
    with pytest.raises(PythonFailed, match=message):
        await run(f"def grade(sample, item):\n    {body}")


NEEDS_LANDLOCK = pytest.mark.skipif(not find_landlock(), reason="this kernel has no Landlock")


@NEEDS_LANDLOCK
@pytest.mark.parametrize(
    "body",
    [
        "open('/etc/passwd').read()",
        "open(item['file'], 'a')",
        "os.remove(item['file'])",
        "os.listdir('/proc')",
        "open('/proc/self/environ').read()",
        "os.truncate(item['file'], 0)",
        pytest.param(
            "signal.pidfd_send_signal(os.pidfd_open(item['server']), 0)",
            marks=pytest.mark.skipif(find_landlock() < 6, reason="this kernel's Landlock does not know signals"),
        ),
    ],
)
async def test_the_kernel_refuses_what_no_hook_sees(tmp_path, body):
    file = tmp_path / "file"
    file.write_text("kept")
    source = f"import os, signal\ndef grade(sample, item):\n    {body}\n    return 1"
    with pytest.raises(PythonFailed, match="PermissionError"):
        await run(source, item={"file": str(file), "server": os.getpid()})
    assert file.read_text() == "kept"


@NEEDS_LANDLOCK
async def test_no_program_can_be_run_even_around_the_hook():
    """A copy of the module, as an attacker could make it."""
    source = (
        "import importlib.util as u, importlib.machinery as m, os\n"
        "def grade(sample, item):\n"
        "    spec = u.find_spec('_posixsubprocess')\n"
        "    own = u.module_from_spec(spec)\n"
        "    read, write = os.pipe()\n"
        "    own.fork_exec([b'/bin/sh', b'-c', b'echo run >file'], [b'/bin/sh'], True, (write,), None, [b'A=1'],\n"
        "        -1, -1, -1, -1, -1, -1, read, write, True, True, -1, None, None, None, -1, None, False)\n"
        "    os.close(write)\n"
        "    assert b'OSError' in os.read(read, 100), 'the child says why it runs no program'\n"
        "    return 0 if os.path.exists('file') else 1\n"
    )
    assert await run(source) == 1.0


async def test_without_landlock_the_server_says_so_and_files_are_open(monkeypatch, tmp_path, caplog):
    """Mutation check: the hook alone keeps a grader from no file."""
    monkeypatch.setattr(python_grader, "find_landlock", lambda: 0)
    file = tmp_path / "file"
    source = "def grade(sample, item):\n    return open(item['file'], 'w').write('x')"
    assert await run(source, item={"file": str(file)}) == 1.0
    assert file.read_text() == "x"
    assert "this system has no Landlock" in caplog.text


async def test_a_grader_uses_its_folder_and_the_standard_library():
    source = (
        "def grade(sample, item):\n"
        "    import decimal, hashlib, sqlite3, tempfile, zoneinfo\n"
        "    with open('notes', 'w') as file:\n"
        "        file.write(hashlib.sha256(b'a').hexdigest())\n"
        "    return len(open('notes').read()) / 64\n"
    )
    assert await run(source) == 1.0


async def test_the_source_needs_the_function():
    with pytest.raises(PythonFailed, match=r"defines no function grade\(sample, item\)"):
        await run("x = 1")


def list_children():
    """Returns this process's own processes; earlier tests of it may have left some."""
    return {pid for pid, process in list_processes().items() if process.parent == os.getpid()}


@pytest.mark.slow
async def test_a_grader_that_hangs_is_killed_with_all_it_started():
    before, earlier = time.monotonic(), list_children()
    with pytest.raises(PythonFailed, match=r"took longer than 0.5 s"):
        await run("def grade(sample, item):\n    while True: pass", timeout_s=0.5)
    assert time.monotonic() - before < 15
    assert list_children() <= earlier, "nothing is left running"


async def test_secrets_of_the_server_are_not_in_the_environment(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary-1")
    source = "import os\ndef grade(sample, item):\n    return 0 if 'sk-canary' in str(dict(os.environ)) else 1"
    assert await run(source) == 1.0
