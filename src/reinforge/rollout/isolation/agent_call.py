"""Calls the agent on one episode, in the process where it runs: the run's own, or a worker."""

from __future__ import annotations

import asyncio
from typing import Any

from reinforge.rollout.context import CURRENT_EPISODE, EpisodeContext, RunningEpisode
from reinforge.rollout.isolation.containment import Abandoned, run_contained
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.workflow import BoundWorkflow


async def call_agent(
    workflow: BoundWorkflow, item: EvalInputItem, llm: Any, context: EpisodeContext, timeout_s: float | None
) -> Any:
    """Returns what the agent returns: an async one runs in a task of its own, a plain one in a daemon thread.

    Args:
        workflow: The agent.
        item: The example.
        llm: The model handle.
        context: The agent's view of the episode.
        timeout_s: Time limit in seconds; None: no limit.

    Raises:
        TimeoutError: The time limit was reached.
        Abandoned: The same, and the agent still runs.
        Exception: Whatever the agent raised.
    """
    running = RunningEpisode(item, context)
    if workflow.is_async:

        async def call() -> Any:
            CURRENT_EPISODE.set(running)  # in a task of its own
            return await workflow.function(item, llm, context)

        return await run_contained(call, timeout_s)
    finished = False

    def work() -> Any:
        nonlocal finished
        CURRENT_EPISODE.set(running)  # in a thread of its own
        try:
            return workflow.function(item, llm, context)
        finally:
            finished = True

    try:
        async with asyncio.timeout(timeout_s):
            return await run_in_daemon_thread(work, f"episode-{context.example_id}")
    except TimeoutError:
        if not finished:
            raise Abandoned from None
        raise
