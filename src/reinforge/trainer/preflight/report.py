"""What a preflight found, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from reinforge.evaluation.reasons import shorten_line
from reinforge.evaluation.statistics import format_interval
from reinforge.runs.predictions import Prediction
from reinforge.runs.summary import format_duration, format_unscored
from reinforge.trainer.preflight.costs import ModelCost
from reinforge.trainer.preflight.durations import PredictedTime, SuggestedSize
from reinforge.trainer.preflight.recommendation import Findings, Recommendation
from reinforge.types.evaluation import MetricSummary, count_examples

if TYPE_CHECKING:
    from reinforge.engine.devices import MemoryUse

GIB = 2**30
QUESTION, ANSWER = 30, 60  # characters that are shown of a question and of its reply; `--json` has both whole


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the sampled model calls."""

    longest_prompt: int
    mean_reply: float
    longest_reply: int
    longest: int  # tokens of the longest prompt with its reply
    context: int | None  # tokens that fit; None: unknown
    cut_share: float


@dataclass(frozen=True, slots=True)
class SampledReply:
    """What came back for one question."""

    score: float | None  # by the metric of the verdict; None: unknown
    question: str
    reply: str
    is_cut: bool  # max_tokens cut it off


@dataclass(frozen=True, slots=True)
class JudgeNoise:
    """What scoring the same answers twice showed."""

    num_answers: int
    num_changed: int
    deviation: float | None  # standard deviation of one score of an answer; None: unknown
    share: float | None  # its square over the variance of rewards within groups; None: unknown
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Detectable:
    """How small an improvement the verdict can show."""

    text: str
    half_width: float | None  # half of the width of the interval that the gate expects; None: too few examples
    likely: float | None
    """The improvement that would be shown nine times in ten, with the spread of the sample; None: unknown."""


@dataclass
class PreflightReport:
    """What a preflight found."""

    num_episodes: int
    sample_s: float
    metrics: list[MetricSummary]  # mean of each evaluator with its interval; the metric of the verdict comes first
    reward_metric: str
    findings: Findings
    noise: JudgeNoise
    lengths: Lengths
    time: PredictedTime
    memory: MemoryUse | None
    costs: list[ModelCost]
    detectable: Detectable
    recommendation: Recommendation
    notes: list[str] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)
    replies: list[SampledReply] = field(default_factory=list)  # a few, the lowest score first
    sizes: list[SuggestedSize] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def total_cost(self) -> float | None:
        """The cost of the whole run; None: the price of a part is not known."""
        known = [cost.cost for cost in self.costs if cost.cost is not None]
        return sum(known) if len(known) == len(self.costs) else None

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        by_size = found["findings"]["signal_by_size"]
        found["findings"]["signal_by_size"] = {str(size): share for size, share in by_size.items()}
        metrics = {summary.metric: summary.as_dict() for summary in self.metrics}
        return {**found, "metrics": metrics, "time": self.time.as_dict(), "total_cost": self.total_cost}

    def format_lines(self) -> list[str]:
        found, taken = self.findings, format_duration(self.sample_s)
        rows: list[tuple[str, Sequence[str]]] = [
            ("sample", [f"{self.num_episodes} episodes of {found.num_examples} train examples in {taken}"]),
            ("base", [_format_metric(summary) for summary in self.metrics]),
            ("", [_describe_replies(found)]),
            ("replies", list(map(_describe_reply, self.replies))),
            ("signal", _describe_signal(found)),
            ("noise", [_describe_noise(self.noise)]),
            ("lengths", [_describe_lengths(self.lengths)]),
            ("time", _describe_time(self.time)),
            ("sizes", list(map(str, self.sizes))),
            ("memory", [_describe_memory(self.memory)]),
            ("money", self._describe_costs()),
            ("verdict", _describe_detectable(self.detectable)),
            ("predicted", [f"{each} in the run" for each in self.predictions]),
            ("note", self.notes),
        ]
        lines = []
        for name, texts in rows:
            for number, text in enumerate(texts):
                lines.append(f"  {name if number == 0 or name == 'note' else '':<9} {text}")
        return [*lines, "", f"recommendation: {self.recommendation}"]

    def _describe_costs(self) -> list[str]:
        if not self.costs:
            return ["nothing to pay for: every model of `llms` runs in this process"]
        lines = []
        for cost in self.costs:
            tokens = f"{_format_count(cost.prompt_tokens)} prompt and {_format_count(cost.completion_tokens)} sampled"
            if cost.entry == "training":
                tokens = f"{_format_count(cost.prompt_tokens)} trained"
            price = "price unknown" if cost.cost is None else f"{cost.cost:,.2f}"
            lines.append(f"{cost.entry}: {tokens} tokens: {price}")
        if self.total_cost is None:
            return [*lines, "in all: unknown; --price ENTRY INPUT OUTPUT gives the price of a million tokens"]
        return [*lines, f"in all: {self.total_cost:,.2f}, in the currency of the prices"]


