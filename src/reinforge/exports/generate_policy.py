"""A model folder served by transformers' own `generate`, as a policy server: what a user of the folder gets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reinforge.config.policy import PolicyConfig
from reinforge.engine.checkpoint import hide_progress_bars
from reinforge.engine.model.hub import check_model_source
from reinforge.engine.model.loading import DTYPES, load_module, load_tokenizer, pick_device
from reinforge.engine.prompts.chat_template import PromptRenderer
from reinforge.engine.request_codec import cut_at_stop, find_end_tokens
from reinforge.errors import ContextOverflow
from reinforge.exports.frozen_policy import FrozenPolicy
from reinforge.exports.merging import WHERE
from reinforge.types.request import ModelReply, ModelRequest, SamplingParams
from reinforge.types.sample import FloatArray

MAX_ROWS = 32  # requests that one call of `generate` takes together

Waiting = tuple[ModelRequest, tuple[int, ...], "asyncio.Future[ModelReply]"]


class GeneratePolicy(FrozenPolicy):
    """Replies by `model.generate`: requests that wait at the same time and sample alike form a batch."""

    def __init__(self, folder: Path, *, device: str = "auto", dtype: str = "float32", history: str, seed: int):
        check_model_source(folder, WHERE)
        with hide_progress_bars():
            module: Any = load_module(folder, DTYPES[dtype])
        self.module = module.to(pick_device(device)).eval()
        self.tokenizer = load_tokenizer(PolicyConfig(model=str(folder)))
        self.ends = find_end_tokens(module, self.tokenizer)
        self.renderer = PromptRenderer(self.tokenizer, self.ends, history=history)
        super().__init__(folder, self.renderer.chat_template, seed)
        self._waiting = list[Waiting]()

    @property
    def history(self) -> str:
        return self.renderer.history

    async def sample(self, request: ModelRequest) -> ModelReply:
        sampling = request.sampling
        if request.grammar or sampling.logit_bias or sampling.frequency_penalty or sampling.presence_penalty:
            raise ValueError("transformers' generate has no grammars, penalties of OpenAI's kind and logit biases")
        prompt, limit = self.renderer.render(request), self.module.config.max_position_embeddings
        if len(prompt) >= limit:
            raise ContextOverflow(f"the prompt has {len(prompt)} tokens, but the limit is {limit}")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ModelReply] = loop.create_future()
        self._waiting.append((request, prompt, future))
        if len(self._waiting) == 1:
            loop.call_soon(lambda: loop.create_task(self._drain(loop)))
        return await future

    async def _drain(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            await asyncio.sleep(0)  # episodes that end together ask together
            alike = _key(self._waiting[0][0].sampling)
            batch = [each for each in self._waiting if _key(each[0].sampling) == alike][:MAX_ROWS]
            try:
                rows = [prompt for _, prompt, _ in batch]
                sampling = [request.sampling for request, _, _ in batch]
                generated = await loop.run_in_executor(self._thread, self.generate, rows, sampling)
                replies = [
                    self._build_reply(request, prompt, tokens)
                    for (request, prompt, _), tokens in zip(batch, generated, strict=True)
                ]
            except Exception as error:  # noqa: BLE001  raised again where each caller waits
                for _, _, future in batch:
                    if not future.done():
                        future.set_exception(error)
            else:
                for (_, _, future), reply in zip(batch, replies, strict=True):
                    if not future.done():
                        future.set_result(reply)
            taken = {id(each) for each in batch}
            self._waiting = [each for each in self._waiting if id(each) not in taken]

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> list[tuple[int, ...]]:
        """Returns the sampled tokens of each prompt, the one that ends it included."""
        longest, first = max(map(len, prompts)), sampling[0]
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.ends[0]
        ids = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in prompts], device=self.module.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts], device=ids.device)
        room = self.module.config.max_position_embeddings - longest
        limits = [min(room, each.max_tokens or room) for each in sampling]
        torch.manual_seed(self._seed + self._calls)
        self._calls += 1
        names = ("temperature", "top_p", "top_k", "min_p")
        settings: dict[str, Any] = {"do_sample": first.temperature > 0, **dict.fromkeys(names)}
        if first.temperature > 0:
            settings |= {name: getattr(first, name) for name in names} | {"min_p": first.min_p or None}
        out = self.module.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max(limits),
            eos_token_id=self.ends,
            pad_token_id=pad,
            repetition_penalty=None,
            **settings,
        )
        rows = [row[longest:].tolist()[:limit] for row, limit in zip(out, limits, strict=True)]
        counts = [next((i for i, token in enumerate(row, 1) if token in self.ends), len(row)) for row in rows]
        return [tuple(row[:count]) for row, count in zip(rows, counts, strict=True)]

    def _build_reply(self, request: ModelRequest, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> ModelReply:
        text, stop = self.renderer.decode(tokens), request.sampling.stop
        raw, cut = self.renderer.decode_raw(tokens), cut_at_stop(text, stop)
        is_done = cut != text or (bool(tokens) and tokens[-1] in self.ends)
        raw = None if raw is None else cut_at_stop(raw, stop)
        return self._make_reply(request, prompt, tokens, cut, is_done=is_done, raw=raw)

    @torch.no_grad()
    def _score(self, row: Sequence[int]) -> FloatArray:
        ids = torch.tensor([list(row)], device=self.module.device)
        logits = self.module(input_ids=ids).logits[0, :-1].float()
        chosen = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        return np.concatenate([[0.0], chosen.cpu().numpy()]).astype(np.float32)


def _key(sampling: SamplingParams) -> tuple[float, float, int, float]:
    return sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p
