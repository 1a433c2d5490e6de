"""Checkpoints in the Hugging Face layout, with the training state next to them.

    step-000003/
      model.safetensors  config.json  generation_config.json  tokenizer.json  tokenizer_config.json  chat_template.jinja
      adapter_model.safetensors  adapter_config.json   with LoRA, instead of the model and its config
      training/optimizer.safetensors   optimizer state, and float32 copies of low-precision weights
      training/optimizer-00001-of-00002.safetensors   instead, some rows of each of its tensors, by each process
      training/critic.safetensors      the value head, if the algorithm has one
      training/state.json              step count, version, random state
      manifest.json                    size and SHA-256 of every file, written last (`reinforge.files`)

Tensors are stored as safetensors only.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging as transformers_logging

from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.model.heads import ValueHead
from reinforge.engine.model.loading import load_module
from reinforge.engine.training.learner import Learner
from reinforge.errors import EngineError, boundary
from reinforge.files import storage_boundary

if TYPE_CHECKING:
    from reinforge.engine.training.sharding import ShardedModel

TRAINING, OPTIMIZER = "training", "optimizer.safetensors"
_ADAPTER = re.compile(r"(\.lora_[AB]\.)[^.]+\.")
CRITIC = "critic.safetensors"


@dataclass(slots=True)
class TrainingState:
    """The contents of `training/state.json`."""

    version: int  # version of the weights
    num_steps: int  # optimizer steps made
    num_begun: int  # replies started, which is the sampler's position in its random stream
    rng: str  # state of torch's generator, base64
    stage: str | None = None  # the stage of a pipeline whose optimizer state it is; None: no stage has begun
    stage_version: int | None = None  # version of the weights that the stage began with, which are its reference


@contextmanager
def hide_progress_bars() -> Iterator[None]:
    were_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_enabled:
            transformers_logging.enable_progress_bar()


def write(
    folder: Path, tokenizer: Any, learner: Learner, version: int, num_begun: int, *, with_training: bool = True
) -> None:
    """Writes a checkpoint's files into a new folder; the caller makes them durable with `commit_folder`.

    Where the model is sharded, all processes call it together: each writes its rows of the optimizer's state, and the
    first all else.

    Args:
        learner: Has the model, of whose adapters the active one is written, and the training state.
        with_training: False: only the model is written.
    """
    model = learner.model
    moments = {name: value.detach() for name, value in learner.state().items()} if with_training else {}
    num_bytes: int | None = None
    if learner.sharded is None:
        weights = model.trained_parameters if model.has_adapters else dict(model.module.named_parameters())
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (*weights.values(), *moments.values()))
    with storage_boundary(folder, num_bytes), hide_progress_bars():
        folder.mkdir(parents=True, exist_ok=True)
        if with_training:
            (folder / TRAINING).mkdir(exist_ok=True)
        whole = folder / TRAINING / OPTIMIZER
        if learner.sharded is not None:
            from reinforge.engine.training import sharded_files

            sharded_files.write_model(folder, model, learner.sharded)
            if with_training:
                sharded_files.write_moments(whole, moments, learner.sharded)
            if not learner.sharded.is_first:
                return
        else:
            model.module.save_pretrained(folder)
            if with_training:
                save_file({name: value.cpu().contiguous() for name, value in moments.items()}, whole)
        tokenizer.save_pretrained(folder)
        if not with_training:
            return
        rng = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()
        state = TrainingState(version, learner.num_steps, num_begun, rng, learner.stage, learner.stage_version)
        if learner.critic is not None:
            head = {name: value.cpu().contiguous() for name, value in learner.critic.state_dict().items()}
            save_file(head, folder / TRAINING / CRITIC)
        (folder / TRAINING / "state.json").write_text(json.dumps(asdict(state), indent=2) + "\n")


@torch.no_grad()
def load_weights(folder: Path, model: CausalModel, sharded: ShardedModel | None = None) -> None:
    """Gives a model the weights of a checkpoint.

    Args:
        sharded: The model's shards, which get their rows if it is divided.
    """
    divided = sharded if sharded is not None and sharded.is_divided else None
    if model.has_adapters:
        with nullcontext() if divided is None else divided.use_whole(divided.shards):
            _load_adapters(folder, model)
        return
    with hide_progress_bars():
        source = dict(load_module(folder, model.dtype).named_parameters())
    targets = dict(model.module.named_parameters())
    shapes = {name: p.shape for name, p in targets.items()} if divided is None else divided.shapes
    if {name: p.shape for name, p in source.items()} != shapes:
        raise EngineError(f"{folder} holds a different model: names or shapes of its parameters do not match")
    for name, parameter in targets.items():
        if divided is None:
            parameter.copy_(source[name])
        else:
            divided.put(name, source[name])


def _load_adapters(folder: Path, model: CausalModel) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    with boundary(EngineError, f"cannot read the adapters of {folder}"):
        source = load_file(folder / "adapter_model.safetensors")
        saved = json.loads((folder / "adapter_config.json").read_text())
    targets = get_peft_model_state_dict(model.module, adapter_name=model.adapter)
    source = {name.removeprefix("base_model.model."): value for name, value in source.items()}
    if {name: value.shape for name, value in source.items()} != {name: value.shape for name, value in targets.items()}:
        raise EngineError(
            f"{folder} holds a different adapter: it belongs to other layers, has another rank, or saves other modules"
        )
    settings = model.module.peft_config[model.adapter]
    for name in ("lora_alpha", "use_rslora"):
        if saved.get(name, False) != getattr(settings, name):
            raise EngineError(
                f"{folder} holds an adapter with {name} {saved.get(name, False)}, but finetuning.policy.lora sets "
                f"{getattr(settings, name)}, which scales it differently; use the same setting"
            )
    set_peft_model_state_dict(model.module, source, adapter_name=model.adapter)


def load_critic(folder: Path, critic: ValueHead) -> None:
    """Restores a checkpoint's value head; without one in the checkpoint the head is reset."""
    file = folder / TRAINING / CRITIC
    if not file.is_file():
        critic.reset()
        return
    with boundary(EngineError, f"cannot read {file}"):
        critic.load_state_dict(load_file(file))


def load_training(folder: Path, learner: Learner) -> tuple[dict[str, Tensor], TrainingState] | None:
    """Returns the optimizer's tensors and the training state, or None if the folder holds only a model.

    The tensors are called as those of the learner, and are its rows where its model is sharded; any number of
    processes may have written them.
    """
    training = folder / TRAINING
    if not training.is_dir():
        return None
    with boundary(EngineError, f"cannot read {training}"):
        state = TrainingState(**json.loads((training / "state.json").read_text()))
        model = learner.model
        rename = partial(rename_adapter, adapter=model.adapter) if model.has_adapters else str
        whole = training / OPTIMIZER
        if learner.sharded is None and whole.is_file():
            return {rename(name): value for name, value in load_file(whole).items()}, state
        from reinforge.engine.training.sharded_files import read_moments

        return read_moments(whole, learner.sharded, rename), state


def rename_adapter(name: str, adapter: str) -> str:
    """Returns the name that a tensor of one adapter has for another.

    Example: exp_avg.model.layers.0.mlp.up_proj.lora_A.one.weight, adapter two -> ....lora_A.two.weight
    """
    return _ADAPTER.sub(rf"\g<1>{adapter}.", name)


def restore_rng(state: TrainingState) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state.rng)), dtype=torch.uint8))
