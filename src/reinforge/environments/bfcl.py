"""Function calls of the Berkeley Function-Calling Leaderboard: `environment: bfcl:simple_python`, or several, `a+b`.

The package's checker decides. It is imported without the table of models beside it, which imports every model's client;
the checker asks that table only whether function names have `_` for `.`, as they do in tools.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from reinforge.config.schema import EnvironmentConfig
from reinforge.dialects.text_tools import write_calls
from reinforge.errors import ConfigError, Problem, did_you_mean
from reinforge.interfaces import Environment, EnvironmentSource
from reinforge.registry import register_environment
from reinforge.types.environment import Observation, Reply, StepResult, ToolUse
from reinforge.types.evaluation import EvalInputItem

PACKAGE, FILE = "bfcl_eval", "BFCL_v4_{}.json"
CHECKED = (
    *("simple_python", "multiple", "parallel", "parallel_multiple"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"),
)
"""Categories whose calls the checker compares with the possible answers."""
NO_CALL = ("irrelevance", "live_irrelevance")  # categories in which no function fits, so that any call is wrong
Calls = list[dict[str, dict[str, Any]]]  # calls as the checker reads them: `[{"math_factorial": {"number": 5}}]`


class BfclConfig(EnvironmentConfig, name="bfcl"):
    """Function calls of the Berkeley Function-Calling Leaderboard; needs the package bfcl-eval."""

    install: ClassVar[str] = "pip install --no-deps bfcl-eval"
    license: ClassVar[str] = "Apache-2.0"
    metrics: ClassVar[tuple[str, ...]] = ("solved",)

    @classmethod
    def list_names(cls) -> list[str]:
        cls.find_package(PACKAGE, "bfcl-eval")
        return [*CHECKED, *NO_CALL]

    name: str = Field(description="A category, or several joined by +.")
    reward: Literal["exact", "partial"] = Field(
        default="exact",
        description="`exact`: 1 if the checker accepts the calls, else 0; `partial`: half for the right function, half "
        "for the share of right arguments, on average over the calls. `solved` is the checker's in both.",
    )


@register_environment(config_type=BfclConfig)
class FunctionCalls(EnvironmentSource):
    """Rows such as `{"id": "simple_python_1", "question": ..., "answer": "f(x=1)", "possible_answers": ..., ...}`."""

    def __init__(self, config: BfclConfig):
        self.config, self.folder = config, config.find_package(PACKAGE, "bfcl-eval") / "data"
        self.names = config.name.split("+")
        known = (*CHECKED, *NO_CALL)
        for name in self.names:
            if name not in known:
                message = f'"{name}" is not a category that is supported{did_you_mean(name, known)}'
                raise ConfigError(Problem("name", message, f"use one of {', '.join(known)}"))
        self.check = load_checker()

    def load(self) -> list[EvalInputItem]:
        return [item for name in self.names for item in self._load_category(name)]

    def _load_category(self, name: str) -> list[EvalInputItem]:
        file = FILE.format(name)
        answers = {} if name in NO_CALL else _read_rows(self.folder / "possible_answer" / file)
        rows = [
            {
                "id": row_id,
                "question": entry["question"][0][-1]["content"],
                "answer": write_calls(choose_calls(answers[row_id]["ground_truth"])) if answers else None,
                "possible_answers": answers[row_id]["ground_truth"] if answers else [],
                "task": name,
                "messages": entry["question"][0],
                "functions": entry["function"],
            }
            for row_id, entry in _read_rows(self.folder / file).items()
        ]
        return list(map(EvalInputItem.from_row, rows))

    def create(self) -> FunctionCallTask:
        return FunctionCallTask(self)


class FunctionCallTask(Environment):
    """One question and the functions that may answer it; the calls of the first reply are scored."""

    def __init__(self, source: FunctionCalls):
        self.source = source

    async def reset(self, item: EvalInputItem, seed: int) -> Observation:
        self.row = item.full_dataset_entry
        return Observation(self.row["messages"], build_tools(self.row["functions"]))

    async def step(self, reply: Reply) -> StepResult:
        given: Calls = [{call.name: call.arguments} for call in reply.tool_calls]
        if self.row["task"] in NO_CALL:
            solved = not given
            return StepResult(reward=float(solved), done=True, info={"solved": solved, "called": not solved})
        expected = self.row["possible_answers"]
        verdict = self.source.check(self.row["functions"], given, expected, self.row["task"])
        solved = bool(verdict["valid"])
        partial = 1.0 if solved else self._score(given, expected)
        info = {"solved": solved, "called": bool(given), "partial": partial, "error": str(verdict["error"])}
        return StepResult(
            reward=partial if self.source.config.reward == "partial" else float(solved), done=True, info=info
        )

    def _score(self, given: Calls, expected: Calls) -> float:
        """Returns the mean over the expected calls, each compared with the best call that is left, and the surplus."""
        left, total = list(given), 0.0
        for call in expected:
            scores = [self._compare(each, call) for each in left]
            if scores and max(scores) > 0:
                left.pop(best := scores.index(max(scores)))
                total += scores[best]
        return total / max(len(given), len(expected))

    def _compare(self, given: dict[str, Any], expected: dict[str, Any]) -> float:
        (name, arguments), (expected_name, answers) = *given.items(), *expected.items()
        if name != to_tool_name(expected_name):
            return 0.0
        function = next(each for each in self.row["functions"] if each["name"] == expected_name)
        wanted = arguments.keys() | {key for key, values in answers.items() if "" not in values}
        right = [
            key for key in wanted & arguments.keys() & answers.keys() if self._is_right(function, key, given, answers)
        ]
        return 0.5 + 0.5 * (len(right) / len(wanted) if wanted else 1.0)

    def _is_right(self, function: Any, key: str, given: dict[str, Any], answers: Any) -> bool:
        """Lets the checker judge one argument alone."""
        (name, arguments), parameters = *given.items(), function["parameters"]["properties"]
        alone = {**function, "parameters": {"properties": {key: parameters.get(key)}, "required": []}}
        return (
            key in parameters
            and self.source.check(
                [alone], [{name: {key: arguments[key]}}], [{function["name"]: {key: answers[key]}}], "simple"
            )["valid"]
        )


def choose_calls(answers: Calls) -> list[ToolUse]:
    """Returns one of the right answers: the first value of each argument, without the arguments that may be left out.

    Example: `[{"math.power": {"base": [2.0, 2], "to": ["", 3]}}]` -> `[ToolUse("0", "math_power", {"base": 2.0})]`.
    """
    return [
        ToolUse(
            str(number),
            to_tool_name(name),
            _choose_first({key: each for key, each in values.items() if "" not in each}),
        )
        for number, answer in enumerate(answers)
        for name, values in answer.items()
    ]


def _choose_first(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _choose_first(next((one for one in each if one != ""), "") if isinstance(each, list) else each)
            for key, each in value.items()
        }
    return [_choose_first(each) for each in value] if isinstance(value, list) else value


def build_tools(functions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns functions as tools: `math.factorial` becomes `math_factorial`, and the type `dict` `object`."""
    return [
        {
            "type": "function",
            "function": {
                "name": to_tool_name(each["name"]),
                "description": each["description"],
                "parameters": _to_schema(each["parameters"]),
            },
        }
        for each in functions
    ]


