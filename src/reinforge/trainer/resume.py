"""Resumes a stopped run: finds it, checks that it is still the same run, and restores its state."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from reinforge.config.document import parse_yaml
from reinforge.config.dump import Change, compare_configs, dump_data, name_stand_in
from reinforge.config.finetuning_blocks import TranscriptsConfig
from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.loader import load_config
from reinforge.errors import ConfigError, Problem, StorageError
from reinforge.interfaces import TrainerAdapter
from reinforge.registry import Registry
from reinforge.runs.checkpoints import Checkpoints, restore_weights
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.journal.reader import REPAIR_NOTES, JournalReader
from reinforge.runs.rows import BASELINE, EpochSnapshot
from reinforge.runs.run_folder import read_config
from reinforge.runs.summary import describe_resume, load_summary
from reinforge.trainer.context import RunContext
from reinforge.trainer.provenance import Provenance, is_own_run
from reinforge.trainer.setup.reach import list_reach

logger = logging.getLogger(__name__)

SETTINGS_OF_ONE_CALL = {"finetuning.limits.max_minutes", "finetuning.limits.max_tokens", "finetuning.output_dir"}
SETTINGS_OF_ONE_CALL |= {f"finetuning.transcripts.{name}" for name in TranscriptsConfig.model_fields}
SETTINGS_OF_ONE_CALL |= {"finetuning.guards", "finetuning.trackers", "workflow.placement", "workflow.num_processes"}
"""Settings that may differ between the calls of one run, since they do not change what it computes: keys and blocks."""
CLUSTER_SETTINGS = {"address", "num_workers", "min_workers", "placement_timeout_s", "peer_timeout_s"}
"""Likewise, of each trainer adapter: where the workers of `_type: ray` run, and how many."""

NUM_EPOCHS = "finetuning.num_epochs"

MAX_LISTED_CHANGES = 10

ALLOW = "--allow_config_change (in Python: allow_config_change=True)"
PROVENANCE = "provenance"  # the fact of a run that holds its `Provenance`


def load_run_config(
    folder: Path,
    overrides: Sequence[tuple[str, str]] = (),
    registry: Registry | None = None,
    *,
    project_root: Path | None = None,
) -> LoadedConfig:
    """Returns the configuration of a run.

    Args:
        project_root: The folder of the run's Python files, which the user trusts; None: the one that the run names, if
            this user made the run here.
    """
    from reinforge.runs.journal.repair import repair_journal

    repair_journal(folder)
    facts = JournalReader(folder).facts()
    named = facts.get("project_root")
    if not isinstance(named, str) or "\0" in named or not (folder / "config.yml").is_file():
        message = f"{folder} has no configuration: the run stopped during startup"
        raise ConfigError(Problem("", message, f"pass the file too: reinforge finetune FILE --resume {folder}"))
    is_trusted = project_root is not None or is_own_run(folder, Path(named), facts.get("seal"))
    root = Path(named) if project_root is None else Path(os.path.expanduser(project_root)).resolve()
    if project_root is not None and not root.is_dir():
        raise ConfigError(Problem("--project_root", f"there is no folder {root}", "name the folder of the run's code"))
    try:
        loaded = load_config(folder / "config.yml", overrides=overrides, registry=registry, project_root=root)
    except ConfigError as error:
        if not is_trusted:
            raise _refuse_foreign_run(folder, root, []) from error
        raise ConfigError([_explain_secret(problem, folder) for problem in error.problems]) from error
    if not is_trusted:
        raise _refuse_foreign_run(folder, root, list_reach(loaded, registry).format_rows())
    return loaded


def _refuse_foreign_run(folder: Path, root: Path, reached: Sequence[tuple[str, str]]) -> ConfigError:
    """Returns the error for a run folder that this user did not make where it stands; nothing was imported yet."""
    listed = "".join(f"\n    {name}: {text}" for name, text in reached)
    message = (
        f"{folder} was not started here by you: it was copied or moved, or its seal cannot be checked. "
        f"Resuming it imports Python files from {root}{':' if listed else ''}{listed}"
    )
    fix = "if you trust this code, name its folder: --project_root FOLDER; or pass your own file: "
    return ConfigError(Problem("", message, f"{fix}reinforge finetune FILE --resume {folder}"))


def _explain_secret(problem: Problem, folder: Path) -> Problem:
    """Returns a problem of a run's configuration; says why it asks for a variable that stands for a secret."""
    name = name_stand_in(tuple(problem.path.split(".")))
    if f"environment variable {name} is not set" not in problem.message:
        return problem
    message = f"the run was started with a secret written in its file, which run folders do not keep; {name} is not set"
    fix = f"export {name}=..., or pass the file: reinforge finetune FILE --resume {folder}"
    return replace(problem, message=message, fix=fix)


