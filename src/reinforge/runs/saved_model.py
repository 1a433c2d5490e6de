"""Which model a person means by `RUN|PATH`: a run's result, a folder with a model, or a hub id."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforge.adapters.openai_model import HOSTED_MODEL
from reinforge.errors import ConfigError, Problem, did_you_mean
from reinforge.runs.validations import BASELINE, choose_best

ADAPTER = "adapter_config.json"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class SavedModel:
    """A model that can be loaded.

    Attributes:
        path: Folder or hub id.
        what: Which one of a run's models it is; empty for any other.
        adapters: Names of several adapters of one base, each in a folder of its own below `path`.
    """

    path: str
    what: str = ""
    adapters: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.path} ({self.what})" if self.what else self.path

    @property
    def base(self) -> str:
        """The model that the adapters belong to."""
        return str(_read(Path(self.path) / self.adapters[0] / ADAPTER)["base_model_name_or_path"])


def find_model(named: str, output_dir: Path, argument: str = "--model") -> SavedModel:
    """Returns the model of a run (its `model/`, else its best checkpoint), of a folder, or of a hub id.

    Args:
        named: A run's name or folder, a model's folder, or a hub id.
        output_dir: Folder of the run folders.
        argument: What the person gave it as, for messages.

    Raises:
        ConfigError: There is none, with what was looked for.
    """
    for folder in (Path(named).expanduser(), output_dir.expanduser() / named):
        if (folder / "run.sqlite").is_file():
            return _of_run(folder, argument)
        if is_model(folder) or adapters_in(folder):
            return SavedModel(str(folder), adapters=adapters_in(folder))
        if folder.is_dir() and folder != output_dir.expanduser():
            message = f"{folder} is neither a run folder (no run.sqlite) nor a model (no config.json)"
            raise ConfigError(Problem(argument, message, "name a run, its folder, or a folder with a model"))
    if HUB_ID.fullmatch(named) and not Path(named).parent.is_dir():
        return SavedModel(named)
    runs = sorted(path.parent.name for path in output_dir.expanduser().glob("*/run.sqlite"))
    known = f"; there: {', '.join(runs[-5:])}" if runs else ""
    message = f'there is no run and no folder "{named}"{did_you_mean(named, runs)}'
    raise ConfigError(Problem(argument, message, f"runs are looked for in {output_dir}{known}"))


def is_model(folder: Path) -> bool:
    """True for a folder with a model, with an adapter of one, or with the name of one that a service holds."""
    return any((folder / name).is_file() for name in ("config.json", ADAPTER, HOSTED_MODEL))


def adapters_in(folder: Path) -> tuple[str, ...]:
    """Returns the names of adapters that each have a folder of their own below this one, as runs of several write."""
    return () if is_model(folder) else tuple(sorted(path.parent.name for path in folder.glob(f"*/{ADAPTER}")))


def _of_run(folder: Path, argument: str) -> SavedModel:
    promoted = folder / "model"
    if is_model(promoted) or adapters_in(promoted):
        return SavedModel(str(promoted), "the promoted model", adapters_in(promoted))
    summary = _read(folder / "summary.json") or {}
    checkpoint, what = summary.get("checkpoint"), "the best checkpoint, not promoted"
    if not checkpoint:  # the run was cut short, or its base was the best
        best = choose_best(_read(folder / "validation_history.json") or [], (summary.get("best") or {}).get("metric"))
        if best and best.get("checkpoint"):
            checkpoint = f"checkpoints/{Path(best['checkpoint']).name}"
            what = "the model it began with: none was better" if best["epoch"] == BASELINE else what
    if checkpoint and (is_model(folder / checkpoint) or adapters_in(folder / checkpoint)):
        return SavedModel(str(folder / checkpoint), what, adapters_in(folder / checkpoint))
    message = f"the run {folder} has no model: nothing was promoted and no best checkpoint is kept"
    raise ConfigError(Problem(argument, message, f"see {folder / 'summary.json'} for how it ended"))


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
