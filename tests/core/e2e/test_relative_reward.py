"""A reward without labels: siblings ranked by a judge in training, the base model's answers as reference after it."""

import json

import pytest

from reinforge.config.loader import build_config, load_config
from reinforge.errors import ConfigError
from reinforge.trainer.evaluate import EvaluationOptions, evaluate
from reinforge.trainer.options import RunOptions
from reinforge.trainer.run import run_async
from reinforge.trainer.setup.check import check_config
from tests.core.e2e.test_reporting import LearningRun, Transcript
from tests.journal_rows import read_rows
from tests.judges import reply_to
from tests.openai_server import OpenAIServer, says
from tests.project import call


def judge_by(worth):
    """Returns a step of a server that answers as a judge which prefers what stands first."""

    def step(request, body):
        system, prompt = (message["content"] for message in body["messages"][:2])
        return says(reply_to(system, prompt, worth, bias=lambda place: 0.01 * (place == 0)))(request, body)

    return step


def by_form(answer):
    """Worth of `form VERSION DIGIT`: later versions are better, and siblings differ by their digit."""
    _, version, digit = answer.split()
    return 0.2 * int(version) + 0.03 * int(digit)


class JudgedRun(LearningRun):
    """A run whose reward is a judge that compares; every version of the policy answers better than the one before."""

    def __init__(self, folder, server, kind="relative_judge", **settings):
        super().__init__(folder)
        self.settings["llms"]["judge"] = {"_type": "openai", "model_name": "gpt", "base_url": server.url}
        self.settings["workflow"]["llm"] = "agent"
        self.settings["eval"]["evaluators"] = {"better": {"_type": kind, "llm": "judge", **settings}}
        self.settings["finetuning"] |= {
            "reward_function": {"name": "better"},
            "run_configuration": {"validation_interval": 1},
        }


@pytest.mark.parametrize("kind", ["relative_judge", pytest.param("pairwise_judge", marks=pytest.mark.slow)])
async def test_the_verdict_is_the_share_of_wins_over_the_base_model(tmp_path, kind):
    async with OpenAIServer(judge_by(by_form)) as server:
        run = JudgedRun(tmp_path, server, kind)
        run.settings["finetuning"]["splits"] = {"train": 20, "select": 10, "confirm": 10}
        summary = await run.run()
    assert summary.promoted is True
    assert summary.baseline.mean == summary.confirm_base.mean == 0.5
    assert summary.confirm_tuned.mean > 0.6
    assert summary.improvement.mean_difference == pytest.approx(summary.confirm_tuned.mean - 0.5)
    history = json.loads((summary.folder / "reward_history.json").read_text())
    rewards = [row["avg_reward"] for row in history]
    assert rewards == pytest.approx([0.5] * len(rewards)), "the siblings of a group always have the mean 0.5"
    assert run.progress.settings["compares"] == (
        "better compares siblings, so its mean over a group is always 0.5; validations and the verdict compare with "
        "the base model's answers (0.5: as good as before)"
    )
    assert not [note for note in run.progress.notes if "have the reward" in note], "the base's own is 0.5 by definition"
    assert run.progress.settings["sends data to"].startswith("judge: http://127.0.0.1:")
    validated = read_rows(summary.folder, "SELECT data FROM episodes WHERE phase = 'validate' AND epoch = -1")
    assert {json.loads(data)["scores"]["better"]["reasoning"] for (data,) in validated} == {
        "the base model's own answer"
    }


def judged_settings(run):
    run.settings["llms"]["judge"] = {"_type": "openai", "model_name": "m", "base_url": "http://127.0.0.1:9/v1"}
    run.settings["workflow"]["llm"] = "agent"
    run.settings["finetuning"]["reward_function"] = {"name": "better"}
    run.settings["eval"]["evaluators"] = {"better": {"_type": "relative_judge", "llm": "judge"}}
    run.settings["trainer_adapters"] = {"adapter": {"_type": "local"}}
    run.settings["finetuning"]["policy"] = {"model": "some/model"}
    return run.settings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s["trajectory_builders"]["builder"].update(num_generations=1),
            "trajectory_builders.builder.num_generations: with 1, each group has one episode",
        ),
        (
            lambda s: (
                s["trajectory_builders"]["builder"].update(num_generations=1),
                s["finetuning"].update(algorithm={"_type": "reinforce_pp"}),
            ),
            "trajectory_builders.builder.num_generations: the reward better compares the siblings of a group, but",
        ),
        (
            lambda s: s["finetuning"].update(curriculum_learning={"enabled": True}),
            "finetuning.curriculum_learning.enabled: the mean of better is 0.5 in every group",
        ),
        (
            lambda s: s["eval"]["evaluators"]["better"].update(reference="expected"),
            "eval.evaluators.better.reference: 16 of 16 examples have no expected answer",
        ),
        (
            lambda s: s["eval"]["evaluators"]["better"].update(_type="pairwise_judge", against="expected"),
            "eval.evaluators.better.against: 16 of 16 examples have no expected answer",
        ),
    ],
)
async def test_check_says_what_would_have_nothing_to_compare(tmp_path, change, message):
    settings = judged_settings(LearningRun(tmp_path))
    assert (await check_config(build_config(settings))).problems == []
    change(settings)
    problems = (await check_config(build_config(settings))).problems
    assert [message in str(problem) for problem in problems] == [True], problems


