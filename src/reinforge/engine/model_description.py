"""What another program needs to know to sample a model, and its requests rendered without the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from reinforge.engine.model.causal_model import DEFAULT_ADAPTER
from reinforge.engine.model.chat_template import PromptRenderer
from reinforge.engine.request_codec import RequestCodec

if TYPE_CHECKING:
    from reinforge.config.policy import PolicyConfig
    from reinforge.engine.model.causal_model import CausalModel
    from reinforge.engine.sampling.grammar import GrammarCompiler


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
