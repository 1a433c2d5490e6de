"""Several engines as one: the calls that a training job makes of `Engine`, made of every process at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from reinforge.errors import BackendError
from reinforge.scale.engine_worker import Scores
from reinforge.types.sample import FloatArray, LossSpec, Needs, TrainingSample, UpdateReport


class EngineGroup(ABC):
    """Engines that hold the same weights and make the same steps. Calls block."""

    @abstractmethod
    def call_connected(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Calls a method of `EngineWorker` in every process that trains; returns what each returned, by its name."""

    def share(self, value: Any) -> Any:
        return value

    def pack_loss(self, loss: LossSpec) -> bytes | None:
        """Returns the function of a loss that only this process has imported."""
        return None

    def use_stage(self, stage: str, adapter: str | None = None) -> None:
        self.call_connected("call", "use_stage", stage, adapter)

    def reset(self, adapter: str | None = None) -> None:
        self.call_connected("call", "reset", adapter)

    def score(
        self, samples: Sequence[TrainingSample], needs: Needs, adapter: str | None = None, *, defer: bool = False
    ) -> None:
        """Sets what the algorithm needs on each sample; each process scores its share.

        Args:
            defer: Has no effect: another process may train a sample than the one that would compute it.
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
        """Returns log p of each sample's trained tokens; each process scores its share."""
        rows = self._merge("logprobs", samples, adapter) if samples else {}
        return [rows[index] for index in range(len(samples))]

    def _merge(self, method: str, samples: Sequence[TrainingSample], *arguments: Any) -> dict[int, Any]:
        parts = self.call_connected(method, self.share(list(samples)), *arguments)
        return {index: value for part in parts.values() for index, value in part.items()}

    def update(self, samples: Sequence[TrainingSample], loss: LossSpec, **settings: Any) -> UpdateReport:
        """Trains on the samples, each process on its share of every step."""
        packed = self.pack_loss(loss)
        found: dict[str, tuple[UpdateReport, str]] = self.call_connected(
            "update", self.share(list(samples)), loss, settings, packed
        )
        require_equal({name: fingerprint for name, (_, fingerprint) in found.items()})
        return next(iter(found.values()))[0]


def require_equal(fingerprints: Mapping[str, str]) -> None:
    """Checks that processes have the same weights."""
    if len(set(fingerprints.values())) > 1:
        found = ", ".join(f"{name}: {each}" for name, each in fingerprints.items())
        raise BackendError(f"the workers do not have the same weights ({found}); the job is undone")
