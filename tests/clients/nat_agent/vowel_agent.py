"""An agent of the NeMo Agent Toolkit, and the evaluator that rewards the share of vowels in what it says."""

from nat.builder.builder import Builder, EvalBuilder
from nat.builder.evaluator import EvaluatorInfo
from nat.builder.framework_enum import LLMFrameworkEnum
from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import register_evaluator, register_function
from nat.data_models.component_ref import LLMRef
from nat.data_models.evaluator import EvalInputItem, EvaluatorBaseConfig
from nat.data_models.function import FunctionBaseConfig
from nat.plugins.eval.data_models.evaluator_io import EvalOutputItem
from nat.plugins.eval.evaluator.base_evaluator import BaseEvaluator


class VowelAgentConfig(FunctionBaseConfig, name="vowel_agent"):
    llm_name: LLMRef


@register_function(config_type=VowelAgentConfig, framework_wrappers=[LLMFrameworkEnum.LANGCHAIN])
async def vowel_agent(config: VowelAgentConfig, builder: Builder):
    llm = await builder.get_llm(config.llm_name, wrapper_type=LLMFrameworkEnum.LANGCHAIN)
    llm = llm.bind(logprobs=True)  # a reply without log-probs is not trained

    async def reply(question: str) -> str:
        message = await llm.ainvoke(question)
        return str(message.content)

    yield FunctionInfo.from_fn(reply, description="Says something.")


class VowelsConfig(EvaluatorBaseConfig, name="vowels"):
    pass


class Vowels(BaseEvaluator):
    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        text = str(item.output_obj)
        score = sum(letter in "aeiou" for letter in text) / max(1, len(text))
        return EvalOutputItem(id=item.id, score=score, reasoning={"text": text})


@register_evaluator(config_type=VowelsConfig)
async def vowels(config: VowelsConfig, builder: EvalBuilder):
    evaluator = Vowels(builder.get_max_concurrency(), tqdm_desc="vowels")
    yield EvaluatorInfo(config=config, evaluate_fn=evaluator.evaluate, description="Share of vowels.")
