"""What torchrun says about this process, and how its processes find the first one.

    torchrun --nproc_per_node 4 -m reinforge finetune run.yml
        rank 0          the command: agents, rewards, run folder, and one of the engines
        ranks 1 to 3    wait for rank 0, which gives them work as long as it trains

Rank 0 listens at a socket in a folder that only its user can open, and says where through torchrun's store. Anyone who
reaches that store, which asks for no password, could name another place; a worker therefore connects only to a socket
of its own user.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from reinforge.adapters.launchers import TORCHRUN
from reinforge.errors import BackendUnavailable, ConfigError, EngineError, Problem

ENDED = "ended"
VISIBLE = "CUDA_VISIBLE_DEVICES"
POLL_S = 0.2

_CHOSEN: dict[TorchrunPlace, str] = {}
"""The GPU that this process sees: its next run finds that one alone, and uses it again."""


class SharedStore(Protocol):
    """What is used of torch's store."""

    def set(self, key: str, value: str) -> None:
        """Sets the text of a key."""

    def get(self, key: str) -> bytes:
        """Returns the text of a key that is set."""

    def check(self, keys: list[str]) -> bool:
        """Returns True if all keys are set."""


@dataclass(frozen=True, slots=True)
class TorchrunPlace:
    rank: int
    size: int
    size_here: int
    store: tuple[str, int]
    attempt: int = 0  # how often torchrun has restarted the processes


def find_place(environment: Mapping[str, str] = os.environ) -> TorchrunPlace | None:
    """Returns this process's place; None: torchrun has not started it, or has started it alone."""
    if TORCHRUN not in environment or int(environment.get("WORLD_SIZE", "1")) < 2:
        return None
    return TorchrunPlace(
        rank=int(environment["RANK"]),
        size=int(environment["WORLD_SIZE"]),
        size_here=int(environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"])),
        store=(environment["MASTER_ADDR"], int(environment["MASTER_PORT"])),
        attempt=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )


def check_torchrun(backend: str, where: str, *, max_staleness: int, has_sampler: bool) -> list[Problem]:
    """Returns why a trainer adapter cannot use the processes of torchrun, if it has started this one."""
    place = find_place()
    if place is None:
        return []
    if backend != "local":
        message = f"torchrun has started {place.size} processes, which `_type: {backend}` does not use"
        return [Problem(where, message, "start reinforge without torchrun, or use `_type: local`")]
    problems = list[Problem]()
    if place.size_here != place.size:
        message = f"torchrun has started {place.size} processes on several machines, {place.size_here} of them here"
        problems.append(Problem("", message, "use `trainer_adapters.NAME._type: ray` for several machines"))
    if max_staleness > 0 and not has_sampler:
        message = (
            "replies can be sampled while a job trains by one process or by a vLLM sampler, and torchrun has started "
            f"{place.size} processes"
        )
        fix = f"start reinforge without torchrun, remove it, or set {where}.sampler"
        problems.append(Problem("finetuning.limits.max_staleness", message, fix))
    return problems


def open_own_store(place: TorchrunPlace) -> SharedStore:
    """Returns torchrun's store, in which the processes of this attempt have their own keys."""
    from reinforge.engine.training.data_parallel import open_store

    return open_store(place.store, f"reinforge-{place.attempt}")


def announce(store: SharedStore, number: int, message: str) -> None:
    """Tells the workers where to connect for the engines of a run, the first one being 0, or that all have `ENDED`."""
    store.set(f"engines-{number}", message)


def wait_for_announcement(store: SharedStore, number: int) -> str:
    key = f"engines-{number}"
    try:
        while not store.check([key]):  # waiting inside of torch, no signal would be seen
            time.sleep(POLL_S)
        return str(store.get(key).decode())
    except RuntimeError as error:
        raise BackendUnavailable(f"torchrun's store no longer answers: {error}") from error


def check_socket(path: Path) -> None:
    """Checks that only the user of this process can have made a socket: what arrives there is unpickled."""
    for each, is_kind in ((path.parent, stat.S_ISDIR), (path, stat.S_ISSOCK)):
        found = each.lstat()
        if not is_kind(found.st_mode) or found.st_uid != os.getuid():
            raise EngineError(f"{each} does not belong to this user, so it is not the first process that listens there")
    if path.parent.stat().st_mode & 0o077:
        raise EngineError(f"other users can open {path.parent}, so it is not the first process that listens there")


def choose_gpu(place: TorchrunPlace, device: str) -> None:
    """Lets this process see one GPU, that of its rank, if it should use GPUs and there are any."""
    if device not in ("auto", "cuda"):
        return
    from reinforge.engine.devices import count_gpus

    count = count_gpus()
    if count == 0 or os.environ.get(VISIBLE) == _CHOSEN.get(place, ""):
        return
    if count < place.size_here:
        message = f"torchrun has started {place.size_here} processes, but this machine has {count} GPUs"
        fix = f"start it with --nproc_per_node {count}, or set finetuning.device to cpu"
        raise ConfigError(Problem("finetuning.device", message, fix))
    visible = os.environ.get(VISIBLE, "").split(",") if os.environ.get(VISIBLE) else list(map(str, range(count)))
    os.environ[VISIBLE] = _CHOSEN[place] = visible[place.rank]
