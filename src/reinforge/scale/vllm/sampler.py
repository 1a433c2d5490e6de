"""A vLLM server that samples what the embedded engine trains: starts or finds it, and sends it each version.

    write the weights ─► /pause?mode=wait ─► load ─► /reset_prefix_cache ─► label ─► /resume ─► canary ─► requests

No request of an agent reaches the server between the first and the last: a reply is of one version, whose label it
carries.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reinforge.adapters.local_config import VLLMSamplerConfig
from reinforge.engine.policies import NamedPolicies
from reinforge.errors import BackendError, BackendUnavailable, ConfigError, JobFailed, Problem
from reinforge.interfaces import PolicyServer
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.rollout.models.openai_http import OpenAIEndpoint
from reinforge.scale.vllm.client import GenerateAnswer, VLLMClient
from reinforge.scale.vllm.policy import Admission, VLLMPolicy
from reinforge.scale.vllm.process import (
    ServedModelSettings,
    VLLMProcess,
    build_arguments,
    check_sampler,
    describe_command,
    require_guarded_server,
)
from reinforge.types.request import ModelRequest, SamplingParams

if TYPE_CHECKING:
    from reinforge.engine import Engine


logger = logging.getLogger(__name__)

OLDEST, TESTED = (0, 32), "0.32"
"""The first version of vLLM with every path that is needed, and the one that our tests run."""
MODEL = "model"
MIN_KV_CACHE = 2**30  # memory for keys and values on a CPU: those of the replies in flight too, beside the prefix cache


class VLLMSampler:
    """One server and the policies that it samples."""

    def __init__(
        self, config: VLLMSamplerConfig, engine: Engine, adapters: Sequence[str] = (), project_root: Path = Path()
    ):
        self.config, self.engine = config, engine
        self.admission = Admission()
        self._run, self._version = secrets.token_hex(4), engine.policy.version
        self._lock = asyncio.Lock()
        self._process = None if config.launch is None else VLLMProcess(config.launch, project_root)
        self._folder = self._choose_folder(project_root)
        self._client = VLLMClient(self._connect())
        self._sent: list[Path] = []
        policies = {
            name: VLLMPolicy(own, f"reinforge-{self._run}-{name}" if engine.model.has_adapters else "policy", self)
            for name, own in engine.policies.items()
        }
        self._policies = policies
        names = dict(zip(adapters, policies.values(), strict=False)) if len(adapters) == len(policies) else {}
        self.policy: PolicyServer = JointPolicies(names, self) if names else policies[engine.policy.adapter]

    check = staticmethod(check_sampler)

    def _choose_folder(self, project_root: Path) -> Path:
        if self._process is not None:
            return self._process.folder
        if self.config.folder is None:
            return Path(tempfile.mkdtemp(prefix="reinforge-vllm-"))
        return (project_root / self.config.folder.expanduser()).resolve() / f"reinforge-{self._run}"

    def _connect(self) -> OpenAIEndpoint:
        settings = self.config.build_endpoint_config()
        if self._process is not None:
            return self._process.connect(settings)
        assert self.config.url is not None
        return OpenAIEndpoint(settings, self.config.url, self.config.api_key)

    @property
    def version(self) -> int:
        return self._version

    @property
    def label(self) -> str:
        return f"reinforge-{self._run}-{self._version}"

    async def start(self, seed: int) -> None:
        """Returns once the server serves the engine's weights."""
        if self._process is not None:
            await self._launch(self._process, seed)
        else:
            await require_guarded_server(self._client, self.config)
        await self._check_version()
        if self._process is None:
            await self._find_model()
        await self.publish(self._version)

    async def _launch(self, process: VLLMProcess, seed: int) -> None:
        folder = process.folder / MODEL
        await run_in_daemon_thread(lambda: self.engine.write_base(folder), "vllm-model")
        assert self.config.launch is not None
        process.start(build_arguments(self._describe_model(folder, seed), self.config.launch.arguments))
        logger.info("starting vLLM")
        await process.wait_until_ready(self._client)
        for file in folder.glob("*.safetensors"):  # it has read them
            file.unlink()

    def _describe_model(self, folder: Path, seed: int) -> ServedModelSettings:
        engine = self.engine
        return ServedModelSettings(
            folder,
            str(engine.model.dtype).removeprefix("torch."),
            engine.policy.max_model_len,
            engine.config.max_num_seqs,
            seed,
            find_largest_rank(engine.model.module.peft_config) if engine.model.has_adapters else None,
            len(engine.policies),
            max(MIN_KV_CACHE, engine.config.kv_cache_mb * 2**20) if engine.model.device.type == "cpu" else None,
        )

    async def _check_version(self) -> None:
        version = await self._client.get_version()
        numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
        if numbers < OLDEST:
            message = f"the server is vLLM {version}, which cannot be sent weights as needed here"
            raise ConfigError(Problem("sampler", message, f"use vLLM {TESTED} or newer"))
        if numbers != OLDEST:
            logger.warning("the server is vLLM %s; reinforge is tested with %s", version, TESTED)

    async def _find_model(self) -> None:
        model = await self._client.get_model()
        wanted = self.engine.policy.max_model_len
        if model.max_model_len is not None and model.max_model_len < wanted:
            message = f"the server's context has {model.max_model_len} tokens, but the policy's has {wanted}"
            fix = f"set finetuning.policy.max_model_len: {model.max_model_len}, or start the server with a longer one"
            raise ConfigError(Problem("sampler.url", message, fix))
        if not self.engine.model.has_adapters:
            for policy in self._policies.values():
                policy.served_name = model.id

    async def generate(self, body: dict[str, Any]) -> GenerateAnswer:
        try:
            return await self._client.generate(body)
        except BackendError as error:
            raise self._explain(error) from error

    def _explain(self, error: BackendError) -> BackendError:
        reason = self._process.find_end() if self._process is not None else None
        return error if reason is None else BackendUnavailable(f"the vLLM server {reason}")

    async def publish(self, version: int) -> None:
        """Sends the weights of all adapters, and admits requests once they are served."""
        async with self._lock:
            await self.admission.close()
            try:
                self._version = version
                await self._send()
                for policy in self._policies.values():
                    difference = await check_served_weights(policy, version)
                    policy.longest_prompts.clear()
                    await policy.own.publish(version)
                    logger.info("vLLM serves version %d: log-probs agree to %.1e nats", version, difference)
            except BaseException as error:
                cause = self._explain(error) if isinstance(error, BackendError) else error
                self.admission.open(failure=cause)
                if cause is error:
                    raise
                raise cause from error
            self.admission.open()

    async def _send(self) -> None:
        folders = await run_in_daemon_thread(self._write, "vllm-weights")
        try:
            await self._client.pause()
            for name, folder in folders.items():
                await self._load(self._policies[name].served_name, folder)
            await self._client.reset_prefix_cache()
            await self._client.set_weight_label(self.label)
        except BaseException:
            with suppress(BackendError):  # the first error says why
                await self._client.resume()  # another user's server must not stay paused, even if its answer was lost
            raise
        await self._client.resume()
        sent, self._sent = self._sent, list(folders.values())
        for folder in sent:
            shutil.rmtree(folder.parent, ignore_errors=True)

    def _write(self) -> dict[str, Path]:
        place = self._folder / f"{self.label}-{secrets.token_hex(2)}"  # a path that no earlier weights had
        place.mkdir(parents=True)
        folders = {name: place / name for name in self._policies}
        for name, folder in folders.items():
            self.engine.write(folder, self._version, name, with_training=False)
        return folders

    async def _load(self, name: str, folder: Path) -> None:
        try:
            if self.engine.model.has_adapters:
                await self._client.load_adapter(name, folder)
            else:
                await self._client.reload_weights(folder)
        except BackendError as error:
            if self._process is not None:
                raise
            command = describe_command(build_arguments(self._describe_model(Path("MODEL"), 0), {}))
            raise BackendError(
                f"{error}; it must read {folder} (sampler.folder) and run with our worker extension, started like "
                f"this:\n{command}"
            ) from error

    async def close(self) -> None:
        await self._client.close()
        if self._process is not None:
            await self._process.close()
        else:
            await run_in_daemon_thread(lambda: shutil.rmtree(self._folder, ignore_errors=True), "vllm-close")


