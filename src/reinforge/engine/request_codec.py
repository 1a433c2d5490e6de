"""Chat requests as tokens for a sampler, and sampled tokens as replies; needs no weights."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from reinforge.engine.prompts.chat_template import PromptRenderer
from reinforge.engine.sampling.params import check_params
from reinforge.engine.sampling.running_batch import SampleRequest
from reinforge.errors import ContextOverflow
from reinforge.types.request import Message, ModelReply, ModelRequest, TokenLogprob, TokenLogprobs
from reinforge.types.supports import Supports

if TYPE_CHECKING:
    from reinforge.engine.callers import Caller
    from reinforge.engine.sampling.constraints import TokenConstraint
    from reinforge.engine.sampling.grammar import CompiledGrammar, GrammarCompiler
    from reinforge.types.request import SamplingParams

logger = logging.getLogger(__name__)


@dataclass
class RequestCodec:
    """Renders the requests of one adapter, and decodes its replies."""

    renderer: PromptRenderer
    adapter: str
    max_model_len: int
    vocab_size: int
    ends: Sequence[int]  # tokens that end a reply
    grammars: Callable[[], GrammarCompiler]
    _has_warned: bool = False

    async def compile_grammar(self, request: ModelRequest) -> CompiledGrammar | None:
        """Returns the grammar that a reply must match, ready for the sampler; None: it is free."""
        if request.grammar is None:
            return None
        return await self.grammars().compile(self.renderer.bind_grammar(request.grammar))

    async def encode(self, request: ModelRequest, reply: Message) -> TokenLogprobs:
        """Returns the tokens of a given reply, by the chat template, with the token that ends it.

        Raises:
            ContextOverflow: Prompt and reply do not fit the context.
            EngineError: The template rejects the messages.
        """
        prompt, token_ids = await asyncio.to_thread(self.renderer.encode, request, reply, self.ends)
        if len(prompt) + len(token_ids) > self.max_model_len:
            count = len(prompt) + len(token_ids)
            raise ContextOverflow(
                f"prompt and reply have {count} tokens, but the limit is {self.max_model_len} (max_model_len)"
            )
        return TokenLogprobs(prompt, token_ids, (math.nan,) * len(token_ids), policy_version=-1)

    def build_request(
        self, request: ModelRequest, caller: Caller | None, grammar: CompiledGrammar | None = None
    ) -> SampleRequest:
        """Returns what a sampler gets: the prompt's tokens, limits and constraints.

        Args:
            caller: Waits for the reply; None: another program samples it.
            grammar: What the reply must match.

        Raises:
            ValueError: The sampler cannot follow the request's settings, or the prompt cannot be tokenized.
            ContextOverflow: The prompt leaves no room for a reply.
        """
        check_params(request.sampling, self.vocab_size, request.num_top_logprobs)
        prompt, params = self.renderer.render(request, self.max_model_len), request.sampling
        if request.prompt is not None:
            self._check_prompt(prompt)
        room = self.max_model_len - len(prompt)
        if room < 1:
            raise ContextOverflow(
                f"the prompt has {len(prompt)} tokens, but the limit is {self.max_model_len} (max_model_len)"
            )
        limit = room if params.max_tokens is None else max(1, min(room, params.max_tokens))
        constraint = self._build_constraint(params, grammar)
        if constraint is not None and constraint.changes_logits:
            self._warn_of_untrained_replies()
        built = SampleRequest(prompt, limit, params, constraint, adapter=self.adapter, owner=caller)
        built.num_top_logprobs = request.num_top_logprobs
        if params.stop or params.stop_token_ids:
            built.num_stop_tokens = 4 + max((len(text.encode()) for text in params.stop), default=0)
            built.has_stop_text = partial(self._has_stop, params.stop, frozenset(params.stop_token_ids))
        return built

    def _build_constraint(self, params: SamplingParams, grammar: CompiledGrammar | None) -> TokenConstraint | None:
        if grammar is None and not (params.logit_bias or params.frequency_penalty or params.presence_penalty):
            return None
        from reinforge.engine.sampling.constraints import build_constraint

        return build_constraint(params, self.vocab_size, grammar)

    def _has_stop(self, texts: Sequence[str], ends: Container[int], token_ids: list[int]) -> bool:
        if token_ids[-1] in ends:
            return True
        end = self.renderer.decode(token_ids) if texts else ""
        return any(text in end for text in texts)

    def _check_prompt(self, prompt: tuple[int, ...]) -> None:
        """Refuses token ids that a client made up."""
        size = self.vocab_size
        wrong = next((token for token in prompt if isinstance(token, bool) or not 0 <= token < size), None)
        if wrong is not None:
            raise ValueError(f"the prompt has the token {ascii(wrong)[:40]}; expected token ids from 0 to {size - 1}")

    def _warn_of_untrained_replies(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "replies sampled with frequency_penalty, presence_penalty or logit_bias (other than -100) are recorded "
                "but not trained: the model's own distribution is not the one that they were sampled from"
            )

    def name_top_logprobs(
        self, ranked: Sequence[tuple[list[int], list[float]]]
    ) -> tuple[tuple[TokenLogprob, ...], ...]:
        return tuple(
            tuple(
                TokenLogprob(text, logprob, token_id=token)
                for text, logprob, token in zip(self.renderer.decode_each(token_ids), logprobs, token_ids, strict=True)
            )
            for token_ids, logprobs in ranked
        )

    def build_reply(self, request: ModelRequest, sampled: SampleRequest) -> ModelReply:
        text, is_greedy = self.renderer.decode(sampled.token_ids), request.sampling.temperature == 0
        raw = self.renderer.decode_raw(sampled.token_ids)
        tokens = TokenLogprobs(
            prompt_token_ids=sampled.prompt,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            policy_version=sampled.version,
            finish_reason=sampled.finish_reason,
            temperature=request.sampling.temperature,
            restricted=is_greedy or bool(sampled.processed_logprobs),
            texts=self.renderer.decode_each(sampled.token_ids),
            processed_logprobs=(0.0,) * len(sampled.token_ids) if is_greedy else tuple(sampled.processed_logprobs),
            supports=Supports.from_sets(sampled.supports) if sampled.supports else None,
            top_logprobs=self.name_top_logprobs(sampled.top_logprobs),
            later_versions=tuple(sampled.later_versions),
        )
        stop = request.sampling.stop
        return ModelReply(
            {"role": "assistant", "content": cut_at_stop(text, stop)},
            sampled.finish_reason,
            tokens,
            len(sampled.prompt),
            len(sampled.token_ids),
            raw_text=None if raw is None else cut_at_stop(raw, stop),
        )


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    return text[: min((place for each in stop if (place := text.find(each)) >= 0), default=len(text))]


def find_end_tokens(module: Any, tokenizer: Any) -> list[int]:
    """Returns the tokens that end a reply: the tokenizer's and those of the generation config."""
    config = getattr(module, "generation_config", None)
    ends = getattr(config, "eos_token_id", None)
    ends = ends if isinstance(ends, list) else [ends]
    return sorted({token for token in (*ends, tokenizer.eos_token_id) if token is not None})
