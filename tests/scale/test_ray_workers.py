"""The group of Ray workers in rare cases, with actors that answer at once; real ones: `tests/scale/test_ray.py`."""

import pytest

from reinforge.scale import engine_group as ray_router
from reinforge.scale.engine_group import EngineRouter, find_conversation
from reinforge.types.request import ModelRequest, SamplingParams

ray = pytest.importorskip("ray")

from reinforge.config.policy import PolicyConfig  # noqa: E402
from reinforge.scale.engine_worker import EngineWorker, PolicyDescription  # noqa: E402
from reinforge.scale.ray import members as ray_members  # noqa: E402
from reinforge.scale.ray.members import GroupSize, WorkerLost  # noqa: E402
from reinforge.scale.ray.recruits import Newcomer, WorkerHandle  # noqa: E402
from reinforge.scale.ray.workers import WorkerGroup  # noqa: E402


class Method:
    def __init__(self, answer):
        self.answer = answer

    def remote(self, *arguments):
        return self.answer(*arguments)


class Actor:
    answers = {"call": lambda method, *arguments: "weights", "publish": lambda *arguments: None}
    answers |= {"missing_reference": lambda: None}

    def __getattr__(self, name):
        return Method(self.answers[name])


def make_worker(number):
    return WorkerHandle(number, Actor(), is_near=True, pid=0, host="127.0.0.1")


class Replacements:
    def __init__(self):
        self.ready = []

    def fill_up(self, count):
        self.ready += [Newcomer(make_worker(7), {})] if count and not self.ready else []

    def take(self, *, wait):
        taken, self.ready = self.ready, []
        return taken, []

    def wait_for_places(self, count, timeout_s):
        return len(self.ready)

    def remove(self, number):
        pass


@pytest.fixture
def group(monkeypatch):
    monkeypatch.setattr(ray, "get", lambda answer: answer)
    monkeypatch.setattr(ray, "wait", lambda calls, **_: (calls[:1], calls[1:]))
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    description = PolicyDescription("m", None, "template", 1e-4, 64)
    made = WorkerGroup(Replacements(), GroupSize(1, 1, 1.0), {"default": description}, PolicyConfig(model="m"))
    made.members.add([make_worker(0)])
    return made


def test_after_the_end_of_all_workers_the_fingerprint_is_that_of_a_replacement(group):
    group.members.lose(group.workers[0])
    assert group.workers == []
    assert group.compare_fingerprints("default") == "weights"
    assert [each.number for each in group.workers] == [7]


def test_a_reference_is_asked_of_a_replacement(group):
    group.members.lose(group.workers[0])
    assert group.missing_reference is None
    assert [each.number for each in group.workers] == [7]


def test_weights_that_no_worker_is_left_to_load_are_something_to_load_again(group, tmp_path):
    group.members.lose(group.workers[0])
    with pytest.raises(WorkerLost, match="all workers have died"):
        group.load_weights(tmp_path)


class LonelyEngine:
    def join_peers(self, peers):
        return "replicate"


async def test_a_worker_that_trains_alone_listens_no_more():
    worker = EngineWorker(0)
    worker._engine = LonelyEngine()
    port = await worker.listen("127.0.0.1")
    listener = worker._listener
    assert await worker.join(0, 1, ("127.0.0.1", port)) == "replicate"
    assert listener.fileno() == -1


class Call:
    def __init__(self, waits, *, lost_peer=False):
        self.waits, self.lost_peer = waits, lost_peer


def wait(calls, *, num_returns, timeout):
    """Waits as `ray.wait` does, by a clock of calls instead of seconds."""
    while not (done := [call for call in calls if call.waits <= 0][:num_returns]):
        for call in calls:
            call.waits -= 1
        if timeout is not None:
            break
    return done, [call for call in calls if call not in done]


class Pinged:
    def __init__(self, waits):
        self.ping = Method(lambda: Call(waits))


@pytest.mark.parametrize(
    ("answers", "any_failure", "is_lost"),
    [
        (True, False, False),  # it is busy with its share of a step
        (False, False, True),
        (True, True, True),  # it waits in the middle of an exchange
    ],
)
def test_a_worker_is_given_up_if_it_gives_no_sign(monkeypatch, answers, any_failure, is_lost):
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray_members, "_has_lost_peer", lambda call, **_: call.lost_peer)
    first, other = Call(0, lost_peer=True), Call(3)
    actors = [Pinged(0), Pinged(0 if answers else 1000)]
    workers = [WorkerHandle(n, each, is_near=True, pid=0, host="") for n, each in enumerate(actors)]
    calls = list(zip(workers, [first, other], strict=True))
    assert ray_members._find_silent(calls, any_failure=any_failure) == ([other] if is_lost else [])


def message(role, content):
    return {"role": role, "content": content}


def test_siblings_and_turns_of_a_conversation_share_a_key():
    first = [message("system", "s"), message("user", "u")]
    key = find_conversation(ModelRequest(first, SamplingParams(seed=1)))
    later = [*first, message("assistant", "a"), message("user", "v")]
    assert find_conversation(ModelRequest(first, SamplingParams(seed=2))) == key
    assert find_conversation(ModelRequest(later)) == key
    assert find_conversation(ModelRequest([message("system", "s"), message("user", "w")])) != key
    assert find_conversation(ModelRequest(first, tools=[{"name": "t"}])) != key


def test_a_new_conversation_goes_to_the_least_busy_worker_and_stays():
    router = EngineRouter([0, 1, 2])
    assert [router.acquire(key) for key in "aab"] == [0, 0, 1]
    assert router.acquire("c") == 2
    router.release(1)
    assert router.acquire("d") == 1
    assert router.acquire("a") == 0, "it stays, although worker 0 has the most to do"


def test_the_conversations_of_a_lost_worker_go_elsewhere():
    router = EngineRouter([0, 1])
    assert [router.acquire("a"), router.acquire("b")] == [0, 1]
    router.remove(0)
    router.release(0)  # of the reply that was lost
    assert [router.acquire("a"), router.acquire("c")] == [1, 1]
    router.remove(1)
    assert router.acquire("a") is None, "no worker is left"
    router.add(2)
    assert router.acquire("a") == 2


def test_new_weights_and_too_many_conversations_are_forgotten(monkeypatch):
    monkeypatch.setattr(ray_router, "MAX_CONVERSATIONS", 2)
    router = EngineRouter([0, 1])
    for key in "abc":  # a on 0, b on 1, c on 0; a is forgotten
        router.acquire(key)
    assert router.acquire("a") == 1, "now the least busy one"
    router.forget()
    router.release(0)
    assert router.acquire("b") == 0
