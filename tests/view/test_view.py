"""`reinforge view` and `reinforge watch` as commands."""

import http.cookiejar
import os
import re
import signal
import sys
import urllib.request
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from reinforge.cli import main
from reinforge.cli import watch as watch_module
from reinforge.runs.rows import EpochMetrics
from tests.scripted_run import ScriptedRun
from tests.serving.serving import start_command
from tests.view.view_browser import begin_run


async def test_view_prints_an_address_that_opens_and_ends_with_ctrl_c(tmp_path):
    await ScriptedRun(tmp_path).run()
    process = start_command("view", "--output_dir", tmp_path, "--port", "0", bufsize=1)
    try:
        assert process.stdout.readline() == f"Runs in {tmp_path}, until you press Ctrl-C:\n"
        address = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?key=[\w-]{32}", address)
        jar = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        with urllib.request.build_opener(jar).open(address) as answer:
            assert b'href="/runs/r"' in answer.read()
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
async def test_watch_of_a_run_that_has_ended_shows_it_and_its_summary(tmp_path):
    summary = await ScriptedRun(tmp_path).run()
    shown = CliRunner().invoke(main, ["watch", "last", "--output_dir", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    assert lines[0] == f"run r in {tmp_path / 'r'}"
    assert [line.partition(":")[0] for line in lines if line.startswith("epoch")] == ["epoch 0 (1/2)", "epoch 1 (2/2)"]
    closing = summary.closing_lines(color=False)
    assert lines[-len(closing) :] == closing
    assert CliRunner().invoke(main, ["watch", "nothing", "--output_dir", str(tmp_path)]).exit_code == 2


def test_watch_ends_when_its_pipe_is_closed(tmp_path, monkeypatch):
    """`reinforge watch last | head -3` must not wait for the end of the run."""
    journal = begin_run(tmp_path)
    steps = iter([lambda: (journal.record_metrics(EpochMetrics(0, 0.5)), journal.flush())])
    monkeypatch.setattr(watch_module, "time", SimpleNamespace(sleep=lambda seconds: next(steps)()))
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(sys, "stdout", open(writing, "w"))  # noqa: SIM115  closing it writes again, and fails again
    with pytest.raises(BrokenPipeError):
        watch_module.command.callback(run="r", output_dir=str(tmp_path))
    os.dup2(os.open(os.devnull, os.O_WRONLY), writing)
    sys.stdout.close()
    journal.close()


def test_watch_follows_a_run_until_it_is_killed(tmp_path, monkeypatch):
    journal = begin_run(tmp_path, num_epochs=2, can_resume=True)
    steps = iter(
        [
            lambda: (
                journal.record_stage(0, "ADOPT", {}),
                journal.record_metrics(EpochMetrics(0, 0.5)),
                journal.flush(),
            ),
            lambda: (journal._writer.close(), journal._lock.release()),
        ]
    )
    monkeypatch.setattr(watch_module, "time", SimpleNamespace(sleep=lambda seconds: next(steps)()))
    shown = CliRunner().invoke(main, ["watch", "r", "--output_dir", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert next(steps, None) is None
    lines = shown.output.splitlines()
    assert lines[1].startswith("epoch 0 (1/2): reward 0.500")
    assert lines[-2:] == [
        "r interrupted: the process was killed, or the machine went down",
        f"resume with: reinforge finetune --resume {tmp_path / 'r'}",
    ]
