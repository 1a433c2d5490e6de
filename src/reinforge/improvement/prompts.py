"""Searches for better prompts of an agent whose weights stay unchanged: the texts that it gets by `context.text`.

Part of the `train` examples is scored, with the agent's own wording and with each candidate. The others are where
candidates come from: good replies that become demonstrations, or failures that a model reflects on. No example is both,
since a prompt that contains its answer would score well on it.

    FOLDER/candidates.jsonl    every candidate, in the order in which they were first run
           episodes.jsonl      every episode; its `epoch` is the index of its candidate
           reflections.jsonl   what the reflecting model was asked, and its replies
           prompts.yml         the best candidate, and prompts.diff, what differs from the agent's own wording
           rows.jsonl          its good replies, each below the agent's own wording: to imitate them instead of it

An interrupted search is called again with the same arguments: it repeats every choice, takes finished episodes and
reflections from the folder, and ends as if it had not been interrupted.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import logging
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, TypeVar

from reinforge.config.document import escape
from reinforge.config.dump import dump_data
from reinforge.config.loaded_config import LoadedConfig
from reinforge.errors import ConfigError, EvaluationError, Problem, ReinforgeError, did_you_mean
from reinforge.evaluation.run import DatasetEvaluation, describe_missing
from reinforge.files import append_line, read_lines, replace_file
from reinforge.registry import Registry
from reinforge.rollout.capture import Capture
from reinforge.rollout.episode import extract_text
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.runs.journal.episode_json import dump_episode, parse_episode
from reinforge.trainer.evaluate import EvaluationOptions, prepare_evaluation
from reinforge.trainer.setup.components import ComponentBuilder
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.request import Message
from reinforge.types.seeding import stable_random, stable_seed
from reinforge.types.trajectory import Outcome

logger = logging.getLogger(__name__)

T = TypeVar("T")
Prompts = Mapping[str, str]

MAIN_TEXT, ROWS = "system", "rows.jsonl"
NUM_DEMONSTRATIONS = (2, 4, 8)
MIN_SCORED = 4  # examples below which no mean is worth comparing
MINIBATCH = 3  # examples that a reflection reads
REFLECTION_TOKENS = 1024
MAX_SHOWN = 2000  # characters of a reply, an expected answer or a reason that a reflection reads
ROLES = {"user": "User", "assistant": "Assistant", "tool": "Tool"}


@dataclass(frozen=True, slots=True)
class FoundPrompts:
    """What a search has found; `prompts` are those of the configuration if no candidate was better."""

    prompts: dict[str, str]  # the `prompts` section of a configuration
    mean: float  # mean reward with them, on the examples that all candidates were scored on
    default_mean: float  # the same with the prompts of the configuration
    num_examples: int
    num_candidates: int  # without the configuration's own prompts, and with those that were refused
    num_episodes: int  # including those taken from the folder
    num_tokens: int  # that the policy sampled in them


class PromptTrials:
    """Runs candidates; an episode that the folder holds is not run again."""

    def __init__(self, evaluation: DatasetEvaluation, folder: Path, configured: Prompts, note: Callable[[str], None]):
        self.evaluation, self.folder, self.configured, self.note = evaluation, folder, dict(configured), note
        self.runner, self.ids = evaluation.runner, evaluation.example_ids("train")
        self.candidates = [dict(row["prompts"]) for row in self.read("candidates.jsonl")]
        self.texts = self.runner.texts  # by name, with the agent's own wording
        items = {str(item.id): item for item in evaluation.examples("train")}
        rows = [row for row in self.read("episodes.jsonl") if row["example_id"] in items]
        for row in rows:
            self.texts |= row.get("texts", {}) if row["epoch"] == 0 else {}  # later ones did not shape the search
        self._saved, self._told, self._keys = dict(self.texts), evaluation.listener, set[EpisodeKey]()
        records = [parse_episode(row, items[row["example_id"]]) for row in rows]
        self._finished = {record.key: record for record in records if not record.outcome.is_missing}
        evaluation.recall = lambda key, item: self._finished.get(key)
        evaluation.listener = self._record

    @property
    def num_episodes(self) -> int:
        return len(self._keys)

    def read(self, name: str) -> list[dict[str, Any]]:
        return read_lines(self.folder / name) if (self.folder / name).exists() else []

    def divide(self, seed: int, num_sources: int, num_scored: int) -> tuple[list[str], list[str]]:
        """Returns the examples where candidates come from, and those that score them; no cluster is in both."""
        groups = defaultdict[str, list[str]](list)
        for id_ in self.ids:
            groups[self.evaluation.clusters.get(id_, id_)].append(id_)
        order, sources = list(groups.values()), list[str]()
        stable_random(seed, "prompts").shuffle(order)
        while order and len(sources) < num_sources:
            sources += order.pop()
        scored = [id_ for group in order for id_ in group][:num_scored]
        if len(scored) < MIN_SCORED or len(sources) < 2:
            message = f"too few to compare prompts on some of the {len(self.ids)} train examples"
            raise ConfigError(Problem("budget", message, "at least 24 episodes and 8 examples are needed"))
        return sources[:num_sources], scored

    def _record(self, record: EpisodeRecord) -> None:
        row = dump_episode(record)
        if self.texts != self._saved:
            row["texts"] = self._saved = dict(self.texts)
        append_line(self.folder / "episodes.jsonl", row)
        if not record.outcome.is_missing:
            self._finished[record.key] = record
        self._told(record)

    async def run(self, prompts: Prompts, ids: Sequence[str]) -> list[EpisodeRecord]:
        """Returns the episode of each example with these prompts."""
        if dict(prompts) not in self.candidates:
            append_line(self.folder / "candidates.jsonl", {"prompts": dict(prompts)})
            self.candidates.append(dict(prompts))
        self.runner.prompts = dict(prompts)
        keys = [EpisodeKey("eval", self.candidates.index(dict(prompts)), id_) for id_ in ids]
        self._keys |= set(keys)
        return await self.evaluation.collect(keys)

    async def run_default(self, ids: Sequence[str]) -> list[EpisodeRecord]:
        """Returns the episodes with the configuration's prompts; a `ConfigError` if the agent asks for no text."""
        records = await self.run(self.configured, ids[:1])
        if self.texts or records[0].outcome.is_missing:
            records = await self.run(self.configured, ids)
        compute_mean(records)  # raises if there is no score at all
        if not self.texts:
            fix = 'replace its fixed prompt by context.text("system", "...")'
            raise ConfigError(Problem("prompts", "the agent asks for no text that could be replaced", fix))
        return records

    async def choose(self, candidates: Sequence[Prompts], ids: Sequence[str]) -> FoundPrompts:
        """Returns the best candidate, of equal ones the first, and writes it to the folder.

        One with which more episodes than before exceed the context is refused, whatever the agent makes of that.
        """
        replies = default = await self.run(self.configured, ids)
        best, mean, num_overflows = self.configured, compute_mean(default), count_overflows(default)
        for prompts in candidates:
            records = await self.run(prompts, ids)
            if count_overflows(records) <= num_overflows and (found := compute_mean(records)) > mean:
                best, mean, replies = dict(prompts), found, records
        self._write(best)
        self._write_rows(best, [record for record in replies if record.reward is not None and record.reward >= mean])
        num_tokens = sum(self._finished[key].num_completion_tokens for key in self._keys & self._finished.keys())
        num_candidates = len(self.candidates) - 1
        return FoundPrompts(best, mean, compute_mean(default), len(ids), num_candidates, self.num_episodes, num_tokens)

    def _write(self, prompts: Prompts) -> None:
        section = {name: escape(text) for name, text in prompts.items()}
        replace_file(self.folder / "prompts.yml", dump_data({"prompts": section}))
        lines = list[str]()
        for name, text in prompts.items():
            before, names = self.texts.get(name, "").splitlines(), (f"{name} (the agent's own)", f"{name} (found)")
            lines += difflib.unified_diff(before, text.splitlines(), *names, lineterm="")
        replace_file(self.folder / "prompts.diff", "".join(f"{line}\n" for line in lines))

    def _write_rows(self, prompts: Prompts, records: Sequence[EpisodeRecord]) -> None:
        """Writes each reply as a row of messages: the context distillation of arXiv:2209.15189, on sampled replies."""
        own, lines = self.texts | self.configured, list[str]()
        for call in (call for record in records for call in record.calls if call.llm == self.runner.main_llm):
            asked = json.dumps(list(call.request.messages))
            for name, text in prompts.items():
                asked = asked.replace(json.dumps(text)[1:-1], json.dumps(own.get(name, text))[1:-1])
            tools = {"tools": list(call.request.tools)} if call.request.tools else {}
            lines.append(json.dumps({"messages": [*json.loads(asked), call.reply.message], **tools}))
        replace_file(self.folder / ROWS, "".join(f"{line}\n" for line in lines))


