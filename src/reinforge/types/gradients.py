"""Training in two parts: gradients that add up over several calls, and one optimizer step with all of them."""

from __future__ import annotations

from dataclasses import dataclass

from reinforge.types.sample import FloatArray


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """Settings of one step of AdamW (arXiv:1711.05101).

    Attributes:
        learning_rate: Size of the step, at least 0.
        betas: Decay rates of the first and second moment, in [0, 1).
        eps: Added to the denominator, above 0.
        weight_decay: Decoupled weight decay.
        max_grad_norm: Gradients are clipped to this global norm; None: not clipped.
    """

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = None


@dataclass(slots=True)
class GradientReport:
    """What one call added to the gradients.

    Attributes:
        loss: Sum of the loss over the trained tokens of all samples.
        logprobs: log p of each sample's trained tokens under the current weights, `[T]` each, 0 elsewhere.
        metrics: Means of the loss's metrics over the trained tokens.
    """

    loss: float
    logprobs: list[FloatArray]
    metrics: dict[str, float]
