"""Fixtures that several packages share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tests share cores, and libgomp's workers spin
sys.path.insert(0, str(Path(__file__).parent.parent))  # so that `from tests.models import ...` works under importlib

from tests.models import make_tiny_model
from tests.openai_service import OpenAIService


def pytest_collection_finish() -> None:
    """What is imported by now lasts: without this each of some hundred runs looks through it for 0.4 s."""
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama (hidden 64, 2 layers, vocabulary 320), its tokenizer and a chat template."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture
def openai_service() -> Iterator[OpenAIService]:
    """OpenAI's API on the loopback: files, fine-tuning jobs, chat completions; see tests/openai_service.py."""
    with OpenAIService() as service:
        yield service


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """The folder of a short run of a fine-tuning job that has ended."""
    from tests.fine_tuning import make_finished_run  # imports torch

    return make_finished_run(tmp_path_factory.mktemp("finished") / "data", tiny_model_dir)
