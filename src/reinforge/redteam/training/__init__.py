"""The loop.

configuration.py   the settings, in a class without torch
harness.py         experiences: trees drawn, flattened and batched
trainer.py         optimizer steps, checkpoints, evaluation, limits
"""

from __future__ import annotations

from reinforge.redteam.training.configuration import TrainingConfiguration
from reinforge.redteam.training.harness import Harness
from reinforge.redteam.training.trainer import Trainer

__all__ = ["Harness", "Trainer", "TrainingConfiguration"]