def to_tool_name(name: str) -> str:
    return name.replace(".", "_")


def _to_schema(described: Mapping[str, Any]) -> dict[str, Any]:
    kinds = importlib.import_module(f"{PACKAGE}.constants.type_mappings").GORILLA_TO_OPENAPI
    schema = {**described, "type": kinds.get(described.get("type"), "string")}
    if "properties" in described:
        schema["properties"] = {name: _to_schema(each) for name, each in described["properties"].items()}
    if "items" in described:
        schema["items"] = _to_schema(described["items"])
    return schema


def load_checker() -> Callable[[Any, Calls, Any, str], dict[str, Any]]:
    """Returns the package's `check(functions, calls, possible_answers, category)`."""
    table = types.ModuleType(f"{PACKAGE}.constants.model_config")
    table.MODEL_CONFIG_MAPPING = {"tools": types.SimpleNamespace(underscore_to_dot=True)}  # type: ignore[attr-defined]
    sys.modules.setdefault(table.__name__, table)
    try:
        checker = importlib.import_module(f"{PACKAGE}.eval_checker.ast_eval.ast_checker")
    except ModuleNotFoundError as error:
        message = f"the checker of bfcl-eval needs the package {error.name}"
        raise ConfigError(Problem("_type", message, f"pip install {error.name}")) from None
    python = checker.Language.PYTHON
    return lambda functions, calls, answers, category: checker.ast_checker(
        functions, calls, answers, python, category, "tools"
    )


def _read_rows(path: Path) -> dict[str, Any]:
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {row["id"]: row for row in rows}
