"""The step view of one run of an agent: model calls, tool calls and marks, in the order they happened."""

from __future__ import annotations

import time
import uuid
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class IntermediateStepType(StrEnum):
    """What happened."""

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
    """Whether a step opens something, reports on it, or closes it."""

    START = "START"
    CHUNK = "CHUNK"
    END = "END"


class InvocationNode(BaseModel):
    """The function that a step belongs to, and that function's caller."""

    function_id: str = Field(description="Names this call of the function.")
    function_name: str = Field(description="The function's name.")
    parent_id: str | None = Field(default=None, description="Names the call it was made from.")
    parent_name: str | None = Field(default=None, description="That function's name.")


class StreamEventData(BaseModel):
    """What a step carries; further fields are kept."""

    model_config = ConfigDict(extra="allow")

    input: Any | None = Field(default=None, description="What went in.")
    output: Any | None = Field(default=None, description="What came out.")
    chunk: Any | None = Field(default=None, description="A part of what came out.")
    payload: Any | None = Field(default=None, description="The whole object: for LLM_END a chat completion.")


class TTCEventData(StreamEventData):
    """A marked candidate of a turn."""

    turn_id: str | None = Field(default=None, description="Names the turn that candidates compete for.")
    turn_index: int | None = Field(default=None, description="The turn's index in the episode.")
    candidate_index: int | None = Field(default=None, description="The candidate's index in the turn.")
    score: float | None = Field(default=None, description="The candidate's score; higher is better.")


class UsageInfo(BaseModel):
    """Tokens of one model call."""

    prompt_tokens: int = Field(default=0, description="Tokens of the prompt.")
    completion_tokens: int = Field(default=0, description="Tokens of the reply.")

    @property
    def total_tokens(self) -> int:
        """Tokens of prompt and reply."""
        return self.prompt_tokens + self.completion_tokens


class IntermediateStepPayload(BaseModel):
    """What happened, when, under which name, with which data."""

    event_type: IntermediateStepType = Field(description="What happened.")
    event_timestamp: float = Field(default_factory=time.time, description="Seconds since the epoch.")
    framework: str | None = Field(default=None, description="The framework that the agent was written in.")
    name: str | None = Field(default=None, description="Name of the model, tool or mark.")
    tags: list[str] | None = Field(default=None, description="Free tags.")
    metadata: dict[str, Any] | None = Field(default=None, description="What else is known.")
    data: StreamEventData | None = Field(default=None, description="What the step carries.")
    usage_info: UsageInfo | None = Field(default=None, description="Tokens of a model call.")
    UUID: str = Field(default_factory=lambda: uuid.uuid4().hex, description="Names the step's start and end.")


class IntermediateStep(BaseModel):
    """One step of one run of the agent."""

    parent_id: str = Field(description="The step it happened in; `root` at the top.")
    function_ancestry: InvocationNode = Field(description="The function it happened in.")
    payload: IntermediateStepPayload = Field(description="What happened.")

    @property
    def event_type(self) -> IntermediateStepType:
        """What happened."""
        return self.payload.event_type

    @property
    def event_timestamp(self) -> float:
        """Seconds since the epoch."""
        return self.payload.event_timestamp

    @property
    def event_state(self) -> IntermediateStepState:
        """Whether the step opens something, reports on it, or closes it."""
        word = self.payload.event_type.rpartition("_")[2]
        return IntermediateStepState(word if word in ("START", "END") else "CHUNK")

    @property
    def name(self) -> str | None:
        """Name of the model, tool or mark."""
        return self.payload.name

    @property
    def tags(self) -> list[str] | None:
        """Free tags."""
        return self.payload.tags

    @property
    def metadata(self) -> dict[str, Any] | None:
        """What else is known."""
        return self.payload.metadata

    @property
    def data(self) -> StreamEventData | None:
        """What the step carries."""
        return self.payload.data

    @property
    def usage_info(self) -> UsageInfo | None:
        """Tokens of a model call."""
        return self.payload.usage_info

    @property
    def UUID(self) -> str:
        """Names the step's start and end."""
        return self.payload.UUID
