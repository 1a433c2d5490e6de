"""A vLLM server that a run starts: it ends with the run, however the run ends."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from reinforge.adapters.local import LocalAdapter
from reinforge.adapters.local_config import LocalAdapterConfig
from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.engine.packages import is_installed
from reinforge.errors import BackendUnavailable
from reinforge.scale.vllm import process as vllm_process
from tests.processes import is_alive
from tests.scale.jobs import build_run_config, sample_group, train
from tests.scale.processes import MARK, finish, list_marked, run_alone, torchrun, wait_for_metrics, wait_for_none

ROOT = Path(__file__).parents[2]
GONE_S = 15.0
NEEDS_RAY = pytest.mark.skipif(not is_installed("ray"), reason="needs the extra `ray`")


@pytest.fixture
def python(tmp_path):
    """The interpreter of an environment in which the stand-in is installed as vLLM."""
    program = tmp_path / "env" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    (tmp_path / "env" / "lib" / "python3.11" / "site-packages" / "vllm-0.32.0.dist-info").mkdir(parents=True)
    return program


def build_launch(python, **environment):
    paths = os.pathsep.join([str(ROOT / "tests" / "scale" / "vllm_standin"), str(ROOT)])
    return {"python": str(python), "environment": {"PYTHONPATH": paths, **environment}}


def build_adapter(python, replicas=1, **environment):
    launch = {**build_launch(python, **environment), "replicas": replicas}
    return LocalAdapter(LocalAdapterConfig(sampler={"_type": "vllm", "launch": launch}), GRPO(GRPOConfig()))


def find_processes(adapter, place=0):
    """Returns a server's processes: the one that watches, the server, and what the server started."""
    watcher = psutil.Process(adapter._sampler.servers[place].process._process.pid)
    found = [watcher, *watcher.children(recursive=True)]
    assert len(found) == 3, found
    return found


def wait_until_gone(processes):
    deadline = time.monotonic() + GONE_S
    while alive := list(filter(is_alive, processes)):
        if time.monotonic() > deadline:
            return alive
        time.sleep(0.05)
    return []


@pytest.mark.slow
async def test_a_launched_server_trains_and_ends_with_the_adapter(python, tiny_model_dir):
    adapter = build_adapter(python)
    await adapter.initialize(build_run_config(tiny_model_dir, kv_cache_mb=2048))
    try:
        groups = [await sample_group(adapter.policy(), number) for number in range(3)]
        await train(adapter, groups, 0)
        assert (await sample_group(adapter.policy(), 1))[0].episode[1].logprobs.policy_version == 1
        processes, folder = find_processes(adapter), adapter._sampler.servers[0].process.folder
        assert folder.stat().st_mode & 0o077 == 0, "nobody else reaches the socket"
        assert not list((folder / "model").glob("*.safetensors")), "the server has read the first weights"
        assert len(list(folder.glob("reinforge-*"))) == 1, "older weights are removed"
        command = processes[1].cmdline()
        assert command[command.index("--kv-cache-memory-bytes") + 1] == str(2048 * 2**20)
        assert "--no-enable-chunked-prefill" in command, "a seeded prompt is never split on a CPU"
        assert int(command[command.index("--max-num-batched-tokens") + 1]) >= int(
            command[command.index("--max-model-len") + 1]
        )
        assert command[command.index("--logprobs-mode") + 1] == "processed_logprobs"
    finally:
        await adapter.cleanup()
    assert not wait_until_gone(processes)
    assert not folder.exists()


async def test_a_server_that_cannot_start_is_an_error_with_its_log(python, tiny_model_dir):
    adapter = build_adapter(python, STANDIN_FAILS="ValueError: no such head size: 8")
    with pytest.raises(
        BackendUnavailable, match=r"the vLLM server exited with code 1; .*\nValueError: no such"
    ) as told:
        await adapter.initialize(build_run_config(tiny_model_dir))
    assert adapter.engine is None
    log = Path(re.search(r"its log \((.+?)\)", str(told.value))[1])
    assert [path.name for path in log.parent.iterdir()] == ["server-0.log"], "it is kept, and the weights are not"
    shutil.rmtree(log.parent)


