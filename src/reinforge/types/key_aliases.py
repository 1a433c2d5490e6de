"""The base of every configuration class: a key may have a second spelling, that of another library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_before_validator_function


class ConfigModel(BaseModel):
    """A configuration class whose keys may have another spelling.

    Example:
        class LoRAConfig(ConfigModel):
            key_aliases = {"rank": "r"}
            r: int = 16

        LoRAConfig(rank=8).r == 8
    """

    key_aliases: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Returns the schema of the class; one with aliases resolves them before everything else."""
        reference = handler(source)
        if cls.key_aliases:
            schema: Any = handler.resolve_ref_schema(reference)
            name, inner = schema.get("ref"), {key: part for key, part in schema.items() if key != "ref"}
            schema.clear()
            schema.update(no_info_before_validator_function(cls._resolve_aliases, inner, ref=name))
        return reference

    @classmethod
    def _resolve_aliases(cls, data: Any) -> Any:
        if not isinstance(data, dict) or cls.key_aliases.keys().isdisjoint(data):
            return data
        resolved: dict[str, Any] = {}
        written: dict[str, str] = {}
        for name, value in data.items():
            key = cls.key_aliases.get(name, name)
            if key in written:
                raise ValueError(describe_conflict(written[key], name, key))
            resolved[key], written[key] = value, name
        return resolved

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Returns the schema with every spelling."""
        reference = handler(core_schema)
        properties = handler.resolve_ref_schema(reference).get("properties", {})
        properties.update({name: properties[key] for name, key in cls.key_aliases.items()})
        return reference


def describe_conflict(first: str, second: str, key: str) -> str:
    """Returns the message for data with two spellings of `key`."""
    return f'"{first}" and "{second}" are the same key; write "{key}" only'
