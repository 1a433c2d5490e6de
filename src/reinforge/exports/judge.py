"""Judges an artifact: its tokens against those of the run's model, and the agent's figure on `confirm` through it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reinforge.adapters.local import LocalAdapter
from reinforge.adapters.local_config import LocalAdapterConfig
from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import ConfigError
from reinforge.evaluation.statistics import Improvement, compute_paired_difference, format_interval, summarize
from reinforge.exports.parity import Parity, compare, make_greedy, read_prompts, sample_greedy
from reinforge.exports.serving import ServedArtifact, describe_program, serve
from reinforge.exports.trained_model import TrainedModel
from reinforge.interfaces import PolicyServer
from reinforge.registry import Registry
from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.progress import RunProgress
from reinforge.trainer.evaluate import EvaluationOptions, evaluate
from reinforge.types.evaluation import MetricSummary
from reinforge.types.request import ModelRequest
from reinforge.types.trajectory import Outcome

logger = logging.getLogger(__name__)

CONFIRM = "confirm"
ARM = "confirm_tuned"


@dataclass(frozen=True, slots=True)
class Judgement:
    program: str
    """The program with its version."""
    parity: Parity | None = None
    """Tokens and log-probs against the run's model; None: the run recorded no held-out prompts."""
    run_figure: MetricSummary | None = None
    """The run's own figure on `confirm`; None: it has none."""
    figure: MetricSummary | None = None
    """The artifact's; None: not measured, see `note`."""
    difference: Improvement | None = None
    """The artifact's figure minus the run's, example by example; None: not both are known."""
    note: str = ""
    """Why a part is missing; empty if none is."""

    def format_lines(self) -> list[tuple[str, str]]:
        pairs = [("judged by", self.program)]
        if self.parity is not None:
            pairs.append(("parity", str(self.parity)))
        if self.figure is not None:
            pairs.append(("confirm", f"{self.figure}, through the exported model"))
        if self.run_figure is not None:
            pairs.append(("", f"{self.run_figure}, in the run"))
        if self.difference is not None:
            pairs.append(("difference", describe_difference(self.difference)))
        return [*pairs, *([("not judged", self.note)] if self.note else [])]


def describe_difference(difference: Improvement) -> str:
    """Returns `-0.008 [-0.040, +0.024] over 125 examples`: exported minus run."""
    low, high = difference.ci_low, difference.ci_high
    return f"{format_interval(difference.mean_difference, low, high, signed=True)} over {difference.num_pairs} examples"


@dataclass(frozen=True, slots=True)
class JudgeOptions:
    program: str
    device: str
    loaded: LoadedConfig | None
    """The run's configuration; None: only parity, for the reason in `why_not`."""
    why_not: str
    registry: Registry | None
    progress: RunProgress


async def judge(model: TrainedModel, artifact: Path, options: JudgeOptions) -> Judgement:
    """Returns the judgement of an artifact.

    A part that cannot be measured is left out with its reason; the artifact is what it is.
    """
    judgement = Judgement(describe_program(options.program), note=options.why_not)
    reader = JournalReader(model.run)
    requests = read_prompts(reader)
    scratch = artifact.parent / f"{artifact.name}.read-back"
    try:
        expected, logprobs = await _ask_run_model(model, requests, options.device)
        with serve(artifact, options.program, model, options.device, scratch) as server:
            if requests:
                judgement = replace(judgement, parity=await compare(expected, logprobs, server, requests))
            if options.loaded is not None:
                judgement = await _measure(judgement, model, reader, server, options)
    except Exception as error:  # a program of others may raise anything, and the artifact is what it is
        logger.warning("the exported model could not be judged", exc_info=True)
        reason = " ".join(str(error).split()) or type(error).__name__
        judgement = replace(judgement, note="; ".join(part for part in (judgement.note, reason) if part))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return judgement


async def _ask_run_model(
    model: TrainedModel, requests: Sequence[ModelRequest], device: str
) -> tuple[list[Any], list[Any]]:
    """Returns the greedy replies of the run's model as the run served it, and its log-probs of prompt and reply."""
    if not requests:
        return [], []
    kept = ("history", "dtype", "max_model_len", "fast_paths")
    policy = {name: model.policy[name] for name in kept if model.policy.get(name) is not None}
    config = {"policy": {**policy, "model": str(model.folder)}, "device": device}
    adapter = LocalAdapter(LocalAdapterConfig(), GRPO(GRPOConfig()))
    try:
        await adapter.initialize(FinetuneConfig.model_validate(config))
        server = adapter.policy()
        assert server is not None  # the adapter is initialized
        replies = await sample_greedy(server, [make_greedy(each) for each in requests])
        rows = [
            (*r.tokens.prompt_token_ids, *r.tokens.token_ids) if r is not None and r.tokens else () for r in replies
        ]
        known = iter(await server.score([row for row in rows if row]))
        return list(replies), [next(known) if row else None for row in rows]
    finally:
        await adapter.cleanup()


async def _measure(
    judgement: Judgement, model: TrainedModel, reader: JournalReader, server: PolicyServer, options: JudgeOptions
) -> Judgement:
    assert options.loaded is not None  # the caller has checked
    if model.adapter is not None:
        return replace(judgement, note="the agent calls several adapters, and an exported model is one of them")
    asked = EvaluationOptions(split=CONFIRM, progress=options.progress, adapter=ServedArtifact(server))
    report = (await evaluate(options.loaded, asked, options.registry)).report
    metric = find_metric(model)
    before, after = read_scores(reader, metric), report.scores.get(metric, {})
    known = model.summary.confirm_tuned or (summarize(metric, before, len(before)) if before else None)
    shared = before.keys() & after.keys()
    return replace(
        judgement,
        figure=report.summaries.get(metric),
        run_figure=known,
        difference=compute_paired_difference(before, after) if shared else None,
    )


def find_metric(model: TrainedModel) -> str:
    settings: Mapping[str, Any] = model.settings
    metric = (settings.get("gate") or {}).get("metric") or (settings.get("reward_function") or {}).get("name")
    if not isinstance(metric, str):
        raise ConfigError(f"{model.run / 'config.yml'} names no reward function")
    return metric


def read_scores(reader: JournalReader, metric: str) -> dict[str, float]:
    """Returns the trained model's scores on `confirm`, as the run recorded them: the mean of each example's samples."""
    samples: dict[str, list[float]] = {}
    epochs = {row.epoch for row in reader.validations()}
    for epoch in sorted(epochs):
        for text in reader.episode_texts(ARM, epoch).values():
            data = json.loads(text)
            score = (data["scores"] or {}).get(metric)
            if score is not None and score["error"] is None and not Outcome(data["outcome"]).is_missing:
                samples.setdefault(data["example_id"], []).append(float(score["score"]))
    return {example: sum(values) / len(values) for example, values in samples.items()}
