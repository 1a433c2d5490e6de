"""vLLM servers that sample what the embedded engine trains: starts or finds them, and sends them each version.

    write the weights ─► /pause?mode=wait ─► load ─► /reset_prefix_cache ─► label ─► /resume ─► canary ─► requests

No request of an agent reaches a server between the first and the last: a reply is of one version, whose label it
carries; with `mode=keep` replies in flight continue after `/resume`, and carry the label of each part, with `abort`
they are asked for again. A server that is lost takes no reply along; the next version is sent to its replacement, too.

An adapter is never replaced while a reply uses it: vLLM 0.32 then gave further tokens log-probs of neither version.
With `in_flight: keep` or `abort` each version of an adapter has a name of its own.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from reinforge.adapters.local_config import VLLMSamplerConfig
from reinforge.config.finetuning_blocks import LimitsConfig
from reinforge.engine.policies import NamedPolicies
from reinforge.engine.sampling.running_batch import ABORTED
from reinforge.errors import BackendError, BackendUnavailable, JobFailed
from reinforge.interfaces import PolicyServer
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.rollout.models.endpoint_config import LOOPBACK
from reinforge.scale.engine_group import EngineRouter
from reinforge.scale.vllm.client import GenerateAnswer
from reinforge.scale.vllm.policy import NUM_LONGEST, Admission, VLLMPolicy
from reinforge.scale.vllm.process import ServedModelSettings, VLLMProcess, check_sampler
from reinforge.scale.vllm.server import VLLMServer
from reinforge.scale.vllm.weight_source import WeightSource
from reinforge.types.request import ModelRequest, SamplingParams

if TYPE_CHECKING:
    from reinforge.engine import Engine


logger = logging.getLogger(__name__)

MODEL = "model"
MAX_LOST = 3  # servers that may die while they sample one reply: perhaps it is the reply that kills them
MIN_KV_CACHE = 2**30  # memory for keys and values on a CPU: those of the replies in flight too, beside the prefix cache


class VLLMSampler:
    """The servers, and the policies that they sample.

    Attributes:
        servers: By their place, which a replacement takes over.
    """

    def __init__(
        self,
        config: VLLMSamplerConfig,
        engine: Engine,
        adapters: Sequence[str],
        project_root: Path,
        limits: LimitsConfig,
    ):
        self.config, self._project_root = config, project_root
        self._in_flight, self._waits = limits.in_flight, limits.in_flight == "wait"
        self.admission = Admission()
        self._run, self._version = secrets.token_hex(4), engine.policy.version
        self._lock = asyncio.Lock()
        self._folder = self._choose_folder()
        self._weights = WeightSource(config.listen)
        self.servers: dict[int, VLLMServer] = {}
        self._router = EngineRouter(())
        self._replacing: dict[int, asyncio.Task[VLLMServer]] = {}
        self._num_started = 0
        self._sent: dict[int, dict[str, Path]] = {}  # by version, the oldest first: what the servers still have
        self._source = engine
        self._described = self._source.describe_model()
        has_adapters = self._described.lora_rank is not None
        self.keeps_adapters = has_adapters and not self._waits
        self._num_kept = limits.max_staleness + 1 if self.keeps_adapters else 1
        policies = {
            name: VLLMPolicy(
                own, self._source.get_codec(name), f"reinforge-{self._run}-{name}" if has_adapters else None, self
            )
            for name, own in engine.policies.items()
        }
        self._policies = policies
        names = dict(zip(adapters, policies.values(), strict=False)) if len(adapters) == len(policies) else {}
        self.policy: PolicyServer = JointPolicies(names, self) if names else next(iter(policies.values()))

    check = staticmethod(check_sampler)

    def _choose_folder(self) -> Path:
        if self.config.folder is None or self.config.launch is not None:
            return Path(tempfile.mkdtemp(prefix="reinforge-vllm-"))  # which only this user can enter
        return (self._project_root / self.config.folder.expanduser()).resolve() / f"reinforge-{self._run}"

    @property
    def version(self) -> int:
        return self._version

    @property
    def label(self) -> str:
        return self.name_version(self._version)

    def name_version(self, version: int) -> str:
        return f"reinforge-{self._run}-{version}"

    async def start(self, seed: int) -> None:
        """Returns once all servers serve the engine's weights."""
        launch, model = self.config.launch, self._folder / MODEL
        self._model = self._describe_model(model, seed)
        if launch is not None:
            await run_in_daemon_thread(lambda: self._source.write_base(model), "vllm-model")
            logger.info("starting vLLM" if launch.replicas == 1 else "starting %d vLLM servers", launch.replicas)
        count = len(self.config.urls) if launch is None else launch.replicas
        self.servers = {place: self._make_server(place) for place in range(count)}
        self._slots = {place: asyncio.Semaphore(self._described.max_num_seqs) for place in self.servers}
        await asyncio.gather(*(server.start() for server in self.servers.values()))
        for place in self.servers:
            self._router.add(place)
        if launch is not None and count == 1:
            for file in model.glob("*.safetensors"):  # it has read them, and will not be replaced
                file.unlink()
        await self.publish(self._version)

    def _make_server(self, place: int) -> VLLMServer:
        launch = self.config.launch
        if launch is None:
            url, config = self.config.urls[place], self.config
            is_here = config.listen is None and urlsplit(url).hostname in LOOPBACK
            source = None if is_here or config.folder is not None else self._weights
            return VLLMServer(config, self._model, url=url, source=source)
        name, self._num_started = f"server-{self._num_started}", self._num_started + 1
        gpus = None if launch.gpus is None else launch.gpus[place]
        process = VLLMProcess(launch, self._project_root, self._folder, name, gpus)
        return VLLMServer(self.config, self._model, process=process)

    def _describe_model(self, folder: Path, seed: int) -> ServedModelSettings:
        found = self._described
        return ServedModelSettings(
            folder,
            found.dtype,
            found.max_model_len,
            found.max_num_seqs + (0 if self._waits else NUM_PROBES),  # which begin at once
            seed,
            found.lora_rank,
            len(self._policies) * (self._num_kept + self.keeps_adapters),  # the newest is loaded before the oldest goes
            None if found.kv_cache_bytes is None else max(MIN_KV_CACHE, found.kv_cache_bytes),
        )

    async def generate(self, key: str, body: dict[str, Any], adapter: str | None) -> tuple[GenerateAnswer, int]:
        """Samples one reply of a conversation, all of whose turns one server samples; if it dies, another one.

        Returns:
            The answer, and the version that was served when it began.
        """
        num_lost = 0
        while True:
            place = self._router.acquire(key)
            assert place is not None  # the last one is never taken out
            try:
                async with nullcontext() if self._waits else self._slots[place]:
                    if not self._waits:  # a version may be on its way
                        await self.admission.wait()
                    name, version = self._name_adapter(adapter), self._version
                    answer = await self.servers[place].generate(body, name)
                if self._in_flight != "abort" or answer.choices[0].finish_reason != ABORTED:
                    return answer, version
            except BackendUnavailable as error:
                num_lost += 1
                if num_lost == MAX_LOST or not await self._take_out(place, error):
                    raise
            finally:
                self._router.release(place)

    def _name_adapter(self, adapter: str | None, version: int | None = None) -> str | None:
        """Returns what the servers call an adapter of a version; None: of the newest."""
        if adapter is None or not self.keeps_adapters:
            return adapter
        return f"{adapter}-{self._version if version is None else version}"

    async def _take_out(self, place: int, error: BackendError) -> bool:
        """Lets a server that is gone sample no more, and replaces it if the run has started it.

        Returns False if it answers, or is the last one.
        """
        if len(self._router) > 1 and self._router.has(place) and not await self.servers[place].is_gone():
            return False
        if not self._router.has(place):  # another reply has found it
            return True
        if len(self._router) == 1:
            return False
        self._router.remove(place)
        logger.warning("a vLLM server is lost, %d of %d are left: %s", len(self._router), len(self.servers), error)
        if self.config.launch is not None:
            self._replacing[place] = asyncio.create_task(self._replace(place))
        return True

    async def _replace(self, place: int) -> VLLMServer:
        server = self._make_server(place)
        try:
            await server.start()
        except BaseException:
            await server.close()
            raise
        return server

    async def publish(self, version: int) -> None:
        """Sends the weights of all adapters to all servers, and admits requests once they are served."""
        async with self._lock:
            await self.admission.close(waits=self._waits)
            try:
                self._version = version
                await self._take_in()
                await self._send()
                for policy in self._policies.values():
                    policy.longest_prompts.clear()
                    await policy.own.publish(version)
            except BaseException as error:
                self.admission.open(failure=error)
                raise
            self.admission.open()

    async def _take_in(self) -> None:
        """Adds servers that were lost: replacements that have started, and those at a URL that answer again."""
        for place, task in list(self._replacing.items()):
            if not task.done():
                continue
            del self._replacing[place]
            if (error := task.exception()) is not None:
                logger.warning("a vLLM server could not be replaced: %s", error)
                self._replacing[place] = asyncio.create_task(self._replace(place))
                continue
            lost, self.servers[place] = self.servers[place], task.result()
            await lost.close()
            self._router.add(place)
        for place, server in self.servers.items():
            if server.process is None and not self._router.has(place) and not await server.is_gone():
                await server.start()
                self._router.add(place)
        self._router.forget()

    async def _send(self) -> None:
        folders = await run_in_daemon_thread(self._write, "vllm-weights")
        places = [place for place in self.servers if self._router.has(place)]
        results = await asyncio.gather(*(self._send_to(place, folders) for place in places), return_exceptions=True)
        for place, error in zip(places, results, strict=True):
            if error is not None and not (isinstance(error, BackendError) and await self._take_out(place, error)):
                raise error
        self._remove_files(self._sent.pop(self._version, {}))  # if it is sent again
        self._sent[self._version] = folders
        while len(self._sent) > self._num_kept:
            oldest = next(iter(self._sent))
            await self._forget(oldest, self._sent.pop(oldest))

    async def _forget(self, version: int, folders: Mapping[str, Path]) -> None:
        """Unloads the adapters of a version that no reply in flight has, and removes its files."""
        servers = [server for place, server in self.servers.items() if self.keeps_adapters and self._router.has(place)]
        for server in servers:
            for name in folders:
                with suppress(BackendError):  # one that joined later, or was lost, does not have it
                    await server.client.unload_adapter(str(self._name_adapter(self._policies[name].adapter, version)))
        self._remove_files(folders)

    def _remove_files(self, folders: Mapping[str, Path]) -> None:
        for folder in folders.values():
            self._weights.withdraw(folder)
            shutil.rmtree(folder.parent, ignore_errors=True)

    async def _send_to(self, place: int, folders: Mapping[str, Path]) -> None:
        server, policies = self.servers[place], self._policies
        try:
            if self.keeps_adapters:
                named = {self._name_adapter(policies[name].adapter): folder for name, folder in folders.items()}
                await server.add_adapters(named, self.label, aborts=self._in_flight == "abort")
            else:
                sent = {policies[name].adapter: folder for name, folder in folders.items()}
                await server.send(sent, self.label, self._in_flight)
            for policy in policies.values():
                adapter = self._name_adapter(policy.adapter)
                difference = await check_served_weights(policy, adapter, self._version, server)
                logger.info(
                    "vLLM%s serves version %d: log-probs agree to %.1e nats",
                    f" ({place + 1} of {len(self.servers)})" if len(self.servers) > 1 else "",
                    self._version,
                    difference,
                )
        except BackendError as error:
            raise server.explain(error) from error

    def _write(self) -> dict[str, Path]:
        place = self._folder / f"{self.label}-{secrets.token_hex(2)}"  # a path that no earlier weights had
        place.mkdir(parents=True)
        folders = {name: place / name for name in self._policies}
        for name, folder in folders.items():
            self._source.write(folder, self._version, name, with_training=False)
        return folders

    async def close(self) -> None:
        """Ends the servers and removes the folder; the logs of those that have died are kept."""
        for task in self._replacing.values():
            task.cancel()
        await asyncio.gather(*self._replacing.values(), return_exceptions=True)
        kept = set()
        for server in self.servers.values():
            if await server.close() and server.process is not None:
                kept.add(server.process.log)
        self._weights.close()
        await run_in_daemon_thread(lambda: remove_folder(self._folder, kept), "vllm-close")


