import io
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from reinforge.runs.forecast import RunSize
from reinforge.runs.live_line import LiveLine
from reinforge.runs.progress import PlainProgress, SilentProgress, default_progress, open_progress
from reinforge.runs.rows import EpochMetrics, ValidationRow

SIZE = RunSize(
    num_epochs=2, examples_per_epoch=100, group_size=4, groups_per_example=1, num_select=0, num_validations=0,
    num_confirm=0, num_samples=1,
)  # fmt: skip
SETTINGS = [("policy.model", "bundled:tic_tac_toe"), ("seed", "0")]
ROW = EpochMetrics(
    epoch=0,
    avg_reward=0.5123,
    ci_low=0.48,
    ci_high=0.544,
    filtered_avg_reward=0.55,
    num_groups=64,
    num_groups_kept=30,
    curriculum_percentile=0.3,
    num_missing=2,
)
VALIDATION = ValidationRow(-1, avg_reward=0.4, ci_low=0.3, ci_high=0.5, num_examples=98, num_unscored=2)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock():
    return Clock()


def plain(clock):
    stream = io.StringIO()
    return PlainProgress(stream, clock=clock), stream


def rich(clock, width=120):
    stream = Terminal()
    console = Console(file=stream, force_terminal=True, width=width, highlight=False, color_system=None)
    return LiveLine(console, clock=clock), stream


def show_one_epoch(progress, clock):
    progress.start("run-7", Path("runs/run-7"), 3, SETTINGS)
    progress.stage(None, "BASELINE", 2)
    progress.episode("ok", 1.0, 10)
    progress.validation(VALIDATION)
    progress.stage(0, "COLLECT", 4)
    for outcome, reward in (("ok", 1.0), ("ok", 0.0), ("timeout", None), ("policy_error", 0.0)):
        progress.episode(outcome, reward, 20)
    clock.now += 12
    progress.epoch_done(ROW)
    progress.note("the agent asked for temperature 0; sampling.temperature 1 is used")


@pytest.fixture(params=[plain, rich])
def either(request, clock):
    return request.param(clock)


def test_permanent_lines(either, clock):
    progress, stream = either
    show_one_epoch(progress, clock)
    progress.close()
    progress.close()
    text = stream.getvalue()
    assert "run-7 in runs/run-7\n" in text
    assert "  policy.model  bundled:tic_tac_toe\n  seed          0\n" in text
    assert "baseline: reward 0.400 [0.300, 0.500] on 98 examples (2 unscored)\n" in text
    epoch = "epoch 0 (1/3): reward 0.512 [0.480, 0.544], 30 of 64 groups kept (reward 0.550)"
    assert f"{epoch}, curriculum 30%, 2 missing, 12 s\n" in text
    assert "the agent asked for temperature 0" in text


def test_unknown_rewards_are_called_unknown(either):
    progress, stream = either
    progress.start("run", Path("run"), 2, [])
    progress.epoch_done(EpochMetrics(0, num_groups=8, num_groups_kept=0))
    progress.validation(ValidationRow(0, error="the backend\ndoes not answer"))
    progress.close()
    text = stream.getvalue()
    assert "reward unknown, 0 of 8 groups kept\n" in text, "an epoch that began before a resume has no duration"
    assert "validation after epoch 0: reward unknown: the backend does not answer" in text


def test_rows_have_no_groups(either):
    """A dataset's rows have no reward; that some were left out is said, in the words of rows."""
    progress, stream = either
    progress.start("run", Path("run"), 2, [])
    progress.epoch_done(EpochMetrics(0, num_groups=83, num_groups_kept=83, job={"loss": 1.25}))
    progress.epoch_done(EpochMetrics(1, num_groups=83, num_groups_kept=57, job={"loss": 1.0}))
    progress.close()
    assert "epoch 0 (1/2): loss 1.250\n" in stream.getvalue()
    assert "epoch 1 (2/2): loss 1.000, 57 of 83 rows trained\n" in stream.getvalue()


