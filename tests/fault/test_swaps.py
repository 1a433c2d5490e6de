"""Weights change only while no reply is in flight: each reply is from the version it names, and none is lost.

Threads, each with its own event loop, send requests without a pause while jobs change the weights. A copy of each
version's weights is kept, and every reply is scored again with the copy that it names.
"""

import asyncio
import random
import threading
import time

import numpy as np
import pytest
import torch

from reinforge.config.policy import PolicyConfig
from reinforge.engine import Engine
from reinforge.engine.policy import EmbeddedPolicy
from reinforge.engine.sampling.sampler import ReplySampler
from reinforge.types.sample import LossSpec
from tests.fault.sizes import scaled
from tests.samples import random_samples, request

TOLERANCE = 1e-4
"""Nats between a reply's log-probs and those by the copy of the weights that it names."""
THREADS, ASKERS = 3, 4
COUNTS = [5, pytest.param(20, marks=pytest.mark.slow), pytest.param(scaled(400), marks=pytest.mark.fault)]


class Hammer:
    """Threads that send requests until `stop`; `replies` holds the replies with the times of their requests."""

    def __init__(self, policy, patience_s):
        self.patience_s = patience_s
        self.policy, self.asked, self.replies, self.errors = policy, [], [], []
        self.stopping = threading.Event()
        self.threads = [threading.Thread(target=self._work, args=(n,)) for n in range(THREADS)]

    def _work(self, number):
        async def ask(asker):
            rng = random.Random(f"{number}/{asker}")
            while not self.stopping.is_set():
                self.asked.append(number)
                text, length = f"{rng.randrange(20)}", rng.randrange(1, 12)
                asked_s = time.monotonic()
                reply = await self.policy.sample(request(text, max_tokens=length, seed=rng.getrandbits(32)))
                self.replies.append((asked_s, reply.tokens))

        async def all_of_them():
            await asyncio.gather(*(ask(asker) for asker in range(ASKERS)))

        try:
            asyncio.run(all_of_them())
        except Exception as error:  # noqa: BLE001  the test tells of it
            self.errors.append(error)

    def wait_for_all(self):
        """Returns once all clients wait for a reply.

        The policy knows who waits: a reply from before the job may still be on its way through a slow thread.
        """
        deadline = time.monotonic() + self.patience_s
        while self.policy.stats().waiting < THREADS * ASKERS:
            assert time.monotonic() < deadline, "not all requests wait during a job"
            time.sleep(0.001)

    def wait_for_replies(self, version):
        """Returns once this version has answered, so that a slow machine asks every version too."""
        deadline = time.monotonic() + self.patience_s
        while not any(tokens.policy_version == version for _, tokens in self.replies[-100:]):
            assert time.monotonic() < deadline, f"version {version} answers nothing"
            time.sleep(0.001)

    def wait_for_count(self, count):
        deadline = time.monotonic() + self.patience_s
        while len(self.replies) < count:
            assert time.monotonic() < deadline, "no replies come during a job"
            time.sleep(0.001)

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.stopping.set()
        for thread in self.threads:
            thread.join(30)


def weights_of(engine):
    return {name: p.detach().clone() for name, p in engine.model.trained_parameters.items()}


def swap(engine, version, hammer, rng):
    """Runs a job while all clients send requests; returns the new weights, its end and the replies by then."""
    hammer.wait_for_replies(version - 1)
    time.sleep(rng.uniform(0, 0.02))
    engine.begin_job()
    started_s = time.monotonic()
    engine.update(random_samples(2, seed=version), LossSpec("cross_entropy"), progress_start=0.5, progress_end=0.5)
    hammer.wait_for_all()
    ended_s, num_answered = time.monotonic(), len(hammer.replies)
    late = [tokens for asked_s, tokens in hammer.replies[:num_answered] if asked_s > started_s]
    assert late == [], "asked for and answered within a job"
    copy = engine.policy.sampler.call(lambda: weights_of(engine))
    engine.end_job()
    asyncio.run(engine.policy.publish(version))
    return copy, ended_s, num_answered


def swap_a_copy(engine, version, hammer, rng):
    """Runs a job while a copy serves all clients; returns the new weights."""
    hammer.wait_for_replies(version - 1)
    time.sleep(rng.uniform(0, 0.02))
    engine.begin_job()
    engine.update(random_samples(2, seed=version), LossSpec("cross_entropy"), progress_start=0.5, progress_end=0.5)
    hammer.wait_for_count(len(hammer.replies) + THREADS * ASKERS)
    copy = engine.policy.sampler.call(lambda: weights_of(engine))
    engine.end_job()
    asyncio.run(engine.policy.publish(version))
    return [copy]


