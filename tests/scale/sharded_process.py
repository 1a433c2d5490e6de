"""One of several processes that train one model together: what `tests/scale/test_sharding.py` starts."""

import asyncio
import json
import os
from pathlib import Path

from reinforge.algorithms.kto import add_mismatched
from reinforge.config.policy import PolicyConfig
from reinforge.engine import Engine
from reinforge.engine.devices import MemoryUse
from reinforge.engine.losses.base import register_loss
from reinforge.engine.training import memory_need
from reinforge.engine.training.data_parallel import DataParallel, PeerFailed, listen
from reinforge.engine.training.learner import Learner
from reinforge.engine.training.scheduled_optimizer import ScheduledOptimizer
from reinforge.engine.training.sharding import ShardedModel
from reinforge.types.sample import LossSpec, Needs
from tests.samples import random_samples

LOOPBACK = "127.0.0.1"


def connect(rank, size, port, say_port, timeout_s=60.0):
    if size == 1:
        return None
    listener = listen(LOOPBACK) if rank == 0 else None
    if listener is not None:
        port = listener.getsockname()[1]
        say_port.send(port)
    return DataParallel(rank, size, (LOOPBACK, port), listener, timeout_s=timeout_s)


def switch_off(safety):
    """Takes one safety out, for a test that shows what happens then."""
    if safety == "norm of all shards":
        Learner.measure_norm = ScheduledOptimizer.measure_norm
    elif safety == "passes of the others":
        Learner._list_passes = lambda self, samples: [*self._micro_batches(samples)]
    elif safety == "sum of gradients":
        ShardedModel.take_gradients = lambda self: None


def load(job):
    config = PolicyConfig.model_validate(job["policy"])
    stages = {name: (config, LossSpec(job["loss"])) for name in job.get("stages", ())}
    return Engine.load(config, seed=0, device="cpu", stages=stages, **job.get("settings", {}))


def train(engine, job, number):
    samples = random_samples(job.get("num_samples", 9), number + 1)
    loss = LossSpec(job["loss"], job.get("params", {}))
    engine.begin_job()
    for row, sample in enumerate(samples):
        sample.returns = None if not job.get("critic") else sample.advantages
        sample.reward = float(row % 2)
        if job.get("pairs"):
            sample.pair_id = f"p{row // 2}"
    if job["loss"] == "kto":
        add_mismatched(samples)
    if job.get("reference"):
        engine.score(samples, Needs(ref_logprobs=True))
    if job.get("critic"):
        engine.score(samples, Needs(values=True))
    report = engine.update(samples, loss, progress_start=number / 4, progress_end=(number + 1) / 4)
    engine.end_job()
    return report


def train_stages(engine, job, folder):
    """Trains one job of each stage; returns log-probs: the reference's of the last stage, and of two checkpoints."""

    def score_reference():
        samples = random_samples(4)
        engine.score(samples, Needs(ref_logprobs=True))
        return [sample.ref_logprobs.tolist() for sample in samples]

    for number, stage in enumerate(job["stages"]):
        engine.write(folder / f"before-{stage}", number)
        engine.begin_job()
        engine.use_stage(stage)
        engine.update(random_samples(6, number), LossSpec(job["loss"]), progress_start=0.0, progress_end=0.1)
        engine.end_job()
        asyncio.run(engine.policy.publish(number + 1))
    found = [score_reference()]
    for stage in job["stages"]:
        engine.load_reference(folder / f"before-{stage}", number)
        found.append(score_reference())
    return found


def fail_in_one(engine, rank):
    """Lets the loss fail in the second process only; returns the error, after the job is undone."""

    @register_loss("test_bad_in_one")
    def bad(batch, logprobs_BT):
        if rank == 1:
            raise ValueError("bad")
        return -logprobs_BT

    before = engine.fingerprint()
    engine.begin_job()
    try:
        engine.update(random_samples(9, 5), LossSpec("test_bad_in_one"), progress_start=0.0, progress_end=0.1)
    except (ValueError, PeerFailed) as error:
        engine.rollback()
        assert engine.fingerprint() == before
        return f"{type(error).__name__}: {error}"


def measure_bytes(engine):
    learner = engine.learner
    held = [*learner.parameters.values(), *learner.state().values()]
    return sum(each.numel() * each.element_size() for each in held)


def count_mapped(engine):
    """Returns how many of the model's weights lie in the file that they come from (Linux)."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in lines if "model.safetensors" in line]
    bounds = [(int(start, 16), int(end, 16)) for start, end in ranges]
    places = [parameter.data_ptr() for parameter in engine.model.module.parameters()]
    return sum(any(start <= place < end for start, end in bounds) for place in places)


def work(rank, size, port, say_port, folder, job):
    """Does a job in a process of its own, and writes what a test compares.

    Args:
        port: Where the first process listens for the others; 0 in the first itself, which sends it to `say_port`.
        job: What to do.
    """
    output = os.open(folder / f"output-{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1), os.dup2(output, 2)
    out = folder / "checkpoint"
    switch_off(job.get("without"))
    if "memory" in job:
        memory_need.measure_memory = lambda device: MemoryUse("cpu", 0, job["memory"])
    with load(job) as engine:
        peers = connect(rank, size, port, say_port, job.get("timeout_s", 60.0))
        mapped = count_mapped(engine)
        held = engine.join_peers(peers, job.get("sharding", "full"))
        if job.get("resume"):
            engine.load_weights(job["resume"])
        references = train_stages(engine, job, folder) if job.get("stages") else []
        failure = fail_in_one(engine, rank) if job.get("fails") else None
        first = job.get("first", 0)
        reports = [train(engine, job, number) for number in range(first, first + job.get("jobs", 3))]
        if job.get("rollback"):
            before = engine.fingerprint()
            engine.begin_job()
            engine.update(random_samples(9, 77), LossSpec(job["loss"]), progress_start=0.0, progress_end=0.1)
            assert engine.fingerprint() != before
            engine.rollback()
            assert engine.fingerprint() == before
        engine.write(out, len(reports))
        if job.get("base"):
            engine.write_base(out.parent / "base")
        found = {
            "held": held,
            "mapped": mapped,
            "whole": sum(parameter.numel() for parameter in engine.model.module.parameters()),
            "logprobs": [row.tolist() for row in engine.logprobs(random_samples(5, 99))],
            "failure": failure,
            "references": references,
            "fingerprint": engine.fingerprint(),
            "metrics": reports[-1].metrics if reports else {},
            "updates": [each.num_updates for each in reports],
            "bytes": measure_bytes(engine),
        }
        (out.parent / f"found-{rank}.json").write_text(json.dumps(found))
        if peers is not None:
            peers.close()
