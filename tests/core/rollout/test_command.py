"""Programs as agents: what they get, how their answers are read, and that nothing of them outlives its episode."""

import json
import os
import shutil
import sys
import textwrap

import pytest

from reinforge.errors import ConfigError
from reinforge.rollout.workflows import program_runner
from reinforge.rollout.workflows.container import Container
from reinforge.rollout.workflows.program_runner import ProgramLimits
from reinforge.rollout.workflows.workspace import Place
from reinforge.types.trajectory import Outcome
from tests.doubles import examples
from tests.outside_agents import NODE_AGENT, PYTHON_AGENT, find_processes_in, open_workflow, run_episodes
from tests.processes import find_survivors

PYTHON = sys.executable


@pytest.fixture(autouse=True)
def _no_guard(monkeypatch):
    """Whatever an episode leaves behind stays visible: at the end of a run the guard would kill it."""
    monkeypatch.setattr(program_runner, "GUARD", "import sys; sys.stdin.buffer.read()")


@pytest.fixture
def agent(tmp_path):
    async def run(code, *inputs, script=lambda request: "yes", timeout_s=30.0, arguments=(), **settings):
        (tmp_path / "agent.py").write_text(PYTHON_AGENT + textwrap.dedent(code))
        settings = {"_type": "command", "command": [PYTHON, "agent.py", *arguments], **settings}
        async with open_workflow(tmp_path, settings) as workflow:
            return await run_episodes(workflow, script, inputs or ("question",), timeout_s=timeout_s)

    return run


async def test_a_temporary_folder_of_the_user_is_kept(agent, tmp_path):
    (record,) = await agent("print(os.environ['TMPDIR'])", env={"TMPDIR": str(tmp_path)})
    assert record.item.output_obj == str(tmp_path)


def echo(request):
    return f"said {request.messages[-1]['content']}"


async def test_a_program_gets_its_task_and_its_calls_are_recorded(agent):
    records = await agent("print(ask(sys.stdin.read()))", "one", "two", script=echo)
    assert [record.item.output_obj for record in records] == ["said one", "said two"]
    assert [[call.request.messages for call in record.calls] for record in records] == [
        [[{"role": "user", "content": "one"}]],
        [[{"role": "user", "content": "two"}]],
    ]
    assert [bytes(record.calls[0].reply.tokens.token_ids) for record in records] == [b"said one", b"said two"]
    assert {record.outcome for record in records} == {Outcome.OK}


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"input": "stdin"}, "task = sys.stdin.read()"),
        ({"input": "file"}, "task = open(os.environ['REINFORGE_INPUT_FILE'], encoding='utf-8').read()"),
        ({"input": "file", "arguments": ["--in={input}"]}, "task = open(sys.argv[1][5:], encoding='utf-8').read()"),
        ({"input": "argument"}, "task = sys.argv[1]"),
        ({"input": "argument", "arguments": ["{input}", "end"]}, "task = sys.argv[1]; assert sys.argv[2] == 'end'"),
    ],
)
async def test_ways_to_give_the_task(agent, settings, code):
    tasks = ["Ümlaut 漢字\nline {input} {output}", {"board": ["x", None]}]
    records = await agent(f"{code}\nprint(json.dumps(task))", *tasks, output="last_line_json", **settings)
    assert [record.item.output_obj for record in records] == [tasks[0], json.dumps(tasks[1])]


@pytest.mark.parametrize(
    ("settings", "code", "answer"),
    [
        ({"output": "stdout"}, "print('two\\nlines')", "two\nlines"),
        ({"output": "last_line_json"}, "print('log'); print('{\"a\": [1]}'); print()", {"a": [1]}),
        ({"output": "file"}, "open(os.environ['REINFORGE_OUTPUT_FILE'], 'w').write('in a file\\n')", "in a file\n"),
        ({"output": "file", "arguments": ["{output}"]}, "open(sys.argv[1], 'w').write('there')", "there"),
        ({"output": "stdout"}, "sys.stdout.buffer.write(b'caf\\xe9')", "caf\ufffd"),
    ],
)
async def test_ways_to_read_the_answer(agent, settings, code, answer):
    (record,) = await agent(code, **settings)
    assert (record.outcome, record.item.output_obj) == (Outcome.OK, answer)


