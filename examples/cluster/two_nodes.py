"""Runs a command on a Ray cluster of two nodes on this machine, and ends the cluster after it.

    python two_nodes.py reinforge finetune cluster.yml

On real machines you run the two `ray start` commands below yourself, one on each; see README.md.
"""

import os
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path

RAY = Path(sys.executable).with_name("ray")
HOST = "127.0.0.1"


def main(command):
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    address = f"{HOST}:{port}"
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # every node and the command need both
    others = {"RAY_ADDRESS": address, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    environment = {**os.environ, **token, **others}
    nodes = []
    try:
        nodes.append(start_node(environment, "--head", f"--port={port}", "--include-dashboard=false"))
        nodes.append(start_node(environment, f"--address={address}"))
        print(f"two nodes with one CPU each: {address}", flush=True)
        return subprocess.run(command, env=environment, check=False).returncode
    except KeyboardInterrupt:  # which the command has got, too
        return 130
    finally:
        for node in reversed(nodes):
            stop_node(node)


def start_node(environment, *options):
    """Starts a node of the cluster and returns its process once it is up."""
    command = [RAY, "start", "--block", "--num-cpus=1", f"--node-ip-address={HOST}", *options]
    command += ["--object-store-memory=200000000", "--dashboard-agent-listen-port=0"]
    node = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    output = []
    for line in node.stdout:
        output.append(line)
        if "Ray runtime started" in line:
            return node
    sys.exit(f"this node did not start: {' '.join(map(str, command))}\n{''.join(output)}")


def stop_node(node):
    """Ends a node with all of its processes."""
    node.send_signal(signal.SIGTERM)
    try:
        node.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(node.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or sys.exit(__doc__)))
