"""`policy.dtype: auto` of a run: chosen once, when it starts, and kept when it is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from reinforge.config.loaded_config import LoadedConfig
from reinforge.engine import import_engine
from reinforge.runs.run_folder import read_config

if TYPE_CHECKING:
    from reinforge.engine.model.dtype import DtypeChoice


def settle_dtype(loaded: LoadedConfig, resumed: Path | None) -> DtypeChoice | None:
    """Replaces `auto` by the type that the run computes in; returns the choice, or None if there was nothing to choose.

    `config.yml` of the run folder then names the type, so that whatever reads it loads the same one.
    """
    config = loaded.config.finetuning
    if config.policy.dtype != "auto":
        return None
    import_engine()  # says what to install if torch is missing
    from reinforge.engine.model.dtype import DtypeChoice, choose_dtype

    if resumed is not None and (known := _read_dtype(resumed)) is not None:
        choice = DtypeChoice(known, "as when the run started")
    else:
        choice = choose_dtype(config.policy, config.device, deterministic=config.deterministic)
    config.policy = config.policy.model_copy(update={"dtype": choice.dtype})
    return choice


def _read_dtype(folder: Path) -> str | None:
    """Returns the type that a run folder's configuration names; None: it stopped during startup."""
    known = ((read_config(folder).get("finetuning") or {}).get("policy") or {}).get("dtype")
    return known if known in ("float32", "bfloat16") else None
