"""Steps and their usage, in the shapes that components of the NeMo Agent Toolkit read and write."""

import pytest
from pydantic import ValidationError

from reinforge.finetuning import (
    IntermediateStep,
    IntermediateStepCategory,
    IntermediateStepPayload,
    IntermediateStepType,
    LLMFrameworkEnum,
    TokenUsageBaseModel,
    TraceMetadata,
    UsageInfo,
)


@pytest.mark.parametrize("event_type", IntermediateStepType)
def test_each_type_has_a_category_and_a_state(event_type):
    payload = IntermediateStepPayload(event_type=event_type)
    assert event_type.startswith(f"{payload.event_category}_")
    assert payload.event_state == {"START": "START", "END": "END"}.get(event_type.rpartition("_")[2], "CHUNK")


def test_the_shortcuts_of_a_step():
    payload = IntermediateStepPayload(
        event_type="TOOL_END", event_timestamp=5.0, span_event_timestamp=3.0, framework="langchain", of_mine=1
    )
    node = {"function_id": "f", "function_name": "f"}
    step = IntermediateStep(parent_id="root", function_ancestry=node, payload=payload)
    assert step.event_category is IntermediateStepCategory.TOOL
    assert (step.span_event_timestamp, step.framework) == (3.0, LLMFrameworkEnum.LANGCHAIN)
    assert payload.of_mine == 1, "fields of a derived model are kept"


def test_only_an_end_has_a_start_before_it():
    with pytest.raises(ValidationError, match="span_event_timestamp is for the end of a step, .* LLM_START"):
        IntermediateStepPayload(event_type="LLM_START", span_event_timestamp=1.0)


def test_metadata_may_be_a_model():
    trace = TraceMetadata(provided_metadata={"a": 1}, more=2)
    payload = IntermediateStepPayload(event_type="LLM_END", metadata=trace)
    assert payload.metadata is trace
    assert payload.metadata.more == 2
    assert IntermediateStepPayload(event_type="LLM_END", metadata={"a": 1}).metadata == {"a": 1}


def test_usage_in_both_spellings():
    nested = UsageInfo(token_usage=TokenUsageBaseModel(prompt_tokens=3, completion_tokens=2), num_llm_calls=1)
    flat = UsageInfo(prompt_tokens=3, completion_tokens=2, num_llm_calls=1)
    assert nested == flat
    assert (flat.prompt_tokens, flat.completion_tokens, flat.total_tokens) == (3, 2, 5)
    assert flat.token_usage.total_tokens == 5
    assert UsageInfo(token_usage={"prompt_tokens": 3, "total_tokens": 9}).total_tokens == 9
    assert UsageInfo().total_tokens == 0
