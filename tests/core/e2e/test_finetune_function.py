"""`reinforge.finetune` as a script and as a notebook call it: limits, names that are taken, resuming, errors."""

import asyncio
import html
import json
import os
import re
import shutil
import signal
import sys
import threading
import traceback
import types
from pathlib import Path
from types import SimpleNamespace

import pytest

import reinforge
from reinforge.errors import ConfigError, EvaluationError, Interrupted, JobFailed, StorageError
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.progress import PlainProgress, SilentProgress
from reinforge.trainer.api import build_dataset_block
from tests.project import call


async def agent(item, llm, context):
    reply = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}], max_tokens=3)
    return reply.choices[0].message.content


def variety(output, expected):
    return len(set(output)) / 10


def flat(output, expected):
    return 1.0


@pytest.fixture
def run(tmp_path, tiny_model_dir, monkeypatch):
    """Calls `reinforge.finetune` with a task that takes a second, in a folder without our source: a run hashes it."""
    monkeypatch.chdir(tmp_path)

    def call(**given):
        settings = given.pop("settings", {})
        if isinstance(settings, dict):
            settings = {"curriculum_learning": {"min_reward_diff": 0.0}, "device": "cpu", **settings}
        arguments = {"epochs": 1, "num_generations": 4, "output_dir": tmp_path, "run_name": "r", **given}
        arguments.setdefault("progress", SilentProgress())
        rows = [{"id": str(i), "question": f"q{i}", "answer": "a"} for i in range(24)]
        reward, model = arguments.pop("reward", variety), arguments.pop("model", tiny_model_dir)
        return reinforge.finetune(agent, rows, reward, model, settings=settings, **arguments)

    return call


def test_a_limit_ends_in_a_summary_that_says_how_to_resume_from_python(run, tmp_path, capsys):
    limits = {"limits": {"max_tokens": 1}}
    summary = run(epochs=2, settings=limits, progress=PlainProgress())
    assert summary.status == "stopped"
    assert summary.reason.startswith("limits.max_tokens reached: ")
    shown = capsys.readouterr().err
    assert "limits.max_tokens reached: " in shown
    resume = f"resume with: reinforge.finetune(..., resume={str(tmp_path / 'r')!r}) with the same agent"
    assert resume in shown
    assert "reinforge finetune --resume" not in shown
    listed = call("runs", "list", "--output_dir", str(tmp_path)).output
    assert f"resume r with: reinforge.finetune(..., resume={str(tmp_path / 'r')!r})" in listed
    refused = call("finetune", "--resume", str(tmp_path / "r"), code=2)
    assert "was passed to reinforge.finetune in Python; resume the run there" in refused.output, refused.output
    assert run(epochs=2, run_name=None, resume="last").status == "completed"


@pytest.mark.parametrize("epochs", [3, 4], ids=["one stage", "answers first"])
def test_more_epochs_of_a_small_model_keep_its_first_stage(run, tmp_path, epochs):
    """By default a fourth of all epochs imitates answers; what a run began with stays. The advice of a run works."""
    summary = run(epochs=epochs)
    [advice] = [each.fix for each in summary.explanations if each.reason == "too few steps"]
    more = int(re.search(rf"epochs=(\d+) instead of {epochs}", advice)[1])
    stages = dict.fromkeys(summary.stages, 1) | ({"reinforce": more} if summary.stages else {})
    resumed = run(epochs=more, run_name=None, resume="r")
    assert (resumed.status, resumed.stages) == ("completed", stages)


@pytest.mark.parametrize(
    ("dataset", "found"),
    [({"question": ["a"]}, "dict"), (5, "int"), (flat, "function")],
    ids=["columns", "number", "function"],
)
def test_what_is_no_dataset_is_named(tmp_path, dataset, found):
    with pytest.raises(ConfigError, match=f"expected a file, or rows as a list of mappings, found {found}"):
        reinforge.finetune(agent, dataset, variety, "bundled:tickets")


