"""The header of a GGUF file: its settings, and where its tensors lie. Needs no torch, no numpy and no gguf.

`gguf.GGUFReader` would not do here: it cuts a string that is longer than the file without an error, loops over as many
list entries as a file claims, and reading a file whose weights are not quantized must not need the package.

    bytes   "GGUF" | version: u32 | number of tensors: u64 | number of settings: u64
            setting: name, type: u32, value; text is a length (u64) and UTF-8; a list is a type, a length and its values
            tensor:  name, number of dimensions: u32, dimensions: u64 each, type: u32, offset: u64
            padding | the tensors' bytes

The file may come from anyone: no number in it is believed before it is compared with the bytes that are left.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reinforge.engine.model.source import MAGIC

VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_NAME = 1 << 10
MAX_ALIGNMENT = 1 << 16
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of `struct`, by the number of a setting's type."""
TEXT, LIST = 8, 9
SMALLEST_SETTING, SMALLEST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8
"""Bytes of a setting and of a tensor's entry at the least."""

BLOCKS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
"""Tensor types by number: name, weights per block, bytes per block."""

PLAIN_TYPES = frozenset({"F32", "F16", "BF16"})


class GGUFError(ValueError):
    """A GGUF file is damaged, or holds what cannot be loaded; the message continues "the file ..."."""

    def __init__(
        self, message: str, fix: str = "download the file again, and compare its SHA-256 with the publisher's"
    ):
        super().__init__(message)
        self.fix = fix


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    shape: tuple[int, ...]  # in the order of torch, the reverse of the file's: `[rows, columns]`
    type: int  # a key of `BLOCKS`
    start: int  # its first byte in the file
    num_bytes: int

    @property
    def type_name(self) -> str:
        return BLOCKS[self.type][0]

    @property
    def num_weights(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    settings: Mapping[str, Any] = field(default_factory=dict)  # by name, such as `general.architecture`
    tensors: Mapping[str, GGUFTensor] = field(default_factory=dict)  # by name, such as `blk.0.attn_q.weight`

    @property
    def num_weights(self) -> int:
        return sum(tensor.num_weights for tensor in self.tensors.values())

    def get(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        value = self.settings.get(name, default)
        if value is not default and not isinstance(value, kind):
            raise GGUFError(f"has an unusable setting {name}: found {str(value)[:40]!r}")
        return value

    @property
    def architecture(self) -> str:
        """The family, such as `llama`."""
        name = self.get("general.architecture", str)
        if not name:
            raise GGUFError("names no architecture (general.architecture)")
        return str(name)

    def find_token(self, key: str, count: int) -> int | None:
        """Returns the number of a special token, such as `bos`; None: the file has none below `count`."""
        number = self.get(f"tokenizer.ggml.{key}_token_id", int)
        return number if number is not None and 0 <= number < count else None

    @property
    def license(self) -> str | None:
        stated = self.settings.get("general.license.name") or self.settings.get("general.license")
        return stated[:200] if isinstance(stated, str) and stated else None


def read_header(file: Path) -> GGUFHeader:
    """Returns the header of a GGUF file, whose tensors all lie in the file.

    Raises:
        GGUFError: It is not a GGUF file, or it is damaged.
        OSError: It cannot be read.
    """
    with file.open("rb") as opened:
        size = opened.seek(0, 2)
        if size < len(MAGIC):
            raise GGUFError(f"is not a GGUF file: it has {size} bytes")
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _HeaderReader(content, size).read()


class _HeaderReader:
    """Reads values one after the other, and never behind the end."""

    def __init__(self, content: mmap.mmap, size: int):
        self._content, self._size, self._position = content, size, 0

    def read(self) -> GGUFHeader:
        if (magic := self._take(4, "magic number")) != MAGIC:
            raise GGUFError(f"is not a GGUF file: it begins with {magic!r}", "name a .gguf file or a model's folder")
        version = self._read("I", "version")
        if version not in VERSIONS and version.to_bytes(4, "little")[::-1][0] in VERSIONS:
            raise GGUFError("is big-endian", "get the little-endian file")
        if version not in VERSIONS:
            raise GGUFError(f"has version {version} of GGUF; 2 and 3 can be read", "convert the model again")
        num_tensors = self._count("tensors", SMALLEST_TENSOR)
        num_settings = self._count("settings", SMALLEST_SETTING)
        settings = self._read_all(num_settings, "setting", lambda _: self._value(self._read("I", "setting"), "setting"))
        entries = self._read_all(num_tensors, "tensor", self._entry)
        alignment = settings.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise GGUFError(f"has an unusable setting general.alignment: found {str(alignment)[:40]!r}")
        start = -(-self._position // alignment) * alignment
        tensors = {name: self._place(name, entry, start) for name, entry in entries.items()}
        return GGUFHeader(settings, tensors)

    def _read_all(self, count: int, what: str, read: Callable[[str], Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(count):
            name = self._text(f"name of a {what}", MAX_NAME)
            if name in found:
                raise GGUFError(f"has two {what}s called {name!r}")
            found[name] = read(name)
        return found

    def _take(self, count: int, what: str) -> bytes:
        end = self._position + count
        if count > self._size - self._position:
            raise GGUFError(f"ends in the middle of its header ({what}): it is truncated or damaged")
        found, self._position = self._content[self._position : end], end
        return found

    def _read(self, kind: str, what: str) -> Any:
        return struct.unpack(f"<{kind}", self._take(struct.calcsize(f"<{kind}"), what))[0]

    def _count(self, what: str, smallest: int) -> int:
        count = self._read("Q", f"number of {what}")
        if count * smallest > self._size - self._position:
            raise GGUFError(f"claims to have {count:,} {what}, more than fit into it: it is truncated or damaged")
        return int(count)

    def _text(self, what: str, longest: int | None = None) -> str:
        length = self._read("Q", what)
        if longest is not None and length > longest:
            raise GGUFError(f"has a {what} of {length:,} bytes: it is damaged")
        return self._take(length, what).decode("utf-8", "replace")

    def _value(self, kind: int, what: str) -> Any:
        if kind in SCALARS:
            return self._read(SCALARS[kind], what)
        if kind == TEXT:
            return self._text(what)
        if kind != LIST:
            raise GGUFError(f"has a {what} of the unknown type {kind}: it is damaged")
        kind = self._read("I", what)
        if kind in SCALARS:
            count = self._count("values in a list", struct.calcsize(f"<{SCALARS[kind]}"))
            values = f"<{count}{SCALARS[kind]}"
            return list(struct.unpack(values, self._take(struct.calcsize(values), what)))
        if kind != TEXT:
            raise GGUFError(f"has a list of the unknown type {kind}: it is damaged")
        return [self._text(what) for _ in range(self._count("strings in a list", 8))]

    def _entry(self, name: str) -> tuple[tuple[int, ...], int, int]:
        num_dimensions = self._read("I", "tensor")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise GGUFError(f"gives the tensor {name!r} {num_dimensions} dimensions: it is damaged")
        shape = tuple(self._read("Q", "tensor") for _ in range(num_dimensions))
        return shape[::-1], self._read("I", "tensor"), self._read("Q", "tensor")

    def _place(self, name: str, entry: tuple[tuple[int, ...], int, int], start: int) -> GGUFTensor:
        shape, kind, offset = entry
        if kind not in BLOCKS:
            message = f"has the tensor {name!r} of type {kind}, which is not known here"
            raise GGUFError(message, "get the file in another quantization, such as Q8_0 or Q4_K_M")
        _, per_block, block_bytes = BLOCKS[kind]
        if not math.prod(shape) or shape[-1] % per_block:
            raise GGUFError(f"gives the tensor {name!r} the shape {list(shape)}, which {BLOCKS[kind][0]} cannot have")
        num_bytes = math.prod(shape) // per_block * block_bytes
        if start + offset + num_bytes > self._size:
            raise GGUFError(
                f"is too short: the tensor {name!r} ends at byte {start + offset + num_bytes:,}, and the file has "
                f"{self._size:,} bytes: it is truncated or damaged"
            )
        return GGUFTensor(shape, kind, start + offset, num_bytes)
