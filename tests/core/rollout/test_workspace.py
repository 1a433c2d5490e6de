"""Workspaces of programs: a copy for each episode at one path, scored by a command that the agent cannot prepare."""

import os
import re
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import yaml

from reinforge.errors import ConfigError
from reinforge.evaluation.evaluators.reported_reward import ReportedReward, ReportedRewardConfig
from reinforge.rollout.episode import with_steps
from reinforge.rollout.workflows import workspace
from reinforge.rollout.workflows.command_workflow import CommandWorkflowConfig
from reinforge.rollout.workflows.presets import PRESETS
from reinforge.rollout.workflows.program_runner import ProgramResult
from reinforge.rollout.workflows.workspace import read_reward
from reinforge.types.trajectory import Outcome
from tests.doubles import ScriptedPolicy, examples
from tests.episodes import make_runner, run_items
from tests.generated import DOCS
from tests.outside_agents import PYTHON_AGENT, open_workflow

PYTHON = sys.executable
CHECK = "import sum; assert sum.add(2, 3) == 5"


@pytest.fixture
def project(tmp_path):
    """A project with the task of one bug, and with its tests, which are copied in at the end."""
    write(tmp_path / "tasks/a/sum.py", "def add(a, b):\n    return a - b\n")
    write(tmp_path / "tests/a/check.py", CHECK)
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


REWARD = {"command": [PYTHON, "check.py"], "copy": "tests/{folder}"}
FIX = "from pathlib import Path\nPath('sum.py').write_text('def add(a, b):\\n    return a + b\\n')\n"


@pytest.fixture
def run(project):
    """Returns a function that runs an agent in the workspaces of rows."""

    async def run(code, *rows, **settings):
        write(project / "agent.py", PYTHON_AGENT + textwrap.dedent(code))
        copy = {"copy": "tasks/{folder}", **settings.pop("workspace", {})}
        settings = {"command": [PYTHON, "{project}/agent.py"], "workspace": copy, "reward": REWARD, **settings}
        items = examples(len(rows or [0]))
        for item, row in zip(items, rows or [{"folder": "a"}], strict=True):
            item.full_dataset_entry = row
        async with open_workflow(project, {"_type": "command", **settings}) as workflow:
            assert not (found := workflow.example_problems(items)), found[0].message
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
    assert read_diff(left) == ""
    assert read_diff(fixed).splitlines()[-3:] == [" def add(a, b):", "-    return a - b", "+    return a + b"]
    assert "a - b" in (project / "tasks/a/sum.py").read_text(), "the folder itself stays as it is"


async def test_every_episode_sees_the_same_paths(run):
    code = """
    import time
    print(ask('x'), os.getcwd(), os.environ['HOME'], os.environ['TMPDIR'], os.listdir('.'))
    open('mine', 'w').write(''), time.sleep(0.2)
    print(sorted(os.listdir('.')), os.listdir(os.environ['HOME']))
    """
    outputs = {each.item.output_obj for each in await run(code, *[{"folder": "a"}] * 3, reward=None)}
    home = f"{tempfile.gettempdir()}/reinforge-{os.getuid()}"
    assert outputs == {f"yes {home}/workspace {home}/home {home}/tmp ['sum.py']\n['mine', 'sum.py'] []"}
    assert os.listdir(home) == [], "other processes see none of it"


async def test_where_mounts_are_forbidden_a_few_paths_are_used_again(run, monkeypatch, caplog):
    monkeypatch.setattr(workspace, "can_mount", lambda folder: False)
    records = await run(FIX + "print(os.getcwd())", *[{"folder": "a"}] * 3)
    assert [await score(record) for record in records] == [1.0] * 3
    assert {Path(record.item.output_obj).parent.name for record in records} <= set("012")
    assert [record.message for record in caplog.records if "allows no mounts" in record.message] != []
    with pytest.raises(ConfigError, match=r"workspace\.path: this machine lets no program see"):
        await run("", workspace={"path": "/proc/testbed"})


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
        (project / "tasks/a/inside").unlink()
        (project / "tasks/a/inside").symlink_to(target)
        (record,) = await run("", reward=None)
        assert "tasks/a/inside is a link that leads out of its folder" in record.reason


HIDE = {
    "folder": "os.symlink(outside, 'tests')",
    "file": "os.mkdir('tests'); os.symlink(outside + '/kept.py', 'tests/check.py')",
    "workspace": "here = os.getcwd(); shutil.rmtree(here); os.symlink(outside, here)",
    "unwritable": "os.mkdir('tests'); open('tests/check.py', 'w').write(''); os.chmod('tests', 0o500)",
}


