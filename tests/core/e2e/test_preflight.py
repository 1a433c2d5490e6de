"""`reinforge preflight` on whole projects: what it finds, what it leaves alone, and what it says about broken tasks."""

import json
import threading
import time

import pytest

from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.config.loader import load_config
from reinforge.registry import register_algorithm
from reinforge.runs.journal.reader import JournalReader
from reinforge.trainer.preflight.analysis import preflight
from reinforge.trainer.preflight.costs import TokenPrice
from reinforge.trainer.preflight.probe import PreflightOptions
from tests.openai_server import OpenAIServer, says
from tests.project import call

SLOW_AGENT = """
    import asyncio

    async def agent(item, llm, context):
        await asyncio.sleep({seconds})
        messages = [{{"role": "user", "content": item.input_obj}}]
        reply = await llm.chat.completions.create(messages=messages, max_tokens=4)
        return reply.choices[0].message.content
    """


class SluggishConfig(GRPOConfig, name="test_sluggish"):
    """Settings of GRPO."""


class Sluggish(GRPO):
    """Its jobs do not end before they are told to."""

    may_end = threading.Event()

    def build_samples(self, groups):
        self.may_end.wait(120)
        return super().build_samples(groups)


@register_algorithm(config_type=SluggishConfig)
async def sluggish(config, builder):
    yield Sluggish(config)


QUICK = ("--examples", "4", "--samples", "4")


@pytest.fixture
def project(project, tmp_path_factory, monkeypatch):
    """A short run; its predictions are kept where one of the same machine finds them."""
    monkeypatch.setenv("REINFORGE_HOME", str(tmp_path_factory.mktemp("home")))
    return project.shrink(5)


def invoke(project, *arguments):
    project.write_files()
    return call("preflight", "run.yml", *arguments)


