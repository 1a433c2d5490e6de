"""One more token of every running reply through the model: the steps that sampling consists of.

Transformers' modules are right for every family, and on small models half of such a step is calls and small operations.
Models of Llama's type (attention with rotation, gated MLP, RMSNorm before each) are multiplied here by their own
weights in fewer operations: queries, keys and values as one product, gate and up as a batch of two, residuals added by
the products that come before them. Figures: docs/performance.md. The sampler compares its steps with a plain forward
when it is made, and takes the modules' where they differ.

Shapes: B rows, L tokens that a step looks at, H features, D size of a head, I features within the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reinforge.engine.attention import NAME, grouped_attention
from reinforge.engine.model import CausalModel
from reinforge.engine.slots import SlotCache

FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}

MAX_COPIED_BYTES = 64 * 2**20
"""Most memory of weights side by side: where they are larger, products take all the time, whoever calls them."""

Mask = Tensor | dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Copies of a layer's weights that one product takes.

    Attributes:
        attention: Those of queries, keys and values, one below the other.
        bias: What is added to them.
        mlp: Those of gate and up, `[2, H, I]`.
    """

    attention: Tensor
    bias: Tensor | None
    mlp: Tensor


class LlamaSteps:
    """Decode steps of a model of Llama's type.

    Args:
        model: A model that `can_step`; where its weights change, `forget` comes first.
        cache: The rows' keys and values.
    """

    def __init__(self, model: CausalModel, cache: SlotCache):
        self.base, self.cache = model.base, cache
        self.kinds = getattr(model.config, "layer_types", None) or [""] * model.num_layers
        first = self.base.layers[0].self_attn
        self.size = first.head_dim
        self.num_queries = first.q_proj.out_features // self.size
        self.num_keys = first.k_proj.out_features // self.size
        self._copies: list[SideBySide] = []

    def features(self, token_ids_B: Tensor, positions_B: Tensor, mask: Mask) -> Tensor:
        """Returns what the next token of each row is predicted from, `[B, H]`; the cache has begun the step.

        Args:
            token_ids_B: The newest token of each row.
            positions_B: Where it stands.
            mask: Added to the scores, `[B, 1, 1, L]`; by kind of layer where they differ.
        """
        x_BH = self.base.embed_tokens(token_ids_B)
        rotation = self.base.rotary_emb(x_BH[:, None], positions_B[:, None])
        for number, (layer, copies) in enumerate(zip(self.base.layers, self._side_by_side(), strict=True)):
            seen_BH = self._seen(number, copies, _norm(layer.input_layernorm, x_BH), rotation, mask)
            x_BH = torch.addmm(x_BH, seen_BH, layer.self_attn.o_proj.weight.t())
            both_2BH = _norm(layer.post_attention_layernorm, x_BH).expand(2, -1, -1)
            gate_BI, up_BI = torch.bmm(both_2BH, copies.mlp)
            x_BH = torch.addmm(x_BH, layer.mlp.act_fn(gate_BI).mul_(up_BI), layer.mlp.down_proj.weight.t())
        return _norm(self.base.norm, x_BH)

    def _seen(
        self, number: int, copies: SideBySide, x_BH: Tensor, rotation: tuple[Tensor, Tensor], mask: Mask
    ) -> Tensor:
        """Returns what all heads of a layer see."""
        attention, half, turned = self.base.layers[number].self_attn, self.size // 2, self.num_queries + self.num_keys
        heads = F.linear(x_BH, copies.attention, copies.bias).view(len(x_BH), -1, self.size)
        if hasattr(attention, "q_norm"):
            heads[:, : self.num_queries] = _norm(attention.q_norm, heads[:, : self.num_queries])
            heads[:, self.num_queries : turned] = _norm(attention.k_norm, heads[:, self.num_queries : turned])
        cos, sin = rotation
        plain, value = heads[:, :turned], heads[:, turned:]
        states = plain * cos
        states[..., :half].addcmul_(plain[..., half:], sin[..., :half], value=-1)
        states[..., half:].addcmul_(plain[..., :half], sin[..., half:])
        query, key = states[:, : self.num_queries, None], states[:, self.num_queries :, None]
        keys, values = self.cache.update(key, value[:, :, None], number)
        own_mask = mask[self.kinds[number]] if isinstance(mask, dict) else mask
        seen, _ = grouped_attention(attention, query, keys, values, own_mask, attention.scaling)
        return seen.reshape(len(x_BH), -1)

    def forget(self) -> None:
        """Drops what is copied of the weights, which are about to change."""
        self._copies.clear()

    def _side_by_side(self) -> list[SideBySide]:
        if not self._copies:
            self._copies = [_copies(layer) for layer in self.base.layers]
        return self._copies


def can_step(model: CausalModel) -> bool:
    """Returns True if `LlamaSteps` computes what this model computes, and is worth the memory."""
    if model.config.model_type not in FAMILIES or model.dtype != torch.float32 or model.attention != NAME:
        return False
    if model.has_adapters or not model.separable:
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


def _copies(layer: Any) -> SideBySide:
    *heads, gate, up = _copied(layer)
    bias = None if heads[0].bias is None else torch.cat([part.bias for part in heads])
    mlp = torch.stack((gate.weight.t(), up.weight.t()))
    return SideBySide(torch.cat([part.weight for part in heads]), bias, mlp)


def _norm(norm: Any, x: Tensor) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) weight, over the last dimension."""
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)
