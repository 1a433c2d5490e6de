"""Processes of torchrun: who is who, where they connect, what they refuse, and calls between them."""

import asyncio
import os
import socket
import threading
from concurrent.futures import CancelledError
from multiprocessing.connection import Listener, Pipe

import pytest

from reinforge.adapters.local import check_sharding
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import BackendUnavailable, ConfigError, EngineError, ReinforgeError
from reinforge.scale.torchrun import place as torchrun
from reinforge.scale.torchrun.calls import CallServer, WorkerClient, WorkerLoop
from reinforge.scale.torchrun.place import (
    ENDED,
    TorchrunPlace,
    announce,
    check_socket,
    check_torchrun,
    choose_gpu,
    find_place,
    wait_for_announcement,
)

ENVIRONMENT = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29400",
}


def test_torchrun_says_which_process_this_is():
    assert find_place({}) is None
    assert find_place({**ENVIRONMENT, "WORLD_SIZE": "1"}) is None, "a single process needs no other"
    assert find_place(ENVIRONMENT) == TorchrunPlace(1, 4, 4, ("localhost", 29400), 0)
    assert find_place({**ENVIRONMENT, "TORCHELASTIC_RESTART_COUNT": "2"}).attempt == 2


@pytest.mark.parametrize(
    ("changes", "backend", "staleness", "sampler", "message"),
    [
        ({}, "ray", 0, False, "4 processes, which `_type: ray` does not use"),
        ({"LOCAL_WORLD_SIZE": "2"}, "local", 0, False, "on several machines, 2 of them here"),
        ({}, "local", 1, False, "sampled while a job trains by one process or by a vLLM sampler"),
        ({}, "local", 1, True, None),
        ({}, "local", 0, False, None),
    ],
)
def test_what_torchrun_cannot_start_is_refused_before_anything_runs(
    monkeypatch, changes, backend, staleness, sampler, message
):
    for name, value in {**ENVIRONMENT, **changes}.items():
        monkeypatch.setenv(name, value)
    problems = check_torchrun(backend, "trainer_adapters.adapter", max_staleness=staleness, has_sampler=sampler)
    assert [message in problem.message for problem in problems] == ([] if message is None else [True])


@pytest.mark.parametrize(
    ("policy", "limits", "adapters", "word"),
    [
        ({}, {}, ("a", "b"), "2 adapters"),
        ({"quantization": "nf4", "lora": {}}, {}, (), "nf4"),
        ({}, {"max_staleness": 1}, (), "max_staleness"),
        ({}, {}, (), None),
    ],
)
def test_what_cannot_be_divided_is_refused_before_anything_runs(policy, limits, adapters, word):
    config = FinetuneConfig(policy=policy, limits=limits)
    found = [problem.message for problem in check_sharding("full", config, adapters, "x")]
    assert [word in message for message in found] == ([] if word is None else [True])
    assert check_sharding("auto", config, adapters, "x") == [], "which then replicates"


def test_a_sharded_model_is_trained_while_a_vllm_server_samples():
    config = FinetuneConfig(limits={"max_staleness": 1})
    assert check_sharding("full", config, (), "x", has_sampler=True) == []