def _format_metric(summary: MetricSummary) -> str:
    interval = format_interval(summary.mean, summary.ci_low, summary.ci_high)
    examples = count_examples(summary.num_examples, summary.num_clusters)
    return f"{summary.metric} {interval} on {examples}{format_unscored(summary, before=', ')}"


def _describe_replies(found: Findings) -> str:
    good = "a right answer" if found.is_binary else "a reply above the lowest score"
    parts = [f"{found.solved_share:.0%} of the examples have {good} in {found.num_samples} replies"]
    if found.failed_share:
        parts.append(f"{found.failed_share:.0%} of the episodes fail because of the policy: {found.failure_reason}")
    if found.missing_share:
        parts.append(f"{found.missing_share:.0%} are missing: {found.missing_reason}")
    return "; ".join(parts)


def _describe_reply(reply: SampledReply) -> str:
    """Returns `0.000  "... 17 + 25?" -> "The answer is 42"`: the end of the question, the beginning of the reply."""
    question, cut = " ".join(reply.question.split()), ", cut off" if reply.is_cut else ""
    question = question if len(question) <= QUESTION else f"...{question[3 - QUESTION :]}"
    score = "unknown" if reply.score is None else f"{reply.score:.3f}"
    return f'{score}  "{question}" -> "{shorten_line(reply.reply, ANSWER)}"{cut}'


def _describe_signal(found: Findings) -> list[str]:
    if found.signal_share is None:
        return ["unknown: no example has two rewards"]
    measured = f"{found.signal_share:.0%} of groups of {found.num_samples} have rewards that differ"
    sizes = ", ".join(
        f"{share:.0%} of {size}{' (configured)' if size == found.group_size else ''}"
        for size, share in sorted(found.signal_by_size.items())
    )
    return [measured, f"predicted: {sizes}"]


def _describe_noise(noise: JudgeNoise) -> str:
    if noise.deviation is None:
        return f"unknown: {noise.reason}"
    changed = f"{noise.num_changed} of {noise.num_answers} answers that were scored twice got another score"
    if not noise.num_changed:
        return changed
    share = "" if noise.share is None else f", {noise.share:.0%} of the variance of rewards within groups"
    return f"{changed}; standard deviation of a score {noise.deviation:.2g}{share}"


def _describe_lengths(lengths: Lengths) -> str:
    of = "" if lengths.context is None else f" of {lengths.context:,} that fit"
    text = (
        f"prompts up to {lengths.longest_prompt:,} tokens, replies {lengths.mean_reply:,.0f} on average and up to "
        f"{lengths.longest_reply:,}, together up to {lengths.longest:,}{of}"
    )
    return f"{text}; {lengths.cut_share:.0%} of the replies are cut off" if lengths.cut_share else text


def _describe_time(time: PredictedTime) -> list[str]:
    if time.is_complete:
        head = f"about {format_duration(time.total_s)}"
    else:
        unknown = ", ".join(part.name for part in time.parts if part.seconds is None)
        head = f"{format_duration(time.total_s)} and an unknown time for: {unknown}"
    parts = [
        f"{part.name:<9} {'unknown' if part.seconds is None else format_duration(part.seconds):>11}  {part.reason}"
        for part in time.parts
    ]
    return [head, *(f"  {part}" for part in parts)]


def _describe_memory(memory: MemoryUse | None) -> str:
    if memory is None:
        return "unknown: no model runs on this machine"
    peak = "unknown" if memory.peak is None else f"{memory.peak / GIB:.1f} GiB"
    total = "an unknown amount" if memory.total is None else f"{memory.total / GIB:.1f} GiB"
    return f"the probe used up to {peak} of {total} on {memory.device}"


def _describe_detectable(detectable: Detectable) -> list[str]:
    likely = detectable.likely
    if likely is None:
        return [detectable.text]
    return [detectable.text, f"with the spread of this sample, +{likely:.2f} would be shown nine times in ten"]


def _format_count(count: float) -> str:
    if count >= 1e6:
        return f"{count / 1e6:.1f} M"
    return f"{count / 1e3:.0f} k" if count >= 1e4 else f"{count:,.0f}"
