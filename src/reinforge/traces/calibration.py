"""The router of a model that replaces another one, calibrated on the examples that its run held out.

    select    student's replies -> signals, and whether each is good     the signal, and the thresholds to try
    confirm   the same, and the scores of both models                    the lowest threshold that keeps the promise

Samples and evaluators are signals only if they are asked for, since each request that is served takes them, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforge.errors import ReinforgeError
from reinforge.files import read_lines, to_json
from reinforge.routing.reply_evaluator import open_evaluator
from reinforge.routing.risk import calibrate
from reinforge.routing.router import Router
from reinforge.routing.signals import AGREEMENT, SignalChoice, SignalRow, choose_signal, measure_confidence
from reinforge.runs.journal.episode_json import parse_call
from reinforge.runs.journal.packing import unpack_episode
from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.progress import open_progress
from reinforge.runs.rows import BASELINE
from reinforge.runs.run_folder import read_config
from reinforge.runs.summary import RunSummary
from reinforge.trainer.evaluate import EvaluationOptions, evaluate
from reinforge.trainer.resume import load_run_config
from reinforge.types.episode import ModelCall

logger = logging.getLogger(__name__)
BASE, OPTION = "confirm_base", "--router_evaluator"
MIN_ROUTED = 30
TEMPERATURE = 1.0  # of further samples


@dataclass(frozen=True, slots=True)
class RouterSignals:
    """What may decide beside the log-probs of a reply."""

    num_samples: int = 0  # the agreement of so many further samples; 0: none are taken
    evaluator: dict[str, Any] | None = None  # settings of one that needs no expected answer
    folder: Path = Path()  # of the router's file, which the evaluator's are beside

    async def check(self) -> None:
        """Refuses, before any work, an evaluator that cannot be used."""
        if self.evaluator is not None:
            async with open_evaluator(self.evaluator, self.folder, OPTION):
                pass

    async def measure(self, split: str, calls: Mapping[str, ModelCall], run: Path) -> dict[str, dict[str, float]]:
        """Returns the signals of replies by example, in a run whose model has given them."""
        samples, scores = dict[str, list[Any]](), dict[str, float | None]()
        if self.num_samples:
            samples = await _sample(run, split, self.num_samples)
        if self.evaluator is not None:
            async with open_evaluator(self.evaluator, self.folder, OPTION) as evaluator:
                scores = {id_: await evaluator.score(call.request, call.reply) for id_, call in calls.items()}
        return {
            id_: measure_confidence(call.reply, samples.get(id_, ()), scores.get(id_)) for id_, call in calls.items()
        }


async def _sample(run: Path, split: str, count: int) -> dict[str, list[Any]]:
    """Returns further replies to the prompts of a split, by example."""
    agreement = read_config(run)["eval"]["evaluators"][AGREEMENT]  # any other one may cost, and is not needed
    overrides = {
        "eval.evaluators": to_json({AGREEMENT: agreement}),
        "finetuning.reward_function.name": AGREEMENT,
        "finetuning.sampling.temperature": str(TEMPERATURE),
    }
    samples: dict[str, list[Any]] = {}
    try:
        with open_progress() as progress:
            options = EvaluationOptions(str(run), split, reps=count, progress=progress)
            found = await evaluate(load_run_config(run, list(overrides.items())), options)
    except ReinforgeError as error:  # the verdict is known, and is worth more than this signal
        logger.warning("the router does without the agreement of samples: %s", error)
        return samples
    for record in found.records:
        samples.setdefault(record.key.example_id, []).extend([call.reply.message] for call in record.calls[-1:])
    return samples


def find_student(summary: RunSummary) -> tuple[str, int]:
    """Returns phase and epoch of the model that was compared: the best checkpoint, or the base if none is better."""
    if summary.confirm_tuned is None or summary.best_epoch is None:
        return BASE, BASELINE
    return "confirm_tuned", summary.best_epoch


def write_router(summary: RunSummary, rows: Path, file: Path, further: RouterSignals) -> list[str]:
    """Calibrates a router on the confirm examples of a run, by a signal chosen on `select`; returns what to print."""
    settings = read_config(summary.folder)["finetuning"]
    metric, (phase, epoch) = settings["reward_function"]["name"], find_student(summary)
    if summary.non_inferiority is None:
        return []
    select, student, teacher = (
        _read(summary.folder, *each, metric)
        for each in (("validate", epoch), (phase, epoch), ("confirm_reference", BASELINE))
    )
    chosen_by, tested = (
        asyncio.run(further.measure(split, {id_: call for id_, (_, call) in found.items() if call}, summary.folder))
        for split, found in (("select", select), ("confirm", student))
    )
    scored = [
        SignalRow(signals, select[id_][0] > 0.5) for id_, signals in chosen_by.items() if "mean_logprob" in signals
    ]
    choice = choose_signal(scored) if scored else SignalChoice("")
    ids = [id_ for id_, signals in tested.items() if id_ in teacher and choice.name in signals]
    scores = [found[id_][0] for found in (student, teacher) for id_ in ids]
    if len(ids) < MIN_ROUTED or not all(0 <= score <= 1 for score in scores):
        return [f"router         none: it takes {MIN_ROUTED} confirm examples with log-probs and scores from 0 to 1"]
    conversations = {str(row["id"]): str(row["conversation"]) for row in read_lines(rows)}
    found = calibrate(
        [tested[id_][choice.name] for id_ in ids],
        scores[: len(ids)],
        scores[len(ids) :],
        settings["gate"]["margin"],
        clusters=[conversations[id_] for id_ in ids],
        thresholds=choice.thresholds,
    )
    how: dict[str, dict[str, Any]] = {"agreement": {"num_samples": further.num_samples, "temperature": TEMPERATURE}}
    how["evaluator"] = {"evaluator": further.evaluator}
    router = Router.from_calibration(choice.name, found, metric=metric, **how.get(choice.name, {}))
    router.save(file)
    lines = [f"router         {found}", f"               by {router.describe_signal()} ({_format_auroc(choice)})"]
    if found.share:
        lines.append(f"               reinforge serve {summary.folder} --fallback URL --router {file}")
    return lines


def _format_auroc(choice: SignalChoice) -> str:
    """Returns how well the signals separate replies, the chosen one first: `AUROC 0.912; min_logprob 0.870`."""
    others = (f"; {name} {value:.3f}" for name, value in choice.auroc.items() if name != choice.name)
    return f"AUROC {choice.auroc[choice.name]:.3f}{''.join(others)}"


def _read(run: Path, phase: str, epoch: int, metric: str) -> dict[str, tuple[float, ModelCall | None]]:
    """Returns score and last call of the episodes of a phase that have a score, by example."""
    found = dict[str, tuple[float, ModelCall | None]]()
    for packed in JournalReader(run).packed_episodes(phase, epoch).values():
        episode = unpack_episode(packed)
        calls, score = episode["calls"], episode["scores"].get(metric, {}).get("score")
        if score is not None:
            found[episode["example_id"]] = score, parse_call(calls[-1]) if calls else None
    return found
