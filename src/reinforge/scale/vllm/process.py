"""A vLLM server that ends with the run: its command, its private folder, and the process that watches over it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reinforge.adapters.local_config import Scalar, VLLMLaunchConfig
from reinforge.errors import BackendUnavailable
from reinforge.rollout.isolation.processes import describe_exit
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.rollout.models.openai_config import EndpointConfig
from reinforge.rollout.models.openai_http import OpenAIEndpoint
from reinforge.rollout.workflows.command import inherit_variables
from reinforge.scale.vllm.client import VLLMClient

PLUGIN = Path(__file__).parent / "plugin"
SUPERVISOR = PLUGIN / "supervise.py"
MODULE = "vllm.entrypoints.openai.api_server"
"""Its command; `vllm serve` asks for a distribution called `vllm`, which that for CPUs is not."""
SOCKET, LOG = "server.sock", "server.log"
INHERITED_PREFIXES = ("VLLM_", "CUDA_", "NVIDIA_", "NCCL_", "HIP_", "ROCR_", "OMP_", "KMP_", "MKL_", "TORCH", "XDG_")
INHERITED = ("LD_LIBRARY_PATH", "LD_PRELOAD")
SECRET = "VLLM_API_KEY"
SWITCHES = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""What the server needs besides its arguments: the paths by which weights are sent, and nothing from a hub."""
POLL_S = 0.1
SHOWN_LINES = 30
MAX_READ = 1 << 16


@dataclass(frozen=True, slots=True)
class ServedModelSettings:
    """What a server has to serve.

    Attributes:
        lora_rank: Largest rank of an adapter; None: all weights are trained.
        kv_cache_bytes: Memory for keys and values; None: vLLM's own choice, which on a CPU is nearly all there is.
    """

    folder: Path
    dtype: str
    max_model_len: int
    max_num_seqs: int
    seed: int
    lora_rank: int | None = None
    num_adapters: int = 1
    kv_cache_bytes: int | None = None


def build_arguments(model: ServedModelSettings, further: Mapping[str, Scalar]) -> list[str]:
    """Returns the command line of `vllm serve`, without its address.

    Args:
        further: The user's arguments, by name; True: a switch that is on, False: one that is off.
    """
    settings: dict[str, Scalar] = {
        "model": str(model.folder),
        "served_model_name": "policy",
        "dtype": model.dtype,
        "max_model_len": model.max_model_len,
        "max_num_seqs": model.max_num_seqs,
        "seed": model.seed % 2**31,
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from, at any temperature
        "generation_config": "vllm",  # no defaults of the model's own, such as a top_p
        "enable_scale_out": True,  # /inference/v1/generate
        "worker_extension_cls": "reinforge_vllm.WeightReloader",
        "disable_uvicorn_access_log": True,
    }
    if model.lora_rank is not None:
        ranks = [rank for rank in (1, 8, 16, 32, 64, 128, 256, 320, 512) if rank >= model.lora_rank]
        settings |= {
            "enable_lora": True,
            "max_lora_rank": ranks[0] if ranks else model.lora_rank,
            "max_loras": model.num_adapters,
        }
    if model.kv_cache_bytes is not None:
        settings["kv_cache_memory_bytes"] = model.kv_cache_bytes
    command: list[str] = []
    for name, value in {**settings, **further}.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{option}" if value else f"--no-{option}")
        else:
            command += [f"--{option}", str(value)]
    return command


class VLLMProcess:
    """A server on this machine, at a socket in a folder that only this user can enter.

    Attributes:
        folder: That folder; weights on their way to the server go there too.
    """

    def __init__(self, config: VLLMLaunchConfig, project_root: Path):
        self.config = config
        self.folder = Path(tempfile.mkdtemp(prefix="reinforge-vllm-"))
        self._python = find_python(config.python, project_root)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, arguments: Sequence[str]) -> None:
        """Starts the server and a process that ends it with this one; returns at once."""
        command = [str(self._python), "-m", MODULE, "--uds", str(self.folder / SOCKET)]
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", str(SUPERVISOR)),
                *(str(self.folder), str(self.folder / LOG)),
                *command,
                *arguments,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self._build_environment(),
            cwd=self.folder,
            start_new_session=True,
        )

    def _build_environment(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if (name in INHERITED or name.startswith(INHERITED_PREFIXES)) and name != SECRET
        }
        variables = {**inherit_variables(), **kept, **SWITCHES, **self.config.environment}
        paths = {
            "PYTHONPATH": str(PLUGIN),
            "PATH": str(self._python.parent),
        }  # of its own: ninja, the compiler's driver
        joined = {name: os.pathsep.join(filter(None, (first, variables.get(name)))) for name, first in paths.items()}
        return {**variables, **joined}

    def connect(self, config: EndpointConfig) -> OpenAIEndpoint:
        return OpenAIEndpoint(config, "http://vllm", socket_path=self.folder / SOCKET)

    async def wait_until_ready(self, client: VLLMClient) -> None:
        """Returns once the server answers."""
        deadline = time.monotonic() + self.config.ready_s
        while True:
            if (self.folder / SOCKET).exists():
                try:
                    await client.endpoint.send("GET", "/health")
                    return
                except Exception as error:  # noqa: BLE001  it is starting; the deadline below decides
                    last = str(error)
            else:
                last = "its socket does not exist yet"
            if (reason := self.find_end()) is not None:
                raise BackendUnavailable(f"the vLLM server {reason}")
            if time.monotonic() > deadline:
                raise BackendUnavailable(
                    f"the vLLM server does not answer after {self.config.ready_s:g} s (launch.ready_s): {last}"
                    f"{self._describe_log()}"
                )
            await asyncio.sleep(POLL_S)

    def find_end(self) -> str | None:
        """Returns how the server has ended, with the end of its log; None: it runs."""
        assert self._process is not None
        code = self._process.poll()
        return None if code is None else f"{describe_exit(code)}{self._describe_log()}"

    def _describe_log(self) -> str:
        try:
            text = (self.folder / LOG).read_bytes()[-MAX_READ:].decode("utf-8", "replace")
        except OSError:
            return ""
        lines = [line for line in text.splitlines() if line.strip()][-SHOWN_LINES:]
        return "; the end of its log:\n" + "\n".join(lines) if lines else ""

    async def close(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            await run_in_daemon_thread(process.communicate, "vllm-close")
        shutil.rmtree(self.folder, ignore_errors=True)


def find_python(python: Path, project_root: Path) -> Path:
    """Returns the absolute path of an interpreter, without following links: a virtual environment is one."""
    return Path(os.path.abspath(project_root / python.expanduser()))


def find_package(python: Path) -> str | None:
    """Returns the name of the vLLM package in an interpreter's environment; None: there is none, or no interpreter."""
    found = python.parent.parent.glob("lib/python3*/site-packages/vllm*.dist-info")
    return next((each.name for each in sorted(found)), None)


def describe_command(arguments: Sequence[str]) -> str:
    """Returns how to start a server that `url` can name, as a shell command."""
    quoted = " ".join(json.dumps(each) if " " in each else each for each in arguments)
    return (
        f"VLLM_API_KEY=... VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 PYTHONPATH={PLUGIN} "
        f"python -m {MODULE} {quoted} --middleware reinforge_vllm.KeyGuard"
    )
