"""Validates data with a pydantic class, and rewrites its errors: with a line, a spelling suggestion and a fix."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ParamSpec, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from reinforge.config.document import ABSENT, Document, KeyPath, format_path, get_child
from reinforge.config.schema import Config
from reinforge.config.schema_walk import allowed_keys, find_description, find_keys, settable_keys
from reinforge.config.sections import iterate_components
from reinforge.errors import did_you_mean
from reinforge.registry import Registry
from reinforge.safe_text import is_secret_name
from reinforge.types.key_aliases import ConfigModel, describe_conflict

MAX_PLACES = 2  # a key with more places, such as `name`, says too little about which one is meant

NEAR = 0.75  # how similar a misspelled key must be to one of another place

OTHER_NAMES = {"lr": "learning_rate"}
"""Keys by their names in other libraries, which are too short to be found by their spelling."""

SET_BY_CALLS = "finetuning.run_configuration"  # a block that the command line fills, so it is never suggested

P = ParamSpec("P")
R = TypeVar("R")


def suggest_setting(document: Document, registry: Registry, path: KeyPath, allowed: Iterable[str] = ()) -> str | None:
    """Returns the path of the setting that an unknown key probably means; None: there is none, or too many.

    Settings of the document's components count as well, and keys below the unknown one must fit too. A key that is
    spelled alike and `allowed` in the same place is a better guess than one of another place, unless that has exactly
    this key.
    """
    tail = [OTHER_NAMES.get(str(key), str(key)) for key in (path[-1], *_list_single_keys(document.get(path)))]
    places = (_list_settings(), _list_component_settings(document, registry))
    for known in places:
        for end in range(len(tail), 0, -1):
            if (found := _find_place(".".join(tail[:end]), known, path)) is not None:
                return found
    if did_you_mean(tail[0], allowed):
        return None
    near = (_find_place(key, known, path) for known in places if (key := _find_near(tail[0], known)) is not None)
    return next((found for found in near if found is not None), None)


def _list_single_keys(value: Any) -> list[str]:
    """Returns the keys below a value as long as there is only one: `{"a": {"b": 1}}` -> ["a", "b"]."""
    keys = []
    while isinstance(value, dict) and len(value) == 1:
        key, value = next(iter(value.items()))
        keys.append(str(key))
    return keys


@cache
def _list_settings() -> tuple[str, ...]:
    """Returns the paths of all settings and blocks outside the components, those of `finetuning` first."""
    from reinforge.config.describe import iterate_fields  # for suggestions alone

    paths = _add_blocks(line.path for line in iterate_fields(Config))
    return tuple(
        sorted(
            (path for path in paths if not path.startswith(SET_BY_CALLS) and ".NAME" not in path),
            key=lambda path: not path.startswith("finetuning."),
        )
    )


def _list_component_settings(document: Document, registry: Registry) -> tuple[str, ...]:
    from reinforge.config.describe import iterate_fields

    paths: list[str] = []
    for key_path, kind, value in iterate_components(document):
        component = registry.find(kind, str(value.get("_type"))) if isinstance(value, dict) else None
        if component is not None:
            paths += [line.path for line in iterate_fields(component.config_type, f"{format_path(key_path)}.")]
    return tuple(path for path in paths if ".NAME." not in path)


def _add_blocks(paths: Iterable[str]) -> list[str]:
    """Returns paths, and before each the blocks that hold it; the schema's order is kept."""
    known: dict[str, None] = {}
    for path in paths:
        keys = path.split(".")
        known |= dict.fromkeys(".".join(keys[:end]) for end in range(1, len(keys) + 1))
    return list(known)


def _find_place(tail: str, places: Iterable[str], wrong: KeyPath) -> str | None:
    """Returns the place that ends with `tail`, the one nearest to the wrong place; None: none, or too many."""
    found = [place for place in places if f".{place}".endswith(f".{tail}") and place != format_path(wrong)]
    if len(found) > MAX_PLACES:
        return None
    return max(found, key=lambda place: (_count_shared(place.split("."), wrong), -place.count(".")), default=None)


def _find_near(key: str, places: Iterable[str]) -> str | None:
    keys = dict.fromkeys(place.rpartition(".")[2] for place in places)
    return next(iter(difflib.get_close_matches(key, list(keys), n=1, cutoff=NEAR)), None)


def _count_shared(keys: list[str], others: KeyPath) -> int:
    pairs = zip(keys, map(str, others), strict=False)
    return next((number for number, (one, other) in enumerate(pairs) if one != other), min(len(keys), len(others)))


def suggest_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Returns a function whose error for an unknown argument names the argument or the setting that was meant."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise TypeError(f"{function.__name__}() has no argument {name!r}{_suggest_argument(name, known)}")
        return function(*args, **kwargs)

    return call


