"""Parameters of one agent of a protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from reinforge.config.schema import Block

if TYPE_CHECKING:
    pass


class AgentParameters(Block):
    """How one agent speaks."""

    llm: str | None = Field(default=None, description="Entry of llms that it speaks by; null: the only one.")
    prompt: str = Field(
        default="$question",
        description="Role prompt; $question, $stance and the dataset's columns are put in, $$ is a dollar sign.",
    )
    prompt_file: str | None = Field(
        default=None, description="File with the role prompt instead; relative to the configuration's folder."
    )
    freeze_agent: bool = Field(default=False, description="Its replies are never trained, whatever model it shares.")
    temperature: float | None = Field(default=None, ge=0, description="Of a model that is not trained.")
    top_p: float | None = Field(default=None, gt=0, le=1, description="Of a model that is not trained.")
    max_response_words: int = Field(default=150, ge=1, description="Put into the role prompt as $max_response_words.")
    max_tokens_per_message: int | None = Field(default=None, ge=1, description="Longest reply; null: the context's.")
    num_invalid_generation_retries: int = Field(default=20, ge=0, description="Replies drawn anew if invalid.")

    @model_validator(mode="after")
    def _one_prompt(self) -> AgentParameters:
        if self.prompt_file is not None and self.prompt != type(self).model_fields["prompt"].default:
            raise ValueError("prompt and prompt_file both say what the role prompt is; leave one out")
        return self
