"""The training loop.

configuration.py   the settings; does not import torch
harness.py         experiences: trees sampled, flattened and batched
trainer.py         optimizer steps, evaluation, limits
checkpoints.py     checkpoints, to resume training
"""

from __future__ import annotations

from reinforge.redteam.training.configuration import TrainingConfiguration
from reinforge.redteam.training.harness import Harness
from reinforge.redteam.training.trainer import Trainer

__all__ = ["Harness", "Trainer", "TrainingConfiguration"]
