"""Workspaces of programs: a copy for each episode at one path, scored by a command that the agent cannot prepare."""

import json
import os
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from reinforge.errors import ConfigError
from reinforge.evaluation.evaluators.reported_reward import ReportedReward, ReportedRewardConfig
from reinforge.rollout.episode import with_steps
from reinforge.rollout.workflows import workspace
from reinforge.rollout.workflows.presets import PRESETS
from reinforge.rollout.workflows.program import ProgramResult
from reinforge.rollout.workflows.workspace import read_reward
from reinforge.types.trajectory import Outcome
from tests.doubles import ScriptedPolicy, examples
from tests.episodes import make_runner, run_items
from tests.outside_agents import PYTHON_AGENT, open_workflow

PYTHON = sys.executable
CHECK = "import sum; assert sum.add(2, 3) == 5"


@pytest.fixture
def project(tmp_path):
    """A project with the task of one bug, and with its tests, which are copied in at the end."""
    for name, text in {"tasks/a/sum.py": "def add(a, b):\n    return a - b\n", "tests/a/check.py": CHECK}.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    return tmp_path


REWARD = {"command": [PYTHON, "check.py"], "copy": "tests/{folder}"}
FIX = "from pathlib import Path\nPath('sum.py').write_text('def add(a, b):\\n    return a + b\\n')\n"


@pytest.fixture
def run(project):
    """Returns a function that runs an agent in the workspaces of rows."""

    async def run(code, *rows, **settings):
        (project / "agent.py").write_text(PYTHON_AGENT + textwrap.dedent(code))
        copy = {"copy": "tasks/{folder}", **settings.pop("workspace", {})}
        settings = {"command": [PYTHON, "{project}/agent.py"], "workspace": copy, "reward": REWARD, **settings}
        items = examples(len(rows or [0]))
        for item, row in zip(items, rows or [{"folder": "a"}], strict=True):
            item.full_dataset_entry = row
        async with open_workflow(project, {"_type": "command", **settings}) as workflow:
            problems = workflow.example_problems(items)
            assert problems == [], [f"{problem.path}: {problem.message}" for problem in problems]
            return await run_items(make_runner(workflow, ScriptedPolicy(lambda _: "yes"), timeout_s=60), items)

    return run


async def score(record):
    assert record.outcome is Outcome.OK, record.reason
    result = await ReportedReward(ReportedRewardConfig()).evaluate(with_steps(record))
    return result.score if result.error is None else result.error


def read_diff(record):
    return next(mark.data["workspace_diff"] for mark in record.marks if "workspace_diff" in (mark.data or {}))


async def test_a_program_works_in_a_copy_that_a_command_scores(run, project):
    (fixed,) = await run(FIX + "print(ask('fix it'))")
    (left,) = await run("print(ask('fix it'))")
    assert (await score(fixed), await score(left)) == (1.0, 0.0)
    assert (read_diff(left), len(fixed.calls)) == ("", 1)
    assert read_diff(fixed).splitlines()[-3:] == [" def add(a, b):", "-    return a - b", "+    return a + b"]
    assert "a - b" in (project / "tasks/a/sum.py").read_text(), "the folder itself stays as it is"


async def test_every_episode_sees_the_same_paths(run):
    code = "import time\nprint(ask('x'), os.getcwd(), os.environ['HOME'], os.environ['TMPDIR'], os.listdir('.'))\n"
    code += (
        "Path('mine').write_text('')\ntime.sleep(0.2)\nprint(sorted(os.listdir('.')), os.listdir(os.environ['HOME']))"
    )
    records = await run("from pathlib import Path\n" + code, *[{"folder": "a"}] * 3, reward=None)
    outputs = {record.item.output_obj for record in records}
    home = f"{tempfile.gettempdir()}/reinforge-{os.getuid()}"
    assert outputs == {f"yes {home}/workspace {home}/home {home}/tmp ['sum.py']\n['mine', 'sum.py'] []"}
    assert os.listdir(home) == [], "other processes see none of it"


