"""Models of Llama's type by their own weights in fewer operations: the tokens that sampling computes.

Transformers' modules are right for every family, and on small models half of a decode step is calls and small
operations, between any two of which the thread waits for Python's lock while agents run. Models of Llama's type
(RMSNorm, attention with rotation, RMSNorm, gated MLP) are multiplied here as one function: queries, keys and values by
one product, gate and up by a batch of two, residuals added by the products before them. TorchScript runs it without
that lock; where torch has none any more, it is an ordinary function. Figures: docs/performance.md. The sampler
compares what it gives with a plain forward when it is made, and takes the modules where they differ.

Shapes: B rows, T new tokens of a row, M = B T, L tokens that a step looks at, H features, N heads of queries, K of keys
and values, D size of a head, I features within the MLP.
"""

import logging
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reinforge.engine.attention import NAME, step_attention
from reinforge.engine.masks import AttentionMasks
from reinforge.engine.model import CausalModel
from reinforge.engine.slots import SlotCache

logger = logging.getLogger(__name__)

FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}

MAX_COPIED_BYTES = 64 * 2**20
"""Most memory of weights side by side: where they are larger, products take all the time, whoever calls them."""

MAX_PROMPT = 128
"""Longest prompts that are read here: in longer ones attention in chunks (`causal.py`) is worth more than few calls."""


class Sizes(NamedTuple):
    """What a model's layers have in common.

    Attributes:
        queries, keys: N and K.
        head: D.
        scale: Factor of the scores.
        eps: Of every norm.
    """

    queries: int
    keys: int
    head: int
    scale: float
    eps: float


class Weights(NamedTuple):
    """One layer.

    Attributes:
        norm: Before attention, `[H]`.
        heads: Of queries, keys and values, one below the other, `[(N + 2 K) D, H]`.
        bias: What is added to them.
        query_norm, key_norm: Of each head's queries and keys, `[D]`.
        out: `[N D, H]`.
        mlp_norm: Before the MLP, `[H]`.
        mlp: Of gate and up, `[2, H, I]`.
        down: `[I, H]`.
    """

    norm: Tensor
    heads: Tensor
    bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Tensor
    mlp_norm: Tensor
    mlp: Tensor
    down: Tensor