def report(project, *arguments):
    result = invoke(project, "--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def list_files(folder):
    return sorted(str(path) for path in folder.rglob("*") if "__pycache__" not in path.parts)


def test_a_preflight_measures_everything_and_leaves_nothing_behind(project):
    project.write_files()
    before = list_files(project.folder)
    found = report(project, *QUICK)
    assert list_files(project.folder) == before, "no run folder, no checkpoint"
    assert found["num_episodes"] == 16
    low, mean, high = (found["metrics"]["vowels"][name] for name in ("ci_low", "mean", "ci_high"))
    assert low < mean < high
    assert found["findings"]["group_size"] == 4
    assert set(found["findings"]["signal_by_size"]) == {"4", "8", "16", "32"}
    assert found["noise"] == {"num_answers": 16, "num_changed": 0, "deviation": 0.0, "share": 0.0, "reason": ""}
    assert found["lengths"]["context"] == 256
    assert 1 <= found["lengths"]["longest_reply"] <= 4
    parts = {part["name"]: part["seconds"] for part in found["time"]["parts"]}
    assert list(parts) == ["start", "baseline", "collect", "train", "publish", "validate", "verdict", "files"]
    assert all(seconds > 0 for seconds in parts.values()), parts
    assert found["time"]["total_s"] == pytest.approx(sum(parts.values()))
    assert found["memory"]["device"] == "cpu"
    assert 2**27 < found["memory"]["peak"] < found["memory"]["total"]
    assert found["costs"] == []
    assert found["total_cost"] == 0
    assert found["detectable"]["text"].startswith("16 confirm examples cannot show less than")
    assert found["recommendation"]["advice"] == "GRPO"
    assert found["notes"] == []
    scores = [reply["score"] for reply in found["replies"]]
    assert (len(scores), scores) == (4, sorted(scores)), "one of each example"
    assert all(reply["question"].startswith("say ") for reply in found["replies"])


def test_the_text_has_every_part_and_the_recommendation_last(project):
    result = invoke(project, *QUICK)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    for name in ("sample", "base", "replies", "signal", "noise", "lengths", "time", "memory", "money", "verdict"):
        assert any(line.startswith(f"  {name} ") for line in lines), name
    assert lines[-1].startswith("recommendation: GRPO with groups of ")


@pytest.mark.slow
def test_confirm_is_not_touched(project):
    """The agent is never asked a question of `confirm`: that would spend what the verdict needs."""
    asked = project.folder / "asked.txt"
    project.write_agent(
        f"""
        async def agent(item, llm, context):
            with open({str(asked)!r}, "a") as file:
                file.write(str(item.id) + chr(10))
            reply = await llm.chat.completions.create(messages=[{{"role": "user", "content": "x"}}], max_tokens=4)
            return reply.choices[0].message.content
        """
    )
    for index, row in enumerate(project.rows):
        row["part"] = ("train", "select", "confirm")[index % 3]
    project.set("finetuning.splits", {"key": "part"})
    report(project, *QUICK)
    parts = {row["id"]: row["part"] for row in project.rows}
    seen = {parts[id_] for id_ in asked.read_text().split()}
    assert seen == {"train", "select"}


def test_a_long_epoch_is_predicted_from_a_small_one(project):
    """152 episodes an epoch, 16 at a time and 0.3 s each, do not fit into two seconds."""
    project.write_agent(SLOW_AGENT.format(seconds=0.3))
    project.set("trajectory_builders.builder.examples_per_epoch", 38)
    found = report(project, *QUICK, "--probe_seconds", "2")
    reasons = {part["name"]: part["reason"] for part in found["time"]["parts"]}
    assert reasons["collect"].startswith("5 epochs x 152 episodes of ")
    assert "groups of" in reasons["train"]
    assert found["time"]["known_s"] > 5 * 152 / 16 * 0.3


@pytest.mark.slow
def test_a_probe_ends_when_its_time_is_up(project):
    """An episode takes 1 s, 16 at a time: 20 examples, 10 of select and 5 epochs of 128 would take a minute."""
    project.write_agent(SLOW_AGENT.format(seconds=1))
    project.set("trajectory_builders.builder", {"_type": "group", "examples_per_epoch": 16})
    started = time.monotonic()
    found = report(project, "--probe_seconds", "5")
    rest_s = time.monotonic() - started - next(p["seconds"] for p in found["time"]["parts"] if p["name"] == "start")
    assert rest_s < 5 + 4, "one job more than what was left, and cleaning up"
    assert found["num_episodes"] < 80
    assert any(note.startswith("there was time for ") for note in found["notes"])
    result = call("preflight", "run.yml", "--probe_seconds", "0.5")
    assert result.exit_code == 3
    assert "none ended in 0.2 s; --probe_seconds allows more" in result.output


def test_a_job_that_is_late_is_not_waited_for(project):
    project.set("finetuning.algorithm", {"_type": "test_sluggish"})
    started = time.monotonic()
    found = report(project, *QUICK, "--probe_seconds", "5")
    rest_s = time.monotonic() - started - next(p["seconds"] for p in found["time"]["parts"] if p["name"] == "start")
    Sluggish.may_end.set()
    assert rest_s < 5 + 3
    assert "the probe of training was stopped when time was up; --probe_seconds allows more" in found["notes"]
    parts = {part["name"]: part["seconds"] for part in found["time"]["parts"]}
    assert (parts["train"], parts["baseline"] > 0) == (None, True)
    assert found["predictions"][0]["name"] == "base", "what was measured before is reported"


@pytest.mark.slow
def test_a_run_shows_how_far_off_its_preflight_was(project):
    project.set("finetuning.num_epochs", 1)
    found = report(project, *QUICK)
    predicted = {each["name"]: each for each in found["predictions"]}
    assert list(predicted) == ["base", "signal", "seconds"]
    assert all(each["low"] <= each["value"] <= each["high"] for each in predicted.values())
    project.finetune(code=0)
    for each in project.summary["predictions"]:
        assert each == {**predicted[each["name"]], "measured": each["measured"]}
        assert each["name"] == "seconds" or each["low"] <= each["measured"] <= each["high"]
    shown = call("runs", "show", str(project.run), code=0).output
    assert f"base {predicted['base']['value']:.3f} [" in shown
    measured = project.summary["baseline"]["mean"]
    assert f", measured {measured:.3f} ({measured - predicted['base']['value']:+.3f})" in shown
    facts = JournalReader(project.run).facts()
    assert set(facts["each_s"]) == {"held out", "collect", "train"}, "so its display knows the time left at once"
    assert facts["size"]["num_epochs"] == 1
    project.finetune("--run_name", "other", "-o", "finetuning.seed", "2", code=0)
    other = json.loads((project.folder / "runs/other/summary.json").read_text())
    assert other["predictions"] == [], "of another configuration"


@pytest.mark.slow
def test_a_noisy_reward_is_found(project):
    project.write(
        "task.py",
        """
        import collections, zlib
        from reinforge import PolicyFailure

        async def agent(item, llm, context):
            reply = await llm.chat.completions.create(messages=[{"role": "user", "content": "x"}], max_tokens=4)
            return reply.choices[0].message.content

        calls = collections.Counter()

        def vowels(output, expected):
            calls[output] += 1
            return (zlib.crc32(output.encode()) + calls[output]) % 2  # another number whenever it is asked again
        """,
    )
    found = report(project, *QUICK)
    assert found["noise"]["num_changed"] == 16
    assert found["noise"]["share"] > 0.5
    assert found["recommendation"]["advice"] == "fix the reward"


def test_a_broken_file_is_refused_like_a_run(project):
    project.set("finetuning.num_epoch", 3)
    result = invoke(project)
    assert result.exit_code == 2
    assert "num_epochs" in result.output
    project.settings["finetuning"].pop("num_epoch")
    (project.folder / "run.yml").unlink()
    result = invoke(project, "--price", "agnt", "1", "2")
    assert result.exit_code == 2
    assert 'llms has no entry "agnt", did you mean "agent"?' in result.output


def test_an_agent_that_always_fails_says_why(project):
    project.write(
        "task.py",
        """
        async def agent(item, llm, context):
            raise OSError("no such tool")

        def vowels(output, expected):
            return 1.0
        """,
    )
    result = invoke(project, *QUICK)
    assert result.exit_code == 3
    assert "no such tool" in result.output


@pytest.mark.slow
async def test_a_judge_is_paid_for_by_its_tokens(project):
    """Each score asks the judge once for 7 and 3 tokens; a run of E episodes costs E times that."""
    verdict = json.dumps({"reason": "fine", "score": 0.5})
    project.set("finetuning.num_epochs", 1)
    async with OpenAIServer(says(verdict)) as server:
        project.set("llms.judge", {"_type": "openai", "model_name": "m", "base_url": server.url, "api_key": "k-123456"})
        project.set("workflow.llm", "agent")
        project.set("eval.evaluators.quality", {"_type": "llm_judge", "llm": "judge", "rubric": "be good"})
        project.write_files()
        loaded = load_config(project.folder / "run.yml")
        options = PreflightOptions(num_examples=4, num_samples=2, prices={"judge": TokenPrice(1.0, 10.0)})
        found = await preflight(loaded, options)
    (judge,) = found.costs
    episodes = 1 * 4 * 4 + 2 * 10 + 2 * 16
    assert (judge.entry, judge.calls) == ("judge", episodes)
    assert judge.cost == pytest.approx(episodes * (7 * 1.0 + 3 * 10.0) / 1e6)
    assert found.total_cost == judge.cost
    assert any("judge" in line and "prompt" in line for line in found.format_lines())


@pytest.mark.slow
def test_of_a_pipeline_only_the_first_stage_is_predicted(project):
    stages = {"first": {"num_epochs": 2}, "second": {"num_epochs": 3}}
    project.set("finetuning.pipeline", stages)
    project.settings["finetuning"].pop("num_epochs")
    found = report(project, *QUICK)
    parts = {part["name"]: part for part in found["time"]["parts"]}
    assert parts["stages"]["seconds"] is None
    assert parts["stages"]["reason"].endswith("not second")
    assert parts["train"]["reason"].startswith("2 epochs")
    assert found["time"]["total_s"] is None


@pytest.mark.slow
def test_what_would_end_the_run_is_said(project):
    """Greedy decoding gives identical siblings, which a run refuses in its first epoch."""
    project.set("finetuning.sampling", {"temperature": 0.0})
    found = report(project, *QUICK)
    (note,) = [note for note in found["notes"] if note.startswith("the probe of training failed")]
    assert "temperature" in note
    assert found["time"]["total_s"] is None
