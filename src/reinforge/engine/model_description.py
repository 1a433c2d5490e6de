"""What another program needs to sample a model: its description, its files, its requests without the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from reinforge.engine.model.causal_model import DEFAULT_ADAPTER
from reinforge.engine.prompts.chat_template import PromptRenderer
from reinforge.engine.request_codec import RequestCodec
from reinforge.files import storage_boundary

if TYPE_CHECKING:
    from reinforge.config.policy import PolicyConfig
    from reinforge.engine.model.causal_model import CausalModel
    from reinforge.engine.sampling.grammar import GrammarCompiler
    from reinforge.engine.training.sharding import ShardedModel


@dataclass(frozen=True, slots=True)
class ModelDescription:
    dtype: str  # such as bfloat16
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    ends: tuple[int, ...]  # tokens that end a reply
    lora_rank: int | None  # the largest one of an adapter; None: all weights are trained
    kv_cache_bytes: int | None  # memory for keys and values, on a CPU; None: the model is on another device


def describe_model(model: CausalModel, config: PolicyConfig, ends: Sequence[int]) -> ModelDescription:
    settings = model.module.peft_config.values() if model.has_adapters else ()
    ranks = [rank for each in settings for rank in (each.r, *(each.rank_pattern or {}).values())]
    return ModelDescription(
        str(model.dtype).removeprefix("torch."),
        model.max_model_len,
        config.max_num_seqs,
        model.vocab_size,
        tuple(ends),
        max(ranks, default=None),
        config.kv_cache_mb * 2**20 if model.device.type == "cpu" else None,
    )


def make_codec(
    tokenizer: Any,
    *,
    ends: Sequence[int],
    max_model_len: int,
    vocab_size: int,
    history: str,
    adapter: str = DEFAULT_ADAPTER,
) -> RequestCodec:
    """Returns the codec of a model whose weights are elsewhere."""

    @cache
    def open_grammars() -> GrammarCompiler:
        from reinforge.engine.sampling.grammar import GrammarCompiler

        return GrammarCompiler(tokenizer, vocab_size, ends)

    renderer = PromptRenderer(tokenizer, ends, history=history)
    return RequestCodec(renderer, adapter, max_model_len, vocab_size, tuple(ends), open_grammars)


LORA_PARTS = (".lora_", ".modules_to_save.")


def write_base_model(folder: Path, model: CausalModel, tokenizer: Any, sharded: ShardedModel | None = None) -> None:
    """Writes a model without its adapters; where it is sharded, all processes call it together."""
    if sharded is not None and sharded.is_divided:
        from reinforge.engine.training.sharded_files import collect_state

        state = collect_state(model, sharded)
    else:
        state = model.module.state_dict()
    if sharded is None or sharded.is_first:
        _write_base_model(folder, model, tokenizer, find_base_weights(state))


def _write_base_model(folder: Path, model: CausalModel, tokenizer: Any, weights: dict[str, Tensor]) -> None:
    from reinforge.engine.checkpoint import hide_progress_bars  # imports what trains, which a driver of Ray never needs

    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    with storage_boundary(folder, num_bytes), hide_progress_bars():
        folder.mkdir(parents=True)
        has_adapters = model.has_adapters
        model.module._hf_peft_config_loaded = False  # else only the adapters are saved
        try:
            model.module.save_pretrained(folder, state_dict=weights)
        finally:
            model.module._hf_peft_config_loaded = has_adapters
        tokenizer.save_pretrained(folder)


def find_base_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the model's own weights by the names that they have without adapters."""
    return {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in state.items()
        if not any(part in name for part in LORA_PARTS)
    }
