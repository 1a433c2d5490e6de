"""`reinforge improve` as a user meets it: a search over real runs of a small model."""

import asyncio
import json
import shutil
import sys
from functools import partial
from importlib.util import find_spec

import filelock
import pytest
import yaml

import reinforge
from reinforge.config.loader import load_config
from reinforge.errors import ConfigError
from reinforge.improvement.api import choose_budget, load_without_answers, run_search
from reinforge.improvement.recipes import DEMONSTRATIONS, REWARDS, SearchRecipe, propose
from reinforge.improvement.record import SearchBudget, SearchRecord, Trial
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


TOKENS = "5500"


def make_project(folder, model):
    return Project(folder, model).set("finetuning.deterministic", True).save()


@pytest.fixture
def project(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    return make_project(tmp_path, model)


def load(overrides):
    return load_config("run.yml", changes=overrides)


def search(*arguments, code=0):
    return call("improve", "run.yml", "--run_name", "s", "--budget_tokens", TOKENS, *arguments, code=code).output


@pytest.fixture(scope="module")
def searched(tmp_path_factory, model):
    """A project with a search that is over, and what that printed."""
    project = make_project(tmp_path_factory.mktemp("searched"), model)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project.folder)
        patch.setitem(sys.modules, "matplotlib", None)
        return project, search()


@pytest.fixture
def finished(searched, monkeypatch):
    monkeypatch.chdir(searched[0].folder)
    return searched


def result_epochs(folder):
    return json.loads((folder / "search.json").read_text())["trials"][0]["epochs"]


@pytest.mark.slow
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
    assert 0.5 * record.judged < record.arm_cost < record.judged, "the winner may have learned to say less"
    evaluated = call("eval", "run.yml", "--model", str(folder / "model"), "--split", "confirm", "--json", code=0).output
    assert json.loads(evaluated)["metrics"]["vowels"]["mean"] == result["after"]["mean"]


@pytest.mark.slow
def test_the_page_links_to_the_reports_of_the_trials(finished):
    folder = finished[0].folder / "runs" / "s"
    page = Page((folder / "report.html").read_text())
    links = [value for name, value in page.attributes if name == "href" and not value.startswith("#")]
    assert links
    assert all((folder / link).is_file() for link in links)
    assert "script" not in page.tags
    assert "num_generations: " in page.text


@pytest.mark.slow
def test_no_trial_has_seen_the_confirm_examples(finished):
    trials = list((finished[0].folder / "runs" / "s" / "trials").iterdir())
    assert len(trials) > 1
    for trial in trials:
        summary = json.loads((trial / "summary.json").read_text())
        assert (summary["confirm_base"], summary["promoted"]) == (None, None)
        assert summary["status"] == "stopped" or "identical siblings" in summary["reason"], "all of them solved it"
        assert JournalReader(trial).count_episodes("confirm_base") == 0
        assert call("runs", "show", str(trial), code=0)


@pytest.mark.slow
def test_a_search_that_is_over_says_the_same_again(finished):
    again = call("improve", "run.yml", "--resume", "s", code=0).output
    assert again.split("\n\n")[-1] == finished[1].split("\n\n")[-1]
    assert "already exists" in search(code=2)


@pytest.mark.slow
def test_another_process_at_the_same_search_is_refused(finished):
    with (
        filelock.FileLock(finished[0].folder / "runs" / "s" / LOCK),
        pytest.raises(ConfigError, match="another process works on"),
    ):
        run_search(load, None, resume="s")


class Killed(BaseException):
    """The process dies."""


@pytest.mark.slow  # test_search.py stops searches over simulated trials
@pytest.mark.parametrize("stop", [2, 5])
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


@pytest.mark.slow
def test_the_same_from_python(project, monkeypatch):
    monkeypatch.setenv("REINFORGE_HOME", str(project.folder / "home"))

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
    text, page = ((found.folder / name).read_text() for name in ("recipe.yml", "report.html"))
    names = f"{__name__}:{agent.__qualname__}, {__name__}:{vowels.__qualname__}"
    assert text.startswith(
        f"# These functions were passed in Python: {names}\n# To run this file, put them into a module"
    )
    assert f"recipe.yml, once it names {names} as `module:name` in a file of the project" in Page(page).text
    assert not (project.folder / "home" / "outcomes.jsonl").exists(), "a budget in tokens leaves no outcome"


