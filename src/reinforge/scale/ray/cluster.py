"""Starts Ray on this machine, or connects to a running cluster; both require a token."""

from __future__ import annotations

import importlib
import ipaddress
import logging
import math
import os
import secrets
import select
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from reinforge.engine.packages import is_installed
from reinforge.errors import BackendUnavailable, Problem, boundary

logger = logging.getLogger(__name__)

INSTALL = 'pip install "reinforge[ray]" (in a checkout: pip install -e ".[ray]")'
TOKEN_SETTINGS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
OBJECT_STORE_BYTES = 512 * 2**20
"""Shared memory of a cluster on this machine, which holds the samples of one job and the files of a checkpoint."""

NICENESS = "RAY_worker_niceness"
"""What Ray adds to the niceness of its workers: 15 unless this is set, with which other programs starve them."""
ROUNDING = 1e-6  # 0.3 GPU hold three workers of 0.1 each

TOKEN = secrets.token_hex(32)  # of the clusters that this process starts, one after the other


class HeldCluster(NamedTuple):
    """A cluster that another process has started for this one; see `held_cluster`."""

    address: str  # empty: it could not be started
    process: Any  # that has it; kept, since it ends with its standard input

    def is_there(self) -> bool:
        """Returns False once that process has exited, which closes its output; a fork cannot wait for it."""
        return bool(self.address) and not select.select([self.process.stdout], [], [], 0)[0]


held: HeldCluster | None = None


def check_ray(address: str | None) -> list[Problem]:
    """Returns why Ray cannot be used: it is not installed, or the cluster would be reached without a token."""
    if not is_installed("ray"):
        return [Problem("", "`_type: ray` needs the package ray, which is not installed", f"install it: {INSTALL}")]
    if address is not None and not _is_loopback(address) and not _has_token():
        message = f"{address} is not on this machine, and a Ray cluster without a token runs the code of anyone"
        fix = (
            "start every node of the cluster with RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN (or "
            "RAY_AUTH_TOKEN_PATH), and set both for this command too"
        )
        return [Problem("address", message, fix)]
    return []


def _is_loopback(address: str) -> bool:
    host = address.removeprefix("ray://").rpartition(":")[0].strip("[]")
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _has_token() -> bool:
    is_demanded = os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
    is_set = any(os.environ.get(name) for name in TOKEN_SETTINGS)
    return is_demanded and (is_set or (Path.home() / ".ray" / "auth_token").is_file())


@contextmanager
def _set_variables(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class RayConnection:
    """This process's connection to Ray. Without an address, a cluster starts on this machine and ends with the process.

    The token of such a cluster is made up here and is not left in the environment, so that no agent's process inherits
    it. Its processes exit with the thread that started them, which therefore lives until `close`.
    """

    def __init__(
        self, address: str | None, num_workers: int, resources: Mapping[str, float], min_workers: int | None = None
    ):
        self._closing = threading.Event()
        started: Future[None] = Future()
        self._needed = num_workers if min_workers is None else min_workers
        arguments = (address, num_workers, resources, started)
        self._thread = threading.Thread(target=self._live, args=arguments, name="ray-connection", daemon=True)
        self._thread.start()
        started.result()

    def _live(
        self, address: str | None, num_workers: int, resources: Mapping[str, float], started: Future[None]
    ) -> None:
        try:
            is_own = _connect(address, num_workers, resources)
            try:
                _require_room(self._needed, resources)
                started.set_result(None)
                self._closing.wait()
            finally:
                if is_own:
                    import ray

                    ray.shutdown()
                    _refresh_token()  # a cluster that other code starts next has another one, or none
        except BaseException as error:  # noqa: BLE001  it is raised in the thread that waits
            if not started.done():
                started.set_exception(error)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()


def _connect(address: str | None, num_workers: int, resources: Mapping[str, float]) -> bool:
    """Returns True if it connected this process, False if it was connected before."""
    variables = {"RAY_USAGE_STATS_ENABLED": "0"}
    if address is None:
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, NICENESS: os.environ.get(NICENESS, "0")}
    with (
        _set_variables(variables),
        boundary(BackendUnavailable, f"cannot reach Ray{f' at {address}' if address else ''}"),
    ):
        import ray

        if ray.is_initialized():
            return False
        _refresh_token()
        logging.getLogger("ray").setLevel(logging.ERROR)  # a worker that dies is in our own log
        if address is None and held is not None and held.is_there():
            try:
                ray.init(**_choose_options(held.address, num_workers, resources))
                return True
            except (ConnectionError, RuntimeError, TimeoutError) as error:
                logger.warning("the cluster of the run before is gone; another one starts: %s", error)
                ray.shutdown()
        ray.init(**_choose_options(address, num_workers, resources))
        return True


def _refresh_token() -> None:
    """Makes Ray read RAY_AUTH_MODE and the token again.

    It reads the mode when it is imported, which agents and other libraries may have done before, and the token once.
    """
    compiled: Any = importlib.import_module("ray._raylet")  # Ray's own `ray.init` and tests do the same
    compiled.Config.initialize("")
    compiled.AuthenticationTokenLoader.instance().reset_cache()


def count_places(resources: Mapping[str, float], nodes: Sequence[Mapping[str, float]] | None = None) -> int:
    """Returns how many workers fit on the nodes, each whole on one of them.

    Example: 2 CPU for each worker, nodes of 4 and 3 CPU -> 2 + 1
    """
    nodes = [each for _, each in _list_nodes()] if nodes is None else nodes
    places = (min(node.get(name, 0.0) / each for name, each in resources.items()) for node in nodes)
    return sum(math.floor(each + ROUNDING) for each in places)


def describe_room() -> str:
    """Returns what each node has and what is free in all: `127.0.0.1 has CPU 2, GPU 1; of all that, CPU 1 is free`."""
    import ray

    nodes = [f"{host} has {_format_resources(resources)}" for host, resources in _list_nodes()]
    free = _format_resources({name: each for name, each in ray.available_resources().items() if _is_chosen(name)})
    return f"{'; '.join(nodes) or 'no node is alive'}; free in all: {free}"


def _require_room(needed: int, resources: Mapping[str, float]) -> None:
    places = count_places(resources)
    if places < needed:
        raise BackendUnavailable(
            f"Ray has room for {places} workers with {_format_resources(resources)} each (resources_per_worker), and "
            f"{needed} must run (min_workers): {describe_room()}. Lower resources_per_worker or min_workers, or add "
            "nodes"
        )


def _list_nodes() -> list[tuple[str, dict[str, float]]]:
    import ray

    return [(each["NodeManagerAddress"], each["Resources"]) for each in ray.nodes() if each["Alive"]]


def _format_resources(resources: Mapping[str, float]) -> str:
    chosen = [f"{name} {each:g}" for name, each in sorted(resources.items()) if _is_chosen(name)]
    return ", ".join(chosen) or "nothing"


def _is_chosen(name: str) -> bool:
    """True for CPUs, GPUs and resources of your own; False for memory and for the entries that identify nodes."""
    return name not in ("memory", "object_store_memory") and not name.startswith(("node:", "accelerator_type:"))


def _choose_options(address: str | None, num_workers: int, resources: Mapping[str, float]) -> dict[str, Any]:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
    if address is not None:
        return options | {"address": address}
    return options | {
        "address": "local",  # also where RAY_ADDRESS names another cluster
        "num_cpus": max(1, math.ceil(num_workers * resources.get("CPU", 1))),
        "resources": {name: each * num_workers for name, each in resources.items() if name not in ("CPU", "GPU")},
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
    }
