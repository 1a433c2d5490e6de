"""Keeps Python's garbage collector from scanning a million long-lived objects again and again during a run.

What is loaded before a run (torch, transformers, the dataset) never becomes garbage. A full collection scanned it for
0.36 s each time, during which neither agents nor the model could work: a fifth of the time in which the demo collects
episodes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (20_000, 20, 20)
"""New objects per collection of the youngest generation, and collections per next older one; Python's: 700, 10, 10."""

FROZEN_AT_START = 1000  # more than Python freezes itself: 375 objects in 3.12

_is_limited = False
"""True inside the block: to count a million frozen objects takes 0.06 s."""

_had_run = False
"""True after the first run of this process: before it there is nothing to collect, and a collection takes 0.4 s."""


@contextmanager
def limit_garbage_collection(*, enabled: bool = True) -> Iterator[None]:
    """Makes the collector skip all existing objects inside the block, and look at new ones less often.

    What an earlier run of this process left, such as its model, is collected first. Does nothing if objects are frozen
    already: by another run of this process, or by the program itself.
    """
    global _had_run, _is_limited
    if not enabled or _is_limited or gc.get_freeze_count() > FROZEN_AT_START:
        yield
        return
    before = gc.get_threshold()
    if _had_run:
        gc.collect()
    _had_run = _is_limited = True
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        _is_limited = False
        gc.set_threshold(*before)
        gc.unfreeze()
