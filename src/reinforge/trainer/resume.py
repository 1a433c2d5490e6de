"""Going on with a run that was stopped: which one, whether it is still the same run, and from where."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.loader import load_config
from reinforge.config.schema import TranscriptsConfig
from reinforge.errors import ConfigError, Problem, did_you_mean
from reinforge.files import to_json
from reinforge.interfaces import TrainerAdapter, TrajectoryBuilder
from reinforge.registry import REGISTRY, Registry
from reinforge.runs.checkpoints import Checkpoints
from reinforge.runs.journal import RunStore, Snapshot, read_facts
from reinforge.runs.run_folder import list_runs
from reinforge.trainer.context import RunContext
from reinforge.types.evaluation import EvalInputItem

logger = logging.getLogger(__name__)

LAST = "last"
OF_ONE_CALL = {"finetuning.limits.max_minutes", "finetuning.limits.max_tokens", "finetuning.output_dir"}
OF_ONE_CALL |= {f"finetuning.transcripts.{name}" for name in TranscriptsConfig.model_fields}
"""Settings that may change between the calls of one run: they do not change what it computes."""

MAX_NAMED = 10


def find_run(named: str, output_dir: Path) -> Path:
    """Returns the folder of a run.

    Args:
        named: Its name or folder, or `last` for the one begun last.
        output_dir: Folder of the run folders.

    Raises:
        ConfigError: There is none.
    """
    output_dir = output_dir.expanduser()
    runs = list_runs(output_dir)
    if named == LAST and runs:
        return runs[-1]
    for folder in (Path(named).expanduser(), output_dir / named):
        if (folder / "run.sqlite").is_file():
            return folder
    names = [run.name for run in runs]
    there = f"there: {', '.join(names[-5:])}" if names else "there is none"
    message = f'there is no run "{named}"{did_you_mean(named, names)}'
    raise ConfigError(Problem("", message, f"runs are looked for in {output_dir}; {there}"))


def load_run_config(
    folder: Path, overrides: Sequence[tuple[str, str]] = (), registry: Registry = REGISTRY
) -> LoadedConfig:
    """Returns the configuration that a run was started with.

    Raises:
        ConfigError: It cannot be read back, or not found since the run was stopped before it began.
    """
    facts = read_facts(folder)
    if "project_root" not in facts or not (folder / "config.yml").is_file():
        message = f"{folder} was stopped before it began: it holds no configuration"
        raise ConfigError(Problem("", message, f"name its file too: reinforge finetune FILE --resume {folder}"))
    root = Path(facts["project_root"])
    return load_config(folder / "config.yml", overrides=overrides, registry=registry, project_root=root)


def changes(before: str, after: str) -> list[str]:
    """Returns what differs between two resolved configurations, as `path: old -> new`."""
    old, new = _flat(yaml.safe_load(before) or {}), _flat(yaml.safe_load(after) or {})
    paths = [path for path in dict.fromkeys([*old, *new]) if path not in OF_ONE_CALL]
    differing = [path for path in paths if old.get(path) != new.get(path)]
    return [f"{path}: {_told(old, path)} -> {_told(new, path)}" for path in differing]


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        parts = (_flat(item, f"{path}.{key}" if path else str(key)) for key, item in value.items())
        return {key: item for part in parts for key, item in part.items()}
    return {path: value}


def _told(values: Mapping[str, Any], path: str) -> str:
    return to_json(values[path]) if path in values else "nothing"


def data_sha256(splits: Mapping[str, Sequence[EvalInputItem]]) -> str:
    """Returns a hash of every example and of the split it is in."""
    digest = hashlib.sha256()
    for split, items in splits.items():
        for item in items:
            digest.update(to_json([split, item.id, item.input_obj, item.expected_output_obj]).encode())
    return digest.hexdigest()


def refuse_changes(store: RunStore, text: str, data: str, *, allowed: bool) -> list[str]:
    """Returns what changed since the run was started; refuses it unless it is allowed.

    Args:
        store: The run.
        text: The resolved configuration as it is now.
        data: Hash of the examples as they are now.
        allowed: Go on all the same.

    Raises:
        ConfigError: Something changed that changes what the run computes.
    """
    facts, config = store.facts(), store.folder / "config.yml"
    if not config.is_file():  # it was stopped before it began
        return []
    found = changes(config.read_text(encoding="utf-8"), text)
    if facts.get("data_sha256", data) != data:
        found.append("the examples of the dataset are others than when the run began")
    if found and not allowed:
        told = "".join(f"\n    {change}" for change in found[:MAX_NAMED])
        more = f"\n    and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        message = f"the configuration changed since {store.folder.name} began:{told}{more}"
        raise ConfigError(
            Problem("", message, "leave FILE and -o out to go on as it began, or say --allow_config_change")
        )
    return found


def choose_snapshot(store: RunStore, checkpoints: Checkpoints) -> tuple[Snapshot | None, list[str]]:
    """Returns where a run goes on, and what there is to say about it: damaged checkpoints are skipped aloud.

    A checkpoint that is newer than what the journal knows was committed and not yet recorded: it is adopted. None
    means that nothing durable is left, so that the run begins again.
    """
    damage, known = cache(checkpoints.damage), store.snapshots()
    names, newest = {snapshot.checkpoint for snapshot in known}, known[0].epoch if known else -2
    orphans = [name for name in checkpoints.all() if name not in names]
    adopted = [_adopted(checkpoints, name) for name in orphans if damage(name) is None]
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
        store.snapshot(chosen)
    return chosen, [f"{name} is damaged and not used: {reason}" for name, reason in bad.items()]


def _adopted(checkpoints: Checkpoints, name: str) -> Snapshot | None:
    state = checkpoints.state(name)
    return None if state is None else Snapshot(state["epoch"], state["version"], name, state)


async def go_on_from(
    context: RunContext, adapter: TrainerAdapter, snapshot: Snapshot, *, forget_episodes: bool = False
) -> None:
    """Puts journal, counters and weights back to a snapshot.

    Args:
        context: The run.
        adapter: Loads the weights.
        snapshot: Where it goes on.
        forget_episodes: True where the configuration is another one now: what came after is not used again.

    Raises:
        ConfigError: The backend serves other weights than those, and has no checkpoint of them.
    """
    context.resumed = snapshot
    version, keeps = snapshot.version, snapshot.checkpoint is not None
    adopts = bool(snapshot.state["adopt"])
    known = {row["version"]: row["fingerprint"] for row in context.store.version_rows()}
    context.store.go_back_to(snapshot.epoch, forget_jobs=keeps, forget_episodes=forget_episodes)
    if version is not None:
        context.store.forget_versions(version if adopts else version + 1)
        context.store.flush()
    context.policy_versions = context.store.version_rows()
    context.validations = context.store.validation_rows()
    context.restore_counters(snapshot.state["counters"])
    if snapshot.checkpoint is not None and version is not None:
        await adapter.restore(context.folder / snapshot.checkpoint, version)
    context.store.drop_checkpoints_but(context.checkpoints.all())
    policy = adapter.policy()
    if policy is None or version is None:
        return
    fingerprint = await policy.fingerprint()
    if version not in known and not adopts:  # the process died between the base's checkpoint and its version
        context.version_published(version, fingerprint, 0, snapshot.checkpoint)
    elif known.get(version, fingerprint) != fingerprint:
        message = f"the backend serves other weights than version {version} of {context.run_id}, and none are kept"
        fix = "start a new run; an adapter whose runs can go on implements save and restore"
        raise ConfigError(Problem("", message, fix))


def is_ours(trainer: object, builder: TrajectoryBuilder) -> bool:
    """True if collected episodes may be used again: a user's own builder or trainer is run again as a whole."""
    from reinforge.trainer.builders.dataset import DatasetTrajectoryBuilder
    from reinforge.trainer.builders.group import GroupTrajectoryBuilder
    from reinforge.trainer.loop import EpochTrainer

    ours = GroupTrajectoryBuilder | DatasetTrajectoryBuilder
    return isinstance(trainer, EpochTrainer) and isinstance(builder, ours)
