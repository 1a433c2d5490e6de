"""Watches a run by its guards: warns once for each series of bad measurements, and stops the run if configured.

    halt_after: 3      measurement   ok  bad  bad  bad  bad  bad  bad
                       count          0    1    2    3    4    5    6
                                         warns    halts          halts, if the run was resumed after the first time

The counts follow from the metrics that the journal keeps, so a run that was killed and resumed continues the count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from reinforge.config.finetuning_blocks import GuardLimits, GuardsConfig
from reinforge.config.schema import FinetuneConfig, GateConfig, SplitsConfig
from reinforge.engine.packages import EMBEDDINGS, is_installed
from reinforge.errors import GuardHalted, Problem
from reinforge.evaluation.contamination import Repetition, find_repetitions, is_trained_on
from reinforge.evaluation.splits import PATH
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.rows import BASELINE, GUARD, EpochMetrics, GuardEvent, ValidationRow, list_guard_events
from reinforge.types.evaluation import EvalInputItem


def find_events(config: GuardsConfig, history: History) -> list[GuardEvent]:
    """Returns the events of the last epoch of a history."""
    found = []
    for name, limits in config:
        if limits.limit is not None and (counted := count_in_a_row(name, limits.limit, history)) is not None:
            found += _list_events(name, limits, history.last.epoch, *counted)
    return found


def count_in_a_row(name: str, limit: float, history: History) -> tuple[int, Measurement] | None:
    """Returns the number of measurements in a row beyond the limit, up to the last epoch, and its measurement.

    None: the last epoch has no measurement.
    """
    measure = MEASURES[name]
    last = measure(history, limit)
    if last is None:
        return None
    count = 0
    for number in reversed(range(len(history.epochs))):
        measured = measure(history.up_to(number), limit)
        if measured is not None and not measured.is_beyond:
            break
        count += measured is not None
    return count, last


def _list_events(name: str, limits: GuardLimits, epoch: int, count: int, measured: Measurement) -> list[GuardEvent]:
    def make(action: str) -> GuardEvent:
        return GuardEvent(epoch, name, action, measured.text, measured.value, limits.limit, count)  # type: ignore[arg-type]

    warns = count == limits.warn_after
    halts = limits.halt_after is not None and count > 0 and count % limits.halt_after == 0
    return [*([make("warn")] if warns else []), *([make("halt")] if halts else [])]


class GuardWatch:
    """The guards of one run."""

    def __init__(
        self,
        config: GuardsConfig,
        journal: RunJournal,
        note: Callable[[str], None],
        held_out: Sequence[str] = (),
        *,
        is_relative: bool = False,
    ):
        self.config, self.journal, self.note = config, journal, note
        self.held_out, self.is_relative = list(held_out), is_relative
        self._known = {(each.guard, each.epoch, each.action) for each in list_guard_events(journal.stages())}

    def check(self, epochs: Sequence[EpochMetrics], validations: Sequence[ValidationRow], *, is_last: bool) -> None:
        """Warns about the last epoch, and stops the run if a guard says so; nothing is said again after a resume.

        Args:
            is_last: Training is over, so there is nothing to stop.
        """
        if not epochs:
            return
        history = History(list(epochs), list(validations), self.held_out, self.is_relative)
        history = history.up_to(len(epochs) - 1)
        found = find_events(self.config, history)
        events = [each for each in found if (each.guard, each.epoch, each.action) not in self._known]
        events = [each for each in events if each.action == "warn" or not is_last]
        for event in events:
            self._known.add((event.guard, event.epoch, event.action))
            self.journal.record_stage(event.epoch, GUARD, event.as_dict())
            if event.action == "warn":
                self.note(f"warning: {event}")
        halts = [each for each in events if each.action == "halt"]
        if halts:
            raise GuardHalted(describe_halt(self.config, halts[0]))


def describe_halt(config: GuardsConfig, event: GuardEvent) -> str:
    """Returns why the run stops and how it can continue."""
    limits: GuardLimits = getattr(config, event.guard)
    path = f"finetuning.guards.{event.guard}"
    many = f"{event.count} {limits.measured_at} in a row" if event.count > 1 else f"epoch {event.epoch}"
    return (
        f"guard {event.guard} stopped the run after {many} beyond {path}.limit: {event.text}. To continue anyway, "
        f"resume it, with -o {path}.halt_after null if this guard should only warn"
    )


SOLVED = 0.9  # from this mean reward on, groups without signal are more likely solved than too hard
LEARNING_RATE = "finetuning.policy.optimizer.learning_rate"
SOME_SIGNAL = 0.25
"""If a smaller share of the groups has signal, even of large ones, most of what is sampled is thrown away."""
MAX_CUT = 0.3  # share of replies that are cut off above which the prompt or max_tokens comes first


@dataclass(frozen=True, slots=True)
class Measurement:
    value: float
    is_beyond: bool
    text: str


@dataclass(frozen=True)
class History:
    """A run up to one epoch."""

    epochs: Sequence[EpochMetrics]
    validations: Sequence[ValidationRow]  # the validations up to the last epoch, the baseline first
    held_out: Sequence[str] = ()  # metrics apart from the reward that must not get worse
    is_relative: bool = False  # the reward compares siblings, so the mean of a training reward says nothing

    @property
    def last(self) -> EpochMetrics:
        return self.epochs[-1]

    @property
    def stage_epochs(self) -> list[EpochMetrics]:
        """The metrics of the last epoch's stage in a pipeline, whose examples may be its own; else of all epochs."""
        return list(takewhile(lambda row: row.stage == self.last.stage, reversed(self.epochs)))[::-1]

    @property
    def stage_baseline(self) -> ValidationRow | None:
        """The last validation before that stage; without a pipeline, the one before training."""
        start = self.stage_epochs[0].epoch
        return next((row for row in reversed(self.validations) if row.epoch < start), None)

    @property
    def baseline(self) -> ValidationRow | None:
        return next((row for row in self.validations if row.epoch == BASELINE), None)

    @property
    def validation(self) -> ValidationRow | None:
        return next((row for row in self.validations if row.epoch == self.last.epoch), None)

    def up_to(self, number: int) -> History:
        epochs = self.epochs[: number + 1]
        validations = [row for row in self.validations if row.epoch <= epochs[-1].epoch]
        return History(epochs, validations, self.held_out, self.is_relative)


