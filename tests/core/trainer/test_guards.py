"""The guards on synthetic runs: each warns and halts at the right epoch, and none does on a healthy run."""

from typing import Any

import pytest

from reinforge.config.finetuning_blocks import GuardsConfig, LimitsConfig
from reinforge.errors import GuardHalted
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.progress import SilentProgress
from reinforge.runs.rows import EpochMetrics, ValidationRow, list_guard_events
from reinforge.trainer import guards
from reinforge.trainer.context import RunContext
from reinforge.trainer.guards import GuardWatch

NUM_EPOCHS = 10
HALTING = GuardsConfig.model_validate(
    {
        "train_select_gap": {"limit": 0.2, "warn_after": 1, "halt_after": 2},
        "held_out_drop": {"limit": 0.1, "warn_after": 1, "halt_after": 2},
        "length_growth": {"limit": 3, "warn_after": 2, "halt_after": 4},
        "no_signal": {"limit": 0.9, "warn_after": 2, "halt_after": 3},
        "entropy": {"limit": 0.01, "warn_after": 1, "halt_after": 3},
        "mismatch": {"limit": 0.01, "warn_after": 1, "halt_after": 1},
    }
)


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


class SyntheticRun:
    """Ten epochs with a validation after each; a healthy run unless some figures are replaced.

    The training reward rises from 0.20 by 0.05 an epoch, and so does the reward on `select`.
    """

    def __init__(self, tmp_path: Any, config: GuardsConfig, **curves: Any) -> None:
        self.curves, self.config, self.progress = curves, config, Notes()
        self.journal = RunJournal(tmp_path / "run")
        self.validations = [self._validation(-1, 0.20)]

    def _at(self, name: str, epoch: int, healthy: Any) -> Any:
        return self.curves[name](epoch) if name in self.curves else healthy

    def _validation(self, epoch: int, reward: float) -> ValidationRow:
        correct = self._at("correct", epoch, reward)
        metrics = {"reward": reward, "correct": correct}
        return ValidationRow(epoch, reward, reward - 0.02, reward + 0.02, num_examples=50, metrics=metrics)

    def play(self, *, first: int = 0, context: RunContext | None = None) -> int | None:
        """Returns the epoch at which a guard halts the run; None: none does."""
        context = context or self.start()
        epochs = [self._epoch(epoch) for epoch in range(first)]
        for epoch in range(first, NUM_EPOCHS):
            epochs.append(self._epoch(epoch))
            self.validations.append(self._validation(epoch, self._at("select", epoch, 0.20 + 0.05 * (epoch + 1))))
            try:
                context.guards.check(epochs, self.validations, is_last=epoch + 1 == NUM_EPOCHS)
            except GuardHalted as halted:
                self.message = str(halted)
                return epoch
        return None

    def start(self) -> RunContext:
        context = RunContext("run", self.journal, self.progress, LimitsConfig())
        context.guards = GuardWatch(self.config, self.journal, self.progress.note, ["correct"])
        return context

    def _epoch(self, epoch: int) -> EpochMetrics:
        reward = 0.20 + 0.05 * epoch
        return EpochMetrics(
            epoch,
            avg_reward=self._at("reward", epoch, reward),
            ci_low=self._at("reward", epoch, reward) - 0.02,
            ci_high=self._at("reward", epoch, reward) + 0.02,
            num_groups=20,
            num_groups_kept=12,
            num_groups_zero_variance=self._at("zero_variance", epoch, 8),
            num_groups_low_spread=0,
            completion_tokens=self._at("tokens", epoch, 100 + 5 * epoch),
            clipped_share=0.0,
            job={
                "entropy": self._at("entropy", epoch, 1.0 - 0.05 * epoch),
                "mismatch_kl": self._at("mismatch", epoch, 1e-5),
            },
        )

    @property
    def events(self) -> list[tuple[str, int, str]]:
        return [(event.guard, event.epoch, event.action) for event in list_guard_events(self.journal.stages())]


@pytest.fixture
def play(tmp_path):
    runs = []

    def make(config: GuardsConfig = HALTING, **curves: Any) -> SyntheticRun:
        runs.append(SyntheticRun(tmp_path / str(len(runs)), config, **curves))
        return runs[-1]

    yield make
    for run in runs:
        run.journal.close()


