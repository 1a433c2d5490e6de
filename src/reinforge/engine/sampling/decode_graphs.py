"""Decode steps recorded as CUDA graphs: one launch instead of one for each small operation.

On a GPU a decode step of a small model takes as long as the host needs to launch its operations, dozens a layer. A
graph launches all of them at once. It reads and writes the memory that it was recorded with, so it is valid as long as
the weights and the slots stay where they are, and for one number of rows and one length.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch import Tensor

from reinforge.engine.devices import is_out_of_memory

logger = logging.getLogger(__name__)

Step = Callable[[Tensor, Tensor], Tensor]
"""From token ids and positions, `[B]` each, to logits, `[B, V]`, which the next step may overwrite."""


class StepRecorder(Protocol):
    """Records steps; the recordings since `begin` share their memory."""

    def begin(self) -> None:
        """Forgets earlier recordings, which are never run again."""

    def __call__(self, step: Step, token_ids_B: Tensor, positions_B: Tensor) -> Step:
        """Returns what runs the step's recording."""


MAX_GRAPHS = 64  # recorded steps that are kept


class CUDARecorder:
    """Records steps on a stream of its own; the graphs share their memory, since only one runs at a time."""

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device)
        self.begin()

    def begin(self) -> None:
        """Begins another set of graphs: the memory of a set whose graphs are gone cannot be used again."""
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step, token_ids_B: Tensor, positions_B: Tensor) -> Step:
        """Returns what runs a step's recording.

        Raises:
            RuntimeError: It cannot be recorded.
        """
        inputs, graph = (token_ids_B.clone(), positions_B.clone()), torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            step(*inputs)  # libraries allocate their workspaces for this stream
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    logits = step(*inputs)
                finally:
                    graph.capture_end()
            except RuntimeError:
                generator = torch.cuda.default_generators[self._device.index or 0]
                generator.graphsafe_set_state(generator.clone_state())  # it would wait for the end of this recording
                raise
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

        def replay(token_ids_B: Tensor, positions_B: Tensor) -> Tensor:
            inputs[0].copy_(token_ids_B)
            inputs[1].copy_(positions_B)
            graph.replay()
            return logits

        return replay


class DecodeGraphs:
    """Runs steps, and from the second time on their recordings.

    Args:
        record: Records a step and returns what runs the recording.
    """

    def __init__(self, record: StepRecorder):
        self._record: StepRecorder | None = record
        self._graphs: dict[Hashable, Step | None] = {}  # None: it ran once
        self._memory: list[Any] = []

    @staticmethod
    def round_size(size: int) -> int:
        """Returns the next of the sizes that are recorded: four between two powers of 2.

        Example: 5 -> 5, 9 -> 10, 33 -> 40, 1000 -> 1024.
        """
        grain = 2 ** max(0, (size - 1).bit_length() - 3)
        return -(-size // grain) * grain

    def run(self, step: Step, size: Hashable, memory: list[Any], token_ids_B: Tensor, positions_B: Tensor) -> Tensor:
        """Returns the logits of a step.

        Args:
            size: What the step does, apart from the numbers that it reads.
            memory: The objects whose memory it reads and writes; recordings with others are dropped.
        """
        if len(memory) != len(self._memory) or any(a is not b for a, b in zip(memory, self._memory, strict=True)):
            self.clear()
            self._memory = memory
        graph = self._graphs.get(size)
        if graph is None and size in self._graphs and self._record is not None:
            graph = self._try_record(self._record, step, token_ids_B, positions_B)
        if graph is None:
            if len(self._graphs) == MAX_GRAPHS:
                self.clear()
            self._graphs[size] = None
            return step(token_ids_B, positions_B)
        self._graphs[size] = graph
        return graph(token_ids_B, positions_B)

    def clear(self) -> None:
        """Drops the recordings, and with them the memory that they keep."""
        self._graphs.clear()
        self._memory = []
        if self._record is not None:
            self._record.begin()

    def _try_record(self, record: StepRecorder, step: Step, token_ids_B: Tensor, positions_B: Tensor) -> Step | None:
        try:
            return record(step, token_ids_B, positions_B)
        except RuntimeError as cause:
            if is_out_of_memory(cause):
                raise
            logger.warning("decode steps are not recorded as CUDA graphs (slower): %s", cause)
            self._record = None
            return None
