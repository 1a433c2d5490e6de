"""`reinforge preflight run.yml --cluster plan.yml`: a run on GPUs that are not there yet, and what limits it.

run.yml    epochs, examples, siblings, staleness, LoRA, concurrency, steps of a job
plan.yml   GPUs, model, episodes, prices                                             => seconds, limits, hours, money
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from reinforge.config.document import parse_yaml
from reinforge.config.finetuning_blocks import Block
from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.problems import Validator
from reinforge.engine.learning_rate import count_parameters, format_count
from reinforge.engine.model.source import find_weights
from reinforge.errors import ConfigError, Problem
from reinforge.files import read_regular_file
from reinforge.limits import get_limits
from reinforge.registry import REGISTRY
from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.summary import format_duration
from reinforge.scale.planning import hardware
from reinforge.scale.planning.hardware import GB, GPUS, ModelShape, Shares
from reinforge.scale.planning.simulation import (
    Costs,
    Faults,
    SimulatedRun,
    Simulation,
    Spread,
    TrainerCosts,
    Work,
)

GpuName = Literal["a100", "h100", "h200", "b200", "l40s", "rtx4090"]
SIMULATED_EPOCHS = 5  # the others take as long as these, without the first
MAX_SIMULATED = 100_000  # episodes; of larger epochs fewer are simulated
MAX_READ = 256  # episodes of a run whose lengths are used


class SamplingPlan(Block):
    """vLLM servers."""

    gpu: GpuName = "h100"
    replicas: int = Field(ge=1, description="How many servers, each with the whole model.")
    gpus: int = Field(default=1, ge=1, description="GPUs of each server.")


class TrainingPlan(Block):
    """GPUs that train."""

    gpu: GpuName = "h100"
    gpus: int = Field(ge=1, description="How many.")


class ModelPlan(Block):
    """The model, where the file names one that is not on this machine."""

    parameters: float = Field(gt=0, description="Weights, such as 7.6e9.")
    layers: int = Field(ge=1, description="num_hidden_layers of its config.json.")
    kv_heads: int = Field(ge=1, description="num_key_value_heads.")
    head_dim: int = Field(ge=1, description="head_dim, or hidden_size / num_attention_heads.")


class EpisodesPlan(Block):
    """Lengths of the agent's episodes: those of a run, or means."""

    run: Path | None = Field(default=None, description="Folder of a run whose lengths and pauses are used.")
    turns: float = Field(default=1.0, ge=1, description="Model calls of an episode.")
    prompt: int | None = Field(default=None, ge=1, description="Tokens of the first prompt.")
    reply: float | None = Field(default=None, ge=1, description="Tokens of a reply.")
    spread: float = Field(default=0.8, ge=0, description="Standard deviation of both, and of tool_s, over the mean.")
    longest_reply: int | None = Field(default=None, ge=1, description="Tokens of the longest reply, as max_tokens.")
    message: int = Field(default=50, ge=0, description="Tokens that the environment adds between two calls.")
    tool_s: float = Field(default=0.0, ge=0, description="Seconds between a reply and the next call.")
    held_out: int = Field(default=0, ge=0, description="Episodes of validations and verdict in the whole run.")

    @model_validator(mode="after")
    def _require_lengths(self) -> EpisodesPlan:
        if self.run is None and (self.prompt is None or self.reply is None):
            raise ValueError("set `prompt` and `reply`, or `run: FOLDER` to use the lengths of a run")
        return self


class FaultsPlan(Block):
    """How often something dies."""

    gpu_hours: float = Field(gt=0, description="Hours of a GPU between two faults of it or of its machine.")
    restart_s: float = Field(default=180.0, ge=0, description="Seconds until it is replaced.")


class AssumedPlan(Block):
    """Shares of the data sheets that are reached."""

    bandwidth: float = Field(default=Shares().bandwidth, gt=0, le=1, description="Of the memory's, while decoding.")
    products: float = Field(default=Shares().products, gt=0, le=1, description="Of the products', for prompts.")
    training: float = Field(default=Shares().training, gt=0, le=1, description="Of the products', while training.")


