"""On-policy distillation: which advantage a token gets, and which teachers are refused."""

from types import SimpleNamespace

import numpy as np
import pytest

from reinforge.algorithms.distill import Distill, DistillConfig, distill
from reinforge.algorithms.grpo import GRPO
from reinforge.algorithms.sft import SFT
from reinforge.algorithms.staged import StagedAlgorithm
from reinforge.config.loader import build_config
from reinforge.errors import ConfigError
from reinforge.rollout.runner import EpisodeRunner
from reinforge.rollout.workflow import bind_workflow
from reinforge.types.episode import EpisodeKey
from reinforge.types.request import TokenLogprobs
from reinforge.types.sample import Needs
from reinforge.types.trajectory import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryGroup

PROMPT, REPLY = (7, 8), (4, 5)


class ScriptedTeacher:
    """Scores nothing; its log-probs are written into the samples by the tests."""

    model_name, is_policy = "teacher", False

    async def prepare(self, tokenizer):
        pass

    async def score_samples(self, samples):
        return [sample.sampling_logprobs for sample in samples]


def samples_of(algorithm, *rewards):
    turns = [
        EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="", logprobs=TokenLogprobs(PROMPT, REPLY, (-2.0, -1.0)))
        for _ in rewards
    ]
    siblings = [Trajectory(episode=[turn], reward=reward) for turn, reward in zip(turns, rewards, strict=True)]
    samples = algorithm.build_samples([TrajectoryGroup(group_id="g", trajectories=siblings)])
    for sample in samples:
        sample.ref_logprobs = np.array([0, 0, -1, -3], np.float32)
    return samples


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [[1, -2], [1, -2]]),  # the teacher's log-prob minus the sampler's
        ({"kl_coef": 0.5}, [[0.5, -1], [0.5, -1]]),
        ({"discount": 0.5}, [[0, -2], [0, -2]]),  # 1 + 0.5 * -2
        ({"discount": 1.0}, [[-1, -2], [-1, -2]]),
        ({"reward_coef": 2.0}, [[2, -1], [0, -3]]),  # rewards 1 and 0: 0.5 above and below their mean
    ],
)
def test_a_token_is_rewarded_by_how_likely_the_teacher_finds_it(settings, expected):
    algorithm = Distill(DistillConfig(teacher="big", **settings), ScriptedTeacher())
    rows = algorithm.credit(samples_of(algorithm, 1.0, 0.0))
    assert [row.tolist() for row in rows] == [[0, 0, *each] for each in expected]


def test_an_episode_counts_whatever_its_reward():
    algorithm = Distill(DistillConfig(teacher="big"), ScriptedTeacher())
    assert not algorithm.needs_groups
    assert len(samples_of(algorithm, 0.0)) == 1


def test_samples_that_the_teacher_has_not_scored_are_refused():
    algorithm = Distill(DistillConfig(teacher="big"), ScriptedTeacher())
    samples = samples_of(algorithm, 1.0)
    samples[0].ref_logprobs = None
    with pytest.raises(ValueError, match="needs the teacher's log-probs"):
        algorithm.credit(samples)


async def make(llms, model, *, settings=None, num_generations=8, **finetuning):
    groups = {"groups": {"_type": "group", "num_generations": num_generations}}
    loaded = build_config(
        {"llms": llms, "trajectory_builders": groups, "finetuning": {"trajectory_builder": "groups", **finetuning}}
    )

    async def get_llm(name):
        return model

    builder = SimpleNamespace(config=loaded.config, get_llm=get_llm)
    return await anext(distill(DistillConfig(teacher="big", **(settings or {})), builder))


LOCAL, ENDPOINT = {"_type": "local", "model": "m"}, {"_type": "openai", "model_name": "m", "base_url": "http://h/v1"}


async def test_a_teacher_is_an_entry_of_llms():
    assert isinstance(await make({"big": LOCAL}, ScriptedTeacher()), Distill)
    with pytest.raises(ConfigError, match='llms has no entry "big"; it has agent'):
        await make({"agent": {"_type": "policy"}}, None)


async def test_a_model_that_cannot_score_is_no_teacher():
    with pytest.raises(ConfigError, match="big is `_type: policy`, which cannot score"):
        await make({"big": {"_type": "policy"}}, SimpleNamespace(is_policy=True))


async def test_a_reward_is_mixed_in_only_where_siblings_are_compared():
    mixed = {"reward_coef": 0.5}
    await make({"big": LOCAL}, ScriptedTeacher(), settings=mixed)
    await make({"big": LOCAL}, ScriptedTeacher(), num_generations=1)
    with pytest.raises(ConfigError, match="reward_coef: .* each group has one episode"):
        await make({"big": LOCAL}, ScriptedTeacher(), settings=mixed, num_generations=1)


async def test_an_endpoint_scores_what_was_sampled_from_the_whole_distribution_only():
    await make({"big": LOCAL}, ScriptedTeacher(), sampling={"temperature": 0.7})
    with pytest.raises(ConfigError, match=r"finetuning.sampling: .* scores at temperature 1 over all tokens"):
        await make({"big": ENDPOINT}, ScriptedTeacher(), sampling={"temperature": 0.7})


async def test_a_stage_samples_what_an_endpoint_scores_and_validations_stay_greedy():
    stage = {"algorithm": {"_type": "distill", "teacher": "big"}, "sampling": {"temperature": 1.0}}
    finetuning = {"sampling": {"temperature": 0.0}, "pipeline": {"first": {}, "distill": stage}}
    config = build_config({"llms": {"big": ENDPOINT}, "finetuning": finetuning}).config

    async def get_llm(name):
        return ScriptedTeacher()

    builder = SimpleNamespace(config=config, get_llm=get_llm)
    assert isinstance(await anext(distill(config.finetuning.pipeline["distill"].algorithm, builder)), Distill)
    workflow = bind_workflow(lambda item, llm, context: "", "big")
    runner = EpisodeRunner.from_config(config, workflow, {"big": ScriptedTeacher()})
    keys = [EpisodeKey("collect", 0, "a"), EpisodeKey("collect", 1, "a"), EpisodeKey("validate", 1, "a")]
    assert [runner.choose_sampling(key).temperature for key in keys] == [0.0, 1.0, 0.0]


def test_the_algorithm_of_a_pipeline_is_that_of_the_epochs_stage():
    sft, grpo = SFT(), GRPO()
    staged = StagedAlgorithm([(0, sft), (2, grpo)])
    assert [staged.for_epoch(epoch) for epoch in (None, 0, 1, 2, 9)] == [sft, sft, sft, grpo, grpo]
    assert staged.needs == Needs(old_logprobs="inexact")
    assert not staged.offline, "grpo trains only what the policy sampled"


def test_a_stage_counts_its_epochs_from_its_own_first():
    class Switching(SFT):
        def for_epoch(self, epoch):
            return (self, epoch)

    second = Switching()
    assert StagedAlgorithm([(0, SFT()), (3, second)]).for_epoch(4) == (second, 1)
