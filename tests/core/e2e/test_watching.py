"""Guards and trackers of whole runs: what the user is told, what stops a run, and what reaches a dashboard."""

import json

import pytest

from reinforge.errors import GuardHalted
from reinforge.runs.history import build_timeline
from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.removal import remove_run
from reinforge.runs.rows import list_guard_events
from reinforge.runs.run_folder import read_record
from tests.scripted_run import ScriptedRun
from tests.trackers.trackers import read_tensorboard


def constant_share(request):
    """Returns equal answers but for one group in twenty, so nearly no group has a training signal."""
    question = str(request.messages[-1]["content"])
    return f"answer {request.sampling.seed % 7}" if question == "q3" else "answer 5"


def watched(tmp_path, **guards):
    run = ScriptedRun(tmp_path, script=constant_share)
    run.settings["finetuning"] |= {
        "num_epochs": 7,
        "guards": guards,
        "run_configuration": {"validation_interval": 1},
        "splits": {"train": 0.8, "select": 0.1, "confirm": 0.1},
        "limits": {"max_refills": 0, "max_empty_updates": 10},
    }
    return run


def events(tmp_path):
    found = list_guard_events(JournalReader(tmp_path / "r").stages())
    return [(event.guard, event.epoch, event.action) for event in found]


async def test_a_guard_stops_a_run_that_can_be_resumed_past_it(tmp_path):
    run = watched(tmp_path, no_signal={"limit": 0.5, "warn_after": 2, "halt_after": 3})
    with pytest.raises(GuardHalted, match="guard no_signal stopped the run after 3 epochs in a row") as halted:
        await run.run()
    assert halted.value.exit_code == 5
    assert any("reinforge" in note or "resume" in note for note in halted.value.__notes__)
    told = [("held_out_metric", -1, "warn"), ("no_signal", 1, "warn"), ("no_signal", 2, "halt")]
    assert events(tmp_path) == told
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert (summary["status"], summary["can_resume"]) == ("stopped", True)
    assert [(each["guard"], each["action"]) for each in summary["guards"]] == [(g, a) for g, _, a in told]
    assert "epoch 2, guard no_signal: " in (tmp_path / "r" / "report.md").read_text()
    texts = [text for _, text in build_timeline(read_record(tmp_path / "r"), is_running=False)]
    assert any("guard no_signal warned" in text for text in texts)
    with pytest.raises(GuardHalted):
        await run.run(resume=tmp_path / "r")
    assert events(tmp_path) == [*told, ("no_signal", 5, "halt")]
    run.settings["finetuning"]["guards"] = {"no_signal": {"limit": 0.5, "warn_after": 2}}  # for one call
    summary = await run.run(resume=tmp_path / "r")
    assert (summary.status, len(summary.guards)) == ("completed", 4)
    assert "halt_after: 3" in (tmp_path / "r" / "config.yml").read_text()  # the run's own


async def test_the_timeline_says_how_many_epochs_were_added(tmp_path):
    run = ScriptedRun(tmp_path)
    run.settings["finetuning"]["num_epochs"] = 1
    await run.run()
    run.settings["finetuning"]["num_epochs"] = 3
    await run.run(resume=tmp_path / "r")
    texts = [text for _, text in build_timeline(read_record(tmp_path / "r"), is_running=False)]
    [resumed] = [number for number, text in enumerate(texts) if "resumed" in text]
    assert (texts[resumed - 1].split(":")[0], texts[resumed + 1]) == ("completed", "config: 2 more epochs")


async def test_the_time_of_a_resumed_run_has_that_of_its_earlier_sessions(tmp_path):
    """Its last snapshot does not know of the stages that followed."""
    run = ScriptedRun(tmp_path)
    run.settings["finetuning"]["num_epochs"] = 1
    spent = (await run.run()).wall_time_s
    path = tmp_path / "r" / "summary.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"wall_time_s": {**spent, "COLLECT": 100.0, "END": 10.0}})
    )
    run.settings["finetuning"]["num_epochs"] = 2
    total = (await run.run(resume=tmp_path / "r")).wall_time_s
    assert 100 < total["COLLECT"] < 110
    assert total["END"] >= 10
    assert total["BASELINE"] >= spent["BASELINE"]


@pytest.mark.slow
async def test_without_the_check_of_the_loop_no_guard_speaks(tmp_path, monkeypatch):
    monkeypatch.setattr("reinforge.trainer.guards.GuardWatch.check", lambda *given, **named: None)
    run = watched(tmp_path, no_signal={"limit": 0.5, "warn_after": 2, "halt_after": 3})
    assert (await run.run()).status == "completed"
    assert events(tmp_path) == [("held_out_metric", -1, "warn")]


async def test_the_figures_of_the_guards_come_from_the_training_episodes(tmp_path):
    run = ScriptedRun(tmp_path)
    await run.run()
    rows = [json.loads(line) for line in (tmp_path / "r" / "training_metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["completion_tokens"] == len("answer 3")  # a token for each character
        assert row["clipped_share"] == 0
        assert row["scores"] == {"reward": pytest.approx(row["avg_reward"])}
        assert 0 < row["reward_std"] < 3


@pytest.mark.slow
async def test_a_run_sends_its_metrics_to_its_trackers(tmp_path):
    pytest.importorskip("tensorboardX")
    run = ScriptedRun(tmp_path)
    run.settings["finetuning"]["trackers"] = {"board": {"_type": "tensorboard"}}
    summary = await run.run()
    points = read_tensorboard(tmp_path / "r" / "tensorboard")
    assert len({(name, step) for name, step, _ in points}) == len(points)
    assert [step for name, step, _ in points if name == "reward/mean"] == [1, 2]
    assert [step for name, step, _ in points if name == "validation/reward"] == [0, 2]
    assert {"time/collect", "time/train", "reward/std", "completions/mean_length", "reward/reward"} <= {
        name for name, _, _ in points
    }
    [mean] = [value for name, step, value in points if (name, step) == ("reward/mean", 2)]
    row = json.loads((tmp_path / "r" / "training_metrics.jsonl").read_text().splitlines()[1])
    assert mean == pytest.approx(row["avg_reward"])
    assert summary.status == "completed"
    remove_run(tmp_path / "r")  # the event files are the run's own
    assert not (tmp_path / "r").exists()
