"""Two runs side by side: paired where both ran on the same examples, else unpaired, and it says which."""

import asyncio
import importlib
import json
import linecache
import shutil
import sys
from dataclasses import replace

import pytest
import yaml

from reinforge.config.loader import build_config
from reinforge.errors import ConfigError
from reinforge.runs.comparison import compare_runs, find_obstacles, list_settings
from reinforge.runs.episodes import count_changes
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.journal.packing import EpisodePacker, build_episode_row, unpack_episode
from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.journal.schema import update_rows
from reinforge.runs.page.content import read_content
from reinforge.runs.run_folder import RunOverview, list_runs, read_overview
from reinforge.trainer.provenance import identify_evaluators
from reinforge.trainer.rescoring import rescore
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.evaluation import EvalOutputItem
from tests.core.e2e.test_reporting import LearningRun, by_version
from tests.doubles import examples
from tests.journal_rows import read_rows
from tests.project import call, leave_out_plots_and_pages
from tests.scripted_run import ask


def twice_as_fast(output, expected):
    return 2 * by_version(output, expected)


async def ask_kindly(item, llm, context):
    reply = await llm.chat.completions.create(messages=[{"role": "user", "content": f"please: {item.input_obj}"}])
    return reply.choices[0].message.content


RUNS = {
    "short": {},
    "long": {"num_epochs": 4},
    "large": {"count": 36, "num_epochs": 4},
    "kind": {"workflow": ask_kindly},
    "fast": {"reward": twice_as_fast},
    "flat": {"reward": lambda output, expected: float(output[-1])},
}


async def make(folder, name, count=24, workflow=ask, reward=by_version, num_epochs=2):
    run = LearningRun(folder, count=count, workflow=workflow, reward=reward)
    run.settings["finetuning"]["num_epochs"] = num_epochs
    run.settings["trajectory_builders"]["builder"]["examples_per_epoch"] = 4
    await run.run()
    (folder / "r").rename(folder / name)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Six runs: of 2 and of 4 epochs, on more examples, with another prompt, and with two other rewards."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        leave_out_plots_and_pages(patch)
        for name, settings in RUNS.items():
            asyncio.run(make(folder, name, **settings))
    return folder


@pytest.fixture
def copied(made, tmp_path):
    """The folder of copies of two of them, to be changed at will."""
    for name in ("short", "long"):
        shutil.copytree(made / name, tmp_path / name)
    return tmp_path


def compare(folder, first, second):
    return compare_runs(folder / first, folder / second)


def test_runs_on_the_same_examples_are_compared_example_by_example(made):
    found = compare(made, "short", "long")
    assert found.is_paired
    assert found.pairing == "Compared example by example: the trained models on the same 6 confirm examples."
    [row] = found.metrics
    scores = [
        dict(read_rows(folder, "SELECT example_id, avg(reward) FROM episodes WHERE phase = 'confirm_tuned' GROUP BY 1"))
        for folder in (made / "short", made / "long")
    ]
    differences = [scores[1][example] - scores[0][example] for example in scores[0]]
    assert row.difference.mean_difference == pytest.approx(sum(differences) / len(differences))
    assert row.difference.num_pairs == 6
    assert found.conclude() == f"long is better in reward: {row.difference}."
    assert count_changes(found.examples) == (6, 0, 0)
    assert [str(change) for change in found.changes] == ["finetuning.num_epochs: 2 -> 4"]
    assert found.notes == []
    back = compare(made, "long", "short")
    assert back.conclude().startswith("long is better in reward: "), "the other way round too"
    assert back.metrics[0].difference.mean_difference < 0


def test_other_examples_are_compared_by_their_means_and_it_says_so(made):
    found = compare(made, "short", "large")
    assert not found.is_paired
    assert found.pairing.startswith(
        "Compared unpaired, by the means alone: the trained models on 6 confirm examples and 9 "
    )
    assert found.metrics[0].difference.num_pairs == 0
    assert found.examples == []
    assert found.conclude().startswith("large is better in reward: ")


@pytest.mark.slow
def test_equal_ids_of_other_questions_are_not_paired(made, tmp_path):
    found = compare(made, "short", "kind")
    assert found.is_paired, "the dataset is the same; that the agent asks in other words is what is compared"
    for name in ("kind", "long"):
        shutil.copytree(made / name, tmp_path / name)
        forget_dataset(tmp_path / name)
    found = compare_runs(made / "short", tmp_path / "kind")
    assert not found.is_paired
    assert found.pairing.endswith(
        "Their ids are equal, but the prompts differ or were not recorded, so the examples may differ."
    )
    found = compare_runs(made / "short", tmp_path / "long")
    assert found.is_paired
    assert found.pairing.endswith("equal ids and prompts, and their expected answers were not compared.")


