"""Progress in a notebook: one output that is replaced in place, whatever the length of the run."""

import sys
import types

import pytest

from reinforge.runs.notebook import MAX_LINES, NotebookProgress, find_display
from reinforge.runs.rows import EpochMetrics
from tests.core.runs.test_progress import clock  # noqa: F401  the fixture


class FrontEnd:
    def __init__(self):
        self.outputs, self.num_messages = {}, 0

    def __call__(self, bundle, *, raw, display_id, update=False):
        assert raw
        assert update == (display_id in self.outputs), "an output is shown once, then updated"
        self.outputs[display_id] = bundle
        self.num_messages += 1

    @property
    def texts(self):
        return [bundle["text/plain"] for bundle in self.outputs.values()]

    @property
    def pages(self):
        return [bundle["text/html"] for bundle in self.outputs.values()]


@pytest.fixture
def front_end():
    return FrontEnd()


@pytest.fixture
def progress(front_end, clock, tmp_path):  # noqa: F811
    shown = NotebookProgress(front_end, every_s=0.5, clock=clock)
    shown.start("r", tmp_path, 1000, [("agent", "<script>"), ("seed", "0")])
    return shown


def metrics(epoch):
    return EpochMetrics(epoch, avg_reward=epoch / 1000)


def test_a_thousand_epochs_are_one_output_of_some_twenty_lines(front_end, clock, progress):  # noqa: F811
    for epoch in range(1000):
        progress.stage(epoch, "COLLECT", 8)
        for _ in range(8):
            clock.now += 0.01
            progress.episode("ok", 0.5, 3)
        progress.epoch_done(metrics(epoch))
    progress.close()
    (text,) = front_end.texts
    lines = text.splitlines()
    assert lines[0].startswith("run r in ")
    assert lines[1] == f"({1000 - MAX_LINES} earlier lines: see training_metrics.jsonl)"
    assert lines[2].startswith("epoch 980 (981/1000): reward 0.980")
    assert lines[-1].startswith("epoch 999 (1000/1000): reward 0.999")
    assert len(lines) == 2 + MAX_LINES
    assert front_end.num_messages <= 2 + 80 / 0.5, "at most two a second, over 80 s"


def test_the_output_says_what_the_run_is_doing_until_it_ends(front_end, clock, progress):  # noqa: F811
    progress.stage(3, "COLLECT", 64)
    for _ in range(12):
        clock.now += 0.25
        progress.episode("ok", 0.25, 3)
    assert front_end.texts[0].splitlines()[-1] == (
        "[###-----------------]  19 % epoch 3 (4/1000) collect: 12/64 episodes (4.0/s), ~13 s left, reward 0.250, "
        "12 tokens/s"
    )
    progress.close()
    assert "collect" not in front_end.texts[0]
    progress.note("resume with: reinforge.finetune(...)")
    assert front_end.texts[0].endswith("resume with: reinforge.finetune(...)"), "shown at once"


def test_names_and_settings_cannot_write_html(front_end, progress):
    progress.note('<img src="https://example.com/x" onerror="x()">')
    progress.close()
    (page,) = front_end.pages
    assert "<script>" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page
    assert "<summary>settings</summary>" in page


def test_a_front_end_that_fails_does_not_stop_the_run(tmp_path):
    calls = []

    def gone(bundle, **given):
        calls.append(bundle)
        raise OSError("the kernel has no front end")

    progress = NotebookProgress(gone)
    progress.start("r", tmp_path, 1, [])
    progress.epoch_done(metrics(0))
    progress.close()
    assert len(calls) == 1, "it is not asked again"


@pytest.mark.parametrize(("kernel", "is_notebook"), [(object(), True), (None, False)])
def test_only_a_shell_with_a_kernel_is_a_notebook(monkeypatch, front_end, kernel, is_notebook):
    """IPython in a terminal has none."""
    shell = types.SimpleNamespace(kernel=kernel)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=front_end))
    assert (find_display() is front_end) == is_notebook
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))
    assert find_display() is None


def test_a_plain_process_is_no_notebook(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert find_display() is None
    assert "IPython" not in sys.modules, "it is not imported"
