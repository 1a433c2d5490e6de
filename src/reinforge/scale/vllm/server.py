"""One of the vLLM servers that sample for a run: started or found, sent weights, asked for replies."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from reinforge.adapters.local_config import VLLMSamplerConfig
from reinforge.config.finetuning_blocks import InFlight
from reinforge.errors import BackendError, BackendUnavailable, ConfigError, Problem
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.rollout.models.openai_http import OpenAIEndpoint, RequestRejected, RetryableError
from reinforge.scale.vllm.client import GenerateAnswer, VLLMClient
from reinforge.scale.vllm.process import (
    ServedModelSettings,
    VLLMProcess,
    build_arguments,
    describe_command,
    require_guarded_server,
)
from reinforge.scale.vllm.weight_source import WeightSource

logger = logging.getLogger(__name__)

OLDEST, TESTED = (0, 32), "0.32"
"""The first version of vLLM with every path that is needed, and the one that our tests run."""


class VLLMServer:
    """A server with a whole copy of the model.

    Args:
        model: What it serves.
        process: Its process, which `start` starts; None: it runs at `url`.
        source: Where it fetches weights; None: from the folders in which they are written.
    """

    def __init__(
        self,
        config: VLLMSamplerConfig,
        model: ServedModelSettings,
        *,
        process: VLLMProcess | None = None,
        url: str = "",
        source: WeightSource | None = None,
    ):
        self.config, self.model, self.process, self.url, self._source = config, model, process, url, source
        self._base_name = "policy"
        settings = config.build_endpoint_config()
        endpoint = process.connect(settings) if process else OpenAIEndpoint(settings, url, config.api_key)
        self.client = VLLMClient(endpoint)

    async def start(self) -> None:
        """Returns once the server answers."""
        if self.process is not None:
            self.process.start(build_arguments(self.model, self.process.config.arguments))
            await self.process.wait_until_ready(self.client)
            await self._check_version()
        else:
            await require_guarded_server(self.client, self.config, self.url)
            await self._check_version()
            await self._find_model()

    async def _check_version(self) -> None:
        version = await self.client.get_version()
        numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
        if numbers < OLDEST:
            message = f"the server is vLLM {version}, which cannot be sent weights as needed here"
            raise ConfigError(Problem("sampler", message, f"use vLLM {TESTED} or newer"))
        if numbers != OLDEST:
            logger.warning("the server is vLLM %s; reinforge is tested with %s", version, TESTED)

    async def _find_model(self) -> None:
        model, wanted = await self.client.get_model(), self.model.max_model_len
        if model.max_model_len is not None and model.max_model_len < wanted:
            message = f"the server's context has {model.max_model_len} tokens, but the policy's has {wanted}"
            fix = f"set finetuning.policy.max_model_len: {model.max_model_len}, or start the server with a longer one"
            raise ConfigError(Problem("sampler.url", message, fix))
        self._base_name = model.id

    async def generate(self, body: dict[str, Any], adapter: str | None) -> GenerateAnswer:
        """Samples one reply.

        Args:
            adapter: Name of the adapter; None: all weights are trained.
        """
        try:
            return await self.client.generate({"model": adapter or self._base_name, **body})
        except BackendError as error:
            raise self.explain(error) from error

    def explain(self, error: BackendError) -> BackendError:
        reason = self.process.find_end() if self.process is not None else None
        return error if reason is None else BackendUnavailable(f"the vLLM server {reason}")

    async def is_gone(self) -> bool:
        """Returns True if its process has exited, or else if it does not answer."""
        if self.process is not None and self.process.find_end() is not None:
            return True
        try:
            await self.client.endpoint.send("GET", "/health")
        except (BackendError, RetryableError):
            return True
        return False

    async def add_adapters(self, folders: Mapping[str | None, Path], label: str, *, aborts: bool) -> None:
        """Loads adapters under new names, beside the older ones, with which replies continue that it does not abort."""
        for adapter, folder in folders.items():
            await self._load(adapter, folder)
        await self.client.set_weight_label(label)
        if aborts:
            await self.client.pause("abort")
            await self.client.resume()

    async def send(self, folders: Mapping[str | None, Path], label: str, in_flight: InFlight = "wait") -> None:
        """Loads the weights of folders, by the adapter's name, and lets no key of older ones be used.

        Args:
            in_flight: Whether the new weights wait for the replies in flight, continue them or abort them.
        """
        try:
            await self.client.pause(in_flight)
            for adapter, folder in folders.items():
                if adapter is not None:
                    with suppress(RequestRejected):  # it has none yet
                        await self.client.unload_adapter(adapter)
                await self._load(adapter, folder)
            await self.client.reset_prefix_cache()
            await self.client.set_weight_label(label)
        except BaseException:
            with suppress(BackendError):  # the first error says why
                await self.client.resume()  # another user's server must not stay paused, even if its answer was lost
            raise
        await self.client.resume()

    async def _load(self, adapter: str | None, folder: Path) -> None:
        source, offered = self._source, None
        if source is not None:
            offered = await run_in_daemon_thread(lambda: source.offer(folder, self.url), "vllm-offer")
        try:
            if offered is not None and adapter is None:
                await self.client.fetch_weights(offered)
            elif offered is not None and adapter is not None:
                await self.client.fetch_adapter(adapter, offered)
            elif adapter is None:
                await self.client.reload_weights(folder)
            else:
                await self.client.load_adapter(adapter, folder)
        except BackendError as error:
            if self.process is not None:
                raise
            command = describe_command(build_arguments(replace(self.model, folder=Path("MODEL"), seed=0), {}))
            reads = (
                f"read {folder} (sampler.folder)"
                if offered is None
                else f"reach {offered.url} (sampler.listen; or set sampler.folder)"
            )
            message = f"{error}; it must {reads} and run with our worker extension, started like this:\n{command}"
            raise BackendError(message) from error

    async def close(self) -> bool:
        """Returns True if its process had died before."""
        await self.client.close()
        return self.process is not None and await self.process.close()
