"""What 1 to 4,096 samplers would do, on the virtual clock of `reinforge.scale.planning`, and how true that is here.

    python benchmarks/scale_simulation.py workers [--workers 1,2,8,64,512] [--model 1.7m|135m]   processes on CPUs
    python benchmarks/scale_simulation.py gpus      8 to 4,096 samplers of models of 1.5, 7 and 70 B parameters
    python benchmarks/scale_simulation.py published steps that others published, and what is predicted for them
    python benchmarks/scale_simulation.py measure   the costs of this machine, as `MODELS` has them
    python benchmarks/scale_simulation.py validate  whole runs of 1, 2 and 4 Ray workers, and the same on the clock

`validate` measures the parts alone: the steps of the samplers with all workers busy, and the jobs of two small runs.
Then it runs longer ones, and compares the seconds of an epoch. Workers share the cores of this machine, so the parts
are measured for each number of them.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import overlap
from benchmarks.machine import describe, refuse_if_busy
from benchmarks.sampler import SIZES, random_model
from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.config.loader import build_config
from reinforge.config.policy import PolicyConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.runs.progress import SilentProgress
from reinforge.scale.planning.hardware import GPUS, ModelShape, Shares, derive_costs, derive_sampler, derive_trainer
from reinforge.scale.planning.plan import SeenLengths, read_lengths
from reinforge.scale.planning.simulation import (
    Costs,
    DriverCosts,
    Key,
    SamplerCosts,
    SimulatedRun,
    Simulation,
    Spread,
    TrainerCosts,
    Work,
    siblings_together,
)
from reinforge.trainer.options import RunOptions
from reinforge.trainer.run import run_config
from reinforge.types.request import ModelRequest, SamplingParams

DRIVER = DriverCosts(call_s=7.7e-5, episode_s=1.1e-4, message_s=3.2e-4, journal_s=3e-5)
MODELS = {
    "1.7m": Costs(SamplerCosts(step_s=1.8e-3, sequence_s=3.8e-5, prompt_token_s=5.9e-5), DRIVER),
    "135m": Costs(SamplerCosts(step_s=0.0, sequence_s=9.5e-3, prompt_token_s=6e-3), DRIVER),
}
"""Of models with 1.7 and 135 million parameters: what `measure` printed, in CPU time; 135m decodes the 105 tokens a
second of one core that `sampler.py --size 135m` printed, and computes its prompts at 45 GFLOP/s."""
SIBLINGS, IN_FLIGHT, ROUNDS = 8, 32, 6
REPLY = Spread(48, 0.09)
POLICIES: dict[str, Key] = {
    "siblings to one worker": siblings_together,
    "episodes to one worker": lambda episode: f"episode {episode.number}",
    "calls to the least busy": lambda episode: f"call {episode.number} {episode.turn}",
}


def simulate_collection(costs: Costs, num_workers: int, policy: str) -> SimulatedRun:
    """Returns what a collection of episodes of 3 calls would be, without training."""
    examples = IN_FLIGHT * num_workers * ROUNDS // SIBLINGS
    work = Work(1, examples, SIBLINGS, IN_FLIGHT * num_workers, turns=Spread(3), prompt=200, reply=REPLY)
    return Simulation(costs, work, num_workers, key=POLICIES[policy]).run()


def print_growth(costs: Costs, counts: Sequence[int]) -> None:
    print(f"\n{'workers':>8} {'episodes/s':>11} {'x one':>7} {'workers':>8} {'driver':>7} {'network':>8}   busy\n")
    first = None
    for count in counts:
        found = simulate_collection(costs, count, "siblings to one worker")
        first = first or found.rate
        print(
            f"{count:>8} {found.rate:>11.1f} {found.rate / first:>7.1f} {found.samplers:>8.0%} {found.driver:>7.0%} "
            f"{found.network:>8.1%}"
        )


def print_policies(costs: Costs, counts: Sequence[int]) -> None:
    print(f"\n{'workers':>8} {'policy':<26} {'episodes/s':>11} {'prompt tokens':>14} {'busiest / mean worker':>22}\n")
    for count in counts:
        for policy in POLICIES:
            found = simulate_collection(costs, count, policy)
            print(f"{count:>8} {policy:<26} {found.rate:>11.1f} {found.prompt_tokens:>14,} {found.imbalance:>22.2f}")


GPU_MODELS = {
    "1.5 B": (ModelShape(1.54e9, 28672), 1),
    "7 B": (ModelShape(7.6e9, 57344), 1),
    "70 B": (ModelShape(72.7e9, 327680), 4),
}
"""Qwen2.5's shapes, and the H100s of a sampler."""
TRAINERS = {8: 8, 64: 32, 512: 256, 4096: 2048}
IN_FLIGHT_GPU, SIBLINGS_GPU = 128, 16


