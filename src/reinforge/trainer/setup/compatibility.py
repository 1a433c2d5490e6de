"""Whether the parts of a run fit together: evaluators that compare answers, and the model that the agent calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reinforge.algorithms.curriculum import find_levels
from reinforge.config.finetuning_blocks import SamplingConfig
from reinforge.config.schema import Config, FinetuneConfig
from reinforge.errors import Problem
from reinforge.evaluation.evaluators.weighted import Weighted
from reinforge.interfaces import Evaluator, GroupEvaluator, TrainerAdapter, TrajectoryBuilder
from reinforge.rollout.models.policy_llm import find_served_entries
from reinforge.trainer.builders.group import GroupTrajectoryBuilder
from reinforge.types.evaluation import EvalInputItem

HELD_OUT = ("select", "confirm")

Evaluators = Mapping[str, Evaluator | None]
Splits = Mapping[str, Sequence[EvalInputItem]]


def find_comparison_problems(
    config: Config, evaluators: Evaluators, held_out: Evaluators, splits: Splits, builder: TrajectoryBuilder | None
) -> list[Problem]:
    """Returns why evaluators that compare answers would have nothing to compare."""
    problems = _find_missing_answers(evaluators, splits.get("train", []), all_of=False)
    held_out_items = [item for name in HELD_OUT for item in splits.get(name, [])]
    problems += _find_missing_answers(held_out, held_out_items, all_of=True)
    reward = config.finetuning.reward_function
    if reward is not None:
        problems += _find_unscorable(config.finetuning, reward.name, held_out, held_out_items)
    if reward is None or not (compared := find_compared_parts(reward.name, evaluators)):
        return list({problem.path: problem for problem in problems}.values())
    names = " and ".join(compared)
    if isinstance(builder, GroupTrajectoryBuilder) and builder.num_generations < 2:
        path = f"trajectory_builders.{config.finetuning.trajectory_builder}.num_generations"
        message = f"the reward {names} compares the siblings of a group, but each example has one episode"
        problems.append(Problem(path, message, "use at least 2; 4 to 8 are usual"))
    curriculum = config.finetuning.curriculum_learning
    used = {"enabled": curriculum.enabled, "levels": curriculum.levels is not None}
    for name in [name for name, is_used in used.items() if is_used]:
        if isinstance(evaluators.get(reward.name), GroupEvaluator):
            message = f"the mean of {names} is 0.5 in every group, so it does not tell easy examples from hard ones"
            fix = "leave it out, or use a reward that scores each answer by itself"
            problems.append(Problem(f"finetuning.curriculum_learning.{name}", message, fix))
    return list({problem.path: problem for problem in problems}.values())


def find_level_problems(config: FinetuneConfig, splits: Splits) -> list[Problem]:
    """Returns why the examples' levels cannot be a curriculum."""
    if config.curriculum_learning.levels is None:
        return []
    path, problems = "finetuning.curriculum_learning.levels", []
    if not any(find_levels(items) for split, items in splits.items() if split not in HELD_OUT):
        message = "no training row has a `level` that is a whole number"
        problems.append(Problem(path, message, "set it to null, or let the rows have one"))
    if config.limits.max_staleness:
        message = "an epoch that is collected early would be chosen before the level rises"
        problems.append(Problem(path, message, "set it to null, or finetuning.limits.max_staleness to 0"))
    return problems


def find_compared_parts(name: str, evaluators: Evaluators) -> list[str]:
    """Returns the evaluators that compare answers: this one, or the parts of it if it is `weighted`."""
    evaluator = evaluators.get(name)
    if isinstance(evaluator, Weighted):
        return [found for part in evaluator.weights for found in find_compared_parts(part, evaluators)]
    return [name] if isinstance(evaluator, GroupEvaluator) else []


def describe_comparisons(evaluators: Evaluators, held_out: Evaluators, metric: str) -> str | None:
    """Returns, for the settings that a run prints, what its reward is compared with; None: nothing."""
    compared = find_compared_parts(metric, evaluators)
    if not compared:
        return None
    found = [held_out.get(name) for name in compared]
    with_base = any(isinstance(each, GroupEvaluator) and each.reference == "base" for each in found)
    reference = "the base model's answers (0.5: as good as before)" if with_base else "the expected answers"
    return (
        f"{' and '.join(compared)} compares siblings, so its mean over a group is always 0.5; validations and the "
        f"verdict compare with {reference}"
    )


