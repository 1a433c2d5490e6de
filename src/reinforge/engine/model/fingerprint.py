"""A hash of weights: two models that differ in one bit have different hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from reinforge.engine.model.causal_model import DEFAULT_ADAPTER, CausalModel


class Fingerprinter:
    """Hashes one model with each of its adapters; weights that never change are hashed once.

    Args:
        model: The model.
        trained: The trained parameters of all adapters.
    """

    def __init__(self, model: CausalModel, trained: Collection[nn.Parameter]):
        self.model = model
        ids = {id(parameter) for parameter in trained}
        self._frozen = {name: p for name, p in model.module.named_parameters() if id(p) not in ids}
        self._frozen_digest: bytes | None = None

    def compute(self) -> str:
        """Returns 16 hex digits of a SHA-256 over names and bytes of all parameters, inactive adapters excluded."""
        own = f".{self.model.adapter}."  # so that an adapter has the same hash under every name
        trained = {name.replace(own, f".{DEFAULT_ADAPTER}."): p for name, p in self.model.trained_parameters.items()}
        if self._frozen_digest is None:
            self._frozen_digest = _hash_parameters(self._frozen) if self._frozen else b""
        return hashlib.sha256(self._frozen_digest + _hash_parameters(trained)).hexdigest()[:16]


def _hash_parameters(parameters: Mapping[str, Tensor]) -> bytes:
    digest = hashlib.sha256()
    for name, parameter in sorted(parameters.items()):
        digest.update(name.encode())
        content: Any = parameter.detach().cpu().contiguous().view(torch.uint8).numpy()
        digest.update(content)
    return digest.digest()