def remove_folder(folder: Path, kept: set[Path]) -> None:
    for path in folder.iterdir() if kept and folder.is_dir() else ():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path not in kept:
            path.unlink(missing_ok=True)
    if not kept:
        shutil.rmtree(folder, ignore_errors=True)


class JointPolicies(NamedPolicies):
    """Several adapters at one server, which are sent together."""

    def __init__(self, policies: Mapping[str, PolicyServer], server: VLLMSampler):
        super().__init__(policies)
        self._server = server

    async def publish(self, version: int) -> None:
        await self._server.publish(version)


PROBE_TOKENS = 300
"""Tokens of the prompt that is sampled each time: a block of vLLM's prefix cache has 16 on a GPU and 128 on a CPU."""
NUM_PROBES = 1 + NUM_LONGEST  # prompts that are sampled to check new weights
REPLY_TOKENS = 8
PROBE_TEXT = " ".join(map(str, range(1, PROBE_TOKENS)))


async def check_served_weights(policy: VLLMPolicy, adapter: str | None, version: int, server: VLLMServer) -> float:
    """Returns the largest difference between a server's and the learner's log-probs, in nats.

    Weights can be old in two ways without an error: a layer keeps them (a packed output layer that is tied to the
    embeddings), or the prefix cache keeps keys and values that they computed. So the same long prompt is sampled after
    every change of the weights, with the longest prompts of the agents: the cache held them under the older weights.

    Raises:
        JobFailed: It is larger than the policy's tolerance; the message says whether the prefix cache is the cause.
    """
    prompts = [build_probe(policy), *(prompt for _, prompt in policy.longest_prompts)]
    largest = await _measure(policy, adapter, prompts, server)
    if largest <= policy.tolerance:
        return largest
    uncached = await _measure(policy, adapter, prompts, server, reads_prefix_cache=False)
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
    token_ids: Sequence[int] = policy.codec.renderer.tokenizer.encode(PROBE_TEXT)
    return tuple(token_ids[: max(1, min(PROBE_TOKENS, policy.max_model_len - REPLY_TOKENS))])


async def _measure(
    policy: VLLMPolicy,
    adapter: str | None,
    prompts: Iterable[tuple[int, ...]],
    server: VLLMServer,
    *,
    reads_prefix_cache: bool = True,
) -> float:
    requests = [
        policy.codec.build_request(
            ModelRequest([], SamplingParams(max_tokens=REPLY_TOKENS, seed=number), prompt=prompt), None
        )
        for number, prompt in enumerate(prompts)
    ]
    bodies = [policy.build_body(each, reads_prefix_cache=reads_prefix_cache) for each in requests]
    answers = await asyncio.gather(*(server.generate(body, adapter) for body in bodies))
    for request, answer in zip(requests, answers, strict=True):
        policy.fill_in(request, answer, policy.version)
    scored = await policy.score([[*each.prompt, *each.token_ids] for each in requests])
    differences = [
        np.abs(row[-len(each.token_ids) :] - np.asarray(each.logprobs))
        for row, each in zip(scored, requests, strict=True)
    ]
    largest = float(np.max(np.concatenate(differences)))
    return largest if np.isfinite(largest) else np.inf
