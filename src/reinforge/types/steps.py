"""An episode as a list of steps: model calls, tool calls and marks, in order."""

from __future__ import annotations

import time
import uuid
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


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


class UsageInfo(BaseModel):
    """Token counts of one model call."""

    prompt_tokens: int = Field(default=0, description="Number of prompt tokens.")
    completion_tokens: int = Field(default=0, description="Number of completion tokens.")

    @property
    def total_tokens(self) -> int:
        """Number of tokens of prompt and completion."""
        return self.prompt_tokens + self.completion_tokens


class IntermediateStepPayload(BaseModel):
    """Type, time, name and data of a step."""

    event_type: IntermediateStepType = Field(description="Type of the step.")
    event_timestamp: float = Field(default_factory=time.time, description="Seconds since the epoch.")
    framework: str | None = Field(default=None, description="Framework of the agent.")
    name: str | None = Field(default=None, description="Name of the model, tool or mark.")
    tags: list[str] | None = Field(default=None, description="Tags.")
    metadata: dict[str, Any] | None = Field(default=None, description="Further information.")
    data: StreamEventData | None = Field(default=None, description="Data of the step.")
    usage_info: UsageInfo | None = Field(default=None, description="Token counts of a model call.")
    UUID: str = Field(
        default_factory=lambda: uuid.uuid4().hex, description="Id shared by the start and the end of a step."
    )


class IntermediateStep(BaseModel):
    """One step of an episode."""

    parent_id: str = Field(description="Id of the enclosing step; `root` at the top.")
    function_ancestry: InvocationNode = Field(description="The enclosing function.")
    payload: IntermediateStepPayload = Field(description="The step itself.")

    @property
    def event_type(self) -> IntermediateStepType:
        """Type of the step."""
        return self.payload.event_type

    @property
    def event_timestamp(self) -> float:
        """Seconds since the epoch."""
        return self.payload.event_timestamp

    @property
    def event_state(self) -> IntermediateStepState:
        """Whether the step starts something, reports progress, or ends it."""
        word = self.payload.event_type.rpartition("_")[2]
        return IntermediateStepState(word if word in ("START", "END") else "CHUNK")

    @property
    def name(self) -> str | None:
        """Name of the model, tool or mark."""
        return self.payload.name

    @property
    def tags(self) -> list[str] | None:
        """Tags."""
        return self.payload.tags

    @property
    def metadata(self) -> dict[str, Any] | None:
        """Further information."""
        return self.payload.metadata

    @property
    def data(self) -> StreamEventData | None:
        """Data of the step."""
        return self.payload.data

    @property
    def usage_info(self) -> UsageInfo | None:
        """Tokens of a model call."""
        return self.payload.usage_info

    @property
    def UUID(self) -> str:
        """Id shared by the start and the end of a step."""
        return self.payload.UUID
