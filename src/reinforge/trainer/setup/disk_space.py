"""Whether the checkpoints of a run fit on the disk of its folder."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.policy import LoRAConfig, PolicyConfig
from reinforge.engine.learning_rate import count_parameters
from reinforge.engine.model.preflight import read_shapes
from reinforge.engine.model.source import find_weights
from reinforge.errors import Problem
from reinforge.files import find_existing_folder

CHECKPOINTS_KEPT = 3  # a run keeps the base, the best and the newest checkpoint

BYTES_PER_WEIGHT = 4  # of an adapter, and of a model that was loaded from a GGUF file: quantized weights become float32

OUTPUT_DIR = "finetuning.output_dir"


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """Disk space for the run folder, in bytes."""

    folder: str  # the nearest folder that exists
    free: int
    needed: int | None  # bytes of the checkpoints; None if the model's size is not known yet


def free_disk_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def find_disk_problems(loaded: LoadedConfig, disk: DiskSpace) -> list[Problem]:
    if disk.needed is None or disk.free >= disk.needed:
        return []
    needed = f"the checkpoints need {disk.needed / 2**30:.1f} GiB"
    message = f"{disk.folder} has {disk.free / 2**30:.1f} GiB free, but {needed}"
    fix = "free some space, or choose a folder on another disk"
    return [Problem(OUTPUT_DIR, message, fix, loaded.locate(OUTPUT_DIR))]


def measure_disk(loaded: LoadedConfig, free_bytes: Callable[[Path], int] = free_disk_bytes) -> DiskSpace:
    folder = find_existing_folder(Path(loaded.config.finetuning.output_dir).expanduser())
    policy = loaded.config.finetuning.policy
    size = _measure_model(policy.model) if policy.lora is None else _measure_adapter(policy.model, policy.lora)
    needed = size * (CHECKPOINTS_KEPT * _count_copies(policy) + 1) if size else None
    return DiskSpace(str(folder), free_bytes(folder), needed)


def _measure_model(model: str | None) -> int:
    """Returns the bytes of a model's weights; 0: they are not on this machine, or no folder and no GGUF file."""
    folder = Path(model or "")
    if model is not None and not folder.is_dir() and (source := find_weights(model)) is not None:
        if source.is_gguf:
            return BYTES_PER_WEIGHT * (count_parameters(model) or 0)
        folder = Path(source.location)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0


def _measure_adapter(model: str | None, lora: LoRAConfig) -> int:
    """Returns the most bytes of an adapter in float32, as if every matrix had one; 0: the weights are not known.

    Example: a matrix of 100 x 20, rank 4 -> 4 x 4 x (100 + 20) = 1,920; in `modules_to_save` 4 x 100 x 20 more.
    """
    source, size = find_weights(model), 0
    for name, shape in () if source is None or source.is_gguf else read_shapes(Path(source.location)):
        *outer, rows, columns = 1, 1, *shape
        size += BYTES_PER_WEIGHT * lora.r * math.prod(outer) * (rows + columns)
        if not {*name.split(".")}.isdisjoint(lora.modules_to_save or ()):
            size += BYTES_PER_WEIGHT * math.prod(shape)
    return size


def _count_copies(policy: PolicyConfig) -> int:
    """Returns a checkpoint's size in models: the weights, the moments, and float32 copies of weights with fewer bits.

    Example: adamw -> 3; adamw in bfloat16 -> 1 + 2 (1 + 2) = 7, but with LoRA 3: adapters are in float32.
    """
    moments = policy.optimizer.num_moments
    return 1 + moments if policy.dtype != "bfloat16" or policy.lora else 1 + 2 * (1 + moments)
