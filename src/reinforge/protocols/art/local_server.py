"""ART protocol 1, as its clients speak it as of 0.5.17: the server that `art run` starts.

    POST /register                         the model
    POST /_prepare_backend_for_training    loads it; the answer is the inference endpoint and its key
    POST /_get_step                        the newest step
    POST /_train_model                     one job: the response is a line of JSON per gradient step, its end the end
    POST /_delete_checkpoint_files         all steps but those to keep

A job is one request, so a client that dies loses the response. The server either trains on, and the step rises, or it
stops, and the job has to be submitted again. This port takes no key: keep it on your own network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import urlsplit, urlunsplit

from pydantic import SecretStr

from reinforge.bounded import load_json
from reinforge.errors import BackendError
from reinforge.protocols.art.client import MAX_PAUSE_S, ARTClient, Serving, average_metrics
from reinforge.protocols.art.config import AFTER_STEP, ARTTrainerAdapterConfig, split_settings
from reinforge.protocols.service import NOT_FOUND, Entry, HostedJob, Page
from reinforge.rollout.models.endpoint_config import validate_key, validate_url
from reinforge.rollout.models.openai_answers import describe_json, parse_answer
from reinforge.rollout.models.openai_http import OpenAIEndpoint, RequestRejected, RetryableError, UnexpectedAnswer
from reinforge.safe_text import remember_secret
from reinforge.types.job import TrainingStatusEnum

REGISTER, PREPARE = "/register", "/_prepare_backend_for_training"
CHECK_BACKEND = "check the trainer adapter's backend: ip, port, name, base_model, init_args and engine_args"
ANY_HOST = ("0.0.0.0", "::", "localhost", "127.0.0.1", "::1")
"""Hosts of the server's answer that mean the server's own machine."""


class ARTServer(ARTClient):
    """One model at a server of protocol 1.

    Args:
        inference: Where the user says the model is served; None: where the server says.
        settle_s: Seconds to look for a job whose response was lost.
    """

    fixes: ClassVar[dict[str, str]] = dict.fromkeys((REGISTER, PREPARE), CHECK_BACKEND)

    def __init__(self, config: ARTTrainerAdapterConfig, inference: Serving | None = None):
        super().__init__(config)
        self.inference = inference
        long = config.endpoint.model_copy(update={"timeout_s": config.max_wait_s})
        self.training = OpenAIEndpoint(long, self.backend.url)
        self._streams: dict[str, asyncio.Task[str]] = {}
        self._serving: Serving | None = None

    async def connect(self) -> Serving:
        await self.endpoint.retry(lambda: self.request("POST", REGISTER, body=self._describe_model()))
        answer = await self.training.retry(self._prepare)
        given = self.inference
        self._serving = answer if given is None else Serving(given.url, given.key or answer.key)
        await self._find_names()
        return self._serving

    async def _prepare(self) -> Serving:
        body = {"model": self._describe_model(), "config": self.backend.server_config}
        answer = await self.request("POST", PREPARE, body=body)
        where = f"{self.endpoint.url}{PREPARE}"
        texts = isinstance(answer, list) and len(answer) == 2 and all(isinstance(each, str) for each in answer)
        if not texts:
            raise UnexpectedAnswer(f"{where}: expected an inference URL and its key, found {describe_json(answer)}")
        try:
            url, key = validate_url(self._reach(answer[0])), validate_key(SecretStr(answer[1]))
        except ValueError as error:
            raise UnexpectedAnswer(f"{where}: the inference endpoint is unusable: {error}") from None
        if key is not None:
            remember_secret(key.get_secret_value())  # each call repeats it, so an error of the server may, too
        return Serving(url, key)

    def _reach(self, url: str) -> str:
        """Returns an inference URL as seen from here: a server calls its own machine 0.0.0.0 or localhost."""
        parts = urlsplit(url)
        if parts.hostname not in ANY_HOST or self.backend.ip in ANY_HOST[2:]:
            return url if parts.hostname not in ANY_HOST[:2] else url.replace(str(parts.hostname), "127.0.0.1", 1)
        host = self.backend.ip or ""
        return urlunsplit(parts._replace(netloc=f"{host}:{parts.port}" if parts.port else host))

    async def _find_names(self) -> None:
        """Finds out whether the server serves each step under its own name, or the newest one under the model's."""
        assert self._serving is not None
        endpoint = OpenAIEndpoint(self.endpoint.config, self._serving.url, self._serving.key)
        try:
            page = parse_answer(Page[Entry], load_json(await endpoint.call("GET", "/models")), endpoint.url, "a list")
        except (ValueError, UnexpectedAnswer):  # any HTTP server in between may answer; the first call tells
            return
        except RequestRejected as error:
            if error.status == NOT_FOUND:  # it has no list of models
                return
            raise
        finally:
            await endpoint.close()
        names = [entry.id for entry in page.data or []]
        step = await self.endpoint.retry(self.get_step)
        self.serves_steps = f"{self.backend.name}@{step}" in names
        if names and not self.serves_steps and self.backend.name not in names:
            raise BackendError(
                f"{self._serving.url} serves neither {self.backend.name}@{step} nor {self.backend.name}, but "
                f"{', '.join(map(describe_json, names[:5]))}; set backend.name to the name that the server trains"
            )

    async def check_access(self) -> None:
        await self.endpoint.retry(lambda: self.request("GET", "/healthcheck"))

    async def get_step(self) -> int:
        answer = await self.request("POST", "/_get_step", body=self._describe_model())
        if not isinstance(answer, int) or isinstance(answer, bool) or answer < 0:
            where = f"{self.endpoint.url}/_get_step"
            raise UnexpectedAnswer(f"{where}: expected the number of a step, found {describe_json(answer)}")
        return answer

    async def find_step_after(self, step: int) -> int | None:
        """Returns the newest step if it is after one; None: there is none yet. Each job makes one step."""
        newest = await self.get_step()
        return newest if newest > step else None

    async def start_job(self, step: int, groups: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> str:
        """Opens the request that is the job, and returns while it runs."""
        config, dev_config = split_settings(dict(settings))
        body = {
            "model": self._describe_model(),
            "trajectory_groups": groups,
            "config": config,
            "dev_config": dev_config,
            "verbose": False,
        }
        id_ = f"{AFTER_STEP}{step}"
        self._streams[id_] = asyncio.create_task(self._train(body))
        return id_

    async def _train(self, body: Mapping[str, Any]) -> str:
        """Returns the response of a job; a server that does not take the job is asked again."""
        attempts = self.endpoint.config.max_retries + 1
        for attempt in range(1, attempts + 1):
            try:
                return await self.training.send("POST", "/_train_model", body=body)
            except RetryableError as error:
                if not error.was_refused or attempt == attempts:
                    raise
                await asyncio.sleep(min(error.wait_s or 0.5 * 2**attempt, MAX_PAUSE_S))
        raise AssertionError("unreachable")

    async def retrieve_job(self, id_: str) -> HostedJob:
        """Returns a job by its response, or by the step that it makes if the response was lost."""
        stream = self._streams.get(id_)
        if stream is None:
            return await self.retrieve_by_step(id_)
        if not stream.done():
            return self.make_job(id_, TrainingStatusEnum.RUNNING)
        try:
            rows = _parse_lines(stream.result())
        except RetryableError as error:
            if error.was_refused:
                return self.make_job(id_, TrainingStatusEnum.FAILED, error=f"the server did not take the job: {error}")
            job = await self.retrieve_by_step(id_)
            done = job.status is TrainingStatusEnum.COMPLETED
            return job if done else self.wait_for_step(id_, f"the response broke off ({error})")
        except BackendError as error:
            return self.make_job(id_, TrainingStatusEnum.FAILED, error=str(error))
        job = await self.retrieve_by_step(id_)
        if job.status is not TrainingStatusEnum.COMPLETED:
            message = f"the response ended, but {id_.removeprefix(AFTER_STEP)} is still the newest step"
            return self.make_job(id_, TrainingStatusEnum.FAILED, error=message)
        return self.make_job(id_, job.status, step=job.metrics["art_step"], metrics=average_metrics(rows))

    async def keep_steps(self, steps: Sequence[int]) -> None:
        newest = await self.endpoint.retry(self.get_step)
        body = {"model": self._describe_model(), "steps_to_keep": sorted({*steps, newest})}
        await self.endpoint.retry(lambda: self.request("POST", "/_delete_checkpoint_files", body=body))

    def name_step(self, step: int) -> str:
        return f"{self.backend.name}@{step}" if self.serves_steps else self.backend.name

    async def close(self) -> None:
        for stream in self._streams.values():
            stream.cancel()
        await asyncio.gather(*self._streams.values(), return_exceptions=True)
        await self.training.close()
        await super().close()

    def _describe_model(self) -> dict[str, Any]:
        backend, serving = self.backend, self._serving
        unset = dict.fromkeys(("entity", "id", "run_id", "config", "report_metrics"))
        return unset | {
            "name": backend.name,
            "project": backend.project,
            "trainable": True,
            "inference_api_key": serving.key.get_secret_value() if serving and serving.key else None,
            "inference_base_url": serving.url if serving else None,
            "inference_model_name": f"{backend.name}@0" if serving else None,
            "base_path": ".art",
            "base_model": backend.base_model,
            "_internal_config": {
                "init_args": backend.init_args,
                "engine_args": backend.engine_args,
                "trainer_args": None,
            },
        }


def _parse_lines(text: str) -> list[dict[str, Any]]:
    rows = []
    for line in text.splitlines():
        if not line.strip():
            continue
        try:
            row = load_json(line)
        except ValueError:
            row = line
        if not isinstance(row, dict):
            raise UnexpectedAnswer(
                f"/_train_model: expected a line of JSON per gradient step, found {describe_json(row)}"
            )
        rows.append(row)
    return rows
