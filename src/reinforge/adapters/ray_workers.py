"""All workers as one engine: the calls that a training job makes of `Engine`, made of every worker at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from reinforge.adapters.ray_policy import RoutedPolicy
from reinforge.adapters.ray_router import Router
from reinforge.adapters.ray_worker import EngineWorker, Scores, read_files, write_files
from reinforge.config.schema import PolicyConfig
from reinforge.errors import BackendError, BackendUnavailable, ReinforgeError
from reinforge.types.sample import FloatArray, LossSpec, Needs, TrainingSample, UpdateReport

logger = logging.getLogger(__name__)

MAX_CALLS = 16_384
"""Calls that may wait in one worker at a time: replies are requested one by one."""
LOOPBACK = "127.0.0.1"
PEER_FAILED = "PeerFailed"
"""Name of the error of a worker that only failed because another did."""


class WorkerLost(BackendUnavailable):
    """A worker ended during a job; the job can run again on the others."""


@dataclass(frozen=True, slots=True)
class WorkerHandle:
    """One worker, as the driver sees it.

    Attributes:
        number: Its number, from 0, which never changes.
        actor: The Ray actor.
        is_near: True if it is on the driver's node, and so reads and writes the run folder itself.
        pid: Its process.
        host: The address at which other workers reach it.
    """

    number: int
    actor: Any
    is_near: bool
    pid: int
    host: str


class WorkerGroup:
    """Engines in Ray actors that hold the same weights. Calls block, like those of `Engine`, except the policies'.

    Args:
        workers: The workers, whose engines are loaded.
        descriptions: What `EngineWorker.load` returned.
        policy: The policy's settings, for the tokenizer.
        min_workers: How many must be left.

    Attributes:
        policies: The policy of each adapter by name.
    """

    def __init__(
        self, workers: Sequence[WorkerHandle], descriptions: Mapping[str, Any], policy: PolicyConfig, min_workers: int
    ):
        self._workers = {worker.number: worker for worker in workers}
        self._config, self._min_workers = policy, min_workers
        self._members: tuple[int, ...] = ()
        self._tokenizer: Any = None
        self.router = Router(self._workers)
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
        **settings: Any,
    ) -> WorkerGroup:
        """Starts the workers and loads the model in each.

        Args:
            policy: The model and its training.
            num_workers: How many.
            min_workers: How many must be left while the run goes on.
            resources: What each needs, by Ray's names.
            settings: Further arguments of `Engine.load`.

        Raises:
            BackendUnavailable: A worker ended while it loaded.
            BackendError: They did not load the same weights.
        """
        rest = {name: value for name, value in resources.items() if name not in ("CPU", "GPU")}
        actor_class = ray.remote(EngineWorker).options(
            num_cpus=resources.get("CPU", 1),
            num_gpus=resources.get("GPU", 0),
            resources=rest,
            max_concurrency=MAX_CALLS,
            max_restarts=0,
            scheduling_strategy="SPREAD",
        )
        actors = [actor_class.remote(number) for number in range(num_workers)]
        try:
            processes = ray.get([actor.describe_process.remote() for actor in actors])
            descriptions = ray.get([actor.load.remote(policy, settings) for actor in actors])
        except ray.exceptions.RayTaskError as error:
            raise _find_cause(error) from None
        except ray.exceptions.RayActorError as error:
            raise BackendUnavailable(f"a worker ended while it loaded the model: {error}") from error
        here = ray.get_runtime_context().get_node_id()
        workers = [
            WorkerHandle(number, actor, node == here, pid, host)
            for number, (actor, (node, pid, host)) in enumerate(zip(actors, processes, strict=True))
        ]
        group = cls(workers, descriptions[0], policy, min_workers)
        group.regroup()
        for name in group.policies:
            group.compare_fingerprints(name)
        return group

    @property
    def workers(self) -> list[WorkerHandle]:
        """The living workers, by number."""
        return [self._workers[number] for number in sorted(self._workers)]

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, loaded in this process on first use."""
        if self._tokenizer is None:
            from reinforge.engine.model.loading import load_tokenizer

            self._tokenizer = load_tokenizer(self._config)
        return self._tokenizer

    def lose(self, worker: WorkerHandle) -> None:
        """Takes out a worker whose process has ended."""
        if self._workers.pop(worker.number, None) is not None:
            self.router.remove(worker.number)
            logger.warning(
                "worker %d (process %d) ended; %d of the workers are left", worker.number, worker.pid, len(self.workers)
            )

    def regroup(self) -> None:
        """Connects the living workers for training, in the order of their numbers.

        Raises:
            BackendUnavailable: Too few are left.
            WorkerLost: One ended meanwhile.
        """
        workers = self.workers
        if len(workers) < max(1, self._min_workers):
            raise BackendUnavailable(
                f"only {len(workers)} workers are left, and min_workers is {self._min_workers}; resume the run with "
                "`reinforge resume`, which starts all of them again"
            )
        host = LOOPBACK if all(each.is_near for each in workers) else workers[0].host
        port = self._collect([(workers[0], workers[0].actor.listen.remote(host))])[0]
        calls = [(each, each.actor.join.remote(rank, len(workers), (host, port))) for rank, each in enumerate(workers)]
        self._collect(calls)
        self._members = tuple(each.number for each in workers)

    def recover(self) -> None:
        """Undoes an open job on the workers that are left, and connects them anew, however many end meanwhile.

        Raises:
            BackendUnavailable: Too few are left.
        """
        while True:
            try:
                self.rollback()
                self.regroup()
            except WorkerLost:
                continue
            return

    def _collect(self, calls: Sequence[tuple[WorkerHandle, Any]], *, strict: bool = True) -> list[Any]:
        """Waits for all calls and returns their results.

        Args:
            calls: Workers, and what they were asked.
            strict: Fail if one ended; otherwise the results are those of the others.

        Raises:
            WorkerLost: One ended.
        """
        results, errors, lost = [], list[BaseException](), list[WorkerHandle]()
        for worker, call in calls:
            try:
                results.append(ray.get(call))
            except ray.exceptions.RayTaskError as error:
                errors.append(_find_cause(error))
            except ray.exceptions.RayActorError:
                lost.append(worker)
                self.lose(worker)
        if lost and (strict or not results):
            numbers = ", ".join(str(each.number) for each in lost)
            raise WorkerLost(f"worker {numbers} ended")
        if errors:
            raise next((each for each in errors if type(each).__name__ != PEER_FAILED), errors[0])
        return results

    def _call_all(self, method: str, *arguments: Any, strict: bool = True, **settings: Any) -> list[Any]:
        calls = [(each, each.actor.call.remote(method, *arguments, **settings)) for each in self.workers]
        return self._collect(calls, strict=strict)

    # What its policies call.

    async def ask(self, key: str, call: Callable[[Any], Any]) -> Any:
        """Returns the answer of the worker that a conversation belongs to; of another one, if that ends meanwhile.

        Args:
            key: The conversation.
            call: Asks an actor.

        Raises:
            BackendUnavailable: No worker is left.
        """
        while True:
            number = self.router.acquire(key)
            worker = self._workers.get(number)
            if worker is None:  # it ended between the two lines
                continue
            answer = call(worker.actor)
            try:
                return await answer
            except asyncio.CancelledError:
                ray.cancel(answer)
                raise
            except ray.exceptions.RayTaskError as error:
                raise _find_cause(error) from None
            except ray.exceptions.RayActorError:
                self.lose(worker)
            finally:
                self.router.release(number)

    def publish(self, name: str, version: int) -> None:
        """Opens admission on every worker."""
        self.router.forget()
        self._collect([(each, each.actor.publish.remote(name, version)) for each in self.workers], strict=False)

    # What a training job calls of an engine.

    def begin_job(self, *adapters: str) -> None:
        """Closes admission everywhere and waits until no reply is in flight."""
        if tuple(self._workers) != self._members:
            self.regroup()
        self._call_all("begin_job", *adapters)

    def end_job(self) -> None:
        """Ends the job everywhere."""
        self._call_all("end_job", strict=False)

    def rollback(self) -> None:
        """Restores the weights from before `begin_job` everywhere."""
        if workers := self.workers:
            self._collect([(each, each.actor.undo.remote()) for each in workers], strict=False)

    def use_stage(self, stage: str, adapter: str | None = None) -> None:
        """Trains by the settings of a stage from now on."""
        self._call_all("use_stage", stage, adapter)

    def reset(self, adapter: str | None = None) -> None:
        """Restores the weights that were loaded."""
        self._call_all("reset", adapter)

    def score(
        self, samples: Sequence[TrainingSample], needs: Needs, adapter: str | None = None, *, defer: bool = False
    ) -> None:
        """Sets what the algorithm needs on each sample; each worker scores its share.

        Args:
            samples: The samples.
            needs: What to compute.
            adapter: The adapter to score with.
            defer: Has no effect: another worker may train a sample than the one that would compute it.
        """
        if not (needs.old_logprobs or needs.ref_logprobs or needs.values):
            return
        scores: dict[int, Scores] = self._merge("score", samples, needs, adapter)
        for index, sample in enumerate(samples):
            found = scores[index]
            sample.old_logprobs, sample.values = found.old_logprobs, found.values
            sample.ref_logprobs, sample.defers_old_logprobs = found.ref_logprobs, False
            if sample.mismatched is not None:
                sample.mismatched.ref_logprobs = found.mismatched_ref_logprobs

    def logprobs(self, samples: Sequence[TrainingSample], adapter: str | None = None) -> list[FloatArray]:
        """Returns log p of each sample's trained tokens; each worker scores its share."""
        rows = self._merge("logprobs", samples, adapter) if samples else {}
        return [rows[index] for index in range(len(samples))]

    def _merge(self, method: str, samples: Sequence[TrainingSample], *arguments: Any) -> dict[int, Any]:
        shared = ray.put(list(samples))  # once per node
        calls = [(each, getattr(each.actor, method).remote(shared, *arguments)) for each in self.workers]
        parts: list[dict[int, Any]] = self._collect(calls)
        return {index: value for part in parts for index, value in part.items()}

    def update(self, samples: Sequence[TrainingSample], loss: LossSpec, **settings: Any) -> UpdateReport:
        """Trains on the samples, each worker on its share of every step.

        Raises:
            BackendError: The workers have not all ended with the same weights.
            WorkerLost: One ended.
        """
        shared = ray.put(list(samples))
        calls = [(each, each.actor.update.remote(shared, loss, settings)) for each in self.workers]
        results: list[tuple[UpdateReport, str]] = self._collect(calls)
        _require_equal([fingerprint for _, fingerprint in results], self._members)
        return results[0][0]

    def compare_fingerprints(self, name: str) -> str:
        """Returns the fingerprint of the weights that every worker has.

        Raises:
            BackendError: They differ.
        """
        found = self._call_all("fingerprint", name, strict=False)
        _require_equal(found, tuple(each.number for each in self.workers))
        return str(found[0])

    # Checkpoints.

    def write(self, folder: Path, version: int, adapter: str | None = None) -> None:
        """Writes a checkpoint's files, by the first worker."""
        while workers := self.workers:
            first = workers[0]
            try:
                files = self._collect([(first, first.actor.write.remote(version, adapter, _local(first, folder)))])[0]
            except WorkerLost:
                continue
            write_files(folder, files)
            return
        raise BackendUnavailable("no worker is left that could write a checkpoint")

    def load_weights(self, folder: str | Path, adapter: str | None = None) -> None:
        """Loads a checkpoint into every worker, within an open job."""
        self._load("load_weights", Path(folder), adapter)
        self.compare_fingerprints(adapter or self.policy.name)

    @property
    def missing_reference(self) -> int | None:
        """Version of the reference that the current stage needs and no worker has."""
        first = self.workers[0]
        found: list[int | None] = self._collect([(first, first.actor.missing_reference.remote())])
        return found[0]

    def load_reference(self, folder: str | Path, version: int) -> None:
        """Makes a checkpoint's weights the reference of the current stage everywhere."""
        self._load("load_reference", Path(folder), version)

    def _load(self, method: str, folder: Path, argument: Any) -> None:
        workers = self.workers
        files = ray.put({} if all(each.is_near for each in workers) else read_files(folder))
        calls = [(each, getattr(each.actor, method).remote(_local(each, folder), files, argument)) for each in workers]
        self._collect(calls, strict=False)

    def close(self) -> None:
        """Ends the workers."""
        for worker in self.workers:
            ray.kill(worker.actor)
        self._workers.clear()


def _local(worker: WorkerHandle, folder: Path) -> Path | None:
    """Returns the folder for a worker that can reach it; None for one on another node."""
    return folder.absolute() if worker.is_near else None


def _require_equal(fingerprints: Sequence[str], numbers: Sequence[int]) -> None:
    if len(set(fingerprints)) > 1:
        found = ", ".join(f"worker {n}: {each}" for n, each in zip(numbers, fingerprints, strict=False))
        raise BackendError(f"the workers do not have the same weights ({found}); the job is undone")


def _find_cause(error: Any) -> BaseException:
    """Returns what a worker raised, as this process would have raised it."""
    cause = error.cause
    if isinstance(cause, Exception):
        return cause
    return ReinforgeError(f"a worker failed: {error}")
