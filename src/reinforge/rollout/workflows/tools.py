"""Python functions as tools: the JSON schema from the signature, the description from the docstring.

def look_up(word: str, limit: int = 3) -> list[str]:                 {"name": "look_up",
    '''Finds entries.                                                 "description": "Finds entries.",
                                                                      "parameters": {"type": "object", "properties":
    Args:                                                                {"word": {"type": "string",
        word: What to look for.                                                    "description": "What to ..."},
    '''                                                                   "limit": {"type": "integer", "default": 3}},
                                                                          "required": ["word"], ...}}
"""

from __future__ import annotations

import contextvars
import inspect
import json
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_jsonable_python

from reinforge.bounded import replace_surrogates
from reinforge.errors import ConfigError, ContextOverflow, PolicyFailure, Problem, ReinforgeError, describe_error
from reinforge.limits import get_limits
from reinforge.rollout.context import EpisodeContext
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.types.evaluation import EvalInputItem

TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # names of functions in OpenAI's API


class ToolFailed(Exception):
    """A tool failed; the message is its result, so that the policy can react."""


class AgentTool(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def definition(self) -> dict[str, Any]:
        """The tool in OpenAI's format."""

    async def call(self, arguments: dict[str, Any], item: EvalInputItem, context: EpisodeContext) -> str:
        """Returns the result.

        Raises:
            ToolFailed: The arguments are wrong, or the tool failed.
        """


def define_tool(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


@dataclass(frozen=True)
class PythonTool:
    function: Callable[..., Any]
    name: str
    arguments_type: type[BaseModel]  # each field's alias is the parameter
    given: dict[str, type]  # parameters that the run fills in
    definition: dict[str, Any]

    async def call(self, arguments: dict[str, Any], item: EvalInputItem, context: EpisodeContext) -> str:
        """Returns the function's result as text; a plain function runs in a thread."""
        values = self._validate(arguments)
        available = {EvalInputItem: item, EpisodeContext: context}
        values |= {name: available[kind] for name, kind in self.given.items()}
        try:
            if inspect.iscoroutinefunction(self.function):
                return format_result(await self.function(**values))
            copied = contextvars.copy_context()
            return format_result(
                await run_in_daemon_thread(lambda: copied.run(self.function, **values), f"tool-{self.name}")
            )
        except (PolicyFailure, ContextOverflow, ReinforgeError):
            raise
        except Exception as error:
            raise ToolFailed(describe_error(error)) from error

    def _validate(self, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            valid = self.arguments_type.model_validate(arguments)
        except ValidationError as error:
            reasons = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
            raise ToolFailed(f"wrong arguments: {'; '.join(reasons)}") from None
        fields = type(valid).model_fields
        return {str(field.alias): getattr(valid, key) for key, field in fields.items() if key in valid.model_fields_set}


class _SchemaWithoutTitles(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def build_python_tool(function: Any, path: str = "") -> PythonTool:
    """Returns a Python function as a tool.

    Parameters of the types `EvalInputItem` and `EpisodeContext` are filled in by the run; the policy does not see them.

    Raises:
        ConfigError: It is not a function, or a parameter has no place in a JSON schema.
    """
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(Problem(path, f"{function!r} is not a function", "name a function"))
    name = getattr(function, "__name__", type(function).__name__)
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = list(inspect.signature(function).parameters.values())
    except (NameError, TypeError, ValueError) as error:
        raise ConfigError(Problem(path, f"the annotations of {name} cannot be read: {error}")) from None
    description, texts = parse_docstring(inspect.getdoc(function) or "")
    fields, given = dict[str, Any](), dict[str, type]()
    for number, parameter in enumerate(parameters):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            message = f"{name} has the parameter {parameter}, which no JSON schema can describe"
            raise ConfigError(Problem(path, message, "write each parameter with its name and type"))
        hint = hints.get(parameter.name, Any)
        if hint in (EvalInputItem, EpisodeContext):
            given[parameter.name] = hint
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[f"argument_{number}"] = (
            hint,
            Field(default=default, alias=parameter.name, description=texts.get(parameter.name)),
        )
    try:
        arguments_type = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        schema = arguments_type.model_json_schema(schema_generator=_SchemaWithoutTitles)
    except (PydanticUserError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(Problem(path, f"the parameters of {name} have no JSON schema: {reason}")) from None
    schema.pop("title", None)
    return PythonTool(function, name, arguments_type, given, define_tool(name, description, schema))


_SECTION = re.compile(r"(?m)^(Args|Arguments|Parameters|Returns|Yields|Raises|Example|Examples|Note|Notes):\s*$")
_PARAMETER = re.compile(r"(?P<name>\*{0,2}\w+)\s*(?:\([^)]*\))?\s*:\s*(?P<text>.*)")


def parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Returns the description and the text of each parameter of a Google-style docstring."""
    head, *sections = _SECTION.split(text)
    texts = dict[str, str]()
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        if title not in ("Args", "Arguments", "Parameters"):
            continue
        lines = inspect.cleandoc(body).splitlines()
        name = ""
        for line in lines:
            match = _PARAMETER.fullmatch(line) if not line.startswith(" ") else None
            if match is not None:
                name, texts[match["name"]] = match["name"], match["text"].strip()
            elif name:
                texts[name] = f"{texts[name]} {line.strip()}".strip()
    return head.strip(), texts


def format_result(value: Any) -> str:
    """Returns a tool's result as text: a string unchanged, anything else as JSON; a long one is cut."""
    text = value if isinstance(value, str) else json.dumps(to_jsonable_python(value, fallback=str), ensure_ascii=False)
    text, most = replace_surrogates(text), get_limits().tool_result_chars
    return text if len(text) <= most else f"{text[:most]}\n[cut after {most} of {len(text)} characters]"
