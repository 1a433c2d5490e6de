"""The page about rewards: its configuration is valid, and its example prints what the page shows."""

import yaml

from reinforge.cli.reward import ATTACKS
from reinforge.config.loader import build_config
from reinforge.evaluation.evaluators.relative_judge import RelativeJudge
from reinforge.trainer.reward_test import RewardTestOptions, run_reward_test
from reinforge.trainer.setup.components import ComponentBuilder
from tests.core.contract.test_docs import blocks
from tests.generated import DOCS

PAGE = DOCS / "rewards.md"


async def test_the_configuration_of_the_page_builds_its_judge(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    (text,) = blocks(PAGE, "yaml")
    settings = yaml.safe_load(text)
    name = settings["finetuning"]["reward_function"]["name"]
    async with ComponentBuilder(build_config(settings)) as builder:
        assert isinstance(await builder.get_evaluator(name), RelativeJudge)


async def test_the_example_prints_what_the_page_shows():
    (code,) = blocks(PAGE, "python")
    names = {}
    exec(code, names)
    rows = [
        {"id": str(i), "question": f"What is {i} times {i + 13}?", "answer": str(i * (i + 13))} for i in range(4, 8)
    ]
    evaluators = {"found": {"_type": "python", "function": names["found"]}}
    config = build_config({"eval": {"general": {"dataset": {"_type": "rows", "rows": rows}}, "evaluators": evaluators}})
    printed = (await run_reward_test(config, RewardTestOptions(limit=4))).format_lines()
    shown = PAGE.read_text(encoding="utf-8").split("$ reinforge reward test")[1].split("```")[0].splitlines()
    assert len(shown) > 10
    assert [line for line in shown[1:] if line != "..." and line not in printed] == []


def test_every_attack_is_in_the_table():
    table = PAGE.read_text(encoding="utf-8")
    assert [name for name in ATTACKS if f"| `{name}` | " not in table] == []
