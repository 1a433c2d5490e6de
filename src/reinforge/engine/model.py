"""A causal language model as two functions: tokens -> features, features -> logits.

Shapes: B rows, T tokens of a row, N selected tokens, H features, V words.
"""

from __future__ import annotations

import copy
import inspect
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.pytorch_utils import Conv1D

from reinforge.config.schema import LoRAConfig, PolicyConfig
from reinforge.engine.attention import use_grouped_attention
from reinforge.engine.preflight import ADAPTERS, LORA
from reinforge.engine.reading import last_layer, only_at
from reinforge.errors import BackendUnavailable, ConfigError, EngineError, Problem, boundary
from reinforge.types.seeding import stable_seed

logger = logging.getLogger(__name__)

DEFAULT = "default"
"""PEFT's name of an adapter that nobody named; all weights, where there are no adapters, go by it too."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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


def pick_device(name: str) -> torch.device:
    """Returns the device called `name`; `auto` takes CUDA, then MPS, then the CPU.

    Raises:
        ConfigError: The device is not there.
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(device for device, available in there.items() if available)
    if not there.get(name, False):
        available = ", ".join(device for device, here in there.items() if here)
        raise ConfigError(Problem("finetuning.device", f"{name} is not on this machine", f"here: {available}, auto"))
    return torch.device(name)


@contextmanager
def _fetching(source: str | Path | None, what: str) -> Iterator[None]:
    """Turns whatever reading a model raises into `EngineError`; a hub that does not give it is the environment's."""
    with boundary(EngineError, what):
        try:
            yield
        except OSError as error:
            if Path(str(source)).is_dir():
                raise
            raise BackendUnavailable(f"{what}: {str(error).splitlines()[0]}") from error


def load_module(source: str | Path, dtype: torch.dtype) -> nn.Module:
    """Returns the module with its weights, from safetensors only and without remote code."""
    is_local = Path(source).is_dir() and not (Path(source) / ADAPTERS).is_file()  # adapters name their model
    with _fetching(source, f"load the model {source}"):
        return AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, use_safetensors=True, trust_remote_code=False, local_files_only=is_local
        )


def add_adapters(module: Any, config: LoRAConfig, seed: int, name: str = DEFAULT) -> None:
    """Adds an adapter to a module's linear layers and freezes all else (LoRA, arXiv:2106.09685), by PEFT.

    Differs from the paper: every linear layer but the output layer, not the attention alone (arXiv:2305.14314 found
    that to match full weights); no dropout, which would make sampled log-probs inexact.

    Raises:
        ConfigError: No layer has one of the names of `target_modules`, or one is called like the adapter.
    """
    from peft import LoraConfig

    if hasattr(nn.ModuleDict, name) or any(name in path.split(".") for path, _ in module.named_modules()):
        fix = "give the adapter another name (llms.ENTRY.adapter)"
        raise ConfigError(Problem(LORA, f"a part of the model is called {name} too, which PEFT would mix up", fix))

    if Path(module.name_or_path).is_dir():  # the folder that `adapter_config.json` will name
        module.name_or_path = str(Path(module.name_or_path).absolute())
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=config.target_modules,
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in module.modules()),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several are meant
        torch.manual_seed(stable_seed(seed, "lora", *([] if name == DEFAULT else [name])))
        try:
            module.add_adapter(settings, name)
        except ValueError as error:
            raise ConfigError(Problem(f"{LORA}.target_modules", str(error))) from error


def draw_module(source: str | Path, dtype: torch.dtype, seed: int) -> nn.Module:
    """Returns a module of that configuration whose weights are drawn by the seed, the same on every device."""
    with _fetching(source, f"draw a model by the configuration of {source}"), torch.random.fork_rng(devices=[]):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        torch.manual_seed(stable_seed(seed, "weights"))
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)


def load_model(config: PolicyConfig, seed: int, device: str, adapters: Sequence[str] = (DEFAULT,)) -> CausalModel:
    """Returns the policy's model as its configuration asks, with adapters of these names where it trains adapters."""
    if config.model is None or config.model.startswith("bundled:"):
        message = f"{config.model!r} is no folder and no hub id"
        raise ConfigError(Problem("finetuning.policy.model", message, "give the folder of a Hugging Face model"))
    dtype, target = DTYPES[config.precision], pick_device(device)
    is_random = config.init == "random"
    module = draw_module(config.model, dtype, seed) if is_random else load_module(config.model, dtype)
    if getattr(module, "_hf_peft_config_loaded", False):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_("lora_" in name)
    elif config.lora is not None:
        for name in adapters:
            add_adapters(module, config.lora, seed, name)
    use_grouped_attention(module)
    return CausalModel(module.to(target), config.max_context)


def load_tokenizer(config: PolicyConfig) -> Any:
    """Returns the tokenizer with the chat template that the configuration asks for.

    Raises:
        ConfigError: There is no chat template.
    """
    source = config.tokenizer or config.model
    with _fetching(source, f"load the tokenizer {source}"):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if config.chat_template is not None:
        is_text = "{" in config.chat_template
        tokenizer.chat_template = config.chat_template if is_text else Path(config.chat_template).read_text()
    if tokenizer.chat_template is None:
        fix = "finetuning.policy.chat_template gives one, as Jinja text or a file"
        raise ConfigError(Problem("finetuning.policy.model", f"{source} has no chat template", fix))
    return tokenizer
