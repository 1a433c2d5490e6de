"""An episode as a list of steps: model calls, tool calls and marks, in order."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

REPORTED_REWARD = "reported_reward"  # key in the data of a mark under which the agent reports its own reward


class LLMFrameworkEnum(StrEnum):
    """Framework that an agent is written with; `OPENAI` means no framework but OpenAI's client, and is ours."""

    OPENAI = "openai"

    LANGCHAIN = "langchain"
    LLAMA_INDEX = "llama_index"
    CREWAI = "crewai"
    SEMANTIC_KERNEL = "semantic_kernel"
    AGNO = "agno"
    ADK = "adk"
    STRANDS = "strands"
    AUTOGEN = "autogen"
    RUNTIME = "runtime"


class IntermediateStepCategory(StrEnum):
    """What a step is about: the part of its type before `_START`, `_END`, `_CHUNK` or `_NEW_TOKEN`."""

    LLM = "LLM"
    TOOL = "TOOL"
    WORKFLOW = "WORKFLOW"
    TASK = "TASK"
    FUNCTION = "FUNCTION"
    CUSTOM = "CUSTOM"
    SPAN = "SPAN"
    TTC = "TTC"


class IntermediateStepType(StrEnum):
    """Type of a step."""

    LLM_START = "LLM_START"
    LLM_END = "LLM_END"
    LLM_NEW_TOKEN = "LLM_NEW_TOKEN"
    TOOL_START = "TOOL_START"
    TOOL_END = "TOOL_END"
    WORKFLOW_START = "WORKFLOW_START"
    WORKFLOW_END = "WORKFLOW_END"
    TASK_START = "TASK_START"
    TASK_END = "TASK_END"
    FUNCTION_START = "FUNCTION_START"
    FUNCTION_END = "FUNCTION_END"
    CUSTOM_START = "CUSTOM_START"
    CUSTOM_END = "CUSTOM_END"
    SPAN_START = "SPAN_START"
    SPAN_CHUNK = "SPAN_CHUNK"
    SPAN_END = "SPAN_END"
    TTC_START = "TTC_START"
    TTC_END = "TTC_END"


class IntermediateStepState(StrEnum):
    """Whether a step starts something, reports progress, or ends it."""

    START = "START"
    CHUNK = "CHUNK"
    END = "END"


class InvocationNode(BaseModel):
    """The function that a step belongs to, and its caller."""

    function_id: str = Field(description="Id of this call of the function.")
    function_name: str = Field(description="Name of the function.")
    parent_id: str | None = Field(default=None, description="Id of the calling function's call.")
    parent_name: str | None = Field(default=None, description="Name of the calling function.")


class StreamEventData(BaseModel):
    """Data of a step; accepts extra fields."""

    model_config = ConfigDict(extra="allow")

    input: Any | None = Field(default=None, description="Input.")
    output: Any | None = Field(default=None, description="Output.")
    chunk: Any | None = Field(default=None, description="Part of the output.")
    payload: Any | None = Field(default=None, description="The whole object; for LLM_END a chat completion.")


class TTCEventData(StreamEventData):
    """A candidate reply of a turn, marked with its score."""

    turn_id: str | None = Field(default=None, description="Id of the turn.")
    turn_index: int | None = Field(default=None, description="Index of the turn in the episode.")
    candidate_index: int | None = Field(default=None, description="Index of the candidate in the turn.")
    score: float | None = Field(default=None, description="Score of the candidate; higher is better.")


class TokenUsageBaseModel(BaseModel):
    """Token counts of one model call; `total_tokens` is the sum of prompt and completion unless it is given."""

    prompt_tokens: int = Field(default=0, description="Number of prompt tokens.")
    completion_tokens: int = Field(default=0, description="Number of completion tokens.")
    cached_tokens: int = Field(default=0, description="Number of prompt tokens read from a cache.")
    reasoning_tokens: int = Field(default=0, description="Number of completion tokens used for reasoning.")
    total_tokens: int = Field(default=0, description="Number of tokens of prompt and completion.")

    @model_validator(mode="after")
    def _add_up(self) -> Self:
        if "total_tokens" not in self.model_fields_set:
            self.total_tokens = self.prompt_tokens + self.completion_tokens
        return self


