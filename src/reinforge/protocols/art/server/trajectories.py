"""Trajectory groups as ART's clients send them, as trajectories that can be trained.

    {"messages_and_choices": [message, CHOICE, message, CHOICE], "reward": 1.0}    a choice is a sampled reply

The tokens of a choice are those that were sampled here, found by their log-probs. A choice that this server does not
remember is trained only if its tokens, sent or made by the chat template, have the log-probs that it claims: both are
compared with the weights that are served now. Otherwise it stays context and is counted.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reinforge.errors import BackendError, ContextOverflow, EngineError
from reinforge.interfaces import PolicyServer
from reinforge.limits import get_limits
from reinforge.rollout.episode import build_episode_item
from reinforge.serving.routes import ApiError, refuse_invalid
from reinforge.types.episode import ModelCall
from reinforge.types.request import Message, ModelRequest, TokenLogprobs
from reinforge.types.trajectory import EpisodeItem, Trajectory

MAX_TOKENS = 8_000_000  # maximum tokens, of prompts and replies together, that are kept; the oldest replies go first
ReplyKey = tuple[str, tuple[float, ...]]  # the base model and the log-probs of a reply
TokenPair = tuple[tuple[int, ...], tuple[int, ...]]  # the tokens of a prompt and of its reply


class SampledReplies:
    """Finds replies by their log-probs, which every client sends back and few replies share.

    A reply of which the model is certain, such as one token of log-prob 0.0, may have the log-probs of another one; it
    is found by its tokens alone.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS):
        self._max_tokens, self._num_tokens = max_tokens, 0
        self._replies: OrderedDict[tuple[ReplyKey, TokenPair], TokenLogprobs] = OrderedDict()
        self._alike: dict[ReplyKey, dict[TokenPair, None]] = {}

    def record(self, call: ModelCall, base_model: str) -> None:
        """Remembers every choice of a call; models of one base share their tokens."""
        for reply in call.choices:
            if reply.tokens is not None and reply.tokens.token_ids:
                self._add(base_model, replace(reply.tokens, texts=(), top_logprobs=()))

    def _add(self, base_model: str, tokens: TokenLogprobs) -> None:
        key, ids = (base_model, tokens.logprobs), (tuple(tokens.prompt_token_ids), tokens.token_ids)
        if (earlier := self._replies.pop((key, ids), None)) is not None:
            self._num_tokens -= _count(earlier)
        self._replies[key, ids] = tokens
        self._alike.setdefault(key, {})[ids] = None
        self._num_tokens += _count(tokens)
        while self._num_tokens > self._max_tokens and len(self._replies) > 1:
            (old_key, old_ids), oldest = self._replies.popitem(last=False)
            self._num_tokens -= _count(oldest)
            del self._alike[old_key][old_ids]
            if not self._alike[old_key]:
                del self._alike[old_key]

    def find(
        self,
        base_model: str,
        logprobs: Sequence[float],
        token_ids: Sequence[int] | None = None,
        prompt_token_ids: Sequence[int] | None = None,
    ) -> TokenLogprobs | None:
        """Returns a reply as it was sampled.

        None: it was not sampled here, or too long ago, or several replies have these log-probs.

        Args:
            token_ids: Its tokens, if the client sent them; other tokens are another reply.
        """
        key, given = (base_model, tuple(logprobs)), (prompt_token_ids, token_ids)
        wanted = [None if ids is None else tuple(ids) for ids in given]
        fits = [
            ids
            for ids in self._alike.get(key, ())
            if all(mine is None or mine == own for mine, own in zip(wanted, ids, strict=True))
        ]
        return self._replies[key, fits[0]] if len(fits) == 1 else None


def _count(tokens: TokenLogprobs) -> int:
    supports = tokens.supports
    kept = 0 if supports is None else len(supports.packed_token_ids) + sum(map(len, supports.masks))
    return len(tokens.prompt_token_ids) + len(tokens.token_ids) + kept // 32


class ARTHistory(BaseModel):
    """One conversation; clients leave out what is empty."""

    model_config = ConfigDict(extra="ignore")

    messages_and_choices: list[dict[str, Any]] = Field(default_factory=list)
    tools: list[dict[str, Any]] | None = None


class ARTTrajectory(ARTHistory):
    """One trajectory; clients leave out a reward of 0.0, too."""

    additional_histories: list[ARTHistory] = Field(default_factory=list)
    reward: float = Field(default=0.0, allow_inf_nan=False)


class ARTGroup(BaseModel):
    """Trajectories whose rewards are compared."""

    model_config = ConfigDict(extra="ignore")

    trajectories: list[ARTTrajectory] = Field(default_factory=list)


@dataclass(slots=True)
class ReadTrajectories:
    """What was read of a job."""

    groups: list[list[Trajectory]]
    num_replies: int = 0
    num_derived: int = 0  # those of them whose tokens were not sampled by this server, but fit the log-probs they claim
    num_left_out: int = 0  # replies that stay context, because their tokens are not known


