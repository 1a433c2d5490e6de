"""The rows of each adapter in a batch, and the product of layers with several adapters."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from reinforge.engine.sampling.projection import (
    AdapterRows,
    Projection,
    Weight,
    find_stable_rows,
    order_rows,
    pick_rows,
    project,
)

CPU = torch.device("cpu")


def test_rows_of_one_adapter_are_together():
    adapters, rows = order_rows(["verifier", "prover", "verifier", "judge"], CPU, 1)
    assert adapters == ("judge", "prover", "verifier")
    assert (rows.order.tolist(), rows.places.tolist(), rows.counts) == ([3, 1, 0, 2], [2, 1, 3, 0], [1, 1, 2])
    states = torch.tensor([[10], [11], [12], [13]])
    assert pick_rows(pick_rows(states, rows.order), rows.places).equal(states)


def test_a_batch_of_one_adapter_stays_in_its_order():
    adapters, rows = order_rows(["prover"] * 3, CPU, 4)
    assert (adapters, rows) == (("prover",), AdapterRows(None, None, [3], 4))
    states = torch.tensor([[1], [2]])
    assert pick_rows(states, rows.order) is states


def number(*values):
    return torch.tensor(values).view(len(values), -1)


WEIGHT = number(1.0)
FIRST, SECOND = (number(1.0), number(10.0)), (number(2.0), number(100.0))
NONE = (torch.zeros(0, 1), torch.zeros(1, 0))


def multiply_five_rows(*adapters, counts, min_rows=1):
    layer = Projection(Weight(WEIGHT, None), None, [down for down, _ in adapters], [up for _, up in adapters])
    rows = AdapterRows(None, None, list(counts), min_rows)
    return project(number(1.0, 2.0, 3.0, 4.0, 5.0), layer, rows)[:, 0].tolist()


def test_each_row_gets_the_product_of_its_own_adapter():
    """x + 10 x for the first, x + 200 x for the second; the last row has none."""
    assert multiply_five_rows(FIRST, SECOND, counts=(1, 3)) == [11, 402, 603, 804, 5]
    assert multiply_five_rows(FIRST, NONE, SECOND, counts=(1, 2, 2)) == [11, 2, 3, 804, 1005]
    assert multiply_five_rows(counts=()) == [1, 2, 3, 4, 5]


def test_numbers_of_another_adapter_never_touch_a_row():
    """As they would if each row were multiplied by all adapters, and what is not its own by 0."""
    broken = (number(float("nan")), number(float("inf")))
    assert multiply_five_rows(FIRST, broken, counts=(4, 0)) == [11, 22, 33, 44, 5]


@pytest.mark.parametrize(
    ("adapters", "counts", "min_rows", "products"),
    [
        ((FIRST, SECOND), (1, 4), 3, [11, 402, 603, 804, 1005]),
        ((FIRST, SECOND), (4, 1), 3, [11, 22, 33, 44, 1005]),
        ((FIRST,), (5,), 9, [11, 22, 33, 44, 55]),  # there are no more rows
    ],
)
def test_an_adapter_of_few_rows_multiplies_others_beside_them(adapters, counts, min_rows, products):
    """For equal bits in every batch; what it makes of the others' rows is dropped."""
    assert multiply_five_rows(*adapters, counts=counts, min_rows=min_rows) == products


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