HEAD = "(EngineCore pid=7) ERROR 11-24 10:00:00 [core.py:1] "


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        (
            [
                "INFO: started",
                f"{HEAD}Traceback (most recent call last):",
                f'{HEAD}  File "sampler.py", line 3',
                f"{HEAD}RuntimeError: CPU Generator does not use offset",
                f"{HEAD}The above exception was the cause of:",
                "Traceback (most recent call last):",
                "EngineDeadError: see the stack trace above",
            ],
            (True, slice(1, 4)),
        ),
        (["INFO: started", "", "Killed"], (False, slice(0, 3, 2))),
    ],
)
def test_the_first_traceback_of_a_log_is_shown(log, shown):
    assert vllm_process.read_traceback(line + "\n" for line in log) == (shown[0], log[shown[1]])


@pytest.mark.slow
async def test_one_of_two_servers_that_dies_is_replaced(python, tiny_model_dir):
    adapter = build_adapter(python, replicas=2)
    await adapter.initialize(build_run_config(tiny_model_dir))
    sampler = adapter._sampler
    try:
        lost = find_processes(adapter, 1)[1]
        lost.kill()
        groups = await asyncio.gather(*(sample_group(adapter.policy(), number) for number in range(4)))
        await asyncio.wait_for(asyncio.shield(sampler._replacing[1]), 60)
        await train(adapter, groups, 0)
        assert find_processes(adapter, 1)[1].pid != lost.pid
        paths = [await server.client.get_weight_label() for server in sampler.servers.values()]
        assert paths == [sampler.label] * 2
        assert {each.episode[1].logprobs.policy_version for each in await sample_group(adapter.policy(), 1)} == {1}
    finally:
        await adapter.cleanup()
    assert not sampler._folder.exists(), "a log is kept only if its server was not replaced"


@pytest.mark.slow
async def test_a_server_that_dies_takes_its_processes_along_and_is_an_error(python, tiny_model_dir):
    adapter = build_adapter(python)
    await adapter.initialize(build_run_config(tiny_model_dir))
    try:
        watcher, server, engine = find_processes(adapter)
        server.kill()
        assert not wait_until_gone([watcher, engine])
        with pytest.raises(BackendUnavailable, match="the vLLM server exited with code 137; the end of its log"):
            await sample_group(adapter.policy(), 1)
    finally:
        await adapter.cleanup()