def hammered(folder, num_swaps, patience_s, swap=swap):
    config = PolicyConfig(model=str(folder), max_num_seqs=8)
    config.optimizer.learning_rate = 3e-3
    config.schedule.warmup_steps = 0
    rng = random.Random(num_swaps)
    with Engine.load(config, seed=0, device="cpu", serves_during_jobs=swap is swap_a_copy) as engine:
        copies, jobs = [weights_of(engine)], []
        with Hammer(engine.policy, patience_s) as hammer:
            for version in range(1, num_swaps + 1):
                copy, *job = swap(engine, version, hammer, rng)
                copies.append(copy)
                jobs.append(job)
    assert hammer.errors == []
    assert not any(thread.is_alive() for thread in hammer.threads), "a client still waits"
    assert len(hammer.replies) == len(hammer.asked), "every request has its reply"
    return hammer.replies, copies, jobs


def differences(folder, replies, copies, shift=0):
    """Returns for each reply the largest difference to its version's copy; with `shift`, to another version's."""
    found = []
    with Engine.load(PolicyConfig(model=str(folder)), seed=0, device="cpu") as engine:
        for version, copy in enumerate(copies):
            mine = [tokens for _, tokens in replies if tokens.policy_version == version - shift]
            with torch.no_grad():
                for name, parameter in engine.model.trained_parameters.items():
                    parameter.copy_(copy[name])
            scores = asyncio.run(engine.policy.score([[*t.prompt_token_ids, *t.token_ids] for t in mine]))
            found += [
                float(np.abs(row[-len(t.token_ids) :] - t.logprobs).max()) for row, t in zip(scores, mine, strict=True)
            ]
    return found


def assert_named_weights(found):
    """One reply in fifty may be rounded otherwise at a token: what is sampled together is a matter of time."""
    assert np.quantile(found, 0.98) <= TOLERANCE, "a reply is from other weights than it names"
    assert max(found) <= 100 * TOLERANCE, "a reply is from other weights than it names"


def check_versions(folder, replies, copies):
    found = differences(folder, replies, copies)
    assert len(found) == len(replies), "no reply names a version that was never served"
    assert_named_weights(found)
    assert np.median(differences(folder, replies, copies, shift=1)) > 10 * TOLERANCE, "versions can be told"


def check_swaps(folder, num_swaps, patience_s=60):
    """Swaps weights under load, and scores every reply again."""
    replies, copies, jobs = hammered(folder, num_swaps, patience_s)
    assert len(replies) > 5 * num_swaps
    assert {tokens.policy_version for _, tokens in replies} >= {*range(num_swaps)}, "every version was asked"
    check_versions(folder, replies, copies)
    for version, (ended_s, num_answered) in enumerate(jobs, 1):
        waited = [tokens.policy_version for asked_s, tokens in replies[num_answered:] if asked_s < ended_s]
        assert len(waited) == THREADS * ASKERS, "all came while the job was open, and none is lost"
        assert min(waited) >= version, "and they waited for the weights that it made, or the next ones"


@pytest.mark.parametrize("num_swaps", COUNTS)
def test_each_reply_is_from_the_one_version_that_it_names(tiny_model_dir, num_swaps):
    check_swaps(tiny_model_dir, num_swaps)


def pause_without_waiting(sampler, adapter, change=None):
    with sampler._condition:
        sampler._admission.paused.add(adapter)


def stay_open(policy):
    pass


@pytest.mark.fault
@pytest.mark.parametrize(
    ("owner", "method", "mutation", "shows"),
    [
        (ReplySampler, "pause", pause_without_waiting, "a reply is from other weights than it names"),
        (EmbeddedPolicy, "close_admission", stay_open, "not all requests wait during a job|answered within a job"),
    ],
    ids=["replies in flight are not waited for", "admission stays open"],
)
def test_weights_that_change_during_a_reply_make_a_difference(
    tiny_model_dir, monkeypatch, owner, method, mutation, shows
):
    """Mutation check."""
    monkeypatch.setattr(owner, method, mutation)
    with pytest.raises(AssertionError, match=shows):
        check_swaps(tiny_model_dir, 20, patience_s=3 if owner is EmbeddedPolicy else 60)


def check_copies(folder, num_swaps):
    """Swaps the weights of a serving copy under load."""
    replies, copies, _ = hammered(folder, num_swaps, 60, swap_a_copy)
    check_versions(folder, replies, copies)


@pytest.mark.slow
@pytest.mark.parametrize("num_swaps", COUNTS)
def test_a_copy_serves_during_jobs_and_each_reply_is_from_the_version_that_it_names(tiny_model_dir, num_swaps):
    check_copies(tiny_model_dir, num_swaps)


def change_without_waiting(sampler, adapter, change=None):
    with sampler._condition:
        sampler._admission.paused.add(adapter)
    sampler.call(lambda: None if change is None else change())


@pytest.mark.fault
def test_a_copy_that_changes_during_a_reply_makes_a_difference(tiny_model_dir, monkeypatch):
    """Mutation check."""
    monkeypatch.setattr(ReplySampler, "pause", change_without_waiting)
    with pytest.raises(AssertionError, match="a reply is from other weights than it names"):
        check_copies(tiny_model_dir, 20)
