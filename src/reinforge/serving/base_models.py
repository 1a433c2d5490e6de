"""The models that training may start from, by the names that clients write."""

from __future__ import annotations

from collections.abc import Mapping

from reinforge.config.policy import PolicyConfig
from reinforge.errors import did_you_mean
from reinforge.serving.api_error import ApiError


class BaseModels:
    """What the server's owner allows to be trained; a request names one and never a path or a hub id of its own.

    Args:
        policies: Name -> the model and how it is trained.
    """

    def __init__(self, policies: Mapping[str, PolicyConfig]):
        self._policies = dict(policies)

    @property
    def names(self) -> tuple[str, ...]:
        """All names."""
        return tuple(self._policies)

    def find(self, name: str, param: str = "base_model") -> PolicyConfig:
        """Returns the model of a name.

        Args:
            name: What the client wrote.
            param: The field of its request, for the error.

        Raises:
            ApiError: No model has that name.
        """
        if (policy := self._policies.get(name)) is not None:
            return policy
        listed = ", ".join(self._policies) or "none"
        message = (
            f"no model to train is named {name[:200]!r}{did_you_mean(name, self.names)}; this server has: {listed}"
        )
        raise ApiError(404, message, param=param, code="model_not_found")
