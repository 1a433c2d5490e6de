"""The large model: what its recorded calls took, how often it agrees with itself, and its further replies."""

from __future__ import annotations

import asyncio
import hashlib
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from reinforge.bounded import load_json
from reinforge.config.schema import LLMConfig
from reinforge.errors import BackendError, BudgetReached, ConfigError, Problem, ReinforgeError
from reinforge.evaluation.rows import RowProblems
from reinforge.files import append_line, read_lines, to_json
from reinforge.interfaces import ChatModel, Teacher
from reinforge.rollout.models.endpoint_config import EndpointConfig
from reinforge.routing.signals import simplify_reply
from reinforge.traces.records import read_records
from reinforge.trainer.setup.components import ComponentBuilder
from reinforge.types.request import Message, ModelRequest, SamplingParams

MOST_FAILED = 8  # requests; if more fail, and more than the file has replies, no more are sent

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TeacherCosts:
    """What the recorded calls took; per call, None where the logs do not say."""

    num_calls: int
    num_failed: int
    prompt_tokens: float | None
    completion_tokens: float | None
    price: float | None  # US dollars
    p50_s: float | None
    p99_s: float | None
    models: tuple[str, ...]

    def __str__(self) -> str:
        failed = f", {self.num_failed:,} failed" if self.num_failed else ""
        slow = "" if self.p50_s is None else f"; p50 {self.p50_s:.2f} s, p99 {self.p99_s:.2f} s"
        tokens = price = "unknown"
        if self.prompt_tokens is not None and self.completion_tokens is not None:
            tokens = f"{1000 * self.prompt_tokens:,.0f} + {1000 * self.completion_tokens:,.0f}"
        if self.price is not None:
            price = f"${1000 * self.price:.4g}"
        return f"{self.num_calls:,} requests{failed}{slow}; per 1,000 requests: {tokens} tokens, price {price}"


def measure_teacher(files: Sequence[Path]) -> TeacherCosts:
    """Returns what the calls of LiteLLM's logs took, which those of `reinforge serve --record` are."""
    numbers: dict[str, list[float]] = {}
    models, num_calls, num_failed = dict[str, None](), 0, 0
    for path in files:
        for row in read_records(path, RowProblems()):
            record = row.value
            if not isinstance(record, Mapping) or "call_type" not in record:
                continue
            num_calls += 1
            if record.get("status") not in (None, "success"):
                num_failed += 1
                continue
            models.setdefault(str(record.get("model") or ""))
            for name in ("prompt_tokens", "completion_tokens", "response_cost", "response_time"):
                if isinstance(value := record.get(name), int | float):
                    numbers.setdefault(name, []).append(float(value))
    means = {name: statistics.fmean(found) for name, found in numbers.items()}
    times = sorted(numbers.get("response_time", ()))
    p50, p99 = (times[int(share * (len(times) - 1))] if times else None for share in (0.5, 0.99))
    tokens = means.get("prompt_tokens"), means.get("completion_tokens")
    return TeacherCosts(
        num_calls, num_failed, *tokens, means.get("response_cost"), p50, p99, tuple(filter(None, models))
    )


