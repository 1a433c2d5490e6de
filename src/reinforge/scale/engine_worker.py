"""One worker: an engine in a separate process, which Ray starts and watches."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import os
import platform
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reinforge.engine import import_engine
from reinforge.errors import EngineError
from reinforge.scale.project_losses import import_module, unpack_loss
from reinforge.types.request import Message, ModelReply, ModelRequest, TokenLogprobs
from reinforge.types.sample import FloatArray, LossSpec, Needs, Sharding, TrainingSample, UpdateReport
from reinforge.version import __version__

if TYPE_CHECKING:
    from reinforge.config.policy import PolicyConfig
    from reinforge.engine import Engine


@dataclass(frozen=True, slots=True)
class PolicyDescription:
    """What never changes about a worker's policy; attributes are those of `PolicyServer`."""

    model_name: str
    chat_template: str | None
    history: str
    tolerance: float
    max_model_len: int


@dataclass(frozen=True, slots=True)
class PeerSettings:
    sharding: Sharding = "replicate"
    peer_timeout_s: float = 600.0  # how long one waits for the others in one exchange


@dataclass(slots=True)
class Scores:
    old_logprobs: FloatArray | None
    ref_logprobs: FloatArray | None
    values: FloatArray | None
    mismatched_ref_logprobs: FloatArray | None


