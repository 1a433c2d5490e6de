"""A GGUF file served by llama.cpp in this process (the package llama-cpp-python), as a policy server.

Everything comes from the file: its chat template renders the messages, its tokenizer makes the tokens.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reinforge.errors import BackendError, ContextOverflow, EngineError, boundary
from reinforge.exports.frozen_policy import FrozenPolicy
from reinforge.types.request import ModelReply, ModelRequest, SamplingParams
from reinforge.types.sample import FloatArray
from reinforge.types.seeding import stable_seed

INSTALL = "pip install llama-cpp-python (it compiles llama.cpp, in about five minutes)"
TEMPLATE = "tokenizer.chat_template"


def has_llama_cpp() -> bool:
    return importlib.util.find_spec("llama_cpp") is not None


class LlamaCppPolicy(FrozenPolicy):
    """Samples one reply after the other.

    Args:
        max_model_len: Longest prompt with its reply, in tokens.
        exact: Keys and values in float32, to compare log-probs; llama.cpp's default is float16.
    """

    def __init__(self, path: Path, *, max_model_len: int, seed: int, exact: bool = False):
        import llama_cpp
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        self._library, self.max_model_len = llama_cpp, max_model_len
        kind = llama_cpp.GGML_TYPE_F32 if exact else None
        with boundary(BackendError, f"llama.cpp cannot load {path}"):
            self.model: Any = llama_cpp.Llama(
                str(path), n_ctx=max_model_len, seed=seed, type_k=kind, type_v=kind, logits_all=True, verbose=False
            )
        template = self.model.metadata.get(TEMPLATE)
        if template is None:
            raise BackendError(f"{path} has no chat template")
        bos, eos = (
            "" if token < 0 else str(self.model.detokenize([token], special=True).decode("utf-8", "replace"))
            for token in (self.model.token_bos(), self.model.token_eos())
        )
        self._format = Jinja2ChatFormatter(template=template, eos_token=eos, bos_token=bos)
        super().__init__(path, template, seed)

    def tokenize(self, request: ModelRequest) -> list[int]:
        """Returns the prompt's tokens, by the template and the tokenizer in the file."""
        if isinstance(request.prompt, tuple):
            return list(request.prompt)
        if request.prompt is not None:
            return list(self.model.tokenize(request.prompt.encode(), add_bos=True, special=True))
        with boundary(EngineError, f"the chat template of {self._path} rejects the messages"):
            text = self._format(messages=request.messages, tools=request.tools, **request.template_kwargs).prompt
        return list(self.model.tokenize(text.encode(), add_bos=False, special=True))

    async def sample(self, request: ModelRequest) -> ModelReply:
        if request.grammar is not None or request.sampling.logit_bias:
            raise ValueError("the judge samples from llama.cpp without grammars and logit biases")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._reply, request)

    def _reply(self, request: ModelRequest) -> ModelReply:
        prompt = self.tokenize(request)
        if len(prompt) >= self.max_model_len:
            raise ContextOverflow(f"the prompt has {len(prompt)} tokens, but the limit is {self.max_model_len}")
        tokens, text = self._generate(prompt, request.sampling)
        is_end = bool(tokens) and self._is_end(tokens[-1])
        shown = tokens[:-1] if is_end else tokens
        stop = [place for each in request.sampling.stop if (place := text.find(each)) >= 0]
        raw = None if stop else self.model.detokenize(shown, special=True).decode("utf-8", "replace")
        shown_text = text[: min(stop)] if stop else text
        return self._make_reply(request, prompt, tokens, shown_text, is_done=is_end or bool(stop), raw=raw)

    def _generate(self, prompt: list[int], sampling: SamplingParams) -> tuple[list[int], str]:
        # else each reply has the same draws
        self.model.set_seed(stable_seed(self._seed, "llama.cpp", self._calls) % 2**32)
        self._calls += 1
        room = self.max_model_len - len(prompt)
        limit = room if sampling.max_tokens is None else max(1, min(room, sampling.max_tokens))
        tokens: list[int] = []
        text = ""
        for token in self.model.generate(
            prompt,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            temp=sampling.temperature,
            repeat_penalty=1.0,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
        ):
            tokens.append(int(token))
            if self._is_end(tokens[-1]):
                break
            text = self.model.detokenize(tokens).decode("utf-8", "ignore")
            if len(tokens) >= limit or any(each in text for each in sampling.stop):
                break
        return tokens, text

    def _is_end(self, token: int) -> bool:
        return bool(self._library.llama_vocab_is_eog(self.model._model.vocab, token))

    def _score(self, row: Sequence[int]) -> FloatArray:
        self.model.reset()
        self.model.eval(list(row))
        logits = self.model.scores[: len(row) - 1].astype(np.float64)
        highest = logits.max(-1, keepdims=True)
        total = np.log(np.exp(logits - highest).sum(-1)) + highest[:, 0]
        chosen = logits[np.arange(len(row) - 1), np.asarray(row[1:])] - total
        self.model.reset()
        return np.concatenate([[0.0], chosen]).astype(np.float32)

    def close(self) -> None:
        super().close()
        self.model.close()
