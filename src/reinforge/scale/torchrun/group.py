"""The processes of torchrun as one engine, of which this process, the first, is one."""

from __future__ import annotations

import asyncio
import atexit
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from multiprocessing.connection import Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reinforge.config.policy import PolicyConfig
from reinforge.errors import BackendUnavailable, EngineError
from reinforge.scale.engine_group import EngineGroup, EngineRouter, RoutedPolicy, require_equal
from reinforge.scale.engine_worker import EngineWorker, PeerSettings
from reinforge.scale.project_losses import find_module
from reinforge.scale.torchrun.calls import WorkerClient, WorkerLoop
from reinforge.scale.torchrun.place import ENDED, SharedStore, TorchrunPlace, announce, choose_gpu, open_own_store
from reinforge.types.sample import Sharding

if TYPE_CHECKING:
    from reinforge.engine.model_description import ModelDescription
    from reinforge.engine.request_codec import RequestCodec

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
PEER_FAILED = "PeerFailed"  # name of the error of a process that only failed because another did
GRACE_S = 30.0
"""How long processes may take to answer once one of them has lost another: each waits as long in its exchange."""
RESUME = "resume the run with --resume"


class TorchrunWorkers:
    """The other processes of torchrun, which wait until this one needs them; there is one in a process."""

    def __init__(self, place: TorchrunPlace):
        self.place = place
        self._store: SharedStore | None = None
        self._count = 0
        atexit.register(self.end)

    def connect(self) -> list[WorkerClient]:
        self._store = self._store or open_own_store(self.place)
        folder = Path(tempfile.mkdtemp(prefix="reinforge-"))  # which only this user can open
        try:
            with Listener(str(folder / "socket"), "AF_UNIX", backlog=self.place.size) as listener:
                announce(self._store, self._count, str(folder / "socket"))
                self._count += 1
                connections = [listener.accept() for _ in range(self.place.size - 1)]
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        by_rank = {connection.recv(): connection for connection in connections}
        return [WorkerClient(by_rank[rank], f"process {rank} of torchrun") for rank in sorted(by_rank)]

    def end(self) -> None:
        """Tells the others that there is no more work for them; called when a command is done, or else at exit."""
        atexit.unregister(self.end)
        try:
            self._store = self._store or open_own_store(self.place)
            announce(self._store, self._count, ENDED)
        except (BackendUnavailable, RuntimeError):  # torchrun is gone, and ends them itself
            return


_WORKERS: dict[TorchrunPlace, TorchrunWorkers] = {}


def find_workers(place: TorchrunPlace) -> TorchrunWorkers:
    """Returns the other processes, which the first one tells where to connect, one run after the other."""
    if place not in _WORKERS:
        _WORKERS[place] = TorchrunWorkers(place)
    return _WORKERS[place]