def print_gpus(counts: Sequence[int]) -> None:
    """Prints epochs of 128 episodes per sampler, 3 calls of 800 + 300 tokens each, full weights; all assumed."""
    print("| model | samplers | H100s | seconds of an epoch | with max_staleness 1 | busiest part then |")
    print("|---|---|---|---|---|---|")
    for name, (model, gpus_each) in GPU_MODELS.items():
        for count in counts:
            num_trainers, nodes = TRAINERS[count] * gpus_each, (count * gpus_each + 7) // 8
            costs = derive_costs(
                derive_sampler(model, GPUS["h100"], gpus_each, 256, Shares()),
                derive_trainer(model, GPUS["h100"], num_trainers, "full", Shares()),
                model,
                "full",
                num_nodes=nodes,
                storage_gb_per_s=max(5.0, 0.5 * nodes),
            )
            work = Work(
                num_epochs=3,
                examples=IN_FLIGHT_GPU * count // SIBLINGS_GPU,
                siblings=SIBLINGS_GPU,
                concurrency=2 * IN_FLIGHT_GPU * count,
                turns=Spread(3),
                prompt=800,
                reply=Spread(300, 0.8, 2000),
                message=100,
                tool_s=Spread(1.0, 1.0),
                steps_per_job=4,
            )
            first = Simulation(costs, replace(work, num_epochs=1), count).run()
            ahead = Simulation(costs, replace(work, max_staleness=1), count).run()
            busy = {
                "samplers": ahead.samplers,
                "trainers": ahead.trainers,
                "driver": ahead.driver,
                "publishing": costs.publish_s / ahead.epoch_s,
            }
            part = max(busy, key=lambda each: busy[each])
            print(
                f"| {name} | {count:,} | {count * gpus_each + num_trainers:,} | {first.epoch_s:,.0f} | "
                f"{ahead.epoch_s:,.0f} | {part} {busy[part]:.0%} |",
                flush=True,
            )


@dataclass(frozen=True)
class PublishedStep:
    """A step of GRPO with 2,048 replies that NeMo RL 0.4 published (docs/about/performance-summary.md)."""

    name: str
    model: ModelShape
    samplers: int
    gpus_each: int
    num_trainers: int
    tokens: int  # of prompt and reply
    staleness: int
    seconds: float


LLAMA_8B, QWEN_32B = ModelShape(8.03e9, 131072), ModelShape(32.8e9, 262144)
PUBLISHED = (
    PublishedStep("Llama 3.1 8B, 16 H100s for both in turn", LLAMA_8B, 16, 1, 16, 1060, 0, 97.7),
    PublishedStep("the same, 8 + 8, one step off", LLAMA_8B, 8, 1, 8, 1129, 1, 74.6),
    PublishedStep("Qwen3 32B, 32 H100s for both in turn", QWEN_32B, 8, 4, 32, 3206, 0, 393),
    PublishedStep("the same, 32 + 32, one step off", QWEN_32B, 8, 4, 32, 3207, 1, 215),
)


