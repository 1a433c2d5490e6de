"""A file of the NeMo Agent Toolkit's kind trains a tiny model, with the components that an installed package has."""

import sys

import pytest

from reinforge.compat import nat

PLUGIN = """
from nat.builder.builder import Builder, EvalBuilder
from nat.builder.evaluator import EvaluatorInfo
from nat.builder.framework_enum import LLMFrameworkEnum
from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import register_evaluator, register_function
from nat.data_models.component_ref import LLMRef
from nat.data_models.evaluator import EvalOutputItem, EvaluatorBaseConfig
from nat.data_models.function import FunctionBaseConfig
from nat.eval.evaluator.base_evaluator import BaseEvaluator


class SayConfig(FunctionBaseConfig, name="test_nat_say"):
    player_model: LLMRef


@register_function(config_type=SayConfig, framework_wrappers=[LLMFrameworkEnum.OPENAI])
async def say(config: SayConfig, builder: Builder):
    llm = await builder.get_llm(config.player_model, wrapper_type=LLMFrameworkEnum.OPENAI)

    async def answer(question: str) -> str:
        reply = await llm.chat.completions.create(messages=[{"role": "user", "content": question}], max_tokens=4)
        return reply.choices[0].message.content

    yield FunctionInfo.from_fn(answer, description="Says something.")


class Vowels(BaseEvaluator):
    async def evaluate_item(self, item):
        share = sum(letter in "aeiou" for letter in item.output_obj) / max(1, len(item.output_obj))
        return EvalOutputItem(id=item.id, score=share, reasoning="share of vowels")


class VowelsConfig(EvaluatorBaseConfig, name="test_nat_vowels"):
    pass


@register_evaluator(config_type=VowelsConfig)
async def vowels(config: VowelsConfig, builder: EvalBuilder):
    evaluator = Vowels(builder.get_max_concurrency())
    yield EvaluatorInfo(config=config, evaluate_fn=evaluator.evaluate, description="Share of vowels")
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    folder = tmp_path / "site"
    info = folder / "test_nat_plugin-1.dist-info"
    info.mkdir(parents=True)
    (folder / "test_nat_plugin.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: test-nat-plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[nat.components]\nplugin = test_nat_plugin\n")
    monkeypatch.syspath_prepend(folder)
    yield
    nat.uninstall()
    sys.modules.pop("test_nat_plugin", None)


def test_a_plugin_of_the_toolkit_trains(project, plugin):
    project.set("workflow", {"_type": "test_nat_say", "player_model": "agent"})
    project.set("eval.evaluators", {"vowels": {"_type": "test_nat_vowels"}})
    project.set("trainers.trainer", {"_type": "openpipe_art_trainer"})
    project.set("trajectory_builders.builder", {"_type": "openpipe_art_traj_builder", "num_generations": 8})
    project.set("trajectory_builders.builder.examples_per_epoch", 16)
    project.set("finetuning.num_epochs", 2)
    result = project.finetune("--compat", "nat")
    assert result.exit_code == 0, result.output
    assert len(project.summary["policy_versions"]) == 3, "the base and one version per epoch"
