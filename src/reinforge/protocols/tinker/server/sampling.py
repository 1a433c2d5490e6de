"""Sampling over Tinker's protocol: prompts of token ids in, tokens with their log-probs out."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from aiohttp import web

from reinforge.errors import ContextOverflow
from reinforge.interfaces import PolicyServer
from reinforge.protocols.tinker.server.checkpoints import TinkerPath
from reinforge.protocols.tinker.server.futures import TinkerResult, build_proto
from reinforge.protocols.tinker.server.requests import UNSUPPORTED, CreateSamplingSession, Sample, SampleSettings, read
from reinforge.protocols.tinker.server.sessions import TinkerSampler
from reinforge.protocols.tinker.server.slots import Snapshot
from reinforge.protocols.tinker.server.training import TinkerParts
from reinforge.protocols.tinker.server.wire import TinkerReply, write_sample
from reinforge.serving.routes import LIMITS, ApiError, ServerLimits, write_json
from reinforge.types.request import ModelReply, ModelRequest, SamplingParams
from reinforge.types.sample import FloatArray
from reinforge.types.seeding import stable_seed

if TYPE_CHECKING:
    from reinforge.engine.model.adapter_weights import AdapterWeights


@dataclass(eq=False)
class TinkerSampling(TinkerParts):
    def __post_init__(self) -> None:
        self._snapshots: dict[str, tuple[int, Snapshot]] = {}
        self._num_replies = 0

    async def create_session(self, http: web.Request) -> web.Response:
        request = await read(CreateSamplingSession, http)
        session = self._sessions.find(request.session_id)
        sampler_id = f"{session.id}:sample:{request.sampling_session_seq_id}"
        if sampler_id not in session.samplers:
            session.samplers[sampler_id] = await self._make_sampler(sampler_id, request)
        return write_json({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def _make_sampler(self, sampler_id: str, request: CreateSamplingSession) -> TinkerSampler:
        if request.model_path is None:
            if request.base_model is None:
                raise ApiError(400, "either base_model or model_path is needed", param="base_model")
            self.base.check(request.base_model)
            return TinkerSampler(sampler_id, request.base_model)
        path = TinkerPath.parse(request.model_path)
        note = await self._slots.run(lambda: self._checkpoints.read(path))
        return TinkerSampler(sampler_id, note.base_model, self._make_snapshot(path), request.model_path)

    def find_snapshot(self, path: TinkerPath) -> Snapshot:
        """Returns the weights of a checkpoint, which are read when they are needed."""
        known, folder = self._snapshots.get(str(path)), self._checkpoints.find_folder(path)
        if known is None or not folder.is_dir() or known[0] != folder.stat().st_mtime_ns:
            self._checkpoints.read(path)  # which hashes every file, so it is done once
        return self._make_snapshot(path)

    def _make_snapshot(self, path: TinkerPath) -> Snapshot:
        folder, engine = self._checkpoints.find_folder(path), self._slots.engine

        def load() -> AdapterWeights:
            return engine.read_adapter_folder(folder)

        made_ns, known = folder.stat().st_mtime_ns, self._snapshots.get(str(path))
        if known is None or known[0] != made_ns:  # a checkpoint may be overwritten
            known = self._snapshots[str(path)] = made_ns, Snapshot(str(path), load)
        return known[1]

    async def describe(self, http: web.Request) -> web.Response:
        sampler = self._sessions.find_sampler(http.match_info["sampler"])
        return write_json(
            {"sampler_id": sampler.id, "base_model": sampler.base_model, "model_path": sampler.model_path}
        )

    async def sample(self, http: web.Request) -> web.Response:
        return self.submit(await read(Sample, http), http.config_dict[LIMITS])

    def submit(self, request: Sample, limits: ServerLimits) -> web.Response:
        """Begins to sample; the result has the sequences."""
        if request.sampling_session_id is None or request.seq_id is None:
            raise ApiError(400, "sampling_session_id and seq_id are needed; create_sampling_session gives the first")
        sampler = self._sessions.find_sampler(request.sampling_session_id)
        request_id = f"{sampler.id}:{request.seq_id}"
        if request.num_samples > limits.max_choices:
            message = f"num_samples is {request.num_samples}; this server samples at most {limits.max_choices}"
            raise ApiError(400, message, param="num_samples")
        if limits.max_tokens is not None:
            asked = request.sampling_params.max_tokens
            if asked is not None and asked > limits.max_tokens:
                message = f"max_tokens is {asked}; this server samples at most {limits.max_tokens} (--max_tokens)"
                raise ApiError(400, message, param="max_tokens")
            request.sampling_params.max_tokens = asked or limits.max_tokens
        is_full = self._num_replies and self._num_replies + request.num_samples > limits.max_in_flight
        if is_full and not self._futures.has(request_id):
            message = f"{self._num_replies} replies are being sampled or wait; try again in a moment"
            raise ApiError(429, message, code="too_many_requests", headers={"retry-after": "1"})
        self._futures.start(request_id, partial(self._run, sampler, request))
        ids = [f"{request_id}:{i}" for i in range(request.num_samples)]
        return write_json({"request_id": request_id, "sample_sequence_ids": ids})

    async def _run(self, sampler: TinkerSampler, request: Sample) -> TinkerResult:
        count, limit = sum(len(chunk.tokens) for chunk in request.prompt.chunks), self.base.max_model_len
        if count > limit:  # not kept until its turn
            raise ContextOverflow(f"the prompt has {count} tokens, but the limit is {limit} (max_model_len)")
        self._num_replies += request.num_samples
        try:
            async with self._slots.use(sampler.snapshot) as policy:
                return await _sample(policy, request)
        finally:
            self._num_replies -= request.num_samples


async def _sample(policy: PolicyServer, request: Sample) -> TinkerResult:
    for name, allowed in UNSUPPORTED.items():
        if getattr(request, name) not in (allowed, None):
            raise ValueError(f"{name} is not supported by this server")
    prompt = tuple(token for chunk in request.prompt.chunks for token in chunk.tokens)
    settings = [build_params(request.sampling_params, i) for i in range(request.num_samples)]
    asked = [ModelRequest([], each, prompt=prompt, num_top_logprobs=request.topk_sample_logprobs) for each in settings]
    replies = await asyncio.gather(*(policy.sample(each) for each in asked))
    scored = await _score_prompt(policy, request, prompt) if request.prompt_logprobs else None
    return build_proto(write_sample([_read_reply(each) for each in replies], scored, request.topk_sample_logprobs))


def build_params(settings: SampleSettings, number: int) -> SamplingParams:
    """Returns how to sample one of several sequences of a request.

    Stop tokens end a sequence besides the model's own end tokens; an empty list of stops switches those off, too.
    """
    stop, seed = settings.stop, settings.seed
    texts = [stop] if isinstance(stop, str) else [each for each in stop or [] if isinstance(each, str)]
    tokens = [each for each in stop or [] if isinstance(each, int)]
    return SamplingParams(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=max(0, settings.top_k),
        max_tokens=settings.max_tokens,
        stop=tuple(texts),
        seed=seed if seed is None or number == 0 else stable_seed(seed, "sample", number),
        stop_token_ids=tuple(tokens),
        ignore_eos=stop == [],
    )


def _read_reply(reply: ModelReply) -> TinkerReply:
    tokens = reply.tokens
    assert tokens is not None
    top = [[(each.token_id, each.logprob) for each in position] for position in tokens.top_logprobs]
    return TinkerReply(tokens.token_ids, tokens.logprobs, tokens.finish_reason, top)


async def _score_prompt(policy: PolicyServer, request: Sample, prompt: tuple[int, ...]) -> FloatArray:
    """Returns log p of the prompt's tokens at temperature 1; NaN for the first, and before `prompt_logprobs_last_n`."""
    [row] = await policy.score([prompt])
    scored = row.astype(np.float32).copy()
    count = request.prompt_logprobs_last_n
    if count is not None and count >= len(prompt):
        raise ValueError(f"prompt_logprobs_last_n is {count}, expected at most {len(prompt) - 1} for this prompt")
    scored[: 1 if count is None else len(prompt) - count] = np.nan
    return scored
