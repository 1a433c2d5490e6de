"""The group of Ray workers in rare cases, with actors that answer at once; real ones: `tests/scale/test_ray.py`."""

import pytest

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
    """A call that has ended after it was waited for a number of times."""

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
