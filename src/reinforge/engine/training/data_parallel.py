"""Several processes that make the same optimizer steps, each on its share of the samples.

    families of a step   a a a a   b b   c c   =>   process 0: a a a a,  process 1: b b c c
    gradients            sum over the processes, then each makes the same step

The loss is normalized by the whole step, so a sum of gradients is what one process would have computed. Tensors on a
GPU travel from GPU to GPU by NCCL, all others by gloo.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed
from torch.distributed import PrefixStore, Store, TCPStore

from reinforge.engine.training.collate import get_prefix, group_pairs
from reinforge.engine.training.micro_batch_loss import MetricSums
from reinforge.errors import BackendUnavailable, EngineError
from reinforge.types.sample import TrainingSample

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LOOPBACK = "127.0.0.1"
DEFAULT_TIMEOUT_S = 600.0
"""How long a process waits for the others in one exchange. One that dies closes its connections, which ends the wait at
once; this limit is for a machine that vanishes without a word, and must be longer than the slowest share of a step."""
CONNECTION_TIMEOUT = timedelta(minutes=10)  # how long a process waits until all others have started
SETTLING_S = 0.2
"""What a process waits before it exits. A thread of gloo drops the tensors of the last exchange a moment after it, and
aborts the process if it needs Python's lock for that while the interpreter ends (pytorch/pytorch#179291)."""
TIMED_OUT = "imed out"
LOST_CONNECTION = (TIMED_OUT, "gloo", "Connection", "connection", "NCCL")  # parts of the messages of gloo and NCCL


class PeerFailed(EngineError):
    """Another process failed in a step that it shares with this one; its own error says why."""


def listen(host: str) -> socket.socket:
    """Returns a socket of the first process, at whose address the others meet; it listens on that address only."""
    return socket.create_server((host, 0))


