"""`policy.dtype: auto`: bfloat16 where it makes this model's products faster on this machine, else float32.

A CPU with AVX512-BF16 or AMX multiplies bfloat16 several times as fast as float32; one without them is slower than in
float32. Names of instructions do not say how fast torch uses them, so a product of the model's own shapes is timed in
both types. Small models stay in float32: their steps consist of other things than products, and 8 bits would cost them
exactness for nothing.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig

from reinforge.config.policy import PolicyConfig
from reinforge.engine.model.hub import check_model_source, find_adapter_base
from reinforge.engine.model.loading import pick_device
from reinforge.engine.model.source import MODEL, find_source, open_source

logger = logging.getLogger(__name__)

AUTO, FLOAT32, BFLOAT16 = "auto", "float32", "bfloat16"

MIN_FEATURES = 512  # models with fewer features stay in float32: products take less than half of their steps

MIN_SPEEDUP = 1.5  # bfloat16 is chosen if its products are at least this many times as fast

OPERATIONS = 4e8  # operations of a timed product: about 5 ms in float32


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """A data type and why it was chosen."""

    dtype: str  # `float32` or `bfloat16`
    reason: str = ""  # why, in words; empty if it was configured
    speedup: float | None = None  # time of a product in float32 divided by that in bfloat16; None: not measured

    def __str__(self) -> str:
        return f"{self.dtype} ({self.reason})" if self.reason else self.dtype


def choose_dtype(
    policy: PolicyConfig,
    device: str = AUTO,
    *,
    deterministic: bool = False,
    measure: Callable[[int, int], float] | None = None,
) -> DtypeChoice:
    """Returns the configured data type, or for `auto` the faster one.

    Args:
        policy: The policy; its model's configuration is read, not its weights.
        device: `auto`, `cpu`, `cuda` or `mps`.
        deterministic: The run is repeated bit by bit, which is promised for float32.
        measure: Returns the speedup of bfloat16 for H features and I inside of the MLP; None: `measure_speedup`.

    Raises:
        ConfigError: The model cannot be used.
        BackendUnavailable: A hub id is neither in the cache nor to be had from the hub.
    """
    if policy.dtype != AUTO:
        return DtypeChoice(policy.dtype)
    if deterministic:
        return DtypeChoice(FLOAT32, "deterministic")
    if policy.model is None or policy.model.startswith("bundled:"):
        return DtypeChoice(FLOAT32, "a small model")
    target = pick_device(device)
    if target.type == "cuda":
        supported = torch.cuda.is_bf16_supported(including_emulation=False)
        return DtypeChoice(BFLOAT16, "this GPU has it") if supported else DtypeChoice(FLOAT32, "not on this GPU")
    if target.type != "cpu":
        return DtypeChoice(FLOAT32, f"on {target.type}")
    config = _read_model_config(policy)
    features = getattr(config, "hidden_size", None)
    if not isinstance(features, int) or features < MIN_FEATURES:
        return DtypeChoice(FLOAT32, f"a small model: fewer than {MIN_FEATURES} features")
    inner = getattr(config, "intermediate_size", None)
    speedup = (measure or measure_speedup)(features, inner if isinstance(inner, int) else 4 * features)
    reason = f"products of this model are {speedup:.1f} x as fast in bfloat16 as in float32 here"
    return DtypeChoice(BFLOAT16 if speedup >= MIN_SPEEDUP else FLOAT32, reason, round(speedup, 2))


def fill_in_dtype(policy: PolicyConfig, device: str, *, deterministic: bool) -> PolicyConfig:
    """Returns the policy with the data type in effect, which is logged where it was chosen."""
    choice = choose_dtype(policy, device, deterministic=deterministic)
    if choice.reason:
        logger.info("dtype %s", choice)
    return policy.model_copy(update={"dtype": choice.dtype})


def measure_speedup(features: int, inner: int) -> float:
    """Returns the time of one product in float32 divided by that in bfloat16: the median of five pairs.

    It runs in a thread that ends: a pool of workers that stayed would slow down the engine's.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_measure, features, inner).result()


def _measure(features: int, inner: int) -> float:
    rows = max(16, round(OPERATIONS / (2 * features * inner)))
    pairs = [(torch.ones(rows, features), torch.ones(inner, features))]
    pairs += [(x.bfloat16(), weight.bfloat16()) for x, weight in pairs]
    ratios = []
    for number in range(6):
        slow, fast = (_time_product(*pair) for pair in pairs)
        if number:  # the first one prepares the kernels
            ratios.append(slow / fast)
    return statistics.median(ratios)


def _time_product(x: torch.Tensor, weight: torch.Tensor) -> float:
    started = time.perf_counter()
    with torch.no_grad():
        F.linear(x, weight)
    return time.perf_counter() - started


def _read_model_config(policy: PolicyConfig) -> Any:
    """Returns the configuration of the text model, of an adapter's base where the model is one."""
    own = open_source(find_source(str(policy.model), MODEL, policy.revision), MODEL)
    is_local = check_model_source(own.location, MODEL, weights=False, revision=own.revision)
    base = find_adapter_base(own.location, MODEL, own.revision)
    model = own if base is None else open_source(base, MODEL)
    revision = {} if model.revision is None else {"revision": model.revision}
    config = AutoConfig.from_pretrained(model.location, trust_remote_code=False, local_files_only=is_local, **revision)
    return config.get_text_config()