async def test_where_mounts_are_forbidden_a_few_paths_are_used_again(run, monkeypatch, caplog):
    monkeypatch.setattr(workspace, "can_mount", lambda folder: False)
    records = await run(FIX + "print(os.getcwd())", *[{"folder": "a"}] * 6)
    assert [await score(record) for record in records] == [1.0] * 6
    assert {Path(record.item.output_obj).parent.name for record in records} <= set("012345")
    assert [record.message for record in caplog.records if "allows no mounts" in record.message] != []
    with pytest.raises(ConfigError, match=r"workspace\.path: this machine lets no program see"):
        await run("", workspace={"path": str(Path(tempfile.gettempdir()) / "reinforge-testbed")})


async def test_a_path_of_its_own_setup_and_a_folder_to_start_in(run, tmp_path):
    path = tmp_path / "testbed"
    setup = {"command": [PYTHON, "-c", "import os; os.mkdir('{folder}'); open('{folder}/made', 'w').write('x')"]}
    settings = {"workspace": {"path": str(path), "setup": setup}, "cwd": "a", "reward": None}
    (record,) = await run("print(os.getcwd(), os.listdir('.'))", **settings)
    assert record.item.output_obj == f"{path}/a ['made']"
    assert (read_diff(record), os.listdir(path)) == ("", [])
    setup = {"command": [PYTHON, "-c", "import sys; sys.exit('no network')"]}
    (record,) = await run("", workspace={"setup": setup})
    assert (record.outcome, "workspace.setup exited with code 1:\nno network" in record.reason) == ("tool_error", True)


async def test_links_that_lead_out_of_the_folder_are_refused_and_others_stay_links(run, project):
    (project / "tasks/a/inside").symlink_to("sum.py")
    (record,) = await run("print(os.readlink('inside'))", reward=None)
    assert record.item.output_obj == "sum.py"
    for target in ("../../agent.py", "/etc/passwd"):
        (project / "tasks/a/out").unlink(missing_ok=True)
        (project / "tasks/a/out").symlink_to(target)
        (record,) = await run("", reward=None)
        assert "tasks/a/out is a link that leads out of its folder" in record.reason
    (project / "tasks/a/out").unlink()
    os.mkfifo(project / "tasks/a/pipe")
    (record,) = await run("", reward=None)
    assert "tasks/a/pipe is neither a file nor a folder nor a link" in record.reason


HIDE = {
    "folder": "os.symlink(outside, 'tests')",
    "file": "os.mkdir('tests'); os.symlink(outside + '/kept.py', 'tests/check.py')",
    "workspace": "here = os.getcwd(); shutil.rmtree(here); os.symlink(outside, here)",
    "file for folder": "open('tests', 'w').write('')",
    "unwritable": "os.mkdir('tests'); open('tests/check.py', 'w').write(''); os.chmod('tests', 0o500)",
    "test": "os.mkdir('tests'); open('tests/check.py', 'w').write('')",
}


@pytest.mark.parametrize("code", HIDE.values(), ids=HIDE)
async def test_the_tests_replace_what_the_agent_prepared_and_nothing_outside(run, project, monkeypatch, code):
    monkeypatch.setattr(workspace, "can_mount", lambda folder: "here =" not in code)  # a mount cannot be removed
    (project / "tests/a/tests").mkdir()
    (project / "tests/a/check.py").rename(project / "tests/a/tests/check.py")
    outside = project / "outside"
    outside.mkdir()
    (outside / "kept.py").write_text("kept")
    command = [PYTHON, "-c", "import os, sys; sys.path[:0] = ['.', 'tests']; import check"]
    (record,) = await run(
        f"import shutil\noutside = {str(outside)!r}\n{code}", reward={"command": command, "copy": "tests/{folder}"}
    )
    assert await score(record) == 0.0
    assert [(path.name, path.read_text()) for path in outside.iterdir()] == [("kept.py", "kept")]


async def test_what_the_agent_left_running_is_dead_when_its_work_is_scored(run):
    code = """
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            os.execve(sys.executable, [sys.executable, "-c", '''
    import time
    while True:
        open("check.py", "w").write("")
        open("sum.py", "w").write("add = lambda a, b: 5")
        time.sleep(0.001)
    '''.replace("\\n    ", "\\n")], {})
        os._exit(0)
    os.wait()
    """
    check = "import os, time; time.sleep(0.5); assert time.time() - os.stat('check.py').st_mtime > 0.4"
    (record,) = await run(code, reward={**REWARD, "command": [PYTHON, "-c", check]})
    assert await score(record) == 1.0