def test_a_data_frame_is_its_rows():
    pandas, rows = pytest.importorskip("pandas"), [{"question": "q", "answer": "a"}, {"question": "r", "answer": "b"}]
    assert build_dataset_block(pandas.DataFrame(rows))["rows"] == rows


def test_a_disk_that_is_too_small_is_found_before_the_run(run, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1))
    with pytest.raises(ConfigError, match=r"has 0.0 GiB free, but the checkpoints need"):
        run()
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_a_name_that_is_taken_says_what_to_do_and_overwrite_replaces_the_run(run, tmp_path):
    run()
    with pytest.raises(ConfigError, match="already exists") as refused:
        run()
    resume = f"resume={str(tmp_path / 'r')!r}"
    assert f"fix: pass overwrite=True to replace it, {resume} to resume it, or another run_name" in str(refused.value)
    (tmp_path / "r" / "mark").write_text("of the first run")
    with pytest.raises(ConfigError, match="num_generations"):
        run(overwrite=True, num_generations=0)
    assert (tmp_path / "r" / "mark").exists(), "an invalid call removes nothing"
    (tmp_path / "r" / "mark").unlink()
    before = (tmp_path / "r" / "summary.json").stat().st_mtime_ns
    assert run(overwrite=True).status == "completed"
    assert (tmp_path / "r" / "summary.json").stat().st_mtime_ns != before
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("r",)] == []


def test_overwrite_refuses_a_run_in_use_and_a_folder_that_is_no_run(run, tmp_path):
    journal = RunJournal(tmp_path / "r")
    try:
        with pytest.raises(StorageError, match=f"in use by process {os.getpid()}"):
            run(overwrite=True)
    finally:
        journal.close()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"mine is not a run folder, since it has no run\.sqlite"):
        run(run_name="mine", overwrite=True)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"
    with pytest.raises(ConfigError, match="cannot be combined with resume"):
        run(overwrite=True, resume="r")


def test_a_bad_name_is_told_by_the_argument_of_python(run):
    with pytest.raises(ConfigError) as caught:
        run(run_name="a/b")
    assert str(caught.value).startswith("run_name: ")


def test_a_reward_whose_parameters_are_the_other_way_round_is_refused(run):
    with pytest.raises(ConfigError, match="would get the agent's output as its argument `expected`; write"):
        run(reward=lambda expected, output: 1.0)


def test_a_run_whose_reward_is_never_a_number_cannot_be_resumed_in_vain(run, tmp_path):
    """A corrected reward is another run."""
    with pytest.raises(EvaluationError, match="the evaluator returned None") as caught:
        run(reward=lambda output, expected: None)
    assert "resume" not in "".join(caught.value.__notes__)
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["can_resume"] is False


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"num_generations": 0}, ConfigError),
        ({"resume": "nowhere"}, ConfigError),
        ({"model": "./nowhere"}, ConfigError),
        ({"model": object()}, ConfigError),
        ({"reward": "json_schema"}, ConfigError),
        ({"settings": 5}, ConfigError),
        ({"settings": {"policy": None}}, ConfigError),
        ({"algorithm": "gropo"}, ConfigError),
        ({"output_dir": __file__}, StorageError),
        ({"reward": flat, "settings": {"limits": {"max_empty_updates": 1, "max_refills": 0}}}, JobFailed),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_an_error_is_shown_alone(run, given, kind):
    """Not below another one, as in "During handling of the above exception, another exception occurred"."""
    with pytest.raises(kind) as caught:
        run(**given)
    text = "".join(traceback.format_exception(caught.value))
    assert text.startswith("Traceback")
    assert text.count("Traceback") == 1, text