def _suggest_argument(name: str, known: Iterable[str]) -> str:
    place = _find_place(OTHER_NAMES.get(name, name), _list_settings(), (name,))
    if place is not None and place.startswith("finetuning."):
        return f"; pass settings={format_as_python(place.removeprefix('finetuning.'))}"
    return did_you_mean(name, known)


def format_as_python(path: str) -> str:
    """Returns a setting as nested mappings: `policy.optimizer.eps` -> `{"policy": {"optimizer": {"eps": ...}}}`."""
    keys = path.split(".")
    return "".join(f'{{"{key}": ' for key in keys) + "..." + "}" * len(keys)


Model = TypeVar("Model", bound=BaseModel)

REPORTED_BY_REFERENCES = "enabled_needs_components"
"""The schema's own error type for what `config/sections.py` reports key by key, with a line for each."""

A_MAPPING = "a mapping of keys to values"
EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a string",
    "bytes_type": "a string",
    "path_type": "a path",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "frozen_set_type": "a list",
    "iterable_type": "a list",
    "dict_type": A_MAPPING,
    "mapping_type": A_MAPPING,
    "model_type": A_MAPPING,
    "model_attributes_type": A_MAPPING,
    "dataclass_type": A_MAPPING,
    "none_required": "nothing (null)",
    "callable_type": "a function",
    "greater_than": "a number > {gt}",
    "greater_than_equal": "a number ≥ {ge}",
    "less_than": "a number < {lt}",
    "less_than_equal": "a number ≤ {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "is_instance_of": "an instance of {class}",
    "string_pattern_mismatch": "a string that matches {pattern}",
    "string_too_short": "a string of at least {min_length} characters",
    "string_too_long": "a string of at most {max_length} characters",
    "too_short": "at least {min_length} items",
    "too_long": "at most {max_length} items",
}


