"""Parameters of one agent of a protocol."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from reinforge.config.schema import Block

SupervisedRounds = Literal["none", "all", "first", "all_but_first"]


class AgentParameters(Block):
    """One agent of a protocol: its model, its role prompt and how its replies are sampled."""

    llm: str | None = Field(default=None, description="Entry of llms that the agent uses; null: the only entry.")
    prompt: str = Field(
        default="$question",
        description="Role prompt template: $question, $stance and dataset columns are filled in; $$ is a dollar sign.",
    )
    prompt_file: str | None = Field(
        default=None, description="File that holds the role prompt instead; relative to the configuration's folder."
    )
    freeze_agent: bool = Field(default=False, description="Its replies are never trained, even if its model is.")
    temperature: float | None = Field(default=None, ge=0, description="Ignored for a model that is trained.")
    top_p: float | None = Field(default=None, gt=0, le=1, description="Ignored for a model that is trained.")
    max_response_words: int = Field(
        default=150, ge=1, description="Filled in as $max_response_words in the role prompt."
    )
    max_tokens_per_message: int | None = Field(
        default=None, ge=1, description="Maximum tokens of a reply; null: as many as the context allows."
    )
    num_invalid_generation_retries: int = Field(default=20, ge=0, description="Retries after an invalid reply.")

    use_supervisor_message: SupervisedRounds = Field(
        default="none", description="Rounds in which its prompt ends with a supervisor's line that says what to write."
    )
    supervisor_name: str = Field(default="Supervisor", description="The name before that line.")

    def is_supervised(self, round_id: int) -> bool:
        rounds = self.use_supervisor_message
        return rounds == "all" or rounds == ("all_but_first" if round_id else "first")

    @model_validator(mode="after")
    def _check_single_prompt(self) -> AgentParameters:
        if self.prompt_file is not None and self.prompt != type(self).model_fields["prompt"].default:
            raise ValueError("prompt and prompt_file both set the role prompt; remove one of them")
        return self
