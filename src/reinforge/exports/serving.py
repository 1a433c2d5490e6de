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
    serves_policy = True

    def __init__(self, server: PolicyServer):
        super().__init__(TrainerAdapterConfig())
        self._server = server

    def policy(self) -> PolicyServer:
        return self._server

    async def is_healthy(self) -> bool:
        return False

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        raise BackendError("an exported model is served, not trained")

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        raise BackendError("an exported model is served, not trained")

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        return await self.status(ref)


def choose_program(wanted: str, *, is_gguf: bool) -> str:
    """Returns what serves an artifact; `auto`: for a GGUF file llama.cpp where it is installed, else transformers."""
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
    """Yields a policy server over an artifact."""
    seed = int(model.settings.get("seed") or 0)
    server: Any
    if program == LLAMA_CPP:
        server = LlamaCppPolicy(artifact, max_model_len=find_context(model), seed=seed)
    else:
        from reinforge.exports.generate_policy import GeneratePolicy

        if artifact.is_file():  # converted as `policy.model: FILE.gguf` is
            from reinforge.exports.gguf.convert import convert
            from reinforge.exports.gguf.source import read_gguf

            convert(artifact, read_gguf(artifact, "--judge"), scratch, tokenizer=True)
        folder = scratch if artifact.is_file() else artifact
        server = GeneratePolicy(folder, device=device, dtype=model.dtype, history=model.history, seed=seed)
    try:
        yield server
    finally:
        server.close()


def find_context(model: TrainedModel) -> int:
    from reinforge.engine.model.model_files import CONFIG, read_json

    limits = [model.policy.get("max_model_len") or DEFAULT_CONTEXT]
    held = (read_json(model.folder / CONFIG) or {}).get("max_position_embeddings")
    return int(min([*limits, held] if held else limits))
