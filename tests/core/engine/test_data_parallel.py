"""How the samples of a step are divided among processes, and the sums that these exchange."""

import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from reinforge.config.policy import OptimizerConfig, ScheduleConfig
from reinforge.engine.training import scheduled_optimizer
from reinforge.engine.training.data_parallel import DataParallel, MetricSums, PeerFailed, divide_samples
from reinforge.engine.training.learner import Learner
from reinforge.engine.training.scheduled_optimizer import ScheduledOptimizer
from reinforge.errors import EngineError
from reinforge.types.sample import TrainingSample, UpdateReport
from tests.engines import copy_weights, load_engine, measure_difference, train
from tests.samples import random_samples


def sample(prompt, num_trained, pair_id=None):
    count = len(prompt) + num_trained
    zeros = np.zeros(count, np.float32)
    mask = np.arange(count) >= len(prompt)
    token_ids = np.array([*prompt, *range(num_trained)], np.int64)
    return TrainingSample(token_ids, mask, zeros, zeros + 1, mask - 1, mask - 1, pair_id=pair_id)


def test_families_stay_whole_and_go_to_the_process_with_the_fewest_tokens():
    a, b, c, d = [1] * 4, [2] * 3, [3] * 4, [4]
    samples = [sample(a, 3), sample(b, 3), sample(a, 3), sample(c, 1), sample(d, 1)]
    # a: 4 + 3 + 3 = 10 tokens, b: 6, c: 5, d: 2
    assert divide_samples(samples, 2) == [[0, 2, 4], [1, 3]]


def test_every_sample_has_one_place_even_if_processes_are_left_without():
    samples = [sample([1, 1], 2), sample([1, 1], 5)]
    assert divide_samples(samples, 3) == [[0, 1], [], []]
    assert divide_samples([], 2) == [[], []]


def test_a_pair_of_different_prompts_stays_together():
    samples = [sample([1], 8, "p"), sample([2, 2], 1, "p"), sample([3], 9)]
    assert divide_samples(samples, 2) == [[0, 1], [2]]  # 12 and 10 tokens


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_shares_are_disjoint_complete_and_balanced(count):
    rng = np.random.default_rng(count)
    samples = [sample([int(rng.integers(12))] * 3, int(rng.integers(1, 20))) for _ in range(60)]
    shares = divide_samples(samples, count)
    assert sorted(i for share in shares for i in share) == list(range(60))
    prefixes = [{tuple(samples[i].token_ids[:3]) for i in share} for share in shares]
    assert sum(map(len, prefixes)) == len(set().union(*prefixes)), "no prefix is computed twice"
    families = {p: 3 + sum(len(s) - 3 for s in samples if tuple(s.token_ids[:3]) == p) for p in set().union(*prefixes)}
    loads = [sum(families[p] for p in each) for each in prefixes]
    assert max(loads) - min(loads) <= max(families.values())


def test_sums_merge_by_name():
    sums = MetricSums(1.0, {"entropy": 6.0}, {"entropy": 3})
    sums.merge(MetricSums(0.5, {"entropy": 2.0, "kl": 4.0}, {"entropy": 1, "kl": 2}))
    assert (sums.loss, sums.means()) == (1.5, {"entropy": 2.0, "kl": 2.0})


