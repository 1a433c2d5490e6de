"""Resumes a stopped run: finds it, checks that it is still the same run, and restores its state."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from reinforge.config.compare import compare_configs
from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.loader import load_config
from reinforge.config.schema import TranscriptsConfig
from reinforge.errors import ConfigError, Problem, did_you_mean
from reinforge.files import to_json
from reinforge.interfaces import Trainer, TrainerAdapter, TrajectoryBuilder
from reinforge.registry import Registry
from reinforge.runs.checkpoints import Checkpoints
from reinforge.runs.journal import RunJournal
from reinforge.runs.journal_reader import JournalReader
from reinforge.runs.rows import EpochSnapshot
from reinforge.runs.run_folder import list_runs
from reinforge.trainer.context import RunContext
from reinforge.types.evaluation import EvalInputItem

logger = logging.getLogger(__name__)

LAST = "last"
SETTINGS_OF_ONE_CALL = {"finetuning.limits.max_minutes", "finetuning.limits.max_tokens", "finetuning.output_dir"}
SETTINGS_OF_ONE_CALL |= {f"finetuning.transcripts.{name}" for name in TranscriptsConfig.model_fields}
"""Settings that may differ between the calls of one run, since they do not change what it computes."""

MAX_LISTED_CHANGES = 10


def find_run(name: str, output_dir: Path) -> Path:
    """Returns the folder of a run.

    Args:
        name: Its name or folder, or `last` for the one started last.
        output_dir: Folder of the run folders.

    Raises:
        ConfigError: There is no such run.
    """
    output_dir = output_dir.expanduser()
    runs = list_runs(output_dir)
    if name == LAST and runs:
        return runs[-1]
    for folder in (Path(name).expanduser(), output_dir / name):
        if (folder / "run.sqlite").is_file():
            return folder
    names = [run.name for run in runs]
    there = f"the newest runs in {output_dir} are {', '.join(names[-5:])}" if names else f"{output_dir} has no runs"
    message = f'there is no run "{name}"{did_you_mean(name, names)}'
    raise ConfigError(Problem("", message, f"name a run or its folder; {there}"))


def load_run_config(
    folder: Path, overrides: Sequence[tuple[str, str]] = (), registry: Registry | None = None
) -> LoadedConfig:
    """Returns the configuration of a run.

    Raises:
        ConfigError: It cannot be read, or the run stopped before it wrote its configuration.
    """
    facts = JournalReader(folder).facts()
    if "project_root" not in facts or not (folder / "config.yml").is_file():
        message = f"{folder} has no configuration: the run stopped during startup"
        raise ConfigError(Problem("", message, f"pass the file too: reinforge finetune FILE --resume {folder}"))
    root = Path(facts["project_root"])
    return load_config(folder / "config.yml", overrides=overrides, registry=registry, project_root=root)


def hash_data(splits: Mapping[str, Sequence[EvalInputItem]]) -> str:
    """Returns a hash over all examples and their splits."""
    digest = hashlib.sha256()
    for split, items in splits.items():
        for item in items:
            digest.update(to_json([split, item.id, item.input_obj, item.expected_output_obj]).encode())
    return digest.hexdigest()


def refuse_changes(journal: RunJournal, text: str, data: str, *, allowed: bool) -> list[str]:
    """Returns what changed since the run started; refuses changes unless they are allowed.

    Args:
        journal: The run's journal.
        text: The current resolved configuration.
        data: Hash of the current examples.
        allowed: Resume nevertheless.

    Raises:
        ConfigError: A change affects what the run computes.
    """
    facts, config = journal.facts(), journal.folder / "config.yml"
    if not config.is_file():  # the run stopped during startup
        return []
    differing = compare_configs(config.read_text(encoding="utf-8"), text)
    found = [str(change) for change in differing if change.path not in SETTINGS_OF_ONE_CALL]
    if facts.get("data_sha256", data) != data:
        found.append("the examples of the dataset")
    if found and not allowed:
        listed = "".join(f"\n    {change}" for change in found[:MAX_LISTED_CHANGES])
        more = f"\n    and {len(found) - MAX_LISTED_CHANGES} more" if len(found) > MAX_LISTED_CHANGES else ""
        message = f"the configuration of {journal.folder.name} has changed since the run started:{listed}{more}"
        raise ConfigError(
            Problem("", message, "leave out FILE and -o to resume it unchanged, or pass --allow_config_change")
        )
    return found


def choose_snapshot(journal: RunJournal, checkpoints: Checkpoints) -> tuple[EpochSnapshot | None, list[str]]:
    """Returns the snapshot to resume from and notes for the user, such as the damaged checkpoints that are skipped.

    A checkpoint newer than the journal was written but not yet recorded, so it is adopted. None: no usable snapshot is
    left, and the run restarts from the beginning.
    """
    damage, known = cache(checkpoints.find_damage), journal.snapshots()
    names, newest = {snapshot.checkpoint for snapshot in known}, known[0].epoch if known else -2
    orphans = [name for name in checkpoints.names() if name not in names]
    adopted = [_read_snapshot(checkpoints, name) for name in orphans if damage(name) is None]
    new = [orphan for orphan in adopted if orphan is not None and orphan.epoch > newest]
    bad = {name: damage(name) for name in reversed(orphans) if damage(name) is not None}
    chosen = None
    for snapshot in [*sorted(new, key=lambda each: -each.epoch), *known]:
        name = snapshot.checkpoint
        if name is None or damage(name) is None:
            chosen = snapshot
            break
        bad[name] = damage(name)
    if chosen in new:
        journal.record_snapshot(chosen)
    return chosen, [f"skipping {name}: {reason}" for name, reason in bad.items()]


def _read_snapshot(checkpoints: Checkpoints, name: str) -> EpochSnapshot | None:
    state = checkpoints.read_state(name)
    return None if state is None else EpochSnapshot(state["epoch"], state["version"], name, state)


async def restore_snapshot(
    context: RunContext, adapter: TrainerAdapter, snapshot: EpochSnapshot, *, forget_episodes: bool = False
) -> None:
    """Restores journal, counters and weights from a snapshot.

    Args:
        context: The run.
        adapter: Loads the weights.
        snapshot: The snapshot to resume from.
        forget_episodes: True if the configuration has changed, so that later episodes must not be reused.

    Raises:
        ConfigError: The backend serves other weights and has no checkpoint of the right ones.
    """
    context.resumed = snapshot
    version, keeps = snapshot.version, snapshot.checkpoint is not None
    adopts = bool(snapshot.state["adopt"])
    known = {row.version: row.fingerprint for row in context.journal.policy_versions()}
    context.journal.rewind(snapshot.epoch, forget_jobs=keeps, forget_episodes=forget_episodes)
    if version is not None:
        context.journal.forget_versions_from(version if adopts else version + 1)
        context.journal.flush()
    context.policy_versions = context.journal.policy_versions()
    context.validations = context.journal.validations()
    context.restore_counters(snapshot.state["counters"])
    if snapshot.checkpoint is not None and version is not None:
        await adapter.restore(context.folder / snapshot.checkpoint, version)
    context.journal.forget_checkpoints_except(context.checkpoints.names())
    policy = adapter.policy()
    if policy is None or version is None:
        return
    fingerprint = await policy.fingerprint()
    if version not in known and not adopts:  # the process died between the base's checkpoint and its version
        context.record_version(version, fingerprint, 0, snapshot.checkpoint)
    elif known.get(version, fingerprint) != fingerprint:
        message = f"the backend no longer serves version {version} of {context.run_id}, and no checkpoint has it"
        fix = "start a new run; to make runs resumable, implement save and restore in the trainer adapter"
        raise ConfigError(Problem("", message, fix))


def can_reuse_episodes(trainer: Trainer, builder: TrajectoryBuilder) -> bool:
    """Returns True if a resumed run may reuse collected episodes; other trainers and builders collect again."""
    return trainer.is_resumable and builder.is_resumable
