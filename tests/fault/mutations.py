"""Mutations for the mutation checks: each removes one safety, and the test that relies on it must then fail.

Each is called in the process of a run before the run starts.
"""

import asyncio
import os
import random
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch

from reinforge import errors
from reinforge.adapters import local
from reinforge.cli import process, restarts
from reinforge.crash import crash_point
from reinforge.engine import checkpoint
from reinforge.engine.engine import Engine
from reinforge.engine.training import learner
from reinforge.engine.training.learner import Learner
from reinforge.improvement.record import SEARCH, SearchRecord
from reinforge.improvement.trials import RunTrials
from reinforge.multiagent.nip.job_files import GroupFiles
from reinforge.protocols.openai.service import JOBS, FineTuningService
from reinforge.rollout import ending, runner
from reinforge.rollout.isolation import containment, processes, worker_pool
from reinforge.runs.checkpoints import Checkpoints
from reinforge.runs.rows import EpochSnapshot
from reinforge.scale.ray.adapter import RayAdapterConfig
from reinforge.trainer import loop, resume, run, shutdown, versions
from reinforge.trainer.context import RunContext
from reinforge.trainer.provenance import Provenance
from reinforge.types import trajectory


def forget_the_rng():
    checkpoint.restore_rng = lambda state: None


def forget_the_optimizer():
    def restore(learner, state, num_steps):
        learner.reset()
        learner.num_steps = num_steps

    Learner.restore = restore


def forget_the_stage():
    load_training = checkpoint.load_training

    def forgetful(folder, learner):
        found = load_training(folder, learner)
        return None if found is None else (found[0], replace(found[1], stage=None))

    checkpoint.load_training = forgetful


def keep_the_optimizer_between_stages():
    def begin_stage(learner, stage, config, version):
        learner.stage, learner.stage_version = stage, version

    Learner.begin_stage = begin_stage


def forget_the_reference():
    def load_reference(engine, folder, version):
        engine._stages.reference_version = version

    Engine.load_reference = load_reference


def forget_where_stages_begin():
    drop = versions.drop_checkpoints
    versions.drop_checkpoints = lambda *args, stage_ends=(), **kwargs: drop(*args, **kwargs)


def stay_with_the_last_weights():
    async def return_to_best(context, adapter, metric):
        pass

    versions.return_to_best = return_to_best


def forget_the_critic():
    checkpoint.load_critic = lambda folder, critic: critic.reset()


def forget_the_adapters():
    checkpoint._load_adapters = lambda folder, model: None


def forget_the_second_adapter():
    load_adapters = checkpoint._load_adapters
    checkpoint._load_adapters = lambda folder, model: load_adapters(folder, model) if folder.name == "a" else None


def forget_the_counters():
    RunContext.restore_counters = lambda context, counters: None


def recall_nothing():
    RunContext.recall = lambda context, key, item: None


def forget_supports():
    recall = RunContext.recall

    def forgetful(context, key, item):
        record = recall(context, key, item)
        for call in record.calls if record is not None else ():
            call.reply = replace(call.reply, tokens=replace(call.reply.tokens, supports=None))
        return record

    RunContext.recall = forgetful


def adopt_no_orphan():
    resume._read_snapshot = lambda checkpoints, name: None


def trust_the_journal():
    """Loads what the journal names without checking it."""
    Checkpoints.find_damage = lambda checkpoints, name: None


def record_before_the_checkpoint():
    keep = Checkpoints.write

    async def commit(context, adapter, epoch, state, *, version):
        state = {"epoch": epoch, "version": version, "counters": context.counters(), **state}
        name = context.checkpoints.name(version)
        context.journal.record_snapshot(EpochSnapshot(epoch, version, name, state))
        return await keep(context.checkpoints, adapter, version, state)

    versions.commit = commit
    trust_the_journal()


def rename_by_copying():
    """Gives a folder its name first and its files one by one."""

    def rename(source, target):
        target.mkdir()
        for path in sorted(path for path in source.rglob("*") if path.is_file()):
            place = target / path.relative_to(source)
            place.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, place)
            crash_point("ckpt.after_tensor")
        shutil.rmtree(source)

    os.rename = rename


def keep_old_metrics():
    """Resumes without restoring the metrics file."""
    replace_file = loop.replace_file
    loop.replace_file = lambda path, text: None if path.name == "training_metrics.jsonl" else replace_file(path, text)


def allow_every_change():
    resume.refuse_changes = lambda *arguments, **options: []


def compare_no_code():
    Provenance.find_changes = lambda before, now, project_root: []


def draw_without_the_seed():
    runner.stable_seed = lambda *names: random.getrandbits(32)


def train_on_what_is_not_finite():
    torch.isfinite = lambda tensor: torch.ones_like(tensor, dtype=torch.bool)
    learner.are_finite = lambda samples: True


def believe_every_reward():
    trajectory.math = SimpleNamespace(isfinite=lambda value: True)


def look_for_no_job():
    """Creates jobs without asking the service first."""
    pages = FineTuningService.iterate_pages

    async def none(service, path, kind, query):
        if path != JOBS:
            async for entry in pages(service, path, kind, query):
                yield entry

    FineTuningService.iterate_pages = none


def note_no_job_of_a_group():
    GroupFiles.write_state = lambda files, **state: None


def give_each_job_a_name_of_its_own():
    GroupFiles.read_job = lambda files, name: None
    trajectory.TrajectoryCollection.resolve_job_key = lambda collection: str(os.getpid())


