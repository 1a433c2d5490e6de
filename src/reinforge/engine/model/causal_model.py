"""A causal language model as two functions: tokens -> features, features -> logits.

Shapes: B rows, T tokens of a row, N selected tokens, H features, V vocabulary.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from reinforge.engine.fast_paths import FastPaths
from reinforge.engine.model.architecture import shorten_kernel_warnings
from reinforge.engine.model.model_cache import LayerKind, find_layer_kinds
from reinforge.engine.model.text_part import find_text_part
from reinforge.errors import ConfigError, Problem


def find_last_layer(module: nn.Module) -> nn.Module | None:
    """Returns the last layer that transformers marks as one, if it has an MLP; None: the family marks none."""
    layers = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
    return layers[-1] if layers and isinstance(getattr(layers[-1], "mlp", None), nn.Module) else None


@contextmanager
def compute_mlp_at(indices_N: Tensor, layer: Any) -> Iterator[None]:
    """Makes the layer's MLP compute only these tokens of `[B, T, H]`, b T + t each, and return 0 for all others.

    A checkpointed layer (`activation_checkpointing.py`) computes all tokens: its backward pass, which runs it again,
    comes after this block.
    """
    if "forward" in vars(layer):
        yield
        return
    shape = torch.Size()

    def gather(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        nonlocal shape
        shape = inputs[0].shape
        return inputs[0].flatten(0, 1).index_select(0, indices_N)[None], *inputs[1:]

    def scatter(_: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):  # experts may return the router's choices, too
            return scatter(_, inputs, output[0]), *output[1:]
        zeros = output.new_zeros(shape).flatten(0, 1)
        return zeros.index_copy(0, indices_N, output[0]).view(shape)

    hooks = [layer.mlp.register_forward_pre_hook(gather), layer.mlp.register_forward_hook(scatter)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


logger = logging.getLogger(__name__)

TRIAL_FAILURES = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What a module raises if it does not take a cache, a mask or positions in the form that it is given."""

DEFAULT_ADAPTER = "default"
"""PEFT's name for an adapter without a name; a model without adapters uses it for all of its weights, too."""