def forget_dataset(folder):
    journal = RunJournal.open(folder)
    journal.set_facts(data_sha256=folder.name)
    journal.close()


def test_equal_ids_without_recorded_prompts_are_not_paired(copied):
    """Nothing shows that the examples are the same: two agents whose calls were not recorded."""
    for name in ("short", "long"):
        forget_dataset(copied / name)
        change_episodes(copied / name, lambda data: data | {"calls": []})
    found = compare(copied, "short", "long")
    assert not found.is_paired
    assert "the prompts differ or were not recorded" in found.pairing


def test_the_whole_prompt_counts_not_its_last_message(copied):
    for name in ("short", "long"):
        forget_dataset(copied / name)
        first = {"role": "user", "content": f"question of {name}"}
        change_episodes(copied / name, lambda data, first=first: ask_first(data, first))
    assert not compare(copied, "short", "long").is_paired


def ask_first(data, message):
    for each in data["calls"]:
        each["messages"] = [message, {"role": "user", "content": "Answer now."}]
    return data


def change_episodes(folder, change, **columns):
    journal = RunJournal.open(folder)

    def write(db):
        for key, packed in db.execute("SELECT key, data FROM episodes WHERE phase = 'confirm_tuned'").fetchall():
            changed = change(unpack_episode(packed))
            if changed is not None:
                row = {"data": EpisodePacker(changed).compress(), **build_episode_row(changed), **columns}
                update_rows(db, "episodes", row, "key = :known", known=key)

    journal._writer.put(write)
    journal.close()


@pytest.mark.slow
def test_a_run_that_was_extended_is_compared_by_its_last_verdict(copied):
    """The episodes of the first verdict stay in the journal; they are of an earlier model."""
    before = compare(copied, "short", "long").metrics[0]
    journal = RunJournal.open(copied / "long")
    for head in journal.episode_heads("confirm_tuned"):
        key = EpisodeKey("confirm_tuned", head.epoch - 1, head.example_id, 0)
        scores = {"reward": EvalOutputItem(id=head.example_id, score=-50.0, reasoning=None)}
        journal.record_episode(EpisodeRecord(key, examples(1)[0], scores=scores, reward=-50.0))
    journal.close()
    assert compare(copied, "short", "long").metrics[0] == before
    assert min(example.second for example in read_content(copied / "long").examples) > 0


def test_an_episode_that_failed_outside_the_policy_is_left_out_whatever_was_scored(copied):
    """Where the judge failed, other evaluators may have scored; the verdict leaves such an episode out as well."""
    change_episodes(
        copied / "long",
        lambda data: data | {"outcome": "judge_error"} if data["example_id"] in pick_two(copied) else None,
        outcome="judge_error",
    )
    found = compare(copied, "short", "long")
    assert found.metrics[0].difference.num_pairs == 4
    assert found.notes == ["2 of 6 examples have no reward in long and are left out."]


def pick_two(made):
    return sorted(head.example_id for head in JournalReader(made / "long").last_heads("confirm_tuned"))[:2]


@pytest.mark.slow
def test_examples_of_one_conversation_are_not_independent(made, copied):
    """Three conversations of two examples: 3 clusters flip, so p is 2 / 2^3 and nothing is shown."""
    for name in ("short", "long"):
        ids = sorted(head.example_id for head in JournalReader(copied / name).last_heads("confirm_tuned"))
        journal = RunJournal.open(copied / name)
        journal.set_facts(clusters={example: f"talk {number // 2}" for number, example in enumerate(ids)})
        journal.close()
    found = compare(copied, "short", "long")
    difference = found.metrics[0].difference
    assert "over 3 clusters" in difference.method
    assert difference.p_value == 0.25
    assert found.conclude() == f"No difference in reward was shown: {difference} may be due to chance, p = 0.250."
    found = compare_runs(copied / "short", made / "large")
    wide, narrow = (each.metrics[0].difference for each in (found, compare_runs(made / "short", made / "large")))
    assert wide.ci_high - wide.ci_low > narrow.ci_high - narrow.ci_low, "conversations count, not their examples"