def print_published() -> None:
    for step in PUBLISHED:
        nodes = max(1, step.samplers * step.gpus_each // 8)
        costs = derive_costs(
            derive_sampler(step.model, GPUS["h100"], step.gpus_each, 256, Shares()),
            derive_trainer(step.model, GPUS["h100"], step.num_trainers, "full", Shares()),
            step.model,
            "full",
            num_nodes=nodes,
            storage_gb_per_s=50.0,  # they send weights from GPU to GPU
        )
        reply = Spread(step.tokens - 150, 0.25 if step.tokens > 2000 else 0.8, 3946)
        work = Work(4, 64, 32, 4096, Spread(1), 150, reply, steps_per_job=4, max_staleness=step.staleness)
        found = Simulation(costs, work, step.samplers).run()
        print(
            f"{step.name}: predicted {found.epoch_s:.0f} s, published {step.seconds} s: "
            f"{step.seconds / found.epoch_s:.2f}"
        )


# Measurements.


def measure(size: str) -> Costs:
    """Returns the costs of this machine."""
    return Costs(measure_sampler(size), measure_driver_costs())


def measure_driver_costs() -> DriverCosts:
    call_s, episode_s, journal_s = measure_driver()
    return DriverCosts(call_s, episode_s, message_s=measure_ray(), journal_s=journal_s)


def measure_sampler(size: str) -> SamplerCosts:
    """Returns what a sampler takes alone on a core, with one thread."""
    import torch

    from reinforge.engine import Engine

    async def run(folder: str) -> SamplerCosts:
        with Engine.load(PolicyConfig(model=folder, max_num_seqs=256), seed=0, device="cpu") as engine:
            await engine.policy.publish(0)
            return await measure_steps(engine.policy, 1, time.process_time)

    torch.set_num_threads(1)
    with random_model(SIZES[size]) as folder:
        return asyncio.run(run(folder))


async def measure_steps(policy: Any, num_samplers: int, clock: Callable[[], float]) -> SamplerCosts:
    """Returns the seconds of a step, a reply in it, a token of its context, one of a prompt, and a request beside them.

    Replies of one token against longer ones say what a step takes, few of these against many a reply, and long prompts
    against short ones a token.
    """
    rng, few, many, tokens, short, long = random.Random(0), 1, 256, 48, 8, 200

    async def average(count: int, prompt: int, tokens: int) -> float:
        """Returns the mean seconds of so many replies for each sampler."""
        found = []
        for _ in range(3):
            requests = [
                ModelRequest(
                    [],
                    SamplingParams(max_tokens=tokens, seed=n),
                    prompt=tuple(rng.randrange(4, 300) for _ in range(prompt)),  # none is cached
                )
                for n in range(count * num_samplers)
            ]
            started = clock()
            await asyncio.gather(*map(policy.sample, requests))
            found.append(clock() - started)
        return statistics.fmean(found)

    async def measure_step(count: int, prompt: int, first_s: float) -> float:
        return (await average(count, prompt, tokens) - first_s) / (tokens - 1)

    await average(4, 16, 16)  # warms up
    first = {
        (count, prompt): await average(count, prompt, 1)
        for count, prompt in ((few, short), (many, short), (many, long))
    }
    steps = {each: await measure_step(*each, seconds) for each, seconds in first.items()}
    context_s = max(0.0, (steps[many, long] - steps[many, short]) / (many * (long - short)))
    sequence_s = max(0.0, (steps[many, short] - steps[few, short]) / (many - few))
    prompt_s = max(1e-9, (first[many, long] - first[many, short]) / (many * (long - short)))
    beside_s = (first[many, short] - first[few, short]) / (many - few) - sequence_s - short * prompt_s
    return SamplerCosts(
        max(1e-6, steps[few, short] - sequence_s),
        max(0.0, sequence_s - context_s * (short + tokens / 2)),
        prompt_s,
        context_s,
        call_s=max(0.0, beside_s),
    )


def measure_driver() -> tuple[float, float, float]:
    """Returns the driver's CPU seconds of a model call, of the rest of an episode, and of its journal row."""
    from benchmarks import harness_overhead as harness

    def make_agent(turns: int) -> Any:
        async def agent(item, llm, context):
            messages = [{"role": "user", "content": item.input_obj}]
            for _ in range(turns):
                reply = await llm.chat.completions.create(messages=messages)
                messages = [*messages, reply.choices[0].message, {"role": "user", "content": "and then?"}]
            return reply.choices[0].message.content

        return agent

    def seconds_of(turns: int, writer: Any = None) -> float:
        from unittest import mock

        found = []
        for _ in range(5):
            with tempfile.TemporaryDirectory() as folder:
                started = time.process_time()
                if writer is None:
                    asyncio.run(harness.run_round(Path(folder) / "r", make_agent(turns)))
                else:
                    with mock.patch("reinforge.runs.journal.journal.JournalWriter", writer):
                        asyncio.run(harness.run_round(Path(folder) / "r", make_agent(turns)))
                found.append(time.process_time() - started)
        return min(found[1:]) / (harness.EXAMPLES * harness.GENERATIONS)

    from benchmarks.durability import Forgetful

    one, three, bare = seconds_of(1), seconds_of(3), seconds_of(1, Forgetful)
    call_s = (three - one) / 2
    journal_s = max(0.0, one - bare)
    return call_s, max(0.0, one - call_s - journal_s), journal_s


def measure_ray() -> float:
    """Returns the driver's CPU seconds of one call of an actor."""
    from reinforge.scale.ray.cluster import RayConnection

    connection = RayConnection(None, 1, {"CPU": 1.0})
    import ray

    @ray.remote
    class Echo:
        async def answer(self, value):
            return value

    async def call(count: int) -> float:
        started = time.process_time()
        await asyncio.gather(*(actor.answer.remote(payload) for _ in range(count)))
        return (time.process_time() - started) / count

    actor, payload = Echo.options(max_concurrency=1000).remote(), {"text": "x" * 1000, "ids": list(range(300))}
    ray.get(actor.answer.remote(payload))
    found = min(asyncio.run(call(500)) for _ in range(3))
    connection.close()
    return found


# Whole runs of this machine, and the same on the clock.


def measure_samplers(model: str, count: int) -> SamplerCosts:
    """Returns the costs by the clock on the wall while so many Ray workers of one thread sample at a time."""
    from reinforge.scale.ray.adapter import RayAdapter, RayAdapterConfig

    async def run() -> SamplerCosts:
        config = RayAdapterConfig(num_workers=count, resources_per_worker={"CPU": 1.0})
        adapter = RayAdapter(config, GRPO(GRPOConfig()))
        try:
            await adapter.initialize(FinetuneConfig(device="cpu", policy=PolicyConfig(model=model, max_num_seqs=256)))
            policy = adapter.policy()
            assert policy is not None  # it is initialized
            await policy.publish(0)
            return await measure_steps(policy, count, time.perf_counter)
        finally:
            await adapter.cleanup()

    return asyncio.run(run())


SHAPES = ((1, 64, 48), (3, 24, 24))
"""Calls of an episode, tokens of a reply, examples of an epoch; runs of a third and of two thirds come first."""
TOOLS_S = (0.0, 1.0)  # how long a tool takes, where there are several calls
EPOCHS = 5


class Timed(SilentProgress):
    """The seconds of each stage of each epoch."""

    def __init__(self) -> None:
        self.spent: dict[tuple[int, str], float] = {}
        self._stage: tuple[int, str] | None = None
        self._since = 0.0

    def stage(self, epoch: int | None, stage: str, total: int | None) -> None:
        now = time.perf_counter()
        if self._stage is not None:
            self.spent[self._stage] = self.spent.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = None if epoch is None else (epoch, stage), now

    def average(self, *stages: str) -> float:
        """Returns the seconds of some stages in an epoch, without the first one; of all if none is named."""
        rows = [
            sum(seconds for (number, stage), seconds in self.spent.items() if number == epoch and stage in stages)
            if stages
            else sum(seconds for (number, _), seconds in self.spent.items() if number == epoch)
            for epoch in range(1, EPOCHS - 1)
        ]
        return statistics.fmean(rows)


def run_workers(
    model: str, count: int, examples: int, turns: int, new: int, tool_s: float
) -> tuple[Timed, SeenLengths]:
    async def agent(item: Any, llm: Any, context: Any) -> str:
        messages, said = [{"role": "user", "content": f"play at row {item.id} column 2, then at row 3 column 1"}], ""
        for turn in range(turns):
            if turn and tool_s:
                await asyncio.sleep(tool_s)
            reply = await llm.chat.completions.create(messages=messages, max_tokens=new)
            said = str(reply.choices[0].message.content)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "the tool says 1 2 3"}]
        return said

    args, timed = argparse.Namespace(lora=False, epochs=EPOCHS), Timed()
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(overlap, "EXAMPLES", examples):
        settings = overlap.make_settings(model, folder, agent, {"max_refills": 0}, args)
        workers = {"_type": "ray", "num_workers": count, "resources_per_worker": {"CPU": 1}}
        settings["trainer_adapters"]["adapter"] = workers
        settings["finetuning"]["run_configuration"] = {"validation_interval": 100}
        settings["finetuning"]["policy"]["history"] = "splice"  # an episode is one row, as on the clock
        run_config(build_config(settings), RunOptions(run_name="r", progress=timed))
        return timed, read_lengths(Path(folder) / "r")


