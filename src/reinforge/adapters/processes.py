"""What the embedded engine works with outside of this process: a launcher's other processes, or another sampler.

Both stand around the core and are found by name, when a variable of the environment or a setting names them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from reinforge.errors import Problem
from reinforge.interfaces import PolicyServer
from reinforge.registry import load_named
from reinforge.types.sample import Sharding

if TYPE_CHECKING:
    from reinforge.engine import Engine

LAUNCHERS = {"TORCHELASTIC_RUN_ID": "reinforge.scale.torchrun.worker:find_torchrun"}
"""What looks for the other processes, by the variable that a launcher sets for each process that it starts."""

SAMPLERS = {"vllm": "reinforge.scale.vllm.sampler:VLLMSampler"}
"""The class of each `sampler`, by its `_type`."""


class PeerLauncher(Protocol):
    """What has started this process and others like it, which train together."""

    def check(self, backend: str, where: str, *, max_staleness: int, has_sampler: bool) -> list[Problem]:
        """Returns why the trainer adapter at the path `where` cannot use the processes."""

    def load_engine(self, sharding: Sharding, peer_timeout_s: float, *arguments: Any, **settings: Any) -> Engine:
        """Returns the engines of all processes as one; `arguments` and `settings` are those of `Engine.load`."""

    def get_first_process_server(self) -> Callable[[], None] | None:
        """Returns what this process runs to serve the first one; None: it is the first."""

    def close(self) -> None:
        """Lets the other processes exit, if this is the first: its command is done."""


class OutsideSampler(Protocol):
    """Another program that samples the weights that the engine trains."""

    policy: PolicyServer

    async def start(self, seed: int) -> None:
        """Serves the engine's weights from now on."""

    async def close(self) -> None:
        """Stops what `start` started."""


def find_launcher(environment: Mapping[str, str] = os.environ) -> PeerLauncher | None:
    """Returns what has started this process and others; None: this process trains alone."""
    names = [name for variable, name in LAUNCHERS.items() if variable in environment]
    launcher: PeerLauncher | None = load_named(names[0])() if names else None
    return launcher
