"""Tries a file's evaluators on real answers and on answers that deserve no reward: `reinforge reward test`.

    expected answer 1, empty answer 0, limit 0.5       an attack that scores more than 0.5 is reported
    expected answer 0, worst answer -1, limit -0.5     the middle between the worst answer (at most 0) and the expected

Nothing is trained. Without `--sample` no model is loaded, other than the judges of the file.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from reinforge.config.finetuning_blocks import LimitsConfig
from reinforge.config.loaded_config import LoadedConfig
from reinforge.errors import ConfigError, EvaluationError, Problem, did_you_mean
from reinforge.evaluation.attacks import Material, build_attacks
from reinforge.evaluation.evaluators.base import score_item
from reinforge.evaluation.evaluators.pairwise_judge import ExpectedPairwiseJudge
from reinforge.evaluation.reasons import find_commonest_reason, shorten_line
from reinforge.evaluation.row_limits import RowLimits, TextRows
from reinforge.evaluation.rows import RowProblems, read_jsonl_rows
from reinforge.interfaces import Evaluator, GroupEvaluator, TrainerAdapter
from reinforge.registry import Registry
from reinforge.rollout.runner import score_alone
from reinforge.runs.progress import RunProgress, SilentProgress
from reinforge.trainer.evaluate import ALL, load_examples, prepare_evaluation
from reinforge.trainer.setup.components import Attempts, ComponentBuilder
from reinforge.types.episode import EpisodeKey
from reinforge.types.evaluation import EvalInputItem

EXPECTED, REAL = "expected", "real"
"""Kinds of answers that are not attacks: the dataset's, and those that were given or sampled."""
WRONG = "wrong"  # given answers with `label: false`

MAX_SHOWN = 10  # answers that scored too high and are printed, for each evaluator


@dataclass(frozen=True, slots=True)
class CandidateAnswer:
    example_id: str
    kind: str  # `expected`, `real`, `wrong`, or the attack
    output: Any


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """An evaluator's score of an answer."""

    evaluator: str
    example_id: str
    kind: str
    output: Any
    score: float | None
    error: str | None = None
    limit: float | None = None  # what an attack on this example may score; None: unknown

    @property
    def is_attack(self) -> bool:
        return self.kind not in (EXPECTED, REAL)

    @property
    def is_too_high(self) -> bool:
        return self.is_attack and self.score is not None and self.limit is not None and self.score > self.limit