def parse_groups(given: object) -> list[ARTGroup]:
    most = get_limits().trajectory_groups
    if not isinstance(given, list) or len(given) > most:
        found = f"{len(given):,}" if isinstance(given, list) else type(given).__name__
        message = f"trajectory_groups: expected a list of at most {most:,} groups, found {found}"
        raise ApiError(422, message, param="trajectory_groups")
    try:
        return [ARTGroup.model_validate(group) for group in given]
    except ValidationError as error:
        raise refuse_invalid(error, "trajectory_groups") from None


class TrajectoryReader:
    """Reads the trajectories of one model, which knows nothing of sequences longer than `max_tokens`."""

    def __init__(self, policy: PolicyServer, replies: SampledReplies, base_model: str, max_tokens: int):
        self._policy, self._replies = policy, replies
        self._base_model, self._max_tokens = base_model, max_tokens

    async def read(self, groups: Sequence[ARTGroup]) -> ReadTrajectories:
        found = ReadTrajectories([])
        for number, group in enumerate(groups):
            siblings = [await self._read_trajectory(each, f"group-{number}", found) for each in group.trajectories]
            found.groups.append(siblings)
        return found

    async def _read_trajectory(self, given: ARTTrajectory, group_id: str, found: ReadTrajectories) -> Trajectory:
        episode: list[EpisodeItem] = []
        for history in [given, *given.additional_histories]:
            tools = history.tools or None
            messages: list[Message] = []
            for entry in history.messages_and_choices:
                if "role" in entry:
                    messages.append(entry)
                    episode.append(build_episode_item(entry, trained=False))
                    continue
                message = _strip(entry.get("message"))
                tokens = await self._find_tokens(entry, ModelRequest(list(messages), tools=tools), message, found)
                item = build_episode_item(message, logprobs=tokens, trained=None if tokens else False)
                messages.append(message)
                episode.append(item)
        return Trajectory(episode=episode, reward=given.reward, group_id=group_id)

    async def _find_tokens(
        self, choice: Mapping[str, Any], request: ModelRequest, message: Message, found: ReadTrajectories
    ) -> TokenLogprobs | None:
        logprobs = _read_logprobs(choice)
        ids, prompt = _read_ids(choice, "token_ids"), _read_ids(choice, "prompt_token_ids")
        tokens = self._replies.find(self._base_model, logprobs, ids, prompt) if logprobs else None
        if tokens is None and logprobs:
            is_cut = choice.get("finish_reason") == "length"
            tokens = await self._derive(request, message, logprobs, ids, prompt, is_cut=is_cut)
            found.num_derived += tokens is not None
        found.num_replies += tokens is not None
        found.num_left_out += tokens is None
        return tokens

    async def _derive(
        self,
        request: ModelRequest,
        message: Message,
        logprobs: list[float],
        ids: tuple[int, ...] | None,
        prompt: tuple[int, ...] | None,
        *,
        is_cut: bool,
    ) -> TokenLogprobs | None:
        """Returns the tokens of a reply that is not remembered, if they have its log-probs at temperature 1.

        Args:
            ids: Its tokens; None: the client did not send them.
            prompt: The tokens of its prompt; None as above.
            is_cut: It ended at its token limit, so the end that the chat template writes was not sampled.
        """
        if ids is None or prompt is None:
            try:
                tokens = await self._policy.encode(request, message)
            except (BackendError, ContextOverflow, EngineError):
                return None
            if not isinstance(tokens, TokenLogprobs):
                return None
            if is_cut:
                tokens = replace(tokens, token_ids=tokens.token_ids[: len(logprobs)])
        else:
            tokens = TokenLogprobs(prompt, ids, tuple(logprobs))
        count = len(tokens.token_ids)
        if not 0 < count == len(logprobs) or len(tokens.prompt_token_ids) + count > self._max_tokens:
            return None
        try:
            [scored] = await self._policy.score([[*tokens.prompt_token_ids, *tokens.token_ids]])
        except ValueError:
            return None  # a token that the model does not have
        own = scored[-len(logprobs) :]
        tolerance = max(self._policy.tolerance, 1e-3)
        if not all(math.isclose(a, b, rel_tol=0, abs_tol=tolerance) for a, b in zip(own, logprobs, strict=True)):
            return None
        return replace(tokens, logprobs=tuple(logprobs), policy_version=self._policy.version)


def _strip(message: object) -> Message:
    given = message if isinstance(message, dict) else {}
    kept = {name: value for name, value in given.items() if value is not None}
    return {"role": "assistant", "content": None, **kept}


def _read_logprobs(choice: Mapping[str, Any]) -> list[float]:
    given = choice.get("logprobs")
    content = given.get("content") if isinstance(given, dict) else None
    values: list[float] = []
    for each in content if isinstance(content, list) else []:
        value = each.get("logprob") if isinstance(each, dict) else None
        if not isinstance(value, int | float) or not -1e30 < value < 1e30:
            return []
        values.append(float(value))
    return values


def _read_ids(choice: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    ids = choice.get(name)
    is_list = isinstance(ids, list) and all(isinstance(each, int) and each >= 0 for each in ids)
    return tuple(ids) if is_list and ids else None