def compute_mean(records: Sequence[EpisodeRecord]) -> float:
    """Returns the mean reward of the episodes that have one; an `EvaluationError` if none has."""
    rewards = [record.reward for record in records if record.reward is not None]
    if not rewards:
        raise EvaluationError(f"no example could be scored: {describe_missing(records)}")
    return fmean(rewards)


def count_overflows(records: Sequence[EpisodeRecord]) -> int:
    return sum(record.overflow is not None for record in records)


@asynccontextmanager
async def _open_trials(
    loaded: LoadedConfig, folder: Path, options: EvaluationOptions | None, registry: Registry | None
) -> AsyncIterator[PromptTrials]:
    options = options or EvaluationOptions()
    folder.mkdir(parents=True, exist_ok=True)
    async with ComponentBuilder(loaded, registry) as builder:
        if options.adapter is not None:
            builder.use_trainer_adapter(options.adapter)
        evaluation, adapter = await prepare_evaluation(builder, "train", options.progress, limit=options.limit)
        if adapter is not None:
            await adapter.initialize(loaded.config.finetuning)
        yield PromptTrials(evaluation, folder, loaded.config.prompts, options.progress.note)


async def search_demonstrations(
    loaded: LoadedConfig,
    folder: Path,
    *,
    budget: int,
    seed: int = 0,
    options: EvaluationOptions | None = None,
    registry: Registry | None = None,
) -> FoundPrompts:
    """Appends 2, 4 and 8 of the agent's best episodes to its text `system`, or else its first; returns the best.

    Args:
        budget: Maximum number of episodes.
        options: Its `adapter`, `limit` and `progress` count.

    Raises:
        ConfigError: The configuration is wrong, the agent asks for no text, or the budget is too small.
        EvaluationError: No example could be scored.
    """
    async with _open_trials(loaded, folder, options, registry) as trials:
        num_sources = min(len(trials.ids) // 2, budget // 4)
        num_scored = (budget - num_sources) // (1 + len(NUM_DEMONSTRATIONS))
        sources, scored = trials.divide(seed, num_sources, num_scored)
        records = await trials.run_default([*sources, *scored])
        name = MAIN_TEXT if MAIN_TEXT in trials.texts else next(iter(trials.texts))
        found = choose_demonstrations(records[: len(sources)], trials.runner.main_llm)
        sizes = [size for size in NUM_DEMONSTRATIONS if size <= len(found)] or [len(found)] * bool(found)
        text = trials.configured.get(name, trials.texts[name])
        extended = [append_demonstrations(text, found[:size]) for size in sizes]
        return await trials.choose([{**trials.configured, name: each} for each in extended], scored)


def choose_demonstrations(records: Sequence[EpisodeRecord], llm: str) -> list[str]:
    """Returns the best episodes as strings: the best and shortest first, then the least similar to those before.

    Example: rewards 0, 0, 0.5, 0.9, 1 -> those above 0.74, the middle between mean and maximum: 1, then 0.9.
    """
    best = max((record.reward for record in records if record.reward is not None), default=0.0)
    least = (compute_mean(records) + best) / 2
    rewards = {
        _write_turns(_list_turns(record, llm)): record.reward
        for record in records
        if record.outcome is Outcome.OK and record.reward is not None and record.reward > least
    }
    left = sorted(filter(None, rewards), key=lambda text: (-rewards[text], len(text), text))
    chosen = list[str]()
    while left and len(chosen) < NUM_DEMONSTRATIONS[-1]:
        nearest = [max((compute_similarity(text, other) for other in chosen), default=0.0) for text in left]
        chosen.append(left.pop(nearest.index(min(nearest))))
    return chosen


def compute_similarity(first: str, second: str) -> float:
    """Returns the share of the words of two strings that both have.

    Example: "a b c" and "b c d" -> 2 of 4 -> 0.5.
    """
    one, two = set(re.findall(r"\w+", first)), set(re.findall(r"\w+", second))
    return len(one & two) / max(1, len(one | two))


def append_demonstrations(text: str, demonstrations: Sequence[str]) -> str:
    return "\n\n".join([text, "Examples:", *demonstrations] if text else ["Examples:", *demonstrations])


def _list_turns(record: EpisodeRecord, llm: str) -> list[Message]:
    """Returns the messages of the last call of an entry of `llms`, with its reply and without system prompts."""
    calls = [call for call in record.calls if call.llm == llm]
    turns = [*calls[-1].request.messages, calls[-1].reply.message] if calls else []
    return [turn for turn in turns if turn["role"] in ROLES]


def _write_turns(turns: Sequence[Message]) -> str:
    return "\n".join(f"{ROLES[turn['role']]}: {_write_turn(turn)}" for turn in turns)


def _write_turn(turn: Message) -> str:
    calls = [call["function"] for call in turn.get("tool_calls") or ()]
    parts = [extract_text(turn.get("content")), *(f"{call['name']}({call['arguments']})" for call in calls)]
    return "\n".join(part for part in parts if part)


async def search_with_gepa(
    loaded: LoadedConfig,
    folder: Path,
    *,
    budget: int,
    seed: int = 0,
    reflect: str | None = None,
    options: EvaluationOptions | None = None,
    registry: Registry | None = None,
    optimize: Callable[..., Any] | None = None,
) -> FoundPrompts:
    """Has a model rewrite the agent's texts, given what went wrong with them, and returns what scores best.

    GEPA (arXiv:2507.19457) proposes and selects; the examples are run and scored as in every evaluation here. It gets
    no `run_dir`, from which it would unpickle its state and resume with other random choices.

    Args:
        budget: Maximum number of episodes and reflections.
        reflect: Entry of `llms` that writes the proposals; None: the one that the agent calls.
        options: Its `adapter`, `limit` and `progress` count.
        optimize: Replaces `gepa.optimize`.

    Raises:
        ConfigError: As for demonstrations, or gepa is not installed.
    """
    if optimize is None:
        try:
            import gepa
        except ModuleNotFoundError:
            fix = "pip install 'reinforge[prompt]'"
            raise ConfigError(Problem("gepa", "the package gepa is not installed", fix)) from None
        optimize = gepa.optimize
    async with _open_trials(loaded, folder, options, registry) as trials:
        num_scored = min(len(trials.ids) // 2, budget // 5)
        sources, scored = trials.divide(seed, len(trials.ids) - num_scored, num_scored)
        search = GepaSearch(trials, scored, reflect, budget, seed)
        default = await trials.run_default(scored)
        settings = {
            "seed_candidate": search.list_texts(),
            "trainset": sources,
            "valset": scored,
            "adapter": search,
            "reflection_lm": search.reflect,
            "reflection_minibatch_size": min(MINIBATCH, len(sources)),
            "perfect_score": max(1.0, *(record.reward or 0.0 for record in default)),
            "stop_callbacks": lambda state: search.must_stop(state.i),
            "logger": SimpleNamespace(log=logger.debug),
            "track_best_outputs": False,
            "cache_evaluation": True,
            "seed": seed,
        }
        try:
            result = await run_in_daemon_thread(partial(optimize, **settings), "gepa")
        finally:
            search.close()
        return await trials.choose([search.read_candidate(each) for each in result.candidates], scored)


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """What GEPA reads of an evaluation, as its own `EvaluationBatch`."""

    outputs: list[Any]
    scores: list[float]
    trajectories: list[dict[str, str]]  # what a reflection reads of each example
    num_metric_calls: int
    objective_scores: None = None


class GepaSearch:
    """GEPA's adapter and reflecting model; its thread waits for what the loop of the search does."""

    propose_new_texts = None

    def __init__(self, trials: PromptTrials, scored: Sequence[str], llm: str | None, budget: int, seed: int):
        runner = trials.runner
        self.trials, self.scored, self.budget, self.seed = trials, scored, budget, seed
        self.llm, self.num_reflections, self.loop = llm or runner.main_llm, 0, asyncio.get_running_loop()
        self._is_closed, self._running = False, Future[Any]()
        self._replies = defaultdict[str, list[str]](list)
        for row in trials.read("reflections.jsonl"):
            self._replies[row["prompt"]].append(row["reply"])
        if self.llm not in runner.llms:
            message = f"llms has no entry {self.llm}{did_you_mean(self.llm, runner.llms)}"
            raise ConfigError(Problem("reflect", message, f"name one of: {', '.join(runner.llms)}"))
        if runner.llms[self.llm].is_policy:
            trials.note(f"warning: the policy ({self.llm}) reflects on its own prompts; a small model has few ideas")

    def list_texts(self) -> dict[str, str]:
        return {name: self.trials.configured.get(name, text) for name, text in self.trials.texts.items()}

    def read_candidate(self, candidate: Prompts) -> Prompts:
        """Returns the `prompts` of a candidate, which has every text."""
        texts = self.list_texts()
        changed = {name: text for name, text in candidate.items() if text != texts[name]}
        return {**self.trials.configured, **changed}

    def evaluate(self, batch: Sequence[str], candidate: Prompts, capture_traces: bool = False) -> ScoredBatch:
        before = self.trials.num_episodes
        records = self._wait(self.trials.run(self.read_candidate(candidate), batch))
        mean = compute_mean(records)  # stands for an episode without a reward
        scores = [mean if record.reward is None else record.reward for record in records]
        outputs = [record.item.output_obj for record in records]
        read = [describe_episode(record, self.trials.runner.main_llm) for record in records]
        return ScoredBatch(outputs, scores, read, self.trials.num_episodes - before)

    def make_reflective_dataset(
        self, candidate: Prompts, eval_batch: ScoredBatch, components_to_update: Sequence[str]
    ) -> dict[str, list[dict[str, str]]]:
        return dict.fromkeys(components_to_update, eval_batch.trajectories)

    def reflect(self, prompt: str) -> str:
        """Returns the model's reply; an error costs this proposal alone."""
        self.num_reflections += 1
        if self._replies[prompt]:
            return self._replies[prompt].pop(0)
        try:
            reply = self._wait(self._ask(prompt))
        except (ReinforgeError, ConnectionError) as error:
            self.trials.note(f"warning: {self.llm} proposes nothing: {error}")
            raise
        append_line(self.trials.folder / "reflections.jsonl", {"prompt": prompt, "reply": reply})
        return reply

    async def _ask(self, prompt: str) -> str:
        capture = Capture(stable_seed(self.seed, "reflect", self.num_reflections))
        messages = [{"role": "user", "content": prompt}]
        llm = self.trials.runner.create_handle(self.llm, capture, None)
        reply = await llm.chat.completions.create(messages=messages, max_tokens=REFLECTION_TOKENS)
        return extract_text(reply.choices[0].message.content)

    def must_stop(self, iteration: int) -> bool:
        """Returns True if another proposal and its evaluation could exceed the budget, or if nothing new happens."""
        spent = self.trials.num_episodes + self.num_reflections
        most = 2 * MINIBATCH + 2 + len(self.scored)  # a failed reflection is tried twice
        return self._is_closed or spent + most > self.budget or iteration >= self.budget

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self._is_closed:
            work.close()
            raise RuntimeError("the search has ended")
        self._running = running = asyncio.run_coroutine_threadsafe(work, self.loop)
        return running.result()

    def close(self) -> None:
        self._is_closed = True
        self._running.cancel()


def describe_episode(record: EpisodeRecord, llm: str) -> dict[str, str]:
    """Returns what a reflection reads: the task, the replies, and why the episode has its reward."""
    turns = _list_turns(record, llm)
    asked = _write_turn(turns[0]) if turns else str(record.item.input_obj)
    replies = _write_turns(turns[1:]) or str(record.item.output_obj)
    feedback = {
        "Failed": f"{record.outcome.value}: {record.reason}" if record.reason else None,
        "Score": None if record.reward is None else f"{record.reward:g}",
        "Expected": record.item.expected_output_obj,
        **{name: score.reasoning or score.error for name, score in record.scores.items()},
    }
    lines = [f"{name}: {str(value)[:MAX_SHOWN]}" for name, value in feedback.items() if value not in (None, "")]
    return {"Inputs": asked[:MAX_SHOWN], "Generated Outputs": replies[:MAX_SHOWN], "Feedback": "\n".join(lines)}
