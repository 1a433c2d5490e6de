"""The running batch on the host: one request per row, and arrays over the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from reinforge.engine.model.causal_model import DEFAULT_ADAPTER
from reinforge.engine.sampling.kv_cache import MIN_ROWS
from reinforge.errors import EngineError
from reinforge.types.request import SamplingParams
from reinforge.types.supports import Support

if TYPE_CHECKING:
    from reinforge.engine.sampling.constraints import TokenConstraint
    from reinforge.engine.sampling.prefix_cache import CachedPrefix


ABORTED = "abort"  # the `finish_reason` of a reply that is to be sampled again, as vLLM calls it, too


@dataclass(frozen=True, slots=True)
class SamplerStats:
    """What the sampler has done so far and holds now."""

    sampled_tokens: int
    prompt_tokens: int  # prompt tokens of the replies begun
    prefilled_tokens: int  # prompt tokens computed: without those of equal prompts and of the prefix cache
    reused_tokens: int  # prompt tokens found in the prefix cache; equal prompts count once
    prefix_cache_bytes: int
    kv_cache_bytes: int  # keys, values and states of the running batch, with the room for more
    steps: int  # decode steps
    running: int  # replies in the running batch
    waiting: int  # requests that wait for a slot


@dataclass(slots=True, eq=False)
class SampleRequest:
    """One reply to sample, and the reply once it is sampled."""

    prompt: tuple[int, ...]  # token ids
    limit: int  # maximum tokens to sample, at least 1; prompt and limit together fit the context
    params: SamplingParams = field(default_factory=SamplingParams)  # without what the caller handles
    constraint: TokenConstraint | None = None  # what may be sampled; None: every token
    has_stop_text: Callable[[list[int]], bool] | None = None  # do the last tokens contain a stop string?
    num_stop_tokens: int = 0  # how many of the last tokens `has_stop_text` looks at
    adapter: str = DEFAULT_ADAPTER  # the adapter that samples
    client: int = 0  # who asks: with fewer replies in flight than others, its next one begins before theirs
    computed: CachedPrefix | None = None  # the part of a long prompt that is computed already
    owner: object = None  # identifies the caller for `deliver`
    token_ids: tuple[int, ...] = ()  # the reply, as the next three
    logprobs: tuple[float, ...] = ()
    finish_reason: str = "stop"
    version: int = 0
    later_versions: list[tuple[int, int]] = field(default_factory=list)
    """Position and version: which weights that were exchanged meanwhile sampled the tokens from that one on."""
    processed_logprobs: list[float] = field(default_factory=list)
    """Of each token so far, where sampling is filtered or constrained: its log-prob in the distribution that it was
    sampled from."""
    supports: list[Support] = field(default_factory=list)
    """That distribution's tokens; an empty array: too many to record; none: a bias or a penalty changed it."""
    num_top_logprobs: int = 0  # how many of the most likely tokens are named at each position
    top_logprobs: list[tuple[list[int], list[float]]] = field(default_factory=list)  # of each token so far
    error: EngineError | ValueError | None = None  # why there is no reply
    cancelled: bool = False  # set by a caller that no longer waits
    new_tokens: list[tuple[int, float]] | None = None
    """Each token and its log-prob at once, for a caller that streams; None: the caller takes the reply whole."""