@pytest.mark.slow
async def test_in_a_notebook_a_run_is_one_output_and_its_verdict_with_the_curve_another(
    run, pages, monkeypatch, capsys
):
    """The double keeps outputs by their display id, as Jupyter does."""
    outputs = {}

    def display(bundle, *, raw, display_id, update):
        assert update == (display_id in outputs)
        outputs[display_id] = bundle

    shell = types.SimpleNamespace(kernel=object())
    double = types.SimpleNamespace(get_ipython=lambda: shell, version_info=(9, 0))  # matplotlib reads its version
    monkeypatch.setitem(sys.modules, "IPython", double)
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    summary = run(progress=None)
    progress, verdict = outputs.values()
    assert "epoch 0 (1/1): reward " in progress["text/plain"]
    assert f"r {summary.headline()}" in verdict["text/plain"]
    assert verdict["text/html"] == summary._repr_html_(), "as the summary shows itself"
    frame = r'<iframe sandbox srcdoc="([^"]*)" title="run" style="[^"]*"></iframe>'
    page = html.unescape(re.fullmatch(frame, verdict["text/html"])[1])
    assert f"r {summary.headline()}." in page
    assert "<svg" in page
    assert "<script" not in page
    assert page.count(">base model</h4>") == page.count(">trained model</h4>") <= 5
    shutil.rmtree(summary.folder)
    assert summary._repr_html_().startswith('<pre style="white-space: pre-wrap">r '), "the folder is gone"
    assert capsys.readouterr().err == "", "no lines beside it"


@pytest.mark.slow
async def test_ctrl_c_in_a_notebook_stops_the_run_and_waits_for_it(run, tmp_path):
    """There the run is on another thread, and Ctrl-C arrives as KeyboardInterrupt on the one that waits for it."""

    class Interrupting(SilentProgress):
        def epoch_done(self, metrics):
            if metrics.epoch == 1:
                os.kill(os.getpid(), signal.SIGINT)  # Python raises it on the main thread

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(Interrupted, match="stopped by SIGINT") as caught:
            run(epochs=500, progress=Interrupting())
    finally:
        signal.signal(signal.SIGINT, before)
    assert asyncio.get_running_loop().is_running()
    assert "resume with: reinforge.finetune(..., resume=" in "\n".join(caught.value.__notes__)
    assert not [thread for thread in threading.enumerate() if thread.name == "reinforge-finetune"]
    assert run(epochs=500, run_name=None, resume=tmp_path / "r", settings={"limits": {"max_tokens": 1}}).status == (
        "stopped"
    ), "the folder is free again"


def test_the_format_of_a_file_is_known_by_the_end_of_its_name(tmp_path):
    (tmp_path / "rows.ndjson").write_text("".join(f'{{"question": "q{number}"}}\n' for number in range(24)))
    with pytest.raises(ConfigError, match="no evaluator named"):
        reinforge.finetune(agent, tmp_path / "rows.ndjson", "no_such_reward", "no-model", output_dir=tmp_path)
    with pytest.raises(ConfigError, match="rows.txt: the name ends with .txt; allowed: .json, .jsonl, .ndjson, .csv"):
        reinforge.finetune(agent, "rows.txt", "exact_match", "no-model", output_dir=tmp_path)


NOTEBOOKS = sorted((Path(__file__).parents[3] / "examples" / "notebooks").glob("*.ipynb"))
names = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def find_outputs(notebook):
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [cell["id"] for cell in cells if cell["outputs"] or cell["execution_count"] is not None]


@names
def test_no_output_is_kept_in_the_repository(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert find_outputs(notebook) == []
    assert notebook["nbformat"] == 4
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}, "nothing of the machine that it was written on"


def execute(path, folder, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    client = NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    return client.execute()


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.slow if path.stem == "from_logs" else pytest.mark.fault)
        for path in NOTEBOOKS
    ],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    notebook = execute(path, tmp_path, monkeypatch)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.output_type == "error"]
    contents = [output.data for output in outputs if "data" in output]
    text = "".join(output.get("text", "") for output in outputs)
    assert "promoted: True" in text
    curves = ["image/png" in data or "<iframe sandbox srcdoc=" in data.get("text/html", "") for data in contents]
    assert sum(curves) == 1, "the curve is shown inline, once"
    assert len(list(tmp_path.rglob("report.html"))) == 1