async def test_the_program_does_not_find_the_tests_and_the_command_of_the_reward_does(run, project):
    (project / "tests/score.py").write_text("import os; print(len(os.listdir(os.path.dirname(__file__))))")
    reward = {"command": [PYTHON, "{project}/tests/score.py"], "copy": "tests/{folder}", "parse": "last_number"}
    code = f"tests = {str(project / 'tests')!r}\nprint(os.listdir(tests))\nopen(tests + '/a', 'w').write('')"
    (record,) = await run(code, reward=reward)
    assert (record.item.output_obj, await score(record)) == ("[]", 2.0)
    assert (project / "tests/a/check.py").read_text() == CHECK


CLEAN = """
import os
left = [os.path.join(folder, name) for folder, _, names in os.walk(".") for name in names]
assert sorted(left) == ["./check.py", "./deep/conftest.py", "./sum.py"], left
assert open("deep/conftest.py").read() == "as it was"
assert os.listdir(os.environ["HOME"]) == os.listdir(os.environ["TMPDIR"]) == []
assert not {"OPENAI_API_KEY", "OWN", "SECRET_KEY"} & os.environ.keys()
"""


async def test_the_command_of_the_reward_starts_without_anything_that_the_agent_prepared(run, project, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "canary")
    (project / "tasks/a/deep").mkdir()
    (project / "tasks/a/deep/conftest.py").write_text("as it was")
    (project / "tests/a/check.py").write_text(CLEAN)
    code = """
    home, temporary = os.environ["HOME"], os.environ["TMPDIR"]
    for name in ("sitecustomize.py", "deep/conftest.py", "__pycache__/check.pyc", f"{home}/.x", f"{temporary}/x"):
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        open(name, "w").write("raise SystemExit(0)")
    """
    (record,) = await run(code, env={"OWN": "1"})
    assert await score(record) == 1.0


def result(code, stdout="", stderr=""):
    return ProgramResult(code, stdout.encode(), stderr.encode())


JUNIT = "<testsuites><testsuite>{}</testsuite></testsuites>"
CASES = (
    "<testcase/><testcase><failure/></testcase><testcase><error/></testcase><testcase><skipped/></testcase><testcase/>"
)


@pytest.mark.parametrize(
    ("parse", "ended", "report", "expected"),
    [
        ("exit_code", result(0), "", 1.0),
        ("exit_code", result(1), "", 0.0),
        ("exit_code", result(127, stderr="sh: no such program"), "", "exited with code 127: sh: no such program"),
        ("exit_code", result(-9), "", "was killed by SIGKILL: "),
        ("last_number", result(0, "3 of 4\nscore -0.25e1 %"), "", -2.5),
        ("last_number", result(0, "none"), "", "exited with code 0 and wrote no number: none"),
        ("last_number", result(1, "5"), "", "exited with code 1 and wrote no number: 5"),
        ("junit", result(1), JUNIT.format(CASES), 0.5),
        ("junit", result(0), JUNIT.format("<testcase><skipped/></testcase>"), "exited with code 0 and ran no test: "),
        ("junit", result(0), "<testsuites>", "its report cannot be read"),
        ("junit", result(4, stderr="no such file"), None, "exited with code 4 and its report cannot be read"),
    ],
)
def test_how_a_reward_is_read_and_that_unknown_is_never_0(tmp_path, parse, ended, report, expected):
    if report is not None:
        (tmp_path / "report.xml").write_text(report)
    if isinstance(expected, float):
        assert read_reward(parse, ended, tmp_path / "report.xml")["reward"] == expected
        return
    with pytest.raises(workspace.WorkspaceError) as caught:
        read_reward(parse, ended, tmp_path / "report.xml")
    assert expected in str(caught.value)


async def test_a_command_without_a_reward_is_a_missing_reward(run):
    slow = {"command": [PYTHON, "-c", "import time; time.sleep(60)"], "timeout_s": 0.5}
    for reward, expected in (
        ({"command": "no-such-program"}, "no-such-program cannot be started"),
        (slow, "took more than 0.5 s"),
        ({**slow, "timeout_reward": -1.0}, -1.0),
        ({"command": [PYTHON, "-c", "print('1e999')"], "parse": "last_number"}, "reward is inf"),
    ):
        (record,) = await run("", reward=reward)
        found = await score(record)
        assert found == expected or expected in found