def search_recipes(project, recipes, tokens):
    """Returns the record of a search over some recipes, in which the first one cannot be dropped."""
    record = SearchRecord(project.folder / "runs" / "s", choose_budget(0, tokens))
    record.folder.mkdir(parents=True)
    trials, gate = RunTrials(record, load, lambda line: None), load(()).config.finetuning.gate
    asyncio.run(Search(record, trials, recipes, gate, lambda line: None).run())
    return record


WITH_TEXT = """
async def agent(item, llm, context):
    text = context.text("system", "say something")
    messages = [{"role": "system", "content": text}, {"role": "user", "content": item.input_obj}]
    reply = await llm.chat.completions.create(messages=messages, max_tokens=4)
    return reply.choices[0].message.content + "z" if "Examples" not in text else "a" * len(text.splitlines())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("unit", "is_shared"), [("s", True), ("tokens", False)])
def test_the_untouched_agent_is_measured_on_select_once(project, unit, is_shared):
    """Except where the budget counts tokens, all of which are then sampled. An episode records how long it took."""
    record = SearchRecord(project.folder / "runs" / "s", SearchBudget(1e6, unit))
    record.trials = [Trial(1, SearchRecipe("a", "")), Trial(2, SearchRecipe("b", "", (("finetuning.seed", "0"),)))]
    trials = RunTrials(record, load, lambda line: None)
    for trial in record.trials:
        trial.most_epochs = 1
        asyncio.run(trials.train(trial))
    first, second = (JournalReader(record.locate(trial)).packed_episodes("validate", -1) for trial in record.trials)
    assert first.keys() == second.keys()
    assert (first == second) == is_shared
    assert record.trials[1].baseline == record.trials[0].baseline
    assert (record.trials[1].has_baseline, record.trials[1].select_cost > 0) == (is_shared, True)


@pytest.mark.slow
def test_a_better_prompt_can_win_without_any_training(project):
    """Only with demonstrations in its prompt this agent answers with vowels alone, whatever its weights."""
    project.write_agent(WITH_TEXT)
    project.set("trajectory_builders.builder.num_generations", 2).save()
    recipes = [SearchRecipe("as-configured", "as it is"), SearchRecipe("shown", "examples", prompts=DEMONSTRATIONS)]
    record = search_recipes(project, recipes, 2_500)
    found = record.result
    assert found["winner"] == "02-shown"
    assert found["promoted"] is True
    assert found["after"]["mean"] == 1.0
    assert found["epoch"] == -1
    recipe = yaml.safe_load((record.folder / "recipe.yml").read_text())
    assert recipe["prompts"]["system"].startswith("say something\n\nExamples:\n\nUser: say ")
    assert json.loads(json.dumps(SearchRecord.read(record.folder).result)) == json.loads(json.dumps(found))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ('"a"', "nothing to do: the untouched agent has the score 1 on every select example"),
        ('"z"', "the reward never differs: all 266 episodes have the reward 0; test it with `reinforge reward"),
    ],
)
def test_a_task_without_room_or_without_signal_ends_the_search_after_one_epoch(project, reply, reason):
    project.write_agent(AGENT.replace("return reply.choices[0].message.content", f"return {reply}"))
    project.rows = [{name: value for name, value in row.items() if name != "answer"} for row in project.rows]
    project.save()
    output = search()
    assert f"promoted     no: {reason}" in output
    folder = project.folder / "runs" / "s"
    assert [each.name for each in (folder / "trials").iterdir()] == ["01-as-configured"]
    assert (
        f"| 04-larger-steps | learning rate 0.009 instead of 0.003 | 0 |  |  | {reason}"
        in (folder / "report.md").read_text()
    )


@pytest.mark.slow
def test_without_signal_within_groups_what_needs_it_is_not_tried(project):
    """The reward depends on the example alone: each is always or never solved."""
    project.write_agent(AGENT.replace("return reply.choices[0].message.content", 'return "az"[int(item.id) % 2]'))
    output = search()
    found = "(266 episodes have rewards from 0 to 1, which differ in 0 of 32 groups)"
    assert [line for line in output.splitlines() if line.startswith("not tried")] == [
        f"not tried, as untouched the agent has no groups whose rewards differ {found}: 04-larger-steps, "
        "05-imitate-then-reinforce, 06-imitate-the-best, 10-smaller-steps",
        f"not tried, as untouched the agent has no groups with a better and a worse reply to one prompt {found}: "
        "07-prefer-the-best",
    ]
    assert "promoted     no: nothing helped" in output


@pytest.mark.slow
def test_where_no_reward_differs_the_expected_answers_teach(project):
    """The agent earns nothing until it says the word that each example expects."""
    reward = "float(output == expected)"
    project.write_agent(AGENT)
    text = (project.folder / "task.py").read_text()
    project.write("task.py", text.partition("def vowels")[0] + f"def vowels(output, expected):\n    return {reward}\n")
    project.rows = [{**row, "answer": "b"} for row in project.rows]
    project.save()
    output = search()
    result = json.loads((project.folder / "runs" / "s" / "search.json").read_text())["result"]
    assert "01-as-configured is stopped: it needs rewards that differ" in output
    assert (result["winner"], result["promoted"]) == ("02-learn-the-answers", True)
    assert result["before"]["mean"] == 0 < result["improvement"]["ci_low"]


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
        "learn-the-answers",
        "larger-groups",
        "larger-steps",
        "imitate-then-reinforce",
        "imitate-the-best",
        "prefer-the-best",
        "demonstrations",
        "prompt-into-weights",
        "smaller-steps",
        "more-answers",
    ]


def list_recipes(project, **settings):
    for path, value in settings.items():
        project.set(path.replace("__", "."), value)
    project.save()
    return [recipe.name for recipe in propose(load(()).config)]


def test_a_teacher_is_tried_if_it_has_the_tokens_of_the_policy(project, tmp_path):
    names = list_recipes(project, llms__judge={"_type": "local", "model": str(project.model)})
    assert "distill" not in names  # the policy itself
    strange = make_tiny_model(tmp_path / "strange", vocab_size=300)
    assert "distill" not in list_recipes(project, llms__judge={"_type": "local", "model": str(strange)})
    larger = make_tiny_model(tmp_path / "larger", num_hidden_layers=3)
    names = list_recipes(project, llms__teacher={"_type": "local", "model": str(larger)})
    assert names[:3] == ["as-configured", "learn-the-answers", "distill"]
    [recipe] = [each for each in propose(load(()).config) if each.name == "distill"]
    assert load(recipe.overrides).config.finetuning.algorithm.teacher == "teacher"


def test_recipes_apply_to_what_they_change(project):
    names = list_recipes(project, finetuning__algorithm={"_type": "expert_iteration"})
    assert not {"imitate-the-best", "imitate-then-reinforce"} & set(names)
    names = list_recipes(project, finetuning__algorithm={"_type": "dpo"})
    assert names == ["as-configured", "larger-groups"]
    names = list_recipes(project, finetuning__pipeline={"one": {"num_epochs": 1}, "two": {"num_epochs": 4}})
    assert names == ["as-configured", "larger-groups"]
    assert propose(load(()).config)[0].set_epochs(7) == ("finetuning.pipeline.two.num_epochs", "6")


def test_a_stage_that_a_recipe_adds_may_have_all_epochs(project):
    [recipe] = [each for each in propose(load(()).config) if each.name == "learn-the-answers"]
    for count, stages in ((4, {"imitate": 4}), (6, {"imitate": 6}), (8, {"imitate": 6, "reinforce": 2})):
        config = load((*recipe.overrides, recipe.set_epochs(count))).config.finetuning
        assert {name: stage.num_epochs for name, stage in config.pipeline.items()} == stages
        assert config.num_epochs == count
    groups, answers = (load(recipe.overrides).config.trajectory_builders[name] for name in ("builder", "answers"))
    assert answers.examples_per_epoch == 3 * groups.num_generations * groups.examples_per_epoch, "as the defaults have"


def test_without_groups_good_replies_are_imitated_whatever_the_scale_of_the_rewards(project):
    project.settings["trajectory_builders"]["builder"] = {"_type": "dpo_traj_builder"}
    project.save()
    [recipe] = [each for each in propose(load(()).config) if each.name == "imitate-the-best"]
    assert recipe.needs == REWARDS
    assert load(recipe.overrides).config.finetuning.algorithm.rollout_selection_method == "weighted_sampling"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["imitate-then-reinforce", "prefer-the-best", "distill"])
def test_a_recipe_helps_and_what_it_leaves_can_be_run(project, searched, name):
    """With replies of one token some have the reward 1, since there are tokens that are vowels."""
    project.write_agent(AGENT.replace("max_tokens=4)", "max_tokens=1)"))
    teacher = searched[0].folder / "runs" / "s" / "model"
    project.set("llms.teacher", {"_type": "local", "model": str(teacher)}).save()
    [recipe] = [each for each in propose(load(()).config) if each.name == name]
    record = search_recipes(project, [recipe], 2_500)
    found = record.result
    assert found["winner"] == f"01-{name}"
    assert found["promoted"] is True
    shutil.copy(record.folder / "recipe.yml", "recipe.yml")
    config = load_config("recipe.yml").config.finetuning
    assert config.num_epochs == found["epoch"] + 1
    assert list(config.pipeline) == (["imitate", "reinforce"] if name == "imitate-then-reinforce" else [])


@pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs reasoning_gym")
def test_the_rows_of_a_stage_do_not_take_the_place_of_the_builder_that_an_environment_brings():
    """Its defaults begin with the expected answers, which the search tries as a recipe of its own."""
    chosen = [("environment", "reasoning_gym:spell_backward"), ("finetuning.policy.model", "bundled:tickets")]
    load_whole = partial(load_config, None, overrides=chosen)
    assert list(load_whole().config.finetuning.pipeline) == ["answers", "reinforce"]
    load = load_without_answers(lambda changes: load_whole(changes=changes))
    assert load(()).config.finetuning.num_epochs == 12
    names = {each.name: each for each in propose(load(()).config)}
    assert "learn-the-answers" in names
    recipe = names["prompt-into-weights"]
    finetuning = load((*recipe.overrides, recipe.set_epochs(9))).config.finetuning
    assert finetuning.trajectory_builder == "builder"
    assert finetuning.pipeline["imitate"].trajectory_builder == "prompt_rows"
    assert finetuning.pipeline["reinforce"].trajectory_builder is None


SEVERAL = """
async def agent(item, llm, context):
    text = context.text("system", "say something")
    messages = [{"role": "system", "content": text}, {"role": "user", "content": item.input_obj}]
    n = 8 if "Examples" in text else 1
    reply = await llm.chat.completions.create(messages=messages, max_tokens=2, n=n)
    return max((choice.message.content for choice in reply.choices), key=lambda each: vowels(each, None))
