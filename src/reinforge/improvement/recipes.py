"""What a search may try: small changes of a configuration, each for a reason.

The first recipe is the configuration itself. The others change one thing that often decides whether training helps: the
learning rate, the size of the groups, the algorithm, adapters instead of all weights. Earlier recipes are tried first,
and when time is short, alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from reinforge.config.pipeline import list_stages
from reinforge.config.policy import PolicyConfig
from reinforge.config.schema import Config
from reinforge.engine import small_models
from reinforge.engine.learning_rate import choose_learning_rate, count_parameters
from reinforge.engine.model.preflight import has_adapters
from reinforge.engine.model.source import find_token_difference, read_vocabulary

Overrides = tuple[tuple[str, str], ...]

FINETUNING = "finetuning"
ALGORITHM, PIPELINE, NUM_EPOCHS = (f"{FINETUNING}.{key}" for key in ("algorithm", "pipeline", "num_epochs"))
RATE = f"{FINETUNING}.policy.optimizer.learning_rate"
LORA = (
    (f"{FINETUNING}.policy.lora", json.dumps(small_models.LORA["lora"])),
    (RATE, str(small_models.LORA["optimizer"]["learning_rate"])),
)
STEPS = (f"{FINETUNING}.policy.batch.steps_per_job", "4")
CLIPPED = json.dumps(small_models.ALGORITHM)
BEST_OF_GROUP = "{_type: rejection_sampling}"
BY_REWARD = "{_type: expert_iteration, rollout_selection_method: weighted_sampling}"
"""Whatever the scale of the rewards: the default imitates replies with 0.9 or more."""
WITHOUT_REWARDS = ("sft", "distill", "dpo", "kto", "ipo", "orpo", "simpo")
DEMONSTRATIONS, GEPA = "demonstrations", "gepa"
RATE_FACTOR = 3.0
LARGER_GROUPS = 2
IMITATION_EPOCHS = 2  # before reinforcement learning, in `imitate-then-reinforce`
ANSWER_EPOCHS, MOST_ANSWER_EPOCHS = 6, 24  # of `learn-the-answers` and of `more-answers`
EXAMPLES_PER_EPOCH = 16  # where the configuration has all in each epoch: a search can only stop between epochs
REWARDS, SIGNAL, ANSWERS = "rewards that differ", "groups whose rewards differ", "expected answers"
PAIRS = "groups with a better and a worse reply to one prompt"
"""What a recipe needs to learn from: of the agent's own episodes, or of the examples."""


@dataclass(frozen=True, slots=True)
class SearchRecipe:
    """A change of the configuration that may help."""

    name: str
    why: str
    overrides: Overrides = ()
    prompts: str | None = None  # how a better prompt is searched for before training; None: not at all
    into_weights: bool = False  # it imitates the replies to that prompt, and is asked with its own again
    needs: str | None = None  # one of these; None: it can learn without them
    epochs_path: str = NUM_EPOCHS  # the setting that says for how long it trains: of a pipeline, that of the last stage
    epochs_before: int = 0  # of the stages before that one
    first_path: str | None = None  # that setting of a first stage that the recipe adds; None: it adds none

    def set_epochs(self, count: int) -> tuple[str, str]:
        """Returns the override for so many epochs.

        Of a pipeline, the last stage has those that are left: at least one, unless the recipe's first stage has all.
        """
        if self.first_path is not None and count <= self.epochs_before:
            return self.first_path, str(max(1, count))
        return self.epochs_path, str(max(1, count - self.epochs_before))

    def shorten_first(self, count: int) -> SearchRecipe:
        """Returns the recipe with at most so many epochs, and at least one, in the first stage that it adds."""
        before = min(self.epochs_before, max(1, count))
        changed = ((path, str(before) if path == self.first_path else value) for path, value in self.overrides)
        return replace(self, overrides=tuple(changed), epochs_before=before)


