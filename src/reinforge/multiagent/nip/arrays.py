"""`NestedArrayDict`: numpy arrays under nested names that share their first dimensions.

    NestedArrayDict({"round": [B, R], "agents": {"reward": [B, R, A]}}, batch_size=(B, R))
    nd["agents", "reward"]    the array          nd["agents"]    a nested dict, with the same batch size
    nd[0]                     batch size (R,)    nd[:, -1]       batch size (B,)

The data type of neural-interactive-proofs, for rollouts in both directions; training uses trajectories (`rollouts.py`).
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
    """Arrays by nested names. A string or a tuple of strings selects a name; any other index selects along the batch.

    Raises:
        TrajectoryError: An array has other first dimensions.
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
        return self._index(key)

    def __setitem__(self, key: Key, value: Any) -> None:
        path = (key,) if isinstance(key, str) else key
        if not _is_path(path):
            raise TypeError(f"an item can only be set by name, not by {key!r}")
        first, *rest = path
        if rest:
            below = self._entries.setdefault(first, NestedArrayDict({}, self.batch_size))
            if not isinstance(below, NestedArrayDict):
                raise TrajectoryError(f"{first} is an array and cannot hold nested names")
            below[tuple(rest)] = value
        elif isinstance(value, Mapping | NestedArrayDict):
            self._entries[first] = NestedArrayDict(value, self.batch_size)
        else:
            self._entries[first] = self._check_shape(first, np.asarray(value))

    def _check_shape(self, name: str, array: Array) -> Array:
        if array.shape[: len(self.batch_size)] != self.batch_size:
            raise TrajectoryError(f"{name} has the shape {array.shape}, which does not start with {self.batch_size}")
        return array

    def _index(self, index: Any) -> Self:
        indices = index if isinstance(index, tuple) else (index,)
        if any(each is ... for each in indices):
            raise TypeError("... is ambiguous between dimensions of the batch and of the arrays; write : for each")
        shape = np.empty(self.batch_size, np.bool_)[indices].shape  # raises IndexError beyond the batch dimensions
        return type(self)(self._map(lambda array: array[*indices, ...]), shape)  # ...: an object stays in its array

    def _map(self, change: Callable[[Array], Array]) -> dict[str, Any]:
        return {
            name: value._map(change) if isinstance(value, NestedArrayDict) else change(value)
            for name, value in self._entries.items()
        }

    def __contains__(self, key: object) -> bool:
        return key in self.keys(nested=True) or key in self._entries

    def __len__(self) -> int:
        return self.batch_size[0]

    def __iter__(self) -> Iterator[Self]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NestedArrayDict) or self.batch_size != other.batch_size:
            return NotImplemented if not isinstance(other, NestedArrayDict) else False
        names = self.keys(nested=True)
        return names == other.keys(nested=True) and all(_are_equal(self[name], other[name]) for name in names)

    __hash__ = None  # type: ignore[assignment]  # it is mutable

    def __repr__(self) -> str:
        shapes = {".".join(name): self[name].shape for name in sorted(self.keys(nested=True))}
        return f"NestedArrayDict({shapes}, batch_size={self.batch_size})"

    def keys(self, *, nested: bool = False) -> set[Any]:
        """Returns the names, or with `nested` the path of every array."""
        if not nested:
            return set(self._entries)
        found: set[Any] = set()
        for name, value in self._entries.items():
            below = value.keys(nested=True) if isinstance(value, NestedArrayDict) else {()}
            found |= {(name, *rest) for rest in below}
        return found

    def items(self) -> list[tuple[str, Any]]:
        return list(self._entries.items())

    def get(self, key: Key, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def to_dict(self) -> dict[str, Any]:
        return self._map(lambda array: array)

    def reshape(self, *sizes: int) -> Self:
        shape = np.empty(self.batch_size, np.bool_).reshape(sizes).shape
        depth = len(self.batch_size)
        return type(self)(self._map(lambda array: array.reshape(*shape, *array.shape[depth:])), shape)


def stack_nested_array_dicts(parts: Sequence[NestedArrayDict], dim: int = 0) -> NestedArrayDict:
    """Stacks dicts along a new dimension of the batch: two of batch size (4,) -> batch size (2, 4)."""
    return _join(parts, dim, np.stack)


def concatenate_nested_array_dicts(parts: Sequence[NestedArrayDict], dim: int = 0) -> NestedArrayDict:
    """Concatenates dicts along an existing dimension of the batch: batch sizes (4,) and (3,) -> (7,)."""
    return _join(parts, dim, np.concatenate)


def _join(parts: Sequence[NestedArrayDict], dim: int, join: Callable[..., Array]) -> NestedArrayDict:
    if not parts:
        raise TrajectoryError("no dicts to join")
    names = [part.keys(nested=True) for part in parts]
    if any(each != names[0] for each in names):
        missing = sorted({".".join(path) for each in names for path in set.union(*names) - each})
        raise TrajectoryError(f"cannot join {len(parts)} dicts: not all of them have {', '.join(missing)}")
    shape = join([np.empty(part.batch_size, np.bool_) for part in parts], axis=dim).shape
    joined = NestedArrayDict({}, shape)
    for path in names[0]:
        joined[path] = join([part[path] for part in parts], axis=dim % len(shape))
    return joined


def _is_path(key: Any) -> bool:
    return isinstance(key, tuple) and len(key) > 0 and all(isinstance(part, str) for part in key)


def _are_equal(one: Array, other: Array) -> bool:
    return one.shape == other.shape and bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))
