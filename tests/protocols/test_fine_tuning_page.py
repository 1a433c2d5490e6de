"""The Python snippets of docs/fine-tuning-api.md run, one after the other, against a server with a tiny model."""

import re
from pathlib import Path

import pytest

from reinforge.config.policy import PolicyConfig
from reinforge.protocols.openai.server.api import FineTuningSettings
from reinforge.protocols.openai.server.files import FileLimits
from reinforge.protocols.openai.server.plan import NUM_GENERATIONS, JobSettings
from reinforge.protocols.openai.server.request import HYPERPARAMETERS
from tests.protocols.fine_tuning import CopyLauncher, FineTuningServer, ThreadedServer, ThreadLauncher

PAGE = (Path(__file__).parents[2] / "docs" / "fine-tuning-api.md").read_text(encoding="utf-8")
SNIPPETS = dict(re.findall(r"^<!-- snippet: (\S+) -->\n```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))


@pytest.fixture
def start(tmp_path, tiny_model_dir):
    """Returns a function that makes a server over the tiny model."""

    def make(launcher):
        settings = FineTuningSettings(tmp_path / "data", JobSettings(device="cpu", poll_s=0.1, max_reply_tokens=6))
        bases = {"tiny": PolicyConfig(model=str(tiny_model_dir), lora={"r": 4})}
        return ThreadedServer(lambda: FineTuningServer(tmp_path, bases, settings=settings, launcher=launcher))

    return make


def run_snippet(name, service, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", service.url)
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    found = {}
    exec(SNIPPETS[name], found)
    return found


def test_the_page_has_snippets_of_everything():
    assert list(SNIPPETS) == ["supervised", "graders", "reinforcement", "control"]


@pytest.mark.slow
def test_supervised(start, monkeypatch, capsys):
    with start(ThreadLauncher()) as service:
        found = run_snippet("supervised", service, monkeypatch)
    assert found["job"].status == "succeeded", found["job"].error
    assert found["job"].fine_tuned_model.startswith("ft:tiny:reinforge:orders:")
    assert found["answer"].model == found["job"].fine_tuned_model
    assert re.search(r"Step 30: training loss=\d", capsys.readouterr().out), "20 rows by 2, three times"


def test_graders_reinforcement_and_control(start, tmp_path, monkeypatch, capsys):
    """The job lasts until it is stopped."""
    launcher = CopyLauncher(tmp_path)
    launcher.hold.clear()
    with start(launcher) as service:
        assert run_snippet("graders", service, monkeypatch)["graded"].reward == 0.875
        printed = next(line for line in SNIPPETS["graders"].splitlines() if line.startswith("print(")).split("# ")[1]
        assert capsys.readouterr().out.strip() == printed
        job = run_snippet("reinforcement", service, monkeypatch)["job"]
        assert job.status == "validating_files"
        run_snippet("control", service, monkeypatch)
        assert job.id in capsys.readouterr().out
        service.call(service.server.wait(job.id))
        assert service.server.api.store.find_job(job.id).state.value == "cancelled"


def test_the_tables_name_every_hyperparameter_and_limit():
    for names in HYPERPARAMETERS.values():
        for name in names:
            assert f"`{name}`" in PAGE, name
    assert f"{NUM_GENERATIONS} replies per prompt" in PAGE
    limits = FileLimits()
    assert f"{limits.max_file_bytes >> 20} MiB" in PAGE
    assert f"{limits.max_part_bytes >> 20} MiB" in PAGE
    assert f"{limits.max_total_bytes >> 30} GiB" in PAGE
