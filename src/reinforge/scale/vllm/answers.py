"""The shapes of vLLM's answers; each is validated before anything reads it."""

from __future__ import annotations

from pydantic import Field, FiniteFloat, StrictInt

from reinforge.rollout.models.openai_answers import Answer, Name


class VersionAnswer(Answer):
    version: Name


class ServedModelAnswer(Answer):
    """A model of `/v1/models`; an adapter names the model that it belongs to as its `parent`."""

    id: Name
    parent: str | None = None
    max_model_len: StrictInt | None = None


class ServedModelsAnswer(Answer):
    data: list[ServedModelAnswer] = Field(min_length=1)


class WeightInfoAnswer(Answer):
    """The answer of `/weight_info`: the label of the weights."""

    weight_version: str


class CacheResetAnswer(Answer):
    success: bool


class TokenCandidate(Answer):
    token_id: StrictInt = Field(ge=0)
    logprob: FiniteFloat


class TokenPosition(TokenCandidate):
    """The sampled token of one position, and the most likely ones in its place."""

    top_logprobs: tuple[TokenCandidate, ...] = ()


class GeneratedLogprobs(Answer):
    content: list[TokenPosition]


class WeightSpan(Answer):
    """Which of a reply's tokens the weights with this label sampled."""

    version: str
    start: StrictInt
    end: StrictInt


class GeneratedChoice(Answer):
    """One reply of `/inference/v1/generate`."""

    finish_reason: str | None = None
    token_ids: list[StrictInt]
    logprobs: GeneratedLogprobs
    weight_versions: list[WeightSpan] | None = None


class GenerateAnswer(Answer):
    """The answer of `/inference/v1/generate`, which takes and returns token ids."""

    prompt_token_ids: list[StrictInt]
    choices: list[GeneratedChoice] = Field(min_length=1, max_length=1)
