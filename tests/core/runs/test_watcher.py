"""A run that is followed through its journal shows what its own process showed."""

import io
from dataclasses import asdict

import pytest

from reinforge.files import replace_file
from reinforge.runs.forecast import TRAIN, RunSize
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.journal.schema import update_rows
from reinforge.runs.progress import PlainProgress, SilentProgress, StatusLine
from reinforge.runs.replay import JournalClock, RunReplay
from reinforge.runs.rows import EpochMetrics, ValidationRow
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from tests.doubles import examples
from tests.scripted_run import ScriptedRun


class Calls(SilentProgress):
    def __init__(self, clock=lambda: 0.0):
        self.clock, self.calls, self.num_episodes = clock, [], 0

    def start(self, run_id, folder, num_epochs, settings):
        self.calls.append(("start", run_id, num_epochs))

    def plan(self, size, predicted):
        self.calls.append(("plan", size, predicted))

    def stage(self, epoch, stage, total):
        self.calls.append(("stage", epoch, stage, self.clock()))

    def episode(self, outcome, reward, num_tokens):
        self.num_episodes += 1

    def epoch_done(self, metrics):
        self.calls.append(("epoch", metrics.epoch, metrics.avg_reward))

    def validation(self, row):
        self.calls.append(("validation", row.epoch, row.avg_reward))

    def note(self, text):
        self.calls.append(("note", text))


def set_times(db, table, column, seconds):
    for (number,) in db.execute(f"SELECT id FROM {table}").fetchall():
        update_rows(db, table, {column: float(seconds * number)}, "id = :number", number=number)


class Live:
    """A run whose process is this test."""

    def __init__(self, folder):
        self.journal = RunJournal(folder / "r")
        self.journal.start_session()
        self.clock = JournalClock()
        self.shown = Calls(self.clock)
        self.watcher = RunReplay(folder / "r", self.shown, self.clock)
        self.write_config()

    def write_config(self):
        replace_file(self.journal.folder / "config.yml", "finetuning:\n  num_epochs: 2\n")

    def set_times(self, table, column, seconds):
        """Sets the time of each row to its number times some seconds."""
        self.journal._writer.put(lambda db: set_times(db, table, column, seconds))
        self.journal.flush()

    def update(self):
        self.journal.flush()
        known = len(self.shown.calls)
        goes_on = self.watcher.update()
        return [call[:3] for call in self.shown.calls[known:]], goes_on

    def collect(self, epoch, count, first=0, round=0):
        for number in range(first, first + count):
            key = EpisodeKey("collect", epoch, "0", number, round)
            self.journal.record_episode(EpisodeRecord(key, examples(1)[0], reward=0.5))

    def end(self):
        self.journal.end_session("completed")
        self.journal.close()


@pytest.fixture
def live(tmp_path):
    run = Live(tmp_path)
    yield run
    run.journal.close()


async def test_a_run_that_has_ended_is_shown_as_its_process_showed_it(tmp_path):
    shown = Calls()
    await ScriptedRun(tmp_path).run(progress=shown)
    clock = JournalClock()
    again = Calls(clock)
    assert not RunReplay(tmp_path / "r", again, clock).update()
    lines = [[call for call in each.calls if call[0] != "stage" and "plot" not in str(call)] for each in (shown, again)]
    assert lines[0] == lines[1]
    assert ("epoch", 1) in [call[:2] for call in again.calls]
    known = [call[1:3] for call in again.calls if call[0] == "stage"]
    assert known == [call[1:3] for call in shown.calls if call[0] == "stage" and call[2] in {name for _, name in known}]
    assert again.num_episodes == 0, "no stage goes on"


