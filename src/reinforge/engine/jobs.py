"""The jobs of an engine: one at a time, for some of its adapters, which until it is published can be undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from reinforge.engine.policy import EmbeddedPolicy
from reinforge.engine.training.job import EngineJob
from reinforge.engine.training.learner import Learner
from reinforge.errors import EngineError


class EngineJobs:
    """Opens, ends and undoes jobs, and says which adapter a call is for.

    Args:
        policies: The policy of each adapter, whose admission a job closes; the engine adds and removes some.
        first: The adapter of calls that name none, while no job is open.
    """

    def __init__(self, policies: Mapping[str, EmbeddedPolicy], first: str):
        self._policies, self._first = policies, first
        self._job: EngineJob | None = None

    @property
    def open_job(self) -> EngineJob | None:
        return self._job if self._job is not None and self._job.is_open else None

    @property
    def can_undo(self) -> bool:
        """True if a job has begun since the last version was published."""
        return self._job is not None and (self._job.is_open or self._job.is_changed)

    def resolve_adapter(self, adapter: str | None) -> str:
        """Returns an adapter's name; None means the first of the open job, or the first of all."""
        name = adapter or (self.open_job.adapters[0] if self.open_job is not None else self._first)
        if name not in self._policies:
            raise EngineError(f"no adapter is named {name}; the adapters are: {', '.join(self._policies)}")
        return name

    def require_adapter(self, method: str, adapter: str | None) -> str:
        """Returns the name of an adapter that the open job may change; None means its first."""
        if self.open_job is None:
            raise EngineError(f"{method}: no job is open; call begin_job() first")
        if adapter is not None and adapter not in self.open_job.adapters:
            raise EngineError(f"{method}: the open job is for {self.open_job}, not for {adapter}")
        return self.resolve_adapter(adapter)

    def begin(self, *adapters: str) -> None:
        """Begins a job for these adapters, or for the first, once their policies have closed admission."""
        job = EngineJob(tuple(map(self.resolve_adapter, adapters)) or (self._first,))
        if self.open_job is not None and self.open_job.adapters != job.adapters:
            raise EngineError(
                f"a job for {self.open_job} is already open; call end_job() or rollback() before another begin_job()"
            )
        for name in job.adapters:
            self._policies[name].close_admission()
        self._job = job

    def end(self, next_version: int | None = None) -> None:
        """Ends the open job; a request that comes before `publish` is served `next_version`, or else one more."""
        if (job := self.open_job) is None:
            raise EngineError("end_job: no job is open")
        job.is_open = False
        for name in job.adapters:
            self._policies[name].end_job(next_version)

    def take_snapshot(self, adapter: str, learner: Learner) -> None:
        assert self._job is not None
        self._job.take_snapshot(adapter, learner)

    def drop_snapshot(self, adapter: str) -> None:
        if self._job is not None:
            self._job.drop_snapshot(adapter)

    def undo(self, call: Callable[[Callable[[], None]], None]) -> None:
        """Restores the weights and optimizers from before the job, and serves the old versions again."""
        job = self._job
        if job is None or not self.can_undo:
            raise EngineError("rollback: no job has begun since the last version was published")
        if job.is_changed:
            call(job.restore)
        self._job = None
        for policy in map(self._policies.__getitem__, job.adapters):
            policy.end_job(policy.version)
            policy.open(policy.version)