async def test_a_program_knows_its_episode(agent, tmp_path):
    names = ["REINFORGE_EXAMPLE_ID", "REINFORGE_IS_TRAINING", "REINFORGE_MODEL", "OWN"]
    code = f"print(json.dumps([os.environ[name] for name in {names}] + [os.getcwd(), os.environ['REINFORGE_SEED']]))"
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "agent.py").write_text("")
    (record,) = await agent(
        code, cwd="below", command=[PYTHON, "../agent.py"], env={"OWN": "1"}, output="last_line_json"
    )
    assert record.item.output_obj == ["0", "1", "agent", "1", str(tmp_path / "below"), str(record.seed)]


SECRETS = {"AWS_SECRET_ACCESS_KEY": "canary-1", "MY_SETTING": "canary-2", "OPENAI_API_KEY": "canary-3"}


async def dump_environment(agent, monkeypatch, **settings):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    (record,) = await agent("print(json.dumps(dict(os.environ)))", output="last_line_json", **settings)
    return record.item.output_obj


async def test_the_environment_is_clean_but_for_what_is_named(agent, monkeypatch):
    found = await dump_environment(agent, monkeypatch, env={"NAMED": "${AWS_SECRET_ACCESS_KEY}"})
    assert [name for name, value in found.items() if "canary" in value] == ["NAMED"]
    assert found["OPENAI_API_KEY"].startswith("sk-episode-")
    assert found["OPENAI_BASE_URL"].startswith("http://127.0.0.1:")
    assert found["PATH"] == os.environ["PATH"]
    assert not os.path.exists(found["TMPDIR"]), "the episode's own folder is removed"


FAILURES = [
    ("import sys; print('no', file=sys.stderr); sys.exit(3)", "exited with code 3:\nno", {}),
    ("raise KeyError('place')", "KeyError: 'place'", {}),
    ("os.kill(os.getpid(), 11)", "was killed by SIGSEGV", {}),
    (
        "print('hello')",
        "is not JSON (Expecting value: line 1 column 1 (char 0)): 'hello'",
        {"output": "last_line_json"},
    ),
    ("pass", "wrote nothing to its standard output, whose last line is the answer", {"output": "last_line_json"}),
    ("pass", "no answer in the file REINFORGE_OUTPUT_FILE: it wrote none", {"output": "file"}),
    ("os.symlink('/etc/passwd', os.environ['REINFORGE_OUTPUT_FILE'])", "no answer in the file", {"output": "file"}),
    ("os.mkfifo(os.environ['REINFORGE_OUTPUT_FILE'])", "output is not a regular file", {"output": "file"}),
    ("ask('x', temperature='warm')", "HTTP Error 400", {}),
    ("print(os.environ['OPENAI_API_KEY'], file=sys.stderr); sys.exit(1)", "exited with code 1:\n***", {}),
]


@pytest.mark.parametrize(("code", "reason", "settings"), FAILURES, ids=range(len(FAILURES)))
async def test_a_failure_costs_its_episode_and_says_why(agent, code, reason, settings):
    (record,) = await agent(code, **settings)
    assert record.outcome is Outcome.TOOL_ERROR
    assert reason in record.reason


@pytest.mark.slow
async def test_failures_of_the_policy(agent):
    """The program says so, or the answer that is not JSON is what the policy wrote."""
    (by_code,) = await agent("ask('x'); print('out'); sys.exit(9)", policy_error_codes=[9])
    (by_answer,) = await agent("print('log'); print(ask('x'))", script=lambda _: " {no json}", output="last_line_json")
    assert (by_code.outcome, by_code.item.output_obj) == (Outcome.POLICY_ERROR, "out\n")
    assert by_answer.outcome is Outcome.POLICY_ERROR
    assert by_answer.reason.endswith("the policy wrote it")


async def test_a_program_that_never_calls_the_model_is_named_once(agent, caplog):
    await agent("print(1)", "a", "b")
    told = [record.message for record in caplog.records if "without calling the model" in record.message]
    assert len(told) == 1
    assert "agent.py has answered" in told[0]
    assert "OPENAI_BASE_URL" in told[0]


async def test_standard_output_is_bounded(agent, set_limit):
    set_limit("program_output_bytes", 1 << 20)
    (record,) = await agent("while True: print('x' * 4096)")
    assert (record.outcome, "wrote more than 1 MiB" in record.reason) == (Outcome.TOOL_ERROR, True)