def test_sampled_tokens_that_cannot_be_trained_are_counted(either):
    progress, stream = either
    progress.start("run", Path("run"), 2, [])
    progress.epoch_done(replace(ROW, job={"num_tokens_left_out": 1262}))
    progress.epoch_done(replace(ROW, epoch=1, job={"num_tokens_left_out": 0}))
    progress.close()
    assert " ".join(stream.getvalue().split()).count("1,262 sampled tokens not trained (penalties") == 1
    assert stream.getvalue().count("not trained") == 1


def test_missing_and_unscored_come_with_the_commonest_reason(either):
    progress, stream = either
    progress.start("run", Path("run"), 3, [])
    progress.epoch_done(replace(ROW, missing_reason="timeout: not finished after 60 s (2 of 3)"))
    progress.validation(replace(VALIDATION, unscored_reason="tool_error: AttributeError: 'dict' object"))
    progress.close()
    assert ", 2 missing (timeout: not finished after 60 s (2 of 3))\n" in stream.getvalue()
    assert "on 98 examples (2 unscored: tool_error: AttributeError: 'dict' object)\n" in stream.getvalue()


def test_a_validation_shows_every_evaluator_if_there_are_several(either):
    progress, stream = either
    progress.start("run", Path("run"), 3, [])
    progress.validation(replace(VALIDATION, metrics={"judge": 0.0, "format": 1.0, "score": 0.2, "slow": None}))
    progress.validation(replace(VALIDATION, metrics={"wins": 0.4}))
    progress.close()
    lines = stream.getvalue().splitlines()
    assert any(line.endswith("; judge 0.000, format 1.000, score 0.200, slow unknown") for line in lines)
    assert not any("wins" in line for line in lines), "the only evaluator is the reward"


def test_texts_are_not_read_as_markup_or_control_codes(either):
    progress, stream = either
    progress.start("[red]run[/red]", Path("[bold]"), 1, [("[link]", "[/nothing]\x1b[2J")])
    progress.note("[/b] \x1b[31mnot red")
    progress.close()
    text = stream.getvalue()
    assert "[red]run[/red] in [bold]" in text
    assert "[link]  [/nothing]\\x1b[2J" in text
    assert "[/b] \\x1b[31mnot red" in text
    assert "\x1b[31m" not in text
    assert "\x1b[2J" not in text


def test_plain_writes_a_progress_line_after_ten_seconds_and_then_one_a_minute(clock):
    progress, stream = plain(clock)
    progress.start("run", Path("run"), 2, [])
    progress.plan(SIZE, {})
    progress.stage(0, "COLLECT", 400)
    before = len(stream.getvalue())
    for _ in range(400):
        clock.now += 0.25
        progress.episode("ok", 0.25, 3)
    lines = stream.getvalue()[before:].splitlines()
    assert lines == [
        "  [--------------------]   2 % epoch 0 (1/2) collect: 40/400 episodes (4.0/s), ~9 min 50 s left, "
        "reward 0.250, 12 tokens/s",
        "  [##------------------]  12 % epoch 0 (1/2) collect: 280/400 episodes (4.0/s), ~8 min 50 s left, "
        "reward 0.250, 12 tokens/s",
    ], "2 x 400 episodes of 250 ms, and training them is guessed to take twice that: 600 s"


def test_each_stage_outside_the_epochs_that_lasts_has_a_line(clock):
    """Such as the parts of a preflight: the second line comes 10 s after its stage began, not after a minute."""
    stream = io.StringIO()
    progress = PlainProgress(stream, clock=clock, ticks=True)
    for stage, seconds in (("LOAD", 12), ("SAMPLE", 3), ("BASELINE", 12), ("SCORE AGAIN", 2)):
        progress.stage(None, stage, None)
        clock.now += seconds
        progress.refresh()
    progress.close()
    assert stream.getvalue() == "  load: 12 s so far\n  baseline: 12 s so far\n"


