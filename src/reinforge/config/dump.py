"""A checked configuration -> YAML with every default that took effect, which `load_config` reads back."""

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

from reinforge.config.document import ABSENT, RESOLVERS, TAG, KeyPath, child
from reinforge.config.environment import escape

if TYPE_CHECKING:
    from reinforge.config.loaded_config import LoadedConfig


def dump_config(loaded: LoadedConfig) -> str:
    """Returns the resolved configuration as YAML.

    Text that came from `${VAR}` is written as it was in the file. A secret that stood in the file itself is written
    as a variable named after its path (`${LLMS_GPT_API_KEY}`), so that reading the YAML back says what to set instead
    of sending asterisks. A Python object is written as text that names it, `<python agent:reward>`.
    """
    plain = _Plain(loaded)
    data = plain.of_model(loaded.config, ())
    if plain.moved():  # a validator moved text with ${VAR} to another key: write it as it was there, too
        plain = _Plain(loaded, plain.moved())
        data = plain.of_model(loaded.config, ())
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Plain:
    """Turns a configuration into plain data.

    Args:
        loaded: The configuration.
        elsewhere: What variables held -> the text with `${VAR}`, for values that stand under another key than before.
    """

    def __init__(self, loaded: LoadedConfig, elsewhere: dict[str, str] | None = None):
        self.loaded, self.elsewhere = loaded, elsewhere or {}
        self.written: set[KeyPath] = set()

    def moved(self) -> dict[str, str]:
        """Returns the text with `${VAR}` that was written nowhere, by what it became."""
        left = {path: raw for path, raw in self.loaded.placeholders.items() if path not in self.written}
        became: dict[KeyPath, Any] = {path: reduce(child, path, self.loaded.data) for path in left}
        return {str(became[path]): raw for path, raw in left.items() if became[path] not in ("", ABSENT)}

    def of(self, value: Any, path: KeyPath) -> Any:
        """Returns one value as plain data."""
        raw = self.loaded.placeholders.get(path)
        if raw is not None:  # also where a validator made a list or an object of the text
            self.written.add(path)
            return _Raw(raw)
        if isinstance(value, enum.Enum):
            return self.of(value.value, path)
        if isinstance(value, SecretStr | SecretBytes | Secret):
            return self._secret(value.get_secret_value(), path)
        if isinstance(value, str | Path):
            return _Raw(self.elsewhere[str(value)]) if str(value) in self.elsewhere else escape(str(value))
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, BaseModel):
            return self.of_model(value, path)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            return {name: self.of(getattr(value, name), (*path, name)) for name in names}
        if isinstance(value, dict):
            return {str(key): self.of(item, (*path, str(key))) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.of(item, (*path, index)) for index, item in enumerate(value)]
        if isinstance(value, set | frozenset):
            return [self.of(item, (*path, index)) for index, item in enumerate(sorted(value, key=str))]
        return self._object(value, path)

    def of_model(self, model: BaseModel, path: KeyPath) -> dict[str, Any]:
        """Returns a model's fields, by the keys that a file would use, with the `_type` of a component first."""
        name = self.loaded.types.get(path)
        plain: dict[str, Any] = {"_type": name} if name else {}
        for field_name, field in type(model).model_fields.items():
            alias = field.validation_alias or field.alias
            choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
            key = next((choice for choice in choices if isinstance(choice, str)), field_name)
            plain[key] = self.of(getattr(model, field_name), (*path, key))
        for key, value in (model.__pydantic_extra__ or {}).items():
            plain[key] = self.of(value, (*path, key))
        return plain

    def _secret(self, value: Any, path: KeyPath) -> Any:
        if str(value) in self.elsewhere:
            return _Raw(self.elsewhere[str(value)])
        name = "_".join(str(key) for key in path).upper()
        return _Raw("${" + "".join(c if c.isascii() and c.isalnum() else "_" for c in name) + "}") if value else ""

    def _object(self, value: Any, path: KeyPath) -> Any:
        try:
            return self.of(to_jsonable_python(value), path)
        except PydanticSerializationError:
            named = value if hasattr(value, "__qualname__") else type(value)
            return f"<python {named.__module__}:{named.__qualname__}>"


class _Raw(str):
    """Text with `${VAR}` that is written as it is."""


class _Dumper(yaml.SafeDumper):
    """Puts text in quotes that YAML 1.1 or 1.2 would read as something else."""

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {  # type: ignore[misc]
        first: list(resolvers) for first, resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }

    def ignore_aliases(self, data: Any) -> bool:
        """Writes equal values in full, wherever they stand."""
        return True


for _tag, _pattern, _first in RESOLVERS:
    _Dumper.add_implicit_resolver(TAG + _tag, _pattern, _first)


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    """Writes prompts of several lines as a block, and line breaks that only YAML 1.1 knows as escapes."""
    style = '"' if re.search("[\x85\u2028\u2029]", text) else "|" if "\n" in text else None
    return dumper.represent_scalar(TAG + "str", str(text), style=style)


_Dumper.add_representer(str, _represent)
_Dumper.add_representer(_Raw, _represent)
