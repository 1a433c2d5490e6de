"""A vLLM server that exits with the run: its command, its socket, and the process that watches over it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from reinforge.adapters.local_config import CUDA_DEVICES, Scalar, VLLMLaunchConfig, VLLMSamplerConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import BackendUnavailable, ConfigError, Problem
from reinforge.limits import get_limits
from reinforge.rollout.isolation.processes import describe_exit
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.rollout.models.endpoint_config import LOOPBACK, EndpointConfig
from reinforge.rollout.models.openai_http import OpenAIEndpoint, RequestRejected
from reinforge.rollout.workflows.command_workflow import inherit_variables
from reinforge.scale.vllm.client import VLLMClient
from reinforge.scale.vllm.weight_source import read_address

PLUGIN = Path(__file__).parent / "plugin"
SUPERVISOR = PLUGIN / "supervise.py"
MODULE = "vllm.entrypoints.openai.api_server"
"""Its command; `vllm serve` asks for a distribution called `vllm`, which that for CPUs is not."""
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
MIN_BATCHED_TOKENS = 2048  # tokens of one step of a server on a CPU; a prompt that is not split has to fit into one
POLL_S = 0.1
SHOWN_LINES = 30


@dataclass(frozen=True, slots=True)
class ServedModelSettings:
    folder: Path
    dtype: str
    max_model_len: int
    max_num_seqs: int
    seed: int
    lora_rank: int | None = None  # largest rank of an adapter; None: all weights are trained
    num_adapters: int = 1
    kv_cache_bytes: int | None = None  # memory for keys and values on a CPU; None: a GPU, and vLLM's own choice


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
        settings |= {
            "kv_cache_memory_bytes": model.kv_cache_bytes,
            # a CPU's random generator cannot skip the parts of a seeded request's prompt that sample nothing
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(MIN_BATCHED_TOKENS, model.max_model_len, model.max_num_seqs),
        }
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

    Args:
        name: Of its socket and its log.
        gpus: `CUDA_VISIBLE_DEVICES` of the server; None: that of this process.
    """

    def __init__(self, config: VLLMLaunchConfig, project_root: Path, folder: Path, name: str, gpus: str | None = None):
        self.config, self.folder, self._gpus = config, folder, gpus
        self.socket, self.log = folder / f"{name}.sock", folder / f"{name}.log"
        self._python = find_python(config.python, project_root)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, arguments: Sequence[str]) -> None:
        """Starts the server and a process that kills it with this one; returns at once."""
        command = [str(self._python), "-m", MODULE, "--uds", str(self.socket)]
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", str(SUPERVISOR)),
                *(str(self.folder), str(self.log)),
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
        variables |= {} if self._gpus is None else {CUDA_DEVICES: self._gpus}
        # of its own PATH: ninja, the compiler's driver
        paths = {"PYTHONPATH": str(PLUGIN), "PATH": str(self._python.parent)}
        joined = {name: os.pathsep.join(filter(None, (first, variables.get(name)))) for name, first in paths.items()}
        return {**variables, **joined}

    def connect(self, config: EndpointConfig) -> OpenAIEndpoint:
        return OpenAIEndpoint(config, "http://vllm", socket_path=self.socket)

    async def wait_until_ready(self, client: VLLMClient) -> None:
        """Returns once the server answers."""
        deadline = time.monotonic() + self.config.ready_s
        while True:
            if self.socket.exists():
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
        """Returns how the server has exited, with what its log says; None: it runs."""
        assert self._process is not None
        code = self._process.poll()
        return None if code is None else f"{describe_exit(code)}{self._describe_log()}"

    def _describe_log(self) -> str:
        """Returns the first traceback of the log, which names the cause of the later ones, or else its end."""
        try:
            with open(self.log, encoding="utf-8", errors="replace") as file:
                found, lines = read_traceback(file)
        except OSError:
            return ""
        where = f"{'the first error in' if found else 'the end of'} its log ({self.log})"
        return f"; {where}:\n" + "\n".join(lines) if lines else ""

    async def close(self) -> bool:
        """Ends the server, whose process removes the folder then; returns True if it had died before."""
        if self._process is None:
            return False
        process, self._process = self._process, None
        has_died = process.poll() is not None
        await run_in_daemon_thread(process.communicate, "vllm-close")
        return has_died


def read_traceback(lines: Iterable[str]) -> tuple[bool, list[str]]:
    """Returns True and the end of the first traceback of a log; without one, False and the end of the log.

    Each line of vLLM's tracebacks begins as their first does: `(EngineCore pid=7) ERROR 11-24 10:00:00 [core.py:1] `.
    """
    shown = deque[str](maxlen=SHOWN_LINES)
    indent: int | None = None
    for line in lines:
        if indent is None and (start := line.find("Traceback (most recent call last)")) >= 0:
            indent = start
            shown.clear()
        elif indent is not None and line[indent : indent + 1].strip():
            return True, [*shown, line[: get_limits().error_bytes].rstrip()]
        if line.strip():
            shown.append(line[: get_limits().error_bytes].rstrip())
    return indent is not None, list(shown)


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


