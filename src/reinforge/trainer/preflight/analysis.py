"""From what a probe measured to what a preflight reports."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from reinforge.algorithms.curriculum import ZERO_VARIANCE
from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.pipeline import list_stages
from reinforge.config.schema import FinetuneConfig, GateConfig
from reinforge.errors import StorageError
from reinforge.evaluation.demonstrations import LABEL, detect_format
from reinforge.evaluation.reasons import describe_failure, find_commonest_reason, find_missing_reason
from reinforge.evaluation.shapes import LABELED
from reinforge.evaluation.statistics import (
    compute_detectable_effect,
    compute_half_width,
    compute_mean_interval,
    count_independent,
    list_names,
    predict_share,
)
from reinforge.files import to_json
from reinforge.registry import Registry
from reinforge.runs.predictions import BASE, SECONDS, SIGNAL, Prediction, locate_predictions, write_predictions
from reinforge.runs.rows import EpochMetrics
from reinforge.trainer.gate import describe_power
from reinforge.trainer.preflight.costs import ModelCost, predict_costs, predict_training_cost
from reinforge.trainer.preflight.durations import (
    PredictedTime,
    TimePart,
    compute_growth,
    predict_each,
    predict_time,
    suggest_size,
)
from reinforge.trainer.preflight.probe import PreflightOptions, Probe, probe_run
from reinforge.trainer.preflight.recommendation import GROUP_SIZES, Findings, recommend
from reinforge.trainer.preflight.report import Detectable, JudgeNoise, Lengths, PreflightReport, SampledReply
from reinforge.trainer.provenance import hash_data
from reinforge.types.episode import EpisodeRecord
from reinforge.types.evaluation import EvaluationReport, MetricSummary

MIN_MOVE = 0.01  # a model whose log-probs move by less than these nats a token says the same as before
MEASURED_FACTOR, EXTRAPOLATED_FACTOR = 1.5, 2.5
"""How many times longer or shorter a run may take than predicted, where its epochs were measured or extrapolated."""
NUM_REPLIES = 8
MINUTES = (10, 30, 120)  # times for which sizes are suggested
MIN_CONFIRM = 6  # with fewer examples the verdict can never show an improvement, and `describe_power` says so


async def preflight(
    loaded: LoadedConfig, options: PreflightOptions | None = None, registry: Registry | None = None
) -> PreflightReport:
    """Returns whether training can help, what it will take, and what to do; trains nothing that lasts.

    Args:
        loaded: The configuration; the probe changes it.
    """
    started, options = time.monotonic(), options or PreflightOptions()
    curriculum = loaded.config.finetuning.curriculum_learning
    probe = await probe_run(loaded, options, registry)
    groups, gate = probe.group_rewards(), probe.parts.config.gate
    noise = measure_noise(probe.scored_twice, groups, probe.rescored)
    lengths = measure_lengths(probe.records, probe.max_model_len)
    findings = _collect_findings(probe, groups, noise, lengths, options.num_samples)
    share = findings.signal_by_size.get(probe.size.group_size) if probe.parts.algorithm.needs_groups else None
    growth = compute_growth(curriculum, len(probe.timings.epochs), probe.size.num_epochs)
    predicted = predict_time(probe.size, probe.timings, signal_share=share, growth=growth)
    if others := [stage.name for stage in list_stages(probe.parts.config)[1:]]:
        unknown = TimePart("stages", None, f"only the first stage of the pipeline was probed, not {', '.join(others)}")
        predicted = PredictedTime([*predicted.parts, unknown])
    metric = probe.parts.gate_metric
    confirm = list_names((str(item.id) for item in probe.parts.splits["confirm"]), probe.parts.clusters)
    run = probe.parts.config.run_configuration
    interval = run.validation_interval if run is not None else 5
    predictions = predict_run(probe, share, predicted)
    try:
        each_s = predict_each(probe.size, predicted)
        write_predictions(locate_predictions(probe.config_text, hash_data(probe.parts.splits)), predictions, each_s)
    except (OSError, StorageError) as error:
        probe.notes.append(f"a run will not show how far off this was: {error}")
    return PreflightReport(
        num_episodes=len(probe.records),
        sample_s=probe.timings.episode_s * len(probe.records),
        metrics=_order_metrics(probe.report, metric, probe.parts.reward_metric),
        reward_metric=probe.parts.reward_metric,
        findings=findings,
        noise=noise,
        lengths=lengths,
        time=predicted,
        memory=probe.memory,
        costs=_predict_all_costs(probe, options),
        detectable=measure_detectable(gate, confirm, list(_group_scores(probe.records, metric).values())),
        recommendation=recommend(findings),
        notes=_collect_notes(probe, predicted.total_s),
        predictions=predictions,
        replies=choose_replies(probe.records, metric),
        sizes=[suggest_size(probe.size, predicted, each, interval) for each in MINUTES if predicted.is_complete],
        wall_s=time.monotonic() - started,
    )


def predict_run(probe: Probe, signal_share: float | None, time: PredictedTime) -> list[Prediction]:
    """Returns what the run will measure, with intervals that have the spread of the sample and that of the run."""
    clusters, size, found = probe.parts.clusters, probe.size, list[Prediction]()
    scores = _group_scores(probe.records, probe.parts.gate_metric)
    names = list_names((example for example, values in scores.items() for _ in values), clusters)
    select = list_names((str(item.id) for item in probe.parts.splits["select"]), clusters)
    if values := [score for group in scores.values() for score in group]:
        interval = compute_mean_interval(values, names=names, num_future=count_independent(select))
        found.append(Prediction(BASE, *interval))
    if signal_share is not None:
        shown = min(1.0, len(probe.records) / len(probe.sampled_ids) / size.group_size)  # of the replies of a group
        num_sampled = count_independent(list_names(probe.sampled_ids, clusters)) * shown
        found.append(
            Prediction(SIGNAL, signal_share, *predict_share(signal_share, num_sampled, size.examples_per_epoch))
        )
    if time.is_complete:
        factor = MEASURED_FACTOR if probe.timings.is_whole else EXTRAPOLATED_FACTOR
        total_s = sum(part.seconds or 0.0 for part in time.parts if part.name not in ("start", "files"))
        found.append(Prediction(SECONDS, total_s, total_s / factor, total_s * factor))
    return found


def measure_noise(
    twice: Sequence[tuple[float, float]], groups: Sequence[Sequence[float]], reason: str = ""
) -> JudgeNoise:
    """Returns how much the score of an answer changes if it is scored again.

    `deviation = sqrt(mean((a - b)^2) / 2)`, since the difference of two scores has twice the variance of one.

    Example: scores (1, 0) and (1, 1) -> sqrt(0.5 / 2) = 0.5.
    """
    if not twice:
        return JudgeNoise(0, 0, None, None, reason or "no answer was scored twice")
    variance = statistics.fmean((a - b) ** 2 for a, b in twice) / 2
    within = measure_within_variance(groups)
    share = None if within is None else (variance / within if within > 0 else 0.0 if variance == 0 else 1.0)
    return JudgeNoise(len(twice), sum(a != b for a, b in twice), math.sqrt(variance), share)


def measure_within_variance(groups: Sequence[Sequence[float]]) -> float | None:
    """Returns the mean variance of rewards within groups; None: no group has two rewards."""
    known = [statistics.variance(group) for group in groups if len(group) > 1]
    return statistics.fmean(known) if known else None


def measure_solved_share(groups: Sequence[Sequence[float]]) -> float:
    """Returns the share of examples with a reply above the lowest score: of the sample, or 0 for scores from 0 to 1.

    Example: [[0, 1], [1, 1], [0, 0], [0, 0]] -> 0.5; [[1, 1]] -> 1.
    """
    scores = [score for group in groups for score in group]
    least = 0.0 if min(scores) >= 0 and max(scores) <= 1 else min(scores)
    return statistics.fmean(max(group) > least for group in groups)


def choose_replies(records: Sequence[EpisodeRecord], metric: str) -> list[SampledReply]:
    """Returns the last replies of at most eight episodes of different examples, from the lowest score to the highest.

    Example: 15 examples -> the 1st, 3rd, ..., 15th of them by score.
    """
    found = []
    for record in {record.key.example_id: record for record in reversed(records) if record.calls}.values():
        reply, item = record.calls[-1].reply, record.scores.get(metric)
        score, content = None if item is None else item.as_reward(), reply.message.get("content")
        text = content if isinstance(content, str) and content else to_json(reply.message)
        found.append(SampledReply(score, str(record.item.input_obj), text, reply.finish_reason == "length"))
    found.sort(key=lambda each: -math.inf if each.score is None else each.score)
    places = range(min(NUM_REPLIES, len(found)))
    return [found[round(place * (len(found) - 1) / max(1, len(places) - 1))] for place in places]


def find_cut_harm(records: Sequence[EpisodeRecord]) -> bool:
    """Returns True if episodes with a reply that was cut off earn less than the others, or all have one and earn alike.

    Replies of one token, for instance, are always cut off, and that is not a fault.
    """
    cut: list[float] = []
    whole: list[float] = []
    for record in records:
        if record.reward is not None:
            is_cut = any(reply.finish_reason == "length" for call in record.calls for reply in call.choices)
            (cut if is_cut else whole).append(record.reward)
    if cut and whole:
        return statistics.fmean(cut) < statistics.fmean(whole)
    return bool(cut) and min(cut) == max(cut)


def measure_lengths(records: Sequence[EpisodeRecord], context: int | None) -> Lengths:
    calls = [call for record in records for call in record.calls]
    replies = [(call.reply.num_prompt_tokens, reply) for call in calls for reply in call.choices]
    prompts = [prompt for prompt, _ in replies]
    sampled = [reply.num_completion_tokens for _, reply in replies]
    together = [prompt + reply.num_completion_tokens for prompt, reply in replies]
    cut = [reply.finish_reason == "length" for _, reply in replies]
    return Lengths(
        longest_prompt=max(prompts, default=0),
        mean_reply=statistics.fmean(sampled) if sampled else 0.0,
        longest_reply=max(sampled, default=0),
        longest=max(together, default=0),
        context=context,
        cut_share=statistics.fmean(cut) if cut else 0.0,
    )


def measure_detectable(gate: GateConfig, names: Sequence[str], groups: Sequence[Sequence[float]]) -> Detectable:
    """Returns how small an improvement the verdict can show on confirm examples of these clusters.

    With the variance `v` within an example of the sample, the difference of two models that are about equally good has
    the variance `2 v / num_samples` on an example.
    """
    text, independent = describe_power(gate, names), count_independent(names)
    margin = max(0.0, gate.smallest_gain)
    half = compute_half_width(independent, gate.num_samples) + margin if len(set(names)) >= MIN_CONFIRM else None
    variance = measure_within_variance(groups)
    if not variance or half is None:
        return Detectable(text, half, None)
    spread = math.sqrt(2 * variance / gate.num_samples)
    return Detectable(text, half, compute_detectable_effect(independent, spread) + margin)


def _collect_findings(
    probe: Probe, groups: Sequence[Sequence[float]], noise: JudgeNoise, lengths: Lengths, num_samples: int
) -> Findings:
    records, least = probe.records, probe.parts.config.curriculum_learning.min_reward_diff
    failed = [record for record in records if record.outcome.is_policy_failure]
    judged = (
        list(_group_scores(records, probe.parts.gate_metric).values()) or groups
    )  # the metric of the verdict says what is good
    scores = [score for group in judged for score in group]
    sizes = sorted({*GROUP_SIZES, *([probe.size.group_size] if probe.size.group_size > 1 else [])})
    predicted = {size: predict_signal_share(groups, size, least) for size in sizes}
    train = probe.parts.splits["train"]
    rows = detect_format([item.full_dataset_entry for item in train])
    return Findings(
        num_examples=len(groups),
        num_samples=num_samples,
        missing_share=statistics.fmean(record.outcome.is_missing for record in records),
        missing_reason=find_missing_reason(records) or "",
        failed_share=len(failed) / len(records),
        failure_reason=find_commonest_reason(map(describe_failure, failed)) or "",
        cut_share=lengths.cut_share,
        cuts_hurt=find_cut_harm(records),
        mean_score=statistics.fmean(map(statistics.fmean, judged)),
        is_binary=all(score in (0.0, 1.0) for score in scores),
        solved_share=measure_solved_share(judged),
        signal_share=measure_signal_share(groups, least),
        signal_by_size={size: share for size, share in predicted.items() if share is not None},
        group_size=probe.size.group_size,
        algorithm="grpo" if probe.parts.config.algorithm is None else str(probe.parts.config.algorithm.static_type),
        noise_share=noise.share,
        noise=noise.deviation,
        max_missing=probe.parts.config.outcomes.max_missing,
        has_pairs=rows.is_paired,
        has_labels=rows.shape == LABELED or (rows.is_rewardable and rows.reward_key == LABEL),
        has_answers=all(item.expected_output_obj is not None for item in train),
    )


def _group_scores(records: Sequence[EpisodeRecord], metric: str) -> dict[str, list[float]]:
    groups: dict[str, list[float]] = {}
    for record in records:
        score = record.scores.get(metric)
        if score is not None and not record.outcome.is_missing and (value := score.as_reward()) is not None:
            groups.setdefault(record.key.example_id, []).append(value)
    return groups


def _order_metrics(report: EvaluationReport, metric: str, reward: str) -> list[MetricSummary]:
    names = dict.fromkeys(name for name in (metric, reward, *report.summaries) if name in report.summaries)
    return [report.summaries[name] for name in names]


def _predict_all_costs(probe: Probe, options: PreflightOptions) -> list[ModelCost]:
    """Returns the costs of every model that does not run on this machine."""
    served = {
        name: used for name, used in probe.usage.items() if not (probe.parts.llms[name].is_policy and probe.trains_here)
    }
    costs = predict_costs(served, len(probe.records), probe.size.num_episodes, options.prices)
    if probe.trains_here:
        return costs
    tokens = sum(record.num_prompt_tokens + record.num_completion_tokens for record in probe.records)
    per_episode = tokens / max(1, len(probe.records))
    return [*costs, predict_training_cost(per_episode, probe.size.num_collected, options.training_price)]


def _collect_notes(probe: Probe, total_s: float) -> list[str]:
    notes, limits = list(probe.notes), probe.parts.config.limits
    num_groups = probe.size.examples_per_epoch * probe.size.groups_per_example
    if weak := describe_weak_training(probe.rows, probe.moved, probe.parts.config, num_groups):
        notes.append(weak)
    if probe.failure:
        notes.append(f"the probe of training failed, as the run would: {probe.failure}")
    if not probe.trains_here:
        name = type(probe.parts.adapter).__name__
        notes.append(f"{name} trains at a service, where a preflight starts no job, so its time is not known")
    if limits.max_minutes is not None and total_s > 60 * limits.max_minutes:
        notes.append(f"finetuning.limits.max_minutes is {limits.max_minutes:g}, which stops the run before its end")
    return notes


def describe_weak_training(
    rows: Sequence[EpochMetrics], moved: float | None, config: FinetuneConfig, num_groups: int
) -> str | None:
    """Returns that the planned optimizer steps cannot move the model; None: they can, or it is not known.

    At most, each step moves the log-probs as far as those of the probe did, in proportion to its learning rate.

    Args:
        moved: Nats by which the probed epochs changed the log-prob of a sampled token on average.
        num_groups: Groups of an epoch of the run.
    """
    trained = [row for row in rows if row.job.get("num_updates")]
    if not trained or moved is None:
        return None
    steps, known = (
        sum(int(row.job["num_updates"]) for row in trained),
        [row.job["lr"] for row in trained if row.job.get("lr")],
    )
    peak = config.policy.optimizer.learning_rate
    faster = max(1.0, peak / statistics.fmean(known)) if peak and known else 1.0
    scale = (
        1.0 if config.policy.batch.steps_per_job else num_groups / statistics.fmean(r.num_groups or 1 for r in trained)
    )
    planned = steps / len(trained) * max(1.0, scale) * config.num_epochs
    reach = moved * planned / steps * faster
    if reach >= MIN_MOVE:
        return None
    return (
        f"about {planned:,.0f} optimizer steps are planned, which cannot move the model: {steps} of them changed the "
        f"log-probs of sampled tokens by {moved:.1g} nats, so all of them by at most about {reach:.1g}. Raise "
        "finetuning.num_epochs or finetuning.policy.optimizer.learning_rate"
    )


CONCENTRATIONS = [10 ** (exponent / 10) for exponent in range(-20, 31)]
"""Candidates for the concentration, 0.01 to 1000."""


def measure_signal_share(groups: Sequence[Sequence[float]], min_reward_diff: float = 0.0) -> float | None:
    """Returns the share of groups whose rewards differ by at least `min_reward_diff`; None: there is no group."""
    known = [group for group in groups if len(group) > 1]
    if not known:
        return None
    least = max(ZERO_VARIANCE, min_reward_diff - ZERO_VARIANCE)
    return sum(max(group) - min(group) > least for group in known) / len(known)


def predict_signal_share(groups: Sequence[Sequence[float]], size: int, min_reward_diff: float = 0.0) -> float | None:
    """Returns the share of groups of `size` replies that will have signal; None: there is no group.

    Four replies of an example show whether its group has signal at four replies; for larger groups a distribution over
    examples is fitted: an example has the probabilities `p ~ Dirichlet(a * m)` of the possible rewards, where `m` are
    the shares of the rewards in the whole sample and the concentration `a` is that of highest likelihood (a small one:
    each example is always solved or never; a large one: all examples are alike). Then

        share(G) = 1 - sum_v E[p_v^G],   E[p_v^G] = prod_(i<G) (a m_v + i) / (a + i)

    Example: every example is solved half of the time -> 1 - 2 * 0.5^4 = 0.875 of groups of 4, 0.992 of groups of 8.

    Args:
        min_reward_diff: Rewards that differ by less count as equal.
    """
    width = max(ZERO_VARIANCE, min_reward_diff)
    counts = [Counter(round(reward / width) for reward in group) for group in groups if len(group) > 1]
    total: Counter[int] = sum(counts, Counter())
    if not total:
        return None
    shares = {level: count / total.total() for level, count in total.items()}
    best = max(CONCENTRATIONS, key=lambda a: sum(_log_likelihood(each, shares, a) for each in counts))
    return 1 - sum(math.exp(_log_all_equal(share, size, best)) for share in shares.values())


def _log_likelihood(counts: Mapping[int, int], shares: Mapping[int, float], concentration: float) -> float:
    """Returns the log-probability of an example's counts, up to a constant."""
    num = sum(counts.values())
    parts = (
        math.lgamma(concentration * shares[level] + count) - math.lgamma(concentration * shares[level])
        for level, count in counts.items()
    )
    return math.lgamma(concentration) - math.lgamma(concentration + num) + sum(parts)


def _log_all_equal(share: float, size: int, concentration: float) -> float:
    mean = concentration * share
    return math.lgamma(mean + size) - math.lgamma(mean) + math.lgamma(concentration) - math.lgamma(concentration + size)
