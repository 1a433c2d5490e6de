"""Serves an artifact to the agent of its run, by the program that will run it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reinforge.config.schema import TrainerAdapterConfig
from reinforge.errors import BackendError, ConfigError, Problem
from reinforge.exports.llama_cpp_policy import INSTALL, LlamaCppPolicy, has_llama_cpp
from reinforge.exports.trained_model import TrainedModel
from reinforge.interfaces import PolicyServer, TrainerAdapter
from reinforge.types.job import TrainingJobRef, TrainingJobStatus
from reinforge.types.trajectory import TrajectoryCollection

TRANSFORMERS, LLAMA_CPP = "transformers", "llama.cpp"
AUTO = "auto"
PROGRAMS = (AUTO, TRANSFORMERS, LLAMA_CPP)
DEFAULT_CONTEXT = 4096
"""Longest sequence for llama.cpp where the run sets no `policy.max_model_len`; its memory grows with it."""


class ServedArtifact(TrainerAdapter):
    """A trainer adapter that serves a policy and trains nothing.

    Args:
        server: The policy.
    """

    serves_policy = True

    def __init__(self, server: PolicyServer):
        super().__init__(TrainerAdapterConfig())
        self._server = server

    def policy(self) -> PolicyServer:
        return self._server

    async def is_healthy(self) -> bool:
        """Returns False: it takes no job."""
        return False

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        raise BackendError("an exported model is served, not trained")

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Refuses, since there are no jobs."""
        raise BackendError("an exported model is served, not trained")

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        """Refuses, since there are no jobs."""
        raise BackendError("an exported model is served, not trained")


def choose_program(wanted: str, *, is_gguf: bool) -> str:
    """Returns the program that serves an artifact: for a GGUF file llama.cpp where it is installed, else transformers.

    Raises:
        ConfigError: It is not installed, or cannot load the format.
    """
    if wanted == LLAMA_CPP and not is_gguf:
        message = "llama.cpp runs GGUF files only"
        raise ConfigError(Problem("--judge_with", message, "use transformers, or --format gguf"))
    if wanted == LLAMA_CPP and not has_llama_cpp():
        raise ConfigError(Problem("--judge_with", "llama-cpp-python is not installed", INSTALL))
    if wanted == AUTO:
        return LLAMA_CPP if is_gguf and has_llama_cpp() else TRANSFORMERS
    return wanted


def describe_program(program: str) -> str:
    package = "llama-cpp-python" if program == LLAMA_CPP else program
    return f"{package} {importlib.metadata.version(package)}"


@contextmanager
def serve(artifact: Path, program: str, model: TrainedModel, device: str, scratch: Path) -> Iterator[PolicyServer]:
    """Yields a policy server over an artifact.

    Args:
        program: `transformers` or `llama.cpp`.
        model: The run's model, for how it was sampled.
        device: Where transformers runs.
        scratch: A folder that does not exist yet, for a GGUF file that transformers reads.
    """
    seed = int(model.settings.get("seed") or 0)
    server: Any
    if program == LLAMA_CPP:
        server = LlamaCppPolicy(artifact, max_model_len=find_context(model), seed=seed)
    else:
        from reinforge.exports.generate_policy import GeneratePolicy

        folder = _read_back(artifact, scratch) if artifact.is_file() else artifact
        server = GeneratePolicy(folder, device=device, dtype=model.dtype, history=model.history, seed=seed)
    try:
        yield server
    finally:
        server.close()


def find_context(model: TrainedModel) -> int:
    """Returns the longest sequence of the run's model, for llama.cpp."""
    from reinforge.engine.model.model_files import CONFIG, read_json

    limits = [model.policy.get("max_model_len") or DEFAULT_CONTEXT]
    held = (read_json(model.folder / CONFIG) or {}).get("max_position_embeddings")
    return int(min([*limits, held] if held else limits))


def _read_back(file: Path, folder: Path) -> Path:
    """Converts a GGUF file into a folder, as `policy.model: FILE.gguf` does."""
    from reinforge.exports.gguf.convert import convert
    from reinforge.exports.gguf.source import read_gguf

    convert(file, read_gguf(file, "--judge"), folder, tokenizer=True)
    return folder