def find_long_rows(lengths: NDArray[np.int64], least: int) -> NDArray[np.bool_]:
    """Returns which rows should attend apart from the others, which are at most half as long; all: none should.

    Args:
        lengths: Tokens that each row attends to.
        least: How many places fewer all rows together must attend to.

    Example: lengths 900, 100, 120, least 1000 -> True, False, False: 2 x 780 places fewer.
    """
    best, longest = np.ones(len(lengths), np.bool_), int(lengths.max())
    for most in (longest // 2, longest // 4, longest // 8):
        is_short = lengths <= most
        saved = int(is_short.sum()) * (longest - int(lengths[is_short].max(initial=0)))
        if saved >= least:
            best, least = ~is_short, saved
    return best


@dataclass
class RunningBatch:
    """The replies being sampled: rows 0..count-1 of arrays with one entry per slot."""

    num_slots: int
    count: int = 0
    requests: list[SampleRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = max(self.num_slots, MIN_ROWS)
        self.positions = np.zeros(size, np.int64)  # of the token that the next step feeds
        self.last_tokens = np.zeros(size, np.int64)
        self.num_sampled = np.zeros(size, np.int64)
        self.limits = np.zeros(size, np.int64)
        self.seeds = np.zeros(size, np.uint64)
        self.temperatures = np.ones(size, np.float32)
        self.top_p = np.ones(size, np.float32)
        self.top_k = np.zeros(size, np.int64)
        self.min_p = np.zeros(size, np.float32)
        self.is_filtered = np.zeros(size, np.bool_)
        self.is_constrained = np.zeros(size, np.bool_)
        self.is_streamed = np.zeros(size, np.bool_)
        self.num_top_logprobs = np.zeros(size, np.int64)
        self.ignores_eos = np.zeros(size, np.bool_)
        self.token_ids = np.zeros((size, 16), np.int64)
        self.logprobs = np.zeros((size, 16), np.float32)

    def add(self, request: SampleRequest, seed: int, vocab_size: int) -> None:
        """Puts a request into the next row."""
        row, params = self.count, request.params
        self.positions[row] = len(request.prompt)
        self.num_sampled[row] = 0
        self.limits[row] = request.limit
        self.seeds[row] = seed
        self.temperatures[row] = params.temperature
        self.top_p[row] = params.top_p
        self.top_k[row] = min(params.top_k or vocab_size, vocab_size)
        self.min_p[row] = params.min_p
        has_filter = params.top_p < 1 or self.top_k[row] < vocab_size or params.min_p > 0
        self.is_filtered[row] = has_filter and params.temperature > 0
        self.is_constrained[row] = request.constraint is not None
        self.num_top_logprobs[row] = request.num_top_logprobs
        self.is_streamed[row] = request.new_tokens is not None
        self.ignores_eos[row] = params.ignore_eos
        self.requests.append(request)
        self.count += 1

    def record(self, start: int, token_ids: NDArray[np.int64], logprobs: NDArray[np.float32]) -> None:
        """Appends one token to each row from `start` on."""
        rows = np.arange(start, self.count)
        columns = self.num_sampled[start : self.count]
        if len(columns) and columns.max() >= self.token_ids.shape[1]:
            self.token_ids = np.concatenate((self.token_ids, np.zeros_like(self.token_ids)), axis=1)
            self.logprobs = np.concatenate((self.logprobs, np.zeros_like(self.logprobs)), axis=1)
        self.token_ids[rows, columns] = token_ids
        self.logprobs[rows, columns] = logprobs
        self.last_tokens[start : self.count] = token_ids
        self.num_sampled[start : self.count] += 1

    def list_streamed(self, start: int) -> list[SampleRequest]:
        """Returns the requests from row `start` on whose callers stream, after they got their newest token."""
        rows = np.flatnonzero(self.is_streamed[start : self.count]) + start
        token_ids, logprobs = self.last_tokens[rows], self.logprobs[rows, self.num_sampled[rows] - 1]
        streamed = []
        for row, *token in zip(rows.tolist(), token_ids.tolist(), logprobs.tolist(), strict=True):
            request = self.requests[row]
            assert request.new_tokens is not None
            request.new_tokens.append((token[0], token[1]))
            streamed.append(request)
        return streamed

    def record_supports(
        self,
        rows: NDArray[np.int64],
        counts: NDArray[np.int64],
        tokens: NDArray[np.int32],
        log_mass: NDArray[np.float32],
    ) -> None:
        """Records the tokens that the last token of each filtered one of these rows was sampled from.

        Args:
            counts: Number of kept tokens of each row.
            tokens: `[B, K]` tokens of each row, the kept ones first; more than `K` are too many to record.
            log_mass: log of the kept tokens' summed probability.
        """
        for number in np.flatnonzero(self.is_filtered[rows]).tolist():
            row = int(rows[number])
            request, place = self.requests[row], self.num_sampled[row] - 1
            token, logprob = self.token_ids[row, place], self.logprobs[row, place]
            kept = np.sort(tokens[number, : counts[number]])
            if request.constraint is not None:
                kept = kept[request.constraint.is_allowed(kept)]  # fewer may be left than top_k or min_p would keep
            # rounding may sample the token next to the last kept one
            is_complete = counts[number] <= tokens.shape[1] and token in kept
            if request.constraint is None or not request.constraint.changes_logits:
                request.supports.append(kept if is_complete else kept[:0])
            if request.constraint is None:
                request.processed_logprobs.append(float(logprob - log_mass[number]))

    def record_top_logprobs(self, rows: NDArray[np.int64], tokens: NDArray[np.int64], logprobs: NDArray) -> None:
        """Records the most likely tokens in place of the last token of some rows, `[R, K]`, and their log-probs."""
        for row, row_tokens, row_logprobs in zip(rows.tolist(), tokens.tolist(), logprobs.tolist(), strict=True):
            request = self.requests[row]
            count = request.num_top_logprobs
            request.top_logprobs.append((row_tokens[:count], row_logprobs[:count]))

    def list_constrained(self, start: int) -> list[tuple[int, TokenConstraint]]:
        rows = (np.flatnonzero(self.is_constrained[start : self.count]) + start).tolist()
        found = ((row, self.requests[row].constraint) for row in rows)
        return [(row, constraint) for row, constraint in found if constraint is not None]

    def record_constrained(self, start: int, processed: NDArray[np.float32]) -> None:
        """Records the log-probs of constrained rows from `start` on, and what those without a filter may have sampled.

        Args:
            processed: Of each constrained row, in the distribution that its last token was sampled from.
        """
        for (row, constraint), logprob in zip(self.list_constrained(start), processed.tolist(), strict=True):
            request = self.requests[row]
            request.processed_logprobs.append(logprob)
            if not (self.is_filtered[row] or constraint.changes_logits or request.params.temperature == 0):
                request.supports.append(constraint.read_support())

    def advance_constraints(self, start: int, ended: NDArray[np.bool_], leaving: NDArray[np.bool_]) -> None:
        """Finds what constrained rows from `start` on may sample next.

        Sets `leaving` where that is nothing, and `ended` where the reply is complete then. A reply whose grammar fails
        leaves with that error, alone.
        """
        for row, constraint in self.list_constrained(start):
            if leaving[row]:
                continue
            try:
                constraint.advance(int(self.last_tokens[row]))
            except ValueError as error:
                self.requests[row].error, leaving[row] = error, True
                continue
            if not constraint.can_continue:
                leaving[row], ended[row] = True, constraint.is_complete

    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Puts row `sources[i]` where row `targets[i]` was; the two may name the same rows in another order."""
        for array in vars(self).values():
            if isinstance(array, np.ndarray):  # one entry per slot
                array[targets] = array[sources]
        moved = [self.requests[row] for row in sources]
        for target, request in zip(targets, moved, strict=True):
            self.requests[target] = request

    def remove(self, leaving: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Removes rows and fills their places with the last rows; returns which rows moved where.

        Example: rows a b c d, leaving [True, False, True, False] -> d b; moved ([3], [0]).
        """
        count = self.count - int(leaving.sum())
        targets = np.flatnonzero(leaving[:count])
        sources = np.flatnonzero(~leaving[count:]) + count
        self.move(sources, targets)
        del self.requests[count:]
        self.positions[count : self.count] = 0
        self.count = count
        return sources, targets

    def clear(self) -> list[SampleRequest]:
        """Removes all rows and returns their requests."""
        requests, self.requests = self.requests, []
        self.positions[:] = 0
        self.count = 0
        return requests
