"""The logger of adversarial training, and Weights & Biases."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any

from reinforge.errors import ConfigError, Problem

logger = logging.getLogger("reinforge.redteam")  # logs the metrics of each step (INFO) and warnings


def config_logging() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logger.setLevel(logging.DEBUG)


class ASTRAWandbLogger:
    """A run of Weights & Biases; install `wandb` separately.

    Differs from astra-rl: the arguments are those of `wandb.init`, the caller's dict is not changed, and the key may
    come from `wandb login` instead of an environment variable.

    Example: `ASTRAWandbLogger({"project": "attacks"}).log({"loss": 0.5})`.
    """

    def __init__(self, wandb_kwargs: Mapping[str, Any]):
        try:
            wandb: Any = importlib.import_module("wandb")
        except ImportError:
            fix = "run `pip install wandb`, or leave use_wandb out; log_file has the same metrics"
            raise ConfigError(Problem("use_wandb", "the package wandb is not installed", fix)) from None
        self.run = wandb.init(**wandb_kwargs)

    def log(self, current_logs: Mapping[Any, Any]) -> None:
        self.run.log(dict(current_logs))