Measure = Callable[[History, float], Measurement | None]
"""Returns None where its figure is not known: such an epoch neither counts nor starts the count again."""


def measure_collapse(history: History, limit: float) -> Measurement | None:
    """Returns the share of the mean reward that has been lost since the start of the stage; 0.25 -> 0.05 is 0.8."""
    first, last = history.stage_epochs[0], history.last
    base, select = history.stage_baseline, history.validation
    measured: list[tuple[ValidationRow | EpochMetrics, ValidationRow | EpochMetrics, str]] = []
    if base is not None and select is not None:
        measured.append((base, select, "select"))
    same_share, same_level = first.curriculum_percentile == last.curriculum_percentile, first.level == last.level
    if same_share and same_level and not history.is_relative:
        measured.append((first, last, "training"))
    for before, after, examples in measured:
        if before.avg_reward is None or after.avg_reward is None or before.avg_reward <= 0:
            continue
        low = before.avg_reward if before.ci_low is None else before.ci_low
        high = after.avg_reward if after.ci_high is None else after.ci_high
        lost = (before.avg_reward - after.avg_reward) / before.avg_reward
        text = (
            f"the mean reward on the {examples} examples has fallen from {before.avg_reward:.3f} to "
            f"{after.avg_reward:.3f}: the last jobs have damaged the model. Train again with a lower {LEARNING_RATE} "
            "(a tenth, say), or with a kl_coef in the algorithm"
        )
        return Measurement(lost, lost > limit and high < low, text)
    return None


def measure_train_select_gap(history: History, limit: float) -> Measurement | None:
    """Returns how much more the training reward has risen than that on `select`, within a stage of a pipeline.

    Training 0.2 -> 0.8, select 0.3 -> 0.4: (0.8 - 0.2) - (0.4 - 0.3) = 0.5. It is beyond the limit only if it is above
    0 at the near ends of both 95 % intervals too.
    """
    first = next((row for row in history.stage_epochs if row.avg_reward is not None), None)
    base, select, train = history.stage_baseline, history.validation, history.last
    if first is None or base is None or select is None or history.is_relative:
        return None
    if first.avg_reward is None or train.avg_reward is None or base.avg_reward is None or select.avg_reward is None:
        return None
    rise, held_out_rise = train.avg_reward - first.avg_reward, select.avg_reward - base.avg_reward
    gap = rise - held_out_rise
    low = train.avg_reward if train.ci_low is None else train.ci_low
    high = select.avg_reward if select.ci_high is None else select.ci_high
    is_certain = (low - first.avg_reward) - (high - base.avg_reward) > 0
    text = (
        f"since the start the training reward has changed by {rise:+.3f}, but the reward on the select examples by "
        f"only {held_out_rise:+.3f}: the model learns its training examples, or a weakness of the reward there, and "
        f"little that carries over. Use more training examples or fewer epochs, lower {LEARNING_RATE}, or keep the "
        "model nearer to the base with the algorithm's kl_coef"
    )
    return Measurement(gap, gap > limit and is_certain, text)


