"""Fast decoding of Llama-like models: decode steps and short prompts as one function over the model's weights.

Transformers' modules are right for every family. On a small model, though, half of a decode step is Python calls and
small operations, and between any two of them the thread waits for Python's lock while agents run; on a larger one, most
of it is products whose weights are rearranged in every step. For Llama-like models (RMSNorm, attention with rotary
embeddings, RMSNorm, gated MLP) one function here goes from token ids to logits: one product makes queries, keys and
values, one makes gate and up, and the weights are packed once (`projection.py`), with LoRA adapters beside them, of
which each row uses its own. TorchScript runs it without that lock (`token_sampling.py`). docs/performance.md has the
figures. The sampler compares its logits with a plain forward when it starts, and uses the modules where they differ.

In bfloat16 it rounds where transformers' modules round; what is left of the difference to the learner is the noise of
the type (SmolLM2-135M: a mean of 0.04 in log-probs), which importance sampling corrects as any mismatch.

Shapes: B rows, T new tokens of a row, M = B T, L tokens that a step attends to, S slots, C their capacity, H features,
N query heads, K key and value heads, D size of a head, I features inside the MLP, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reinforge.engine.model.attention import GROUPED_ATTENTION, AttentionMasks, build_additive_mask, decode_attention
from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.sampling.kv_cache import KVCache, build_write_indices, copy_into_slots
from reinforge.engine.sampling.llama_weights import LayerWeights, LlamaWeights, OuterWeights, group_linears
from reinforge.engine.sampling.projection import (
    AdapterRows,
    can_pack,
    find_max_bytes,
    get_linear,
    multiply,
    order_rows,
    pick_rows,
    project,
)
from reinforge.engine.sampling.token_sampling import compile_torchscript

if TYPE_CHECKING:
    from reinforge.engine.sampling.decode_graphs import DecodeGraphs

MODEL_TYPES = {"llama", "mistral", "qwen2", "qwen3"}

ATTENTION = (GROUPED_ATTENTION, "sdpa")

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that depend on a token's position alone, not on the length of the batch."""

MAX_SPARE = 2
"""A step attends to all places of the slots, used or not, if they are at most this many times those needed: products
read whole slots in place, and copy parts of them first."""

MAX_PROMPT = 128  # longest prompts computed here: in longer ones, attention in chunks (`flash_attention.py`) saves more

MAX_FLASH_PROMPT = 4096  # the same where torch's flash kernel computes the prompt: on a GPU in bfloat16


class LlamaSizes(NamedTuple):
    """Sizes and constants that all layers of a model share."""

    num_heads: int  # N
    num_kv_heads: int  # K
    head_size: int  # D
    scale: float  # factor of the scores
    eps: float  # of every norm
    least: float  # what a mask adds for a key that is not seen