"""


@pytest.mark.slow
def test_what_a_better_prompt_brings_is_trained_into_the_weights(project):
    """With demonstrations in its prompt this agent gives the best of eight replies, as a better prompt would."""
    project.write_agent(SEVERAL)
    project.save()
    [recipe] = [each for each in propose(load(()).config) if each.into_weights]
    record = search_recipes(project, [recipe], 9_000)
    assert record.result["winner"] == "01-prompt-into-weights"
    assert record.result["promoted"] is True
    written = yaml.safe_load((record.folder / "recipe.yml").read_text())
    rows = record.folder / "prompts" / DEMONSTRATIONS / "rows.jsonl"
    assert not written.get("prompts")
    assert written["finetuning"]["pipeline"]["imitate"]["dataset"] == str(rows)
    assert {json.loads(line)["messages"][0]["content"] for line in rows.read_text().splitlines()} == {"say something"}
    assert SearchRecord.read(record.folder).trials[0].rows == str(rows)


@pytest.mark.slow
def test_two_trials_share_what_a_search_for_prompts_found(project):
    project.write_agent(SEVERAL)
    project.save()
    recipes = [each for each in propose(load(()).config) if each.prompts is not None]
    first, second = search_recipes(project, recipes, 30_000).trials
    assert [each.name for each in (first, second)] == ["01-demonstrations", "02-prompt-into-weights"]
    assert first.prompt_cost > 0 == second.prompt_cost
    assert (list(first.prompts), second.prompts) == (["system"], {})


def test_without_a_size_of_the_epochs_they_are_short_enough_to_stop_between_them(project):
    short = ("trajectory_builders.builder.examples_per_epoch", "16")
    project.settings["trajectory_builders"]["builder"]["examples_per_epoch"] = None
    project.save()
    assert all(recipe.overrides[0] == short for recipe in propose(load(()).config))