@pytest.mark.parametrize("code", HIDE.values(), ids=HIDE)
async def test_the_tests_replace_what_the_agent_prepared_and_nothing_outside(run, project, monkeypatch, code):
    monkeypatch.setattr(workspace, "can_mount", lambda folder: "here =" not in code)  # a mount cannot be removed
    write(project / "tests/a/tests/check.py", CHECK)
    (project / "tests/a/check.py").unlink()
    outside = project / "outside"
    write(outside / "kept.py", "kept")
    command = [PYTHON, "-c", "import os, sys; sys.path[:0] = ['.', 'tests']; import check"]
    (record,) = await run(f"import shutil\noutside = {str(outside)!r}\n{code}", reward={**REWARD, "command": command})
    assert await score(record) == 0.0
    assert [(path.name, path.read_text()) for path in outside.iterdir()] == [("kept.py", "kept")]


@pytest.mark.slow
async def test_what_the_agent_left_running_is_dead_when_its_work_is_scored(run):
    code = """
    import subprocess, time
    writer = "import time\\nwhile True: open('check.py', 'w').write(''); time.sleep(0.001)"
    subprocess.Popen([sys.executable, "-c", writer], start_new_session=True, env={}, stdout=-3, stderr=-3)
    while not os.path.exists("check.py"):
        time.sleep(0.01)
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


@pytest.mark.slow
async def test_the_command_of_the_reward_starts_without_anything_that_the_agent_prepared(run, project, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "canary")
    write(project / "tasks/a/deep/conftest.py", "as it was")
    write(project / "tests/a/check.py", CLEAN)
    code = """
    home, temporary = os.environ["HOME"], os.environ["TMPDIR"]
    for name in ("sitecustomize.py", "deep/conftest.py", "__pycache__/check.pyc", f"{home}/.x", f"{temporary}/x"):
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        open(name, "w").write("raise SystemExit(0)")
    """
    (record,) = await run(code, env={"OWN": "1"})
    assert await score(record) == 1.0
    (project / "tests/a/check.py").write_text("import os; assert sorted(os.listdir()) == ['check.py', 'deep']")
    (record,) = await run(code, workspace={"copy": None})
    assert await score(record) == 1.0, "an empty workspace has none of these files"


CASE = "<testcase/><testcase><failure/></testcase><testcase><error/></testcase><testcase><skipped/></testcase>"
REWARDS = [
    ("exit_code", 0, "", "", 1.0),
    ("exit_code", 1, "", "", 0.0),
    ("exit_code", 127, "sh: no such program", "", "exited with code 127: sh: no such program"),
    ("exit_code", -9, "", "", "was killed by SIGKILL: "),
    ("last_number", 0, "3 of 4\nscore -0.25e1 %", "", -2.5),
    ("last_number", 0, "none", "", "exited with code 0 and wrote no number: none"),
    ("last_number", 1, "5", "", "exited with code 1 and wrote no number: 5"),
    ("junit", 1, "", f"<suite>{CASE}<testcase/></suite>", 0.5),
    ("junit", 0, "", "<suite><testcase><skipped/></testcase></suite>", "exited with code 0 and ran no test: "),
    ("junit", 0, "", "<suite>", "its report cannot be read"),
]


@pytest.mark.parametrize(("parse", "code", "output", "report", "expected"), REWARDS)
def test_how_a_reward_is_read_and_that_unknown_is_never_0(tmp_path, parse, code, output, report, expected):
    (tmp_path / "report.xml").write_text(report)
    try:
        found = read_reward(parse, ProgramResult(code, output.encode(), b""), tmp_path / "report.xml")["reward"]
    except workspace.WorkspaceError as error:
        found = str(error)
    assert found == expected or expected in found


@pytest.mark.slow
async def test_a_command_without_a_reward_is_a_missing_reward(run):
    slow = {"command": [PYTHON, "-c", "import time; time.sleep(60)"], "timeout_s": 0.5}
    infinite = {"command": [PYTHON, "-c", "print('1e999')"], "parse": "last_number"}
    rewards = [{"command": "no-such-program"}, slow, {**slow, "timeout_reward": -1.0}, infinite]
    found = [await score((await run("", reward=reward))[0]) for reward in rewards]
    assert found[2] == -1.0
    for error, reason in zip(found, ("cannot be started", "took more than 0.5 s", "", "is inf"), strict=True):
        assert reason in str(error)


@pytest.mark.slow
async def test_a_diff_is_short_and_follows_no_link(run, project):
    write(project / "tasks/a/gone.py", "old\n")
    write(project / "tasks/a/folder/linked.py", "old\n")
    write(project / "secret/linked.py", "secret\n")
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
    assert {"binary: changed", "long: changed", "--- a/folder/linked.py", "-old"} <= set(diff.splitlines())
    assert ("secret" in diff, 19_000 < len(diff) < 21_000) == (False, True)


ROWS = [
    ({}, REWARD, "the example 0: tasks/{folder}: the row has no column folder"),
    ({"folder": "../tests/a"}, REWARD, "folder is '../tests/a', which leads out of the folder"),
    ({"folder": "/etc"}, REWARD, "folder is '/etc', which leads out of the folder"),
    ({"folder": "b"}, REWARD, "there is no folder"),
    ({"folder": "a"}, {**REWARD, "copy": "hidden/{folder}"}, "example 0: hidden/{folder}: there is no folder"),
    ({"folder": "a"}, {"command": ["x", "{name}"]}, "example 0: {name}: the row has no column name"),
]


@pytest.mark.parametrize(("row", "reward", "message"), ROWS)
async def test_a_row_without_its_folder_is_told_before_work_starts(run, row, reward, message):
    with pytest.raises(AssertionError, match=re.escape(message)):
        await run("", row, reward=reward)


REFUSED = [
    ({"workspace": None, "reward": REWARD}, "need a workspace"),
    ({"home_files": {"../x": ""}}, "must be a path inside the folder of the episode"),
    ({"workspace": {"path": "testbed"}}, "workflow.workspace.path"),
    ({"reward": {"command": "pytest", "parse": "junit"}}, "needs {report} in the command"),
    ({"preset": "gemini_cly"}, "preset 'gemini_cly': there are aider"),
    ({"preset": "aider", "command": None}, 'there is no program "aider" in PATH\n    fix: pip install aider-chat'),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
async def test_settings_that_cannot_work_are_refused(tmp_path, monkeypatch, settings, message):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    settings = {"_type": "command", "command": [PYTHON], "workspace": {}, **settings}
    with pytest.raises(ConfigError, match=re.escape(message)):
        await open_workflow(tmp_path, settings, makes_models=False).__aenter__()


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
async def test_a_preset_gives_a_program_its_task_its_model_and_a_home(tmp_path, monkeypatch, preset):
    program = tmp_path / PRESETS[preset]["command"][0]
    write(program, '#!/bin/sh\necho "$@"; env; cat; find "$HOME/.." -type f -exec cat {} +\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    async with open_workflow(tmp_path, {"_type": "command", "preset": preset, "env": {"X": "{model}"}}) as workflow:
        (record,) = await run_items(make_runner(workflow, ScriptedPolicy(), timeout_s=60), examples(1))
    output = record.item.output_obj
    assert ("question 0" in output, "\nX=agent\n" in output, "{model}" in output) == (True, True, False)
    assert output.replace("X=agent", "").replace("REINFORGE_MODEL=agent", "").count("agent") > 0, "the model"


def test_each_preset_has_lines_to_copy():
    blocks = re.findall(r"^```yaml\n(.*?)^```", (DOCS / "coding-agents.md").read_text(), re.MULTILINE | re.DOTALL)
    configs = [CommandWorkflowConfig.model_validate(yaml.safe_load(block)["workflow"]) for block in blocks]
    assert sorted(config.preset for config in configs) == sorted(PRESETS)
    for config, block in zip(configs, blocks, strict=True):
        assert (config.reward.parse, f"# {PRESETS[config.preset]['install']}\n" in block) == ("junit", True)


async def test_a_container_gets_the_workspace_and_the_image_of_the_row(run, project, monkeypatch):
    write(project / "docker", f'#!/bin/sh\necho "$@" >> {project}/calls\n')
    (project / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{project}:/usr/bin:/bin")
    settings = {"container": {"image": "repo/{name}:1", "engine": "docker"}, "workspace": {"path": "/testbed"}}
    (record,) = await run("", {"folder": "a", "name": "x"}, **settings)
    assert await score(record) == 1.0, "the stand-in exits with code 0"
    program, _, reward, _ = (project / "calls").read_text().splitlines()
    home = f"--env HOME={tempfile.gettempdir()}/reinforge-{os.getuid()}/home --env TMPDIR"
    for part in ("/workspace:/testbed --workdir /testbed", home, f"repo/x:1 {PYTHON}"):
        assert (part in program, part in reward) == (True, True)
    assert ("OPENAI_API_KEY" in program, "OPENAI_API_KEY" in reward) == (True, False)
