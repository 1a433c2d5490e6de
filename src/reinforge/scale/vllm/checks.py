"""Refuses servers to which anyone could send weights, and settings that a vLLM sampler cannot honour."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from reinforge.adapters.local_config import VLLMSamplerConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import ConfigError, Problem
from reinforge.rollout.models.openai_config import LOOPBACK
from reinforge.rollout.models.openai_http import OpenAIEndpoint, RequestRejected
from reinforge.scale.vllm.client import VLLMClient
from reinforge.scale.vllm.process import PLUGIN, find_package, find_python

logger = logging.getLogger(__name__)

REFUSALS = (401, 403)
GUARDED = "/weight_info"
"""A path that vLLM's own `--api-key` does not guard, as it does not guard those by which weights are sent."""


async def require_guarded_server(client: VLLMClient, config: VLLMSamplerConfig) -> None:
    """Checks that the server takes our key, and that one elsewhere refuses whoever has none."""
    assert config.url is not None
    parts = urlsplit(config.url)
    if parts.scheme == "http" and parts.hostname not in LOOPBACK:
        logger.warning("sampler.url: the key is sent to %s unencrypted; use https", parts.hostname)
    try:
        await client.get_weight_label()
    except RequestRejected as error:
        raise ConfigError(_explain_refusal(error)) from error
    stranger = OpenAIEndpoint(config.build_endpoint_config(), config.url)
    try:
        await stranger.call("GET", GUARDED)
    except RequestRejected as error:
        if error.status in REFUSALS:
            return
        raise
    finally:
        await stranger.close()
    message = f"{config.url}{GUARDED} answers without a key, so whoever reaches the server can change its weights"
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
    if config.folder is not None and not (project_root / config.folder.expanduser()).is_dir():
        fix = "make it, or remove `folder` if the server is on this machine"
        yield Problem("sampler.folder", f"{config.folder} is no folder", fix)