@dataclass(frozen=True, slots=True)
class RewardTestReport:
    reward: str
    num_examples: int
    answers: list[ScoredAnswer]

    @property
    def too_high(self) -> list[ScoredAnswer]:
        """The best answer of each attack on each example that scored too high, for each evaluator."""
        best: dict[tuple[str, str, str], ScoredAnswer] = {}
        for each in self.answers:
            key = (each.evaluator, each.kind, each.example_id)
            if each.is_too_high and (key not in best or (each.score or 0) > (best[key].score or 0)):
                best[key] = each
        return list(best.values())

    def as_dict(self) -> dict[str, Any]:
        return {
            "reward": self.reward,
            "num_examples": self.num_examples,
            "rows": self.summarize(),
            "too_high": [asdict(each) for each in self.too_high],
            "num_missing": sum(each.score is None for each in self.answers),
        }

    def summarize(self) -> list[dict[str, Any]]:
        """Returns one row for each evaluator and kind of answer: mean, highest score, and how many are too high."""
        groups: dict[tuple[str, str], list[ScoredAnswer]] = {}
        for each in self.answers:
            groups.setdefault((each.evaluator, each.kind), []).append(each)
        rows = []
        for (evaluator, kind), group in groups.items():
            scores = [each.score for each in group if each.score is not None]
            tried = {each.example_id for each in group if each.score is not None}
            rows.append(
                {
                    "evaluator": evaluator,
                    "answer": kind,
                    "mean": statistics.fmean(scores) if scores else None,
                    "max": max(scores, default=None),
                    "num_examples": len(tried),
                    "num_too_high": len({each.example_id for each in group if each.is_too_high}),
                    "num_missing": len(group) - len(scores),
                    "missing_reason": find_commonest_reason(each.error or "" for each in group if each.score is None),
                }
            )
        return rows

    def format_lines(self) -> list[str]:
        """Returns the result as text: a table, the answers that scored too high, and what to do."""
        lines = [f"{'evaluator':<20} {'answer':<14} {'mean':>7} {'highest':>8}  too high"]
        for row in self.summarize():
            name = row["evaluator"] + (" (reward)" if row["evaluator"] == self.reward else "")
            honest = row["answer"] in (EXPECTED, REAL)
            high = "" if honest else f"{row['num_too_high']} of {row['num_examples']} examples"
            missing = f"; {row['num_missing']} without a score: {row['missing_reason']}" if row["num_missing"] else ""
            numbers = f"{_format_score(row['mean']):>7} {_format_score(row['max']):>8}"
            lines.append(f"{shorten_line(name, 20):<20} {row['answer']:<14} {numbers}  {high}{missing}".rstrip())
        return [*lines, *self._format_too_high(), *self._format_notes()]

    def _format_too_high(self) -> list[str]:
        if not self.too_high:
            return ["no attack scored too high"]
        lines = ["scored too high:"]
        for evaluator in dict.fromkeys(each.evaluator for each in self.too_high):
            found = [each for each in self.too_high if each.evaluator == evaluator]
            lines += [
                f"  {evaluator}, {each.kind}, example {shorten_line(each.example_id, 40)}: {_format_score(each.score)} "
                f'(at most {_format_score(each.limit)}): "{shorten_line(each.output, 120)}"'
                for each in found[:MAX_SHOWN]
            ]
            lines += [f"  {evaluator}: and {len(found) - MAX_SHOWN} more"] if len(found) > MAX_SHOWN else []
        return [*lines, "A policy that is trained on this reward will find such answers: make the evaluator stricter"]

    def _format_notes(self) -> list[str]:
        """Returns what else is wrong with an evaluator: it has no score of good answers, or not a higher one."""
        means = {(row["evaluator"], row["answer"]): row["mean"] for row in self.summarize()}
        notes = []
        for evaluator in dict.fromkeys(each.evaluator for each in self.answers):
            expected, empty = means.get((evaluator, EXPECTED)), means.get((evaluator, "empty"))
            if expected is not None and empty is not None and expected <= empty:
                notes.append(f"note: {evaluator} scores expected answers no higher than empty ones")
            mine = [each for each in self.answers if each.evaluator == evaluator and each.is_attack]
            without = {each.example_id for each in mine if each.limit is None}
            if without:
                notes.append(
                    f"note: {evaluator} has no score of a good answer to {len(without)} of {self.num_examples} "
                    "examples, so nothing is too high there; pass --max_score"
                )
        return notes


def _format_score(score: float | None) -> str:
    return "-" if score is None else f"{score:.3g}"


@dataclass(frozen=True, slots=True)
class RewardTestOptions:
    limit: int = 8  # how many examples, from the first of the training split
    answers: Path | None = None
    """JSON Lines with `id` and `output` of real answers, and `label: false` for those known to be wrong."""
    num_samples: int = 0  # real answers to sample from the agent for each example; 0: none
    attacks: tuple[str, ...] = ()
    num_guesses: int = 8  # wrong answers that `best_of_n` tries
    evaluators: tuple[str, ...] = ()
    trusted: str | None = None
    """An evaluator that tells which real answers are wrong; None: `gate.metric` if it is not the reward."""
    max_score: float | None = None  # an attack may score this much; None: half of what the expected answer scores
    progress: RunProgress = field(default_factory=SilentProgress)
    adapter: TrainerAdapter | None = None  # serves the policy in place of the file's trainer adapter


async def run_reward_test(
    loaded: LoadedConfig, options: RewardTestOptions, registry: Registry | None = None
) -> RewardTestReport:
    """Scores real and bad answers with the evaluators of a configuration.

    Raises:
        ConfigError: The configuration, the data or an option is wrong, or nothing says what a good answer scores.
        EvaluationError: No episode has an answer.
    """
    async with ComponentBuilder(loaded, registry) as builder:
        evaluators = await _get_evaluators(builder, options)
        items = await load_examples(builder, "train" if loaded.config.finetuning.enabled else ALL, options.limit)
        real = _read_answers(options.answers, items) if options.answers is not None else []
        if options.num_samples:
            real += await _sample(builder, options)
        if not real and options.max_score is None and all(item.expected_output_obj is None for item in items):
            message = "the examples have no expected answers, so nothing says what a good answer scores"
            fix = "pass --answers FILE with answers, --sample N to sample some, or --max_score S"
            raise ConfigError(Problem("", message, fix))
        bench = _Bench(items, evaluators, builder.get_max_concurrency(), loaded.config.finetuning.limits)
        reward = loaded.config.finetuning.reward_function
        name = reward.name if reward is not None and reward.name in evaluators else next(iter(evaluators))
        trusted = _choose_trusted(loaded, options, name, evaluators)
        return RewardTestReport(name, len(items), await bench.run(real, options, trusted))