class ClusterPlan(Block):
    """A cluster that is not there yet."""

    sampling: SamplingPlan
    training: TrainingPlan
    episodes: EpisodesPlan
    model: ModelPlan | None = None
    gpus_per_node: int = Field(default=8, ge=1)
    price: float | None = Field(default=None, ge=0, description="Of a GPU and an hour, in any currency.")
    storage_gb_per_s: float = Field(
        default=5.0, gt=0, description="What all nodes together read of the folder by which weights travel."
    )
    faults: FaultsPlan | None = None
    assumed: AssumedPlan = Field(default_factory=AssumedPlan)


def read_plan(path: Path) -> ClusterPlan:
    document = parse_yaml(read_regular_file(path, get_limits().config_bytes + 1), str(path))
    document.data = document.data if isinstance(document.data, dict) else {}
    plan = Validator(document, REGISTRY).validate(ClusterPlan, ())
    if plan is None or document.problems:
        raise ConfigError(document.problems)
    return plan


@dataclass
class ClusterForecast:
    """What a run would take; `lines` has it as text."""

    epoch_s: float
    run_s: float
    price: float | None
    busy: dict[str, float]  # shares of the time in which each part is busy
    staleness: dict[str, float]  # seconds of an epoch, by `max_staleness` and `in_flight`
    doubled: dict[str, float]  # seconds of an epoch with twice as much of a part
    num_faults: float  # in the whole run
    lines: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "lines"}


def forecast_file(loaded: LoadedConfig, path: Path) -> ClusterForecast:
    """Returns what the run of a file would take on the cluster of another one."""
    return forecast(loaded, read_plan(path))


def forecast(loaded: LoadedConfig, plan: ClusterPlan) -> ClusterForecast:
    """Returns what the run of a file would take on a cluster.

    Raises:
        ConfigError: The file has problems; the model does not fit; its shape, or the size of an epoch, is unknown.
    """
    if loaded.problems:
        raise ConfigError(loaded.problems)
    shape, mode = find_shape(loaded, plan), "lora" if loaded.config.finetuning.policy.lora is not None else "full"
    refuse_what_does_not_fit(plan, shape, mode)
    work, num_epochs = find_work(loaded, plan)
    longest = work.prompt + work.turns.mean * (work.reply.mean + work.message)
    fit = int(hardware.count_context_tokens(shape, GPUS[plan.sampling.gpu], plan.sampling.gpus) / longest)
    costs = derive(plan, shape, mode, max(1, min(loaded.config.finetuning.policy.max_num_seqs, fit)))
    planned = PlannedRun(costs, work, plan)
    base = planned.simulate()
    epoch_s = base.epoch_s
    run_s = base.predict_s(num_epochs) + planned.hold_out_s()
    num_gpus = plan.sampling.replicas * plan.sampling.gpus + plan.training.gpus
    found = ClusterForecast(
        epoch_s=epoch_s,
        run_s=run_s,
        price=None if plan.price is None else plan.price * num_gpus * run_s / 3600,
        busy={
            "samplers": base.samplers,
            "trainers": base.trainers,
            "driver": base.driver,
            "publishing": min(1.0, costs.publish_s / epoch_s),
        },
        staleness={
            f"max_staleness {number}{', in_flight keep' if in_flight == 'keep' else ''}": planned.simulate(
                max_staleness=number, in_flight=in_flight
            ).epoch_s
            for number, in_flight in ((0, "wait"), (1, "wait"), (1, "keep"))
        },
        doubled=planned.double_each(),
        num_faults=base.num_faults * run_s / base.seconds,
    )
    found.lines = format_lines(found, plan, shape, mode, costs, work, num_epochs)
    return found