logger = logging.getLogger(__name__)

REFUSALS = (401, 403)
GUARDED = "/weight_info"
"""A path that vLLM's own `--api-key` does not guard, as it does not guard those by which weights are sent."""


async def require_guarded_server(client: VLLMClient, config: VLLMSamplerConfig, url: str) -> None:
    """Checks that the server takes our key, and that one elsewhere refuses clients without one."""
    parts = urlsplit(url)
    if parts.scheme == "http" and parts.hostname not in LOOPBACK:
        logger.warning("sampler.url: the key is sent to %s unencrypted; use https", parts.hostname)
    try:
        await client.get_weight_label()
    except RequestRejected as error:
        raise ConfigError(_explain_refusal(error)) from error
    unauthorized = OpenAIEndpoint(config.build_endpoint_config(), url)
    try:
        await unauthorized.call("GET", GUARDED)
    except RequestRejected as error:
        if error.status in REFUSALS:
            return
        raise
    finally:
        await unauthorized.close()
    message = f"{url}{GUARDED} answers without a key, so anyone who reaches the server can change its weights"
    if parts.hostname in LOOPBACK:
        logger.warning("%s; add --middleware reinforge_vllm.KeyGuard, from %s", message, PLUGIN)
        return
    fix = f"start it with VLLM_API_KEY, PYTHONPATH={PLUGIN} and --middleware reinforge_vllm.KeyGuard"
    raise ConfigError(Problem("sampler.url", message, fix))


def _explain_refusal(error: RequestRejected) -> Problem:
    if error.status in REFUSALS:
        return Problem("sampler.api_key", f"the server refuses the key: {error}", "set it to the server's VLLM_API_KEY")
    fix = "start it with VLLM_SERVER_DEV_MODE=1 and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, as docs/scale.md says"
    return Problem("sampler.url", f"the server has no paths by which weights are sent: {error}", fix)


def check_sampler(config: VLLMSamplerConfig, run_config: FinetuneConfig, project_root: Path) -> list[Problem]:
    """Returns why these settings cannot work; paths of the sampler's own settings start at `sampler`."""
    return [*_check_settings(run_config), *_check_launch(config, project_root), *_check_folder(config, project_root)]


def _check_settings(run_config: FinetuneConfig) -> Iterator[Problem]:
    policy, sampling, elsewhere = run_config.policy, run_config.sampling, "a vLLM sampler (trainer_adapters: sampler)"
    if run_config.deterministic:
        message = f"{elsewhere} does not sample the same bits each time"
        yield Problem("finetuning.deterministic", message, "set it to false, or remove the sampler")
    for name, is_set in (("top_p", sampling.top_p < 1), ("top_k", sampling.top_k > 0), ("min_p", sampling.min_p > 0)):
        if is_set:
            message = f"{elsewhere} does not say which tokens {name} kept, so nothing that it samples could be trained"
            yield Problem(f"finetuning.sampling.{name}", message, "remove it, or remove the sampler")
    if run_config.limits.in_flight == "recompute":
        message = (
            f"{elsewhere} already recomputes with keep; with LoRA, replies finish with the adapter they began with"
        )
        yield Problem("finetuning.limits.in_flight", message, "set it to keep")
    if policy.quantization is not None:
        message = f"{elsewhere} is sent plain weights, but the base model is in 4 bits here"
        yield Problem("finetuning.policy.quantization", message, "remove it, or remove the sampler")
    for name in ("modules_to_save", "target_parameters") if policy.lora is not None else ():
        if getattr(policy.lora, name):
            message = f"{elsewhere} does not load adapters with {name}"
            yield Problem(f"finetuning.policy.lora.{name}", message, "remove it, or remove the sampler")


def _check_launch(config: VLLMSamplerConfig, project_root: Path) -> Iterator[Problem]:
    if config.launch is None:
        return
    python = find_python(config.launch.python, project_root)
    if not python.is_file():
        fix = "make an environment for vLLM: python -m venv .venv-vllm; .venv-vllm/bin/pip install vllm"
        yield Problem("sampler.launch.python", f"{python} does not exist", fix)
    elif find_package(python) is None:
        fix = f"install it: {python} -m pip install vllm"
        yield Problem("sampler.launch.python", f"vLLM is not installed in the environment of {python}", fix)


def _check_folder(config: VLLMSamplerConfig, project_root: Path) -> Iterator[Problem]:
    if config.listen is not None:
        try:
            read_address(config.listen)
        except ValueError as error:
            yield Problem("sampler.listen", str(error), "write an address of this machine and a free port")
        if config.launch is not None or config.folder is not None:
            other = "launch" if config.launch is not None else "folder"
            message = f"weights are fetched from there, but {other} says that they are read from a folder"
            yield Problem("sampler.listen", message, f"remove listen or {other}")
    if config.folder is not None and not (project_root / config.folder.expanduser()).is_dir():
        fix = "make it, or remove `folder` if the server is on this machine"
        yield Problem("sampler.folder", f"{config.folder} is not a folder", fix)
