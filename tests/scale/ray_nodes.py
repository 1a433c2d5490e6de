"""Clusters of several Ray nodes on this machine, to kill; each has processes, a core and an environment of its own.

with Cluster() as cluster:
    node = cluster.add_node()
    ...
    node.kill()
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from reinforge.scale.ray.cluster import TOKEN

RAY = Path(sys.executable).with_name("ray")
HOST, ROOT = "127.0.0.1", str(Path(__file__).parents[2])
MARK = "REINFORGE_TEST_MARK"
PATIENCE_S = 60
WORKER = "ray::EngineWorker"
"""How the title of a worker's process begins."""


class Cluster:
    """A cluster whose first node, which the driver connects to, has as many cores as you say, perhaps none."""

    def __init__(self, num_cpus=1):
        with socket.create_server((HOST, 0)) as free:
            port = free.getsockname()[1]
        self.address, self.nodes = f"{HOST}:{port}", []
        self.mark = f"{os.getpid()} {self.address}"
        self.variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_USAGE_STATS_ENABLED": "0"}
        self._start(num_cpus, "--head", f"--port={port}", "--include-dashboard=false")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for node in reversed(self.nodes):
            node.kill()

    def add_node(self, num_cpus=1, **variables):
        """Starts a further node and returns it once it has joined; its workers get the variables."""
        return self._start(num_cpus, f"--address={self.address}", **variables)

    def _start(self, num_cpus, *options, **variables):
        node = Node(self, [f"--num-cpus={num_cpus}", *options], variables)
        self.nodes.append(node)
        return node

    def list_workers(self):
        """Returns the processes of all workers, on every node."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.name().startswith("ray::") and process.environ().get(MARK, "").startswith(self.mark):
                    found += [process] if " ".join(process.cmdline()).startswith(WORKER) else []
        return found

    def wait_for_no_worker(self, seconds):
        """Returns after how long the last worker has ended."""
        started = time.monotonic()
        while workers := self.list_workers():
            assert time.monotonic() - started < seconds, f"these workers outlive their driver: {workers}"
            time.sleep(0.1)
        return time.monotonic() - started


class Node:
    """One node: `ray start --block`, with all processes that it starts."""

    def __init__(self, cluster, options, variables):
        self.mark = f"{cluster.mark} {len(cluster.nodes)}"
        command = [RAY, "start", "--block", f"--node-ip-address={HOST}", *options]
        command += ["--object-store-memory=150000000", "--dashboard-agent-listen-port=0"]
        path = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])  # workers run functions of tests
        environment = {**os.environ, "PYTHONPATH": path, **cluster.variables, **variables, MARK: self.mark}
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        output = []
        for line in self.process.stdout:
            output.append(line)
            if "Ray runtime started" in line:
                return
        raise AssertionError("".join(output))

    def kill(self):
        """Kills every process of the node at once, as a machine does that loses its power."""
        for process in self._list_processes():
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=PATIENCE_S)

    def _list_processes(self):
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found
