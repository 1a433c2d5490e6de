"""Nested dicts of arrays."""

import numpy as np
import pytest

from reinforge.errors import TrajectoryError
from reinforge.multiagent import NestedArrayDict, concatenate_nested_array_dicts, stack_nested_array_dicts


def made(batch=2, rounds=3):
    numbers = np.arange(batch * rounds).reshape(batch, rounds)
    return NestedArrayDict(
        {"round": numbers, "agents": {"reward": np.stack([numbers, -numbers], -1)}}, batch_size=(batch, rounds)
    )


def test_names_and_paths():
    arrays = made()
    assert arrays["round"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert arrays["agents", "reward"] is arrays["agents"]["reward"]
    assert arrays["agents"].batch_size == (2, 3)
    assert arrays.keys() == {"round", "agents"}
    assert arrays.keys(nested=True) == {("round",), ("agents", "reward")}
    assert "round" in arrays
    assert ("agents", "reward") in arrays
    assert ("agents", "decision") not in arrays
    assert arrays.get(("agents", "decision")) is None
    with pytest.raises(KeyError):
        arrays["next"]


def test_setting_below_a_name_that_is_not_there_yet():
    arrays = made()
    arrays["next", "agents", "decision"] = np.zeros((2, 3, 2))
    assert arrays["next"]["agents"]["decision"].shape == (2, 3, 2)
    assert arrays["next"].batch_size == (2, 3)
    with pytest.raises(TrajectoryError, match="round is an array and cannot hold nested names"):
        arrays["round", "x"] = np.zeros((2, 3))


def test_indexing_along_the_batch():
    arrays = made()
    assert arrays[1].batch_size == (3,)
    assert arrays[1]["round"].tolist() == [3, 4, 5]
    assert arrays[:, -1]["agents", "reward"].tolist() == [[2, -2], [5, -5]]
    assert arrays[1, 2].batch_size == ()
    assert arrays[[1, 0], [0, 2]]["round"].tolist() == [3, 2]
    assert arrays[np.array([True, False])].batch_size == (1, 3)
    assert arrays[np.array([[True, False, True], [False, True, False]])]["round"].tolist() == [0, 2, 4]
    assert [part["round"].tolist() for part in arrays] == [[0, 1, 2], [3, 4, 5]]
    assert len(arrays) == 2
    with pytest.raises(IndexError):
        arrays[0, 0, 0]  # the third dimension is no batch


def test_arrays_begin_with_the_batch_size():
    with pytest.raises(TrajectoryError, match=r"reward has the shape \(3,\), which does not start with \(2,\)"):
        NestedArrayDict({"agents": {"reward": np.zeros(3)}}, batch_size=2)


def test_stacking_and_concatenating():
    stacked = stack_nested_array_dicts([made(), made()])
    assert stacked.batch_size == (2, 2, 3)
    assert stacked[1] == made()
    assert stack_nested_array_dicts([made(), made()], dim=-1).batch_size == (2, 3, 2)
    longer = concatenate_nested_array_dicts([made(), made(batch=1)])
    assert longer.batch_size == (3, 3)
    assert longer[2]["round"].tolist() == [0, 1, 2]
    other = made()
    other["more"] = np.zeros((2, 3))
    with pytest.raises(TrajectoryError, match="cannot join 2 dicts: not all of them have more"):
        stack_nested_array_dicts([made(), other])
    with pytest.raises(TrajectoryError, match="no dicts to join"):
        stack_nested_array_dicts([])


def test_another_shape_of_the_batch():
    flat = made().reshape(6)
    assert flat["agents", "reward"].shape == (6, 2)
    assert flat.reshape(2, -1) == made()


def test_equality_is_of_names_and_numbers():
    assert made() == made()
    other = made()
    other["round"][0, 0] = 7
    assert made() != other
    assert made() != made(batch=1)
    assert made().to_dict()["agents"]["reward"].shape == (2, 3, 2)