RUN = """
import asyncio, json, sys
sys.path.insert(0, {root!r})
from tests.scale import test_vllm_launch as own
from tests.scale.jobs import build_run_config

async def main():
    adapter = own.build_adapter({python!r})
    await adapter.initialize(build_run_config({model!r}))
    pids = [each.pid for each in own.find_processes(adapter)]
    print(json.dumps([*pids, str(adapter._sampler.servers[0].process.folder)]))
    sys.stdout.flush()
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param(True, id="supervised", marks=pytest.mark.slow),
        pytest.param(False, id="mutation", marks=pytest.mark.fault),
    ],
)
def test_a_launched_server_ends_when_the_run_is_killed(python, tiny_model_dir, tmp_path, kept):
    """The mutation: a process that watches nothing, as if vLLM had been started directly."""
    code = RUN.format(root=str(ROOT), python=str(python), model=str(tiny_model_dir))
    if not kept:
        lonely = "import subprocess, sys, time; subprocess.Popen(sys.argv[3:]); time.sleep(600)"
        file = tmp_path / "supervise.py"
        file.write_text(lonely)
        plugin = f"from reinforge.scale.vllm import process as vllm_process; vllm_process.SUPERVISOR = {str(file)!r}"
        code = code.replace("import asyncio, json, sys\n", f"import asyncio, json, sys\n{plugin}\n")
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    *pids, folder = json.loads(run.stdout.readline())
    processes = [psutil.Process(pid) for pid in pids]
    started = time.monotonic()
    run.send_signal(signal.SIGKILL)
    run.wait(10)
    if kept:
        assert not wait_until_gone(processes)
        assert time.monotonic() - started < GONE_S
        assert not Path(folder).exists()
        return
    assert all(map(is_alive, processes))
    for process in processes:
        process.kill()
    shutil.rmtree(folder)


def test_the_servers_environment_has_no_key_of_ours(monkeypatch, python, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    monkeypatch.setenv("VLLM_API_KEY", "k")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    adapter = build_adapter(python, EXTRA="1")
    process = vllm_process.VLLMProcess(adapter.adapter_config.sampler.launch, tmp_path, tmp_path, "server", "2,3")
    found = process._build_environment()
    assert not {"OPENAI_API_KEY", "VLLM_API_KEY"} & found.keys()
    assert (found["VLLM_LOGGING_LEVEL"], found["CUDA_VISIBLE_DEVICES"], found["EXTRA"]) == ("DEBUG", "2,3", "1")
    assert found["PYTHONPATH"].split(os.pathsep)[0] == str(vllm_process.PLUGIN)


@pytest.mark.fault
@pytest.mark.timeout(400)
def test_a_run_differs_by_one_block_survives_a_kill_and_resumes(project, python, monkeypatch):
    """The whole command: killed in its second epoch, nothing is left of the server, and a new one goes on."""
    mark = str(project.folder)
    project.set("trainer_adapters.adapter.sampler", {"_type": "vllm", "launch": build_launch(python, **{MARK: mark})})
    project.set("finetuning.num_epochs", 3).set("trajectory_builders.builder.examples_per_epoch", 4)
    project.rows = project.rows[:16]
    project.set("finetuning.gate.allow_no_verdict", True)
    project.write_files()
    command = [sys.executable, "-m", "reinforge", "finetune", "run.yml"]
    run = subprocess.Popen([*command, "--run_name", "r"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics = wait_for_metrics(project, run)
    assert len(list_marked(mark)) >= 2, "the server and what it started"
    run.kill()
    run.communicate()
    wait_for_none(mark, GONE_S)
    done = subprocess.run([*command, "--resume", "r"], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode in (0, 3), done.stdout + done.stderr
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [0, 1, 2]
    assert list_marked(mark) == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("sharding", "policy", "by_ray"),
    [
        pytest.param("full", {}, False, id="full_weights", marks=pytest.mark.slow),
        pytest.param("replicate", {"lora": {"rank": 4}}, False, id="lora", marks=pytest.mark.fault),
        pytest.param("full", {}, True, id="ray", marks=[pytest.mark.fault, NEEDS_RAY]),
    ],
)
def test_two_processes_train_while_two_servers_sample(project, python, sharding, policy, by_ray):
    """Samplers, trainers and overlap together, as on machines with GPUs for each."""
    if by_ray:
        project.set("trainer_adapters.adapter", {"_type": "ray", "num_workers": 2})
    launch = {**build_launch(python, **{MARK: str(project.folder)}), "replicas": 2}
    project.set("trainer_adapters.adapter.sampler", {"_type": "vllm", "launch": launch})
    project.set("trainer_adapters.adapter.sharding", sharding).set("finetuning.limits.max_staleness", 1)
    project.set("finetuning.num_epochs", 3).set("trajectory_builders.builder.examples_per_epoch", 4)
    for name, value in policy.items():
        project.set(f"finetuning.policy.{name}", value)
    project.rows = project.rows[:16]
    project.set("finetuning.gate.allow_no_verdict", True)
    project.write_files()
    start = run_alone if by_ray else torchrun
    output = finish(start(project, "finetune", "run.yml", "--run_name", "r"), codes=(0, 3))
    assert "Traceback" not in output
    rows = project.metrics
    assert [row["epoch"] for row in rows] == [0, 1, 2]
    assert max(row["staleness_max"] for row in rows) == 1, "an epoch was sampled while another trained"
    assert rows[0]["mismatch"] < 1e-3, "of tokens that the current weights sampled"
    assert list_marked(project.folder) == []
