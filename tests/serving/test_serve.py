"""`reinforge serve` as a command, and the snippets of docs/serve.md, which run as they are printed."""

import contextlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import psutil
import pytest
from click.testing import CliRunner

from reinforge.cli import main
from reinforge.protocols.openai.server.store import JobStore
from reinforge.serving.command import PROTOCOLS
from reinforge.serving.loading import lock_folder
from reinforge.serving.models import list_names
from tests.capture_page import SNIPPET
from tests.processes import is_alive
from tests.protocols.fine_tuning import supervised_rows, to_jsonl
from tests.serving.serving import start_command

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"
SNIPPETS = {name: text for name, _, text in SNIPPET.findall(PAGE.read_text(encoding="utf-8"))}


@pytest.fixture(scope="module")
def served(tiny_model_dir, tmp_path_factory):
    """The environment that the command prints, of a run that is served."""
    runs = tmp_path_factory.mktemp("runs")
    (runs / "support-1").mkdir()
    (runs / "support-1" / "run.sqlite").touch()
    shutil.copytree(tiny_model_dir, runs / "support-1" / "model")
    process = start_command("serve", "support-1", "--output_dir", runs, "--port", "0")
    try:
        lines = [process.stdout.readline() for _ in range(4)]
        assert lines[0] == "Loading support-1 ...\n", process.stderr.read()
        assert lines[1] == "Serving support-1 until you press Ctrl-C. Point a client at it:\n"
        found = re.fullmatch(r"  export (OPENAI_BASE_URL)=(\S+/v1) (OPENAI_API_KEY)=(any)\n", lines[2])
        assert lines[3] == f"Chat in the browser: {found[2].removesuffix('/v1')}\n"
        yield {found[1]: found[2], found[3]: found[4]}
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(30) == 130
        assert re.fullmatch(r"(  load: .*\n)*", process.stderr.read())  # told where loading takes ten seconds
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


@pytest.mark.slow
def test_the_openai_client(served, monkeypatch):
    printed = run_snippet("openai", served, monkeypatch)
    assert re.search(r"^0 \[\d+(, \d+)*\] \[\d+(, \d+)*\]$", printed, re.MULTILINE)


@pytest.mark.slow
def test_the_anthropic_client(served, monkeypatch):
    assert run_snippet("anthropic", served, monkeypatch)


@pytest.mark.slow
def test_curl(served):
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    done = subprocess.run(
        ["bash", "-c", SNIPPETS["curl"]], env={**os.environ, **served}, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["object"] == "chat.completion"


@pytest.mark.parametrize("feature", PROTOCOLS)
def test_a_second_server_on_the_same_folder_is_refused(tmp_path, feature):
    lock = lock_folder(tmp_path / "data")
    arguments = ["serve", str(tmp_path), "--port", "0", f"--{feature}", "--data_dir", str(tmp_path / "data")]
    done = CliRunner().invoke(main, arguments)
    lock.release()
    assert done.exit_code == 4
    assert "another server works on" in done.output
    assert "--data_dir" in done.output


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
        (["bundled:tickets", "--host", "0.0.0.0"], "no API key is set"),
        (["nothing-there"], 'there is no run and no folder "nothing-there"'),
    ],
)
def test_what_cannot_be_served_is_told(arguments, message):
    done = CliRunner().invoke(main, ["serve", *arguments, "--port", "0"])
    assert done.exit_code == 2
    assert message in done.output


class ServedJobs:
    """`reinforge serve` with all its parts, 4 streams that last, and a fine-tuning job that runs."""

    def __init__(self, model, folder):
        self.folder = folder
        parts = ("--fine_tuning", "--art", "--tinker", "--data_dir", folder, "--port", "0", "--device", "cpu")
        self.process = start_command("serve", model, *parts, stderr=subprocess.STDOUT, start_new_session=True)
        lines = iter(self.process.stdout.readline, "")
        said = list(itertools.takewhile(lambda line: "Point Tinker's clients" not in line, lines))
        [address] = re.findall(r"OPENAI_BASE_URL=(\S+)", "".join(said))
        self.client = httpx.Client(base_url=address, timeout=60)

    def start_job(self):
        """Returns the ids of the processes of the server once a job runs."""
        [model] = [each["id"] for each in self.client.get("/models").json()["data"]]
        form = {"files": {"file": ("a.jsonl", to_jsonl(supervised_rows(20)))}, "data": {"purpose": "fine-tune"}}
        file = self.client.post("/files", **form).json()
        hyperparameters = {"n_epochs": 25, "batch_size": 1}
        body = {"model": model, "training_file": file["id"], "hyperparameters": hyperparameters}
        job = self.client.post("/fine_tuning/jobs", json=body).json()["id"]
        while not list(self.folder.glob(f"fine_tuning/jobs/{job}/run/run.sqlite")):
            assert self.client.get(f"/fine_tuning/jobs/{job}").json()["status"] != "failed"
            time.sleep(0.05)
        return job

    def open_stream(self):
        """Returns a connection with a stream whose client reads no further."""
        address = self.client.base_url
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True, "n": 8, "max_tokens": 200})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.host}:{address.port}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        connection = socket.create_connection((address.host, address.port), timeout=60)
        connection.sendall(f"{head}{body}".encode())
        assert b"200 OK" in connection.recv(4096)
        return connection


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_server_stops_soon_with_open_streams_and_running_jobs(tiny_model_dir, tmp_path, number, code):
    served = ServedJobs(tiny_model_dir, tmp_path / "data")
    try:
        job = served.start_job()
        streams = [served.open_stream() for _ in range(4)]
        children = psutil.Process(served.process.pid).children(recursive=True)
        assert children, "the job is a process"
        os.kill(served.process.pid, number)
        assert served.process.wait(60) == code
        said = served.process.stdout.read()
        assert said.endswith("Stopping. Jobs are kept, and resume when the server starts again.\n")
        assert [child for child in children if is_alive(child)] == []
        with contextlib.closing(JobStore(tmp_path / "data" / "fine_tuning" / "jobs.sqlite")) as store:
            assert [each.id for each in store.list_unfinished()] == [job]
        for stream in streams:
            stream.close()
    finally:
        served.process.kill()
        served.process.communicate()


def test_messages_name_twenty_models_at_most():
    assert list_names([]) == "none"
    assert list_names(["a", "b"]) == "a, b"
    assert list_names([f"m{number}" for number in range(25)]).endswith(", m18, m19 and 5 more")