@pytest.mark.parametrize("kind", ["exact_match", "numeric", "contains"])
async def test_a_reward_that_compares_with_answers_is_refused_for_rated_prompts_without_any(tmp_path, kind):
    settings = judged_settings(LearningRun(tmp_path))
    settings["eval"]["general"]["dataset"]["rows"] = [{"prompt": f"say {n}", "rating": 1} for n in range(32)]
    function = {"_type": "python", "function": lambda item: 1.0}
    for reward, is_refused in (({"_type": "weighted", "weights": {"part": 1.0}}, True), (function, False)):
        settings["eval"]["evaluators"] = {"better": reward, "part": {"_type": kind}}
        problems = (await check_config(build_config(settings))).problems
        message = "13 of 13 held-out examples have no expected answer, so part cannot score them"
        assert [message in str(problem) for problem in problems] == [True] * is_refused


async def test_check_tells_what_the_reward_compares_with_and_tries_it_on_expected_answers(tmp_path):
    async with OpenAIServer(judge_by(lambda answer: len(answer) / 10)) as server:
        settings = judged_settings(LearningRun(tmp_path))
        settings["llms"]["judge"]["base_url"] = server.url
        report = await check_config(build_config(settings), num_samples=2)
        assert report.rewards == [], "no expected answers, so nothing to compare an empty one with"
        assert not [note for note in report.notes if "no score for any expected answer" in note]
        assert "compare with the base model's answers" in dict(report.settings)["compares"]
        for row in settings["eval"]["general"]["dataset"]["rows"]:
            row["answer"] = "five"
        report = await check_config(build_config(settings), num_samples=2)
    assert [(row.on_expected, row.on_empty) for row in report.rewards] == [(0.5, 0.0)] * 2
    assert not [note for note in report.notes if "the same score" in note]


@pytest.mark.slow
async def test_a_tiny_model_learns_what_the_judge_prefers(project):
    """The judge likes vowels, nobody labels anything, and the share of vowels rises."""
    share = lambda answer: sum(letter in "aeiou" for letter in answer) / max(1, len(answer))  # noqa: E731
    async with OpenAIServer(judge_by(share)) as server:
        project.settings["llms"]["judge"] = {"_type": "openai", "model_name": "gpt", "base_url": server.url}
        project.settings["eval"]["evaluators"]["better"] = {"_type": "relative_judge", "llm": "judge"}
        project.set("workflow.llm", "agent").set("finetuning.reward_function.name", "better")
        project.learn().write_files()
        config = load_config(project.folder / "run.yml")
        summary = await run_async(config, RunOptions(run_name="r", progress=Transcript()))
    vowels = next(change for change in summary.evaluators if change.metric == "vowels")
    assert summary.confirm_base.mean == 0.5
    assert summary.confirm_tuned.mean > 0.6
    assert vowels.after.mean > vowels.before.mean + 0.1


async def test_an_evaluation_outside_a_run_has_no_base_model_and_says_so_before_it_starts(project):
    project.settings["llms"]["judge"] = {"_type": "openai", "model_name": "m", "base_url": "http://127.0.0.1:9/v1"}
    project.settings["eval"]["evaluators"]["better"] = {"_type": "relative_judge", "llm": "judge"}
    project.settings["eval"]["evaluators"]["sum"] = {"_type": "weighted", "weights": {"better": 1, "vowels": 1}}
    project.set("workflow.llm", "agent").set("finetuning.reward_function.name", "sum")
    project.write_files()
    with pytest.raises(ConfigError, match=r"eval.evaluators.better.reference: compares with the base model's answers"):
        await evaluate(load_config(project.folder / "run.yml"), EvaluationOptions(limit=2))


def test_answers_of_the_agent_are_scored_beside_the_attacks(project):
    """Samples from the file's model, which the other tests of the command leave alone."""
    project.write_files()
    arguments = ["reward", "test", "run.yml", "--limit", "3", "--sample", "2", "--attack", "empty", "--json"]
    result = call(*arguments, code=0)
    rows = {row["answer"]: row for row in json.loads(result.stdout)["rows"]}
    assert list(rows) == ["expected", "real", "empty"]
    assert (rows["expected"]["mean"], rows["empty"]["max"]) == (1.0, 0.0), "a is a vowel"
    assert 0 < rows["real"]["mean"] < 1
    assert not (project.folder / "runs").exists()
