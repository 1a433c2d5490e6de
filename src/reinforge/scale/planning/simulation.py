"""A run on a virtual clock: discrete events with the costs of each part, and the router that a run uses.

    epochs ─► episodes ─► driver ─► network ─► samplers ─► driver ─► tools ─► ... ─► trainers ─► publish ─► epochs

Every sampler decodes all its replies at once: a step takes `step_s`, and more for each reply in it and each token of
their contexts; a prompt delays them by `prompt_token_s` for each of its tokens that the sampler has not cached. The
driver is one interpreter, which does one thing after the other. An epoch is collected whole, then trained, then
published; epochs begin as `limits.max_staleness` allows.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reinforge.config.finetuning_blocks import InFlight
from reinforge.scale.engine_group import EngineRouter

ALWAYS = -1  # the life of events that happen although the driver has died
TRAINING, DRAINING, PUBLISHING = "training", "draining", "publishing"  # what happens to the oldest epoch
BYTES_PER_TOKEN = 40
"""Of a reply on its way to the driver: the ids of its prompt and of its tokens, with log-probs and text."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Positive numbers: a lognormal distribution, or those that were seen.

    Attributes:
        spread: Standard deviation as a multiple of the mean.
        seen: Numbers to draw from; the other attributes do not count then.
    """

    mean: float
    spread: float = 0.0
    most: float = math.inf
    seen: tuple[float, ...] = ()

    def draw(self, rng: random.Random) -> float:
        if self.seen:
            return rng.choice(self.seen)
        if not self.spread or not self.mean:
            return self.mean
        variance = math.log(1 + self.spread**2)
        return min(self.most, rng.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance)))


@dataclass(frozen=True, slots=True)
class SamplerCosts:
    """Seconds of a sampler: a step, each reply in it, each token of their contexts, each token of a new prompt.

    Attributes:
        call_s: What a request takes of it beside these, such as a worker's share of a call of Ray.
    """

    step_s: float
    sequence_s: float
    prompt_token_s: float
    context_token_s: float = 0.0
    slots: int = 64  # replies at a time; the others wait
    call_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DriverCosts:
    """Seconds of the driver's interpreter.

    Attributes:
        call_s, token_s: A model call, and each of its new tokens.
        message_s: The way to a sampler and back: a call of a Ray actor, or a request to a server.
        message_token_s: The same for each token that is new: of the prompt, and of the reply.
        episode_s, journal_s: The rest of an episode with its reward, and its row in the journal.
    """

    call_s: float
    episode_s: float
    message_s: float = 0.0
    token_s: float = 0.0
    message_token_s: float = 0.0
    journal_s: float = 0.0

    @property
    def per_token_s(self) -> float:
        return self.token_s + self.message_token_s


@dataclass(frozen=True, slots=True)
class TrainerCosts:
    """Seconds of all trainers together: a job of any size, each optimizer step, each token."""

    token_s: float
    step_s: float = 0.0
    job_s: float = 0.0
    shares_prompts: bool = True  # the prompt of siblings is computed once


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that a run spends.

    Attributes:
        publish_s: From a trained job to samplers that serve it.
        recompute: `keep` recomputes the keys and values of replies in flight, too, as vLLM does.
        latency_s: From the driver to a sampler or back.
        bytes_per_s: The driver's network.
    """

    sampler: SamplerCosts
    driver: DriverCosts
    trainer: TrainerCosts = TrainerCosts(0.0)
    publish_s: float = 0.0
    recompute: bool = False
    latency_s: float = 0.0003
    bytes_per_s: float = 1.25e9


@dataclass(frozen=True, slots=True)
class Work:
    """What is run.

    Attributes:
        concurrency: Episodes at a time (`eval.general.max_concurrency`).
        turns: Model calls per episode.
        prompt, reply, message: Tokens of the first prompt, of each reply, and of what the environment adds.
        tool_s: Seconds between a reply and the next call.
        in_flight: What happens to replies that are being sampled when weights are published (`limits.in_flight`).
    """

    num_epochs: int
    examples: int
    siblings: int
    concurrency: int
    turns: Spread
    prompt: int
    reply: Spread
    message: int = 24
    tool_s: Spread = Spread(0.0)
    steps_per_job: int = 1
    max_staleness: int = 0
    in_flight: InFlight = "wait"


