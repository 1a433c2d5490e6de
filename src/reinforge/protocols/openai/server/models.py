"""The models that jobs have made: kept in separate folders, and served under their names.

    ft:base:reinforge:support:8f0c...               after the last step
    ft:base:reinforge:support:8f0c...:ckpt-step-24   after 24 steps; the newest three checkpoints of a job

A model is copied, loaded and only then recorded, in one transaction with the end of its job: a client that sees
`succeeded` can chat with it at once, and a job that is cancelled while its model is being copied leaves none.
"""

from __future__ import annotations

import asyncio
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

from reinforge.config.policy import PolicyConfig
from reinforge.engine.model.model_files import ADAPTER_CONFIG
from reinforge.errors import ReinforgeError, describe_error
from reinforge.files import find_damage, make_private_folder, remove_folder
from reinforge.protocols.openai.graders.schema import Grader, list_models
from reinforge.protocols.openai.server.contents import FileContents
from reinforge.protocols.openai.server.plan import KEPT_CHECKPOINTS
from reinforge.protocols.openai.server.progress import StepMetrics, read_metrics, write_results
from reinforge.protocols.openai.server.records import (
    ORGANIZATION,
    FileRecord,
    FineTuningJob,
    JobCheckpoint,
    JobFailure,
    JobState,
    TunedModel,
)
from reinforge.protocols.openai.server.store import JobStore, make_event
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.runs.checkpoints import copy_model
from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.summary import RunSummary, load_summary
from reinforge.serving.loading import BaseModels, ModelLoader
from reinforge.serving.routes import make_id

UNUSUAL = re.compile(r"[^A-Za-z0-9._-]+")


class TunedModels:
    def __init__(self, store: JobStore, folder: Path, host: ModelLoader):
        self.store, self.folder, self.host = store, folder, host
        make_private_folder(folder)

    async def start(self) -> list[str]:
        """Serves every model; returns what is wrong with those that cannot be loaded."""
        problems, known = [], await asyncio.to_thread(self.store.list_models)
        owners = {model.folder.partition("/")[0] for model in known}
        for folder in self.folder.iterdir():
            if folder.name not in owners:  # of a server that was killed before it could record the job's end
                await run_in_daemon_thread(partial(_remove, folder), "model-remove")
        for model in known:
            try:
                await self.host.load(model.name, self.folder / model.folder, model.base)
            except ReinforgeError as error:
                problems.append(f"{model.name}: {describe_error(error)}")
        return problems

    def resolve(self, name: str, sources: BaseModels) -> PolicyConfig:
        """Returns the model that a job starts from, and how it is trained."""
        tuned = self.store.find_model(name)
        if tuned is None:
            return sources.find(name, "model")
        policy, folder = sources.find(tuned.base, "model"), self.folder / tuned.folder
        changes: dict[str, Any] = {"model": str(folder), "init": "pretrained", "revision": None}
        if (folder / ADAPTER_CONFIG).is_file():
            changes["lora"] = None  # the adapter itself is trained further
        return policy.model_copy(update=changes)

    def resolve_judges(self, grader: Grader, sources: BaseModels) -> dict[str, str]:
        return {name: str(self.resolve(name, sources).model) for name in list_models(grader)}

    def find_root(self, name: str) -> str:
        tuned = self.store.find_model(name)
        return name if tuned is None else tuned.base

    async def delete(self, name: str) -> None:
        """Forgets a model; its folder is deleted once no name leads there."""
        tuned = await asyncio.to_thread(self.store.find_model, name)
        await asyncio.to_thread(self.store.remove_model, name)
        await self.host.unload(name)
        left = {model.folder for model in await asyncio.to_thread(self.store.list_models)}
        if tuned is not None and tuned.folder not in left:
            await run_in_daemon_thread(lambda: remove_folder(self.folder / tuned.folder), "model-remove")


async def publish_job(
    store: JobStore, contents: FileContents, models: TunedModels, job: FineTuningJob, run: Path
) -> None:
    summary = await asyncio.to_thread(load_summary, run)
    checkpoints = await run_in_daemon_thread(partial(_find_checkpoints, run, job.method_type), "job-checkpoints")
    if not checkpoints:
        raise JobFailure("nothing_trained", f"the job has made no model: {summary.reason or 'no step was trained'}")
    base = await asyncio.to_thread(models.find_root, job.model)
    suffix = UNUSUAL.sub("-", job.suffix or "").strip("-")
    name = f"ft:{base}:{ORGANIZATION}:{suffix}:{job.id.removeprefix('ftjob-')}"
    results, made = make_id("file"), dict[str, TunedModel]()
    try:
        for metrics, checkpoint in checkpoints:
            folder = f"{job.id}/step-{metrics.step:06d}"
            await run_in_daemon_thread(partial(_copy, run / checkpoint, models.folder / folder), "model-copy")
            made[f"{name}:ckpt-step-{metrics.step}"] = TunedModel(f"{name}:ckpt-step-{metrics.step}", base, folder)
        made[name] = TunedModel(name, base, folder)
        for model in made.values():
            await models.host.load(model.name, models.folder / model.folder, base)
        stored = contents.write(results, write_results(read_metrics(run, job.method_type)))
        now = int(time.time())
        verdict = make_event(job.id, "verdict", describe_verdict(job, summary))
        await asyncio.to_thread(store.add_events, job.id, [verdict])
        await asyncio.to_thread(
            store.transition,
            job.id,
            JobState.SUCCEEDED,
            f"The job has successfully completed; the new model is {name}",
            only_from=JobState.RUNNING,
            models=made.values(),
            checkpoints=[
                JobCheckpoint(make_id("ftckpt"), now, each.step, f"{name}:ckpt-step-{each.step}", each.values)
                for each, _ in checkpoints
            ],
            results=FileRecord(results, stored.num_bytes, now, "step_metrics.csv", "fine-tune-results", stored.sha256),
            fine_tuned_model=name,
            trained_tokens=summary.tokens.get("trained"),
        )
    except Exception:
        for each in made:
            await models.host.unload(each)
        contents.remove(results)
        await run_in_daemon_thread(partial(_remove, models.folder / job.id), "model-remove")
        raise


def describe_verdict(job: FineTuningJob, summary: RunSummary) -> str:
    if job.validation_file is None:
        return "No verdict: the job has no validation_file, so no rows were held out"
    word = {True: "better", False: "not shown to be better", None: "without a verdict"}[summary.promoted]
    return f"Verdict on the held-out rows: {word}; {summary.reason}"


def _find_checkpoints(run: Path, method: str) -> list[tuple[StepMetrics, str]]:
    by_epoch = {each.epoch: each for each in read_metrics(run, method)}
    found = [
        (by_epoch[row.epoch], row.checkpoint)
        for row in JournalReader(run).snapshot_rows()
        if row.epoch in by_epoch and row.checkpoint and by_epoch[row.epoch].step > 0
    ]
    whole = [(metrics, name) for metrics, name in found if find_damage(run / name) is None]
    by_step = {metrics.step: (metrics, name) for metrics, name in sorted(whole, key=lambda pair: -pair[0].epoch)}
    return [by_step[step] for step in sorted(by_step)][-KEPT_CHECKPOINTS:]


def _remove(folder: Path) -> None:
    if folder.is_dir():
        remove_folder(folder)


def _copy(checkpoint: Path, target: Path) -> None:
    _remove(target)
    make_private_folder(target.parent)
    copy_model(checkpoint, target)
