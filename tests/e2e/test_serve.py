"""`reinforge serve` as a command, and the snippets of docs/serve.md, which run as they are printed."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from reinforge.cli import main
from tests.capture_page import SNIPPET

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"
SNIPPETS = {name: text for name, _, text in SNIPPET.findall(PAGE.read_text(encoding="utf-8"))}


@pytest.fixture(scope="module")
def served(tiny_model_dir, tmp_path_factory):
    """The environment that the command prints, of a run that is served."""
    runs = tmp_path_factory.mktemp("runs")
    (runs / "support-1").mkdir()
    (runs / "support-1" / "run.sqlite").touch()
    shutil.copytree(tiny_model_dir, runs / "support-1" / "model")
    command = [sys.executable, "-m", "reinforge", "serve", "support-1", "--output_dir", str(runs), "--port", "0"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    try:
        lines = [process.stdout.readline() for _ in range(4)]
        assert lines[0] == "Loading support-1 ...\n", process.stderr.read()
        assert lines[1] == "Serving support-1 until you press Ctrl-C. Point a client at it:\n"
        found = re.fullmatch(r"  export (OPENAI_BASE_URL)=(\S+/v1) (OPENAI_API_KEY)=(any)\n", lines[2])
        assert lines[3] == f"Chat in the browser: {found[2].removesuffix('/v1')}\n"
        yield {found[1]: found[2], found[3]: found[4]}
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()


def run_snippet(name, served, monkeypatch):
    """Returns what a Python snippet prints."""
    for variable, value in served.items():
        monkeypatch.setenv(variable, value)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(SNIPPETS[name], f"{PAGE}: {name}", "exec"), {})
    return printed.getvalue()


def test_every_snippet_of_the_page_is_run_here():
    assert list(SNIPPETS) == ["openai", "anthropic", "curl"]


def test_the_openai_client(served, monkeypatch):
    printed = run_snippet("openai", served, monkeypatch)
    assert re.search(r"^0 \[\d+(, \d+)*\] \[\d+(, \d+)*\]$", printed, re.MULTILINE)


def test_the_anthropic_client(served, monkeypatch):
    assert run_snippet("anthropic", served, monkeypatch)


def test_curl(served):
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    done = subprocess.run(
        ["bash", "-c", SNIPPETS["curl"]], env={**os.environ, **served}, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["object"] == "chat.completion"


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = CliRunner().invoke(main, ["serve", str(tmp_path), "--port", str(port)])
    assert done.exit_code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.output
    assert "Loading" not in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bundled:tickets", "--host", "0.0.0.0"], "there is no token that keeps strangers out"),
        (["nothing-there"], 'there is no run and no folder "nothing-there"'),
    ],
)
def test_what_cannot_be_served_is_told(arguments, message):
    done = CliRunner().invoke(main, ["serve", *arguments, "--port", "0"])
    assert done.exit_code == 2
    assert message in done.output
