"""The lock under which models are made."""

from __future__ import annotations

import threading

MAKING = threading.RLock()
"""Held while transformers makes a model.

Until it is done, torch's default type and methods of transformers' classes are replaced, for all threads. Two that make
models at the same time may leave the replacements behind: no later model of the process would have its weights tied.
"""
