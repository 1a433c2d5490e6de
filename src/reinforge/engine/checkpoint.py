"""Checkpoints in Hugging Face's layout, with what training needs beside them.

    step-000003/
      model.safetensors  config.json  generation_config.json  tokenizer.json  tokenizer_config.json  chat_template.jinja
      training/optimizer.safetensors   moments of the optimizer
      training/state.json              steps, version, random state

Written to a temporary name, forced to disk and renamed: a folder that bears its name is whole. safetensors only.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging as transformers_logging

from reinforge.engine.learner import Learner
from reinforge.engine.model import CausalModel, load_module
from reinforge.errors import EngineError, StorageError, boundary

TRAINING = "training"


@dataclass(slots=True)
class TrainingState:
    """What `training/state.json` holds.

    Attributes:
        version: Version of the weights.
        num_steps: Optimizer steps made.
        num_begun: Replies begun, which place the sampler in its stream of draws.
        rng: State of torch's generator, base64.
    """

    version: int
    num_steps: int
    num_begun: int
    rng: str


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps transformers from drawing progress bars into our output."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def save(folder: Path, model: CausalModel, tokenizer: Any, learner: Learner, version: int, num_begun: int) -> None:
    """Writes a checkpoint; one that stands there already is replaced.

    Raises:
        StorageError: It cannot be written.
    """
    rng = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()
    state = TrainingState(version, learner.num_steps, num_begun, rng)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    with boundary(StorageError, f"write the checkpoint {folder}"), quiet():
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / TRAINING).mkdir(parents=True)
        model.module.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        moments = {name: value.detach().cpu().contiguous() for name, value in learner.state().items()}
        save_file(moments, temporary / TRAINING / "optimizer.safetensors")
        (temporary / TRAINING / "state.json").write_text(json.dumps(asdict(state), indent=2) + "\n")
        publish_folder(temporary, folder)


def publish_folder(temporary: Path, folder: Path) -> None:
    """Forces a folder's files to disk and gives it its name."""
    for path in (*temporary.rglob("*"), temporary):
        _force(path)
    if folder.exists():
        replaced = folder.with_name(f".{folder.name}.{os.getpid()}.old")
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
        temporary.rename(folder)
        shutil.rmtree(replaced)
    else:
        temporary.rename(folder)
    _force(folder.parent)


def _force(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@torch.no_grad()
def load_weights(folder: Path, model: CausalModel) -> None:
    """Copies a folder's weights into the model, in place.

    Raises:
        EngineError: The folder holds another model.
    """
    with quiet():
        source = dict(load_module(folder, model.dtype).named_parameters())
    targets = dict(model.module.named_parameters())
    if {name: p.shape for name, p in source.items()} != {name: p.shape for name, p in targets.items()}:
        raise EngineError(f"{folder} holds another model: its parameters have other names or shapes")
    for name, parameter in targets.items():
        parameter.copy_(source[name])


def load_training(folder: Path) -> tuple[dict[str, Tensor], TrainingState] | None:
    """Returns the optimizer's tensors and the state, or None where the folder holds only a model."""
    training = folder / TRAINING
    if not training.is_dir():
        return None
    with boundary(EngineError, f"read {training}"):
        state = TrainingState(**json.loads((training / "state.json").read_text()))
        return load_file(training / "optimizer.safetensors"), state


def restore_rng(state: TrainingState) -> None:
    """Puts torch's generator back."""
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state.rng)), dtype=torch.uint8))


def copy_model(checkpoint: Path, target: Path) -> None:
    """Copies the model's files of a checkpoint, not the training's, to `target`.

    Raises:
        StorageError: They cannot be copied.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    with boundary(StorageError, f"copy the model of {checkpoint} to {target}"):
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(checkpoint, temporary, ignore=shutil.ignore_patterns(TRAINING))
        publish_folder(temporary, target)
