"""Checkpoints of a model that is divided among processes: each writes its rows, which any number of processes reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.training.scarce_memory import allocate_file
from reinforge.engine.training.sharding import ShardedModel
from reinforge.errors import EngineError


def write_model(folder: Path, model: CausalModel, sharded: ShardedModel) -> None:
    """Writes the model as the first process; all call it together."""
    if not sharded.is_divided:
        if sharded.is_first:
            model.module.save_pretrained(folder)
    elif model.has_adapters:
        with sharded.use_whole(sharded.shards):
            if sharded.is_first:
                model.module.save_pretrained(folder)
    else:
        whole = collect_state(model, sharded)
        if sharded.is_first:
            model.module.save_pretrained(folder, state_dict=whole)


def collect_state(model: CausalModel, sharded: ShardedModel) -> dict[str, Tensor]:
    """Returns all of a divided model's weights in the first process; all call it together.

    They are joined one after the other into a file without a name, so neither a device nor a process's own memory ever
    has all of them.
    """
    buffers = dict(model.module.named_buffers())
    found = {name: tensor for name, tensor in model.module.state_dict().items() if name in buffers}
    like = {
        name: torch.empty(each, dtype=sharded.get_dtype(name), device="meta") for name, each in sharded.shapes.items()
    }
    whole = allocate_file(like) if sharded.is_first else {}
    for name in like:
        joined = sharded.join(name)
        if sharded.is_first:
            whole[name].copy_(joined)
    return found | whole


def write_moments(whole: Path, moments: Mapping[str, Tensor], sharded: ShardedModel) -> None:
    """Writes this process's rows of the optimizer's tensors.

    Args:
        whole: The file that one process would write; the first of two writes `NAME-00001-of-00002.safetensors`.
    """
    own = {key: each for key, each in moments.items() if sharded.is_first or sharded.has_rows(key, each.ndim)}
    part = whole.with_stem(f"{whole.stem}-{sharded.peers.rank + 1:05d}-of-{sharded.peers.size:05d}")
    save_file({key: value.cpu().contiguous() for key, value in own.items()}, part)


def _find_files(whole: Path) -> list[Path]:
    """Returns the files of the optimizer's state, in the order of their rows."""
    parts = sorted(whole.parent.glob(f"{whole.stem}-*-of-*{whole.suffix}"))
    if parts and not parts[-1].stem.endswith(f"-of-{len(parts):05d}"):
        raise EngineError(f"{len(parts)} parts of the optimizer's state are here, and the last is {parts[-1].name}")
    return parts or [whole]


def read_moments(whole: Path, sharded: ShardedModel | None, rename: Callable[[str], str]) -> dict[str, Tensor]:
    """Returns the optimizer's tensors, and of a sharded model its rows of them; one file after the other is open.

    Args:
        rename: Returns the name that a tensor has here.
    """
    files, counts = _find_files(whole), Counter[str]()
    for file in files:
        with safe_open(file, "pt") as part:
            counts.update({key: sum(part.get_slice(key).get_shape()[:1]) for key in part.keys()})  # noqa: SIM118
    rows: dict[str, list[Tensor]] = {}
    first = Counter[str]()  # of each tensor, the number of its first row in a file
    for file in files:
        with safe_open(file, "pt") as part:
            for key in part.keys():  # noqa: SIM118  not a mapping
                shape = part.get_slice(key).get_shape()
                name = rename(key)
                if not shape:
                    rows[name] = [part.get_tensor(key).clone()]  # of a file that is mapped as long as a part is used
                    continue
                wanted = slice(0, counts[key])
                if sharded is not None and sharded.has_rows(name, len(shape)):
                    wanted = sharded.choose_rows(counts[key])
                start, stop = max(wanted.start - first[key], 0), min(wanted.stop - first[key], shape[0])
                first[key] += shape[0]
                if start < stop or name not in rows:
                    rows.setdefault(name, []).append(part.get_slice(key)[start : max(start, stop)].clone())
    return {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in rows.items()}