def load_for_verdict(folder: Path, project_root: Path | None = None) -> LoadedConfig:
    """Returns the configuration of a stopped run, for the epochs that it has trained and without its limits."""
    done = [row.epoch for row in JournalReader(folder).snapshot_rows() if row.epoch > BASELINE]
    if not done:
        message = f"{folder.name} has not finished an epoch, so there is nothing to judge"
        raise ConfigError(Problem("", message, f"resume it: {describe_resume(folder)}"))
    if _list_stages((folder / "config.yml").read_text(encoding="utf-8")):
        message = f"{folder.name} is a pipeline, which is judged when it ends or reaches a limit"
        raise ConfigError(Problem("", message, f"resume it: {describe_resume(folder)}"))
    limits = [(path, "null") for path in sorted(SETTINGS_OF_ONE_CALL) if path.startswith("finetuning.limits.")]
    return load_run_config(folder, [(NUM_EPOCHS, str(max(done) + 1)), *limits], project_root=project_root)


def refuse_changes(
    journal: RunJournal,
    text: str,
    data: str,
    provenance: Provenance,
    project_root: Path,
    *,
    allowed: bool,
    judge_only: bool = False,
) -> list[str]:
    """Returns what changed since the run started; refuses changes unless they are allowed.

    Args:
        judge_only: Fewer epochs are no change.
    """
    facts, config = journal.facts(), journal.folder / "config.yml"
    if not config.is_file():  # the run stopped during startup
        return []
    if read_config(journal.folder):
        before = config.read_text(encoding="utf-8")
        differing, old_stages, stages = compare_configs(before, text), _list_stages(before), _list_stages(text)
        last = stages[-1] if stages else None
        kept = (each for each in differing if not _is_of_one_call(each.path) and not _adds_epochs(each, last))
        found = [str(change) for change in kept if not (judge_only and change.path == NUM_EPOCHS)]
        if old_stages != stages and set(old_stages) == set(stages):
            found.append(f"the order of finetuning.pipeline: {', '.join(old_stages)} -> {', '.join(stages)}")
    else:
        found = ["config.yml in the run folder is damaged: it cannot be compared with yours"]
    fix = f"resume it unchanged (without FILE and -o), or pass {ALLOW}"
    if facts.get("data_sha256", data) != data:
        found.append("the examples of the dataset")
    if (known := read_provenance(facts)) is not None and (changes := known.find_changes(provenance, project_root)):
        found += changes
        fix = f"undo the changes to resume it unchanged, or pass {ALLOW}"
    if found and not allowed:
        listed = "".join(f"\n    {change}" for change in found[:MAX_LISTED_CHANGES])
        more = f"\n    and {len(found) - MAX_LISTED_CHANGES} more" if len(found) > MAX_LISTED_CHANGES else ""
        raise ConfigError(Problem("", f"{journal.folder.name} has changed since it started:{listed}{more}", fix))
    return found


def _list_stages(text: str) -> list[str]:
    return list((parse_yaml(text).data.get("finetuning") or {}).get("pipeline") or {})


def _is_of_one_call(path: str) -> bool:
    """True if a key, or a block that holds it, may differ between the calls of one run."""
    block, _, setting = path.partition(".")[2].partition(".")
    if path.startswith("trainer_adapters.") and block and setting in CLUSTER_SETTINGS:
        return True
    return any(path == each or path.startswith(f"{each}.") for each in SETTINGS_OF_ONE_CALL)


def _adds_epochs(change: Change, last_stage: str | None) -> bool:
    """True if a change adds epochs to the run or to its last stage."""
    numbers = isinstance(change.old, int) and isinstance(change.new, int)
    paths = (NUM_EPOCHS, f"finetuning.pipeline.{last_stage}.num_epochs")
    return change.path in paths and numbers and change.new > change.old


def read_provenance(facts: Mapping[str, Any]) -> Provenance | None:
    """Returns what a run was made of when it started; None: it stopped during startup."""
    known = facts.get(PROVENANCE)
    return Provenance.from_dict(known) if isinstance(known, dict) else None


