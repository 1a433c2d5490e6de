"""`NestedArrayDict`: numpy arrays under nested names, which share the first dimensions.

    NestedArrayDict({"round": [B, R], "agents": {"reward": [B, R, A]}}, batch_size=(B, R))
    nd["agents", "reward"]    the array          nd["agents"]    what is below, with the same batch size
    nd[0]                     batch size (R,)    nd[:, -1]       batch size (B,)

It is how data of the reference comes in and how ours is looked at; what is trained on are trajectories (`rollouts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from reinforge.errors import TrajectoryError

Key = str | tuple[str, ...]
Array = NDArray[Any]


class NestedArrayDict:
    """Arrays by nested names; keys read a name, anything else indexes along the batch.

    Args:
        source: Arrays, mappings of arrays, or of mappings.
        batch_size: The dimensions that every array begins with.

    Raises:
        TrajectoryError: An array begins with other dimensions.
    """

    def __init__(self, source: Mapping[str, Any] | NestedArrayDict, batch_size: Sequence[int] | int):
        self.batch_size = (batch_size,) if isinstance(batch_size, int) else tuple(int(size) for size in batch_size)
        self._entries: dict[str, Array | NestedArrayDict] = {}
        for name, value in source.items():
            self[name] = value

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._entries[key]
        if _is_path(key):
            first, *rest = key
            found = self._entries[first]
            return found[tuple(rest)] if rest else found
        return self._indexed(key)

    def __setitem__(self, key: Key, value: Any) -> None:
        path = (key,) if isinstance(key, str) else key
        if not _is_path(path):
            raise TypeError(f"only names can be set, not {key!r}")
        first, *rest = path
        if rest:
            below = self._entries.setdefault(first, NestedArrayDict({}, self.batch_size))
            if not isinstance(below, NestedArrayDict):
                raise TrajectoryError(f"{first} is an array, so there is nothing below it")
            below[tuple(rest)] = value
        elif isinstance(value, Mapping | NestedArrayDict):
            self._entries[first] = NestedArrayDict(value, self.batch_size)
        else:
            self._entries[first] = self._checked(first, np.asarray(value))

    def _checked(self, name: str, array: Array) -> Array:
        if array.shape[: len(self.batch_size)] != self.batch_size:
            raise TrajectoryError(f"{name} has the shape {array.shape}, which does not begin with {self.batch_size}")
        return array

    def _indexed(self, index: Any) -> Self:
        """Returns every array at the same place of the batch."""
        places = index if isinstance(index, tuple) else (index,)
        if any(place is ... for place in places):
            raise TypeError("... stands for dimensions of the batch or of the arrays; write each as :")
        kept = np.empty(self.batch_size, np.bool_)[places].shape  # refuses what goes beyond the batch
        return type(self)(self._mapped(lambda array: array[*places, ...]), kept)  # ...: an object stays in its array

    def _mapped(self, change: Callable[[Array], Array]) -> dict[str, Any]:
        return {
            name: value._mapped(change) if isinstance(value, NestedArrayDict) else change(value)
            for name, value in self._entries.items()
        }

    def __contains__(self, key: object) -> bool:
        return key in self.keys(nested=True) or key in self._entries

    def __len__(self) -> int:
        """The first dimension of the batch."""
        return self.batch_size[0]

    def __iter__(self) -> Iterator[Self]:
        """Each place along the first dimension of the batch."""
        return (self[place] for place in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NestedArrayDict) or self.batch_size != other.batch_size:
            return NotImplemented if not isinstance(other, NestedArrayDict) else False
        names = self.keys(nested=True)
        return names == other.keys(nested=True) and all(_are_equal(self[name], other[name]) for name in names)

    __hash__ = None  # type: ignore[assignment]  # it can be changed

    def __repr__(self) -> str:
        shapes = {".".join(name): self[name].shape for name in sorted(self.keys(nested=True))}
        return f"NestedArrayDict({shapes}, batch_size={self.batch_size})"

    def keys(self, *, nested: bool = False) -> set[Any]:
        """Returns the names; nested: the path of every array."""
        if not nested:
            return set(self._entries)
        found: set[Any] = set()
        for name, value in self._entries.items():
            below = value.keys(nested=True) if isinstance(value, NestedArrayDict) else {()}
            found |= {(name, *rest) for rest in below}
        return found

    def items(self) -> list[tuple[str, Any]]:
        """Returns names and what is under each."""
        return list(self._entries.items())

    def get(self, key: Key, default: Any = None) -> Any:
        """Returns what is under a name, or the default."""
        try:
            return self[key]
        except KeyError:
            return default

    def to_dict(self) -> dict[str, Any]:
        """Returns the same as plain dicts of arrays."""
        return self._mapped(lambda array: array)

    def reshape(self, *sizes: int) -> Self:
        """Returns the same with another batch size of as many places; one of the sizes may be -1."""
        shape = np.empty(self.batch_size, np.bool_).reshape(sizes).shape
        depth = len(self.batch_size)
        return type(self)(self._mapped(lambda array: array.reshape(*shape, *array.shape[depth:])), shape)


def stack_nested_array_dicts(parts: Sequence[NestedArrayDict], dim: int = 0) -> NestedArrayDict:
    """Returns dicts of the same names and shapes as one, along a new dimension of the batch.

    Example: two of batch size (4,) -> batch size (2, 4).
    """
    return _joined(parts, dim, np.stack)


def concatenate_nested_array_dicts(parts: Sequence[NestedArrayDict], dim: int = 0) -> NestedArrayDict:
    """Returns dicts of the same names one after the other, along a dimension of the batch that they have.

    Example: batch sizes (4,) and (3,) -> (7,).
    """
    return _joined(parts, dim, np.concatenate)


def _joined(parts: Sequence[NestedArrayDict], dim: int, join: Callable[..., Array]) -> NestedArrayDict:
    """Returns several dicts as one.

    Raises:
        TrajectoryError: There are none, or their names differ.
    """
    if not parts:
        raise TrajectoryError("there is nothing to join")
    names = [part.keys(nested=True) for part in parts]
    if any(each != names[0] for each in names):
        missing = sorted({".".join(path) for each in names for path in set.union(*names) - each})
        raise TrajectoryError(f"{len(parts)} dicts cannot be joined: not all of them have {', '.join(missing)}")
    shape = join([np.empty(part.batch_size, np.bool_) for part in parts], axis=dim).shape
    made = NestedArrayDict({}, shape)
    for path in names[0]:
        made[path] = join([part[path] for part in parts], axis=dim % len(shape))
    return made


def _is_path(key: Any) -> bool:
    return isinstance(key, tuple) and len(key) > 0 and all(isinstance(part, str) for part in key)


def _are_equal(one: Array, other: Array) -> bool:
    return one.shape == other.shape and bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))