def propose(config: Config, reflect: str | None = None) -> list[SearchRecipe]:
    """Returns what to try and is not configured already, the most promising first; `reflect` rewrites prompts."""
    finetuning, stages, builder = config.finetuning, list_stages(config.finetuning), _find_groups(config)
    needs = None if get_type(finetuning.algorithm) in WITHOUT_REWARDS or stages else REWARDS
    found = [SearchRecipe("as-configured", "the configuration as it is", needs=needs)]
    if reflect is not None:
        why = f"{reflect} rewrites the prompt, given what went wrong with it, and the agent trains with the best one"
        found.append(SearchRecipe("better-prompt", why, prompts=GEPA))
        found += _propose_into_weights(config, GEPA)
    if get_type(finetuning.algorithm) in WITHOUT_REWARDS or stages:
        found += _propose_groups(config)
    else:
        found += _propose_answers(config)
        larger = _change_rate("larger-steps", config, RATE_FACTOR)
        found += [*_propose_updates(config), *_propose_groups(config), larger, *_propose_algorithms(config, reflect)]
        found += _propose_answers(config, "more-answers", MOST_ANSWER_EPOCHS)
    if stages:
        last = stages[-1]
        found = [replace(each, epochs_path=f"{last.path}.num_epochs", epochs_before=last.first) for each in found]
    if builder is None or builder.examples_per_epoch is not None:
        return found
    short = (f"trajectory_builders.{finetuning.trajectory_builder}.examples_per_epoch", str(EXAMPLES_PER_EPOCH))
    return [replace(recipe, overrides=(short, *recipe.overrides)) for recipe in found]


def _propose_answers(
    config: Config, name: str = "learn-the-answers", num_epochs: int = ANSWER_EPOCHS
) -> list[SearchRecipe]:
    """Returns the imitation of what the examples expect, on as many rows an epoch as the default of small models."""
    builder = _find_groups(config)
    if builder is None or not _trains_stages(config):
        return []
    replies = builder.num_generations * (builder.examples_per_epoch or EXAMPLES_PER_EPOCH)
    rows = small_models.ANSWERS_PER_REPLY * replies
    stage = small_models.build_answers_stage(rows)
    settings = tuple((key, json.dumps(value)) for key, value in stage.items())
    then = "then trains as configured" if num_epochs == ANSWER_EPOCHS else f"for up to {num_epochs} epochs"
    why = f"imitates the expected answers, where the evaluators accept them as replies, {then}"
    recipe = _add_first_stage(name, why, settings, ANSWERS, num_epochs)
    answers = ("trajectory_builders.answers", f"{{_type: answers, examples_per_epoch: {rows}}}")
    policy = config.finetuning.policy
    is_large = not has_adapters(policy) and (count_parameters(policy.model) or 0) >= small_models.LORA_FROM
    more = (*LORA, STEPS, (ALGORITHM, CLIPPED)) if is_large else ()
    return [replace(recipe, overrides=(answers, *more, *recipe.overrides))]


def _propose_updates(config: Config) -> list[SearchRecipe]:
    """Returns other ways to make optimizer steps, apart from larger and smaller ones."""
    policy, found = config.finetuning.policy, list[SearchRecipe]()
    steps = _list_steps(config)
    if (teacher := _find_teacher(config)) is not None:
        why = f"{teacher} scores every token of the agent's own replies"
        distill = (ALGORITHM, f"{{_type: distill, teacher: {json.dumps(teacher)}}}")
        found.append(SearchRecipe("distill", why, (*steps, distill)))
    if not has_adapters(policy) and (count_parameters(policy.model) or 0) >= small_models.LORA_FROM:
        why = "adapters take a larger learning rate, and several steps use each episode more than once"
        found.append(SearchRecipe("lora", why, (*LORA, STEPS, (ALGORITHM, CLIPPED)), needs=SIGNAL))
    if steps:
        why = "four optimizer steps on the episodes of an epoch instead of one"
        found.append(SearchRecipe("more-steps", why, (*steps, (ALGORITHM, CLIPPED)), needs=SIGNAL))
    return found


def _propose_algorithms(config: Config, reflect: str | None) -> list[SearchRecipe]:
    found, has_groups = list[SearchRecipe](), _find_groups(config) is not None
    if get_type(config.finetuning.algorithm) not in ("expert_iteration", "rejection_sampling"):
        algorithm, needs = (BEST_OF_GROUP, SIGNAL) if has_groups else (BY_REWARD, REWARDS)
        if _trains_stages(config):
            why = f"imitates the best replies for {IMITATION_EPOCHS} epochs, then trains as configured"
            found.append(_add_first_stage("imitate-then-reinforce", why, (("algorithm", algorithm),), needs))
        why = "imitates the best replies, where rewards are rare"
        found.append(SearchRecipe("imitate-the-best", why, ((ALGORITHM, algorithm),), needs=needs))
    if has_groups:
        why = "prefers the best reply of each group to the worst (DPO)"
        dpo = (ALGORITHM, "{_type: dpo}")
        found.append(SearchRecipe("prefer-the-best", why, (*_list_steps(config), dpo), needs=PAIRS))
    why = "shows the agent some of its own best episodes, and trains with them in the prompt"
    found.append(SearchRecipe("demonstrations", why, prompts=DEMONSTRATIONS, needs=REWARDS))
    found += _propose_into_weights(config, DEMONSTRATIONS) if reflect is None else []
    return [*found, _change_rate("smaller-steps", config, 1 / RATE_FACTOR)]