@dataclass(frozen=True)
class PlannedRun:
    """A run on the cluster of a plan, and variants of it."""

    costs: Costs
    work: Work
    plan: ClusterPlan

    def simulate(self, costs: Costs | None = None, num_samplers: int = 0, **changes: Any) -> SimulatedRun:
        work, count = replace(self.work, **changes), num_samplers or self.plan.sampling.replicas
        return Simulation(costs or self.costs, work, count, faults=self._find_faults()).run()

    def _find_faults(self) -> Faults | None:
        faults, plan = self.plan.faults, self.plan
        if faults is None:
            return None
        each_s = 3600 * faults.gpu_hours
        return Faults(each_s / plan.sampling.gpus, each_s / plan.training.gpus, restart_s=faults.restart_s)

    def hold_out_s(self) -> float:
        """Returns the seconds of validations and verdict, which nothing is trained beside."""
        wanted = self.plan.episodes.held_out
        if not wanted:
            return 0.0
        count = min(wanted, MAX_SIMULATED)
        found = Simulation(
            replace(self.costs, trainer=TrainerCosts(0.0), publish_s=0.0),
            replace(self.work, num_epochs=1, examples=count, siblings=1),
            self.plan.sampling.replicas,
        ).run()
        return found.seconds * wanted / count

    def double_each(self) -> dict[str, float]:
        """Returns the seconds of an epoch with twice as much of each part."""
        costs, driver, trainer = self.costs, self.costs.driver, self.costs.trainer
        half = {name: value / 2 for name, value in asdict(driver).items()}
        twice = {
            "samplers": self.simulate(num_samplers=2 * self.plan.sampling.replicas),
            "trainers": self.simulate(replace(costs, trainer=replace(trainer, token_s=trainer.token_s / 2))),
            "driver speed": self.simulate(replace(costs, driver=replace(driver, **half))),
            "storage": self.simulate(
                replace(costs, publish_s=hardware.CHECK_S + (costs.publish_s - hardware.CHECK_S) / 2)
            ),
            "max_concurrency": self.simulate(concurrency=2 * self.work.concurrency),
            "policy.max_num_seqs": self.simulate(
                replace(costs, sampler=replace(costs.sampler, slots=2 * costs.sampler.slots))
            ),
        }
        return {name: each.epoch_s for name, each in twice.items()}