CHILDREN = """
import subprocess, time
quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
same = subprocess.Popen(["sleep", "300"])
other = subprocess.Popen(["sleep", "300"], start_new_session=True, **quiet)
if os.fork() == 0:  # a daemon: its parent ends, and it leads a session of its own
    os.setsid()
    if os.fork():
        os._exit(0)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    open("daemon", "w").write(str(os.getpid()))
    time.sleep(300)
if os.fork() == 0:  # env -i setsid: without our environment, too
    os.setsid()
    if os.fork():
        os._exit(0)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    open("clean", "w").write(str(os.getpid()))
    os.execve("/bin/sleep", ["sleep", "300"], {})
os.wait(), os.wait()
while not all(os.path.exists(name) and open(name).read() for name in ("daemon", "clean")):
    time.sleep(0.01)
daemons = [int(open(name).read()) for name in ("daemon", "clean")]
open("pids", "w").write(json.dumps([os.getpid(), same.pid, other.pid, *daemons]))
"""


async def run_and_find_survivors(agent, folder, end, **options):
    (record,) = await agent(CHILDREN + end, **options)
    pids = json.loads((folder / "pids").read_text())
    names = dict(zip(pids, ("program", "child", "session", "daemon", "clean"), strict=True))
    alive = find_survivors(pids)
    survivors = sorted((names[each.pid] for each in alive), key=list(names.values()).index)
    for process in alive:
        process.kill()
    return record, survivors


@pytest.mark.parametrize(
    ("end", "options", "outcome"),
    [
        ("time.sleep(300)", {"timeout_s": 4.0}, Outcome.TIMEOUT),
        ("print('done')", {}, Outcome.OK),
        pytest.param("sys.exit(1)", {}, Outcome.TOOL_ERROR, marks=pytest.mark.fault),
        pytest.param("os.close(1); time.sleep(300)", {"timeout_s": 4.0}, Outcome.TIMEOUT, marks=pytest.mark.fault),
    ],
    ids=["timeout", "success", "failure", "closed"],
)
async def test_nothing_that_a_program_started_outlives_its_episode(agent, tmp_path, end, options, outcome):
    record, survivors = await run_and_find_survivors(agent, tmp_path, end, **options)
    assert (record.outcome, survivors) == (outcome, [])
    assert record.wall_s < 60


async def do_nothing(*arguments):
    pass


@pytest.mark.fault
async def test_without_ending_the_supervisor_its_processes_stay(agent, tmp_path, monkeypatch):
    """Mutation check."""
    monkeypatch.setattr(program_runner, "end_program", do_nothing)
    _, survivors = await run_and_find_survivors(agent, tmp_path, "time.sleep(300)", timeout_s=4.0)
    assert survivors == ["program", "child", "session", "daemon", "clean"]


@pytest.mark.fault
async def test_without_adoption_a_process_with_a_clean_environment_stays(agent, tmp_path, monkeypatch):
    """Mutation check."""
    code = program_runner.SUPERVISOR.read_text().replace("SET_CHILD_SUBREAPER, 1", "SET_CHILD_SUBREAPER, 0")
    (tmp_path / "supervisor.py").write_text(code)
    monkeypatch.setattr(program_runner, "SUPERVISOR", tmp_path / "supervisor.py")
    _, survivors = await run_and_find_survivors(agent, tmp_path, "time.sleep(300)", timeout_s=4.0)
    assert survivors == ["clean"]


@pytest.mark.fault
@pytest.mark.parametrize("marked", [True, False], ids=["marked", "mutation"])
async def test_a_program_that_kills_its_supervisor_leaves_what_has_no_mark(agent, tmp_path, monkeypatch, marked):
    """The mutation: marked processes are not looked for."""
    if not marked:
        monkeypatch.setattr(program_runner, "kill_marked", lambda mark: None)
    _, survivors = await run_and_find_survivors(agent, tmp_path, "os.kill(os.getppid(), 9); time.sleep(300)")
    assert survivors == (["clean"] if marked else ["program", "child", "session", "daemon", "clean"])