class JointPolicies(NamedPolicies):
    """Several adapters at one server, which are sent together."""

    def __init__(self, policies: Mapping[str, PolicyServer], server: VLLMSampler):
        super().__init__(policies)
        self._server = server

    async def publish(self, version: int) -> None:
        await self._server.publish(version)


def find_largest_rank(settings: dict[str, Any]) -> int:
    return max(rank for each in settings.values() for rank in (each.r, *(each.rank_pattern or {}).values()))


PROBE_TOKENS = 300
"""Tokens of the prompt that is sampled each time: a block of vLLM's prefix cache has 16 on a GPU and 128 on a CPU."""
REPLY_TOKENS = 8
PROBE_TEXT = " ".join(map(str, range(1, PROBE_TOKENS)))


async def check_served_weights(policy: VLLMPolicy, version: int) -> float:
    """Returns the largest difference between the sampler's and the learner's log-probs, in nats.

    Weights can be old in two ways without an error: a layer keeps them (a packed output layer that is tied to the
    embeddings), or the prefix cache keeps keys and values that they computed. So the same long prompt is sampled after
    every change of the weights, with the longest prompts of the agents: the cache held them under the older weights.

    Raises:
        JobFailed: It is larger than the policy's tolerance; the message says whether the prefix cache is the cause.
    """
    prompts = [build_probe(policy), *(prompt for _, prompt in policy.longest_prompts)]
    largest = await _measure(policy, prompts)
    if largest <= policy.tolerance:
        return largest
    uncached = await _measure(policy, prompts, reads_prefix_cache=False)
    cause = (
        "its prefix cache still holds keys of older weights: /reset_prefix_cache had no effect"
        if uncached <= policy.tolerance
        else f"also without its prefix cache ({uncached:.2e}): a layer kept older weights, or it has another model, "
        "data type or logprobs_mode"
    )
    raise JobFailed(
        f"the vLLM server does not serve the weights of version {version}: log-probs of the same tokens differ by up "
        f"to {largest:.2e} nats between sampler and learner, {cause}"
    )


def build_probe(policy: VLLMPolicy) -> tuple[int, ...]:
    """Returns a prompt that fills blocks of the prefix cache, if the context has room for one."""
    token_ids: Sequence[int] = policy.own.renderer.tokenizer.encode(PROBE_TEXT)
    return tuple(token_ids[: max(1, min(PROBE_TOKENS, policy.max_model_len - REPLY_TOKENS))])


async def _measure(policy: VLLMPolicy, prompts: Iterable[tuple[int, ...]], *, reads_prefix_cache: bool = True) -> float:
    requests = [
        policy.own.build_request(
            ModelRequest([], SamplingParams(max_tokens=REPLY_TOKENS, seed=number), prompt=prompt), None
        )
        for number, prompt in enumerate(prompts)
    ]
    await asyncio.gather(*(policy.fill_in(each, reads_prefix_cache=reads_prefix_cache) for each in requests))
    scored = await policy.score([[*each.prompt, *each.token_ids] for each in requests])
    differences = [
        np.abs(row[-len(each.token_ids) :] - np.asarray(each.logprobs))
        for row, each in zip(scored, requests, strict=True)
    ]
    largest = float(np.max(np.concatenate(differences)))
    return largest if np.isfinite(largest) else np.inf