def _heads(x: Tensor, layer: Weights, cos: Tensor, sin: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, `[M, N, D]`, keys and values, `[M, K, D]`; `x` is `[M, H]`, `cos` and `sin` `[M, 1, D]`."""
    half, turned = sizes.head // 2, sizes.queries + sizes.keys
    normed = F.rms_norm(x, [x.shape[1]], layer.norm, sizes.eps)
    heads = F.linear(normed, layer.heads, layer.bias).view(x.shape[0], turned + sizes.keys, sizes.head)
    plain = heads[:, :turned]
    query_norm, key_norm = layer.query_norm, layer.key_norm
    if query_norm is not None and key_norm is not None:
        query = F.rms_norm(heads[:, : sizes.queries], [sizes.head], query_norm, sizes.eps)
        key = F.rms_norm(heads[:, sizes.queries : turned], [sizes.head], key_norm, sizes.eps)
        plain = torch.cat((query, key), dim=1)
    states = plain * cos
    states[:, :, :half].addcmul_(plain[:, :, half:], sin[:, :, :half], value=-1.0)
    states[:, :, half:].addcmul_(plain[:, :, :half], sin[:, :, half:])
    return states[:, : sizes.queries], states[:, sizes.queries :], heads[:, turned:]


def _rest(x: Tensor, seen: Tensor, layer: Weights, sizes: Sizes) -> Tensor:
    """Returns what a layer gives, `[M, H]`, of what it was given and what its heads saw, `[M, N D]`."""
    x = torch.addmm(x, seen, layer.out)
    both = F.rms_norm(x, [x.shape[1]], layer.mlp_norm, sizes.eps).expand(2, -1, -1)
    parts = torch.bmm(both, layer.mlp)
    return torch.addmm(x, F.silu(parts[0]).mul_(parts[1]), layer.down)


def _decode(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    layers: list[Weights],
    keys: list[Tensor],
    values: list[Tensor],
    places: Tensor,
    masks: list[Tensor],
    length: int,
    sizes: Sizes,
) -> Tensor:
    """Returns the rows' features after one more token each, whose keys and values go to `places` of the slots."""
    count = x.shape[0]
    for number, layer in enumerate(layers):
        query, key, value = _heads(x, layer, cos, sin, sizes)
        keys[number].view(-1, sizes.head).index_copy_(0, places, key.reshape(-1, sizes.head))
        values[number].view(-1, sizes.head).index_copy_(0, places, value.reshape(-1, sizes.head))
        looked_at, taken = keys[number][:count, :, :length], values[number][:count, :, :length]
        seen = step_attention(query, looked_at, taken, masks[number], sizes.scale)
        x = _rest(x, seen.view(count, -1), layer, sizes)
    return x


def _read(
    x: Tensor, cos: Tensor, sin: Tensor, layers: list[Weights], count: int, ends: Tensor, sizes: Sizes
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Returns the features of the places `ends` of whole prompts, and all their keys and values by layer."""
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for number, layer in enumerate(layers):
        query, key, value = _heads(x, layer, cos, sin, sizes)
        keys.append(key.view(count, -1, sizes.keys, sizes.head).transpose(1, 2))
        values.append(value.view(count, -1, sizes.keys, sizes.head).transpose(1, 2))
        query = query.view(count, -1, sizes.queries, sizes.head).transpose(1, 2)
        seen = F.scaled_dot_product_attention(
            query, keys[number], values[number], is_causal=True, scale=sizes.scale, enable_gqa=True
        )
        seen = seen.transpose(1, 2).reshape(x.shape[0], -1)
        if number == len(layers) - 1:
            x, seen = x.index_select(0, ends), seen.index_select(0, ends)
        x = _rest(x, seen, layer, sizes)
    return x, keys, values


@cache
def _scripted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function as TorchScript runs it; as it is, where torch, which calls that deprecated, has none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.jit.script(function)
        except Exception as cause:  # noqa: BLE001  an unscripted function is as right, whatever the reason
            logger.info("sampling holds Python's lock, which is slower: no TorchScript: %s", cause)
            return function


class DirectLlama:
    """Reads prompts and makes decode steps of a model that `is_llama`.

    Args:
        model: The model; where its weights change, `forget` comes first.
        slots: The rows' keys and values.
        masks: Makes the masks of steps.
    """

    def __init__(self, model: CausalModel, slots: SlotCache, masks: AttentionMasks):
        self.base, self.slots, self.masks = model.base, slots, masks
        self.kinds = getattr(model.config, "layer_types", None) or [""] * model.num_layers
        attention, eps = self.base.layers[0].self_attn, self.base.norm.variance_epsilon
        size = attention.head_dim
        heads = [part.out_features // size for part in (attention.q_proj, attention.k_proj)]
        self.sizes = Sizes(heads[0], heads[1], size, attention.scaling, eps)
        self._decode, self._read = _scripted(_decode), _scripted(_read)
        self._weights: list[Weights] = []

    def step(self, token_ids_B: Tensor, positions_B: Tensor, length: int) -> Tensor:
        """Returns what the next token of each row is predicted from, `[B, H]`; the cache has begun the step.

        Args:
            token_ids_B: The newest token of each row.
            positions_B: Where it stands.
            length: L.
        """
        mask, layers = self.masks.step(positions_B, length), self.slots.layers
        masks = [mask[kind] if isinstance(mask, dict) else mask for kind in self.kinds]
        x_BH, cos, sin = self._begin(token_ids_B, positions_B)
        keys, values = [layer.keys for layer in layers], [layer.values for layer in layers]
        places = self.slots.places(self.sizes.keys)
        x_BH = self._decode(x_BH, cos, sin, self._layers(), keys, values, places, masks, length, self.sizes)
        return self._norm(x_BH)

    def can_read(self, length: int) -> bool:
        """Returns True if prompts of this length are read here."""
        return length <= MAX_PROMPT and self.masks.reach(length)

    def read(self, token_ids_BT: Tensor, ends_B: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Returns features at `ends_B`, b T + t each, `[B, H]`, and keys and values by layer, `[B, K, T, D]`."""
        count, length = token_ids_BT.shape
        positions_BT = torch.arange(length, device=token_ids_BT.device).repeat(count)
        x_MH, cos, sin = self._begin(token_ids_BT.flatten(), positions_BT)
        x_BH, keys, values = self._read(x_MH, cos, sin, self._layers(), count, ends_B, self.sizes)
        return self._norm(x_BH), keys, values

    def forget(self) -> None:
        """Drops what is copied of the weights, which are about to change."""
        self._weights.clear()

    def _begin(self, token_ids_M: Tensor, positions_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_MH = self.base.embed_tokens(token_ids_M)
        cos, sin = self.base.rotary_emb(x_MH[:, None], positions_M[:, None])
        return x_MH, cos, sin

    def _norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.base.norm.weight, self.sizes.eps)

    def _layers(self) -> list[Weights]:
        if not self._weights:
            self._weights = [_weights(layer) for layer in self.base.layers]
        return self._weights


def is_llama(model: CausalModel) -> bool:
    """Returns True if `DirectLlama` computes what this model computes, and is worth the memory."""
    config = model.config
    if config.model_type not in FAMILIES or model.dtype != torch.float32 or model.attention != NAME:
        return False
    if model.has_adapters or not model.separable or getattr(config, "hidden_act", None) != "silu":
        return False
    linear = [part for part in model.base.layers.modules() if isinstance(part, nn.Linear)]
    outputs = [part for layer in model.base.layers for part in (layer.self_attn.o_proj, layer.mlp.down_proj)]
    if len(linear) != 7 * model.num_layers or any(part.bias is not None for part in outputs):
        return False
    size = 4 * sum(part.weight.numel() for layer in model.base.layers for part in _copied(layer))
    return size <= MAX_COPIED_BYTES and all(type(part) is nn.Linear for part in linear)


def _copied(layer: Any) -> tuple[nn.Linear, ...]:
    attention, mlp = layer.self_attn, layer.mlp
    return attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj


@torch.no_grad()
def _weights(layer: Any) -> Weights:
    *heads, gate, up = _copied(layer)
    attention = layer.self_attn
    return Weights(
        norm=layer.input_layernorm.weight.detach(),
        heads=torch.cat([part.weight for part in heads]),
        bias=None if heads[0].bias is None else torch.cat([part.bias for part in heads]),
        query_norm=attention.q_norm.weight.detach() if hasattr(attention, "q_norm") else None,
        key_norm=attention.k_norm.weight.detach() if hasattr(attention, "k_norm") else None,
        out=attention.o_proj.weight.detach().t(),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        mlp=torch.stack((gate.weight.t(), up.weight.t())),
        down=layer.mlp.down_proj.weight.detach().t(),
    )