CURVES = {
    # from epoch 4 on every reward is a quarter of what it was at the start
    "collapse": (
        {name: lambda e: 0.05 if e >= 4 else 0.20 for name in ("reward", "select")} | {"correct": lambda e: 0.5},
        4,
        5,
    ),
    # the training reward rises by 0.08 an epoch, that on select stays at 0.20: the gap is 0.24 after epoch 3
    "train_select_gap": ({"reward": lambda e: 0.20 + 0.08 * e, "select": lambda e: 0.20}, 3, 4),
    # the metric falls from 0.80 by 0.03 an epoch: 0.68 after epoch 3, which is 0.12 below
    "held_out_drop": ({"correct": lambda e: 0.80 - 0.03 * (e + 1)}, 3, 4),
    # 100 tokens, then 50 more with every epoch: 350 in epoch 5 is more than three times 100
    "length_growth": ({"tokens": lambda e: 100 + 50 * e}, 6, 8),
    # 19 of 20 groups, 95 %, from epoch 4 on
    "no_signal": ({"zero_variance": lambda e: 19 if e >= 4 else 8}, 5, 6),
    # 0.64, 0.16, 0.04, 0.01, which is not below the limit, 0.0025 in epoch 4
    "entropy": ({"entropy": lambda e: 0.64 / 4**e}, 4, 6),
    "mismatch": ({"mismatch": lambda e: 0.02 if e == 2 else 1e-5}, 2, 2),
}
"""Guard -> what replaces a healthy curve, the epoch of the warning, and that of the halt."""


@pytest.mark.parametrize("guard", CURVES)
def test_each_guard_warns_and_halts_at_the_right_epoch(play: Any, guard: str) -> None:
    curves, warns, halts = CURVES[guard]
    run = play(**curves)
    assert run.play() == halts
    assert run.events == [(guard, warns, "warn"), (guard, halts, "halt")]
    assert [text.startswith(f"warning: epoch {warns}, guard {guard}: ") for text in run.progress.texts] == [True]
    assert f"guard {guard} stopped the run" in run.message
    assert f"-o finetuning.guards.{guard}.halt_after null" in run.message


