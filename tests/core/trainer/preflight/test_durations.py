"""The time of a run from the time of a probe, with numbers that can be added up by hand."""

from types import SimpleNamespace

import pytest

from reinforge.config.schema import CurriculumLearningConfig
from reinforge.rollout.models.openai_client import ModelUsage
from reinforge.runs.progress import SilentProgress
from reinforge.runs.rows import EpochMetrics
from reinforge.trainer.preflight.costs import (
    TokenPrice,
    copy_usage,
    measure_usage,
    predict_costs,
    predict_training_cost,
)
from reinforge.trainer.preflight.durations import (
    JobTime,
    PredictedTime,
    ProbedEpoch,
    RunSize,
    StageClock,
    TimePart,
    Timings,
    compute_growth,
    fit_job_time,
    list_probed_epochs,
    predict_time,
    suggest_size,
)
from reinforge.types.episode import EpisodeKey, EpisodeRecord, ModelCall
from reinforge.types.request import ModelReply, ModelRequest
from tests.doubles import PolicyModel, ScriptedPolicy, examples

SIZE = RunSize(
    num_epochs=10, examples_per_epoch=16, group_size=8, groups_per_example=1, num_select=50, num_validations=3,
    num_confirm=100, num_samples=2,
)  # fmt: skip
MEASURED = Timings(start_s=5.0, episode_s=0.1, select_episode_s=0.2, save_s=1.0, load_s=0.5, files_s=2.0)


def seconds(time):
    return {part.name: part.seconds for part in time.parts}


def test_episodes_are_counted():
    assert SIZE.num_collected == 10 * 16 * 8
    assert SIZE.num_validated == 4 * 50
    assert SIZE.num_confirmed == 2 * 100 * 2
    assert SIZE.num_episodes == 1280 + 200 + 400


def test_whole_epochs_count_as_they_were_measured():
    """First epoch 3 s and the others 1.5 s: 3 + 9 * 1.5 = 16.5 for collecting; training 4 + 9 * 2 = 22."""
    epochs = [ProbedEpoch(3, 4, 1, 16, 12, 128), ProbedEpoch(1, 2, 1, 16, 12, 128), ProbedEpoch(2, 2, 1, 16, 12, 128)]
    timings = Timings(5.0, 0.1, 0.2, save_s=1.0, load_s=0.5, files_s=2.0, epochs=epochs, is_whole=True)
    time = predict_time(SIZE, timings, signal_share=0.9)
    assert seconds(time) == {
        "start": 5.0, "baseline": pytest.approx(10), "collect": 16.5, "train": 22.0, "publish": 10.0,
        "validate": pytest.approx(30), "verdict": pytest.approx(400 * 0.2 + 2 * 0.5), "files": 2.0,
    }  # fmt: skip
    assert time.is_complete
    assert time.total_s == pytest.approx(5 + 10 + 16.5 + 22 + 10 + 30 + 81 + 2)
    assert time.as_dict()["total_s"] == time.total_s
    assert seconds(predict_time(SIZE, timings, signal_share=0.9, growth=2.0))["train"] == 44.0


def test_a_small_epoch_is_scaled_to_the_runs_size():
    """4 of 5 groups trained in 9 s with a checkpoint of 1 s: 2 s a group; 16 * 0.5 groups: 10 * (8 * 2 + 1) = 170."""
    timings = Timings(5.0, 0.1, 0.2, save_s=1.0, load_s=0.5, files_s=2.0, epochs=[ProbedEpoch(9, 9, 1.5, 5, 4, 40)])
    found = seconds(predict_time(SIZE, timings, signal_share=0.5))
    assert found["collect"] == pytest.approx(10 * 16 * 8 * 0.1)
    assert found["train"] == pytest.approx(170)
    assert found["publish"] == pytest.approx(15)
    all_kept = seconds(predict_time(SIZE, timings, signal_share=None))
    assert all_kept["train"] == pytest.approx(10 * (16 * 0.8 * 2 + 1)), "the share of the probe itself"


def test_two_jobs_tell_what_every_job_takes_and_what_a_group_takes():
    """2 groups in 3 s and 10 in 7 s: 0.5 s each and 2 s; with a checkpoint, 10 * (2 + 16 * 0.5 * 0.5 + 1) = 70."""
    assert fit_job_time((2, 3.0), (10, 7.0)) == JobTime(2.0, 0.5)
    assert fit_job_time((2, 3.0), (2, 3.0)) == JobTime(0.0, 1.5)
    assert fit_job_time((2, 9.0), (10, 7.0)) == JobTime(0.0, 0.7), "the small one was disturbed"
    assert fit_job_time((2, 1.0), (10, 7.0)) == JobTime(0.0, 0.7), "less than nothing is not a fixed time"
    epochs = [ProbedEpoch(9, 9, 1.5, 5, 4, 40)]
    timings = Timings(5.0, 0.1, 0.2, save_s=1.0, epochs=epochs, job=JobTime(2.0, 0.5))
    assert seconds(predict_time(SIZE, timings, signal_share=0.5))["train"] == pytest.approx(70)


def test_rows_that_are_only_tokenized_take_the_time_of_their_rows():
    size = RunSize(2, 100, 0, 1, 50, 1, 100, 1)
    timings = Timings(5.0, 0.1, 0.2, save_s=1.0, epochs=[ProbedEpoch(2.0, 11.0, 1.0, 20, 20, 20)])
    found = seconds(predict_time(size, timings, signal_share=None))
    assert found["collect"] == pytest.approx(2 * 2.0 * 100 / 20)
    collect = next(part for part in predict_time(size, timings, signal_share=None).parts if part.name == "collect")
    assert collect.reason == "2 epochs x 100 groups of rows"
    assert found["train"] == pytest.approx(2 * (100 * 0.5 + 1))