@dataclass(frozen=True, slots=True)
class Faults:
    """Seconds between two faults of one sampler, of the trainers, of the driver, and until each is back; 0: none."""

    sampler_every_s: float = 0.0
    trainer_every_s: float = 0.0
    driver_every_s: float = 0.0
    restart_s: float = 60.0


@dataclass(slots=True)
class SimulatedRun:
    """What a simulation found; shares are of the whole time."""

    seconds: float
    num_episodes: int
    published_s: list[float]  # when each epoch was published
    samplers: float  # the mean share of time in which a sampler had work
    trainers: float
    driver: float
    network: float
    prompt_tokens: int
    sampled_tokens: int
    lost_tokens: int
    num_faults: int
    imbalance: float  # the busiest sampler over the mean

    @property
    def rate(self) -> float:
        """Episodes a second."""
        return self.num_episodes / self.seconds

    @property
    def epoch_s(self) -> float:
        """Seconds of an epoch once the first one is published."""
        if len(self.published_s) < 2:
            return self.seconds
        return (self.published_s[-1] - self.published_s[0]) / (len(self.published_s) - 1)

    def predict_s(self, num_epochs: int) -> float:
        """Returns the seconds of so many epochs."""
        return self.seconds + max(0, num_epochs - len(self.published_s)) * self.epoch_s


@dataclass(slots=True)
class SimulatedEpisode:
    number: int
    epoch: int
    group: int
    turn: int = 0
    turns: int = 1
    context: int = 0
    sampled: int = 0


@dataclass(slots=True)
class SimulatedReply:
    episode: SimulatedEpisode
    context: int
    num_tokens: int


class Resource:
    """Does one thing after the other."""

    def __init__(self) -> None:
        self.free_s = self.busy_s = 0.0

    def serve(self, now_s: float, seconds: float) -> float:
        """Returns when work that arrives now is done."""
        self.free_s = max(self.free_s, now_s) + seconds
        self.busy_s += seconds
        return self.free_s


class SimulatedSampler:
    """Decodes all replies together; `progress` counts the steps that it has made."""

    def __init__(self, costs: SamplerCosts):
        self.costs = costs
        self.busy_s = 0.0
        self.num_prompt_tokens = self.version = 0
        self.since_s = 0.0
        self.clear()

    def clear(self) -> None:
        """Forgets everything, as a process that has died."""
        self.version += 1  # its next end does not happen
        self.progress, self.context = 0.0, 0.0
        self.running: list[tuple[float, int, SimulatedReply]] = []
        self.waiting: deque[tuple[SimulatedReply, str]] = deque()
        self.cached: dict[str, int] = {}
        self.number = 0

    @property
    def step_s(self) -> float:
        costs = self.costs
        return costs.step_s + costs.sequence_s * len(self.running) + costs.context_token_s * self.context

    def advance(self, now_s: float) -> None:
        """Makes the steps until now."""
        if self.running and now_s > self.since_s:
            self.progress += (now_s - self.since_s) / self.step_s
            self.busy_s += now_s - self.since_s
        self.since_s = max(self.since_s, now_s)

    def delay(self, seconds: float) -> None:
        """Holds all replies up."""
        self.busy_s += seconds
        self.since_s += seconds

    def add(self, now_s: float, reply: SimulatedReply, prompt: str) -> None:
        """Begins a reply, or lets it wait for a slot; its prompt delays the others."""
        self.advance(now_s)
        if len(self.running) >= self.costs.slots:
            self.waiting.append((reply, prompt))
            return
        episode = f"episode {reply.episode.number}"
        new = max(0, reply.context - max(self.cached.get(episode, 0), self.cached.get(prompt, 0)))
        self.num_prompt_tokens += new
        self.delay(new * self.costs.prompt_token_s + self.costs.call_s)
        self.cached[episode] = reply.context + reply.num_tokens
        if reply.episode.turn == 0:
            self.cached[prompt] = reply.context
        self.number += 1
        self.context += reply.context + reply.num_tokens / 2
        heapq.heappush(self.running, (self.progress + reply.num_tokens, self.number, reply))

    def next_end_s(self) -> float:
        """Returns when the first reply ends if nothing else arrives."""
        return self.since_s + max(0.0, self.running[0][0] - self.progress) * self.step_s

    def finish(self, now_s: float) -> SimulatedReply:
        """Takes out the reply that has ended, and begins one that waits."""
        self.advance(now_s)
        reply = heapq.heappop(self.running)[2]
        self.context -= reply.context + reply.num_tokens / 2
        if self.waiting:
            self.add(now_s, *self.waiting.popleft())
        return reply


