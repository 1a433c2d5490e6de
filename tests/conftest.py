"""Fixtures that several packages share."""

import gc
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import stamina

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tests share cores, and libgomp's workers spin
sys.path.insert(0, str(Path(__file__).parent.parent))  # so that `from tests.models import ...` works under importlib

from reinforge.engine import garbage_collection
from reinforge.limits import PREFIX, get_limits
from tests.models import make_tiny_model
from tests.project import Project, leave_out_plots_and_pages
from tests.protocols.openai_service import OpenAIService

KEEPS_NO_BYTECODE = sys.dont_write_bytecode
sys.dont_write_bytecode = False  # while tests are collected: each process would compile all of them anew, for 15 s
gc.disable()  # what is imported meanwhile lasts


def pytest_pycollect_makeitem(collector: pytest.Module, obj: object) -> list[pytest.Item] | None:
    """Makes no cases of long tests where they are not wanted: to make them and deselect them takes each process 2 s."""
    if collector.config.option.markexpr != "not slow and not fault" or not inspect.isfunction(obj):
        return None
    names = {mark.name for mark in getattr(obj, "pytestmark", ())} | {mark.name for mark in collector.iter_markers()}
    return [] if names & {"slow", "fault"} else None


def pytest_collection_finish() -> None:
    """What is imported by now lasts: without this each of some hundred runs looks through it for 0.4 s."""
    sys.dont_write_bytecode = KEEPS_NO_BYTECODE
    gc.enable()
    gc.freeze()
    garbage_collection._is_limited = True  # each run would count what is frozen, for 0.06 s


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama (hidden 64, 2 layers, vocabulary 320), its tokenizer and a chat template."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture
def openai_service() -> Iterator[OpenAIService]:
    """OpenAI's API on the loopback: files, fine-tuning jobs, chat completions; see protocols/openai_service.py."""
    with OpenAIService() as service:
        yield service


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """The folder of a short run of a fine-tuning job that has ended."""
    from tests.protocols.fine_tuning import make_finished_run  # imports torch

    return make_finished_run(tmp_path_factory.mktemp("finished") / "data", tiny_model_dir)


@pytest.fixture
def set_limit() -> Iterator[Callable[[str, int], None]]:
    """Sets a limit of `reinforge.limits` by its variable, until the test ends."""
    names: list[str] = []

    def set_variable(name: str, value: int) -> None:
        names.append(f"{PREFIX}{name.upper()}")
        os.environ[names[-1]] = str(value)
        get_limits.cache_clear()

    yield set_variable
    for name in names:
        os.environ.pop(name, None)
    get_limits.cache_clear()


@pytest.fixture
def _no_backoff() -> Iterator[None]:
    """Retries come at once."""
    with stamina.set_testing(True, attempts=10, cap=True):
        yield


@pytest.fixture
def plots() -> None:
    """Lets the runs of a test draw their plots."""


@pytest.fixture
def pages() -> None:
    """Lets the runs of a test write their `report.html`."""


@pytest.fixture(autouse=True)
def _no_plots_and_pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots and pages have tests of their own."""
    names = request.fixturenames
    leave_out_plots_and_pages(monkeypatch, plots="plots" not in names, pages="pages" not in names)


TIE_WEIGHTS: list[object] = []


@pytest.fixture(autouse=True)
def _tie_weights() -> None:
    """Undoes what transformers leaves behind if a test makes a model while a thread of the last one still loads one."""
    if (modeling := sys.modules.get("transformers.modeling_utils")) is None:
        return
    from reinforge.engine.model.model_files import MAKING

    with MAKING:
        found = modeling.PreTrainedModel.tie_weights
        if found.__name__ == "tie_weights":
            TIE_WEIGHTS[:] = [found]
        elif TIE_WEIGHTS:
            [modeling.PreTrainedModel.tie_weights] = TIE_WEIGHTS


@pytest.fixture
def project(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """A whole project in a folder, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("task", None)  # each project has its own
    yield Project(tmp_path, tiny_model_dir)
    sys.modules.pop("task", None)