def build_work(lengths: SeenLengths, examples: int) -> Work:
    return Work(
        num_epochs=EPOCHS,
        examples=examples,
        siblings=overlap.SIBLINGS,
        concurrency=1024,
        turns=lengths.turns,
        prompt=lengths.prompt,
        reply=lengths.reply,
        message=lengths.message,
        tool_s=lengths.tool_s,
    )


def count_trained(lengths: SeenLengths, examples: int) -> float:
    """Returns the tokens of a job: of siblings the prompt once."""
    new = lengths.turns.mean * (lengths.reply.mean + lengths.message) - lengths.message
    return examples * (lengths.prompt + overlap.SIBLINGS * new)


def validate(counts: Sequence[int]) -> None:
    driver = measure_driver_costs()
    print(driver, flush=True)
    with random_model(SIZES["1.7m"]) as model:
        for count in counts:
            sampler = replace(measure_samplers(model, count), slots=256)
            print(f"{count} workers: {sampler}", flush=True)
            for turns, new, examples in SHAPES:
                points = []
                for each in (examples // 3, 2 * examples // 3):
                    timed, lengths = run_workers(str(model), count, each, turns, new, 0.0)
                    rest_s = timed.average() - timed.average("COLLECT", "ADOPT")
                    points.append((count_trained(lengths, each), rest_s, timed.average("ADOPT")))
                (few, few_s, _), (many, many_s, publish_s) = points
                token_s = (many_s - few_s) / (many - few)
                trainer = TrainerCosts(token_s, job_s=many_s - many * token_s)
                costs = Costs(sampler, driver, trainer, publish_s)
                for tool_s in TOOLS_S[: 1 if turns == 1 else 2]:
                    timed, lengths = run_workers(str(model), count, examples, turns, new, tool_s)
                    found = Simulation(costs, build_work(lengths, examples), count).run()
                    collect_s = found.epoch_s - publish_s - trainer.job_s - count_trained(lengths, examples) * token_s
                    print(
                        f"{count} workers, {examples} x {overlap.SIBLINGS}, {turns} calls of {new} tokens, tools of "
                        f"{tool_s:.0f} s: {found.epoch_s:.2f} s predicted, {timed.average():.2f} s measured: "
                        f"{found.epoch_s / timed.average():.2f}; of these collecting {collect_s:.2f} and "
                        f"{timed.average('COLLECT'):.2f} s",
                        flush=True,
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["workers", "gpus", "published", "measure", "validate"])
    parser.add_argument("--model", choices=list(MODELS), default="1.7m")
    parser.add_argument("--workers", help="how many, with commas between")
    parser.add_argument("--force", action="store_true", help="measure although others use the machine")
    args = parser.parse_args()
    defaults = {"workers": "1,2,8,64,512", "gpus": "8,64,512,4096", "validate": "1,2,4"}
    counts = [int(each) for each in (args.workers or defaults.get(args.what, "1")).split(",")]
    if args.what in ("measure", "validate"):
        refuse_if_busy()
        print(describe())
    if args.what == "measure":
        print(measure(args.model))
    elif args.what == "validate":
        validate(counts)
    elif args.what == "gpus":
        print_gpus(counts)
    elif args.what == "published":
        print_published()
    else:
        costs = MODELS[args.model]
        print(f"{args.model}: {costs}")
        print_growth(costs, counts)
        print("\nwithout a limit of the driver:")
        print_policies(replace(costs, driver=DriverCosts(0.0, 0.0)), counts)


if __name__ == "__main__":
    main()
