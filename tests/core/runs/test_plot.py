import math
import struct
import sys

import pytest

from reinforge.errors import StorageError
from reinforge.runs.plot import build_reward_figure, draw_reward_plot
from reinforge.runs.rows import EpochMetrics, ValidationRow
from reinforge.types.evaluation import MetricSummary

pytestmark = pytest.mark.usefixtures("plots")


def interval(reward):
    low, high = (None, None) if reward is None else (reward - 0.05, reward + 0.05)
    return {"avg_reward": reward, "ci_low": low, "ci_high": high}


def row(epoch, reward, **more):
    return EpochMetrics(epoch, **interval(reward), **more)


def validation(epoch, reward, **more):
    return ValidationRow(epoch, **interval(reward), **more)


def arm(mean, low=None, high=None):
    return MetricSummary("wins", mean, low, high, 100, 0)


ROWS = [
    row(0, 0.4, filtered_avg_reward=0.45, num_groups=10, num_groups_kept=8, curriculum_percentile=0.3),
    row(1, None, filtered_avg_reward=None, num_groups=0, num_groups_kept=0, curriculum_percentile=0.3),
    row(2, 0.6, filtered_avg_reward=None, num_groups=10, num_groups_kept=0, curriculum_percentile=0.5),
    row(4, 0.7, filtered_avg_reward=0.65, num_groups=10, num_groups_kept=4, curriculum_percentile=0.7),
]
VALIDATIONS = [validation(1, 0.5), validation(-1, 0.35), validation(3, None, error="the backend does not answer")]
CONFIRM = {"base": arm(0.36, 0.4, 0.4), "tuned": arm(0.7, 0.65, 0.75)}


def lines(figure, label):
    for axes in figure.axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            if name == label:
                line = getattr(handle, "lines", [handle])[0]
                return dict(
                    zip(
                        map(float, line.get_xdata()),
                        [None if math.isnan(y) else y for y in line.get_ydata()],
                        strict=True,
                    )
                )
    raise AssertionError(f"nothing is called {label}")


def test_unknown_rewards_are_gaps_and_not_zero():
    figure = build_reward_figure(ROWS, VALIDATIONS, "run")
    assert lines(figure, "training reward, all groups") == {0: 0.4, 1: None, 2: 0.6, 3: None, 4: 0.7}
    assert lines(figure, "training reward, groups kept") == {0: 0.45, 1: None, 2: None, 3: None, 4: 0.65}
    assert lines(figure, "validation reward (select)") == {-1: 0.35, 1: 0.5, 3: None}


def test_curriculum_and_kept_groups_are_shown():
    bottom = build_reward_figure(ROWS, VALIDATIONS, "run").axes[1]
    steps = bottom.patches[-1].get_data()
    assert [None if math.isnan(v) else round(v) for v in steps.values] == [30, 30, 50, None, 70]
    assert list(steps.edges) == [-0.5, 0.5, 1.5, 2.5, 3.5, 4.5]
    heights = [bar.get_height() for bar in bottom.patches[:5]]
    assert [None if math.isnan(h) else h for h in heights] == [80, None, 0, None, 40]


def test_confirm_arms_stand_at_the_right_edge():
    figure = build_reward_figure(ROWS, VALIDATIONS, "run", CONFIRM)
    ((base_at, base),) = lines(figure, "verdict (confirm), base").items()
    ((tuned_at, tuned),) = lines(figure, "verdict (confirm), tuned").items()
    assert (base, tuned) == (0.36, 0.7)
    assert 4 < base_at < tuned_at < figure.axes[0].get_xlim()[1]
    names = [tick.get_text() for tick in figure.axes[1].get_xticklabels()]
    assert names == ["0", "1", "2", "3", "4", "base", "base", "tuned"]


def test_an_arm_without_a_mean_is_left_out():
    figure = build_reward_figure(ROWS, [], "run", {"base": arm(None), "tuned": None})
    assert "verdict (confirm), base" not in figure.axes[0].get_legend_handles_labels()[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "validations"),
    [
        (ROWS, VALIDATIONS),
        ([], []),
        pytest.param([], [validation(-1, 0.3)], marks=pytest.mark.slow),
        pytest.param([EpochMetrics(0)], [], marks=pytest.mark.slow),
        pytest.param([row(0, 0.5)], [validation(-1, None), ValidationRow(0, 0.5)], marks=pytest.mark.slow),
        ([row(epoch, epoch / 300) for epoch in range(300)], [validation(epoch, 0.5) for epoch in range(-1, 300, 5)]),
    ],
)
@pytest.mark.filterwarnings("error")
def test_every_history_gives_a_png_of_1000_by_600(tmp_path, rows, validations):
    path = tmp_path / "reward_plot.png"
    draw_reward_plot(path, rows, validations, "a title with $ and _ and no end " * 4, CONFIRM)
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (1000, 600)
    assert [file.name for file in tmp_path.iterdir()] == ["reward_plot.png"]


def test_what_cannot_be_written_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match=r"cannot write .*nowhere"):
        draw_reward_plot(tmp_path / "nowhere" / "plot.png", ROWS, VALIDATIONS, "run")


def test_the_global_state_of_matplotlib_is_unchanged(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    draw_reward_plot(tmp_path / "plot.png", ROWS, VALIDATIONS, "run", CONFIRM)
    assert "matplotlib.pyplot" not in sys.modules


def test_the_stages_of_a_pipeline_are_marked_where_they_begin():
    rows = [row(epoch, 0.5, stage=name) for epoch, name in enumerate(("sft", "sft", "grpo"))]
    top = build_reward_figure(rows, [], "run").axes[0]
    marks = {text.get_text(): text.get_position()[0] for text in top.texts}
    assert marks == {"sft": -0.45, "grpo": 1.55}
    assert not build_reward_figure([row(0, 0.5)], [], "run").axes[0].texts
