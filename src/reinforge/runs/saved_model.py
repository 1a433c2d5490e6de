"""Resolves `RUN|PATH` arguments: a run's model, a folder, a GGUF file, a package's or a bundled model, or a hub id."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from reinforge.engine.model.source import PIP, looks_like_gguf
from reinforge.errors import ConfigError, Problem, did_you_mean
from reinforge.files import find_json
from reinforge.registry import REGISTRY
from reinforge.runs.checkpoints import ADAPTER, is_model_folder, list_adapters
from reinforge.runs.rows import BASELINE, ValidationRow, choose_best_validation
from reinforge.runs.run_folder import list_runs

BUNDLED = "bundled:"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class SavedModel:
    path: str  # folder, GGUF file, hub id, `pip:NAME` or `bundled:NAME`
    description: str = ""  # which of a run's models it is; empty for any other model
    adapters: tuple[str, ...] = ()  # of several adapters or models used together, each in a subfolder of `path`
    run: Path | None = None  # folder of the run that it is from; None: it was not named by a run

    def __str__(self) -> str:
        return f"{self.path} ({self.description})" if self.description else self.path

    @property
    def base(self) -> str:
        """The base model of the adapters, or the first of several whole models; a `ConfigError` if they name none."""
        file = Path(self.path) / self.adapters[0] / ADAPTER
        if not file.is_file():
            return str(file.parent)
        settings = find_json(file)
        base = settings.get("base_model_name_or_path") if isinstance(settings, dict) else None
        if not isinstance(base, str):
            raise ConfigError(Problem("", f"{file} names no base model (base_model_name_or_path)"))
        return base


def find_model(name: str, output_dir: Path, argument: str = "--model") -> SavedModel:
    """Returns the model of a run (its `model/`, else its best checkpoint), or any that `policy.model` may name.

    Args:
        name: A run's name or folder, `last`, a model's folder, a GGUF file, `pip:NAME`, `bundled:NAME`, or a hub id.
        argument: The command line option that it came from, for messages.
    """
    if name.startswith((BUNDLED, PIP)):
        return SavedModel(name)
    if looks_like_gguf(file := Path(name).expanduser()):
        return SavedModel(str(file))
    runs = list_runs(output_dir)
    if name == "last" and runs:
        return _find_run_model(runs[-1], argument)
    for folder in (Path(name).expanduser(), output_dir.expanduser() / name):
        if (folder / "run.sqlite").is_file():
            return _find_run_model(folder, argument)
        if is_model_folder(folder) or list_adapters(folder):
            return SavedModel(str(folder), adapters=list_adapters(folder))
        if folder.is_dir() and folder != output_dir.expanduser():
            message = f"{folder} is neither a run folder (no run.sqlite) nor a model (no config.json)"
            raise ConfigError(Problem(argument, message, "name a run, its folder, or a folder with a model"))
    if HUB_ID.fullmatch(name) and not Path(name).parent.is_dir():
        return SavedModel(name)
    names = [run.name for run in runs]
    known = f"the newest runs in {output_dir} are {', '.join(names[-5:])}" if names else f"{output_dir} has no runs"
    bundled = [f"{BUNDLED}{model}" for model in REGISTRY.names("model")]
    hint = f', did you mean "{BUNDLED}{name}"?' if f"{BUNDLED}{name}" in bundled else did_you_mean(name, names)
    message = f'there is no run and no folder "{name}"{hint}'
    kinds = f"a run, a folder, a GGUF file, pip:PACKAGE, a bundled model ({', '.join(bundled)})"
    fix = f"name {kinds} or a Hugging Face model id; {known}"
    raise ConfigError(Problem(argument, message, fix))


def _find_run_model(folder: Path, argument: str) -> SavedModel:
    promoted = folder / "model"
    if is_model_folder(promoted) or list_adapters(promoted):
        return SavedModel(str(promoted), "the promoted model", list_adapters(promoted), folder)
    summary = find_json(folder / "summary.json") or {}
    checkpoint, description = summary.get("checkpoint"), "the best checkpoint, not promoted"
    if not checkpoint:  # the run did not reach its end, or the base model was the best
        rows = [ValidationRow.from_dict(row) for row in find_json(folder / "validation_history.json") or []]
        best = choose_best_validation(rows, (summary.get("best") or {}).get("metric"))
        if best is not None and best.checkpoint:
            checkpoint = f"checkpoints/{Path(best.checkpoint).name}"
            description = "the base model: no checkpoint was better" if best.epoch == BASELINE else description
    if checkpoint and (is_model_folder(folder / checkpoint) or list_adapters(folder / checkpoint)):
        return SavedModel(str(folder / checkpoint), description, list_adapters(folder / checkpoint), folder)
    message = f"the run {folder} has no model: none was promoted, and there is no best checkpoint"
    raise ConfigError(Problem(argument, message, f"see {folder / 'summary.json'} for how the run ended"))
