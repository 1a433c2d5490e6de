"""Grammars that replies must match, compiled by llguidance away from the sampler's thread.

A compiled grammar gives, after any tokens, the tokens that may come next: those after which the text can still be
completed, and the end tokens once it is complete.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reinforge.errors import ConfigError, Problem
from reinforge.limits import get_limits
from reinforge.types.request import Grammar

MAX_COMPILED = 256  # compiled grammars to keep

MAX_ROW_ITEMS = 500
"""How many ways of reading a text so far llguidance follows at once. An ambiguous grammar takes quadratic time in them:
with the library's own limit of 2,000 one token took up to 1 s, with 500 it takes 25 ms until the grammar fails."""

WHITESPACE = r"(\n[ \t]{0,24}| )?"
"""Whitespace between the parts of a JSON text: a space, or a line break and an indent. With any whitespace allowed, a
weak model may write nothing else."""

INSTALL = 'pip install "reinforge[train]", or pip install llguidance'

_MARKER = re.compile(r'^(marker_\d+): ("(?:[^"\\]|\\.)*")$', re.MULTILINE)
_UNTIL = re.compile(r'^(until_\d+)\[suffix=("(?:[^"\\]|\\.)*")\]: .*$', re.MULTILINE)


def bind_markers(text: str, token_ids: Mapping[str, int]) -> str:
    r"""Returns a grammar whose markers are tokens where the tokenizer has them.

    Example: `bind_markers('start: marker_0\nmarker_0: "<call>"\n', {"<call>": 7})` ->
    `'start: marker_0\nmarker_0: <[7]>\n'`.

    Args:
        token_ids: The tokenizer's added tokens, which are never part of other text.
    """

    def bind(found: re.Match[str], before: str) -> str:
        token = token_ids.get(json.loads(found[2]))
        return found[0] if token is None else f"{found[1]}: {before}<[{token}]>"

    text = _MARKER.sub(lambda found: bind(found, ""), text)
    return _UNTIL.sub(lambda found: bind(found, "/(?s:.*)/ "), text)


class CompiledGrammar:
    """A grammar over one vocabulary.

    Args:
        matcher: llguidance's matcher, before any token.
        first: What may come first, one bit per token.
    """

    def __init__(self, matcher: Any, first: NDArray[np.uint8]):
        self._matcher, self.first = matcher, first

    def start(self) -> Any:
        """Returns a matcher for one reply, which shares the tables of the others."""
        return self._matcher.deep_copy()


class GrammarCompiler:
    """Compiles grammars for one tokenizer; a grammar that was seen before costs nothing."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]):
        self.vocab_size = vocab_size
        self._tokenizer, self._eos_ids = tokenizer, [token for token in eos_ids if token < vocab_size]
        self._llguidance_tokenizer: Any = None
        self._compiled: OrderedDict[Grammar, Future[CompiledGrammar | str]] = OrderedDict()
        self._lock, self._tokenizer_lock = threading.Lock(), threading.Lock()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="reinforge-grammar")

    async def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Returns the compiled grammar, without blocking the event loop.

        Raises:
            ValueError: The grammar is wrong, too large, or matches nothing; the message names the reason.
            ConfigError: llguidance is not installed, or the tokenizer does not say which bytes its tokens are.
        """
        with self._lock:
            future = self._compiled.get(grammar)
            if future is None:
                future = self._compiled[grammar] = self._threads.submit(self._compile, grammar)
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
            else:
                self._compiled.move_to_end(grammar)
        compiled = future.result() if future.done() else await asyncio.shield(asyncio.wrap_future(future))
        if isinstance(compiled, str):
            raise ValueError(compiled)
        return compiled

    def close(self) -> None:
        """Stops the threads; a grammar that is being compiled is finished first."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> CompiledGrammar | str:
        """Returns the compiled grammar, or why there is none."""
        llguidance = import_llguidance()
        what = f"cannot constrain the reply to this {grammar.kind.replace('_', ' ')}"
        if len(grammar.text) > (most := get_limits().grammar_chars):
            return f"{what}: it has {len(grammar.text):,} characters, but the limit is {most:,}"
        limits = llguidance.LLParserLimits(max_items_in_row=MAX_ROW_ITEMS, verbose_errors=False)
        try:
            text = _translate(llguidance.LLMatcher, grammar)
        except ValueError as cause:
            return f"{what}: {_shorten(str(cause))}"
        matcher = llguidance.LLMatcher(self._get_tokenizer(llguidance), text, log_level=0, limits=limits)
        bits = matcher.compute_bitmask() if not matcher.is_error() else b""
        if reason := matcher.get_error():
            return f"{what}: {'no text matches it' if 'NoExtension' in reason else _shorten(reason)}"
        first = read_bitmask(bits, self.vocab_size)
        return CompiledGrammar(matcher, first) if first.any() else f"{what}: no text matches it"

    def _get_tokenizer(self, llguidance: Any) -> Any:
        with self._tokenizer_lock:
            if self._llguidance_tokenizer is None:
                try:
                    self._llguidance_tokenizer = llguidance.hf.from_tokenizer(
                        self._tokenizer, n_vocab=self.vocab_size, eos_token=self._eos_ids
                    )
                except Exception as cause:
                    message = f"this tokenizer cannot constrain replies by a grammar: {cause}"
                    fix = (
                        "leave out response_format and tool_choice, or use a fast byte-level or byte-fallback tokenizer"
                    )
                    raise ConfigError(Problem("policy.tokenizer", message, fix)) from cause
            return self._llguidance_tokenizer


def import_llguidance() -> Any:
    try:
        import llguidance
        import llguidance.hf
    except ImportError as cause:
        message = (
            "constraining replies by a grammar (response_format, tool_choice) needs llguidance, which is not installed"
        )
        raise ConfigError(Problem("", message, INSTALL)) from cause
    return llguidance


def read_bitmask(bits: bytes, vocab_size: int) -> NDArray[np.uint8]:
    """Returns llguidance's bits, `[V / 8]`, without those past the vocabulary."""
    mask = np.frombuffer(bits, np.uint8)[: -(-vocab_size // 8)].copy()
    if vocab_size % 8:
        mask[-1] &= (1 << vocab_size % 8) - 1
    return mask


def _translate(matcher: Any, grammar: Grammar) -> str:
    if grammar.kind == "json_schema":
        text: str = matcher.grammar_from_json_schema(grammar.text, defaults={"whitespace_pattern": WHITESPACE})
        return text
    translate = matcher.grammar_from_regex if grammar.kind == "regex" else matcher.grammar_from_lark
    return str(translate(grammar.text))


def _shorten(reason: str) -> str:
    """Returns the first lines of llguidance's reason, without the parser's state."""
    text = " ".join(reason.split("<non-verbose/>")[0].split("<state>")[0].split())
    return text if len(text) <= 300 else f"{text[:300]} ..."