def test_training_that_was_not_measured_is_unknown():
    for timings in (MEASURED, Timings(5.0, 0.1, 0.2, epochs=[ProbedEpoch(9, 0, 0, 5, 0, 40)])):
        time = predict_time(SIZE, timings, signal_share=0.5)
        assert seconds(time)["train"] is None
        assert not time.is_complete
        assert time.as_dict()["total_s"] is None
        assert time.as_dict()["known_s"] == time.total_s > 0


class Display(SilentProgress):
    def __init__(self):
        self.shown = []

    def stage(self, epoch, stage, total):
        self.shown.append((stage, total))

    def note(self, text):
        self.shown.append(text)


def test_the_clock_adds_up_stages_and_shows_them():
    clock, shown = SimpleNamespace(now=0.0), Display()
    stages = StageClock(shown, lambda: clock.now)
    for at, (epoch, stage) in enumerate([(None, "LOAD"), (0, "COLLECT"), (0, "SELECT"), (0, "COLLECT"), (0, "AWAIT"),
                                         (0, "ADOPT"), (1, "COLLECT")]):  # fmt: skip
        clock.now = float(at * at)
        stages.stage(epoch, stage, 4)
    stages.note("hello")
    stages.epoch_done(EpochMetrics(0, num_groups=4, num_groups_kept=3, num_trajectories=16))
    clock.now = 50.0
    stages.stop()
    clock.now = 60.0
    stages.stop()
    assert stages.measure("LOAD") == 1.0
    assert stages.seconds[0, "COLLECT"] == (4 - 1) + (16 - 9)
    assert stages.seconds[1, "COLLECT"] == 50 - 36, "a stopped clock does not run"
    assert shown.shown[:2] == [("LOAD", 4), ("COLLECT", 4)]
    assert shown.shown[-1] == "hello"
    assert list_probed_epochs(stages) == [ProbedEpoch(10 + 5, 9, 11, 4, 3, 16)]


def test_a_curriculum_trains_on_more_later():
    curriculum = CurriculumLearningConfig(
        enabled=True, initial_percentile=0.3, increment_percentile=0.2, expansion_interval=5
    )
    assert compute_growth(curriculum, 1, 10) == pytest.approx(0.4 / 0.3)
    assert compute_growth(CurriculumLearningConfig(), 1, 10) == 1.0


@pytest.mark.parametrize(
    ("epoch_s", "minutes", "text"),
    [
        (54.0, 10, "10 min: 10 epochs of 64 rows x 8 generations"),
        (108.0, 10, "10 min: 10 epochs of 32 rows x 8 generations"),
        (5400.0, 30, "30 min: 2 epochs of 8 rows x 8 generations"),
        (54.0, 1, "1 min: too short, since loading, baseline and verdict take 1"),
    ],
)
def test_sizes_fit_the_minutes_with_fewer_rows_if_epochs_would_be_few(epoch_s, minutes, text):
    """60 s outside the epochs."""
    outside = {"start": 20.0, "baseline": 10.0, "validate": 0.0, "verdict": 20.0, "files": 10.0}
    epochs = {"collect": epoch_s * 5, "train": epoch_s * 4, "publish": epoch_s}
    time = PredictedTime([TimePart(name, seconds, "") for name, seconds in {**outside, **epochs}.items()])
    size = RunSize(10, 64, 8, 1, 50, 3, 100, 2)
    assert str(suggest_size(size, time, minutes, 5)) == text


def test_jobs_alone_leave_the_time_of_publishing_unknown():
    found = predict_time(SIZE, Timings(5.0, 0.1, 0.2, job=JobTime(2.0, 0.5)), signal_share=0.5)
    assert seconds(found)["train"] == pytest.approx(10 * (2 + 16 * 0.5 * 0.5))
    assert (seconds(found)["publish"], found.is_complete) == (None, False)


class Judge:
    is_policy, model_name = False, "judge"

    def __init__(self):
        self.usage = ModelUsage(2, 100, 10)


def record(llm, prompt, completion):
    reply = ModelReply({"role": "assistant", "content": "x"}, "stop", None, prompt, completion)
    call = ModelCall("c", llm, "m", ModelRequest([]), reply, (), 0.0, 1.0)
    return EpisodeRecord(EpisodeKey("collect", 0, "0"), examples(1)[0], calls=[call])


def test_calls_of_judges_count_and_those_before_do_not():
    llms = {"agent": PolicyModel(ScriptedPolicy()), "judge": Judge()}
    before = copy_usage(llms)
    llms["judge"].usage.num_calls += 3
    llms["judge"].usage.num_prompt_tokens += 300
    llms["judge"].usage.num_completion_tokens += 30
    used = measure_usage(llms, before, [record("agent", 7, 3), record("agent", 5, 1)])
    assert used == {"agent": ModelUsage(2, 12, 4), "judge": ModelUsage(3, 300, 30)}


def test_a_run_costs_what_its_share_of_the_sample_costs():
    usage = {"judge": ModelUsage(80, 2000, 400), "other": ModelUsage(8, 100, 10)}
    judge, other = predict_costs(usage, 80, 8000, {"judge": TokenPrice(0.5, 2.0)})
    assert (judge.calls, judge.prompt_tokens, judge.completion_tokens) == (8000, 200_000, 40_000)
    assert judge.cost == pytest.approx(0.2 * 0.5 + 0.04 * 2.0)
    assert other.cost is None, "no price is guessed"
    assert predict_training_cost(100, 20_000, 3.0).cost == pytest.approx(2 * 3.0)
    assert predict_training_cost(100, 20_000, None).cost is None
