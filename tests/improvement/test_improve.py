"""`reinforge improve` as a user meets it: a search over real runs of a small model."""

import asyncio
import json

import filelock
import pytest
import yaml

import reinforge
from reinforge.config.loader import load_config
from reinforge.errors import ConfigError
from reinforge.improvement.api import choose_budget, run_search
from reinforge.improvement.recipes import DEMONSTRATIONS, SearchRecipe, propose
from reinforge.improvement.record import SearchRecord, Trial
from reinforge.improvement.search import Search
from reinforge.improvement.trials import RunTrials
from reinforge.runs.journal.journal import LOCK
from reinforge.runs.journal.reader import JournalReader
from tests.core.runs.test_page import Page
from tests.models import make_tiny_model
from tests.project import AGENT, Project, call


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


TOKENS = "9000"


def make_project(folder, model):
    return Project(folder, model).set("finetuning.deterministic", True).save()


@pytest.fixture
def project(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    return make_project(tmp_path, model)


def load(overrides):
    return load_config("run.yml", overrides=overrides)


def search(*arguments, code=0):
    return call("improve", "run.yml", "--run_name", "s", "--budget_tokens", TOKENS, *arguments, code=code).output


@pytest.fixture(scope="module")
def searched(tmp_path_factory, model):
    """A project with a search that is over, and what that printed."""
    project = make_project(tmp_path_factory.mktemp("searched"), model)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project.folder)
        return project, search()


@pytest.fixture
def finished(searched, monkeypatch):
    monkeypatch.chdir(searched[0].folder)
    return searched


def result_epochs(folder):
    return json.loads((folder / "search.json").read_text())["trials"][0]["epochs"]


def test_a_search_finds_an_improvement_and_leaves_a_model_and_a_recipe(finished):
    project, output = finished
    folder = project.folder / "runs" / "s"
    result = json.loads((folder / "search.json").read_text())["result"]
    assert result["promoted"] is True
    assert result["improvement"]["ci_low"] > 0
    assert f"promoted     yes: {result['reason']}" in output
    assert f"(on select it was {result['gain_on_select']:+.3f}, chosen as the best of" in output
    assert (folder / "model" / "config.json").is_file()
    report = (folder / "report.md").read_text()
    assert f"| 01-as-configured | the configuration as it is | {result_epochs(folder)} |" in report
    assert "1. " in report.split("## Decisions")[1]
    recipe = yaml.safe_load((folder / "recipe.yml").read_text())
    assert recipe["finetuning"]["num_epochs"] == result["epoch"] + 1
    # 16 confirm examples, two models, at most 4 tokens each
    record = SearchRecord.read(folder)
    assert 0 < record.judged <= 2 * 16 * 4
    assert record.used == record.judged + sum(trial.used for trial in record.trials)
    assert 2 * record.arm_cost == pytest.approx(record.judged, rel=0.3)
    evaluated = call("eval", "run.yml", "--model", str(folder / "model"), "--split", "confirm", "--json", code=0).output
    assert json.loads(evaluated)["metrics"]["vowels"]["mean"] == result["after"]["mean"]


def test_the_page_links_to_the_reports_of_the_trials(finished):
    folder = finished[0].folder / "runs" / "s"
    page = Page((folder / "report.html").read_text())
    links = [value for name, value in page.attributes if name == "href" and not value.startswith("#")]
    assert links
    assert all((folder / link).is_file() for link in links)
    assert "script" not in page.tags
    assert "num_generations: 8" in page.text


def test_no_trial_has_seen_the_confirm_examples(finished):
    trials = list((finished[0].folder / "runs" / "s" / "trials").iterdir())
    assert len(trials) > 1
    for trial in trials:
        summary = json.loads((trial / "summary.json").read_text())
        assert (summary["status"], summary["confirm_base"], summary["promoted"]) == ("stopped", None, None)
        assert JournalReader(trial).count_episodes("confirm_base") == 0
        assert call("runs", "show", str(trial), code=0)


def test_a_search_that_is_over_says_the_same_again(finished):
    again = call("improve", "run.yml", "--resume", "s", code=0).output
    assert again.split("\n\n")[-1] == finished[1].split("\n\n")[-1]
    assert "already exists" in search(code=2)


def test_another_process_at_the_same_search_is_refused(finished):
    with (
        filelock.FileLock(finished[0].folder / "runs" / "s" / LOCK),
        pytest.raises(ConfigError, match="another process works on"),
    ):
        run_search(load, None, resume="s")


class Killed(BaseException):
    """The process dies."""


@pytest.mark.parametrize("stop", [5, *(pytest.param(stop, marks=pytest.mark.slow) for stop in (2, 8))])
def test_a_search_that_dies_in_a_trial_resumes_to_the_same_winner(finished, stop):
    whole = json.loads((finished[0].folder / "runs" / "s" / "search.json").read_text())["result"]
    lines = []

    def say(line):
        lines.append(line)
        if len(lines) == stop:
            raise Killed

    with pytest.raises(Killed):
        run_search(load, choose_budget(0, int(TOKENS)), run_name=f"stopped-{stop}", say=say)
    resumed = run_search(load, None, resume=f"stopped-{stop}", say=lambda line: None)
    for key in ("winner", "epoch", "improvement", "after"):
        assert resumed.result[key] == whole[key]


SOLVED = """
def solved(output, expected):
    return float(sum(letter in "aeiou" for letter in output) > 1)
"""


def list_examples(folder, phase):
    return {head.example_id for head in JournalReader(folder).episode_heads(phase)}


