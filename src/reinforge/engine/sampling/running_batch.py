"""The running batch on the host: one request a row, and arrays over the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from reinforge.engine.model.causal_model import DEFAULT
from reinforge.engine.sampling.kv_cache import MIN_ROWS
from reinforge.errors import EngineError
from reinforge.types.request import SamplingParams


@dataclass(slots=True, eq=False)
class SampleRequest:
    """One reply to draw, and the reply once it is drawn.

    Attributes:
        prompt: Token ids.
        limit: Most tokens to draw, at least 1; prompt and limit fit the context.
        params: Temperature, top-p, top-k, min-p and seed; the rest has been read by the caller.
        stops: Returns True once the reply's last tokens hold a stop text; None: there is none.
        num_stop_tokens: How many of the last tokens `stops` looks at.
        adapter: Which adapter draws it.
        owner: Whatever `deliver` needs to find the caller.
        token_ids, logprobs, finish_reason, version: The reply.
        processed_logprobs, supports: Of each token so far, where the support is cut: its log-prob over the words it was
            drawn from, and those words; no words where they are too many to record.
        error: Why there is none.
        cancelled: Set by the caller when it no longer waits.
    """

    prompt: tuple[int, ...]
    limit: int
    params: SamplingParams = field(default_factory=SamplingParams)
    stops: Callable[[list[int]], bool] | None = None
    num_stop_tokens: int = 0
    adapter: str = DEFAULT
    owner: object = None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: str = "stop"
    version: int = 0
    processed_logprobs: list[float] = field(default_factory=list)
    supports: list[NDArray[np.int32]] = field(default_factory=list)
    error: EngineError | None = None
    cancelled: bool = False


@dataclass
class Rows:
    """The running batch on the host, one entry a slot; rows 0..count-1 are replies."""

    num_slots: int
    count: int = 0
    requests: list[SampleRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = max(self.num_slots, MIN_ROWS)
        self.positions = np.zeros(size, np.int64)  # of the token that the next step feeds
        self.last_tokens = np.zeros(size, np.int64)
        self.drawn = np.zeros(size, np.int64)
        self.limits = np.zeros(size, np.int64)
        self.seeds = np.zeros(size, np.uint64)
        self.temperatures = np.ones(size, np.float32)
        self.top_p = np.ones(size, np.float32)
        self.top_k = np.zeros(size, np.int64)
        self.min_p = np.zeros(size, np.float32)
        self.cuts = np.zeros(size, np.bool_)  # whether the row's support is cut
        self.token_ids = np.zeros((size, 16), np.int64)
        self.logprobs = np.zeros((size, 16), np.float32)

    def arrays(self) -> tuple[NDArray, ...]:
        """Returns every array that has an entry a slot."""
        lanes = (self.positions, self.last_tokens, self.drawn, self.limits, self.seeds)
        settings = (self.temperatures, self.top_p, self.top_k, self.min_p, self.cuts)
        return (*lanes, *settings, self.token_ids, self.logprobs)

    def add(self, request: SampleRequest, seed: int, vocab_size: int) -> None:
        """Puts a reply into the next slot."""
        row, params = self.count, request.params
        self.positions[row] = len(request.prompt)
        self.drawn[row] = 0
        self.limits[row] = request.limit
        self.seeds[row] = seed
        self.temperatures[row] = params.temperature
        self.top_p[row] = params.top_p
        self.top_k[row] = min(params.top_k or vocab_size, vocab_size)
        self.min_p[row] = params.min_p
        cuts = params.top_p < 1 or self.top_k[row] < vocab_size or params.min_p > 0
        self.cuts[row] = cuts and params.temperature > 0
        self.requests.append(request)
        self.count += 1

    def record(self, start: int, token_ids: NDArray[np.int64], logprobs: NDArray[np.float32]) -> None:
        """Appends one token to each row from `start` on."""
        rows = np.arange(start, self.count)
        columns = self.drawn[start : self.count]
        if len(columns) and columns.max() >= self.token_ids.shape[1]:
            self.token_ids = np.concatenate((self.token_ids, np.zeros_like(self.token_ids)), axis=1)
            self.logprobs = np.concatenate((self.logprobs, np.zeros_like(self.logprobs)), axis=1)
        self.token_ids[rows, columns] = token_ids
        self.logprobs[rows, columns] = logprobs
        self.last_tokens[start : self.count] = token_ids
        self.drawn[start : self.count] += 1

    def record_supports(
        self, start: int, counts: NDArray[np.int64], words: NDArray[np.int32], log_mass: NDArray[np.float32]
    ) -> None:
        """Appends to each row from `start` on whose support is cut what its last token was drawn from.

        Args:
            start: The first row.
            counts: Words kept in each row.
            words: `[B, K]` a row's words, the kept ones first; those beyond `K` are too many to record.
            log_mass: log of the kept words' summed probability.
        """
        for row in np.flatnonzero(self.cuts[start : self.count]).tolist():
            request, place = self.requests[start + row], self.drawn[start + row] - 1
            token, logprob = self.token_ids[start + row, place], self.logprobs[start + row, place]
            kept = np.sort(words[row, : counts[row]])
            recorded = counts[row] <= words.shape[1] and token in kept  # rounding may draw the word beside the last one
            request.supports.append(kept if recorded else kept[:0])
            request.processed_logprobs.append(float(logprob - log_mass[row]))

    def remove(self, leaving: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Takes rows out and closes the holes; returns which rows moved where.

        Example: rows a b c d, leaving [True, False, True, False] -> d b; moved ([3], [0]).
        """
        kept = self.count - int(leaving.sum())
        targets = np.flatnonzero(leaving[:kept])
        sources = np.flatnonzero(~leaving[kept:]) + kept
        for array in self.arrays():
            array[targets] = array[sources]
        for source, target in zip(sources, targets, strict=True):
            self.requests[target] = self.requests[source]
        del self.requests[kept:]
        self.positions[kept : self.count] = 0
        self.count = kept
        return sources, targets

    def clear(self) -> list[SampleRequest]:
        """Takes all rows out and returns their requests."""
        requests, self.requests = self.requests, []
        self.positions[:] = 0
        self.count = 0
        return requests
