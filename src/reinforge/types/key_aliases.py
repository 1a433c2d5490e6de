"""The base of every configuration class: a key may have another spelling, or an old name that still works."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

from pydantic import BaseModel, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

logger = logging.getLogger(__name__)


class ConfigModel(BaseModel):
    """A configuration class whose keys may have further spellings.

    Example:
        class BatchConfig(ConfigModel):
            renamed_keys = {"passes": "num_iterations"}
            num_iterations: int = 1

        BatchConfig(passes=2).num_iterations == 2  # and one warning that names both

    Attributes:
        key_aliases: Another spelling -> the key; both are fine to write.
        renamed_keys: Old name -> the key; accepted for one release, with a warning.
    """

    key_aliases: ClassVar[Mapping[str, str]] = {}
    renamed_keys: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def old_names(cls) -> dict[str, str]:
        return cls._collect("renamed_keys")

    @classmethod
    def other_spellings(cls) -> dict[str, str]:
        return {**cls._collect("key_aliases"), **cls.old_names()}

    @classmethod
    def _collect(cls, table: str) -> dict[str, str]:
        merged: dict[str, str] = {}
        for base in reversed(cls.__mro__):
            merged.update(vars(base).get(table, {}))
        return {name: key for name, key in merged.items() if key in cls.model_fields and name not in cls.model_fields}

    @classmethod
    def with_current_keys(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a mapping with each key under its current name; warns about old names.

        Raises:
            ValueError: The data has two spellings of one key.
        """
        spellings, old_names = cls.other_spellings(), cls.old_names()
        renamed: dict[str, Any] = {}
        written: dict[str, str] = {}
        for name, value in data.items():
            key = spellings.get(name, name)
            if key in written:
                raise ValueError(describe_conflict(written[key], name, key))
            if name in old_names:
                warn_renamed(f"{cls.__name__}.{name}", key)
            renamed[key], written[key] = value, name
        return renamed

    @model_validator(mode="before")
    @classmethod
    def _accept_other_spellings(cls, data: Any) -> Any:
        if isinstance(data, dict) and not cls.other_spellings().keys().isdisjoint(data):
            return cls.with_current_keys(data)
        return data

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Returns the schema with every spelling; old names are marked as deprecated."""
        reference = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        properties, old_names = schema.get("properties", {}), cls.old_names()
        for name, key in cls.other_spellings().items():
            note = {"deprecated": True, "description": f"Old name of {key}."} if name in old_names else {}
            properties[name] = {**properties[key], **note}
        return reference


def describe_conflict(first: str, second: str, key: str) -> str:
    """Returns the message for data with two spellings of `key`."""
    return f'"{first}" and "{second}" are the same key; write "{key}" only'


@cache
def warn_renamed(path: str, key: str, location: str = "") -> None:
    """Logs once that a key has a new name.

    Args:
        path: The old key, with the blocks above it: `finetuning.policy.max_batch`.
        key: Its new name, without them.
        location: Where it is written, `file:line:column`; may be empty.
    """
    new_path = ".".join([*path.split(".")[:-1], key])
    head = f"{location} " if location else ""
    logger.warning("%s%s is now %s; the old name stops working in the next release", head, path, new_path)
