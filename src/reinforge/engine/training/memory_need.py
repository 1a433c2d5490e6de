"""How much memory training adds to a loaded model, and whether a process has it.

Of each trained weight: its gradient, its optimizer state, and the copy of weight and state that undoes a job. AdamW in
float32 needs 4 + 8 + 12 bytes, beside the 4 bytes of the weight.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from reinforge.engine.devices import measure_memory
from reinforge.engine.training.learner import Learner
from reinforge.engine.training.micro_batches import estimate_token
from reinforge.engine.training.optimizers import get_state_keys

logger = logging.getLogger(__name__)

GIB = 2**30
FLOAT = 4
USABLE = 0.85
"""Share of the memory that may be planned for; the rest is for the KV cache's growth and the allocator's gaps."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What a process needs to train the whole model, in bytes."""

    used: int  # the most that it has used so far, with the model loaded
    added: int  # what training adds
    total: int | None  # what it has; None: unknown

    @property
    def fits(self) -> bool:
        """True if the whole model can be trained, or if that is unknown."""
        return self.total is None or self.used + self.added <= USABLE * self.total


def estimate_training(learner: Learner) -> int:
    """Returns the bytes that training adds to a loaded model.

    Micro-batches are halved when memory runs out, down to one sample, so the longest one counts. Sharding saves nothing
    of it.

    Example: 1,000 weights in float32, AdamW -> 24,000, and what one sample keeps.
    """
    num_states = len(get_state_keys(learner.config.optimizer) - {"step"})
    added = 0
    for name, parameter in learner.masters.optimized.items():
        size = learner.parameters[name].element_size()
        is_copied = name in learner.masters.copies
        per_weight = FLOAT + num_states * FLOAT  # gradient and state
        per_weight += size + num_states * FLOAT + (FLOAT if is_copied else 0)  # to undo a job
        added += parameter.numel() * per_weight
    longest = min(learner.micro_batch_tokens, learner.model.max_model_len)
    return added + longest * estimate_token(learner.model)


def measure_need(learner: Learner, processes_here: int) -> MemoryNeed:
    """Returns what this process needs to train the whole model, and what it has.

    Args:
        processes_here: Processes that share the machine's memory; each has an accelerator of its own, if any.
    """
    found = measure_memory(learner.model.device)
    total = found.total
    if total is not None and learner.model.device.type == "cpu":
        total //= processes_here
    return MemoryNeed(found.peak or 0, estimate_training(learner), total)


def needs_sharding(learner: Learner, processes_here: int, *, has_trained: bool = False) -> bool:
    """Returns True if one of the processes has too little memory for the whole model; all call it together.

    Args:
        has_trained: This process has trained the whole model before, which is in the most that it has used: it would
            count twice. Where one has, all keep the whole model.

    Raises:
        PeerFailed: Another process failed before its turn.
    """
    assert learner.peers is not None
    need = measure_need(learner, processes_here)
    found = learner.peers.collect({"fits": need.fits, "has_trained": has_trained})
    if any(each["has_trained"] for each in found):
        return False
    if not need.fits and need.total is not None:
        logger.info(
            "training the whole model needs %.1f GiB (%.1f now, and %.1f more) of %.1f GiB",
            (need.used + need.added) / GIB,
            need.used / GIB,
            need.added / GIB,
            need.total / GIB,
        )
    return not all(each["fits"] for each in found)