@pytest.mark.parametrize("bucket", [2**24, 1])
def test_a_gradient_that_no_process_has_stays_absent(monkeypatch, bucket):
    monkeypatch.setattr(scheduled_optimizer, "BUCKET_NUMBERS", bucket)
    parameters = {
        name: nn.Parameter(torch.ones(size)) for name, size in {"a": (2, 2), "b": (3, 1), "c": (1, 1)}.items()
    }
    optimizer = ScheduledOptimizer(parameters, OptimizerConfig(learning_rate=0.1), ScheduleConfig())
    parameters["a"].grad = torch.full((2, 2), 2.0)

    # the other process: no gradient of a; 1, 2, 3 of b; none of c; each message begins with how many have one
    parts = {"a": [0.0, 0, 0, 0, 0], "b": [1.0, 1, 2, 3], "c": [0.0, 0]}
    counts, numbers = [each[0] for each in parts.values()], [x for each in parts.values() for x in each[1:]]
    messages = [[*counts, *numbers]] if bucket > 1 else list(parts.values())

    def add(flat):
        flat += torch.tensor(messages.pop(0))

    optimizer.sum_gradients(add)
    assert parameters["a"].grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert parameters["b"].grad.tolist() == [[1.0], [2.0], [3.0]]
    assert messages == []
    assert parameters["c"].grad is None


PROCESS = """
    import sys, time, torch
    from reinforge.engine.training.data_parallel import DataParallel, MetricSums, PeerFailed, listen

    rank, size, port, what = int(sys.argv[1]), 2, int(sys.argv[2]), sys.argv[3]
    if rank == 0:
        listener = listen("127.0.0.1")
        print(listener.getsockname()[1], flush=True)
        port = listener.getsockname()[1]
    timeout_s = 3 if what in ("freeze", "break") else 60
    peers = DataParallel(rank, size, ("127.0.0.1", port), listener if rank == 0 else None, timeout_s=timeout_s)
    if what == "break":
        import time
        try:
            with peers.break_on_failure():
                if rank == 1:
                    raise ValueError("bad")
                peers.add(torch.ones(3))
        except (ValueError, PeerFailed) as error:
            print(type(error).__name__)
        try:
            peers.collect({})  # a message of another size, which gloo would end the other process for
        except PeerFailed as error:
            print(error)
    elif what == "freeze":
        if rank == 1:
            print("frozen", flush=True)
            time.sleep(3600)
        try:
            peers.add(torch.ones(3))
        except PeerFailed as error:
            print(error)
    elif what == "die":
        if rank == 1:
            import os
            os._exit(0)
        try:
            peers.combine(MetricSums())
        except PeerFailed as error:
            print(type(error).__name__)
    sys.stdout.flush()
    peers.close()
"""


