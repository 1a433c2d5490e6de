"""The garbage collector while a run lasts: what was there is not looked at, what comes is, and all is as before."""

from __future__ import annotations

import gc
import weakref

import pytest

from reinforge.engine.garbage_collection import THRESHOLDS, few_collections


@pytest.fixture(autouse=True)
def nothing_frozen():
    """What `tests/conftest.py` froze is looked at within these tests."""
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.freeze()


class Node:
    """Something that can be part of a cycle."""


def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)


def test_what_was_there_is_left_alone_and_new_garbage_is_not():
    before, lasting = gc.get_threshold(), [Node()]
    with few_collections():
        assert gc.get_threshold() == THRESHOLDS
        assert not any(each is lasting for each in gc.get_objects()), "nobody looks at it"
        found = cycle()
        gc.collect()
        assert found() is None
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
    assert any(each is lasting for each in gc.get_objects())


def test_all_is_as_before_after_an_error():
    before = gc.get_threshold()
    with pytest.raises(MemoryError), few_collections():
        raise MemoryError
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_a_run_within_another_changes_nothing():
    with few_collections():
        count = gc.get_freeze_count()
        with few_collections():
            assert gc.get_freeze_count() == count
        assert gc.get_threshold() == THRESHOLDS


def test_a_run_collects_what_the_one_before_left():
    """The weights of its model, say, which would stay beside those of the next."""
    with few_collections():
        left = cycle()
    with few_collections():
        assert left() is None


def test_a_program_that_froze_objects_itself_keeps_them_so():
    gc.freeze()
    try:
        count, before = gc.get_freeze_count(), gc.get_threshold()
        with few_collections():
            assert gc.get_threshold() == before
        assert gc.get_freeze_count() >= count
    finally:
        gc.unfreeze()
