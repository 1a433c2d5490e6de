"""A loop of one's own for blocking callers."""

import asyncio
import threading
import time

import pytest

from reinforge.rollout.threads import LoopThread


async def running_loop():
    return asyncio.get_running_loop()


def test_work_of_one_owner_shares_a_loop_that_closing_gives_back():
    thread = LoopThread("test-loop")
    loop = thread.run(running_loop())
    assert thread.run(running_loop()) is loop
    thread.close()
    deadline = time.monotonic() + 10
    while not loop.is_closed() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert loop.is_closed(), "its sockets would stay open"
    other = thread.run(running_loop())
    assert other is not loop
    thread.close()
    thread.close()


def test_blocking_work_on_its_own_loop_is_refused():
    thread = LoopThread("test-loop-2")

    async def waits_for_itself():
        assert threading.current_thread().name == "test-loop-2"
        thread.run(running_loop())

    with pytest.raises(RuntimeError, match="blocking work cannot wait for its own loop"):
        thread.run(waits_for_itself())
    thread.close()
