"""From how many rows on the bits of a row stay the same."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from reinforge.engine.sampling.projection import find_stable_rows


class FewRowsDiffer(Conv1D):
    """A layer that gives other bits for fewer rows than some number."""

    def __init__(self, outputs, least):
        super().__init__(outputs, 2)
        self.least = least

    def forward(self, rows):
        return rows + (1e-3 if len(rows) < self.least else 0.0)


def find(max_rows, *leasts):
    layers = nn.ModuleList(FewRowsDiffer(outputs, least) for outputs, least in enumerate(leasts, 3))
    return find_stable_rows(SimpleNamespace(module=layers, device=torch.device("cpu"), dtype=torch.float32), max_rows)


@pytest.mark.parametrize(
    ("leasts", "max_rows", "stable"),
    [((0,), 8, 4), ((6,), 8, 6), ((8,), 8, 8), ((0,), 2, 2), ((6, 21, 9), 64, 21), ((50,), 64, 56)],
)
def test_every_product_keeps_its_bits_from_there_on(leasts, max_rows, stable):
    """At least 4 rows, at most a full batch; beyond 40 rows every eighth is tried: 48 differ, 56 do not."""
    assert find(max_rows, *leasts) == stable


def test_the_number_of_threads_is_restored():
    before = torch.get_num_threads()
    find(8, 0)
    assert torch.get_num_threads() == before