@pytest.mark.slow
async def test_a_run_records_the_conversations_of_its_held_out_examples(tmp_path):
    run = LearningRun(tmp_path, count=48)
    rows = run.settings["eval"]["general"]["dataset"]["rows"]
    run.settings["eval"]["general"]["dataset"]["rows"] = [row | {"conversation": row["id"] // 2} for row in rows]
    await run.run()
    clusters = JournalReader(tmp_path / "r").facts()["clusters"]
    assert clusters
    assert all(clusters[example] == clusters[str(int(example) ^ 1)] for example in clusters), "0 and 1, 2 and 3, ..."
    assert len(set(clusters.values())) == len(clusters) / 2


def test_a_model_that_only_judges_differently_is_named(copied):
    for name, model in (("short", "small"), ("long", "large")):
        config = yaml.safe_load((copied / name / "config.yml").read_text())
        config["llms"]["critic"] = {"_type": "openai", "model_name": model}
        config["eval"]["evaluators"]["reward"]["llm_name"] = "critic"
        (copied / name / "config.yml").write_text(yaml.safe_dump(config))
    found = compare(copied, "short", "long")
    assert found.notes == ["The two runs are scored differently: llms.critic.model_name."]


def test_a_run_with_a_baseline_alone_is_named(copied):
    journal = RunJournal.open(copied / "short")
    journal._writer.put(lambda db: db.execute("DELETE FROM episodes WHERE epoch >= 0"))
    journal._writer.put(lambda db: db.execute("DELETE FROM validations WHERE epoch >= 0"))
    journal.close()
    found = compare(copied, "short", "long")
    assert "short was validated before training only: these are the scores of its base model." in found.notes


def test_runs_that_are_scored_differently_say_so(made):
    found = compare(made, "short", "fast")
    assert found.notes[0] == "reward cannot be compared. Its code, its settings or its judge changed between the runs."
    assert found.notes[1].startswith("The two runs are scored differently: eval.evaluators.reward")
    assert found.conclude() == (
        "short and fast were scored by different evaluators named reward: they cannot be compared. --score_with fast "
        "scores the outputs of both again."
    )
    assert found.metrics[0].describe_difference() == ("not comparable", "")
    assert found.examples == []


async def score_again(runs, judge, reward, count=24):
    run = LearningRun(judge.parent, count=count, reward=reward)
    loaded = replace(build_config(run.settings, registry=run.registry()), project_root=judge.parent)
    return await rescore(runs, judge, loaded, run.registry())


@pytest.mark.slow
async def test_outputs_of_both_runs_are_scored_anew_by_the_evaluators_of_one(made):
    """Both models are equal; the reward of `fast` is twice that of `short`."""
    runs = [made / "short", made / "fast"]
    blind = compare_runs(*runs).metrics[0]
    for judge, reward in ((runs[0], by_version), (runs[1], twice_as_fast)):
        found = compare_runs(*runs, await score_again(runs, judge, reward))
        row = found.metrics[0]
        assert row.is_comparable
        assert found.notes == [f"Both runs' outputs were scored again by the evaluators of {judge.name}."]
        factors = (1, 0.5) if judge is runs[0] else (2, 1)
        assert [row.first.mean, row.second.mean] == pytest.approx(
            [blind.first.mean * factors[0], blind.second.mean * factors[1]]
        )
        assert "better" not in found.conclude()


async def test_what_cannot_be_scored_anew_is_refused(made, copied):
    runs = [made / "short", made / "fast"]
    with pytest.raises(ConfigError, match="reward changed since short, so its evaluators are not here any more"):
        await score_again(runs, runs[0], twice_as_fast)
    with pytest.raises(ConfigError, match="large ran on other examples than short has now"):
        await score_again([made / "short", made / "large"], made / "short", by_version)
    change_episodes(copied / "long", lambda data: {**data, "output": None})
    with pytest.raises(ConfigError, match="long did not record the output of confirm_tuned/"):
        await score_again([copied / "short", copied / "long"], copied / "short", by_version)
    result = call("runs", "compare", "short", "long", "--score-with", "fast", "--output_dir", str(made))
    assert (result.exit_code, "fast is neither of the two runs" in result.output) == (2, True)


@pytest.mark.parametrize("is_imported", [True, False], ids=["imported", "in another process"])
def test_a_reward_that_the_file_names_is_known_by_its_code(tmp_path, monkeypatch, is_imported):
    monkeypatch.syspath_prepend(tmp_path)
    evaluators = {"reward": {"_type": "python", "function": "named_reward:reward"}}
    hashes = []
    for number in (1, 1, 2):
        (tmp_path / "named_reward.py").write_text(f"def reward(output, expected):\n    return {number}.0\n")
        monkeypatch.delitem(sys.modules, "named_reward", raising=False)
        linecache.clearcache()
        if is_imported:
            importlib.invalidate_caches()
            monkeypatch.setattr(sys, "dont_write_bytecode", True)
            importlib.import_module("named_reward")
        loaded = build_config({"eval": {"evaluators": evaluators}})
        hashes.append(identify_evaluators(replace(loaded, project_root=tmp_path))["reward"])
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_reward_of_the_same_name_is_another_one_if_what_it_calls_has_changed(tmp_path, monkeypatch):
    """The helper of a reward, and a constant: the function itself and its name stay as they are."""
    source = "SCALE = 1.0\nWORDS = {'one', 'two', 'three'}\nKEYS = ['a']\n\ndef shape(score):\n"
    source += "    return SCALE * score + len(WORDS) + len(KEYS)\n\ndef reward(output, expected):\n"
    source += "    return shape(len(output) / 10)\n\ndef unused():\n    return 1\n"
    hashes = []
    for name, text in {
        "once": source,
        "same": source.replace("return 1\n", "return 2\n"),
        "scaled": source.replace("1.0", "2.0"),
        "shaped": source.replace("SCALE * score", "SCALE - score"),
        "listed": source.replace("['a']", "['b']"),
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"rewards_{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path / name)
        module = importlib.import_module(f"rewards_{name}")
        evaluators = {"reward": {"_type": "python", "function": module.reward}}
        hashes.append(identify_evaluators(build_config({"eval": {"evaluators": evaluators}}))["reward"])
    once, same, scaled, shaped, listed = hashes
    assert once == same, "what the reward does not use does not count"
    assert len({once, scaled, shaped, listed}) == 4


def test_code_that_differs_is_named(copied):
    for name, digest in (("short", "1"), ("long", "2")):
        journal = RunJournal.open(copied / name)
        files = {"reward.py": digest, "agent.py": "0", "tiny/config.json": digest}
        journal.set_facts(provenance={"files": files, "functions": {"__main__.score": digest}, "versions": {}})
        journal.close()
    found = compare(copied, "short", "long")
    assert found.notes == ["The code differs in __main__.score, reward.py."]


def test_without_a_verdict_the_last_validations_are_compared(made):
    found = compare(made, "short", "flat")
    assert found.split == "select"
    assert "the last validations on the same" in found.pairing
    assert any("it flatters both" in note for note in found.notes)


def test_a_run_is_not_compared_with_itself_and_the_two_newest_are_named(made):
    newest = " ".join(run.name for run in list_runs(made)[-2:])
    with pytest.raises(ConfigError, match=f"would be compared with itself\n.*: reinforge runs compare {newest}$"):
        compare(made, "short", "short")


def test_the_command(made):
    folder = str(made)
    shown = call("runs", "compare", "short", "long", "--output_dir", folder, code=0)
    assert "Compared example by example" in shown.output
    assert "6 examples score higher in long, 0 the same, 0 lower" in shown.output
    assert "finetuning.num_epochs: 2 -> 4" in shown.output
    found = json.loads(call("runs", "compare", "short", "long", "--output_dir", folder, "--json").output)
    assert (found["paired"], found["first"]["name"], len(found["examples"])) == (True, "short", 6)
    call("runs", "compare", "short", "nothing", "--output_dir", folder, code=2)


def test_what_makes_runs_incomparable_and_what_differs_in_their_settings(made, copied):
    runs = [read_overview(made / name) for name in ("short", "long", "large")]
    assert find_obstacles(runs[:2]) == {}
    assert list(find_obstacles(runs)) == ["data"]
    assert list(find_obstacles([runs[0], read_overview(made / "fast")])) == ["evaluator reward"]
    assert list_settings(runs)["finetuning.num_epochs"] == [2, 4, 4]
    config = yaml.safe_load((copied / "long" / "config.yml").read_text())
    config["finetuning"]["reward_function"] = {"name": "style"}
    for name, model in (("short", "small"), ("long", "large")):
        config["finetuning"]["policy"] = {"model": model}
        (copied / name / "config.yml").write_text(yaml.safe_dump(config))
        config["finetuning"]["reward_function"] = {"name": "judge"}
    found = find_obstacles([read_overview(copied / name) for name in ("short", "long")])
    assert found == {"base model": ["small", "large"], "reward": ["style", "judge"]}
    assert find_obstacles([runs[0], RunOverview(made / "short")]) == {}, "nothing is known of a damaged one"
