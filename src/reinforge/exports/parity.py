"""Whether an artifact is the run's model: equal prompt tokens, equal greedy replies, equal log-probs.

    the run's model    [1, 5, 9] -> 4 7 2      log-probs -0.10 -0.32 -0.01
    the artifact       [1, 5, 9] -> 4 7 2                -0.10 -0.31 -0.01     equal tokens, largest difference 0.01

The prompts are those of the run's own `confirm` episodes. Two programs round differently, so a reply whose two best
tokens are almost equally likely may differ; an exporter that mixes up weights differs at once, and by nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reinforge.errors import ContextOverflow
from reinforge.interfaces import PolicyServer
from reinforge.runs.journal.episode_json import parse_episode
from reinforge.runs.journal.reader import JournalReader
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.request import ModelReply, ModelRequest, SamplingParams

PHASES = ("confirm_tuned", "confirm_base", "validate")
"""Where prompts come from: the first phase of the run that has some."""
MAX_PROMPTS = 16
MAX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Parity:
    num_prompts: int
    num_equal_prompts: int
    """Prompts that became the same tokens."""
    num_equal_replies: int
    """Greedy replies with the same tokens."""
    num_tokens: int
    """Tokens of the run's greedy replies."""
    num_equal_tokens: int
    """How many of them the artifact sampled as well, up to the first other one of each reply."""
    max_difference: float | None = None
    """Of the log-probs of the run's greedy replies, in nats; None: unknown."""
    mean_difference: float | None = None

    @property
    def is_equal(self) -> bool:
        return self.num_prompts > 0 and self.num_equal_prompts == self.num_equal_replies == self.num_prompts

    def __str__(self) -> str:
        text = f"{self.num_equal_replies} of {self.num_prompts} greedy replies have the same tokens"
        if self.num_equal_replies < self.num_prompts:
            text += f" ({self.num_equal_tokens} of {self.num_tokens} tokens before the first other one)"
        if self.num_equal_prompts < self.num_prompts:
            text += f"; only {self.num_equal_prompts} of the prompts have"
        if self.max_difference is not None and self.mean_difference is not None:
            text += (
                f"; log-probs differ by {self.mean_difference:.1e} nats on average, {self.max_difference:.1e} at most"
            )
        return text


def read_prompts(reader: JournalReader, limit: int = MAX_PROMPTS) -> list[ModelRequest]:
    """Returns the requests of a run's held-out episodes, at most one of an example, in the order of the examples."""
    for phase in PHASES:
        requests: dict[str, ModelRequest] = {}
        for key in reader.episode_keys(50 * limit, phase):
            row = reader.find_episode(key)
            if row is None or row.data["example_id"] in requests or len(requests) == limit:
                continue
            item = EvalInputItem(
                id=row.data["example_id"], input_obj=None, expected_output_obj=None, full_dataset_entry={}
            )
            calls = [call for call in parse_episode(row.data, item).calls if call.reply.tokens is not None]
            if calls:  # of a conversation its last call, which holds the others
                requests[row.data["example_id"]] = calls[-1].request
        if requests:
            return list(requests.values())
    return []


def make_greedy(request: ModelRequest, max_tokens: int = MAX_TOKENS) -> ModelRequest:
    """Returns a request with greedy decoding, without grammar and stop texts, so that tokens can be compared."""
    limit = min(max_tokens, request.sampling.max_tokens or max_tokens)
    own = request.sampling
    sampling = SamplingParams(
        0.0, max_tokens=limit, seed=own.seed, stop_token_ids=own.stop_token_ids, ignore_eos=own.ignore_eos
    )
    return replace(request, sampling=sampling, grammar=None, continued=None)


async def sample_greedy(policy: PolicyServer, requests: Sequence[ModelRequest]) -> list[ModelReply | None]:
    replies: list[ModelReply | None] = []
    for request in requests:
        try:
            replies.append(await policy.sample(make_greedy(request)))
        except ContextOverflow:
            replies.append(None)
    return replies


async def compare(
    expected: Sequence[ModelReply | None],
    logprobs: Sequence[Any],
    artifact: PolicyServer,
    requests: Sequence[ModelRequest],
) -> Parity:
    """Compares an artifact's greedy replies with those of the run's model, and the log-probs of the latter."""
    replies = await sample_greedy(artifact, requests)
    num_prompts = num_equal_prompts = num_equal_replies = num_tokens = num_equal = 0
    differences: list[float] = []
    rows: list[tuple[int, ...]] = []
    known: list[tuple[int, Any]] = []
    for before, scores, after in zip(expected, logprobs, replies, strict=True):
        if before is None or after is None or before.tokens is None or after.tokens is None:
            continue
        ours, theirs = before.tokens.token_ids, after.tokens.token_ids
        num_prompts += 1
        num_equal_prompts += before.tokens.prompt_token_ids == after.tokens.prompt_token_ids
        num_equal_replies += ours == theirs
        num_tokens += len(ours)
        num_equal += next(
            (i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
            min(len(ours), len(theirs)),
        )
        rows.append((*before.tokens.prompt_token_ids, *ours))
        known.append((len(before.tokens.prompt_token_ids), scores))
    if rows:
        for (start, scores), own in zip(known, await artifact.score(rows), strict=True):
            differences += np.abs(np.asarray(scores)[start:] - np.asarray(own)[start:]).tolist()
    highest = max(differences) if differences else None
    mean = sum(differences) / len(differences) if differences else None
    return Parity(num_prompts, num_equal_prompts, num_equal_replies, num_tokens, num_equal, highest, mean)