def test_plain_writes_while_nothing_happens():
    """A long job sends no event: a thread writes the line, and ends when the display is closed."""
    stream = io.StringIO()
    progress = PlainProgress(stream, every_s=0.5, ticks=True)
    progress.stage(None, "LOAD", None)
    deadline = time.monotonic() + 20
    while stream.getvalue().count("load: ") < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    progress.close()
    assert re.fullmatch(r"(  load: [\d.]+ s so far\n){2,}", stream.getvalue())
    before, _ = stream.getvalue(), time.sleep(1.2)
    assert stream.getvalue() == before


def test_a_stage_outside_a_run_has_its_own_share(clock):
    progress, _ = plain(clock)
    progress.stage(None, "MAKE MODEL", None)
    clock.now += 20
    assert progress.format_line() == "make model: 20 s so far"
    progress.advance(0.25)
    assert progress.format_line() == "[#####---------------]  25 % make model: 20 s so far, ~1 min 0 s left"
    progress.stage(None, "EVALUATE", 40)
    clock.now += 20
    progress.episode("ok", 1.0, 0)
    assert progress.format_line() == (
        "[--------------------]   2 % evaluate: 1/40 episodes (3.0/min), ~13 min 0 s left, reward 1.000"
    )


def test_a_command_has_a_display_from_its_start_to_its_result(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    stream = Terminal()
    with open_progress(stream=stream) as progress:
        assert progress._live.is_started
        assert "start" in str(progress)
    assert not progress._live.is_started
    with open_progress(silent=True, stream=stream) as progress:
        assert type(progress) is SilentProgress


def test_plain_survives_a_closed_stream(clock):
    progress, stream = plain(clock)
    progress.start("run", Path("run"), 2, [])
    stream.close()
    progress.note("after the stream was closed")
    progress.close()


def test_plain_writes_what_the_stream_can_encode(clock):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    progress = PlainProgress(stream, clock=clock)
    progress.note("läuft")
    assert stream.buffer.getvalue().decode().strip() == "l?uft"


def test_live_line_shows_stage_episodes_reward_and_speed(clock):
    progress, stream = rich(clock, width=140)
    progress.start("run", Path("run"), 20, [])
    progress.stage(3, "COLLECT", 64)
    for reward in (1.0, 0.0, 0.5):
        progress.episode("ok", reward, 100)
    progress.episode("judge_error", None, 100)
    clock.now += 2
    progress._live.refresh()
    progress.close()
    assert "epoch 3 (4/20) collect" in stream.getvalue()
    assert "4/64 episodes (2.0/s), ~30 s left, reward 0.500, 1 missing, 200 tokens/s" in stream.getvalue()


def test_live_line_fits_a_narrow_terminal(clock):
    progress, stream = rich(clock, width=60)
    progress.start("run", Path("run"), 20, [])
    progress.stage(3, "COLLECT", 64)
    progress.episode("ok", 1.0, 100)
    clock.now += 2
    progress._live.refresh()
    progress.close()
    lines = re.sub(r"\x1b\[[0-9?;]*[A-Za-z]", "", stream.getvalue()).replace("\r", "\n").split("\n")
    assert any("epoch 3 (4/20) collect 1/64 episodes" in line for line in lines)
    assert max(map(len, lines)) <= 60


@pytest.mark.parametrize(
    ("stream", "environment", "kind"),
    [
        (Terminal(), {"TERM": "xterm-256color"}, LiveLine),
        (Terminal(), {"TERM": "dumb"}, PlainProgress),
        (Terminal(), {"TERM": "xterm", "CI": "true"}, PlainProgress),
        (Terminal(), {"TERM": "xterm", "CI": "false"}, LiveLine),
        (io.StringIO(), {"TERM": "xterm"}, PlainProgress),
    ],
)
def test_default_fits_the_stream(stream, environment, kind):
    assert type(default_progress(stream, environment)) is kind


def test_no_color_keeps_the_live_line_without_color():
    progress = default_progress(Terminal(), {"TERM": "xterm", "NO_COLOR": "1"})
    assert progress._console.no_color is True


def test_silence(clock, capsys):
    show_one_epoch(SilentProgress(), clock)
    SilentProgress().close()
    assert capsys.readouterr() == ("", "")
