"""The garbage collector during a run: it skips old objects, collects new ones, and is restored afterwards."""

import gc
import weakref
from contextlib import contextmanager

import pytest

from reinforge.engine import garbage_collection
from reinforge.engine.garbage_collection import FROZEN_AT_START, THRESHOLDS, limit_garbage_collection


@contextmanager
def count_frozen_from_now():
    """Counts none of the objects that `tests/conftest.py` froze; thawed, each collection would look through them."""
    with pytest.MonkeyPatch.context() as patch:
        count, before = gc.get_freeze_count, gc.get_freeze_count()
        patch.setattr(gc, "get_freeze_count", lambda: max(0, count() - before))
        patch.setattr(garbage_collection, "_is_limited", False)
        yield
    gc.unfreeze()
    gc.freeze()


@pytest.fixture(autouse=True)
def unfrozen():
    with count_frozen_from_now():
        yield


class Node:
    """Something that can be part of a cycle."""


def make_many():
    """More objects than those that Python freezes itself."""
    return [Node() for _ in range(50 * FROZEN_AT_START)]


def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)


def test_old_objects_are_skipped_and_new_garbage_is_collected():
    before, lasting = gc.get_threshold(), [Node()]
    with limit_garbage_collection():
        assert gc.get_threshold() == THRESHOLDS
        assert not any(each is lasting for each in gc.get_objects()), "the collector skips it"
        found = cycle()
        gc.collect()
        assert found() is None
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
    assert any(each is lasting for each in gc.get_objects())


def test_objects_that_python_freezes_itself_do_not_count(monkeypatch):
    """Python 3.12 starts with 375 of them."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    with limit_garbage_collection():
        assert gc.get_threshold() == THRESHOLDS
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 5000)
    with limit_garbage_collection():
        assert gc.get_threshold() != THRESHOLDS


def test_settings_are_restored_after_an_error():
    before = gc.get_threshold()
    with pytest.raises(MemoryError), limit_garbage_collection():
        raise MemoryError
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
def test_a_nested_run_changes_nothing():
    lasting = make_many()
    with limit_garbage_collection():
        count = gc.get_freeze_count()
        assert count > len(lasting) / 2
        with limit_garbage_collection():
            assert gc.get_freeze_count() <= count  # frozen objects may be freed, but none is added
        assert gc.get_threshold() == THRESHOLDS


@pytest.mark.slow
def test_a_run_collects_garbage_of_the_run_before():
    """Such as its model, whose weights would otherwise stay in memory next to the new ones."""
    with limit_garbage_collection():
        left = cycle()
    with limit_garbage_collection():
        assert left() is None


@pytest.mark.slow
def test_objects_that_the_program_froze_stay_frozen():
    lasting, before = make_many(), gc.get_threshold()
    gc.freeze()
    with limit_garbage_collection():
        assert gc.get_threshold() == before
    assert not any(each is lasting for each in gc.get_objects()), "the collector skips it"
