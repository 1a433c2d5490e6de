"""Python's garbage collector, kept from looking at a million lasting objects again and again while episodes run.

What is loaded by then (torch, transformers, the dataset) never becomes garbage. A full collection went through it for
0.36 s a time, in which neither agents nor the model could go on: a fifth of the time in which the demo collects.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (20_000, 20, 20)
"""New objects before a look at the youngest, and looks before the next older ones; Python's own are 700, 10, 10."""

_ran = False
"""A run was made in this process: a first one finds nothing to collect, and looking takes 0.4 s."""


@contextmanager
def few_collections() -> Iterator[None]:
    """Within, what is there already is never looked at, and the rest seldom; as before afterwards.

    What the run before left in this process, its model for one, is collected first. Does nothing where somebody has
    frozen objects already: another run in this process, or the program itself.
    """
    global _ran
    if gc.get_freeze_count():
        yield
        return
    before = gc.get_threshold()
    if _ran:
        gc.collect()
    _ran = True
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