@pytest.mark.slow
def test_the_winner_is_trained_again_with_another_seed_on_the_same_examples(project):
    project.write_agent(AGENT + SOLVED)
    project.set("eval.evaluators.solved", {"_type": "python", "function": "task:solved"})
    project.set("finetuning.gate", {"num_samples": 4}).save()
    output = search("--seeds", "2")
    folder = project.folder / "runs" / "s"
    result = json.loads((folder / "search.json").read_text())["result"]
    first, second = result["seeds"]["trainings"]
    assert (first["seed"], second["seed"]) == (0, 1)
    assert second["improvement"]["ci_low"] > 0
    assert f"seeds        mean {result['seeds']['mean']:+.3f}, standard deviation" in output
    assert [change["metric"] for change in result["pass_at"]] == ["solved pass@1", "solved pass@4"]
    assert "pass@k       solved pass@1 0." in output
    searched, again = folder / "trials" / result["winner"], folder / "seeds" / "seed-1"
    assert list_examples(searched, "validate") == list_examples(again, "validate")
    assert list_examples(again, "collect") <= {str(row["id"]) for row in project.rows} - list_examples(
        again, "validate"
    )
    assert yaml.safe_load((again / "config.yml").read_text())["finetuning"]["seed"] == 1


def test_the_same_from_python(project):
    async def agent(item, llm, context):
        reply = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}], max_tokens=4)
        return reply.choices[0].message.content

    def vowels(output, expected):
        return sum(letter in "aeiou" for letter in output) / max(1, len(output))

    policy = {**project.settings["finetuning"]["policy"]}
    policy.pop("model")
    found = reinforge.improve(
        agent, project.rows, vowels, project.model, max_tokens=2500, settings={"policy": policy, "device": "cpu"}
    )
    assert found.result["winner"]
    assert found.promoted == (found.model is not None)


WITH_TEXT = """
async def agent(item, llm, context):
    text = context.text("system", "say something")
    messages = [{"role": "system", "content": text}, {"role": "user", "content": item.input_obj}]
    reply = await llm.chat.completions.create(messages=messages, max_tokens=4)
    return reply.choices[0].message.content + "z" if "Examples" not in text else "a" * len(text.splitlines())
"""


def test_a_better_prompt_can_win_without_any_training(project):
    """Only with demonstrations in its prompt this agent answers with vowels alone, whatever its weights."""
    project.write_agent(WITH_TEXT)
    project.save()
    recipes = [SearchRecipe("as-configured", "as it is"), SearchRecipe("shown", "examples", prompts=DEMONSTRATIONS)]
    record = SearchRecord(project.folder / "runs" / "s", choose_budget(0, 8_000))
    record.folder.mkdir(parents=True)
    trials, config = RunTrials(record, load, lambda line: None), load(()).config
    found = asyncio.run(Search(record, trials, recipes, config.finetuning.gate, lambda line: None).run())
    assert found["winner"] == "02-shown"
    assert found["promoted"] is True
    assert found["after"]["mean"] == 1.0
    assert found["epoch"] == -1
    recipe = yaml.safe_load((record.folder / "recipe.yml").read_text())
    assert recipe["prompts"]["system"].startswith("say something\n\nExamples:\n\nUser: say ")
    assert json.loads(json.dumps(SearchRecord.read(record.folder).result)) == json.loads(json.dumps(found))


def test_the_time_of_the_verdict_is_predicted_from_the_measurement_on_select(project):
    project.set("finetuning.gate", {"num_samples": 10}).save()
    record = SearchRecord(project.folder / "runs" / "s", choose_budget(10, None))
    record.folder.mkdir(parents=True)
    record.trials = [Trial(1, SearchRecipe("as-configured", "as it is"))]
    asyncio.run(RunTrials(record, load, lambda line: None).train(record.trials[0]))
    measured_s = json.loads((record.locate(record.trials[0]) / "summary.json").read_text())["wall_time_s"]["BASELINE"]
    # 16 confirm examples of 10 episodes each are 16 times the 10 of select, one of which the start has measured
    assert record.arm_cost - record.trials[0].start_cost == pytest.approx(15 * measured_s, abs=0.02)


def test_wrong_calls_are_refused(project):
    both = call("improve", "run.yml", "--minutes", "1", "--hours", "1", code=2).output
    assert "pass one of --minutes, --hours" in both
    with pytest.raises(ConfigError, match="0 trainings of the winner"):
        run_search(load, None, seeds=0)
    assert "0.5 minutes are too few" in call("improve", "run.yml", "--minutes", "0.5", code=2).output
    assert "is not a search" in call("improve", "run.yml", "--resume", "nothing", code=2).output
    output = call("improve", "run.yml", "--reflect", "agant", code=2).output
    assert 'llms has no entry "agant", did you mean "agent"' in output
    with pytest.raises(TypeError, match=r"improve\(\) is missing the arguments workflow"):
        reinforge.improve(model="bundled:tickets")


def test_recipes_change_what_the_configuration_does_not_have(project):
    names = [recipe.name for recipe in propose(load(()).config)]
    # four steps a job, and a model far below 20 M parameters: neither more steps nor adapters
    assert names == [
        "as-configured",
        "larger-steps",
        "larger-groups",
        "imitate-the-best",
        "demonstrations",
        "smaller-steps",
    ]


def test_without_a_size_of_the_epochs_they_are_short_enough_to_stop_between_them(project):
    short = ("trajectory_builders.builder.examples_per_epoch", "16")
    project.settings["trajectory_builders"]["builder"]["examples_per_epoch"] = None
    project.save()
    assert all(recipe.overrides[0] == short for recipe in propose(load(()).config))