def choose_snapshot(journal: RunJournal, checkpoints: Checkpoints) -> tuple[EpochSnapshot | None, list[str]]:
    """Returns the snapshot to resume from and notes for the user, such as the damaged checkpoints that are skipped.

    A checkpoint newer than the journal was written but not yet recorded, so it is adopted. None: no usable snapshot is
    left, and the run restarts from the beginning.
    """
    notes = [str(note) for note in journal.facts().get(REPAIR_NOTES) or []]
    if notes:
        journal.set_facts(**{REPAIR_NOTES: []})
    damage, known = cache(checkpoints.find_damage), journal.snapshot_rows()
    names, newest = {snapshot.checkpoint for snapshot in known}, known[0].epoch if known else -2
    orphans = [name for name in checkpoints.names() if name not in names]
    adopted = [_read_snapshot(checkpoints, name) for name in orphans if damage(name) is None]
    new = [orphan for orphan in adopted if orphan is not None and orphan.epoch > newest]
    bad = {name: damage(name) for name in reversed(orphans) if damage(name) is not None}
    chosen = None
    for snapshot in [*sorted(new, key=lambda each: -each.epoch), *known]:
        name = snapshot.checkpoint
        if name is None or damage(name) is None:
            # the states of a long run are large together: only the one that is used is read
            chosen = snapshot if isinstance(snapshot, EpochSnapshot) else journal.find_snapshot(snapshot.epoch)
            break
        bad[name] = damage(name)
    if chosen is not None and chosen in new:
        journal.record_snapshot(chosen)
    return chosen, notes + [f"skipping {name}: {reason}" for name, reason in bad.items()]


def _read_snapshot(checkpoints: Checkpoints, name: str) -> EpochSnapshot | None:
    state = checkpoints.read_state(name)
    return None if state is None else EpochSnapshot(state["epoch"], state["version"], name, state)


def read_time_spent(folder: Path) -> dict[str, float]:
    """Returns the seconds in each stage until the last session ended; a killed one has not recorded its own."""
    try:
        return load_summary(folder).wall_time_s
    except StorageError:
        return {}


async def restore_snapshot(
    context: RunContext, adapter: TrainerAdapter, snapshot: EpochSnapshot, *, forget_episodes: bool = False
) -> None:
    """Restores journal, counters and weights from a snapshot.

    Args:
        forget_episodes: True if the configuration has changed, so that later episodes must not be reused.
    """
    context.resumed = snapshot
    version, keeps = snapshot.version, snapshot.checkpoint is not None
    adopts = bool(snapshot.state["adopt"])
    known = {row.version: row.fingerprint for row in context.journal.policy_versions()}
    forgets_jobs = keeps and not adapter.keeps_jobs
    context.journal.rewind(snapshot.epoch, forget_jobs=forgets_jobs, forget_episodes=forget_episodes)
    if version is not None:
        context.journal.forget_versions_from(version if adopts else version + 1)
        context.journal.flush()
    context.policy_versions = context.journal.policy_versions()
    context.validations = context.journal.validations()
    context.restore_counters(snapshot.state["counters"])
    if snapshot.checkpoint is not None and version is not None:
        await restore_weights(adapter, context.folder / snapshot.checkpoint, version)
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


def keep_settings_of_one_call(folder: Path, text: str) -> str:
    """Returns a resolved configuration with the limits and paths that the run was started with.

    They hold for the call that names them, and the next one starts from those of the run again.
    """
    if not (folder / "config.yml").is_file():  # the run stopped during startup
        return text
    before, after = read_config(folder), parse_yaml(text).data
    changed = False
    for path in SETTINGS_OF_ONE_CALL:
        *above, key = path.split(".")
        old, new = _descend(before, above), _descend(after, above)
        if old is not None and new is not None and key in old and old[key] != new.get(key):
            new[key], changed = old[key], True
    return dump_data(after) if changed else text


def count_added_epochs(folder: Path, num_epochs: int) -> int:
    """Returns how many epochs a configuration has more than the run in a folder; 0 if it has not more."""
    if not (folder / "config.yml").is_file():
        return 0
    *above, key = NUM_EPOCHS.split(".")
    known = (_descend(read_config(folder), above) or {}).get(key)
    return max(0, num_epochs - known) if isinstance(known, int) else 0


def add_epochs(folder: Path, num_more: int) -> list[tuple[str, str]]:
    """Returns the overrides that add epochs to the run in a folder, or to the last stage of its pipeline."""
    finetuning = read_config(folder).get("finetuning", {})
    name, stage = next(reversed((finetuning.get("pipeline") or {}).items()), (None, finetuning))
    path = NUM_EPOCHS if name is None else f"finetuning.pipeline.{name}.num_epochs"
    return [(path, str(stage.get("num_epochs", 1) + num_more))] if num_more else []


def _descend(data: Any, keys: list[str]) -> dict[str, Any] | None:
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data if isinstance(data, dict) else None