def find_shape(loaded: LoadedConfig, plan: ClusterPlan) -> ModelShape:
    """Returns the shape of the plan's model, or of the file's, which must be on this machine then."""
    if (given := plan.model) is not None:
        return ModelShape(given.parameters, 4.0 * given.layers * given.kv_heads * given.head_dim)
    name = loaded.config.finetuning.policy.model
    source, count = find_weights(name), count_parameters(name)
    path = Path(source.location) / "config.json" if source is not None and not source.is_gguf else None
    if path is None or count is None or not path.is_file():
        message = f"the shape of {name} is unknown: its weights are not on this machine"
        raise ConfigError(
            Problem("model", message, "add `model: {parameters, layers, kv_heads, head_dim}` to the plan")
        )
    config = json.loads(path.read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return ModelShape(count, 4.0 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * head_dim)


def refuse_what_does_not_fit(plan: ClusterPlan, shape: ModelShape, mode: str) -> None:
    sampling, training, problems = plan.sampling, plan.training, list[Problem]()
    fits = 0.9 * GPUS[sampling.gpu].memory_gb * GB
    weights = hardware.BYTES_PER_WEIGHT * shape.parameters
    if hardware.count_context_tokens(shape, GPUS[sampling.gpu], sampling.gpus) < 2048:
        needed = math.ceil((weights + shape.kv_bytes * 2048) / fits)
        message = f"{weights / GB:.0f} GB of weights do not fit {sampling.gpus} {sampling.gpu}"
        problems.append(Problem("sampling.gpus", message, f"give each server at least {needed} GPUs"))
    state, room = hardware.BYTES_OF_STATE[mode] * shape.parameters, 0.8 * GPUS[training.gpu].memory_gb * GB
    if state > training.gpus * room:
        message = (
            f"{state / GB:.0f} GB of weights, gradients and optimizer state do not fit {training.gpus} {training.gpu}"
        )
        problems.append(Problem("training.gpus", message, f"train on at least {math.ceil(state / room)}"))
    if problems:
        raise ConfigError(problems)


def find_work(loaded: LoadedConfig, plan: ClusterPlan) -> tuple[Work, int]:
    """Returns the first epochs of the run, and how many it has."""
    config = loaded.config.finetuning
    builder = loaded.config.trajectory_builders.get(config.trajectory_builder or "")
    examples, siblings = getattr(builder, "examples_per_epoch", None), getattr(builder, "num_generations", None)
    if not examples or not siblings:
        message = "the plan needs a trajectory builder `group` that says how many examples an epoch has"
        fix = "set examples_per_epoch and num_generations"
        raise ConfigError(Problem(f"trajectory_builders.{config.trajectory_builder}", message, fix))
    given, limits = plan.episodes, config.limits
    lengths = read_lengths(given.run) if given.run is not None else None
    work = Work(
        num_epochs=min(config.num_epochs, SIMULATED_EPOCHS, 2 + MAX_SIMULATED // (examples * siblings)),
        examples=examples,
        siblings=siblings,
        concurrency=loaded.config.eval.general.max_concurrency,
        turns=lengths.turns if lengths else Spread(given.turns),
        prompt=lengths.prompt if lengths else given.prompt or 1,
        reply=lengths.reply if lengths else Spread(given.reply or 1, given.spread, given.longest_reply or math.inf),
        message=lengths.message if lengths else given.message,
        tool_s=lengths.tool_s if lengths else Spread(given.tool_s, given.spread),
        steps_per_job=config.policy.batch.steps_per_job or 1,
        max_staleness=limits.max_staleness,
        in_flight=limits.in_flight,
    )
    return work, config.num_epochs


@dataclass(frozen=True)
class SeenLengths:
    """What the episodes of a run were like."""

    turns: Spread
    prompt: int
    reply: Spread
    message: int
    tool_s: Spread


def read_lengths(folder: Path) -> SeenLengths:
    """Returns the lengths of a run's newest collected episodes, and the pauses between their calls."""
    reader, turns, prompts, replies, messages, pauses = JournalReader(folder), [], [], [], [], []
    for key in reader.episode_keys(MAX_READ, "collect") if reader.database.is_file() else []:
        row = reader.find_episode(key)
        calls = [call for call in row.data["calls"] if call.get("num_completion_tokens")] if row is not None else []
        if not calls:
            continue
        turns.append(len(calls))
        prompts.append(calls[0]["num_prompt_tokens"])
        replies += [call["num_completion_tokens"] for call in calls]
        for before, after in pairwise(calls):
            used = before["num_prompt_tokens"] + before["num_completion_tokens"]
            messages.append(max(0, after["num_prompt_tokens"] - used))
            pauses.append(max(0.0, after["started_s"] - before["ended_s"]))
    if not turns:
        message = f"{folder} has no collected episodes with model calls"
        raise ConfigError(Problem("episodes.run", message, "name the folder of a run, or give `prompt` and `reply`"))
    return SeenLengths(
        turns=Spread(statistics.fmean(turns), seen=tuple(turns)),
        prompt=round(statistics.fmean(prompts)),
        reply=Spread(statistics.fmean(replies), seen=tuple(replies)),
        message=round(statistics.fmean(messages)) if messages else 0,
        tool_s=Spread(statistics.fmean(pauses), seen=tuple(pauses)) if pauses else Spread(0.0),
    )


def derive(plan: ClusterPlan, shape: ModelShape, mode: str, slots: int) -> Costs:
    sampling, training, assumed = plan.sampling, plan.training, plan.assumed
    shares = Shares(assumed.bandwidth, assumed.products, assumed.training)
    sampler = hardware.derive_sampler(shape, GPUS[sampling.gpu], sampling.gpus, slots, shares)
    trainer = hardware.derive_trainer(shape, GPUS[training.gpu], training.gpus, mode, shares)
    num_nodes = math.ceil(sampling.replicas * sampling.gpus / plan.gpus_per_node)
    return hardware.derive_costs(
        sampler, trainer, shape, mode, num_nodes=num_nodes, storage_gb_per_s=plan.storage_gb_per_s
    )


def format_lines(
    found: ClusterForecast,
    plan: ClusterPlan,
    shape: ModelShape,
    mode: str,
    costs: Costs,
    work: Work,
    num_epochs: int,
) -> list[str]:
    sampling, training = plan.sampling, plan.training
    num_gpus = sampling.replicas * sampling.gpus + training.gpus
    hourly = "" if plan.price is None else f", {num_gpus * plan.price:,.2f} an hour"
    gpus = f"{sampling.gpus} {sampling.gpu}" + ("s" if sampling.gpus > 1 else "")
    rows: list[tuple[str, Sequence[str]]] = [
        (
            "cluster",
            [f"{sampling.replicas} x {gpus} to sample, {training.gpus} {training.gpu} to train: {num_gpus}{hourly}"],
        ),
        ("model", [f"{format_count(int(shape.parameters))} weights, {'LoRA' if mode == 'lora' else 'all trained'}"]),
        ("episodes", _describe_work(work)),
        ("epoch", [f"{format_duration(found.epoch_s)}: {_list_shares(found.busy)}"]),
        ("", [f"a version is published in {format_duration(costs.publish_s)}"]),
        ("staleness", [f"{name}: {_compare(each, found)}" for name, each in found.staleness.items()]),
        ("twice", [f"{name}: {_compare(each, found)}" for name, each in found.doubled.items()]),
        ("limit", [_describe_limit(found)]),
        ("faults", [f"about {found.num_faults:.0f} in the run"] if plan.faults is not None else []),
        ("run", [_describe_run(found, num_epochs, plan)]),
        ("assumed", _describe_assumptions(plan)),
    ]
    return [f"  {name if number == 0 else '':<10} {text}" for name, texts in rows for number, text in enumerate(texts)]


def _describe_work(work: Work) -> list[str]:
    tools = f", {work.tool_s.mean:.1f} s between two calls" if work.tool_s.mean else ""
    return [
        f"{work.examples:,} examples x {work.siblings} an epoch, {work.concurrency:,} at a time, {work.turns.mean:.1f} "
        "calls each",
        f"first prompts of {work.prompt:,} tokens, replies of {work.reply.mean:,.0f}{tools}",
    ]


def _list_shares(busy: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%} busy" for name, share in busy.items() if name != "publishing")


def _compare(seconds: float, found: ClusterForecast) -> str:
    return f"{format_duration(seconds)}, {seconds / found.epoch_s:.0%} of the above"


def _describe_limit(found: ClusterForecast) -> str:
    name = min(found.doubled, key=lambda each: found.doubled[each])
    gain = 1 - found.doubled[name] / found.epoch_s
    if gain < 0.05:
        return "nothing by itself: twice as much of any part saves less than 5 % of an epoch"
    return f"{name}: twice as much saves {gain:.0%} of an epoch"


def _describe_run(found: ClusterForecast, num_epochs: int, plan: ClusterPlan) -> str:
    held_out = f" and {plan.episodes.held_out:,} held-out episodes" if plan.episodes.held_out else ""
    price = "" if found.price is None else f", {found.price:,.2f}"
    return f"{num_epochs:,} epochs{held_out}: {format_duration(found.run_s)}{price}"


def _describe_assumptions(plan: ClusterPlan) -> list[str]:
    assumed = plan.assumed
    return [
        f"of the data sheets, decoding reaches {assumed.bandwidth:.0%} of the bandwidth, prompts "
        f"{assumed.products:.0%} and training {assumed.training:.0%} of the products",
        "the driver is measured, on one core of a small machine; no GPU is",
        "published steps of models of 8 and 32 B took 1.2 to 1.4 times as long as predicted so (docs/scale.md)",
    ]
