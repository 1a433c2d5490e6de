"""Agents that are deployed services: `workflow: {_type: http, url: http://127.0.0.1:9000/run}`.

The service gets the task with the base URL and the key of its episode, calls the model there, and answers. It must run
where it can reach the gateway, which listens on this machine's loopback address alone.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from reinforge.errors import BackendUnavailable, PolicyFailure
from reinforge.interfaces import Builder
from reinforge.registry import register_workflow
from reinforge.rollout.context import EpisodeContext
from reinforge.rollout.http.gateway_access import GatewayAccess
from reinforge.rollout.models.endpoint_config import EndpointConfig, check_authority
from reinforge.rollout.models.openai_http import OpenAIEndpoint, RequestRejected, RetryableError
from reinforge.rollout.workflows.outside_agent import (
    AgentAccess,
    AgentFailed,
    AgentWorkflowConfig,
    OutsideWorkflow,
    decode_answer,
    describe_episode,
    open_access,
    shorten,
)
from reinforge.rollout.workflows.templates import (
    ROOT,
    fill_template,
    fill_text,
    find_by_path,
    validate_json_path,
    validate_template,
)
from reinforge.types.evaluation import EvalInputItem

SHORT_NAMES = ("example_id", "seed", "is_training", "model", "base_url", "api_key")
NAMES = ("input", *SHORT_NAMES)  # placeholders of the body; the headers have all but the input
NO_LIMIT_S = 7 * 86_400.0  # the episode's own time limit ends a request earlier


class HTTPWorkflowConfig(AgentWorkflowConfig, name="http"):
    """A deployed agent: gets each task by HTTP, and calls the model at the base URL that comes with it."""

    url: str = Field(description="URL of the agent.")
    method: Literal["POST", "PUT"] = Field(default="POST", description="HTTP method.")
    headers: dict[str, str] = Field(
        default_factory=dict,
        description="Headers of each request, with placeholders as in `body`; write secrets as ${VAR}.",
    )
    body: dict[str, Any] = Field(
        default_factory=lambda: {name: f"{{{name}}}" for name in NAMES},
        description="JSON body of each request. A string that is only a placeholder becomes its value; there are "
        f"{', '.join(f'`{{{name}}}`' for name in NAMES)}. The default has them all, each under its own name.",
    )
    result_json_path: str = Field(
        default=ROOT,
        description="JSONPath of the output in the agent's answer; `$`: the whole answer, as text if it is not JSON.",
    )
    policy_error_statuses: list[int] = Field(
        default_factory=list,
        description="HTTP statuses that mean that the policy's answer is unusable: a failure of the policy, "
        "whose reward is finetuning.outcomes.policy_error.",
    )

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        return validate_agent_url(url)

    @field_validator("body")
    @classmethod
    def _check_body(cls, body: dict[str, Any]) -> dict[str, Any]:
        validate_template(body, NAMES)
        return body

    @field_validator("headers")
    @classmethod
    def _check_headers(cls, headers: dict[str, str]) -> dict[str, str]:
        validate_template(headers, SHORT_NAMES)
        return headers

    @field_validator("result_json_path")
    @classmethod
    def _check_path(cls, path: str) -> str:
        return validate_json_path(path)


def validate_agent_url(url: str) -> str:
    url = url.strip()
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"[\s\x00-\x1f\x7f]", url):
        raise ValueError(f'"{url}" is not a URL; write http://host:port/path')
    try:
        parts.port  # noqa: B018  the property checks it
    except ValueError as error:
        raise ValueError(f'"{url}" is not a URL: {error}') from None
    check_authority(parts, "a header")
    return url


@dataclass
class HTTPAgent:
    config: HTTPWorkflowConfig
    connection: OpenAIEndpoint
    accesses: AgentAccess

    async def __call__(self, item: EvalInputItem, llm: Any, context: EpisodeContext) -> Any:
        async with self.accesses.open(context) as access:
            values = {**describe_episode(item, context), "base_url": access.base_url, "api_key": access.api_key}
            text = await self._send(values, access, context)
            return self._read_answer(text, context)

    async def _send(self, values: Mapping[str, Any], access: GatewayAccess, context: EpisodeContext) -> str:
        """Returns the answer; one request an episode, since a second one would run the agent twice in it."""
        config = self.config
        headers = {name: fill_text(value, values) for name, value in config.headers.items()}
        try:
            return await self.connection.send(
                config.method, "", body=fill_template(config.body, values), headers=headers
            )
        except RequestRejected as error:
            message = str(error).replace(access.api_key, "***")
            if error.status in config.policy_error_statuses:
                raise PolicyFailure(message) from None
            raise AgentFailed(message) from None
        except RetryableError as error:
            message = str(error).replace(access.api_key, "***")
            if error.status is not None and error.status in config.policy_error_statuses:
                raise PolicyFailure(message) from None
            if context.calls:  # it had begun, so this is its own failure
                raise AgentFailed(message) from None
            raise BackendUnavailable(message) from None

    def _read_answer(self, text: str, context: EpisodeContext) -> Any:
        path, what = self.config.result_json_path, f"the answer of {self.accesses.name}"
        if path == ROOT:
            try:
                return decode_answer(text, what, context)
            except (PolicyFailure, AgentFailed):  # plain text
                return text
        value = decode_answer(text, what, context)
        try:
            return find_by_path(path, value)
        except LookupError:
            raise AgentFailed(f"{what} has nothing at {path} (result_json_path): {shorten(text)}") from None


@register_workflow(config_type=HTTPWorkflowConfig)
async def http_workflow(config: HTTPWorkflowConfig, builder: Builder) -> AsyncIterator[OutsideWorkflow]:
    num_episodes = builder.config.eval.general.max_concurrency
    settings = EndpointConfig(timeout_s=NO_LIMIT_S, max_retries=0, max_connections=num_episodes)
    connection = OpenAIEndpoint(settings, config.url)
    try:
        async with open_access(builder, config.url) as accesses:
            agent = HTTPAgent(config, connection, accesses)
            yield OutsideWorkflow(agent, config.llm, True, config.share_environment_seed, name=config.url)
    finally:
        await connection.close()
