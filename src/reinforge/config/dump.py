"""A validated configuration -> YAML that spells out every default; `load_config` reads it back."""

from __future__ import annotations

import dataclasses
import enum
import re
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import yaml
from pydantic import AliasChoices, BaseModel, Secret, SecretBytes, SecretStr
from pydantic_core import PydanticSerializationError, to_jsonable_python

from reinforge.config.document import ABSENT, RESOLVERS, TAG, KeyPath, get_child
from reinforge.config.environment import escape

if TYPE_CHECKING:
    from reinforge.config.loaded_config import LoadedConfig


def dump_config(loaded: LoadedConfig) -> str:
    """Returns the resolved configuration as YAML.

    A value that used `${VAR}` keeps the variable. A secret written in the file itself becomes a variable named after
    its path (`${LLMS_GPT_API_KEY}`): loading the YAML then asks for that variable instead of using asterisks as the
    key. A Python object becomes text that names it, `<python agent:reward>`.
    """
    converter = _PlainConverter(loaded)
    data = converter.convert_model(loaded.config, ())
    if moved := converter.find_moved():  # a validator moved text with ${VAR} to another key: keep the variable there
        data = _PlainConverter(loaded, moved).convert_model(loaded.config, ())
    return yaml.dump(data, Dumper=_ConfigDumper, sort_keys=False, allow_unicode=True, width=120)


class _PlainConverter:
    """Turns a configuration into plain data.

    Args:
        loaded: The configuration.
        moved: Expanded value -> its text with `${VAR}`, for values that a validator moved to another key.
    """

    def __init__(self, loaded: LoadedConfig, moved: dict[str, str] | None = None):
        self.loaded, self.moved = loaded, moved or {}
        self.seen: set[KeyPath] = set()

    def find_moved(self) -> dict[str, str]:
        """Returns the texts with `${VAR}` whose key was not converted, by their expanded value."""
        left = {path: raw for path, raw in self.loaded.placeholders.items() if path not in self.seen}
        expanded: dict[KeyPath, Any] = {path: reduce(get_child, path, self.loaded.data) for path in left}
        return {str(expanded[path]): raw for path, raw in left.items() if expanded[path] not in ("", ABSENT)}

    def convert(self, value: Any, path: KeyPath) -> Any:
        """Returns one value as plain data."""
        raw = self.loaded.placeholders.get(path)
        if raw is not None:  # also if a validator turned the text into a list or an object
            self.seen.add(path)
            return _Raw(raw)
        if isinstance(value, enum.Enum):
            return self.convert(value.value, path)
        if isinstance(value, SecretStr | SecretBytes | Secret):
            return self._convert_secret(value.get_secret_value(), path)
        if isinstance(value, str | Path):
            return _Raw(self.moved[str(value)]) if str(value) in self.moved else escape(str(value))
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, BaseModel):
            return self.convert_model(value, path)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            return {name: self.convert(getattr(value, name), (*path, name)) for name in names}
        if isinstance(value, dict):
            return {str(key): self.convert(item, (*path, str(key))) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.convert(item, (*path, index)) for index, item in enumerate(value)]
        if isinstance(value, set | frozenset):
            return [self.convert(item, (*path, index)) for index, item in enumerate(sorted(value, key=str))]
        return self._convert_object(value, path)

    def convert_model(self, model: BaseModel, path: KeyPath) -> dict[str, Any]:
        """Returns a model's fields under the keys that a file uses; the `_type` of a component comes first."""
        name = self.loaded.types.get(path)
        plain: dict[str, Any] = {"_type": name} if name else {}
        for field_name, field in type(model).model_fields.items():
            alias = field.validation_alias or field.alias
            choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
            key = next((choice for choice in choices if isinstance(choice, str)), field_name)
            plain[key] = self.convert(getattr(model, field_name), (*path, key))
        for key, value in (model.__pydantic_extra__ or {}).items():
            plain[key] = self.convert(value, (*path, key))
        return plain

    def _convert_secret(self, value: Any, path: KeyPath) -> Any:
        if str(value) in self.moved:
            return _Raw(self.moved[str(value)])
        name = "_".join(str(key) for key in path).upper()
        return _Raw("${" + "".join(c if c.isascii() and c.isalnum() else "_" for c in name) + "}") if value else ""

    def _convert_object(self, value: Any, path: KeyPath) -> Any:
        try:
            return self.convert(to_jsonable_python(value), path)
        except PydanticSerializationError:
            source = value if hasattr(value, "__qualname__") else type(value)
            return f"<python {source.__module__}:{source.__qualname__}>"


class _Raw(str):
    """Text with `${VAR}`, written without escaping."""


class _ConfigDumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as something else."""

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {  # type: ignore[misc]
        first: list(resolvers) for first, resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }

    def ignore_aliases(self, data: Any) -> bool:
        """Writes repeated values in full instead of as aliases."""
        return True


for _tag, _pattern, _first in RESOLVERS:
    _ConfigDumper.add_implicit_resolver(TAG + _tag, _pattern, _first)


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    """Writes multi-line text as a block, and line breaks that only YAML 1.1 has as escapes."""
    style = '"' if re.search("[\x85\u2028\u2029]", text) else "|" if "\n" in text else None
    return dumper.represent_scalar(TAG + "str", str(text), style=style)


_ConfigDumper.add_representer(str, _represent)
_ConfigDumper.add_representer(_Raw, _represent)