def test_an_epoch_lasts_as_long_as_it_did(live):
    for number, stage in enumerate(("BASELINE", "COLLECT", "SELECT", "SUBMIT", "AWAIT", "ADOPT")):
        live.journal.record_stage(-1 if number == 0 else 0, stage, {"avg_reward": 0.25} if number == 0 else {})
    live.journal.record_metrics(EpochMetrics(0, 0.5))
    live.set_times("sessions", "started_s", 40)
    live.set_times("stages", "at_s", 100)
    stream = io.StringIO()
    RunReplay(live.journal.folder, PlainProgress(stream, clock=live.clock), live.clock).update()
    assert stream.getvalue().splitlines()[1:] == [
        "baseline: reward 0.250 (interval unknown)",
        "epoch 0 (1/2): reward 0.500 (interval unknown), 8 min 20 s",  # from 100 s, the end of the baseline, to 600 s
    ]


def test_a_run_without_a_configuration_yet_is_waited_for(live):
    (live.journal.folder / "config.yml").unlink()
    assert live.update() == ([], True)
    live.write_config()
    assert live.update() == ([("start", "r", 2)], True)


def test_a_live_run_is_followed_stage_by_stage(live):
    live.update()
    live.collect(0, 3)
    assert live.update() == ([("stage", 0, "COLLECT")], True)
    live.collect(0, 2, first=3)
    assert live.update() == ([], True)
    assert live.shown.num_episodes == 5
    live.journal.record_stage(0, "COLLECT", {"trajectories": 5})
    assert live.update() == ([("stage", 0, "SELECT")], True)
    for stage in ("SELECT", "SUBMIT", "AWAIT", "ADOPT"):
        live.journal.record_stage(0, stage, {})
    live.journal.record_metrics(EpochMetrics(0, 0.5))
    assert live.update()[0] == [("stage", 0, "SUBMIT"), ("stage", 0, "AWAIT"), ("stage", 0, "ADOPT"), ("epoch", 0, 0.5)]
    live.collect(1, 1)
    assert live.update()[0] == [("stage", 1, "COLLECT")]
    live.journal.record_validation(ValidationRow(0, 0.7))
    live.journal.record_stage(0, "VALIDATE", {"avg_reward": 0.7})
    assert ("validation", 0, 0.7) in live.update()[0]
    live.end()
    assert live.update() == ([], False)


def test_a_refill_is_counted_and_episodes_of_an_ended_stage_are_not(live):
    live.update()
    live.collect(0, 4)
    live.journal.record_stage(0, "COLLECT", {})
    live.update()
    assert live.shown.num_episodes == 0
    live.collect(0, 2, round=1)
    assert live.update()[0] == [("stage", 0, "COLLECT")]
    assert live.shown.num_episodes == 2


def test_an_epoch_that_runs_again_after_a_stop_is_shown_again(live):
    live.journal.record_metrics(EpochMetrics(0, 0.5))
    assert ("epoch", 0, 0.5) in live.update()[0]
    live.journal.rewind(0, forget_jobs=True)
    assert live.update()[0] == []
    live.journal.record_metrics(EpochMetrics(0, 0.6))
    assert live.update()[0] == [("epoch", 0, 0.6)]


def test_the_line_of_a_page(tmp_path):
    now = [0.0]
    line = StatusLine(lambda: now[0])
    line.start("r", tmp_path, 4, ())
    line.plan(RunSize(4, 5, 4, 1, 0, 0, 0, 1), {TRAIN: 5.0})
    line.stage(0, "COLLECT", None)
    now[0] = 10.0
    line.stage(0, "ADOPT", None)
    line.epoch_done(EpochMetrics(0))
    line.stage(1, "COLLECT", None)
    line.episode("ok", 0.5, 0)
    now[0] = 11.0
    line.episode("timeout", None, 0)
    left = 58 * 11 / 22 + 3 * 5  # 22 episodes in 11 s
    assert str(line) == f"epoch 1 (2/4) collect: 2 episodes (2.0/s), ~{left:.0f} s left, reward 0.500, 1 missing"


def test_how_much_the_run_does_is_passed_on(live):
    size = RunSize(2, 5, 4, 1, 10, 1, 20, 1)
    live.journal.set_facts(size=asdict(size), each_s={TRAIN: 5.0})
    assert ("plan", size, {TRAIN: 5.0}) in live.update()[0]
    assert all(call[0] != "plan" for call in live.update()[0])