class _Bench:
    """Scores answers to a few examples with several evaluators."""

    def __init__(
        self,
        items: Sequence[EvalInputItem],
        evaluators: Mapping[str, Evaluator],
        max_concurrency: int,
        limits: LimitsConfig,
    ):
        self.items = {str(item.id): item for item in items}
        self.evaluators, self.timeout_s = dict(evaluators), limits.evaluator_timeout_s
        self._limit = asyncio.Semaphore(max_concurrency)
        self._references: dict[str, Any] = {}

    async def run(
        self, real: Sequence[CandidateAnswer], options: RewardTestOptions, trusted: str | None
    ) -> list[ScoredAnswer]:
        items = list(self.items.values())
        known = {str(item.id): item.expected_output_obj for item in items if item.expected_output_obj is not None}
        expected = [CandidateAnswer(id_, EXPECTED, output) for id_, output in known.items()]
        self._references = {each.example_id: each.output for each in reversed(real) if each.kind == REAL}
        honest = await self._score_all([*expected, *real])
        wrong = _find_wrong(honest, trusted)
        material = Material(items, options.num_guesses, wrong)
        bad = [
            CandidateAnswer(str(item.id), each.attack, each.output)
            for item in items
            for each in build_attacks(item, material, options.attacks or None)
        ]
        scored = [*honest, *await self._score_all(bad)]
        limits = _find_limits(scored, options.max_score)
        return [
            replace(each, limit=limits.get((each.evaluator, each.example_id)) if each.is_attack else None)
            for each in scored
        ]

    async def _score_all(self, answers: Iterable[CandidateAnswer]) -> list[ScoredAnswer]:
        pairs = [(name, each) for name in self.evaluators for each in answers]
        return list(await asyncio.gather(*(self._score(name, each) for name, each in pairs)))

    async def _score(self, name: str, answer: CandidateAnswer) -> ScoredAnswer:
        item, evaluator = self.items[answer.example_id], self.evaluators[name]
        changes = {"output_obj": answer.output}
        if item.expected_output_obj is None and isinstance(evaluator, GroupEvaluator | ExpectedPairwiseJudge):
            changes["expected_output_obj"] = self._references.get(answer.example_id)  # compare with a real answer
        async with self._limit:
            found = await score_item(evaluator, item.copy_with_updates(**changes), self.timeout_s)
        score = None if found.error is not None else float(found.score)
        return ScoredAnswer(name, answer.example_id, answer.kind, answer.output, score, found.error)


def _find_wrong(honest: Sequence[ScoredAnswer], trusted: str | None) -> dict[str, list[Any]]:
    """Returns the real answers that a trusted evaluator gives at most half of what the expected answer scores."""
    if trusted is None:
        return {}
    mine = [each for each in honest if each.evaluator == trusted]
    limits = _find_limits(mine, None)
    wrong: dict[str, list[Any]] = {}
    for each in mine:
        limit = limits.get((trusted, each.example_id))
        if each.kind == REAL and each.score is not None and limit is not None and each.score <= limit:
            wrong.setdefault(each.example_id, []).append(each.output)
    return wrong


