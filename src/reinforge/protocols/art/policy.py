"""The model that an ART backend trains, as the policy: each step is served under the name that the backend gives it."""

from __future__ import annotations

import hashlib

from reinforge.protocols.hosted_policy import HostedPolicy
from reinforge.rollout.models.openai_client import OpenAIChat


class ARTPolicy(HostedPolicy):
    """Samples from the newest adopted step, with log-probs.

    Args:
        chat: The served model at the step that the run starts from.
        base_model: Hub id of the base model.
        model_name: Name of the trained model, the same for every step.
        step: That step.
        ready_s: Seconds to wait until a new step is served.
    """

    def __init__(self, chat: OpenAIChat, base_model: str, model_name: str, step: int, *, ready_s: float = 600.0):
        super().__init__(chat, base_model, ready_s=ready_s)
        self._model_name, self._step = model_name, step
        self._staged_step: int | None = None

    @property
    def model_name(self) -> str:
        """The trained model's name, the same for every step, for `target_model`."""
        return self._model_name

    @property
    def newest_step(self) -> int:
        """The step of the newest successful job, whether served or still staged."""
        return self._step if self._staged_step is None else self._staged_step

    def stage_step(self, model: str, step: int) -> None:
        """Sets the step that the next `publish` serves, and its name."""
        self.stage(model)
        self._staged_step = step

    async def publish(self, version: int) -> None:
        """Serves the staged step as `version`, once it is available.

        Raises:
            BackendUnavailable: It is not available within `ready_s`.
            BackendError: Another model replied under its name.
        """
        await super().publish(version)
        self._step, self._staged_step = self.newest_step, None

    async def fingerprint(self) -> str:
        """Returns a hash of the served model's name and step: one name may serve several steps, one after the other."""
        return hashlib.sha256(f"{self.served_model} {self._step}".encode()).hexdigest()[:16]