def group_by_prompt(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Returns the rows of each prompt: JSON of the messages before the last reply, and of the tools."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        prompt = row["messages"][:-1]
        asked = [{key: value for key, value in each.items() if key != "weight"} for each in prompt]
        found.setdefault(to_json([asked, row.get("tools")]), []).append(row)
    return found


def measure_self_agreement(rows: Sequence[Row]) -> tuple[float | None, int]:
    """Returns how often two replies to one prompt agree, over the prompts with several, and how many these are."""
    groups = group_by_prompt(rows).values()
    repeated = [[simplify_reply(row["messages"]) for row in same[:50]] for same in groups if len(same) > 1]
    if not repeated:
        return None, 0
    shares = [statistics.fmean(a == b for a, b in combinations(found, 2)) for found in repeated]
    return statistics.fmean(shares), len(repeated)


def tidy_reply(message: Message) -> Message:
    """Returns a reply that is either text or tool calls, so that it can be compared."""
    return {**message, "content": None} if message.get("tool_calls") else message


@dataclass(frozen=True, slots=True)
class TeacherOptions:
    """How often the large model is asked again, and what that may cost."""

    file: Path  # configuration whose only entry of `llms` is the model
    num_samples: int = 3  # further replies to each prompt that is trained on
    max_price: float | None = None  # US dollars, at the price of the recorded calls
    max_tokens: int | None = None  # of prompts and replies
    overrides: Sequence[tuple[str, str]] = ()  # those of the run, which decide what is trained on
    note: Callable[[str], None] = lambda line: None

    def count_affordable(self, costs: TeacherCosts) -> float:
        """Returns how many requests may be sent, if they take what recorded ones take."""
        tokens = (costs.prompt_tokens or 0) + (costs.completion_tokens or 0)
        found = math.inf
        for name, limit, each in (("price", self.max_price, costs.price), ("teacher_tokens", self.max_tokens, tokens)):
            if limit is not None and not each:
                fix = "leave it out, or use the other limit: --max_price, --max_teacher_tokens"
                raise ConfigError(Problem(f"--max_{name}", "the logs do not say what a request takes", fix))
            found = min(found, limit / each) if limit is not None and each else found
        return found


class AskedTeacher:
    """The large model, asked again; a file keeps its replies, and what it holds is not requested again."""

    def __init__(self, llm: ChatModel, entry: LLMConfig, file: Path, costs: TeacherCosts, options: TeacherOptions):
        self.llm, self.file, self.costs, self.options = llm, file, costs, options
        self.can_score = False  # True: it has scored tokens of the student
        self.failures, self._replies = Counter[str](), defaultdict[str, list[Message]](list)
        self._settings = entry.model_dump(mode="json", exclude=set(EndpointConfig.model_fields))
        for row in read_lines(file) if file.exists() else ():
            self._replies[row["id"]].append(row["reply"])
        self._num_kept = sum(map(len, self._replies.values()))
        self._affordable = options.count_affordable(costs)
        self._num_sent = self._num_answered = self._num_prompt_tokens = self._num_completion_tokens = 0

    def _identify(self, prompt: str) -> str:
        return hashlib.sha256(to_json([self._settings, prompt]).encode()).hexdigest()[:32]

    def get_replies(self, prompt: str) -> list[Message]:
        return self._replies[self._identify(prompt)][: self.options.num_samples]

    async def probe_scores(self, tokenizer: Any) -> None:
        why = "a model of this kind gives no log-probs of given tokens"
        if isinstance(self.llm, Teacher):
            try:
                await self.llm.prepare(tokenizer)
                why = ""
            except ReinforgeError as error:
                why = str(error).splitlines()[0]
        self.can_score = not why
        text = f"no, only imitation: {why}" if why else "yes, after imitation: the teacher scores the student's tokens"
        self.options.note(f"  distill   {text}")

    async def ask(self, prompts: Sequence[str], max_tokens: int, max_concurrency: int) -> None:
        """Requests the replies that are missing, of at most `max_tokens` if the model is in this process."""
        missing = [each for each in prompts for _ in range(self.options.num_samples - len(self.get_replies(each)))]
        self._announce(len(missing), len(set(missing)))
        free = asyncio.Semaphore(max_concurrency)

        async def ask(prompt: str) -> None:
            async with free:
                await self._ask_once(prompt, SamplingParams(max_tokens=max_tokens))

        await asyncio.gather(*map(ask, missing))
        if self._num_sent == len(missing):
            return
        left = f"{self._num_sent:,} of {len(missing):,} requests were sent; {self.file} keeps the replies"
        if self._has_spent_all():
            fix = "raise --max_price or --max_teacher_tokens, or lower --teacher_samples"
            raise BudgetReached(f"{self.llm.model_name}: the replies have cost what is allowed: {left}; {fix}")
        raise BackendError(f"{self.llm.model_name}: {self.describe_failures()}: {left}")

    def _announce(self, num_missing: int, num_prompts: int) -> None:
        costs, cost = self.costs, f"{num_missing:,} requests"
        if costs.prompt_tokens is not None and costs.completion_tokens is not None:
            cost += f", about {num_missing * (costs.prompt_tokens + costs.completion_tokens):,.0f} tokens"
        cost += "" if costs.price is None else f", about ${num_missing * costs.price:,.4g}"
        if num_missing > self._affordable:
            name = "max_teacher_tokens" if self.options.max_price is None else "max_price"
            num_fit = int(num_prompts * self._affordable / num_missing)
            message = f"{num_prompts:,} prompts need {cost}, and the limit is enough for {num_fit:,} of them"
            raise ConfigError(Problem(f"--{name}", message, "raise it, or lower --teacher_samples"))
        self.options.note(f"  asking    {self.llm.model_name} again, for {num_prompts:,} prompts: {cost}")

    async def _ask_once(self, prompt: str, sampling: SamplingParams) -> None:
        if self._has_spent_all() or self.failures.total() > max(MOST_FAILED, self._num_kept):
            return
        self._num_sent += 1
        messages, tools = load_json(prompt)
        try:
            reply = await self.llm.sample(ModelRequest(messages, sampling, tools, arguments={}))
        except ReinforgeError as error:
            self.failures[str(error)] += 1
            return
        self._num_answered += 1
        self._num_prompt_tokens += reply.num_prompt_tokens
        self._num_completion_tokens += reply.num_completion_tokens
        if reply.finish_reason == "length" or not (reply.message.get("content") or reply.message.get("tool_calls")):
            self.failures["the reply is empty, or cut off"] += 1
            return
        id_, message = self._identify(prompt), tidy_reply(reply.message)
        self._replies[id_].append(message)
        self._num_kept += 1
        append_line(self.file, {"id": id_, "reply": message})

    def _has_spent_all(self) -> bool:
        """Returns True if the requests so far may cost what is allowed, whether prompts or replies are dear."""
        costs, count = self.costs, self._num_answered or 1
        used = (self._num_prompt_tokens, costs.prompt_tokens), (self._num_completion_tokens, costs.completion_tokens)
        size = max([1.0, *(total / count / mean for total, mean in used if mean)])  # compared with a recorded request
        return self._num_sent * size >= self._affordable

    def describe_failures(self) -> str:
        return f"{self.failures.total():,} requests failed, most often: {self.failures.most_common(1)[0][0]}"


async def open_teacher(
    builder: ComponentBuilder, file: Path, costs: TeacherCosts, options: TeacherOptions
) -> AskedTeacher:
    """Returns the only entry of `llms`."""
    entries = list(builder.config.llms.items())
    if len(entries) != 1 or entries[0][1].static_type == "policy":
        fix = "write llms: {teacher: {_type: openai, base_url: URL, model_name: NAME}}"
        raise ConfigError(Problem("llms", "expected one entry, the model to ask again", fix, str(options.file)))
    [(name, entry)] = entries
    return AskedTeacher(await builder.get_llm(name), entry, file, costs, options)
