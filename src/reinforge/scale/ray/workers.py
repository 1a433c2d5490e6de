"""All workers as one engine: the calls that a training job makes of `Engine`, made of every worker at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from reinforge.config.policy import PolicyConfig
from reinforge.errors import BackendError, BackendUnavailable
from reinforge.files import find_damage
from reinforge.scale.engine_group import EngineGroup, RoutedPolicy, require_equal
from reinforge.scale.engine_worker import read_files, write_files
from reinforge.scale.project_losses import pack_loss
from reinforge.scale.ray.cluster import count_places, describe_room
from reinforge.scale.ray.members import GroupSize, Members, WeightsLost, WorkerLost
from reinforge.scale.ray.recruits import Newcomer, Recruiter, WorkerHandle, WorkerPlan, find_cause
from reinforge.types.sample import LossSpec, Sharding

if TYPE_CHECKING:
    from reinforge.engine.model_description import ModelDescription
    from reinforge.engine.request_codec import RequestCodec

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3  # workers that may die while they sample one reply: perhaps it is the reply that kills them
PLACEMENT_TIMEOUT_S = 120.0


class WorkerGroup(EngineGroup):
    """Engines in Ray actors that hold the same weights. Calls block, like those of `Engine`, except the policies'.

    A worker that dies is replaced: the new one loads the model while the others keep running, and joins at the next
    job, with the weights and the optimizer state of another one.
    """

    def __init__(self, recruiter: Recruiter, size: GroupSize, descriptions: Mapping[str, Any], config: PolicyConfig):
        super().__init__()
        self._config = config
        self._tokenizer: Any = None
        self._published: dict[str, tuple[int, str]] = {}
        self._ended: dict[str, int] = {}  # versions of jobs that have ended and are not published yet
        self.checkpoints: Path | None = None  # of the run, for a replacement when no worker is left
        self.members = Members(recruiter, size, self._bring_up_to_date)
        self.policies = {name: RoutedPolicy(self, name, each) for name, each in descriptions.items()}
        self.policy = next(iter(self.policies.values()))

    @classmethod
    def load(
        cls,
        policy: PolicyConfig,
        *,
        num_workers: int,
        min_workers: int,
        resources: Mapping[str, float],
        placement_timeout_s: float = PLACEMENT_TIMEOUT_S,
        **settings: Any,
    ) -> WorkerGroup:
        """Starts the workers and loads the model in each.

        Those for which there is no room yet take part from the first job on that begins after they have started.
        """
        size = GroupSize(num_workers, min_workers, placement_timeout_s)
        recruiter = Recruiter(WorkerPlan(policy, settings, resources))
        try:
            newcomers = _start_workers(recruiter, size, resources)
        except BaseException:
            recruiter.close()
            raise
        group = cls(recruiter, size, newcomers[0].policies, policy)
        try:
            group.members.add(each.worker for each in newcomers)
            group.members.connect()
            for name in group.policies:
                group.compare_fingerprints(name)
        except BaseException:
            group.close()
            raise
        return group

    @property
    def workers(self) -> list[WorkerHandle]:
        return self.members.workers

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            from reinforge.engine.model.loading import load_tokenizer

            self._tokenizer = load_tokenizer(self._config)
        return self._tokenizer

    def recover(self) -> None:
        """Undoes an open job, and connects the workers that are left or came back, however many die meanwhile."""
        while True:
            try:
                self.rollback()
                self.members.fill_up()
                self.members.connect()
            except WorkerLost:
                continue
            return

    def _bring_up_to_date(self, worker: WorkerHandle) -> None:
        """Gives a new worker the weights, the optimizer state and the versions of the others.

        They come from another worker; if none is left, from the checkpoint of the current version.
        """
        for name, policy in self.policies.items():
            version = max(policy.version, self._ended.get(name, 0))
            expected = self._send_weights(worker, name, version)
            ray.get(worker.actor.publish.remote(name, version))
            found = ray.get(worker.actor.call.remote("fingerprint", name))
            if expected is not None:
                require_equal({"the others": expected, str(worker): found})

    def _send_weights(self, worker: WorkerHandle, name: str, version: int) -> str | None:
        """Loads the current weights into a new worker; returns the fingerprint that it must have, if it is known."""
        peer = next(iter(self.workers), None)
        if peer is not None:
            files = peer.actor.write.remote(version, name, None)  # goes from there to the new worker, not through here
            ray.get(worker.actor.load_weights.remote(None, files, name))
            self._send_reference(worker)
            return str(ray.get(peer.actor.call.remote("fingerprint", name)))
        known_version, known = self._published.get(name, (None, None))
        folder = self._find_checkpoint(version)
        if folder is not None:
            place = folder / name if len(self.policies) > 1 else folder
            self._send_files(worker, place, lambda *where: worker.actor.load_weights.remote(*where, name))
            self._send_reference(worker)
        elif version != 0:  # which is what it has loaded
            raise WeightsLost(
                f"all workers have died, and the weights of version {version} are in no checkpoint yet; resume the "
                "run with --resume"
            )
        return known if known_version == version else None

    def _send_reference(self, worker: WorkerHandle) -> None:
        """Loads the reference of the current stage, which no worker can send, from its checkpoint."""
        version: int | None = ray.get(worker.actor.missing_reference.remote())
        if version is None:
            return
        folder = self._find_checkpoint(version)
        if folder is None:
            raise BackendError(f"the reference of the stage, version {version}, is in no checkpoint")
        self._send_files(worker, folder, lambda *where: worker.actor.load_reference.remote(*where, version))

    def _send_files(self, worker: WorkerHandle, folder: Path, call: Callable[..., Any]) -> None:
        ray.get(call(_local(worker, folder), {} if worker.is_near else read_files(folder)))

    def _find_checkpoint(self, version: int) -> Path | None:
        found = [] if self.checkpoints is None else sorted(self.checkpoints.glob(f"*-{version:06d}"))
        return next((each for each in found if find_damage(each) is None), None)

    async def ask(self, key: str, call: Callable[[Any], Any]) -> Any:
        """Returns the answer of the worker that a conversation belongs to; of another one, if that dies meanwhile."""
        num_lost = 0
        while num_lost < MAX_ATTEMPTS:
            number = self.members.router.acquire(key)
            if number is None:
                await asyncio.to_thread(self.members.fill_up, 1)
                continue
            worker = self.members.find(number)
            if worker is None:  # it died between the two lines
                continue
            answer = call(worker.actor)
            try:
                return await answer
            except asyncio.CancelledError:
                ray.cancel(answer)
                raise
            except ray.exceptions.RayTaskError as error:
                raise find_cause(error) from None
            except ray.exceptions.RayActorError:
                num_lost += 1
                self.members.lose(worker)
            finally:
                self.members.router.release(number)
        raise BackendUnavailable(f"{num_lost} workers died, one after the other, while they answered one request")

    def publish(self, name: str, version: int) -> None:
        self.members.router.forget()
        self._ended.pop(name, None)
        calls = [(each, each.actor.publish.remote(name, version)) for each in self.workers]
        self.members.collect(calls, strict=False)

    def begin_job(self, *adapters: str) -> None:
        """Closes admission everywhere and waits until no reply is in flight; replacements that are ready take part."""
        self.members.fill_up()
        if not self.members.is_connected:
            self.members.connect()
        self.call_connected("call", "begin_job", *adapters)

    def end_job(self) -> None:
        calls = [(each, each.actor.call.remote("end_job")) for each in self.members.list_connected(strict=False)]
        self.members.collect(calls, strict=False)
        self._ended = {name: each.version + 1 for name, each in self.policies.items()}

    def rollback(self) -> None:
        """Restores the weights from before `begin_job` everywhere, if no worker was lost that has a part of them."""
        if self.members.has_lost_shards:
            return
        if workers := self.workers:
            try:
                self.members.collect([(each, each.actor.undo.remote()) for each in workers], strict=False)
            except WorkerLost as loss:
                if self.members.sharding != "full":
                    raise
                logger.warning("the job cannot be undone, since %s", loss)
                self.members.lose_shards()

    @property
    def sharding(self) -> Sharding:
        return self.members.sharding

    def call_all(self, method: str, *arguments: Any) -> dict[str, Any]:
        workers = self.members.list_connected()
        results = self.members.collect([(each, getattr(each.actor, method).remote(*arguments)) for each in workers])
        return dict(zip(map(str, workers), results, strict=True))

    def share(self, value: Any) -> Any:
        return ray.put(value)

    def pack_loss(self, loss: LossSpec) -> bytes | None:
        return pack_loss(loss)

    def compare_fingerprints(self, name: str) -> str:
        self._require_worker()
        with self.turns:
            found = self._compare(name)
        self._published[name] = (self.policies[name].version, found)
        return found

    def _compare(self, name: str) -> str:
        calls = [(each, each.actor.call.remote("fingerprint", name)) for each in self.workers]
        if not calls:
            raise WorkerLost("all workers have died")
        found = self.members.collect(calls, strict=False)
        left = [str(each) for each, _ in calls if self.members.find(each.number) is not None]
        require_equal(dict(zip(left, found, strict=True)))
        return str(found[0])

    def _require_worker(self) -> None:
        if not self.workers:
            self.members.fill_up(1)

    def write(self, folder: Path, version: int, adapter: str | None = None, with_training: bool = True) -> None:
        """Writes a checkpoint's files, by the first worker; where the model is sharded, each writes its part."""
        self._write(folder, lambda actor, place: actor.write.remote(version, adapter, place, with_training))

    def _write(self, folder: Path, call: Callable[[Any, Path | None], Any]) -> None:
        while workers := self.workers:
            self.members.require_shards()
            writing = workers if self.sharding == "full" else workers[:1]
            try:
                with self.turns:
                    parts = self.members.collect([(each, call(each.actor, _local(each, folder))) for each in writing])
            except WorkerLost:
                continue
            for files in parts:
                write_files(folder, files)
            return
        raise BackendUnavailable("no worker is left that could write a checkpoint")

    # For other programs that sample, which know no worker.

    def describe_model(self) -> ModelDescription:
        found: ModelDescription = self._ask_first(lambda actor: actor.call.remote("describe_model"))
        return found

    def get_codec(self, name: str) -> RequestCodec:
        """Returns what renders the requests of an adapter and decodes its replies, in this process."""
        from reinforge.engine.model_description import make_codec  # imports torch, which only this needs here

        found = self.describe_model()
        sizes = {"max_model_len": found.max_model_len, "vocab_size": found.vocab_size}
        history = self.policies[name].history
        return make_codec(self.tokenizer, ends=found.ends, **sizes, history=history, adapter=name)

    def write_base(self, folder: Path) -> None:
        self._write(folder, lambda actor, place: actor.write_base.remote(place))

    def _ask_first(self, call: Callable[[Any], Any]) -> Any:
        self._require_worker()
        first = self.workers[0]
        return self.members.collect([(first, call(first.actor))])[0]

    def load_weights(self, folder: str | Path, adapter: str | None = None) -> None:
        self._load("load_weights", Path(folder), adapter)
        self._compare(adapter or self.policy.name)

    @property
    def missing_reference(self) -> int | None:
        """Version of the reference that the current stage needs and no worker has."""
        found: int | None = self._ask_first(lambda actor: actor.missing_reference.remote())
        return found

    def load_reference(self, folder: str | Path, version: int) -> None:
        self._load("load_reference", Path(folder), version)

    def _load(self, method: str, folder: Path, argument: Any) -> None:
        workers = self.workers
        files = ray.put({} if all(each.is_near for each in workers) else read_files(folder))
        calls = [(each, getattr(each.actor, method).remote(_local(each, folder), files, argument)) for each in workers]
        self.members.collect(calls, strict=False)

    def close(self) -> None:
        self.members.close()


def _start_workers(recruiter: Recruiter, size: GroupSize, resources: Mapping[str, float]) -> list[Newcomer]:
    recruiter.fill_up(size.num_workers)
    places = min(size.num_workers, count_places(resources))
    placed = recruiter.wait_for_places(places, size.placement_timeout_s)
    if placed < size.min_workers:
        raise BackendUnavailable(
            f"in {size.placement_timeout_s:g} s (placement_timeout_s) Ray has started {placed} of the workers, and "
            f"{size.min_workers} must run (min_workers): {describe_room()}; does another program use the rest?"
        )
    if placed < size.num_workers:
        text = "%d of %d workers start, since there is no room for more; the others join once there is: %s"
        logger.warning(text, placed, size.num_workers, describe_room())
    newcomers, errors = recruiter.take(wait=True)
    fatal = [each for each in errors if not isinstance(each, BackendUnavailable)]
    if fatal or (errors and len(newcomers) < size.min_workers):
        raise (fatal or errors)[0]
    for error in errors:  # a node that died, and that others can replace
        logger.warning("the run starts without a worker: %s", error)
    return newcomers


def _local(worker: WorkerHandle, folder: Path) -> Path | None:
    return folder.absolute() if worker.is_near else None
