"""Calls the agent on one episode, in the process where it runs: the run's own, or a worker."""

from __future__ import annotations

import asyncio
from typing import Any

from reinforge.rollout.context import CURRENT_EPISODE, EpisodeContext, RunningEpisode
from reinforge.rollout.isolation.containment import Abandoned, run_contained
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.workflow import BoundWorkflow


def enter_agent(workflow: BoundWorkflow, item: EvalInputItem, llm: Any, context: EpisodeContext) -> Any:
    """Calls the agent, in a task or a thread of its own, which gets the episode as its `CURRENT_EPISODE`."""
    CURRENT_EPISODE.set(RunningEpisode(item, context))
    return workflow.function(item, llm, context)


async def call_agent(
    workflow: BoundWorkflow, item: EvalInputItem, llm: Any, context: EpisodeContext, timeout_s: float | None
) -> Any:
    """Returns what the agent returns: an async one runs in a task of its own, a plain one in a daemon thread.

    Raises:
        Abandoned: The same, and the agent still runs.
        Exception: Whatever the agent raised.
    """
    if workflow.is_async:
        return await run_contained(lambda: enter_agent(workflow, item, llm, context), timeout_s)
    finished = False

    def work() -> Any:
        nonlocal finished
        try:
            return enter_agent(workflow, item, llm, context)
        finally:
            finished = True

    try:
        async with asyncio.timeout(timeout_s):
            return await run_in_daemon_thread(work, f"episode-{context.example_id}")
    except TimeoutError:
        if not finished:
            raise Abandoned from None
        raise
