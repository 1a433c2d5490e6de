"""The stand-in for a vLLM server answers as a real one has answered: same paths, statuses and fields."""

import json

import pytest

from reinforge.rollout.models.endpoint_config import EndpointConfig
from reinforge.rollout.models.openai_http import OpenAIEndpoint
from tests.models import make_tiny_model
from tests.scale.vllm_answers import ANSWERS, call_server
from tests.scale.vllm_server import VLLMServer

RECORDED = json.loads(ANSWERS.read_text())
OURS_TO_CHOOSE = {"permission", "metrics", "usage.prompt_tokens_details"}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    import asyncio

    model = make_tiny_model(tmp_path_factory.mktemp("model") / "tied", tie_word_embeddings=True)

    async def call(server):
        endpoint = OpenAIEndpoint(EndpointConfig(), server.url)
        try:
            return await call_server(endpoint, str(model))
        finally:
            await endpoint.close()

    with VLLMServer(model) as server:
        return asyncio.run(call(server))


def describe(value, path=""):
    """Returns the kind of each field by its path; all entries of a list are alike."""
    if isinstance(value, dict):
        fields = {key: describe(each, f"{path}.{key}".lstrip(".")) for key, each in value.items()}
        return {key: each for key, each in fields.items() if key not in OURS_TO_CHOOSE}
    if isinstance(value, list):
        return [describe(value[0], path)] if value else []
    return "number" if type(value) in (int, float) else type(value).__name__


@pytest.mark.parametrize("name", RECORDED)
def test_an_answer_has_the_recorded_shape(name, answers):
    real, own = RECORDED[name], answers[name]
    assert (own["call"].partition("?")[0], own["status"]) == (real["call"].partition("?")[0], real["status"])
    if real["status"] == 200:
        assert describe(own["answer"]) == describe(real["answer"])


def test_the_record_is_of_the_tested_version():
    assert RECORDED["version"]["answer"] == {"version": "0.32.0"}
    assert RECORDED["generate again"]["answer"]["choices"][0]["weight_versions"] == [
        {"version": "a-1", "start": 0, "end": 3}
    ]