def measure_held_out_drop(history: History, limit: float) -> Measurement | None:
    """Returns the largest drop of a held-out metric on `select` since the baseline; 0.9 -> 0.7 is 0.2."""
    base, select = history.baseline, history.validation
    if base is None or select is None:
        return None
    found: list[tuple[float, bool, str]] = []
    for name in history.held_out:
        before, after = base.metrics.get(name), select.metrics.get(name)
        if before is None or after is None:
            continue
        summary = select.summaries.get(name)
        high = summary.ci_high if summary is not None and summary.ci_high is not None else after
        found.append((before - after, before - after > limit and high < before, name))
    if not found:
        return None
    drop, is_beyond, name = max(found, key=lambda each: (each[1], each[0]))
    rises = base.avg_reward is not None and select.avg_reward is not None and select.avg_reward > base.avg_reward
    meanwhile = "the reward has risen" if rises else "the reward has not risen either"
    cause = (
        "the model may have found answers that score high without being good. Read the best episodes of the "
        "report, correct the reward, or make this metric a part of it (`_type: weighted`)"
        if rises
        else f"training makes the model worse. Lower {LEARNING_RATE}, or look at the training data"
    )
    text = f"on the select examples {name} has fallen by {drop:.3f} since the start, while {meanwhile}: {cause}"
    return Measurement(drop, is_beyond, text)


def measure_length_growth(history: History, limit: float) -> Measurement | None:
    """Returns the mean number of sampled tokens of an episode as a multiple of that of the stage's first epoch."""
    first = next((row.completion_tokens for row in history.stage_epochs if row.completion_tokens), None)
    now, share = history.last.completion_tokens, history.last.clipped_share
    if first is None or now is None:
        return None
    cut = f"; {share:.0%} of the episodes have a reply that was cut off" if share else ""
    text = (
        f"an episode has {now:,.0f} sampled tokens on average, {now / first:.1f} times as many as in the first "
        f"epoch ({first:,.0f}){cut}: longer answers may earn more reward without being better, and they cost time. "
        "Look at the longest episodes, let the reward count length, or lower the agent's max_tokens"
    )
    return Measurement(now / first, now / first > limit, text)


def measure_no_signal(history: History, limit: float) -> Measurement | None:
    """Returns the share of the groups whose rewards are equal or nearly so; 19 of 20 groups is 0.95."""
    row = history.last
    share = row.share_without_signal
    if share is None or row.num_groups is None or row.avg_reward is None:
        return None
    num_without = round(share * row.num_groups)
    head = f"{num_without} of {row.num_groups} groups have equal rewards, so nothing is learned from them"
    return Measurement(share, share > limit, f"{head}: {advise_no_signal(row.avg_reward)}")


def advise_no_signal(mean_reward: float) -> str:
    if mean_reward >= SOLVED:
        return f"with a mean reward of {mean_reward:.2f} the examples are nearly solved. Stop here, or use harder ones"
    return (
        "imitate the expected answers first, unless this run does (trajectory builder `_type: answers`), or use easier "
        "or more varied examples, larger groups (num_generations), a higher finetuning.sampling.temperature, or a "
        "reward that counts partial success"
    )


def measure_entropy(history: History, limit: float) -> Measurement | None:
    """Returns the mean entropy of the trained tokens in nats; 0 means that the model always samples the same."""
    value = history.last.job.get("entropy")
    if not isinstance(value, int | float) or history.last.avg_reward is None:
        return None
    text = (
        f"the entropy of the trained tokens is {value:.4f} nats: the model always samples the same replies, so groups "
        f"have no differences to learn from. Train again with a lower {LEARNING_RATE}, or set the algorithm's "
        "entropy_coef or a larger clip_high"
    )
    return Measurement(float(value), value < limit, text)


def measure_mismatch(history: History, limit: float) -> Measurement | None:
    """Returns KL(sampler, learner) of the job's tokens in nats a token; that of the canary if the job has none."""
    job = history.last.job
    value = job.get("mismatch_kl", job.get("canary_k3"))
    if not isinstance(value, int | float):
        return None
    text = (
        f"the learner's log-probs differ from those that the sampler reported by a KL divergence of {value:.4f} nats a "
        "token: what is trained is not what was sampled. Sample and train in the same precision "
        "(finetuning.policy.dtype: float32), and check that the server serves the weights of this run"
    )
    return Measurement(float(value), value > limit, text)


MEASURES: dict[str, Measure] = {
    "collapse": measure_collapse,
    "train_select_gap": measure_train_select_gap,
    "held_out_drop": measure_held_out_drop,
    "length_growth": measure_length_growth,
    "no_signal": measure_no_signal,
    "entropy": measure_entropy,
    "mismatch": measure_mismatch,
}
"""By the name of the guard in `finetuning.guards`: every field of `GuardsConfig` has one."""