def run_two(what):
    command = [sys.executable, "-c", textwrap.dedent(PROCESS)]
    first = subprocess.Popen([*command, "0", "0", what], stdout=subprocess.PIPE, text=True)
    port = first.stdout.readline().strip()
    second = subprocess.run([*command, "1", port, what], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    return first.communicate(timeout=60)[0].splitlines(), second.stdout.splitlines()


@pytest.mark.slow
def test_a_process_that_dies_ends_the_wait_of_the_other():
    assert run_two("die") == (["PeerFailed"], [])


@pytest.mark.slow
def test_a_process_that_fails_among_exchanges_sends_nothing_more():
    lost = "the processes lost their connections during a step"
    assert run_two("break") == (["PeerFailed", lost], ["ValueError", lost])


@pytest.mark.slow
def test_a_process_that_gives_no_sign_is_taken_as_gone_when_the_time_is_up():
    command = [sys.executable, "-c", textwrap.dedent(PROCESS)]
    first = subprocess.Popen([*command, "0", "0", "freeze"], stdout=subprocess.PIPE, text=True)
    port = first.stdout.readline().strip()
    second = subprocess.Popen([*command, "1", port, "freeze"], stdout=subprocess.PIPE, text=True)
    assert second.stdout.readline().strip() == "frozen"
    [line] = first.communicate(timeout=60)[0].splitlines()
    second.kill()
    second.communicate()
    assert line.startswith("another process did not respond for 3 s, so it is considered dead")
    assert "peer_timeout_s" in line


class ThreadPeers(DataParallel):
    """Two engines of this process as peers: what they exchange meets in a list."""

    def __init__(self, rank, desk):
        self.rank, self.size, self.desk = rank, 2, desk

    def _meet(self, value):
        rows, barrier = self.desk
        rows[self.rank] = value
        barrier.wait(30)
        found = list(rows)
        barrier.wait(30)
        return found

    def add(self, numbers):
        numbers.copy_(sum(self._meet(numbers.clone())))

    def _gather(self, value):
        return self._meet(value)


def load(folder):
    batch, optimizer = {"steps_per_job": 2, "num_iterations": 2}, {"learning_rate": 3e-3, "eps": 1e-4}
    return load_engine(folder, device="cpu", batch=batch, optimizer=optimizer)


def measure_distance(a, b):
    return measure_difference(a.values(), b.values())


def train_together(folder, samples_of):
    """Returns the reports and the weights of two engines that share each step; errors are returned as they are."""
    desk = ([None, None], threading.Barrier(2))
    with load(folder) as first, load(folder) as second, ThreadPoolExecutor(2) as pool:
        engines = [first, second]
        for rank, engine in enumerate(engines):
            engine.join_peers(ThreadPeers(rank, desk))
        jobs = [pool.submit(train, engine, samples_of(rank)) for rank, engine in enumerate(engines)]
        errors = [job.exception(60) for job in jobs]
        outcomes = [error or job.result() for error, job in zip(errors, jobs, strict=True)]
        return outcomes, [copy_weights(each.learner) for each in engines]


class Alone(NamedTuple):
    """What one engine by itself makes of the samples."""

    before: dict
    report: UpdateReport
    after: dict


@pytest.fixture(scope="module")
def alone(tiny_model_dir):
    with load(tiny_model_dir) as engine:
        return Alone(copy_weights(engine.learner), train(engine, random_samples(9, 1)), copy_weights(engine.learner))


def test_two_engines_make_the_steps_of_one(tiny_model_dir, alone):
    reports, weights = train_together(tiny_model_dir, lambda rank: random_samples(9, 1))
    assert measure_distance(weights[0], weights[1]) == 0
    assert measure_distance(weights[0], alone.after) < 1e-5
    assert reports[0] == reports[1]
    assert (reports[0].num_updates, reports[0].num_tokens) == (alone.report.num_updates, alone.report.num_tokens)
    assert reports[0].metrics == pytest.approx(alone.report.metrics, rel=1e-4, abs=1e-5)


def test_a_share_that_is_scaled_by_its_own_tokens_is_another_step(tiny_model_dir, alone, monkeypatch):
    compute = Learner._compute_gradients

    def forget_the_rest(self, samples, own, *others):
        return compute(self, own, own, *others)

    monkeypatch.setattr(Learner, "_compute_gradients", forget_the_rest)
    _, weights = train_together(tiny_model_dir, lambda rank: random_samples(9, 1))
    assert measure_distance(weights[0], alone.after) > 1e-4


def test_a_number_that_is_not_finite_in_one_share_skips_the_step_in_both(tiny_model_dir, alone, monkeypatch):
    attempt = Learner._try_gradients

    def spoil(self, samples, own, *others):
        return None if self.peers.rank == 1 else attempt(self, samples, own, *others)

    monkeypatch.setattr(Learner, "_try_gradients", spoil)
    reports, weights = train_together(tiny_model_dir, lambda rank: random_samples(9, 1))
    assert [(each.num_updates, each.num_skipped_steps) for each in reports] == [(0, 4), (0, 4)]
    assert [measure_distance(alone.before, each) for each in weights] == [0, 0]


def test_an_error_in_one_share_ends_the_step_of_both(tiny_model_dir, monkeypatch):
    attempt = Learner._try_gradients

    def fail(self, samples, own, *others):
        if self.peers.rank == 1:
            raise EngineError("no")
        return attempt(self, samples, own, *others)

    monkeypatch.setattr(Learner, "_try_gradients", fail)
    outcomes, _ = train_together(tiny_model_dir, lambda rank: random_samples(9, 1))
    assert [type(each) for each in outcomes] == [PeerFailed, EngineError]