@dataclass
class Validator:
    """Validates parts of a document and reports every problem; messages show `${VAR}`, not its value."""

    document: Document
    registry: Registry

    def validate(self, model: type[Model], path: KeyPath) -> Model | None:
        """Returns the validated instance of `model` for the mapping at a path, or None if problems were reported.

        Keys that are spelled by an alias get their own name in the document.
        """
        block = self.document.get_block(path)
        settings = {key: item for key, item in block.items() if key != "_type"} if path else block
        keys = find_keys(model, settings, path)
        if keys.aliases:
            self.rename_aliases(keys.aliases)
            return self.validate(model, path)
        for key, allowed in keys.unknown:
            self.report_unknown_key(key, allowed)
        try:
            instance = model.model_validate(settings)
        except ValidationError as error:
            self._report(error, model, settings, path)
            return None
        except Exception as error:  # noqa: BLE001  a validator of a user's class may raise anything; it is a problem of the file
            self.document.report(path, f"the validator of {model.__name__} failed: {type(error).__name__}: {error}")
            return None
        return None if keys.unknown else instance

    def rename_aliases(self, aliases: Mapping[KeyPath, type[ConfigModel]]) -> None:
        """Gives keys that are spelled by an alias their own name, with their marks and their text with `${VAR}`.

        An override takes precedence over another spelling of its key in the file. Two spellings of a key that are both
        in the file, or both set by `-o`, are reported as a problem.
        """
        document = self.document
        for path, config_type in aliases.items():
            block, name = document.get(path[:-1]), str(path[-1])
            key = config_type.key_aliases[name]
            new_path = (*path[:-1], key)
            if key in block:
                overrides, is_overridden = (isinstance(document.mark(each), str) for each in (path, new_path))
                if overrides == is_overridden:
                    document.report(path, describe_conflict(name, key, key), f'remove "{name}"')
                dropped = new_path if overrides and not is_overridden else path
                document.move(dropped, None)
                del block[dropped[-1]]
            items = [(key if each == name else each, value) for each, value in block.items()]
            block.clear()
            block.update(items)
            document.move(path, new_path)

    def report_unknown_key(self, path: KeyPath, allowed: Iterable[str]) -> None:
        """Reports an unknown key, with the setting that it means in another place, or the nearest allowed one."""
        from reinforge.config.toolkit_names import find_toolkit_key

        key, allowed = str(path[-1]), list(allowed)
        meant = suggest_setting(self.document, self.registry, path, allowed)
        means_below = meant is not None and f".{key}." in f".{meant}"  # `optimizer: {learning_rate: ...}`
        if not means_below and (problem := find_toolkit_key(path)) is not None:
            self.document.report_at(self.document.mark(path), problem)
            return
        if meant is not None:
            hint, fix = f', did you mean "{meant}"?', self._explain_move(path, meant)
        else:
            hint = did_you_mean(key, allowed)
            fix = f"rename it to {hint.split(chr(34))[1]}" if hint else "remove it"
        self.document.report(path, f'unknown key "{key}"{hint or ";"} allowed: {", ".join(allowed) or "none"}', fix)

    def _explain_move(self, path: KeyPath, meant: str) -> str:
        if isinstance(self.document.mark(path), str):
            return f"-o {meant} VALUE"
        if not self.document.name and meant.startswith("finetuning."):
            return f"pass settings={format_as_python(meant.removeprefix('finetuning.'))}"
        return f"move it to {meant}"

    def format_value(self, path: KeyPath, value: Any) -> str:
        """Returns a value for a message; never the value of a variable, and never what looks like a secret."""
        if path in self.document.placeholders:
            return f"the value of {self.document.placeholders[path]}"
        if value is None:
            return "nothing"
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, dict):
            return "a mapping"
        if isinstance(value, list | tuple):
            return f"a list of {len(value)}"
        if path and is_secret_name(str(path[-1])):
            return "a secret (not shown)"
        if isinstance(value, str):
            return f'"{value}"' if len(value) <= 60 else f'"{value[:57]}..."'
        return str(value) if isinstance(value, int | float) else type(value).__name__

    def _report(self, error: ValidationError, model: type[BaseModel], value: Any, path: KeyPath) -> None:
        by_path: dict[KeyPath, list[ErrorDetails]] = {}
        for details in error.errors(include_url=False):
            if details["type"] != REPORTED_BY_REFERENCES:
                by_path.setdefault(_find_data_path(details, value), []).append(details)
        for below, errors in by_path.items():
            if not self.document.has_problem((*path, *below)):
                self._report_one((*path, *below), below, errors, model)

    def _report_one(self, path: KeyPath, below: KeyPath, errors: list[ErrorDetails], model: type[BaseModel]) -> None:
        kind = errors[0]["type"]
        meaning = f" ({text})" if (text := find_description(model, below)) else ""
        if kind == "missing" and isinstance(path[-1], int):
            message, fix = "the list is too short", f"write at least {path[-1] + 1} items{meaning}"
            self.document.report(path[:-1], message, fix)
        elif kind in ("missing", "missing_argument", "missing_keyword_only_argument"):
            message = f'the required key "{path[-1]}" is missing'
            self.document.report(path, message, f'add "{path[-1]}"{meaning}', at=path[:-1])
        elif kind in ("extra_forbidden", "unexpected_keyword_argument"):
            self.report_unknown_key(path, _list_keys(model, below[:-1]))
        elif known := [details for details in errors if details["type"] in EXPECTED]:
            self._report_expected(path, known, meaning)
        else:
            self.document.report(path, self._reword(errors[0], path))

    def _report_expected(self, path: KeyPath, errors: list[ErrorDetails], meaning: str) -> None:
        first = errors[0]
        kind, value = first["type"], first["input"]
        expected = " or ".join(dict.fromkeys(_format_expected(details) for details in errors))
        hint, fix = "", f"write {expected}{meaning}" if meaning else ""
        if kind in ("literal_error", "enum"):
            choices = re.findall(r"'([^']*)'", first["ctx"]["expected"])  # pydantic's `'auto', 'cpu' or 'cuda'`
            hint = did_you_mean(str(value), choices)
        elif kind == "string_type" and isinstance(value, bool | int | float):
            fix = "put it in quotes"
        self.document.report(path, f"expected {expected}, found {self.format_value(path, value)}{hint}", fix)

    def _reword(self, details: ErrorDetails, path: KeyPath) -> str:
        cause = details.get("ctx", {}).get("error")
        if isinstance(cause, Exception):
            written = self.document.placeholders.get(path)
            return str(cause) if written is None else f"{written}: {cause}"
        message = details["msg"][:1].lower() + details["msg"][1:]
        return f"{message}, found {self.format_value(path, details['input'])}"


def _format_expected(details: ErrorDetails) -> str:
    bounds = {key: f"{bound:g}" if isinstance(bound, float) else bound for key, bound in details.get("ctx", {}).items()}
    return EXPECTED[details["type"]].format(**bounds)


def _find_data_path(details: ErrorDetails, value: Any) -> KeyPath:
    """Returns the path of an error in the data: pydantic's location without its names of union members."""
    path: list[str | int] = []
    location = details["loc"]
    for index, key in enumerate(location):
        below = get_child(value, key)
        if below is not ABSENT:
            value = below
        elif not (index == len(location) - 1 and details["type"].startswith("missing")):
            continue
        path.append(key)
    return tuple(path)


def _list_keys(model: type[BaseModel], path: KeyPath) -> list[str]:
    for key in path:
        field = allowed_keys(model).get(str(key))
        model = (_find_model(field.annotation) if field else None) or model
    return list(settable_keys(model))


def _find_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    args = getattr(annotation, "__args__", ())
    return next((found for arg in args if (found := _find_model(arg))), None)