MAX_COMPARED = 20_000
"""Datasets with more examples are not searched for near-duplicates when a run starts; it would take minutes."""
MAX_SHOWN = 3
NEAR_DUPLICATES = f"{PATH}.near_duplicates"
Splits = Mapping[str, Sequence[EvalInputItem]]


def list_held_out_metrics(gate: GateConfig, reward: str) -> list[str]:
    named = [gate.metric or reward, *gate.guard_metrics]
    return [name for name in dict.fromkeys(named) if name != reward]


def find_warnings(
    config: FinetuneConfig,
    splits: Splits,
    reward: str,
    evaluators: Sequence[str],
    *,
    trains_on_reward: bool = True,
    load_embedder: Callable[[], Any] | None = None,
) -> list[GuardEvent]:
    """Returns what to know about the measure of a run before it trains.

    Args:
        trains_on_reward: False if the rows of the dataset are trained on, which no reward was computed for.
        load_embedder: Makes an `Embed` for the search by meaning; None: that of the package, if it is installed.
    """
    events = []
    if trains_on_reward and not list_held_out_metrics(config.gate, reward):
        events.append(GuardEvent(BASELINE, "held_out_metric", "warn", _describe_missing_metric(reward, evaluators)))
    found = _search(splits, config.splits) if config.splits.near_duplicates == "warn" else []
    if found:
        text = (
            f"{describe_repetitions(found, splits)}. The verdict then measures what the model has seen. Remove them "
            f"(`reinforge data dedupe`), or set {NEAR_DUPLICATES}: group, which puts them into one split"
        )
        events.append(GuardEvent(BASELINE, "contamination", "warn", text))
    is_searched = config.splits.near_duplicates != "allow" and _is_searched(splits, config.splits)
    if is_searched and (load_embedder is not None or is_installed(EMBEDDINGS)):
        from reinforge.evaluation.meaning import search_by_meaning  # where it can embed

        found, text = search_by_meaning(splits, found, load_embedder)
        if found:
            text = f"by meaning, {describe_repetitions(found, splits)}. The verdict may measure what the model has seen"
        events += [GuardEvent(BASELINE, "contamination_by_meaning", "warn" if found else "note", text)] if text else []
    return events


def refuse_repetitions(splits: Splits, config: SplitsConfig) -> list[Problem]:
    """Returns the problem of held-out examples that repeat training examples, where these are to be refused."""
    if config.near_duplicates not in ("refuse", "group") or not (found := _search(splits, config)):
        return []
    fix = "remove them: `reinforge data dedupe`"
    if config.near_duplicates == "group":
        fix += "; they cannot be put into one split, since the dataset itself says which examples are held out"
    return [Problem(NEAR_DUPLICATES, describe_repetitions(found, splits), fix)]


def _search(splits: Splits, config: SplitsConfig) -> list[Repetition]:
    return find_repetitions(splits, config.near_duplicate_similarity) if _is_searched(splits, config) else []


def _is_searched(splits: Splits, config: SplitsConfig) -> bool:
    items = [item for examples in splits.values() for item in examples]
    return len(items) <= MAX_COMPARED and not (config.key and all(_is_id(item, config.key) for item in items))


def _is_id(item: EvalInputItem, key: str) -> bool:
    row = item.full_dataset_entry
    return isinstance(row, Mapping) and str(row.get(key)) == str(item.id)


def describe_repetitions(found: Sequence[Repetition], splits: Splits) -> str:
    num_held_out = sum(len(items) for name, items in splits.items() if not is_trained_on(name))
    worst = sorted(found, key=lambda each: (-each.similarity, each.id))[:MAX_SHOWN]
    shown = ", ".join(
        f"{each.id} ({each.split}) repeats {each.train_id}, {each.similarity:.0%} similar" for each in worst
    )
    more = f", and {len(found) - len(worst)} more" if len(found) > len(worst) else ""
    many = (
        f"{len(found)} of {num_held_out} held-out examples repeat" if len(found) > 1 else "a held-out example repeats"
    )
    return f"{many} a training example under another id: {shown}{more}"


def _describe_missing_metric(reward: str, evaluators: Sequence[str]) -> str:
    others = [name for name in evaluators if name != reward]
    choice = f"such as {others[0]}" if others else "such as a judge, or a check that the reward does not make"
    return (
        f"no metric apart from the reward {reward} is held out, so answers that merely game the reward would look like "
        f"an improvement. Name an evaluator in finetuning.gate.metric or finetuning.gate.guard_metrics, {choice}"
    )
