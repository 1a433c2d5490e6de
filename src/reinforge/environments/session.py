"""An episode's environment, as its agent sees it: `context.environment`."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from reinforge.bounded import decode_json
from reinforge.environments.host import EnvironmentFailed, EnvironmentHost
from reinforge.environments.mcp import EnvironmentServer
from reinforge.errors import ConfigError, PolicyFailure, Problem
from reinforge.rollout.context import EpisodeContext
from reinforge.rollout.episode import extract_text
from reinforge.rollout.handle.arguments import read_arguments
from reinforge.rollout.isolation.worker_protocol import dump_item
from reinforge.types.environment import Observation, Reply, StepResult, ToolUse
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.workflow import BoundWorkflow

PLAYER_TOKENS = 256  # maximum tokens of a reply of another player than the agent
OWN_METRICS = {"value", "reward", "num_steps"}
"""Names that an episode's report has already; an environment's numbers do not take their place."""


class EpisodeEnvironment:
    """`await context.environment.reset()`, then `await context.environment.step(reply)` until `done`.

    In a plain workflow both block instead: `context.environment.step(reply)`. A reply is a string, or the message that
    the model returned, with its tool calls. The sum of the rewards is the episode's, unless the agent reports another.
    What the environment asks of other players, such as an opponent, it answers itself.
    """

    def __init__(self, host: EnvironmentHost, item: EvalInputItem, context: EpisodeContext):
        self._item, self._context = item, context
        self._opened = host.open()
        self.rewards: list[float] = []
        self.num_steps, self.done = 0, False
        self.metrics: dict[str, float] = {}
        self.observation: Observation | None = None  # the latest
        self.failure: BaseException | None = None  # why there is no reward, whatever the agent makes of it
        self.is_served = self._is_waiting = False  # is_served: a program plays it through the gateway

    async def reset(self) -> Observation:
        self.rewards.clear()
        self.num_steps, self.done = 0, False
        asked = Observation(**await self._guard(self._opened.reset(dump_item(self._item), self._context.seed)))
        result = await self._let_others_play(StepResult(asked))
        if result.done:
            self.failure = EnvironmentFailed("the episode was over before the agent's first reply")
            raise self.failure
        self.observation = result.observation
        return result.observation

    async def step(self, reply: Any) -> StepResult:
        if self.done:
            raise ValueError("context.environment.step: the episode is over; it returned done=True")
        read = read_reply(reply)
        self.num_steps += 1
        result = await self._let_others_play(await self._step(read, None))
        self.observation = result.observation
        return result

    async def _let_others_play(self, result: StepResult) -> StepResult:
        """Returns the result with which the agent goes on: the models of other players have replied until then."""
        calls = self._context.calls
        own, rewards = (calls[-1].call_id if calls else None), [result.reward]
        while (player := result.observation.player) is not None and not result.done:
            arguments = read_arguments({"max_tokens": PLAYER_TOKENS})
            reply = await self._context.llm(player).complete(result.observation.messages, arguments)
            result = await self._step(Reply(extract_text(reply.choices[0].message.content)), own)
            rewards.append(result.reward)
        given = [reward for reward in rewards if reward is not None]
        return replace(result, reward=sum(given) if given else None)

    async def _step(self, reply: Reply, call_id: str | None) -> StepResult:
        """Plays one reply; its reward is that of the call with this id, or of the latest one."""
        data = await self._guard(self._opened.step(asdict(reply)))
        result = StepResult(Observation(**data["observation"]), data["reward"], bool(data["done"]), data["info"])
        self.done = result.done
        if result.reward is not None:
            if not math.isfinite(result.reward):
                self.failure = EnvironmentFailed(f"the environment returned the reward {result.reward}")
                raise self.failure
            self.rewards.append(float(result.reward))
            if not (result.done and self.num_steps == 1):  # of a single step the sum is the reward
                self._context.mark(step_reward=float(result.reward), call_id=call_id)
        numbers = {name: value for name, value in result.info.items() if isinstance(value, bool | int | float)}
        self.metrics = {
            name: float(value) for name, value in numbers.items() if math.isfinite(value) and name not in OWN_METRICS
        }
        return result

    async def _guard(self, call: Awaitable[Any]) -> Any:
        self._is_waiting = True  # and stays so if the agent ends meanwhile
        try:
            result = await call
        except Exception as error:
            self._is_waiting = False
            if not isinstance(error, PolicyFailure):
                self.failure = error
            raise
        self._is_waiting = False
        return result

    def close(self) -> None:
        self._opened.close()

    @contextmanager
    def report(self) -> Iterator[None]:
        """Reports the reward after the agent, or raises why there is none, whatever the agent made of it."""
        try:
            yield
        except Exception:
            if self.failure is not None:
                raise self.failure from None
            raise
        if self.failure is not None:
            raise self.failure
        if self._is_waiting:
            raise EnvironmentFailed("the agent ended before the environment had answered, so the reward is not known")
        if self.rewards:
            self._context.reward(sum(self.rewards), **self.metrics, num_steps=self.num_steps)
        elif self.is_served and not self.done and self._context.calls:
            raise PolicyFailure("the agent stopped before the environment's episode was over")


class BlockingEnvironment:
    """An `EpisodeEnvironment` whose methods block, for a plain workflow in its thread."""

    def __init__(self, environment: EpisodeEnvironment, loop: asyncio.AbstractEventLoop):
        self._environment, self._loop = environment, loop

    def reset(self) -> Observation:
        return asyncio.run_coroutine_threadsafe(self._environment.reset(), self._loop).result()

    def step(self, reply: Any) -> StepResult:
        return asyncio.run_coroutine_threadsafe(self._environment.step(reply), self._loop).result()


def bind_environment(workflow: BoundWorkflow, host: EnvironmentHost) -> BoundWorkflow:
    """Returns the workflow with `context.environment` in its episodes, whose reward it reports at their end."""
    if workflow.is_isolated:
        fix = "use `isolation: thread` and `placement: driver`; the environment has processes of its own"
        raise ConfigError(Problem("workflow", "an agent in another process cannot have an `environment`", fix))
    agent = workflow.function

    async def play(item: EvalInputItem, llm: Any, context: Any) -> Any:
        context.environment = environment = EpisodeEnvironment(host, item, context)
        context.answer_environment = EnvironmentServer(environment).answer
        try:
            with environment.report():
                return await agent(item, llm, context)
        finally:
            environment.close()

    def play_blocking(item: EvalInputItem, llm: Any, context: Any) -> Any:
        environment = EpisodeEnvironment(host, item, context)
        context.environment = BlockingEnvironment(environment, host.loop)
        context.answer_environment = EnvironmentServer(environment).answer
        try:
            with environment.report():
                return agent(item, llm, context)
        finally:
            host.loop.call_soon_threadsafe(environment.close)

    function = functools.update_wrapper(play if workflow.is_async else play_blocking, agent)
    if (find_problems := getattr(agent, "example_problems", None)) is not None:
        function.example_problems = find_problems  # type: ignore[attr-defined]
    return replace(workflow, function=function)


def read_reply(reply: Any) -> Reply:
    """Returns what an agent passes to `step` as a `Reply`: a string, a message as data, or one of a client."""
    if isinstance(reply, Reply):
        return reply
    if isinstance(reply, str):
        return Reply(reply)
    message = reply if isinstance(reply, Mapping) else reply.model_dump()
    calls = []
    for call in message.get("tool_calls") or []:
        function = call["function"]
        try:
            arguments = decode_json(function["arguments"] or "{}")
        except ValueError as error:
            raise PolicyFailure(f"the arguments of a call of {function['name']} are not JSON: {error}") from None
        if not isinstance(arguments, dict):
            raise PolicyFailure(f"the arguments of a call of {function['name']} are not a JSON object")
        calls.append(ToolUse(str(call["id"]), str(function["name"]), arguments))
    return Reply(extract_text(message.get("content")), calls)