async def test_one_process_that_takes_too_much_memory_fails(agent):
    (record,) = await agent("x = bytearray(1 << 29); print(len(x))", max_memory_mb=128)
    assert (record.outcome, "MemoryError" in record.reason) == (Outcome.TOOL_ERROR, True)


TOGETHER = """
import subprocess, time
code = "import time; x = bytearray(48 << 20); x[::4096] = b'1' * len(x[::4096]); time.sleep(60)"
children = [subprocess.Popen([sys.executable, "-S", "-c", code]) for _ in range(4)]
time.sleep(60)
"""


async def test_processes_that_together_take_too_much_memory_are_killed(agent):
    (record,) = await agent(TOGETHER, max_memory_mb=128)
    assert (record.outcome, "more than max_memory_mb (128)" in record.reason) == (Outcome.TOOL_ERROR, True)


async def test_a_program_that_starts_too_many_processes_is_killed(agent, tmp_path):
    code = "import subprocess\nwhile True: subprocess.Popen(['sleep', '300'])"
    (record,) = await agent(code, max_processes=20)
    assert (record.outcome, "more than max_processes (20)" in record.reason) == (Outcome.TOOL_ERROR, True)
    assert find_processes_in(tmp_path) == []


REFUSED = [
    ({"command": "pythonn agent.py"}, 'workflow.command: there is no program "pythonn" in PATH, did you mean'),
    ({"command": "./gone"}, "workflow.command: there is no file"),
    ({"command": "./plain"}, "is not executable\n    fix: chmod +x"),
    ({"command": f"{PYTHON} agnt.py"}, 'agnt.py, did you mean "agent.py"?'),
    ({"command": [PYTHON], "cwd": "nowhere"}, "workflow.cwd: there is no folder"),
    ({"command": []}, "workflow.command: expected at least 1 items"),
    ({"command": [PYTHON], "env": {"OPENAI_BASE_URL": "x"}}, "OPENAI_BASE_URL is set by the run"),
    ({"command": [PYTHON], "env": {"REINFORGE_X": "x"}}, "REINFORGE_X is set by the run"),
    ({"command": [PYTHON], "input": "std"}, "'stdin', 'file' or 'argument'"),
    ({"command": [PYTHON], "container": {"image": "i", "engine": "podman"}}, "podman is not installed"),
    ({"command": [PYTHON], "container": {"image": "--privileged", "engine": "docker"}}, "is not the name of an image"),
    ({"command": [PYTHON], "cwd": "a:b", "container": {"image": "i", "engine": "docker"}}, "cannot be mounted"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=range(len(REFUSED)))
async def test_what_cannot_run_is_refused_before_work_starts(tmp_path, monkeypatch, settings, message):
    (tmp_path / "plain").write_text("")
    (tmp_path / "agent.py").write_text("")
    (tmp_path / "a:b").mkdir()
    (tmp_path / "docker").write_text("")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([os.path.dirname(PYTHON), "/usr/bin", "/bin", str(tmp_path)]))
    with pytest.raises(ConfigError) as caught:
        async with open_workflow(tmp_path, {"_type": "command", **settings}, makes_models=False):
            pass
    text = str(caught.value)
    assert message in text
    assert text.startswith(f"{tmp_path}/run.yml:"), "with file and line"


async def test_a_task_that_can_be_no_argument_is_told_before_work_starts(tmp_path):
    (item,) = examples(1)
    settings = {"_type": "command", "command": [PYTHON, "-V"], "input": "argument"}
    for task, message in ((("x" * 200_000), "is longer than 131,071 bytes"), ("a\0b", "contains a NUL character")):
        item.input_obj = task
        async with open_workflow(tmp_path, settings, makes_models=False) as workflow:
            (problem,) = workflow.example_problems([item])
        assert f"example 0 {message}" in problem.message


async def test_a_check_opens_no_port_and_runs_nothing(tmp_path):
    async with open_workflow(tmp_path, {"_type": "command", "command": [PYTHON, "-V"]}, makes_models=False) as workflow:
        assert workflow.source == f"{PYTHON} -V"
        assert workflow.function.accesses.gateway is None


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
async def test_a_node_program(tmp_path):
    (tmp_path / "agent.mjs").write_text(NODE_AGENT)
    settings = {"_type": "command", "command": "node agent.mjs", "output": "last_line_json", "max_memory_mb": 512}
    async with open_workflow(tmp_path, settings) as workflow:
        (record,) = await run_episodes(workflow, echo, ["task"])
    assert (record.outcome, record.item.output_obj) == (Outcome.OK, {"answer": "said task"}), record.reason
    assert bytes(record.calls[0].reply.tokens.token_ids) == b"said task"


