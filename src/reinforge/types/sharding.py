"""How several processes hold the model that they train together."""

from __future__ import annotations

from typing import Literal

Sharding = Literal["auto", "replicate", "full"]
"""`replicate`: each process trains a whole copy. `full`: weights, gradients and optimizer state are divided among the
processes while they train. `auto`: `full` only if one of them has too little memory for the whole."""