class UsageInfo(BaseModel):
    """Usage of one model call."""

    token_usage: TokenUsageBaseModel = Field(default_factory=TokenUsageBaseModel, description="Token counts.")
    num_llm_calls: int = Field(default=0, description="Number of model calls that the counts are of.")
    seconds_between_calls: float = Field(default=0, description="Seconds since the call before.")

    @model_validator(mode="before")
    @classmethod
    def _accept_counts(cls, data: Any) -> Any:
        """Accepts the counts themselves: `UsageInfo(prompt_tokens=3, completion_tokens=2)`."""
        if not isinstance(data, Mapping) or "token_usage" in data:
            return data
        counts = {name: data[name] for name in TokenUsageBaseModel.model_fields if name in data}
        return {**{name: value for name, value in data.items() if name not in counts}, "token_usage": counts}

    @property
    def prompt_tokens(self) -> int:
        return self.token_usage.prompt_tokens

    @property
    def completion_tokens(self) -> int:
        return self.token_usage.completion_tokens

    @property
    def total_tokens(self) -> int:
        return self.token_usage.total_tokens


class TraceMetadata(BaseModel):
    """What a framework knows about a step; accepts extra fields."""

    model_config = ConfigDict(extra="allow")

    chat_responses: Any | None = Field(default=None, description="Replies of the model.")
    chat_inputs: Any | None = Field(default=None, description="Messages to the model.")
    tool_inputs: Any | None = Field(default=None, description="Arguments of a tool.")
    tool_outputs: Any | None = Field(default=None, description="Results of a tool.")
    tool_info: Any | None = Field(default=None, description="Description of a tool.")
    span_inputs: Any | None = Field(default=None, description="Inputs of a span.")
    span_outputs: Any | None = Field(default=None, description="Outputs of a span.")
    provided_metadata: Any | None = Field(default=None, description="Metadata of the caller.")
    tools_schema: list[Any] = Field(default_factory=list, description="Tools that the request offers.")


class IntermediateStepPayload(BaseModel):
    """Type, time, name and data of a step; accepts extra fields."""

    model_config = ConfigDict(extra="allow")

    event_type: IntermediateStepType = Field(description="Type of the step.")
    event_timestamp: float = Field(default_factory=time.time, description="Seconds since the epoch.")
    span_event_timestamp: float | None = Field(default=None, description="For an end: when the step started.")
    framework: LLMFrameworkEnum | None = Field(default=None, description="Framework of the agent.")
    name: str | None = Field(default=None, description="Name of the model, tool or mark.")
    tags: list[str] | None = Field(default=None, description="Tags.")
    metadata: dict[str, Any] | TraceMetadata | None = Field(default=None, description="Further information.")
    data: StreamEventData | None = Field(default=None, description="Data of the step.")
    usage_info: UsageInfo | None = Field(default=None, description="Token counts of a model call.")
    UUID: str = Field(
        default_factory=lambda: uuid.uuid4().hex, description="Id shared by the start and the end of a step."
    )

    @model_validator(mode="after")
    def _check_span(self) -> Self:
        if self.span_event_timestamp is not None and self.event_state is not IntermediateStepState.END:
            raise ValueError(f"span_event_timestamp is for the end of a step, but the event_type is {self.event_type}")
        return self

    @property
    def event_category(self) -> IntermediateStepCategory:
        return IntermediateStepCategory(self.event_type.partition("_")[0])

    @property
    def event_state(self) -> IntermediateStepState:
        word = self.event_type.rpartition("_")[2]
        return IntermediateStepState(word if word in ("START", "END") else "CHUNK")


class IntermediateStep(BaseModel):
    """One step of an episode; its properties are the fields of its payload."""

    parent_id: str = Field(description="Id of the enclosing step; `root` at the top.")
    function_ancestry: InvocationNode = Field(description="The enclosing function.")
    payload: IntermediateStepPayload = Field(description="The step itself.")

    @property
    def event_type(self) -> IntermediateStepType:
        return self.payload.event_type

    @property
    def event_timestamp(self) -> float:
        return self.payload.event_timestamp

    @property
    def event_state(self) -> IntermediateStepState:
        return self.payload.event_state

    @property
    def event_category(self) -> IntermediateStepCategory:
        return self.payload.event_category

    @property
    def span_event_timestamp(self) -> float | None:
        return self.payload.span_event_timestamp

    @property
    def framework(self) -> LLMFrameworkEnum | None:
        return self.payload.framework

    @property
    def name(self) -> str | None:
        return self.payload.name

    @property
    def tags(self) -> list[str] | None:
        return self.payload.tags

    @property
    def metadata(self) -> dict[str, Any] | TraceMetadata | None:
        return self.payload.metadata

    @property
    def data(self) -> StreamEventData | None:
        return self.payload.data

    @property
    def usage_info(self) -> UsageInfo | None:
        return self.payload.usage_info

    @property
    def UUID(self) -> str:
        return self.payload.UUID