class CausalModel:
    """An unmodified Hugging Face module, called in two halves so that logits are computed only where they are needed.

    Where a family does something after its output layer (Gemma 2 caps logits, Cohere scales them), the first half is
    the whole forward pass and the second half does nothing: slower, but never wrong.

    Attributes:
        module: The Hugging Face module, in `eval` mode: dropout would make sampled log-probs inexact.
        separable: True if `head(base(x))` is exactly the module's logits.
        max_model_len: Maximum tokens of prompt and reply together.
        fast_paths: The fast paths that this model and its sampler may take.
    """

    def __init__(self, module: Any, max_model_len: int | None = None, fast_paths: FastPaths | None = None):
        shorten_kernel_warnings()
        self.module: Any = module
        self.module.eval()
        self.device = next(module.parameters()).device
        self.config = self.module.config.get_text_config()
        self.fast_paths = fast_paths or FastPaths()
        text = find_text_part(module)
        self.base: Any = module.base_model if text is module else text
        self.head: Any = module.get_output_embeddings()
        parameters = inspect.signature(self.module.forward).parameters
        self._takes_positions = "position_ids" in parameters
        names = ("cache", "cache_params", "past_key_values")  # transformers from 5.24 on, Mamba's, others' before
        self._cache_name = next((name for name in names if name in parameters), names[-1])
        self.separable = self._is_separable()
        self._last_layer = find_last_layer(text) if self.fast_paths.last_mlp else None
        if self._last_layer is not None and not self._is_last_mlp_exact():
            self._last_layer = None
        self.max_model_len = self._resolve_max_model_len(max_model_len)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        return self.module.dtype

    @property
    def has_adapters(self) -> bool:
        return bool(getattr(self.module, "_hf_peft_config_loaded", False))

    @property
    def has_plain_head(self) -> bool:
        """True if logits are features times the weights of the output layer, and nothing else."""
        plain = self.separable and type(self.head) is nn.Linear and self.head.bias is None
        return plain and not (self.head._forward_hooks or self.head._forward_pre_hooks)

    @property
    def trained_parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    @property
    def adapter(self) -> str:
        """Name of the active adapter: forwards go through it and it is trained; sampled rows choose their own."""
        return self.module.active_adapters()[0] if self.has_adapters else DEFAULT_ADAPTER

    def use_adapter(self, name: str) -> None:
        if name != self.adapter:
            self.module.set_adapter(name)

    @contextmanager
    def without_adapters(self) -> Iterator[CausalModel]:
        """Switches all adapters off inside the block: the model is then the reference."""
        from peft.utils import ModulesToSaveWrapper

        self.module.disable_adapters()
        try:
            yield self
        finally:
            self.module.enable_adapters()
            for part in self.module.modules():  # transformers disables these, but does not enable them again
                if isinstance(part, ModulesToSaveWrapper):
                    part.enable_adapters(True)

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @cached_property
    def layer_kinds(self) -> list[LayerKind]:
        """What each layer keeps between tokens."""
        return find_layer_kinds(self.config)

    @property
    def has_states(self) -> bool:
        """True if some layers keep states, which exist only after the last token that was computed."""
        return any(kind.has_states for kind in self.layer_kinds)

    @property
    def attn_implementation(self) -> str:
        """Name of transformers' attention function, which decides the type of the masks."""
        return self.config._attn_implementation

    def features(
        self,
        token_ids_BT: Tensor,
        position_ids_BT: Tensor | None = None,
        *,
        indices_N: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Returns what `logits` takes, `[B, T, H]` (`[B, T, V]` where the model is not separable).

        Args:
            token_ids_BT: The tokens; rows are padded on the right, where a causal model never looks.
            position_ids_BT: Positions; None: 0, 1, 2, ...
            indices_N: Flat indices b T + t of the tokens whose features are needed; those of other tokens are then
                undefined. None: all are needed.
            kwargs: `attention_mask`, `past_key_values` and `use_cache` as transformers takes them.
        """
        if position_ids_BT is not None and self._takes_positions:
            kwargs["position_ids"] = position_ids_BT
        if "past_key_values" in kwargs:
            kwargs[self._cache_name] = kwargs.pop("past_key_values")
        kwargs.setdefault("use_cache", False)
        layer = self._last_layer
        with nullcontext() if indices_N is None or layer is None else compute_mlp_at(indices_N, layer):
            if self.separable:
                return self.base(input_ids=token_ids_BT, **kwargs).last_hidden_state
            return self.module(input_ids=token_ids_BT, **kwargs).logits

    def logits(self, features_NH: Tensor) -> Tensor:
        logits = self.head(features_NH) if self.separable else features_NH
        return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits

    def make_frozen_copy(self) -> CausalModel:
        """Returns a copy that is never trained: the reference."""
        module = copy.deepcopy(self.module).requires_grad_(False)
        return CausalModel(module, self.max_model_len, self.fast_paths)

    def make_served_copy(self, trained: Collection[nn.Parameter]) -> CausalModel:
        """Returns a copy that samples while this model is trained; the two share the weights that never change.

        Args:
            trained: Parameters of which the copy has its own: those of all adapters, or all.
        """
        own = {id(parameter) for parameter in trained}
        frozen = (parameter for parameter in self.module.parameters() if id(parameter) not in own)
        module = copy.deepcopy(self.module, {id(parameter): parameter for parameter in frozen})
        return CausalModel(module, self.max_model_len, self.fast_paths)

    def _resolve_max_model_len(self, wanted: int | None) -> int:
        limit = getattr(self.config, "max_position_embeddings", None)
        if wanted is not None and limit is not None and wanted > limit:
            message = f"found {wanted}, but the model supports at most {limit} tokens"
            raise ConfigError(Problem("finetuning.policy.max_model_len", message, f"set it to {limit} or less"))
        return wanted or limit or 2048

    @torch.no_grad()
    def _is_separable(self) -> bool:
        """Returns True if nothing happens between base and head, and nothing after the head, to the last bit.

        The head's output is multiplied by 1000, so that a soft cap on the logits shows at any size of them.
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
    def _is_last_mlp_exact(self) -> bool:
        """Returns True if computing the last MLP for a few tokens alone keeps their features; else logs the reason."""
        token_ids_BT = torch.arange(10, device=self.device).view(2, 5) % self.vocab_size
        indices_N = torch.tensor([2, 4, 8], device=self.device)
        whole = self.features(token_ids_BT).flatten(0, 1)[indices_N]
        try:
            some = self.features(token_ids_BT, indices_N=indices_N).flatten(0, 1)[indices_N]
        except TRIAL_FAILURES as cause:
            reason = f"{type(cause).__name__}: {cause}"
        else:
            error, size = (whole - some).abs().max().item(), whole.abs().max().item()
            if error <= (1e-5 if self.dtype == torch.float32 else 0.05) * max(1.0, size):
                return True
            reason = f"its features would differ by {error:g}"
        logger.info("%s: computing the last MLP for every token (slower): %s", self.config.model_type, reason)
        return False


def find_checkpointable_layers(model: CausalModel) -> list[nn.Module]:
    """Returns the layers that transformers marks as checkpointable."""
    layers = [module for module in model.module.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        path = "finetuning.policy.activation_checkpointing"
        message = f"transformers does not support activation checkpointing for {model.config.model_type} models"
        raise ConfigError(Problem(path, message, "set it to false"))
    return layers


@contextmanager
def checkpoint_activations(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Makes forward passes inside the block keep only the inputs of these layers; run the backward pass inside, too.

    The layers are restored on exit, so a copy of the model made at any other time is an ordinary one.
    """
    for layer in layers:
        layer.forward = partial(_run_checkpointed, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _run_checkpointed(forward: Any, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


class Fingerprinter:
    """Hashes one model with each of its adapters; weights that never change are hashed once.

    Attributes:
        join: Returns a whole weight by its name; None: the model has it.
    """

    def __init__(self, model: CausalModel, trained: Collection[nn.Parameter]):
        self.model = model
        self.join: Callable[[str], Tensor] | None = None
        ids = {id(parameter) for parameter in trained}
        self._frozen = {name: p for name, p in model.module.named_parameters() if id(p) not in ids}
        self._frozen_digest: bytes | None = None

    def compute(self) -> str:
        """Returns 16 hex digits of a SHA-256 over names and bytes of all parameters, inactive adapters excluded."""
        own, trained = f".{self.model.adapter}.", self.model.trained_parameters
        if self._frozen_digest is None:
            self._frozen_digest = self._hash(self._frozen, {name: name for name in self._frozen})
        shown = {name.replace(own, f".{DEFAULT_ADAPTER}."): name for name in trained}  # one hash under every name
        return hashlib.sha256(self._frozen_digest + self._hash(trained, shown)).hexdigest()[:16]

    def _hash(self, parameters: Mapping[str, Tensor], shown: Mapping[str, str]) -> bytes:
        """Returns the hash of parameters by the names under which they are hashed; empty without any."""
        digest = hashlib.sha256()
        for name, own in sorted(shown.items()):
            digest.update(name.encode())
            parameter = parameters[own] if self.join is None else self.join(own)
            content: Any = parameter.detach().cpu().contiguous().view(torch.uint8).numpy()
            digest.update(content)
        return digest.digest() if shown else b""