def train_what_is_there():
    local.find_damage = lambda folder: "not looked at"


def handle_no_signals():
    run.run_interruptible = lambda work, options: asyncio.run(work)


def commit_nothing_at_a_stop():
    async def nothing(run):
        return None

    run._Run._commit_pending = nothing


def hang_at_a_stop():
    async def forever(run):
        await asyncio.sleep(3600)

    run._Run._commit_pending = forever


def hang_in_the_cleanup():
    async def forever(run):
        await asyncio.sleep(3600)

    run._Run._clean_up = forever


def hang_at_the_end():
    """Nothing can be recorded: the disk hangs."""
    hang_at_a_stop()
    run._Run._record_forced_end = lambda run, why: time.sleep(3600)


def keep_settings_of_the_last_call():
    resume.keep_settings_of_one_call = lambda folder, text: text


def stop_soon():
    """Removes no safety: the limits of a stop are shorter than those of the test."""
    shutdown.STOP_S, shutdown.BLOCKED_AT_STOP_S = 3.0, 0.5


def wait_for_the_stop():
    stop_soon()
    shutdown.ShutdownThread._check_deadline = lambda guard: None


def start_no_observer():
    stop_soon()
    shutdown.ShutdownThread._start_observer = lambda guard, folder: None


def leave_the_handlers():
    stop_soon()
    shutdown.ShutdownThread._beat = lambda guard: None
    shutdown.ShutdownThread._check_loop = lambda guard: None


def leave_the_loop_stopped():
    shutdown.run_loop = lambda loop, task: loop.run_until_complete(task)


def let_anyone_cancel():
    containment.RunTask.cancel = asyncio.Task.cancel


def contain_nothing():
    async def settle(task):
        task.result = await task.call()

    containment.ContainedTask._settle = settle
    containment.ContainedTask.abandon = lambda task: None
    ending.is_interrupt = lambda error: not isinstance(error, Exception)


def read_what_raises():
    errors.show = lambda value, convert=str: convert(value)


def interrupt_nobody():
    shutdown.INTERRUPT = None


def close_the_loop_on_this_thread():
    def close(loop):
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    shutdown.close_loop = close


def wait_for_every_thread():
    process.LEAVE_S = 3600.0


def let_workers_live():
    """The processes of agents ignore the end of the run."""
    worker_pool.PROGRAM = worker_pool.PROGRAM.replace("main(", "import os; os.killpg = print; main(")


def leave_processes_behind():
    processes.kill_descendants = shutdown.kill_descendants = lambda: None


def leave_a_child_behind():
    leave_processes_behind()
    subprocess.Popen(["sleep", "60"])


def stop_in_the_second_epoch(number=signal.SIGTERM):
    """Removes no safety: the process sends itself a signal while the second epoch is collected."""
    record_episode = RunContext.record_episode
    left = [10]

    def stopping(context, record):
        record_episode(context, record)
        left[0] -= (record.key.phase, record.key.epoch) == ("collect", 1)
        if left[0] == 0:
            os.kill(os.getpid(), number)

    RunContext.record_episode = stopping


def stop_in_the_second_epoch_and_commit_nothing():
    stop_in_the_second_epoch()
    commit_nothing_at_a_stop()


def handle_two_signals(number):
    shutdown.SIGNALS = (signal.SIGINT, signal.SIGTERM)
    stop_in_the_second_epoch(number)


def hang_up_under_nohup():
    """Removes no safety."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop_in_the_second_epoch(signal.SIGHUP)


STOPS_IN_THE_SECOND_EPOCH = {
    number: partial(stop_in_the_second_epoch, number) for number in (signal.SIGHUP, signal.SIGUSR1)
}
HANDLE_TWO_SIGNALS = {number: partial(handle_two_signals, number) for number in (signal.SIGHUP, signal.SIGUSR1)}


def look_for_no_step():
    """The ART adapter takes every interrupted submission for one that never arrived."""
    from reinforge.protocols.art.client import ARTClient

    async def settle(self, base):
        return False

    ARTClient._settle = settle


def write_the_search_once():
    """Writes `search.json` when the search begins, and never again."""
    write = SearchRecord.write
    SearchRecord.write = lambda record: None if (record.folder / SEARCH).exists() else write(record)


def forget_the_share_of_a_rung():
    """A trial that resumes gets a new share, as if its rung began."""
    train = RunTrials.train

    def forgetful(trials, trial):
        trial.rung_from, trial.rung_epochs = trial.used, trial.epochs
        trial.rung_end += trial.used
        return train(trials, trial)

    RunTrials.train = forgetful


def count_early_episodes_at_once():
    RunContext.expect_early = lambda context, epoch: None


def forward_no_signals():
    restarts.Keeper._forward = lambda keeper, number, frame: None


def follow_no_parent():
    restarts._follow = lambda parent: None


def hold_no_cluster():
    del RayAdapterConfig.prepare_restarts


def fail_once_with(error):
    """Removes no safety: the first process of the run fails."""
    return partial(_fail_once_with, error)


def stop_once():
    """Removes no safety: a library ends the first process of the run, as Ray does."""
    _fail_once_with(None)


def stop_once_unnoticed():
    stop_once()
    restarts._read = lambda pipe: os.close(pipe) or b"."


def _fail_once_with(error):
    run_config = run.run_config

    def failing(*arguments):
        if os.path.exists("failed"):
            return run_config(*arguments)
        open("failed", "w").close()
        if error is None:
            os._exit(1)
        raise error

    run.run_config = failing