def _normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns RMSNorm of the last dimension, rounded where the modules round it."""
    if x.dtype == torch.float32 or x.is_cuda:  # there, one operation instead of eight; it rounds once less
        return F.rms_norm(x, [x.shape[-1]], weight, eps)
    states = x.float()
    return weight * (states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def project_qkv(
    x: Tensor, layer: LayerWeights, rows: AdapterRows, cos: Tensor, sin: Tensor, sizes: LlamaSizes
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, `[M, N, D]`, keys and values, `[M, K, D]`; `x` is `[M, H]`, `cos` and `sin` are `[M, 1, D]`."""
    num_rotated = sizes.num_heads + sizes.num_kv_heads
    heads = project(_normalize(x, layer.norm, sizes.eps), layer.qkv, rows)
    heads = heads.view(x.shape[0], num_rotated + sizes.num_kv_heads, sizes.head_size)
    states = heads[:, :num_rotated]
    query_norm, key_norm = layer.query_norm, layer.key_norm
    if query_norm is not None and key_norm is not None:
        query = _normalize(heads[:, : sizes.num_heads], query_norm, sizes.eps)
        key = _normalize(heads[:, sizes.num_heads : num_rotated], key_norm, sizes.eps)
        states = torch.cat((query, key), dim=1)
    states = (states * cos).add_(states.roll(sizes.head_size // 2, -1).mul_(sin))
    return states[:, : sizes.num_heads], states[:, sizes.num_heads :], heads[:, num_rotated:]


def finish_layer(x: Tensor, attended: Tensor, layer: LayerWeights, rows: AdapterRows, sizes: LlamaSizes) -> Tensor:
    """Returns a layer's output, `[M, H]`, from its input and the output of its attention heads, `[M, N D]`."""
    x = project(attended, layer.out, rows).add_(x)
    gate, up = project(_normalize(x, layer.mlp_norm, sizes.eps), layer.gate_up, rows).chunk(2, dim=1)
    return project(F.silu(gate).mul_(up), layer.down, rows).add_(x)


def compute_logits(x: Tensor, outer: OuterWeights, sizes: LlamaSizes) -> Tensor:
    """Returns logits, `[B, V]`, of features, `[B, H]`."""
    return multiply(_normalize(x, outer.norm, sizes.eps), outer.head, None).float()


def _decode(
    token_ids: Tensor,
    positions: Tensor,
    rows: AdapterRows,
    layers: list[LayerWeights],
    outer: OuterWeights,
    keys: list[Tensor],
    values: list[Tensor],
    slides: list[bool],
    window: int | None,
    lengths: list[int],
    num_long: int,
    sizes: LlamaSizes,
) -> Tensor:
    """Returns the rows' logits after one more token each, and writes its keys and values into slots, `[S, K, C, D]`.

    Row b attends to slot b, the first `num_long` rows to `lengths[0]` tokens and the others to `lengths[-1]`;
    everything else is computed in the order of the adapters.
    """
    count, ordered = token_ids.shape[0], pick_rows(positions, rows.order)
    x = F.embedding(pick_rows(token_ids, rows.order), outer.embedding)
    cos, sin = outer.cos.index_select(0, ordered)[:, None], outer.sin.index_select(0, ordered)[:, None]
    indices = build_write_indices(positions, sizes.num_kv_heads, keys[0].shape[2])
    indices = pick_rows(indices.view(count, -1), rows.order).view(-1)
    zero, places = torch.zeros([], device=x.device, dtype=x.dtype), torch.arange(lengths[0], device=x.device)[None]
    full = build_additive_mask(positions[:, None], places, None, zero, sizes.least)
    sliding = full if window is None else build_additive_mask(positions[:, None], places, window, zero, sizes.least)
    for number, layer in enumerate(layers):
        query, key, value = project_qkv(x, layer, rows, cos, sin, sizes)
        keys[number].view(-1, sizes.head_size).index_copy_(0, indices, key.reshape(-1, sizes.head_size))
        values[number].view(-1, sizes.head_size).index_copy_(0, indices, value.reshape(-1, sizes.head_size))
        query, mask = pick_rows(query, rows.places), sliding if slides[number] else full
        parts: list[Tensor] = []
        for first, last, length in ((0, num_long, lengths[0]), (num_long, count, lengths[-1])):
            if first < last:
                own = keys[number][first:last, :, :length], values[number][first:last, :, :length]
                part = mask[first:last, :, :, :length]
                parts.append(decode_attention(query[first:last], own[0], own[1], part, sizes.scale))
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        x = finish_layer(x, pick_rows(attended.view(count, -1), rows.order), layer, rows, sizes)
    return compute_logits(pick_rows(x, rows.places), outer, sizes)


def _prefill(
    token_ids: Tensor,
    last: Tensor,
    sources: Tensor,
    first: int,
    rows: AdapterRows,
    layers: list[LayerWeights],
    outer: OuterWeights,
    keys: list[Tensor],
    values: list[Tensor],
    sizes: LlamaSizes,
) -> Tensor:
    """Returns the logits at the tokens `last` of whole prompts, and copies the prompts' keys and values into slots."""
    count, length = token_ids.shape
    tokens = AdapterRows(None, None, [number * length for number in rows.counts], rows.min_rows)
    order, places = rows.order, rows.places
    if order is not None and places is not None:
        last = last.index_select(0, order) % length + torch.arange(count, device=last.device) * length
        sources = places.index_select(0, sources)
    x = F.embedding(pick_rows(token_ids, order).flatten(), outer.embedding)
    cos, sin = outer.cos[:length].repeat(count, 1)[:, None], outer.sin[:length].repeat(count, 1)[:, None]
    for number, layer in enumerate(layers):
        query, key, value = project_qkv(x, layer, tokens, cos, sin, sizes)
        key = key.view(count, length, sizes.num_kv_heads, sizes.head_size).transpose(1, 2)
        value = value.view(count, length, sizes.num_kv_heads, sizes.head_size).transpose(1, 2)
        copy_into_slots(keys[number], key, sources, first)
        copy_into_slots(values[number], value, sources, first)
        query = query.view(count, length, sizes.num_heads, sizes.head_size).transpose(1, 2)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=sizes.scale, enable_gqa=True)
        attended = attended.transpose(1, 2).reshape(x.shape[0], -1)
        if number == len(layers) - 1:
            x, attended, tokens = x.index_select(0, last), attended.index_select(0, last), rows
        x = finish_layer(x, attended, layer, tokens, sizes)
    return compute_logits(x, outer, sizes).index_select(0, sources)


class FastLlama:
    """Computes short prompts and decode steps of a model that `supports_fast_decode`.

    Args:
        model: The model; call `drop_weights` before its weights change.
        masks: Knows which layers have a window, and how long it is.
        min_rows: Least number of rows that an adapter multiplies.
    """

    def __init__(self, model: CausalModel, cache: KVCache, masks: AttentionMasks, min_rows: int = 1):
        self.model, self.base, self.cache, self.masks, self.min_rows = model, model.base, cache, masks, min_rows
        kinds = getattr(model.config, "layer_types", None) or [None] * model.num_layers
        self.slides = [kind != "full_attention" for kind in kinds]
        attention, eps = self.base.layers[0].self_attn, self.base.norm.variance_epsilon
        size = attention.head_dim
        heads = [part.out_features // size for part in (attention.q_proj, attention.k_proj)]
        self.sizes = LlamaSizes(heads[0], heads[1], size, attention.scaling, eps, torch.finfo(model.dtype).min)
        self._decode, self._prefill = (
            compile_torchscript(function, model.device, enabled=model.fast_paths.torchscript)
            for function in (_decode, _prefill)
        )
        self.weights = LlamaWeights(model)
        is_gpu = model.device.type == "cuda"
        self.max_prompt = MAX_FLASH_PROMPT if is_gpu and model.dtype == torch.bfloat16 else MAX_PROMPT
        self.graphs = make_graphs(model)
        self._names: Sequence[str] | None = None

    @contextmanager
    def route_rows(self, names: Sequence[str]) -> Iterator[None]:
        """Gives row b of every batch inside the block the adapter `names[b]`, and further rows the last one.

        Outside of such blocks all rows use the model's active adapter.
        """
        self._names = names
        try:
            yield
        finally:
            self._names = None

    def decode_step(
        self, token_ids_B: Tensor, positions_B: Tensor, lengths: Sequence[int], num_long: int | None = None
    ) -> Tensor:
        """Returns the logits after one more token of each row, `[B, V]`.

        Args:
            lengths: Tokens that the first `num_long` rows attend to and, if there are two, the others.
        """
        (rows, layers), (keys, values) = self.choose_weights(len(token_ids_B)), self.list_slots()
        capacity = keys[0].shape[2]
        if self.graphs is not None:
            lengths = [min(self.graphs.round_size(length), capacity) for length in lengths]
        chosen = [capacity if capacity <= MAX_SPARE * length else length for length in lengths]
        num_long = len(token_ids_B) if num_long is None else num_long
        outer, slides, window = self.weights.collect_outer(chosen[0]), self.slides, self.masks.window

        def step(token_ids: Tensor, positions: Tensor) -> Tensor:
            settings = slides, window, chosen, num_long, self.sizes
            return self._decode(token_ids, positions, rows, layers, outer, keys, values, *settings)

        if self.graphs is None or rows.order is not None:
            return step(token_ids_B, positions_B)
        memory = [layers, outer.cos, outer.head.plain, *keys[:1]]
        return self.graphs.run(step, (len(token_ids_B), num_long, *chosen), memory, token_ids_B, positions_B)

    def round_rows(self, num_rows: int, max_rows: int) -> int:
        """Returns how many rows a step should have: where steps are recorded, one of a few numbers."""
        return num_rows if self.graphs is None else min(self.graphs.round_size(num_rows), max_rows)

    def can_prefill(self, length: int) -> bool:
        return length <= self.max_prompt and self.masks.sees_all(length)

    def prefill(self, token_ids_BT: Tensor, last_B: Tensor, sources_n: Tensor, first: int) -> Tensor:
        """Returns the logits of each reply's first token, `[n, V]`, and fills its slot.

        Args:
            token_ids_BT: Whole prompts, padded on the right.
            last_B: Flat index b T + t of each prompt's last token.
            first: The first slot to fill; slots have room for T tokens.
        """
        (rows, layers), (keys, values) = self.choose_weights(len(token_ids_BT)), self.list_slots()
        outer = self.weights.collect_outer(token_ids_BT.shape[1])
        return self._prefill(token_ids_BT, last_B, sources_n, first, rows, layers, outer, keys, values, self.sizes)

    def drop_weights(self, adapter: str | None = None) -> None:
        self.weights.drop(adapter)
        if self.graphs is not None:
            self.graphs.clear()

    def choose_weights(self, num_rows: int) -> tuple[AdapterRows, list[LayerWeights]]:
        names = list(self._names or [self.model.adapter])
        names += names[-1:] * (num_rows - len(names))
        adapters, rows = order_rows(names, self.model.device, self.min_rows)
        return rows, self.weights.collect_layers(adapters)

    def list_slots(self) -> tuple[list[Tensor], list[Tensor]]:
        layers = self.cache.layers
        for layer in layers:
            if not layer.is_initialized:
                empty = self.base.norm.weight.new_empty(0, self.sizes.num_kv_heads, 0, self.sizes.head_size)
                layer.lazy_initialization(empty, empty)
        return [layer.keys for layer in layers], [layer.values for layer in layers]


def make_graphs(model: CausalModel) -> "DecodeGraphs | None":
    """Returns where a model's recorded steps are kept; None: its device records none."""
    if model.device.type != "cuda":
        return None
    from reinforge.engine.sampling.decode_graphs import CUDARecorder, DecodeGraphs

    return DecodeGraphs(CUDARecorder(model.device))


def supports_fast_decode(model: CausalModel) -> bool:
    """Returns True if this fast path is on, `FastLlama` computes what the model computes, and the copies are small."""
    config = model.config
    if not model.fast_paths.decode or config.model_type not in MODEL_TYPES:
        return False
    if model.dtype not in (torch.float32, torch.bfloat16) or model.attn_implementation not in ATTENTION:
        return False
    if not model.has_plain_head or getattr(config, "hidden_act", None) != "silu":
        return False
    if getattr(model.base.rotary_emb, "rope_type", None) not in ROPE_TYPES:
        return False
    if type(model.base.embed_tokens) is not nn.Embedding:
        return False
    return _supports_layers(model)


def _supports_layers(model: CausalModel) -> bool:
    """Returns True if the layers are seven linear layers and norms each, and there is memory for the copies."""
    is_packed, num_copied = can_pack(model.device, model.dtype), 0
    for layer in model.base.layers:
        groups = [[get_linear(part) for part in group] for group in group_linears(layer)]
        linears = [linear for group in groups for linear in group if linear is not None]
        own = [part for path, part in layer.named_modules() if isinstance(part, nn.Linear) and ".lora_" not in path]
        if {id(part) for part in own} != {id(linear) for linear in linears} or len(linears) != 7:
            return False
        (query, *others), *rest = groups
        has_bias = query is not None and query.bias is not None
        if any(linear is None or (linear.bias is not None) != has_bias for linear in others):
            return False
        if any(linear is None or linear.bias is not None for group in rest for linear in group):
            return False
        copied = [group for group in groups if is_packed or len(group) > 1]
        num_copied += sum(linear.weight.numel() for group in copied for linear in group if linear is not None)
    num_copied += model.head.weight.numel() if is_packed else 0
    return num_copied * model.dtype.itemsize <= find_max_bytes(model.device, model.dtype)
