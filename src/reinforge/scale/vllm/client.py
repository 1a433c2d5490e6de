"""The HTTP API of a vLLM server, as far as a sampler needs it, as of vLLM 0.32.

GET  /version                         the version of vLLM
GET  /v1/models                       the served model
POST /inference/v1/generate           token ids in, token ids and log-probs out       --enable-scale-out
POST /pause?mode=wait, /resume        stops after the replies in flight               VLLM_SERVER_DEV_MODE=1
POST /v1/load_lora_adapter            an adapter's weights, from a folder             VLLM_ALLOW_RUNTIME_LORA_UPDATING=1
POST /collective_rpc                  all weights, from a folder or another machine   VLLM_SERVER_DEV_MODE=1
POST /reset_prefix_cache              drops the keys of older weights                 VLLM_SERVER_DEV_MODE=1
POST /update_weight_version           the label that every reply then carries         VLLM_SERVER_DEV_MODE=1
GET  /weight_info                     that label                                      VLLM_SERVER_DEV_MODE=1
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypeVar

from pydantic import Field, FiniteFloat, StrictInt
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on

from reinforge.bounded import load_json
from reinforge.errors import BackendError, ContextOverflow
from reinforge.rollout.models.openai_answers import Answer, Name, parse_answer
from reinforge.rollout.models.openai_http import OpenAIEndpoint, RequestRejected, UnexpectedAnswer
from reinforge.scale.vllm.weight_source import OfferedFiles

A = TypeVar("A", bound=Answer)

TOO_LONG = re.compile(r"maximum context length|max_model_len|longer than the maximum", re.IGNORECASE)
RELOAD_METHOD = "reinforge_reload_weights"  # method that our worker extension adds: see `plugin/reinforge_vllm.py`


class VLLMClient:
    def __init__(self, endpoint: OpenAIEndpoint):
        self.endpoint = endpoint

    async def get_version(self) -> str:
        return (await self._get("/version", VersionAnswer)).version

    async def get_model(self) -> ServedModelAnswer:
        """Returns the model that is served without an adapter."""
        models = (await self._get("/v1/models", ServedModelsAnswer)).data
        return next((model for model in models if model.parent is None), models[0])

    async def get_weight_label(self) -> str:
        return (await self._get("/weight_info", WeightInfoAnswer)).weight_version

    async def generate(self, body: Mapping[str, Any]) -> GenerateAnswer:
        try:
            return await self._post("/inference/v1/generate", GenerateAnswer, body)
        except RequestRejected as error:
            if TOO_LONG.search(str(error)):
                raise ContextOverflow(str(error)) from error
            if error.status in (400, 422):
                raise ValueError(str(error)) from error
            raise

    async def pause(self, mode: str) -> None:
        """Begins no step until `resume`, after the replies in flight (`wait`) or at once (`keep`).

        Kept replies continue with the prompt and their tokens so far computed again, by the weights of then.
        """
        await self.endpoint.call("POST", "/pause", query={"mode": mode})

    async def resume(self) -> None:
        await self.endpoint.call("POST", "/resume")

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Serves the adapter of a folder, in PEFT's layout, under a name that is free.

        Not by `load_inplace`: vLLM 0.32 then reads the files again at every step that uses the adapter.
        """
        await self.endpoint.call("POST", "/v1/load_lora_adapter", body={"lora_name": name, "lora_path": str(folder)})

    async def unload_adapter(self, name: str) -> None:
        await self.endpoint.call("POST", "/v1/unload_lora_adapter", body={"lora_name": name})

    async def reload_weights(self, folder: Path) -> None:
        await self._call_workers(RELOAD_METHOD, str(folder))

    async def fetch_weights(self, offered: OfferedFiles) -> None:
        await self._call_workers("reinforge_fetch_weights", offered.url, dict(offered.digests))

    async def fetch_adapter(self, name: str, offered: OfferedFiles) -> None:
        """Lets the server fetch an adapter, and serves it under a name."""
        folders = await self._call_workers("reinforge_fetch_adapter", offered.url, dict(offered.digests))
        folder = next((each for each in folders if isinstance(each, str)), None)
        if folder is None:
            raise BackendError(f"{self.endpoint.url}/collective_rpc: no worker of the server has fetched the adapter")
        try:
            await self.load_adapter(name, Path(folder))
        finally:
            with suppress(BackendError):  # the first error says why
                await self._call_workers("reinforge_drop_adapter", folder)

    async def _call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of the workers, to which our extension adds; returns what each worker returns."""
        body = {"method": method, "args": list(arguments)}
        return (await self._post("/collective_rpc", WorkersAnswer, body)).results

    async def reset_prefix_cache(self) -> None:
        if not (await self._post("/reset_prefix_cache", CacheResetAnswer)).success:
            raise BackendError(f"{self.endpoint.url}/reset_prefix_cache: the prefix cache was not dropped")

    async def set_weight_label(self, label: str) -> None:
        await self.endpoint.call("POST", "/update_weight_version", body={"new_version": label})

    async def close(self) -> None:
        await self.endpoint.close()

    async def _get(self, path: str, kind: type[A]) -> A:
        return self._parse(path, kind, await self.endpoint.call("GET", path))

    async def _post(self, path: str, kind: type[A], body: Mapping[str, Any] | None = None) -> A:
        return self._parse(path, kind, await self.endpoint.call("POST", path, body=body))

    def _parse(self, path: str, kind: type[A], text: str) -> A:
        where = f"{self.endpoint.url}{path}"
        try:
            value = load_json(text)
        except ValueError:
            raise UnexpectedAnswer(f"{where}: the response is not JSON") from None
        return parse_answer(kind, value, where, "what vLLM answers")


class VersionAnswer(Answer):
    version: Name


class ServedModelAnswer(Answer):
    """A model of `/v1/models`; an adapter names the model that it belongs to as its `parent`."""

    id: Name
    parent: str | None = None
    max_model_len: StrictInt | None = None


class ServedModelsAnswer(Answer):
    data: list[ServedModelAnswer] = Field(min_length=1)


class WorkersAnswer(Answer):
    results: list[Any]


class WeightInfoAnswer(Answer):
    weight_version: str


class CacheResetAnswer(Answer):
    success: bool


class TokenCandidate(TypedDict):  # not a model: thousands of them are made for each reply
    token_id: Annotated[StrictInt, Field(ge=0)]
    logprob: FiniteFloat


class TokenPosition(TokenCandidate):
    """The sampled token of one position, and the most likely ones in its place."""

    top_logprobs: NotRequired[list[TokenCandidate]]


class GeneratedLogprobs(Answer):
    content: list[TokenPosition]


class WeightSpan(Answer):
    """Which of a reply's tokens the weights with this label sampled."""

    version: str
    start: StrictInt
    end: StrictInt


class GeneratedChoice(Answer):
    finish_reason: str | None = None
    token_ids: list[StrictInt]
    logprobs: GeneratedLogprobs
    weight_versions: list[WeightSpan] | None = None


class GenerateAnswer(Answer):
    """The answer of `/inference/v1/generate`, which takes and returns token ids."""

    prompt_token_ids: list[StrictInt]
    choices: list[GeneratedChoice] = Field(min_length=1, max_length=1)