class EngineWorker:
    """Holds one engine; its methods are called by Ray, as an actor with an event loop."""

    def __init__(self, number: int):
        self.number = number
        self.rank, self.size = 0, 1
        self._engine: Engine | None = None
        self._listener: socket.socket | None = None
        self._peers: Any = None
        self._peer_settings = PeerSettings()

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise EngineError(f"worker {self.number} has no engine yet")
        return self._engine

    async def load(self, policy: PolicyConfig, settings: Mapping[str, Any]) -> dict[str, PolicyDescription]:
        """Loads the model and returns a description of each policy, by name."""
        settings = dict(settings)
        self._peer_settings = settings.pop("peers", self._peer_settings)
        engine_class = import_engine()
        settings |= {"replica": self.number, "divides": self._peer_settings.sharding == "full"}
        self._engine = await asyncio.to_thread(engine_class.load, policy, **settings)
        return {
            name: PolicyDescription(
                each.model_name, each.chat_template, each.history, each.tolerance, each.max_model_len
            )
            for name, each in self._engine.policies.items()
        }

    async def describe_process(self) -> tuple[str, int, str, dict[str, str]]:
        """Returns the node, the process id, the address at which other workers reach it, and what it computes with."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return node, os.getpid(), ray.util.get_node_ip_address(), list_versions()

    async def ping(self) -> None:
        """Returns at once, even while the engine computes."""

    async def sample(self, name: str, request: ModelRequest) -> ModelReply:
        return replace(await self.engine.policies[name].sample(request), worker=f"worker {self.number}")

    async def score_tokens(self, name: str, token_ids: Sequence[Sequence[int]]) -> list[FloatArray]:
        return await self.engine.policies[name].score(token_ids)

    async def encode(self, name: str, request: ModelRequest, reply: Message) -> TokenLogprobs:
        return await self.engine.policies[name].encode(request, reply)

    async def publish(self, name: str, version: int) -> None:
        await self.engine.policies[name].publish(version)

    # Training; every worker gets the same calls in the same order.

    async def listen(self, host: str) -> int:
        """Returns the port at which this worker waits for the others."""
        from reinforge.engine.training.data_parallel import listen

        self._listener = listen(host)
        return int(self._listener.getsockname()[1])

    async def join(self, rank: int, size: int, address: tuple[str, int]) -> Sharding:
        """Shares every optimizer step from now on with `size - 1` others; with none, it trains alone."""
        from reinforge.engine.training.data_parallel import DataParallel

        if self._peers is not None:
            self._peers.close()
            self._peers = None
        self.rank, self.size = rank, size
        listener, self._listener = self._listener, None
        if listener is not None and (rank > 0 or size == 1):  # no other process will connect to it
            listener.close()
            listener = None
        if size > 1:
            self._peers = await asyncio.to_thread(
                DataParallel,
                rank,
                size,
                address,
                listener,
                device_type=self.engine.device.type,
                timeout_s=self._peer_settings.peer_timeout_s,
            )
        return await asyncio.to_thread(self._share_steps)

    def _share_steps(self) -> Sharding:
        if self._peers is None:
            return self.engine.join_peers(None)
        hosts = [each["host"] for each in self._peers.collect({"host": platform.node()})]
        return self.engine.join_peers(self._peers, self._peer_settings.sharding, hosts.count(platform.node()))

    async def call(self, method: str, *arguments: Any, **settings: Any) -> Any:
        return await asyncio.to_thread(getattr(self.engine, method), *arguments, **settings)

    async def import_losses(self, module: str, search_path: Sequence[str]) -> None:
        await asyncio.to_thread(import_module, module, search_path)

    async def undo(self) -> None:
        """Restores the weights from before a job that has begun; nothing happens if none has."""
        if self.engine.has_job:
            await asyncio.to_thread(self.engine.rollback)

    async def score(self, samples: Sequence[TrainingSample], needs: Needs, adapter: str | None) -> dict[int, Scores]:
        """Scores this worker's share of the samples, by index; nothing is deferred, since shares differ by step."""
        share, own = self._choose_share(samples)
        await asyncio.to_thread(self.engine.score, own, needs, adapter)
        return {
            index: Scores(
                sample.old_logprobs,
                sample.ref_logprobs,
                sample.values,
                None if sample.mismatched is None else sample.mismatched.ref_logprobs,
            )
            for index, sample in zip(share, own, strict=True)
        }

    async def logprobs(self, samples: Sequence[TrainingSample], adapter: str | None) -> dict[int, FloatArray]:
        share, own = self._choose_share(samples)
        rows = await asyncio.to_thread(self.engine.logprobs, own, adapter)
        return dict(zip(share, rows, strict=True))

    def _choose_share(self, samples: Sequence[TrainingSample]) -> tuple[list[int], list[TrainingSample]]:
        from reinforge.engine.training.data_parallel import divide_samples

        share = divide_samples(samples, self.size)[self.rank]
        return share, [samples[index] for index in share]

    async def update(
        self,
        samples: Sequence[TrainingSample],
        loss: LossSpec,
        settings: Mapping[str, Any],
        packed_loss: bytes | None = None,
    ) -> tuple[UpdateReport, str]:
        """Trains on the samples together with the others; returns the report and the fingerprint of the weights."""
        loss = unpack_loss(loss, packed_loss)
        report = await asyncio.to_thread(self.engine.update, samples, loss, **settings)
        return report, await asyncio.to_thread(self.engine.fingerprint, settings.get("adapter"))

    # Checkpoints, of which nodes without the run folder get the files.

    async def write(
        self, version: int, adapter: str | None, folder: Path | None, with_training: bool = True
    ) -> dict[str, bytes]:
        """Writes a checkpoint into the folder; or, without one, returns its files."""
        return await self._write(folder, lambda place: self.engine.write(place, version, adapter, with_training))

    async def write_base(self, folder: Path | None) -> dict[str, bytes]:
        return await self._write(folder, self.engine.write_base)

    async def _write(self, folder: Path | None, write: Callable[[Path], None]) -> dict[str, bytes]:
        if folder is not None:
            await asyncio.to_thread(write, folder)
            return {}
        with tempfile.TemporaryDirectory() as name:
            place = Path(name) / "checkpoint"
            place.mkdir()
            await asyncio.to_thread(write, place)
            return read_files(place)

    async def load_weights(self, folder: Path | None, files: Mapping[str, bytes], adapter: str | None) -> None:
        await self._use_checkpoint(folder, files, lambda place: self.engine.load_weights(place, adapter))

    async def load_reference(self, folder: Path | None, files: Mapping[str, bytes], version: int) -> None:
        await self._use_checkpoint(folder, files, lambda place: self.engine.load_reference(place, version))

    async def _use_checkpoint(self, folder: Path | None, files: Mapping[str, bytes], use: Any) -> None:
        if folder is not None:
            await asyncio.to_thread(use, folder)
            return
        with tempfile.TemporaryDirectory() as name:
            write_files(Path(name), files)
            await asyncio.to_thread(use, Path(name))

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        if self._peers is not None:
            self._peers.close()

    async def missing_reference(self) -> int | None:
        return self.engine.missing_reference


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


LIBRARIES = ("torch", "transformers", "peft", "tokenizers", "safetensors", "numpy")
CODE = ("engine", "types")
"""Packages of reinforge that a worker computes with; two checkouts may have one version and differ there, and so would
the weights that they make."""


def list_versions() -> dict[str, str]:
    versions = {"reinforge": __version__}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {**versions, "code of reinforge": _hash_code()}


def find_differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """Returns what differs between two machines; builds of one version, such as for a CPU and a GPU, may differ.

    Example: {"torch": "2.13.0+cpu"}, {"torch": "2.12.0+cu130"} -> ["torch 2.12.0+cu130 instead of 2.13.0+cpu"]
    """
    return [
        f"{name} {there.get(name, 'not installed')} instead of {version}"
        for name, version in here.items()
        if there.get(name, "").partition("+")[0] != version.partition("+")[0]
    ]


@cache
def _hash_code() -> str:
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(path for name in CODE for path in (root / name).rglob("*.py")):
        digest.update(f"{file.relative_to(root).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
