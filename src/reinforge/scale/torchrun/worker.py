"""What the processes of torchrun do except the first: they wait for it, and hold one of its engines while it trains."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Client
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

from reinforge.scale.engine_worker import EngineWorker, PeerSettings
from reinforge.scale.torchrun.calls import CallServer, WorkerLoop
from reinforge.scale.torchrun.group import TorchrunGroup, find_workers
from reinforge.scale.torchrun.place import (
    ENDED,
    TorchrunPlace,
    check_socket,
    check_torchrun,
    choose_gpu,
    find_place,
    open_own_store,
    wait_for_announcement,
)
from reinforge.types.sample import Sharding

if TYPE_CHECKING:
    from reinforge.engine import Engine

STOPS = (signal.SIGINT, signal.SIGTERM)


class TorchrunWorker(EngineWorker):
    """An engine on the GPU of its rank."""

    def __init__(self, place: TorchrunPlace):
        super().__init__(place.rank)
        self._place = place

    async def load(self, policy: Any, settings: Any) -> Any:
        choose_gpu(self._place, settings["device"])
        return await super().load(policy, settings)


class PatientStop:
    """Signals that kill this process only when it has no engine: the first process still saves what it needs."""

    def __init__(self) -> None:
        self._received: int | None = None
        self._is_busy = False
        for each in STOPS:
            signal.signal(each, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        if not self._is_busy:
            self._leave()

    def _leave(self) -> None:
        if self._received is not None:
            raise SystemExit(128 + self._received)

    def __enter__(self) -> None:
        self._is_busy = True

    def __exit__(self, *_: object) -> None:
        self._is_busy = False
        self._leave()


class Torchrun:
    """The processes of torchrun, as a `PeerLauncher` of the embedded engine."""

    check = staticmethod(check_torchrun)

    def __init__(self, place: TorchrunPlace):
        self._place = place

    def load_engine(self, sharding: Sharding, peer_timeout_s: float, *arguments: Any, **settings: Any) -> Engine:
        peers = PeerSettings(sharding, peer_timeout_s)
        return cast("Engine", TorchrunGroup.load(find_workers(self._place), peers, *arguments, **settings))

    def get_first_process_server(self) -> Callable[[], None] | None:
        """Returns what this process runs to serve the first one, which it does not outlive; None: it is the first."""
        if self._place.rank:
            return partial(serve_first_process, self._place)
        find_workers(self._place)
        return None

    def close(self) -> None:
        if self._place.rank == 0:
            find_workers(self._place).end()


def find_torchrun() -> Torchrun | None:
    """Returns the processes of torchrun; None: it has started this one alone."""
    place = find_place()
    return None if place is None else Torchrun(place)


def serve_first_process(place: TorchrunPlace) -> None:
    """Holds an engine whenever the first process asks for one; returns when that has ended."""
    stop, number = PatientStop(), 0
    store = open_own_store(place)
    while (message := wait_for_announcement(store, number)) != ENDED:
        number += 1
        with stop:
            _hold_engine(place, Path(message))


def _hold_engine(place: TorchrunPlace, path: Path) -> None:
    check_socket(path)
    worker = TorchrunWorker(place)
    calls = WorkerLoop(worker)
    with Client(str(path), "AF_UNIX") as connection:
        connection.send(place.rank)
        CallServer(connection, calls).serve()
    calls.close()
    worker.close()
