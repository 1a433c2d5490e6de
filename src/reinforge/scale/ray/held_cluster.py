"""A Ray cluster on this machine that outlives the processes of a run with `--restarts`, in a process of its own.

    the waiting process ── starts ──► python -m reinforge.scale.ray.held_cluster ── starts ──► Ray
        its child, the run ────────────────────────────── connects ─────────────────────────────┘

So a run that died continues without starting Ray again. The process ends when the last one that has its pipe ends: the
waiting process and those that it forks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress

from reinforge.scale.ray import cluster


def hold_cluster(num_workers: int, resources: Mapping[str, float]) -> Callable[[], None]:
    """Starts a cluster that this process and those that it forks then use instead of their own.

    Returns:
        Waits until it is there; without one, each process starts its own and says why it cannot.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C is for the run
        text=True,
    )
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None  # both are pipes
    settings = {"token": cluster.TOKEN, "num_workers": num_workers, "resources": dict(resources)}
    with suppress(OSError):  # it has failed already
        stdin.write(json.dumps(settings) + "\n")
        stdin.flush()

    def wait() -> None:
        cluster.held = cluster.HeldCluster(stdout.readline().strip(), process)

    return wait


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    cluster.TOKEN = settings["token"]
    connection = cluster.RayConnection(None, settings["num_workers"], settings["resources"], min_workers=0)
    import ray

    sys.stdout.write(f"{ray.get_runtime_context().gcs_address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    connection.close()


if __name__ == "__main__":
    main()
