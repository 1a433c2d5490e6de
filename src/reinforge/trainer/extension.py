"""What one call of `--resume` may change: its limits, for that call alone, and the number of epochs, for good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from reinforge.config.dump import dump_data
from reinforge.runs.run_folder import read_config
from reinforge.trainer.resume import NUM_EPOCHS, SETTINGS_OF_ONE_CALL

CONFIG = "config.yml"


def keep_settings_of_one_call(folder: Path, text: str) -> str:
    """Returns a resolved configuration with the limits and paths that the run was started with.

    They hold for the call that names them, and the next one starts from those of the run again.

    Args:
        folder: The run folder, with the configuration of the run so far.
        text: The resolved configuration of this call.
    """
    if not (folder / CONFIG).is_file():  # the run stopped during startup
        return text
    before, after = read_config(folder), yaml.safe_load(text)
    changed = False
    for path in SETTINGS_OF_ONE_CALL:
        *above, key = path.split(".")
        old, new = _descend(before, above), _descend(after, above)
        if old is not None and new is not None and key in old and old[key] != new.get(key):
            new[key], changed = old[key], True
    return dump_data(after) if changed else text


def count_added_epochs(folder: Path, num_epochs: int) -> int:
    """Returns how many epochs a configuration has more than the run in a folder; 0 if it has not more."""
    if not (folder / CONFIG).is_file():
        return 0
    *above, key = NUM_EPOCHS.split(".")
    known = (_descend(read_config(folder), above) or {}).get(key)
    return max(0, num_epochs - known) if isinstance(known, int) else 0


def _descend(data: Any, keys: list[str]) -> dict[str, Any] | None:
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data if isinstance(data, dict) else None