async def test_a_diff_is_short_and_follows_no_link(run, project):
    for name in ("gone.py", "folder/linked.py"):
        (project / "tasks/a" / name).parent.mkdir(exist_ok=True)
        (project / "tasks/a" / name).write_text("old\n")
    (project / "secret").mkdir()
    (project / "secret/linked.py").write_text("secret\n")
    code = f"""
    import shutil
    os.remove("gone.py"), shutil.rmtree("folder"), os.symlink({str(project / "secret")!r}, "folder")
    open("binary", "wb").write(b"\\xff"), open("long", "w").write("x\\n" * 3000), os.mkfifo("pipe")
    open(b"name\\xff", "w").write("odd\\n"), os.mkdir("many")
    for number in range(300):
        open(f"many/{{number}}", "w").write("line\\n" * 100)
    """
    (record,) = await run(code, reward=None)
    diff = read_diff(record)
    for part in ("binary: changed\n", "long: changed\n", "--- a/folder/linked.py\n", "-old\n"):
        assert part in diff
    assert "secret" not in diff
    assert 19_000 < len(diff) < 21_000
    assert diff.endswith("files changed)\n")


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({}, {}, "workflow: the example 0: tasks/{folder}: the row has no column folder"),
        ({"folder": "../tests/a"}, {}, "folder is '../tests/a', which leads out of the folder"),
        ({"folder": "/etc"}, {}, "folder is '/etc', which leads out of the folder"),
        ({"folder": "b"}, {}, "there is no folder"),
        (
            {"folder": "a"},
            {"reward": {**REWARD, "copy": "hidden/{folder}"}},
            "workflow: the example 0: hidden/{folder}: there is no folder",
        ),
        (
            {"folder": "a"},
            {"reward": {"command": ["x", "{name}"]}},
            "workflow: the example 0: {name}: the row has no column name",
        ),
    ],
)
async def test_a_row_without_its_folder_is_told_before_work_starts(run, row, settings, message):
    with pytest.raises(AssertionError) as caught:
        await run("", row, **settings)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workspace": None, "reward": REWARD}, "need a workspace"),
        ({"home_files": {"../x": ""}}, "must be a path inside the folder of the episode"),
        ({"cwd": "/etc"}, "must be a path inside the folder of the episode"),
        ({"workspace": {"path": "testbed"}}, "workflow.workspace.path"),
        ({"reward": {"command": "pytest", "parse": "junit"}}, "needs {report} in the command"),
        ({"preset": "gemini_cli"}, "preset 'gemini_cli': it speaks Gemini's API"),
        ({"preset": "codx"}, "did you mean"),
        ({"preset": "aider", "command": None}, 'there is no program "aider" in PATH\n    fix: pip install aider-chat'),
    ],
)
async def test_settings_that_cannot_work_are_refused(tmp_path, monkeypatch, settings, message):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    settings = {"_type": "command", "command": [PYTHON], "workspace": {}, **settings}
    with pytest.raises(ConfigError) as caught:
        async with open_workflow(tmp_path, settings, makes_models=False):
            pass
    assert message in str(caught.value)


STAND_IN = """#!{python}
import json, os, sys
home = {{}}
for folder, _, names in os.walk(os.environ["HOME"]):
    home |= {{os.path.join(folder, name): open(os.path.join(folder, name)).read() for name in names}}
print(json.dumps([sys.argv[1:], home, dict(os.environ), sys.stdin.read()]))
"""


@pytest.mark.parametrize("preset", PRESETS)
async def test_a_preset_gives_a_program_its_task_its_model_and_a_home(tmp_path, monkeypatch, preset):
    program = tmp_path / "bin" / PRESETS[preset]["command"][0]
    program.parent.mkdir()
    program.write_text(STAND_IN.format(python=PYTHON))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    settings = {"_type": "command", "preset": preset, "output": "last_line_json", "env": {"OWN": "{model}"}}
    async with open_workflow(tmp_path, settings) as workflow:
        (record,) = await run_items(make_runner(workflow, ScriptedPolicy(), timeout_s=60), examples(1))
    arguments, home, env, stdin = record.item.output_obj
    given = json.dumps([arguments, home, env, stdin])
    assert "{model}" not in given
    assert "{base_url}" not in given
    assert env["OWN"] == "agent"
    assert env["HOME"].startswith(tempfile.gettempdir())
    assert "agent" in given.replace('"OWN": "agent"', "")
    assert any("0" in part for part in (stdin, *arguments))
