"""The event loop thread for blocking callers."""

import asyncio
import sys
import threading
import time

import pytest

from reinforge.rollout.isolation.threads import LoopThread


async def running_loop():
    return asyncio.get_running_loop()


def test_work_shares_one_loop_until_it_is_closed():
    thread = LoopThread("test-loop")
    loop = thread.run(running_loop())
    assert thread.run(running_loop()) is loop
    thread.close()
    deadline = time.monotonic() + 10
    while not loop.is_closed() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert loop.is_closed(), "otherwise its sockets stay open"
    other = thread.run(running_loop())
    assert other is not loop
    thread.close()
    thread.close()


@pytest.mark.parametrize("stop", [lambda: asyncio.get_running_loop().stop(), lambda: sys.exit(3)], ids=["stop", "exit"])
def test_work_that_stops_the_loop_does_not_end_the_others(stop):
    thread = LoopThread("test-loop-3")

    async def stops():
        asyncio.get_running_loop().call_soon(stop)

    thread.run(stops())
    loop = thread.run(running_loop())
    assert loop is thread.run(running_loop())
    thread.close()


def test_blocking_work_on_its_own_loop_is_an_error():
    thread = LoopThread("test-loop-2")

    async def waits_for_itself():
        assert threading.current_thread().name == "test-loop-2"
        thread.run(running_loop())

    with pytest.raises(RuntimeError, match="from the loop's own thread would deadlock"):
        thread.run(waits_for_itself())
    thread.close()