def test_each_process_sees_the_gpu_of_its_rank(monkeypatch):
    place = TorchrunPlace(1, 2, 2, ("", 0))
    monkeypatch.setattr("reinforge.engine.devices.count_gpus", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    choose_gpu(place, "auto")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    choose_gpu(place, "cpu")
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    choose_gpu(place, "cuda")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.setattr("reinforge.engine.devices.count_gpus", lambda: 1)
    choose_gpu(place, "auto")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1", "its next run uses the same one"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match=r"2 processes, but this machine has 1 GPUs\n.*--nproc_per_node 1"):
        choose_gpu(place, "auto")


def bind(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def test_only_a_socket_of_this_user_is_believed(tmp_path, monkeypatch):
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    bind(folder / "socket")
    check_socket(folder / "socket")
    folder.chmod(0o755)
    with pytest.raises(EngineError, match="other users can open"):
        check_socket(folder / "socket")
    folder.chmod(0o700)
    (folder / "link").symlink_to(folder / "socket")
    with pytest.raises(EngineError, match="does not belong to this user"):
        check_socket(folder / "link")
    monkeypatch.setattr(torchrun.os, "getuid", lambda: 12345)
    with pytest.raises(EngineError, match="does not belong to this user"):
        check_socket(folder / "socket")


class DictStore:
    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        if self.values is None:
            raise RuntimeError("Connection reset by peer")
        return all(key in self.values for key in keys)


def test_workers_wait_for_one_run_after_the_other():
    store = DictStore()
    announce(store, 0, "/tmp/a/socket")
    announce(store, 1, ENDED)
    assert [wait_for_announcement(store, number) for number in (0, 1)] == ["/tmp/a/socket", ENDED]
    store.values = None
    with pytest.raises(BackendUnavailable, match="torchrun's store no longer answers"):
        wait_for_announcement(store, 2)


class ErrorWithCode(Exception):
    """What pickle keeps of it is not enough to make it again."""

    def __init__(self, message, code):
        super().__init__(message)
        self.code = code


def refuse():
    raise ImportError("No module named 'elsewhere'")


class Unreadable:
    def __reduce__(self):
        return refuse, ()


class Worker:
    def __init__(self):
        self.started, self.cancelled = threading.Event(), threading.Event()

    async def double(self, value):
        return value * 2

    async def fail(self):
        raise EngineError("no")

    async def fail_strangely(self):
        class Local(Exception):  # which pickle cannot find
            pass

        raise Local("odd")

    async def fail_with_a_code(self):
        raise ErrorWithCode("wrong", 7)

    async def answer_unreadably(self):
        return Unreadable()

    async def wait(self):
        self.started.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@pytest.fixture
def pair():
    ours, theirs = Pipe()
    worker = Worker()
    calls = WorkerLoop(worker)
    server = threading.Thread(target=CallServer(theirs, calls).serve, daemon=True)
    server.start()
    client = WorkerClient(ours, "process 1 of torchrun")
    yield worker, client, theirs
    client.close()
    server.join(10)
    assert not server.is_alive()
    calls.close()


def test_calls_return_values_and_errors_in_any_order(pair):
    _, client, _ = pair
    waiting = client.wait.remote()
    assert [client.double.remote(number).result(60) for number in range(3)] == [0, 2, 4]
    with pytest.raises(EngineError, match="no"):
        client.fail.remote().result(60)
    with pytest.raises(Exception, match="a worker failed: Local: odd"):
        client.fail_strangely.remote().result(60)
    assert not waiting.done()


@pytest.mark.timeout(60)
def test_an_error_that_cannot_be_made_again_here_ends_its_call(pair):
    _, client, _ = pair
    with pytest.raises(ReinforgeError, match="a worker failed: ErrorWithCode: wrong"):
        client.fail_with_a_code.remote().result(60)
    assert client.double.remote(4).result(60) == 8


@pytest.mark.timeout(60)
def test_an_answer_that_cannot_be_read_ends_all_calls(pair):
    _, client, _ = pair
    waiting = client.wait.remote()
    for call in (client.answer_unreadably.remote(), waiting):
        with pytest.raises(BackendUnavailable, match="sent an unreadable message: ImportError: No module"):
            call.result(60)
    with pytest.raises(BackendUnavailable, match="an unreadable message"):
        client.double.remote(4).result(60)


@pytest.mark.timeout(60)
def test_closing_a_loop_cancels_its_calls_and_frees_its_files():
    worker = Worker()
    calls = WorkerLoop(worker)
    waiting = calls.wait.remote()
    assert worker.started.wait(10)
    calls.close()
    assert waiting.cancelled()
    assert worker.cancelled.is_set()
    assert calls._loop.is_closed()


def test_a_call_that_is_cancelled_is_cancelled_there(pair):
    worker, client, _ = pair
    waiting = client.wait.remote()
    assert worker.started.wait(10)
    waiting.cancel()
    assert worker.cancelled.wait(10)
    with pytest.raises(CancelledError):
        waiting.result(60)
    assert client.double.remote(4).result(60) == 8


def test_when_a_process_ends_its_calls_fail_and_say_what_to_do(tmp_path):
    path = str(tmp_path / "socket")
    with Listener(path, "AF_UNIX") as listener:
        accepted = []
        thread = threading.Thread(target=lambda: accepted.append(listener.accept()))
        thread.start()
        from multiprocessing.connection import Client

        client = WorkerClient(Client(path, "AF_UNIX"), "process 1 of torchrun")
        thread.join()
    waiting = client.wait.remote()
    accepted[0].close()
    with pytest.raises(BackendUnavailable, match="process 1 of torchrun has exited; resume the run with --resume"):
        waiting.result(60)
    with pytest.raises(BackendUnavailable, match="has exited"):
        client.double.remote(1).result(60)