def _find_limits(scored: Sequence[ScoredAnswer], max_score: float | None) -> dict[tuple[str, str], float]:
    """Returns what an attack may score, by evaluator and example.

    It is the middle between the lowest score of the evaluator (at most 0) and what the expected answer scores; without
    one, what the real answers to the example score on average.
    """
    lowest: dict[str, float] = {}
    good: dict[tuple[str, str], dict[str, list[float]]] = {}
    for each in scored:
        if each.score is None:
            continue
        lowest[each.evaluator] = min(lowest.get(each.evaluator, 0.0), each.score)
        if not each.is_attack:
            good.setdefault((each.evaluator, each.example_id), {}).setdefault(each.kind, []).append(each.score)
    if max_score is not None:
        return {(each.evaluator, each.example_id): max_score for each in scored}
    return {
        key: (lowest[key[0]] + statistics.fmean(kinds.get(EXPECTED) or kinds[REAL])) / 2 for key, kinds in good.items()
    }


async def _get_evaluators(builder: ComponentBuilder, options: RewardTestOptions) -> dict[str, Evaluator]:
    attempt, names = Attempts(builder.locate), builder.config.eval.evaluators
    attempt.add(builder.loaded.problems)
    for name in (*options.evaluators, *([options.trusted] if options.trusted is not None else [])):
        if name not in names:
            message = (
                f'eval.evaluators has no entry "{name}"{did_you_mean(name, names) or ";"} it has {", ".join(names)}'
            )
            attempt.add([Problem("--evaluator" if name != options.trusted else "--trusted", message)])
    if not names:
        attempt.add([Problem("eval.evaluators", "no evaluator is configured", "add one")])
    attempt.raise_if_any()
    wanted = [name for name in names if not options.evaluators or name in (*options.evaluators, options.trusted)]
    made = {name: await attempt(partial(builder.get_evaluator, name)) for name in wanted}
    attempt.raise_if_any()
    return made


def _choose_trusted(
    loaded: LoadedConfig, options: RewardTestOptions, reward: str, evaluators: Mapping[str, Evaluator]
) -> str | None:
    chosen = options.trusted or loaded.config.finetuning.gate.metric
    return chosen if chosen in evaluators and chosen != reward else None


def _read_answers(path: Path, items: Sequence[EvalInputItem]) -> list[CandidateAnswer]:
    problems, ids = RowProblems(), {str(item.id) for item in items}
    answers, num_rows = list[CandidateAnswer](), 0
    for row in read_jsonl_rows(TextRows(path, RowLimits()), problems):
        num_rows += 1
        absent = [key for key in ("id", "output") if key not in row.value]
        label = row.value.get("label", True)
        if absent:
            has = ", ".join(map(str, row.value)) or "nothing"
            problems.add(row.location, f"a row needs id and output, found {has}")
        elif not isinstance(label, bool):
            problems.add(row.location, f"label must be true or false, found {str(label)[:40]!r}")
        elif str(row.value["id"]) in ids:
            answers.append(CandidateAnswer(str(row.value["id"]), REAL if label else WRONG, row.value["output"]))
    problems.raise_all()
    if not answers:
        listed = ", ".join(sorted(ids)[:5])
        message = f"none of its {num_rows} rows answers one of the {len(ids)} examples, such as {listed}"
        raise ConfigError(Problem("--answers", message, "use the ids of the dataset, or a larger --limit", str(path)))
    return answers


async def _sample(builder: ComponentBuilder, options: RewardTestOptions) -> list[CandidateAnswer]:
    """Returns answers of the file's agent to the examples."""
    config, progress = builder.config.finetuning, options.progress
    if options.adapter is not None:
        builder.use_trainer_adapter(options.adapter)
    split = "train" if config.enabled else ALL
    evaluation, adapter = await prepare_evaluation(builder, split, progress, limit=options.limit, served_as="train")
    if adapter is not None:
        progress.stage(None, "LOAD", None)
        await adapter.initialize(config)
    episodes = [
        (EpisodeKey("collect", 0, str(item.id), number), item)
        for item in evaluation.examples("train")
        for number in range(options.num_samples)
    ]
    progress.stage(None, "EVALUATE", len(episodes))
    records = await evaluation.runner.run(
        episodes,
        score_alone,  # the evaluators are called later, with the other answers
        lambda record: progress.episode(record.outcome.value, None, record.num_completion_tokens),
    )
    answered = [record for record in records if record.item.output_obj is not None]
    if not answered:
        reason = find_commonest_reason(f"{record.outcome}: {record.reason}" for record in records)
        raise EvaluationError(f"no episode has an answer to test: {reason}")
    return [CandidateAnswer(record.key.example_id, REAL, record.item.output_obj) for record in answered]
