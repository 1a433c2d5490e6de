"""Episodes that wait for a slot are admitted by epoch, then in the order in which they came."""

import asyncio

import pytest

from reinforge.rollout.slots import EpisodeSlots
from reinforge.types.episode import EpisodeKey


def key(epoch, name="a", phase="collect"):
    return EpisodeKey(phase, epoch, name, 0)


class Queue:
    def __init__(self, num_slots):
        self.slots, self.begun, self.ends, self.tasks = EpisodeSlots(num_slots), [], {}, {}

    async def add(self, *keys):
        for each in keys:
            self.ends[each] = asyncio.Event()
            self.tasks[each] = asyncio.create_task(self._run(each))
            await asyncio.sleep(0)

    async def _run(self, each):
        await self.slots.acquire(each)
        self.begun.append(each)
        await self.ends[each].wait()
        self.slots.release()

    async def end(self, each):
        self.ends[each].set()
        await self.tasks[each]
        await asyncio.sleep(0)


async def test_validations_come_before_epochs_and_earlier_epochs_before_later_ones():
    queue = Queue(1)
    order = [key(5, "first"), key(7), key(6, "x"), key(6, "y"), key(6, phase="validate"), key(5, "again")]
    await queue.add(*order)
    for each in (order[0], order[4], order[5], order[2], order[3], order[1]):
        assert queue.begun[-1] == each
        await queue.end(each)
    assert len(queue.begun) == len(order)


async def test_no_more_than_the_slots_are_held():
    queue = Queue(2)
    keys = [key(0, str(n)) for n in range(5)]
    await queue.add(*keys)
    assert queue.begun == keys[:2]
    await queue.end(keys[1])
    assert queue.begun == keys[:3]


@pytest.mark.parametrize("was_given", [False, True], ids=["while it waits", "as it is given the slot"])
async def test_a_cancelled_episode_leaves_its_slot_to_the_next(was_given):
    queue, first, second = Queue(1), key(0, "first"), key(0, "second")
    await queue.slots.acquire(key(0))
    await queue.add(first, second)
    if was_given:
        queue.slots.release()
    queue.tasks[first].cancel()
    await asyncio.gather(queue.tasks[first], return_exceptions=True)
    if not was_given:
        queue.slots.release()
    await asyncio.sleep(0)
    assert queue.begun == [second]
    await queue.end(second)
    await queue.add(key(1))
    assert queue.begun == [second, key(1)], "the slot is free again"
    await queue.end(key(1))