Key = Callable[[SimulatedEpisode], str]


def siblings_together(episode: SimulatedEpisode) -> str:
    """The key of the router that a run uses."""
    return f"group {episode.group}"


class Simulation:
    """A run, or its first epochs.

    Args:
        num_samplers: How many samplers.
        key: The router's key of a call.
    """

    def __init__(
        self,
        costs: Costs,
        work: Work,
        num_samplers: int,
        *,
        faults: Faults | None = None,
        key: Key = siblings_together,
        seed: int = 0,
    ):
        self.costs, self.work, self.key, self.faults = costs, work, key, faults or Faults()
        self.rng = random.Random(seed)
        self.router = EngineRouter(range(num_samplers))
        self.samplers = [SimulatedSampler(costs.sampler) for _ in range(num_samplers)]
        self.driver, self.network = Resource(), Resource()
        self.events: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self.count = self.life = 0  # events, and lives of the driver: a dead one's events do not happen
        self.now_s = 0.0
        self.waiting: deque[SimulatedEpisode] = deque()
        self.playing: dict[int, SimulatedEpisode] = {}
        self.held: list[SimulatedEpisode] = []  # calls that wait for new weights
        self.num_begun = self.num_started = self.num_done = 0
        self.num_replies = 0  # on their way to a sampler, or there
        self.left: dict[int, int] = {}
        self.trained_tokens: dict[int, int] = {}
        self.published_s: list[float] = []
        self.phase = ""
        self.job, self.job_s, self.training_s = 0, 0.0, 0.0
        self.sampled_tokens = self.lost_tokens = self.num_faults = 0

    def run(self) -> SimulatedRun:
        """Returns what happens until the last epoch is published."""
        for number in range(len(self.samplers)):
            self._plan_fault(self.faults.sampler_every_s, self._lose_sampler, number)
        self._plan_fault(self.faults.trainer_every_s, self._lose_trainers)
        self._plan_fault(self.faults.driver_every_s, self._lose_driver)
        self._begin_epochs()
        while self.events and len(self.published_s) < self.work.num_epochs:
            self.now_s, _, life, function, arguments = heapq.heappop(self.events)
            if life in (self.life, ALWAYS):
                function(*arguments)
        busy, seconds = [sampler.busy_s for sampler in self.samplers], self.now_s
        return SimulatedRun(
            seconds=seconds,
            num_episodes=self.num_done,
            published_s=self.published_s,
            samplers=min(1.0, statistics.fmean(busy) / seconds),
            trainers=self.training_s / seconds,
            driver=self.driver.busy_s / seconds,
            network=self.network.busy_s / seconds,
            prompt_tokens=sum(sampler.num_prompt_tokens for sampler in self.samplers),
            sampled_tokens=self.sampled_tokens,
            lost_tokens=self.lost_tokens,
            num_faults=self.num_faults,
            imbalance=max(busy) / statistics.fmean(busy),
        )

    def _at(self, at_s: float, function: Callable[..., None], *arguments: Any, life: int | None = None) -> None:
        self.count += 1
        heapq.heappush(self.events, (at_s, self.count, self.life if life is None else life, function, arguments))

    # Epochs and episodes.

    def _begin_epochs(self) -> None:
        work = self.work
        while self.num_begun < work.num_epochs and self.num_begun - len(self.published_s) <= work.max_staleness:
            epoch, first = self.num_begun, self.num_begun * work.examples
            self.num_begun += 1
            self.left[epoch] = work.examples * work.siblings
            self.trained_tokens[epoch] = 0
            for index in range(self.left[epoch]):
                self.waiting.append(SimulatedEpisode(self.num_started + index, epoch, first + index // work.siblings))
            self.num_started += self.left[epoch]
        self._start_episodes()

    def _start_episodes(self) -> None:
        while self.waiting and len(self.playing) < self.work.concurrency:
            episode = self.waiting.popleft()
            episode.turn, episode.context, episode.sampled = 0, self.work.prompt, 0
            episode.turns = max(1, round(self.work.turns.draw(self.rng)))
            self.playing[episode.number] = episode
            self._call(episode)

    def _call(self, episode: SimulatedEpisode) -> None:
        """The driver's half of a model call before it is sent."""
        if self.phase in (DRAINING, PUBLISHING) and self.work.in_flight == "wait":
            self.held.append(episode)
            return
        costs, driver = self.costs, self.costs.driver
        num_tokens = max(1, round(self.work.reply.draw(self.rng)))
        new = self.work.prompt if episode.turn == 0 else self.work.message
        at_s = self.driver.serve(self.now_s, (driver.call_s + driver.message_s) / 2 + new * driver.per_token_s)
        at_s = self.network.serve(at_s, 4 * episode.context / costs.bytes_per_s)
        self.num_replies += 1
        self._at(at_s + costs.latency_s, self._arrive, SimulatedReply(episode, episode.context, num_tokens))

    def _arrive(self, reply: SimulatedReply) -> None:
        number = self.router.acquire(self.key(reply.episode))
        if number is None:  # all samplers are being started
            self._at(self.now_s + 1.0, self._arrive, reply)
            return
        self.samplers[number].add(self.now_s, reply, f"group {reply.episode.group}")
        self._plan(number)

    def _plan(self, number: int) -> None:
        sampler = self.samplers[number]
        sampler.version += 1
        if sampler.running:
            self._at(sampler.next_end_s(), self._end_reply, number, sampler.version)

    def _end_reply(self, number: int, version: int) -> None:
        sampler = self.samplers[number]
        if version != sampler.version:  # something has changed meanwhile
            return
        reply = sampler.finish(self.now_s)
        self.router.release(number)
        self.num_replies -= 1
        self.sampled_tokens += reply.num_tokens
        num_bytes = BYTES_PER_TOKEN * reply.num_tokens + 8 * reply.context
        at_s = self.network.serve(self.now_s, num_bytes / self.costs.bytes_per_s)
        self._at(at_s + self.costs.latency_s, self._receive, reply)
        self._plan(number)
        self._publish_if_quiet()

    def _receive(self, reply: SimulatedReply) -> None:
        """The driver's half of a model call after its reply."""
        episode, costs = reply.episode, self.costs.driver
        seconds = (costs.call_s + costs.message_s) / 2 + reply.num_tokens * costs.per_token_s
        at_s = self.driver.serve(self.now_s, seconds)
        episode.sampled += reply.num_tokens
        episode.context += reply.num_tokens
        if episode.turn + 1 < episode.turns:
            episode.turn += 1
            episode.context += self.work.message
            self._at(at_s + self.work.tool_s.draw(self.rng), self._call, episode)
            return
        at_s = self.driver.serve(at_s, costs.episode_s)
        self.driver.serve(at_s, costs.journal_s)
        self._at(at_s, self._end_episode, episode)

    def _end_episode(self, episode: SimulatedEpisode) -> None:
        del self.playing[episode.number]
        self.num_done += 1
        shares = self.costs.trainer.shares_prompts and episode.number % self.work.siblings != 0
        self.trained_tokens[episode.epoch] += episode.context - (self.work.prompt if shares else 0)
        self.left[episode.epoch] -= 1
        self._start_episodes()
        self._train()

    # Training and new weights.

    def _train(self) -> None:
        """Begins the next job if its epoch is collected."""
        epoch, costs = len(self.published_s), self.costs.trainer
        if self.phase or self.left.get(epoch, 1):
            return
        self.job_s = costs.job_s + self.work.steps_per_job * costs.step_s + self.trained_tokens[epoch] * costs.token_s
        self.phase = TRAINING
        self._plan_job(self.now_s)

    def _plan_job(self, at_s: float) -> None:
        self.job += 1
        self._at(at_s + self.job_s, self._end_job, self.job)

    def _end_job(self, job: int) -> None:
        if job == self.job:  # else it was lost
            self.training_s += self.job_s
            self.phase = DRAINING
            self._publish_if_quiet()

    def _publish_if_quiet(self) -> None:
        in_flight = self.work.in_flight
        if self.phase != DRAINING or (self.num_replies and in_flight == "wait"):
            return
        self.phase = PUBLISHING
        for number in range(len(self.samplers)) if in_flight == "abort" else ():
            self._interrupt(number, self.costs.publish_s)
        if in_flight == "recompute" or (in_flight == "keep" and self.costs.recompute):
            for number, sampler in enumerate(self.samplers):
                if sampler.running:
                    sampler.advance(self.now_s)
                    sampler.delay(self.costs.publish_s + sampler.context * self.costs.sampler.prompt_token_s)
                    self._plan(number)
        self._at(self.now_s + self.costs.publish_s, self._open)

    def _open(self) -> None:
        self.phase = ""
        self.published_s.append(self.now_s)
        held, self.held = self.held, []
        for episode in held:
            self._call(episode)
        self._begin_epochs()
        self._train()

    # Faults.

    def _plan_fault(self, every_s: float, function: Callable[..., None], *arguments: Any) -> None:
        if every_s:
            self._at(self.now_s + self.rng.expovariate(1 / every_s), function, *arguments, life=ALWAYS)

    def _lose_sampler(self, number: int) -> None:
        """Its replies are sampled again elsewhere."""
        self._plan_fault(self.faults.sampler_every_s, self._lose_sampler, number)
        if not self.router.has(number):
            return
        self.num_faults += 1
        self._interrupt(number)
        self.router.remove(number)
        self._at(self.now_s + self.faults.restart_s, self._return_sampler, number, life=ALWAYS)

    def _interrupt(self, number: int, after_s: float = 0.0) -> None:
        """Lets a sampler lose its replies, which are sent again after some seconds."""
        sampler = self.samplers[number]
        sampler.advance(self.now_s)
        replies = [*(reply for _, _, reply in sampler.running), *(reply for reply, _ in sampler.waiting)]
        self.lost_tokens += self._count_sampled(sampler)
        sampler.clear()
        for reply in replies:
            self.router.release(number)
            at_s = self.driver.serve(self.now_s, self.costs.driver.message_s)
            self._at(at_s + after_s, self._arrive, reply)

    def _count_sampled(self, sampler: SimulatedSampler) -> int:
        """Returns the tokens of the replies that it has not finished."""
        return sum(max(0, round(reply.num_tokens - (end - sampler.progress))) for end, _, reply in sampler.running)

    def _return_sampler(self, number: int) -> None:
        self.router.add(number)

    def _lose_trainers(self) -> None:
        """The job runs again."""
        self._plan_fault(self.faults.trainer_every_s, self._lose_trainers)
        self.num_faults += 1
        if self.phase == TRAINING:
            self._plan_job(self.now_s + self.faults.restart_s)

    def _lose_driver(self) -> None:
        """Episodes in flight run again, and so does the job whose weights are not published."""
        self._plan_fault(self.faults.driver_every_s, self._lose_driver)
        self.num_faults += 1
        self.life += 1
        self.lost_tokens += sum(map(self._count_sampled, self.samplers))
        self.lost_tokens += sum(episode.sampled for episode in self.playing.values())
        for sampler in self.samplers:
            sampler.clear()
        self.router = EngineRouter(range(len(self.samplers)))
        self.waiting.extendleft(sorted(self.playing.values(), key=lambda episode: -episode.number))
        self.playing, self.held, self.num_replies, self.phase = {}, [], 0, ""
        self._at(self.now_s + self.faults.restart_s, self._resume)

    def _resume(self) -> None:
        self.driver.free_s = self.now_s
        self._begin_epochs()
        self._train()
