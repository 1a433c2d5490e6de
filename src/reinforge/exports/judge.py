"""Judges an artifact: its tokens against those of the run's model, and the agent's score on `confirm` through it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from reinforge.adapters.local import LocalAdapter
from reinforge.adapters.local_config import LocalAdapterConfig
from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import ConfigError, ContextOverflow
from reinforge.evaluation.statistics import Improvement, compute_paired_difference, format_interval, summarize
from reinforge.exports.serving import ServedArtifact, describe_program, serve
from reinforge.exports.trained_model import TrainedModel
from reinforge.interfaces import PolicyServer
from reinforge.registry import Registry
from reinforge.runs.journal.episode_json import parse_episode
from reinforge.runs.journal.packing import read_packed
from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.progress import RunProgress
from reinforge.trainer.evaluate import EvaluationOptions, evaluate
from reinforge.types.evaluation import EvalInputItem, MetricSummary, count_examples
from reinforge.types.request import ModelReply, ModelRequest, SamplingParams
from reinforge.types.trajectory import Outcome

logger = logging.getLogger(__name__)

CONFIRM = "confirm"
ARM = "confirm_tuned"


@dataclass(frozen=True, slots=True)
class Judgement:
    program: str  # the program with its version
    parity: Parity | None = None
    """Tokens and log-probs against the run's model; None: the run recorded no held-out prompts."""
    run_figure: MetricSummary | None = None  # the run's own score on `confirm`; None: it has none
    figure: MetricSummary | None = None  # the artifact's; None: not measured, see `note`
    difference: Improvement | None = None
    """The artifact's score minus the run's, example by example; None: not both are known."""
    note: str = ""  # why a part is missing; empty if none is

    def format_lines(self) -> list[tuple[str, str]]:
        pairs = [("judged by", self.program)]
        if self.parity is not None:
            pairs.append(("parity", str(self.parity)))
        if self.figure is not None:
            pairs.append(("confirm", f"{self.figure}, through the exported model"))
        if self.run_figure is not None:
            pairs.append(("", f"{self.run_figure}, in the run"))
        if self.difference is not None:
            low, high = self.difference.ci_low, self.difference.ci_high
            text = format_interval(self.difference.mean_difference, low, high, signed=True)
            pairs.append(
                ("difference", f"{text} over {count_examples(self.difference.num_pairs, self.difference.num_clusters)}")
            )
        return [*pairs, *([("not judged", self.note)] if self.note else [])]


@dataclass(frozen=True, slots=True)
class JudgeOptions:
    program: str
    device: str
    loaded: LoadedConfig | None  # the run's configuration; None: only parity, for the reason in `why_not`
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
    known = model.summary.confirm_tuned or (
        summarize(metric, before, len(before), clusters=report.clusters) if before else None
    )
    shared = before.keys() & after.keys()
    return replace(
        judgement,
        figure=report.summaries.get(metric),
        run_figure=known,
        difference=compute_paired_difference(before, after, clusters=report.clusters) if shared else None,
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
        for packed in reader.packed_episodes(ARM, epoch).values():
            data = read_packed(packed)
            score = (data["scores"] or {}).get(metric)
            if score is not None and score["error"] is None and not Outcome(data["outcome"]).is_missing:
                samples.setdefault(data["example_id"], []).append(float(score["score"]))
    return {example: sum(values) / len(values) for example, values in samples.items()}


PHASES = ("confirm_tuned", "confirm_base", "validate")
"""Where prompts come from: the first phase of the run that has some."""
MAX_PROMPTS = 16
MAX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Parity:
    """Whether an artifact is the run's model: equal prompt tokens, equal greedy replies, equal log-probs.

        the run's model    [1, 5, 9] -> 4 7 2      log-probs -0.10 -0.32 -0.01
        the artifact       [1, 5, 9] -> 4 7 2                -0.10 -0.31 -0.01     equal tokens, largest difference 0.01

    The prompts are those of the run's own `confirm` episodes. Two programs round differently, so a reply whose two best
    tokens are almost equally likely may differ; an exporter that mixes up weights differs at once, and by nats.
    """

    num_prompts: int
    num_equal_prompts: int  # prompts that became the same tokens
    num_equal_replies: int  # greedy replies with the same tokens
    num_tokens: int  # tokens of the run's greedy replies
    num_equal_tokens: int  # how many of them the artifact sampled as well, up to the first other one of each reply
    max_difference: float | None = None  # of the log-probs of the run's greedy replies, in nats; None: unknown
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
    """Returns a request with greedy decoding, without grammar and stop strings, so that tokens can be compared."""
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
    pairs = [
        (before.tokens, scores, after.tokens)
        for before, scores, after in zip(expected, logprobs, replies, strict=True)
        if before is not None and after is not None and before.tokens is not None and after.tokens is not None
    ]
    rows, differences = [(*ours.prompt_token_ids, *ours.token_ids) for ours, _, _ in pairs], list[float]()
    for (ours, scores, _), own in zip(pairs, await artifact.score(rows) if rows else [], strict=True):
        start = len(ours.prompt_token_ids)
        differences += np.abs(np.asarray(scores)[start:] - np.asarray(own)[start:]).tolist()
    return Parity(
        len(pairs),
        sum(ours.prompt_token_ids == theirs.prompt_token_ids for ours, _, theirs in pairs),
        sum(ours.token_ids == theirs.token_ids for ours, _, theirs in pairs),
        sum(len(ours.token_ids) for ours, _, _ in pairs),
        sum(_count_common(ours.token_ids, theirs.token_ids) for ours, _, theirs in pairs),
        max(differences, default=None),
        sum(differences) / len(differences) if differences else None,
    )


def _count_common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))))
