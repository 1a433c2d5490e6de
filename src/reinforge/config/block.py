"""The base of the blocks of a configuration that are no components."""

from __future__ import annotations

from pydantic import ConfigDict

from reinforge.types.key_aliases import ConfigModel


class Block(ConfigModel):
    """Base of the blocks; rejects unknown keys."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
