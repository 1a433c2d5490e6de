"""What a search may try: small changes of a configuration, each for a reason.

The first recipe is the configuration itself. The others change one thing that often decides whether training helps: the
learning rate, the size of the groups, the algorithm, adapters instead of all weights. Earlier recipes are tried first,
and when time is short, alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from reinforge.algorithms.expert_iteration import ExpertIterationConfig
from reinforge.config.schema import Config
from reinforge.engine.learning_rate import choose_learning_rate, count_parameters
from reinforge.engine.model.preflight import has_adapters

Overrides = tuple[tuple[str, str], ...]

FINETUNING = "finetuning"
ALGORITHM = f"{FINETUNING}.algorithm"
RATE = f"{FINETUNING}.policy.optimizer.learning_rate"
LORA_FROM = 20e6
"""From so many parameters on, adapters are tried: fewer train as fast without."""
LORA_RATE = 5e-4
"""For LoRA of rank 16 on SmolLM2-135M; measured on word problems and on tasks of reasoning-gym."""
LORA = ((f"{FINETUNING}.policy.lora", "{r: 16, lora_alpha: 32}"), (RATE, f"{LORA_RATE:g}"))
STEPS = (f"{FINETUNING}.policy.batch.steps_per_job", "4")
CLIPPED = "{_type: grpo, clip_low: 0.2, clip_high: 0.28, loss_aggregation: token}"
"""Clip-higher of DAPO (arXiv:2503.14476); several steps on the same episodes need the clipping."""
DEMONSTRATIONS, GEPA = "demonstrations", "gepa"
RATE_FACTOR = 3.0
LARGER_GROUPS = 2
EXAMPLES_PER_EPOCH = 16
"""Where the configuration has all in each epoch: a search can only stop between epochs."""
GOOD_REWARD = ExpertIterationConfig().reward_threshold
REWARDS, GOOD, SIGNAL = "rewards that differ", f"rewards of {GOOD_REWARD:g} or more", "groups whose rewards differ"
"""What a recipe needs of the agent's own episodes to learn from."""


@dataclass(frozen=True, slots=True)
class SearchRecipe:
    """A change of the configuration that may help."""

    name: str
    why: str
    overrides: Overrides = ()
    prompts: str | None = None  # how a better prompt is searched for before training; None: not at all
    needs: str | None = None  # `REWARDS`, `GOOD` or `SIGNAL`; None: it can learn without them


def propose(config: Config, reflect: str | None = None) -> list[SearchRecipe]:
    """Returns what to try, the most promising first; only what the configuration does not have already.

    Args:
        reflect: Entry of `llms` that rewrites prompts; None: none does.
    """
    finetuning = config.finetuning
    policy, algorithm = finetuning.policy, str(getattr(finetuning.algorithm, "static_type", None))
    found = [SearchRecipe("as-configured", "the configuration as it is")]
    num_parameters = count_parameters(policy.model) or 0
    rewards = algorithm not in ("sft", "distill", "dpo", "kto", "ipo", "orpo", "simpo")
    uses_lora = has_adapters(policy)
    if rewards and not uses_lora and num_parameters >= LORA_FROM:
        why = "adapters take a larger learning rate, and several steps use each episode more than once"
        found.append(SearchRecipe("lora", why, (*LORA, STEPS, (ALGORITHM, CLIPPED)), needs=SIGNAL))
    rate = choose_learning_rate(policy, num_parameters, uses_lora=uses_lora).value
    if rewards:
        faster = f"{rate * RATE_FACTOR:.2g}"
        why = f"learning rate {faster} instead of {rate:.2g}"
        found.append(SearchRecipe("larger-steps", why, ((RATE, faster),), needs=SIGNAL))
        if policy.batch.steps_per_job == 1:
            why = "four optimizer steps on the episodes of an epoch instead of one"
            found.append(SearchRecipe("more-steps", why, (STEPS, (ALGORITHM, CLIPPED)), needs=SIGNAL))
    found += _propose_groups(config)
    if rewards:
        why = "imitates the best replies, where rewards are rare"
        found.append(SearchRecipe("imitate-the-best", why, ((ALGORITHM, "{_type: expert_iteration}"),), needs=GOOD))
        why = "shows the agent some of its own best episodes, and trains with them in the prompt"
        found.append(SearchRecipe("demonstrations", why, prompts=DEMONSTRATIONS, needs=REWARDS))
        slower = f"{rate / RATE_FACTOR:.2g}"
        why = f"learning rate {slower} instead of {rate:.2g}"
        found.append(SearchRecipe("smaller-steps", why, ((RATE, slower),), needs=SIGNAL))
    if reflect is not None:
        why = f"{reflect} rewrites the prompt, given what went wrong with it, and the agent trains with the best one"
        found.insert(1, SearchRecipe("better-prompt", why, prompts=GEPA))
    name = finetuning.trajectory_builder
    builder: Any = config.trajectory_builders.get(str(name))
    if getattr(builder, "static_type", None) != "group" or builder.examples_per_epoch is not None:
        return found
    short = (f"trajectory_builders.{name}.examples_per_epoch", str(EXAMPLES_PER_EPOCH))
    return [replace(recipe, overrides=(short, *recipe.overrides)) for recipe in found]


def _propose_groups(config: Config) -> list[SearchRecipe]:
    name = config.finetuning.trajectory_builder
    builder: Any = config.trajectory_builders.get(str(name))
    if builder is None or getattr(builder, "static_type", None) != "group":
        return []
    size, count = builder.num_generations * LARGER_GROUPS, builder.examples_per_epoch
    path = f"trajectory_builders.{name}"
    overrides: list[tuple[str, str]] = [(f"{path}.num_generations", str(size))]
    if count is not None:
        overrides.append((f"{path}.examples_per_epoch", str(max(1, count // LARGER_GROUPS))))
    why = f"groups of {size} replies, so that more of them have a good and a bad one"
    return [SearchRecipe("larger-groups", why, tuple(overrides), needs=REWARDS)]


def format_command(overrides: Sequence[tuple[str, str]]) -> str:
    return " ".join(f"-o {path} '{value}'" for path, value in overrides)
