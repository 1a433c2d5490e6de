"""A causal language model as two functions: tokens -> features, features -> logits.

Shapes: B rows, T tokens of a row, N selected tokens, H features, V words.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from reinforge.engine.model.last_mlp import last_layer, only_at
from reinforge.errors import ConfigError, Problem

logger = logging.getLogger(__name__)

DEFAULT = "default"
"""PEFT's name of an adapter that nobody named; all weights, where there are no adapters, go by it too."""


class CausalModel:
    """An unmodified Hugging Face module, called in two halves so that logits are made only where they are needed.

    Where a family does something after its output layer (Gemma 2 caps logits, Cohere scales them), the whole
    forward is the first half and the second does nothing: slower, but never wrong.

    Attributes:
        module: The Hugging Face module, in `eval` mode: dropout would make sampled log-probs inexact.
        separable: True if `head(base(x))` is exactly the module's logits.
        max_context: Most tokens of prompt and reply that the positions reach.
    """

    def __init__(self, module: Any, max_context: int | None = None):
        self.module: Any = module
        self.module.eval()
        self.device = next(module.parameters()).device
        self.config = self.module.config.get_text_config()
        self.base: Any = module.base_model
        self.head: Any = module.get_output_embeddings()
        self._takes_positions = "position_ids" in inspect.signature(self.module.forward).parameters
        self.separable = self._is_separable()
        self._last_layer = last_layer(self.module)
        if self._last_layer is not None and not self._reads_places():
            self._last_layer = None
        self.max_context = self._context(max_context)

    @property
    def vocab_size(self) -> int:
        """Number of words that have a logit."""
        return self.config.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """Type of the model's own weights."""
        return self.module.dtype

    @property
    def has_adapters(self) -> bool:
        """True if adapters are trained and the model's own weights are frozen."""
        return bool(getattr(self.module, "_hf_peft_config_loaded", False))

    @property
    def has_plain_head(self) -> bool:
        """True if logits are features times the weights of the output layer, and nothing else."""
        plain = self.separable and type(self.head) is nn.Linear and self.head.bias is None
        return plain and not (self.head._forward_hooks or self.head._forward_pre_hooks)

    @property
    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """What the optimizer moves, by name."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    @property
    def adapter(self) -> str:
        """Name of the adapter that is trained, and that forwards go through; the sampler's rows have their own."""
        return self.module.active_adapters()[0] if self.has_adapters else DEFAULT

    def use_adapter(self, name: str) -> None:
        """Trains and goes through this adapter from now on."""
        if name != self.adapter:
            self.module.set_adapter(name)

    @contextmanager
    def without_adapters(self) -> Iterator[CausalModel]:
        """Lends the model as it was before its adapters: the reference."""
        self.module.disable_adapters()
        try:
            yield self
        finally:
            self.module.enable_adapters()

    @property
    def num_layers(self) -> int:
        """Number of layers that keep keys and values."""
        return self.config.num_hidden_layers

    @property
    def attention(self) -> str:
        """Name of transformers' attention function: it decides the type of the masks."""
        return self.config._attn_implementation

    def features(
        self,
        token_ids_BT: Tensor,
        position_ids_BT: Tensor | None = None,
        *,
        places_N: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Returns what `logits` takes, `[B, T, H]` (`[B, T, V]` where the model is not separable).

        Args:
            token_ids_BT: The tokens; rows are padded on the right, which a causal model never looks at.
            position_ids_BT: Positions; None: 0, 1, 2, ...
            places_N: Places that are read, b T + t each; what is returned for others means nothing. None: all are.
            kwargs: `attention_mask`, `past_key_values` and `use_cache` as transformers takes them.
        """
        if position_ids_BT is not None and self._takes_positions:
            kwargs["position_ids"] = position_ids_BT
        kwargs.setdefault("use_cache", False)
        layer = self._last_layer
        with nullcontext() if places_N is None or layer is None else only_at(places_N, layer):
            if self.separable:
                return self.base(input_ids=token_ids_BT, **kwargs).last_hidden_state
            return self.module(input_ids=token_ids_BT, **kwargs).logits

    def logits(self, features_NH: Tensor) -> Tensor:
        """Returns logits, `[N, V]`, in float32 or better."""
        logits = self.head(features_NH) if self.separable else features_NH
        return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits

    def frozen_copy(self) -> CausalModel:
        """Returns a copy that never learns: the reference."""
        module = copy.deepcopy(self.module).requires_grad_(False)
        return CausalModel(module, self.max_context)

    def _context(self, wanted: int | None) -> int:
        limit = getattr(self.config, "max_position_embeddings", None)
        if wanted is not None and limit is not None and wanted > limit:
            message = f"{wanted} tokens, but the model's positions end at {limit}"
            raise ConfigError(Problem("finetuning.policy.max_context", message, f"write at most {limit}"))
        return wanted or limit or 2048

    @torch.no_grad()
    def _is_separable(self) -> bool:
        """Checks, exactly, that nothing stands between base and head, and nothing after the head.

        The head's output is multiplied by 1000 on its way out, so that a soft cap shows at any size of logits.
        """
        if self.head is None or self.base is self.module:
            return False
        seen: list[Tensor] = []

        def enlarge(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            seen.extend((inputs[0], output * 1000))
            return seen[1]

        token_ids = torch.arange(min(5, self.vocab_size), device=self.device)[None]
        hook = self.head.register_forward_hook(enlarge)
        try:
            logits = self.module(input_ids=token_ids, use_cache=False).logits
        finally:
            hook.remove()
        hidden = self.base(input_ids=token_ids, use_cache=False).last_hidden_state
        return len(seen) == 2 and torch.equal(seen[0], hidden) and torch.equal(seen[1], logits)

    @torch.no_grad()
    def _reads_places(self) -> bool:
        """Tries if a last MLP that computes a few places alone leaves these as they are; else says so in the log."""
        token_ids_BT = torch.arange(10, device=self.device).view(2, 5) % self.vocab_size
        places_N = torch.tensor([2, 4, 8], device=self.device)
        whole = self.features(token_ids_BT).flatten(0, 1)[places_N]
        try:
            some = self.features(token_ids_BT, places_N=places_N).flatten(0, 1)[places_N]
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as cause:
            reason = f"{type(cause).__name__}: {cause}"
        else:
            error, size = (whole - some).abs().max().item(), whole.abs().max().item()
            if error <= (1e-5 if self.dtype == torch.float32 else 0.05) * max(1.0, size):
                return True
            reason = f"its features are {error:g} off"
        logger.info("%s models compute their last MLP for every token: %s", self.config.model_type, reason)
        return False