class TorchrunGroup(EngineGroup):
    """One engine in each process of torchrun, all with the same weights.

    torchrun kills all processes when one dies; the run can be resumed then.
    """

    def __init__(self, worker: EngineWorker, own: WorkerLoop, others: list[WorkerClient]):
        super().__init__()
        self._worker, self._own, self._others = worker, own, others
        self._actors: list[WorkerLoop | WorkerClient] = [own, *others]
        self._router = EngineRouter(range(len(self._actors)))
        self._sharding: Sharding = "replicate"
        self._has_lost_shards = False
        self.policies: dict[str, RoutedPolicy] = {}

    @classmethod
    def load(
        cls, workers: TorchrunWorkers, peers: PeerSettings, policy: PolicyConfig, *, device: str, **settings: Any
    ) -> TorchrunGroup:
        choose_gpu(workers.place, device)
        worker = EngineWorker(0)
        group = cls(worker, WorkerLoop(worker), workers.connect())
        try:
            arguments = policy, {"device": device, "peers": peers, **settings}
            descriptions = group._collect([actor.load.remote(*arguments) for actor in group._actors])
            group.policies = {name: RoutedPolicy(group, name, each) for name, each in descriptions[0].items()}
            group._connect()
            for name in group.policies:
                group.compare_fingerprints(name)
        except BaseException:
            group.close()
            raise
        logger.info("%d processes of torchrun train together; sharding: %s", len(group._actors), group.sharding)
        return group

    def _connect(self) -> None:
        port = self._collect([self._own.listen.remote(LOOPBACK)])[0]
        count = len(self._actors)
        calls = [actor.join.remote(rank, count, (LOOPBACK, port)) for rank, actor in enumerate(self._actors)]
        self._sharding = self._collect(calls)[0]

    @property
    def sharding(self) -> Sharding:
        return self._sharding

    @property
    def policy(self) -> RoutedPolicy:
        return next(iter(self.policies.values()))

    @property
    def tokenizer(self) -> Any:
        return self._worker.engine.tokenizer

    @property
    def model(self) -> Any:
        return self._worker.engine.model

    def _collect(self, calls: list[Future[Any]]) -> list[Any]:
        """Waits for all calls and returns their results; the error that explains the others comes first."""
        errors = [error for call in _wait_for(calls) if (error := call.exception()) is not None]
        if errors:
            lost = [each for each in errors if isinstance(each, BackendUnavailable)]
            causes = [each for each in errors if type(each).__name__ != PEER_FAILED]
            raise next(iter((*lost, *causes, *errors)))
        return [call.result() for call in calls]

    def call_all(self, method: str, *arguments: Any) -> dict[str, Any]:
        results = self._collect([getattr(actor, method).remote(*arguments) for actor in self._actors])
        return {f"process {rank}": result for rank, result in enumerate(results)}

    async def ask(self, key: str, call: Callable[[Any], Any]) -> Any:
        number = self._router.acquire(key)
        assert number is not None  # none is ever taken out
        try:
            return await asyncio.wrap_future(call(self._actors[number]))
        finally:
            self._router.release(number)

    def publish(self, name: str, version: int) -> None:
        self._router.forget()
        self.call_connected("publish", name, version)

    def begin_job(self, *adapters: str) -> None:
        """Closes admission everywhere and waits until no reply is in flight."""
        if self._has_lost_shards:
            raise BackendUnavailable(
                "the processes of torchrun lost their connections during a step, and with them the parts of the model "
                f"that they hold (sharding: full); {RESUME}, from the last checkpoint"
            )
        self.call_connected("call", "begin_job", *adapters)

    def end_job(self) -> None:
        self.call_connected("call", "end_job")

    def rollback(self) -> None:
        """Restores the weights from before `begin_job` everywhere; without connection, divided ones are lost."""
        try:
            self.call_connected("undo")
        except EngineError as error:
            if self.sharding != "full":
                raise
            logger.warning("the job cannot be undone: %s", error)
            self._has_lost_shards = True

    def update(self, samples: Any, loss: Any, **settings: Any) -> Any:
        if (module := find_module(loss)) is not None:
            self.call_connected("import_losses", module, list(sys.path))
        return super().update(samples, loss, **settings)

    def compare_fingerprints(self, name: str) -> str:
        found = self.call_connected("call", "fingerprint", name)
        require_equal(found)
        return str(next(iter(found.values())))

    def write(self, folder: Path, version: int, adapter: str | None = None, *, with_training: bool = True) -> None:
        """Writes a checkpoint's files; where the model is sharded, each process writes its part."""
        self._write("write", version, adapter, folder, with_training)

    def _write(self, method: str, *arguments: Any) -> None:
        actors = self._actors if self.sharding == "full" else [self._own]
        with self.turns:
            self._collect([getattr(actor, method).remote(*arguments) for actor in actors])

    # For other programs that sample.

    def describe_model(self) -> ModelDescription:
        return self._worker.engine.describe_model()

    def get_codec(self, name: str) -> RequestCodec:
        return self._worker.engine.get_codec(name)

    def write_base(self, folder: Path) -> None:
        self._write("write_base", folder)

    def load_weights(self, folder: str | Path, adapter: str | None = None) -> None:
        self.call_connected("load_weights", Path(folder).absolute(), {}, adapter)
        self.compare_fingerprints(adapter or self.policy.name)

    @property
    def missing_reference(self) -> int | None:
        return self._worker.engine.missing_reference

    def load_reference(self, folder: str | Path, version: int) -> None:
        self.call_connected("load_reference", Path(folder).absolute(), {}, version)

    def close(self) -> None:
        """Releases the model everywhere; the other processes wait for the next one."""
        for actor in self._others:
            actor.close()
        self._own.close()
        self._worker.close()


def _wait_for(calls: list[Future[Any]]) -> list[Future[Any]]:
    """Returns the calls that have ended: all, or those that had when one had failed long before.

    A process that fails may leave the others in the middle of an exchange.
    """
    waiting, deadline = set(calls), None
    while waiting:
        timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        done, waiting = wait(waiting, timeout_s, FIRST_COMPLETED)
        if not done:
            ended = [call for call in calls if call not in waiting]
            if any(type(call.exception()).__name__ not in (PEER_FAILED, "NoneType") for call in ended):
                return ended
            ranks = ", ".join(str(rank) for rank, call in enumerate(calls) if call in waiting)
            raise BackendUnavailable(f"process {ranks} of torchrun does not respond; {RESUME}")
        if deadline is None and any(call.exception() is not None for call in done):
            deadline = time.monotonic() + GRACE_S
    return calls