@pytest.mark.parametrize("guard", CURVES)
def test_without_its_measure_a_guard_is_silent(play: Any, guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(guards.MEASURES, guard, lambda history, limit: None)
    run = play(**CURVES[guard][0])
    assert (run.play(), run.events) == (None, [])


def test_a_guard_without_a_measure_is_an_error(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert guards.MEASURES.keys() == GuardsConfig.model_fields.keys()
    monkeypatch.delitem(guards.MEASURES, "entropy")
    with pytest.raises(KeyError, match="entropy"):
        play().play()


def test_no_guard_speaks_on_a_healthy_run(play: Any) -> None:
    run = play()
    assert (run.play(), run.events, run.progress.texts) == (None, [], [])


def test_a_limit_of_null_switches_a_guard_off_and_without_halt_after_it_only_warns(play: Any) -> None:
    curves = CURVES["no_signal"][0]
    off = play(GuardsConfig.model_validate({"no_signal": {"limit": None}}), **curves)
    assert (off.play(), off.events) == (None, [])
    warning = play(GuardsConfig(), **curves)  # limit 0.9, warn_after 3
    assert (warning.play(), warning.events) == (None, [("no_signal", 6, "warn")])


def test_one_measurement_within_the_limit_starts_the_count_again(play: Any) -> None:
    run = play(zero_variance=lambda e: 8 if e in (0, 3, 6, 9) else 20)  # never three bad epochs in a row
    assert run.play() is None
    assert run.events == [("no_signal", 2, "warn"), ("no_signal", 5, "warn"), ("no_signal", 8, "warn")]


def test_the_last_epoch_warns_but_has_nothing_to_stop(play: Any) -> None:
    run = play(mismatch=lambda e: 0.02 if e == 9 else 1e-5)
    assert run.play() is None
    assert run.events == [("mismatch", 9, "warn")]


def test_a_resumed_run_says_nothing_twice_and_goes_on_for_as_many_epochs_again(play: Any) -> None:
    run = play(zero_variance=lambda e: 20)
    assert run.play() == 2
    del run.validations[3:]
    assert run.play(first=2, context=run.start()) == 5  # repeats epoch 2, whose events are known
    assert run.events == [("no_signal", 1, "warn"), ("no_signal", 2, "halt"), ("no_signal", 5, "halt")]
    assert len(run.progress.texts) == 1


def test_a_run_that_was_killed_goes_on_counting(play: Any) -> None:
    run = play(zero_variance=lambda e: 20)
    run.validations += [run._validation(epoch, 0.2) for epoch in (0, 1)]
    assert run.play(first=2, context=run.start()) == 2  # the two bad epochs before count


def test_if_events_were_not_read_back_a_resumed_run_would_halt_at_once(play, monkeypatch):
    run = play(zero_variance=lambda e: 20)
    assert run.play() == 2
    del run.validations[3:]
    monkeypatch.setattr("reinforge.trainer.guards.list_guard_events", lambda stages: [])
    assert run.play(first=2, context=run.start()) == 2


@pytest.mark.parametrize(
    ("curves", "text"),
    [
        ({"zero_variance": lambda e: 20, "reward": lambda e: 0.97}, "nearly solved. Stop here, or use harder ones"),
        ({"zero_variance": lambda e: 20, "reward": lambda e: 0.0}, "use easier or more varied examples"),
        ({"correct": lambda e: 0.8 - 0.2 * (e + 1)}, "answers that score high without being good"),
        ({"correct": lambda e: 0.8 - 0.2 * (e + 1), "select": lambda e: 0.1}, "training makes the model worse"),
        ({"tokens": lambda e: 100 * 10**e}, "10.0 times as many as in the first epoch (100)"),
    ],
)
def test_the_warning_says_what_to_do(play: Any, curves: dict[str, Any], text: str) -> None:
    run = play(GuardsConfig.model_validate({"length_growth": {"warn_after": 1}}), **curves)
    run.play()
    assert any(text in each for each in run.progress.texts), run.progress.texts


def test_a_reward_that_falls_since_the_curriculum_adds_harder_examples_is_no_collapse() -> None:
    low = {"avg_reward": 0.05, "ci_low": 0.03, "ci_high": 0.07}
    first = EpochMetrics(0, avg_reward=0.4, ci_low=0.38, ci_high=0.42, curriculum_percentile=0.5)
    harder = EpochMetrics(1, curriculum_percentile=1.0, **low)
    assert guards.measure_collapse(guards.History([first, harder], []), 0.5) is None
    next_level = EpochMetrics(1, curriculum_percentile=0.5, job={"level": 1}, **low)
    assert guards.measure_collapse(guards.History([first, next_level], []), 0.5) is None
    equal = EpochMetrics(1, curriculum_percentile=0.5, **low)
    found = guards.measure_collapse(guards.History([first, equal], []), 0.5)
    assert found.is_beyond
    assert found.value == pytest.approx(0.875)
    assert "has fallen from 0.400 to 0.050" in found.text


def test_a_gap_within_the_intervals_is_no_gap() -> None:
    epochs = [EpochMetrics(0, avg_reward=0.2, ci_low=0.1), EpochMetrics(1, avg_reward=0.8, ci_low=0.7)]
    baseline = ValidationRow(-1, 0.3, 0.2, 0.4)
    for high, is_beyond in ((0.7, True), (0.9, False)):  # 0.7 - 0.2 is more than 0.7 - 0.3, and less than 0.9 - 0.3
        history = guards.History(epochs, [baseline, ValidationRow(1, 0.4, 0.1, high)])
        measured = guards.measure_train_select_gap(history, 0.2)
        assert measured is not None
        assert (round(measured.value, 9), measured.is_beyond) == (0.5, is_beyond)
    relative = guards.History(history.epochs, history.validations, is_relative=True)
    assert guards.measure_train_select_gap(relative, 0.2) is None


def test_what_is_not_measured_is_no_event(play: Any) -> None:
    run = play(entropy=lambda e: None, mismatch=lambda e: None, tokens=lambda e: None, zero_variance=lambda e: None)
    assert (run.play(), run.events) == (None, [])


def test_a_gap_and_a_length_are_measured_within_a_stage_of_a_pipeline() -> None:
    epochs = [
        EpochMetrics(0, None, completion_tokens=4, stage="sft"),
        EpochMetrics(1, 0.6, completion_tokens=10, stage="grpo"),
        EpochMetrics(2, 0.9, completion_tokens=20, stage="grpo"),
    ]
    validations = [ValidationRow(-1, 0.1), ValidationRow(0, 0.6), ValidationRow(2, 0.6)]
    history = guards.History(epochs, validations)
    gap = guards.measure_train_select_gap(history, 0.2)
    assert gap is not None
    assert (gap.value, gap.is_beyond) == (pytest.approx(0.3), True)
    growth = guards.measure_length_growth(history, 3)
    assert growth is not None
    assert growth.value == pytest.approx(2.0)
