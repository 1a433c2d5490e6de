"""The JSON bodies of Tinker's protocol, as the SDK 0.38 sends them.

A field that this server does not know is refused by name: a client that sets it expects something of it.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reinforge.serving.routes import ApiError, read_json

T = TypeVar("T", bound=BaseModel)
UNSUPPORTED = {
    "topk_prompt_logprobs": 0,
    "target_prompt_logprobs": None,
    "prompt_alt_tokens_k": 0,
    "record_stability_info": False,
}
"""Fields of a sampling request that must have these values, since this server does not compute what they ask for."""


class TinkerBody(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    type: str | None = None


class CreateSession(TinkerBody):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str
    project_id: str | None = None
    display_name: str | None = None


class OfSession(TinkerBody):
    session_id: str


class LoraSettings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    rank: int = Field(ge=1)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerFamily(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str = "adamw"


class CreateModel(OfSession):
    model_seq_id: int = Field(ge=0, lt=10**9)
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraSettings | None = None
    optimizer_config: OptimizerFamily = OptimizerFamily()


class OfModel(TinkerBody):
    """Names a model; `seq_id` orders its requests."""

    model_id: str
    seq_id: int | None = Field(default=None, ge=1)


class AdamParams(BaseModel):
    model_config = ConfigDict(extra="forbid")

    learning_rate: float = Field(default=1e-4, ge=0, allow_inf_nan=False)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, gt=0, allow_inf_nan=False)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    grad_clip_norm: float = Field(default=0.0, allow_inf_nan=False)


class OptimStep(OfModel):
    adam_params: AdamParams | None = None
    optimizer_params: OptimizerFamily | None = None


MAX_TTL_S = 10 * 366 * 24 * 3600  # seconds that a checkpoint may live: ten years, so that its end is a date


class SaveWeights(OfModel):
    path: str | None = None
    ttl_seconds: int | None = Field(default=None, gt=0, le=MAX_TTL_S)
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(OfModel):
    path: str | None = None
    sampling_session_seq_id: int | None = Field(default=None, ge=0)
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = Field(default=None, gt=0, le=MAX_TTL_S)
    user_metadata: dict[str, str] | None = None


class SaveExternal(OfModel):
    path: str
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None


class LoadWeights(TinkerBody):
    model_id: str | None = None
    seq_id: int | None = Field(default=None, ge=1)
    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0, lt=10**9)
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerFamily | None = None
    weights_access_token: str | None = None


class CreateSamplingSession(OfSession):
    sampling_session_seq_id: int = Field(ge=0)
    base_model: str | None = None
    model_path: str | None = None


class TextChunk(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"


class Prompt(BaseModel):
    model_config = ConfigDict(extra="forbid")

    chunks: list[TextChunk]


class SampleSettings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class Sample(TinkerBody):
    num_samples: int = Field(default=1, ge=1)
    prompt: Prompt
    sampling_params: SampleSettings
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = Field(default=None, ge=0)
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)
    topk_sample_logprobs: int = Field(default=0, ge=0, le=20)
    topk_prompt_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None


class RetrieveFuture(TinkerBody):
    request_id: str
    allow_metadata_only: bool = False


class FinishReason(BaseModel):
    type: str


class FinishSession(TinkerBody):
    reason: FinishReason | None = None
    detail: str | None = None


class WeightsPath(TinkerBody):
    tinker_path: str
    weights_access_token: str | None = None


async def read(kind: type[T], request: web.Request) -> T:
    """Returns the body of a request as an object; of its problems the first five are named."""
    try:
        return kind.model_validate(await read_json(request))
    except ValidationError as error:
        found = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False)[:5]]
        param = str(error.errors()[0]["loc"][0]) if error.errors()[0]["loc"] else None
        raise ApiError(422, f"{kind.__name__}: {'; '.join(found)}", param=param) from None