def _list_steps(config: Config) -> list[tuple[str, str]]:
    return [STEPS] if config.finetuning.policy.batch.steps_per_job == 1 else []


def _change_rate(name: str, config: Config, factor: float) -> SearchRecipe:
    policy = config.finetuning.policy
    count, uses_lora = count_parameters(policy.model) or 0, has_adapters(policy)
    rate = choose_learning_rate(policy, count, uses_lora=uses_lora).value
    changed = f"{rate * factor:.2g}"
    return SearchRecipe(name, f"learning rate {changed} instead of {rate:.2g}", ((RATE, changed),), needs=SIGNAL)


def get_type(component: Any) -> str | None:
    return getattr(component, "static_type", None)


def _find_groups(config: Config) -> Any:
    """Returns the settings of the trajectory builder; None: it does not collect groups."""
    builder: Any = config.trajectory_builders.get(str(config.finetuning.trajectory_builder))
    return builder if get_type(builder) == "group" else None


def _find_teacher(config: Config) -> str | None:
    """Returns the first other model of `llms` in this process, unless its files show that it has other tokens."""
    policy = config.finetuning.policy
    own = read_vocabulary(policy)
    for name, entry in config.llms.items():
        if entry.static_type == "local" and entry.model != policy.model:
            other = read_vocabulary(PolicyConfig(model=entry.model, tokenizer=entry.tokenizer))
            if own is None or other is None or find_token_difference(own, other) is None:
                return str(name)
    return None


def _trains_stages(config: Config) -> bool:
    trainer = config.trainers.get(str(config.finetuning.trainer))
    adapter = config.trainer_adapters.get(str(config.finetuning.trainer_adapter))
    return (get_type(trainer), get_type(adapter)) == ("epoch", "local")


def _add_first_stage(
    name: str, why: str, settings: Overrides, needs: str | None, before: int = IMITATION_EPOCHS
) -> SearchRecipe:
    """Returns a recipe that trains as configured, after a stage of `before` epochs with these settings."""
    path = f"{PIPELINE}.reinforce.num_epochs"
    first = f"{PIPELINE}.imitate"
    overrides = ((f"{first}.num_epochs", str(before)), *((f"{first}.{key}", value) for key, value in settings))
    return SearchRecipe(
        name, why, overrides, needs=needs, epochs_path=path, epochs_before=before, first_path=f"{first}.num_epochs"
    )


def _propose_into_weights(config: Config, prompts: str) -> list[SearchRecipe]:
    if list_stages(config.finetuning) or not _trains_stages(config):
        return []
    why = "imitates the good replies to the better prompt, then trains as configured, without that prompt"
    settings = (("algorithm", "{_type: sft}"), ("trajectory_builder", "prompt_rows"))
    recipe = _add_first_stage("prompt-into-weights", why, settings, needs=None if prompts == GEPA else REWARDS)
    rows = ("trajectory_builders.prompt_rows", "{_type: dataset, train_on: last}")
    return [replace(recipe, overrides=(rows, *recipe.overrides), prompts=prompts, into_weights=True)]


def _propose_groups(config: Config) -> list[SearchRecipe]:
    name, builder = config.finetuning.trajectory_builder, _find_groups(config)
    if builder is None:
        return []
    size, count = builder.num_generations * LARGER_GROUPS, builder.examples_per_epoch
    path = f"trajectory_builders.{name}"
    overrides: list[tuple[str, str]] = [(f"{path}.num_generations", str(size))]
    if count is not None:
        overrides.append((f"{path}.examples_per_epoch", str(max(1, count // LARGER_GROUPS))))
    why = f"groups of {size} replies, so that more of them have a good and a bad one"
    return [SearchRecipe("larger-groups", why, tuple(overrides), needs=REWARDS)]
