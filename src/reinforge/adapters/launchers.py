"""What has started this process and others that train with it: found by the variable that it sets for each of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from reinforge.engine import Engine
    from reinforge.errors import Problem
    from reinforge.types.sample import Sharding

TORCHRUN = "TORCHELASTIC_RUN_ID"
LAUNCHERS = {TORCHRUN: "reinforge.scale.torchrun.worker:find_torchrun"}
"""What looks for the other processes, by the variable that a launcher sets for each process that it starts."""


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


def find_launcher(environment: Mapping[str, str] = os.environ) -> PeerLauncher | None:
    """Returns what has started this process and others; None: this process trains alone."""
    names = [name for variable, name in LAUNCHERS.items() if variable in environment]
    if not names:
        return None
    from reinforge.registry import load_named

    launcher: PeerLauncher | None = load_named(names[0])()
    return launcher
