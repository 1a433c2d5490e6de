"""Versions of what computes, on this machine and on each node of a cluster: with others, workers make other weights."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from reinforge.version import __version__

LIBRARIES = ("torch", "transformers", "peft", "tokenizers", "safetensors", "numpy")
CODE = ("engine", "types")
"""Packages of reinforge that a worker computes with; two checkouts may have one version and differ there."""


def list_versions() -> dict[str, str]:
    """Returns the version of each library by name, and a hash of our own code."""
    versions = {"reinforge": __version__}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {**versions, "code of reinforge": _hash_code()}


def find_differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """Returns what differs between two machines; builds of one version, such as for a CPU and a GPU, may differ.

    Example: {"torch": "2.13.0+cpu"}, {"torch": "2.12.0+cu130"} -> ["torch 2.12.0+cu130 instead of 2.13.0+cpu"]
    """
    return [
        f"{name} {there.get(name, 'not installed')} instead of {version}"
        for name, version in here.items()
        if there.get(name, "").partition("+")[0] != version.partition("+")[0]
    ]


@cache
def _hash_code() -> str:
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(path for name in CODE for path in (root / name).rglob("*.py")):
        digest.update(f"{file.relative_to(root).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