ENGINE = """#!{python} -S
import json, os, sys
folder = os.path.dirname(os.path.realpath(__file__))
with open(folder + "/calls", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1] == "run":
    names = [sys.argv[i + 1] for i, part in enumerate(sys.argv) if part == "--env"]
    inside = {{name: os.environ[name] for name in names}}
    command = sys.argv[sys.argv.index("repo/agent:1") + 1 :]
    os.execvpe(command[0], command, {{"PATH": os.environ["PATH"], **inside}})
"""
"""An engine's client that runs the command without a container."""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    def install(name):
        engine = tmp_path / "bin" / name
        engine.parent.mkdir()
        engine.write_text(ENGINE.format(python=PYTHON))
        engine.chmod(0o755)
        monkeypatch.setenv("PATH", f"{engine.parent}:/usr/bin:/bin")
        return lambda: [json.loads(line) for line in (engine.parent / "calls").read_text().splitlines()]

    return install


async def test_a_container_gets_the_variables_and_the_limits_and_is_removed(tmp_path, monkeypatch, engine):
    read_calls = engine("podman")
    monkeypatch.setenv("CONTAINER_HOST", "unix:///somewhere")
    monkeypatch.setenv("SECRET_KEY", "canary")
    code = "print(json.dumps([ask('x'), sorted(os.environ), open(os.environ['REINFORGE_INPUT_FILE']).read()]))"
    (tmp_path / "agent.py").write_text(PYTHON_AGENT + code)
    settings = {
        "_type": "command",
        "command": [PYTHON, "agent.py"],
        "input": "file",
        "output": "last_line_json",
        "env": {"OWN": "1"},
        "max_memory_mb": 256,
        "max_processes": 32,
        "container": {"image": "repo/agent:1"},
    }
    async with open_workflow(tmp_path, settings) as workflow:
        (record,) = await run_episodes(workflow, echo)
    assert record.outcome is Outcome.OK, record.reason
    reply, names, task = record.item.output_obj
    assert (reply, task) == ("said x", "question")
    assert "OWN" in names
    assert not {"SECRET_KEY", "CONTAINER_HOST", "HOME"} & set(names)
    run, remove = read_calls()
    assert remove == ["rm", "--force", run[run.index("--name") + 1]]
    text = " ".join(run)
    for part in (
        "run --rm --interactive --init --name reinforge-",
        "--network host --cap-drop ALL --security-opt no-new-privileges",
        f"--user {os.getuid()}:{os.getgid()}",
        f"--volume {tmp_path}:{tmp_path}:ro --workdir {tmp_path}",
        "--memory 256m --memory-swap 256m --pids-limit 32",
        "--env OPENAI_API_KEY",
        f"repo/agent:1 {PYTHON} agent.py",
    ):
        assert part in text
    assert "sk-episode-" not in text, "any user of the machine can read arguments"


def test_podman_without_root_keeps_the_user_who_owns_the_mounted_folders(tmp_path, monkeypatch):
    def build(client):
        container = Container(client, "image", True)
        place = Place(tmp_path, tmp_path, tmp_path)
        return container.build_command(["x"], place, name="n", variables={}, limits=ProgramLimits())

    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert "--userns=keep-id" in build("/usr/bin/podman")
    assert "--userns=keep-id" not in build("/usr/bin/docker")
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert "--userns=keep-id" not in build("/usr/bin/podman")


async def test_a_container_that_outlives_its_client_is_removed(tmp_path, engine):
    read_calls = engine("docker")
    settings = {"_type": "command", "command": "sleep 300", "container": {"image": "repo/agent:1", "mount_cwd": False}}
    async with open_workflow(tmp_path, settings) as workflow:
        (record,) = await run_episodes(workflow, timeout_s=1.0)
    assert record.outcome is Outcome.TIMEOUT
    calls = read_calls()
    assert [call[0] for call in calls] == ["run", "rm"]
    assert "--workdir" not in calls[0]