class DataParallel:
    """This process among those that train together, connected by `torch.distributed`.

    Only one may exist in a process.

    Args:
        address: Host and port at which the first process listens.
        listener: The socket of the first process; None in the others.
        device_type: Device of the gradients: `cuda` exchanges them by NCCL.
    """

    is_broken = False  # True after a failure among exchanges; there are none any more

    def __init__(
        self,
        rank: int,
        size: int,
        address: tuple[str, int],
        listener: socket.socket | None = None,
        *,
        device_type: str = "cpu",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ):
        self.rank, self.size, self.device_type, self.timeout_s = rank, size, device_type, timeout_s
        atexit.unregister(_settle)  # once, however often the processes reconnect
        atexit.register(_settle)
        host, port = address
        wait = timedelta(seconds=timeout_s)
        if host == LOOPBACK and sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # by default it listens where the host's name leads
        try:
            self._store = distributed.TCPStore(
                host,
                port,
                size,
                is_master=listener is not None,
                timeout=CONNECTION_TIMEOUT,
                wait_for_workers=False,
                master_listen_fd=None if listener is None else listener.detach(),
            )
            self._store.set(f"here-{rank}", "")
            self._store.wait([f"here-{each}" for each in range(size)])  # from now on only the exchanges take time
            backend = choose_backend(device_type)
            distributed.init_process_group(backend, store=self._store, rank=rank, world_size=size, timeout=wait)
        except RuntimeError as error:
            raise EngineError(f"process {rank} of {size} cannot reach the others at {host}:{port}: {error}") from error

    def choose_share(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Returns the samples that this process computes, perhaps none."""
        return [samples[i] for i in divide_samples(samples, self.size)[self.rank]]

    @property
    def mesh(self) -> DeviceMesh:
        """All processes as the mesh over which `fully_shard` divides a model."""
        from torch.distributed.device_mesh import DeviceMesh

        assert distributed.group.WORLD is not None  # until `close`
        return DeviceMesh.from_group(distributed.group.WORLD, self.device_type)

    def add(self, numbers: Tensor) -> None:
        """Replaces a tensor by its sum over all processes, which is bit by bit the same in each."""
        sent = numbers if numbers.device.type == self.device_type else numbers.cpu()
        self._exchange(lambda: distributed.all_reduce(sent))
        if sent is not numbers:
            numbers.copy_(sent)

    def gather(self, numbers: Tensor) -> list[Tensor]:
        """Returns the tensors of all processes, in order; they have one shape and are on the device of the model."""
        rows = [torch.empty_like(numbers) for _ in range(self.size)]
        self._exchange(lambda: distributed.all_gather(rows, numbers.contiguous()))
        return rows

    def collect(self, value: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the values of all processes, in order, which are plain data.

        Raises:
            PeerFailed: Another process failed before its turn.
        """
        return self._require_all(self._gather(dict(value)))

    def combine(self, sums: MetricSums | None) -> MetricSums | None:
        """Returns the sums over all processes; None if any has none, because a number is not finite."""
        parts = self.collect({} if sums is None else asdict(sums))
        if not all(parts):
            return None
        total = MetricSums()
        for part in parts:
            total.merge(MetricSums(**part))
        return total

    def _require_all(self, parts: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
        if failed := [str(rank) for rank, part in enumerate(parts) if part is None]:
            raise PeerFailed(f"process {', '.join(failed)} of {self.size} failed in this step")
        return [part for part in parts if part is not None]

    @contextmanager
    def report_failure(self) -> Iterator[None]:
        """Tells the others if this process fails before `collect` or `combine`, since they would wait for it."""
        try:
            yield
        except PeerFailed:  # which the others are told by the one that failed
            raise
        except BaseException:
            with suppress(PeerFailed):  # the first error is the one that explains
                self._gather(None)
            raise

    @contextmanager
    def break_on_failure(self) -> Iterator[None]:
        """Refuses every further exchange if this process fails among some whose number only the others know.

        What it sent next would be taken for something else there. The others wait until they are ended, or until their
        time is up.
        """
        try:
            yield
        except PeerFailed:
            self.is_broken = True
            raise
        except BaseException as cause:
            self.is_broken = True
            if isinstance(cause, RuntimeError) and any(text in str(cause) for text in LOST_CONNECTION):
                raise self._explain(cause) from cause
            raise

    def close(self) -> None:
        distributed.destroy_process_group()

    def _gather(self, value: object) -> list[dict[str, Any] | None]:
        """Returns the value of every process, in order; as JSON, since nothing here may run what arrives."""
        text = json.dumps(value).encode()
        length = torch.tensor([len(text)])
        self._exchange(lambda: distributed.all_reduce(length, op=distributed.ReduceOp.MAX))
        own = torch.frombuffer(bytearray(text.ljust(int(length))), dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        self._exchange(lambda: distributed.all_gather(rows, own))
        return [json.loads(row.numpy().tobytes()) for row in rows]

    def _exchange(self, call: Callable[[], object]) -> None:
        if self.is_broken:
            raise PeerFailed("the processes lost their connections during a step")
        try:
            call()
        except RuntimeError as error:
            raise self._explain(error) from error

    def _explain(self, error: BaseException) -> PeerFailed:
        if TIMED_OUT in str(error):
            return PeerFailed(
                f"another process did not respond for {self.timeout_s:g} s, so it is considered dead (if it was only "
                "slow, raise peer_timeout_s of the trainer adapter)"
            )
        return PeerFailed(f"another process is gone: {error}")


def choose_backend(device_type: str) -> str:
    """Returns how torch connects the processes: gloo for what is on a CPU, NCCL for what is on a GPU."""
    if device_type != "cuda":
        return "gloo"
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a lost process is an error here, not the end of this one
    return "cpu:gloo,cuda:nccl"


def divide_samples(samples: Sequence[TrainingSample], count: int) -> list[list[int]]:
    """Returns the indices of the samples that each of `count` processes computes, with about equal tokens.

    Samples that share their prefix stay together, which is computed once; so do the two samples of a pair. The families
    are dealt out from the largest on, each to the process with the fewest tokens.

    Example: families of 10, 6, 5 and 2 tokens for two processes -> 10 + 2 and 6 + 5
    """
    families: dict[tuple[object, ...], list[int]] = {}
    for number, unit in enumerate(group_pairs(samples)):
        prefixes = {get_prefix(samples[i]) for i in unit}
        key: tuple[object, ...] = ("family", *prefixes) if len(prefixes) == 1 else ("pair", number)
        families.setdefault(key, []).extend(unit)
    costs = [(_count_tokens(samples, members), members) for members in families.values()]
    shares: list[list[int]] = [[] for _ in range(count)]
    totals = [0] * count
    for cost, members in sorted(costs, key=lambda each: (-each[0], each[1])):
        least = totals.index(min(totals))
        shares[least] += members
        totals[least] += cost
    return [sorted(share) for share in shares]


def _count_tokens(samples: Sequence[TrainingSample], members: Sequence[int]) -> int:
    lengths = sum(len(samples[i]) for i in members)
    prefixes = {get_prefix(samples[i]) for i in members}
    return lengths - (len(members) - 1) * len(prefixes.pop()) if len(prefixes) == 1 else lengths


TIMEOUT = timedelta(minutes=5)


def open_store(address: tuple[str, int], prefix: str) -> Store:
    """Returns the store at an address, with keys of our own."""
    host, port = address
    try:
        return PrefixStore(prefix, TCPStore(host, port, is_master=False, timeout=TIMEOUT))
    except RuntimeError as error:
        raise BackendUnavailable(f"torchrun's store at {host}:{port} cannot be reached: {error}") from error


def _settle() -> None:
    time.sleep(SETTLING_S)
