"""Runners and evaluations with the settings that tests of episodes share."""

from reinforge.config.finetuning_blocks import LimitsConfig, OutcomesConfig, SamplingConfig
from reinforge.evaluation.run import DatasetEvaluation
from reinforge.rollout.capture import Capture
from reinforge.rollout.context import EpisodeContext
from reinforge.rollout.runner import EpisodeRunner
from reinforge.rollout.workflow import bind_workflow
from reinforge.types.episode import EpisodeKey
from reinforge.types.workflow import BoundWorkflow
from tests.doubles import PolicyModel, Scored, ScriptedPolicy, examples


def make_runner(
    workflow, policy=None, *, llms=None, sampling=None, timeout_s=60.0, seed=1, concurrency=8, entries=None, **outcomes
) -> EpisodeRunner:
    """Returns a runner of a workflow, by default with a scripted policy behind the only entry of `llms`."""
    return EpisodeRunner(
        workflow if isinstance(workflow, BoundWorkflow) else bind_workflow(workflow),
        llms or {"agent": PolicyModel(policy or ScriptedPolicy())},
        sampling=sampling or SamplingConfig(),
        limits=LimitsConfig(episode_timeout_s=timeout_s),
        outcomes=OutcomesConfig(**{"retries": 0, **outcomes}),
        run_seed=seed,
        max_concurrency=concurrency,
        entries=entries,
    )


def make_context(**prompts) -> EpisodeContext:
    """Returns a context for an agent that is called directly, with a scripted chat."""
    return EpisodeContext(0, "e", Capture(seed=0, prompts=prompts), models=None)


async def run_items(runner, items, phase="collect", epoch=0, generations=1, reward=1.0):
    """Runs the episodes of items and returns their records; each has the reward."""

    async def score(record):
        record.reward = reward

    keys = [(EpisodeKey(phase, epoch, str(item.id), number), item) for item in items for number in range(generations)]
    return await runner.run(keys, score, lambda record: None)


def make_evaluation(runner, items=None, score=lambda item: 1.0) -> DatasetEvaluation:
    splits = {"train": items or examples(1), "select": []}
    scored = {"reward": Scored(score)}
    return DatasetEvaluation(runner, splits, scored, reward_metric="reward", outcomes=runner.outcomes)


async def collect(evaluation, generations=1):
    ids = evaluation.example_ids("train")
    return await evaluation.collect([EpisodeKey("collect", 0, i, g) for i in ids for g in range(generations)])
