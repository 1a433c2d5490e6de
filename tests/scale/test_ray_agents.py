"""Agents in Ray actors: the same episodes as in this process, and workers that end cost none."""

import signal
from contextlib import asynccontextmanager

import psutil
import pytest

from reinforge.engine.packages import is_installed
from reinforge.rollout.isolation.isolated_agent import LOADER, PlacedWorkflow
from reinforge.rollout.isolation.worker_pool import WorkerPool
from reinforge.types.trajectory import Outcome
from tests.core.rollout.test_isolation import (
    _forget_the_agents,  # noqa: F401  fixtures
    agents,  # noqa: F401
    collect,
    evaluation_of,
    facts,
    in_process,
)
from tests.core.rollout.test_placement import folder  # noqa: F401
from tests.processes import find_children

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_installed("ray"), reason="needs the extra `ray`"),
]


@asynccontextmanager
async def placed(place, name, num_processes=2):
    from reinforge.scale.ray.agents import RayAgents

    workflow, cluster = in_process(place, name), RayAgents(None)
    pool = WorkerPool(f"agents:{name}", place, LOADER, num_shared=num_processes, open_transport=cluster.open)
    try:
        yield PlacedWorkflow.share(workflow, pool)
    finally:
        await pool.close()
        await cluster.close()


async def test_episodes_are_those_of_this_process_and_workers_that_end_cost_none(folder):  # noqa: F811
    """One cluster for all of it, since it takes seconds to start."""
    kinds = ["die", *[""] * 7]
    async with placed(folder, "die_once") as workflow:
        there = await collect(evaluation_of(workflow, kinds=kinds, concurrency=8))
        assert (folder / "once").exists()
        actors = find_children("AgentHost")
        assert len(actors) == 2
        actors[0].send_signal(signal.SIGKILL)
        again = await collect(evaluation_of(workflow, kinds=[""] * 8, concurrency=8))
    here = await collect(evaluation_of(in_process(folder, "die_once"), kinds=kinds))
    assert [facts(record) for record in there] == [facts(record) for record in here]
    assert {(record.outcome, record.attempt) for record in [*there, *again]} == {(Outcome.OK, 0)}
    assert psutil.wait_procs(actors, timeout=30)[1] == [], "closing the pool ends its processes"


async def test_agents_of_all_kinds(folder):  # noqa: F811
    for name in ("talk", "plain"):
        async with placed(folder, name, num_processes=1) as workflow:
            there = await collect(evaluation_of(workflow), generations=3)
        here = await collect(evaluation_of(in_process(folder, name)), generations=3)
        assert [facts(record) for record in there] == [facts(record) for record in here]
