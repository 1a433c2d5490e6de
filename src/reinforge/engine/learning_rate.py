"""The default learning rate: by the model's size, by LoRA, and by whether replies are imitated.

    parameters     all weights, rewards or pairs      why
    < 20 M         1e-3                               measured on the bundled tasks
    < 300 M        1e-5                               usual for GRPO on 0.1 B models
    larger         1e-6                               TRL's default of GRPO and DPO, for 0.5 B and more

LoRA needs about 10 times as much (https://thinkingmachines.ai/blog/lora), and imitating given replies 20 times (TRL:
2e-5 for SFT, 2e-4 with LoRA); never more than 1e-3. Random weights start with 1e-3.

Example: 153 M parameters -> 1e-5; with LoRA -> 1e-4; SFT of all weights -> 2e-4. Needs no torch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reinforge.config.policy import DEFAULT_LEARNING_RATE, PolicyConfig
from reinforge.engine.model.preflight import has_adapters, read_shapes
from reinforge.engine.model.source import MODEL, find_weights, get_gguf
from reinforge.types.sample import LossSpec

if TYPE_CHECKING:
    from torch import Tensor

    from reinforge.engine.model.causal_model import CausalModel

logger = logging.getLogger(__name__)

BY_SIZE = ((20e6, DEFAULT_LEARNING_RATE), (300e6, 1e-5), (math.inf, 1e-6))
LORA_FACTOR, IMITATION_FACTOR = 10.0, 20.0
FAR_BEYOND = 10.0  # a configured rate above this multiple of the default is warned about
IMITATION = "cross_entropy"  # the loss of the algorithms that imitate replies


@dataclass(frozen=True, slots=True)
class LearningRate:
    """A peak learning rate and where it comes from."""

    value: float  # the rate
    default: float  # what it would be without a configured one
    subject: str  # what it is for, such as "all weights of 153 M parameters"
    is_set: bool  # True if it was configured

    def __str__(self) -> str:
        if not self.is_set:
            return f"{self.value:g} (the default for {self.subject})"
        return f"{self.value:g} ({self._compare()} for {self.subject})" if self.is_far_beyond else f"{self.value:g}"

    @property
    def is_far_beyond(self) -> bool:
        return self.value > FAR_BEYOND * self.default * (1 + 1e-9)

    @property
    def warning(self) -> str | None:
        """What is wrong with a configured rate, or None."""
        if not self.is_far_beyond:
            return None
        return (
            f"finetuning.policy.optimizer.learning_rate: {self.value:g} is {self._compare()} for {self.subject}; such "
            f"a rate often destroys what the model has learned: lower it, or leave it out (null)"
        )

    def _compare(self) -> str:
        return f"{self.value / self.default:.0f} times the default of {self.default:g}"


def choose_learning_rate(
    policy: PolicyConfig, num_parameters: int, *, uses_lora: bool, loss: LossSpec | None = None
) -> LearningRate:
    """Returns the configured learning rate, or the default.

    Args:
        num_parameters: Parameters of its model, without adapters.
        uses_lora: It trains adapters, configured or saved with the model.
        loss: The loss of the jobs; None: any but that of imitation.
    """
    if policy.init == "random":
        default, subject = DEFAULT_LEARNING_RATE, "random weights"
    else:
        imitates = loss is not None and loss.name == IMITATION
        default = next(rate for limit, rate in BY_SIZE if num_parameters < limit)
        default *= (LORA_FACTOR if uses_lora else 1) * (IMITATION_FACTOR if imitates else 1)
        default = min(default, DEFAULT_LEARNING_RATE)
        trained = "LoRA on" if uses_lora else "all weights of"
        subject = f"{trained} {format_count(num_parameters)} parameters{', imitating' if imitates else ''}"
    configured = policy.optimizer.learning_rate
    return LearningRate(default if configured is None else configured, default, subject, configured is not None)


def count_weights(parameter: Tensor) -> int:
    """Returns the number of weights that a parameter stands for, also where they are packed in 4 bits."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else int(state.shape.numel())


def fill_in_learning_rate(config: PolicyConfig, model: CausalModel, loss: LossSpec | None) -> PolicyConfig:
    """Returns the configuration with the learning rate in effect; warns of one far beyond the default."""
    own = [p for name, p in model.module.named_parameters() if ".lora_" not in name and ".modules_to_save." not in name]
    count = sum(map(count_weights, own))
    rate = choose_learning_rate(config, count, uses_lora=model.has_adapters, loss=loss)
    if rate.warning is not None:
        logger.warning("%s", rate.warning)
    elif not rate.is_set:
        logger.info("learning rate %s", rate)  # of a hub id the size is not known before
    optimizer = config.optimizer.model_copy(update={"learning_rate": rate.value})
    return config.model_copy(update={"optimizer": optimizer})


def fill_in_stages(
    stages: Mapping[str, tuple[PolicyConfig, LossSpec]], config: PolicyConfig, model: CausalModel
) -> dict[str, PolicyConfig]:
    """Returns the configuration of each stage of a pipeline, with the learning rate in effect.

    Args:
        stages: By name: the policy, of which the optimizer, the schedule and the batches count, and the loss.
    """
    filled = {}
    for name, (policy, loss) in stages.items():
        own = {"optimizer": policy.optimizer, "schedule": policy.schedule, "batch": policy.batch}
        filled[name] = fill_in_learning_rate(config.model_copy(update=own), model, loss)
    return filled


def describe_learning_rate(policy: PolicyConfig, loss: LossSpec | None = None) -> str:
    """Returns the learning rate as the effective settings print it, before the model is loaded."""
    count = count_parameters(policy.model)
    if count is not None or policy.init == "random":
        return str(choose_learning_rate(policy, count or 0, uses_lora=has_adapters(policy), loss=loss))
    rate = policy.optimizer.learning_rate
    return "chosen by the model's size once it is loaded" if rate is None else f"{rate:g}"


def count_parameters(model: str | None) -> int | None:
    """Returns the number of parameters of a folder's or a file's weights, or of its adapter's base; None: a hub id."""
    source = find_weights(model)
    if source is None or source.is_gguf:
        return None if source is None else get_gguf().read_gguf(source.location, MODEL).num_weights
    return sum(math.prod(shape) for _, shape in read_shapes(Path(source.location))) or None


def format_count(count: int) -> str:
    if count >= 1e9:
        return f"{count / 1e9:.1f} B"
    return f"{count / 1e6:.0f} M" if count >= 1e7 else f"{count / 1e6:.2g} M"