def _find_missing_answers(evaluators: Evaluators, items: Sequence[EvalInputItem], *, all_of: bool) -> list[Problem]:
    """Returns the problem of examples without the expected answer that an evaluator compares with."""
    without = [item for item in items if item.expected_output_obj is None]
    if not without:
        return []
    from reinforge.evaluation.evaluators.pairwise_judge import ExpectedPairwiseJudge  # for such examples alone

    problems = []
    for name, each in evaluators.items():
        by_reference = all_of and isinstance(each, GroupEvaluator) and each.reference == "expected"
        if by_reference or isinstance(each, ExpectedPairwiseJudge):
            key = "reference" if by_reference else "against"
            message = f"{len(without)} of {len(items)} examples have no expected answer, such as {without[0].id}"
            fix = "add them, or use `reference: base`" if by_reference else "add them, or use `against: siblings`"
            problems.append(Problem(f"eval.evaluators.{name}.{key}", message, fix))
    return problems


def _find_unscorable(
    config: FinetuneConfig, reward: str, evaluators: Evaluators, items: Sequence[EvalInputItem]
) -> list[Problem]:
    """Returns the problem of rows, such as prompts with a rating, to which the reward would give no score."""
    num_without = sum(item.expected_output_obj is None for item in items)
    if num_without <= config.outcomes.max_missing * len(items) or not (needing := _find_needing(reward, evaluators)):
        return []
    message = f"{num_without} of {len(items)} held-out examples have no expected answer, so {needing} cannot score them"
    fix = "add answers (answer_key), or use a reward that looks at the output alone: a function of yours or a judge"
    return [Problem(f"eval.evaluators.{needing}", message, fix)]


def _find_needing(name: str, evaluators: Evaluators) -> str | None:
    """Returns the evaluator that scores nothing without an expected answer: this one, or a part of it."""
    evaluator = evaluators.get(name)
    if isinstance(evaluator, Weighted):
        return next(filter(None, (_find_needing(part, evaluator.parts) for part in evaluator.weights)), None)
    return name if getattr(evaluator, "needs_answer", False) else None


def can_serve_policy(adapter: TrainerAdapter) -> bool:
    """Returns False if the adapter's class does not override `policy()`: something else serves the model."""
    return type(adapter).policy is not TrainerAdapter.policy


def refuse_policy_llm(config: Config, adapter: TrainerAdapter) -> list[Problem]:
    """Returns the problem of entries that are `_type: policy` although the adapter serves none."""
    name = type(adapter).__name__
    message = f"the trainer adapter {name} serves no policy, since it has no method policy()"
    fix = "name the model that your backend serves: `_type: openai`, model_name and base_url; or use `_type: local`"
    return [
        Problem(f"llms.{entry}._type", message, f"{fix} under trainer_adapters")
        for entry, llm in config.llms.items()
        if llm.static_type == "policy"
    ]


def refuse_sampling(config: FinetuneConfig) -> list[Problem]:
    """Returns the problem of sampling settings that no remote model would be given."""
    written, defaults = config.sampling, SamplingConfig()
    changed = [name for name in SamplingConfig.model_fields if getattr(written, name) != getattr(defaults, name)]
    message = "has no effect on a model that the trainer adapter does not serve itself"
    fix = "set it in the agent, or in the entry of llms that it calls"
    return [Problem(f"finetuning.sampling.{name}", message, fix) for name in changed]


def require_policy_llm(config: Config) -> list[Problem]:
    if any(llm.static_type == "policy" for llm in config.llms.values()) or find_served_entries(config):
        return []
    names = ", ".join(f"{name} is {llm.static_type}" for name, llm in config.llms.items())
    message = f"no entry is `_type: policy`, so the agent never calls the model that is trained ({names})"
    adapter = config.trainer_adapters.get(str(config.finetuning.trainer_adapter))
    served = adapter.served_models if adapter is not None else ()
    by_name = f", or name the trained model there: model_name: {served[0]}" if served else ""
    return [Problem("llms", message, f"set `_type: policy` for the entry that the agent calls{by_name}")]
