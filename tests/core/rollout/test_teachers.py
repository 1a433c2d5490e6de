"""Teachers: what an endpoint and a model in this process say about given tokens, and which ones are refused."""

import numpy as np
import pytest
import torch
from aiohttp import web

from reinforge.config.policy import PolicyConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.engine.model.source import find_token_difference, read_vocabulary
from reinforge.errors import BackendError, BackendUnavailable, ConfigError, EngineError
from reinforge.rollout.models.local_llm import LocalLLM
from reinforge.rollout.models.openai_client import OpenAIChat, OpenAILLMConfig
from reinforge.types.request import TokenLogprobs
from reinforge.types.supports import Supports
from tests.models import edit_json, make_tiny_model, make_tokenizer
from tests.openai_server import OpenAIServer, fails, says
from tests.samples import make_sample

pytestmark = pytest.mark.usefixtures("_no_backoff")
TOKENIZER = make_tokenizer()
REPLY = TokenLogprobs((11, 12), (13, 14), (-1.0, -2.0))


def completes(**choice):
    return lambda request, body: web.json_response({"choices": [{"text": "", **choice}]})


def echoes(logprobs, name=lambda token: TOKENIZER.decode([token])):
    def step(request, body):
        named = [*map(name, body["prompt"]), "!"]
        values = [*(logprobs or [None, *[-0.5] * (len(body["prompt"]) - 1)]), -9.0]
        return web.json_response({"choices": [{"logprobs": {"tokens": named, "token_logprobs": values}}]})

    return step


async def use(step, work, **settings):
    async with OpenAIServer(step) as server:
        model = OpenAIChat(OpenAILLMConfig(model_name="big", base_url=server.url, **settings), server.url)
        try:
            return await work(model), server.bodies
        finally:
            await model.close()


async def score(step, *samples, **settings):
    rows, bodies = await use(step, lambda model: model.score_samples(samples or [make_sample(REPLY)]), **settings)
    return [row.tolist() for row in rows], bodies


async def test_an_endpoint_scores_the_trained_tokens_of_a_sample():
    rows, bodies = await score(echoes([None, -3.0, -0.25, -4.0]))
    assert rows == [[0, 0, -0.25, -4.0]]
    assert bodies == [
        {"model": "big", "prompt": [11, 12, 13, 14], "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    ]


async def test_the_log_probs_of_a_prompt_as_vllm_gives_them():
    of_13 = {"9": {"logprob": -0.1}, "13": {"logprob": -0.25}}
    found = [None, {"12": {"logprob": -3.0}}, of_13, {"14": {"logprob": -4}}]
    rows, bodies = await score(completes(prompt_logprobs=found), extra_body={"echo": False, "prompt_logprobs": 0})
    assert rows == [[0, 0, -0.25, -4.0]]
    assert (bodies[0]["echo"], bodies[0]["prompt_logprobs"]) == (False, 0)


async def test_a_token_that_a_grammar_restricted_counts_as_agreed():
    """The endpoint does not know which tokens were allowed, so the second token has no divergence."""
    sample = make_sample(REPLY)
    kept = [np.zeros(0, np.int32)] * 3 + [np.array([14, 15], np.int32)]
    sample.supports = Supports.from_sets(kept)
    rows, _ = await score(echoes([None, -3.0, -0.25, -4.0]), sample)
    assert rows == [[0, 0, -0.25, -2.0]]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (says("hello"), "no log-probs of the given prompt"),
        (completes(logprobs={"tokens": ["!"], "token_logprobs": [-1.0]}), "no log-probs of the given prompt"),
        (completes(prompt_logprobs=[None]), "no log-probs of the given prompt"),
        (completes(logprobs={"tokens": [], "token_logprobs": "none"}), "no log-probs of the given prompt"),
        (lambda request, body: web.Response(text="<html>"), "not a completion"),
        (lambda request, body: web.json_response({"choices": []}), "not a completion"),
        (echoes([None, -1.0, None, -1.0]), "big gives no log-prob of token 2 of 4"),
        (fails(400), "broken 400"),
    ],
)
async def test_an_endpoint_that_does_not_score_is_refused(step, expected):
    with pytest.raises(BackendError, match=expected):
        await score(step)


async def test_an_endpoint_that_does_not_answer_is_unavailable():
    with pytest.raises(BackendUnavailable):
        await score(fails(503))


async def prepare(name):
    await use(echoes(None, name), lambda model: model.prepare(TOKENIZER))


async def test_an_endpoint_with_the_policys_tokens_is_accepted():
    await prepare(lambda token: TOKENIZER.decode([token]))
    await prepare(lambda token: TOKENIZER.decode([token]).strip())  # some servers leave out spaces
    await prepare(lambda token: f"token_id:{token}")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (lambda token: f"x{token}", "token [0-9]+ is '.*' in the policy and 'x[0-9]+' there"),
        (lambda token: f"token_id:{token + 1}", "token ([0-9]+) is [0-9]+ there"),
        (lambda token: None, "names 0 of [0-9]+ tokens, too few"),
    ],
)
async def test_an_endpoint_with_other_tokens_is_refused(name, expected):
    with pytest.raises(ConfigError, match=f"the teacher big has a different tokenizer than the policy: .*{expected}"):
        await prepare(name)


@pytest.fixture
async def local(tiny_model_dir):
    model = LocalLLM(PolicyConfig(model=str(tiny_model_dir)), FinetuneConfig(device="cpu"))
    yield model
    await model.close()


async def test_a_model_in_this_process_scores_at_the_temperature_of_each_token(local):
    plain, warm = make_sample(REPLY), make_sample(REPLY)
    warm.temperatures[:] = 2.0
    await local.prepare(TOKENIZER)
    rows = await local.score_samples([plain, warm])
    [expected] = await local.score([plain.token_ids.tolist()])
    assert rows[0][2:] == pytest.approx(expected[2:], abs=1e-5)
    assert rows[0][:2].tolist() == [0, 0]
    assert not np.allclose(rows[0][2:], rows[1][2:])


async def test_a_teacher_with_more_tokens_scores_over_those_that_a_grammar_allowed(local):
    """A mask of 16 bits, of a policy with 16 tokens, where the teacher has 320: 13 and 14 are left in both."""
    everything, by_ids, by_bits = np.zeros(0, np.int32), make_sample(REPLY), make_sample(REPLY)
    by_ids.supports = Supports.from_sets([everything, everything, *[np.array([13, 14], np.int32)] * 2])
    by_bits.supports = Supports.from_sets([everything, everything, *[bytes([0, 0b01100000])] * 2])
    expected, rows = await local.score_samples([by_ids, by_bits])
    assert rows[2:] == pytest.approx(expected[2:], abs=1e-5)
    assert np.all(expected[2:] > (await local.score_samples([make_sample(REPLY)]))[0][2:])


async def test_loading_a_teacher_leaves_the_random_numbers_of_training_alone(local):
    """A resumed run has restored the position of dropout's generator before a judge or a teacher is first used."""
    torch.manual_seed(7)
    before = torch.get_rng_state()
    await local.prepare(TOKENIZER)
    assert torch.equal(torch.get_rng_state(), before)


async def test_a_sample_that_does_not_fit_is_refused(local):
    with pytest.raises(EngineError, match="an episode has 300 tokens, but the context of .* has 256"):
        await local.score_samples([make_sample(TokenLogprobs((11,) * 299, (13,), (-1.0,)))])
    with pytest.raises(EngineError, match="has 320 tokens, so it cannot score token 320"):
        await local.score_samples([make_sample(TokenLogprobs((11,), (320,), (-1.0,)))])


async def test_a_model_in_this_process_with_other_tokens_is_refused(local):
    with pytest.raises(ConfigError, match=r"the token '.*' is [0-9]+ in the policy and missing in the teacher"):
        await local.prepare(make_tokenizer(400))


def test_the_first_token_that_differs_is_named():
    assert find_token_difference({"a": 0, "b": 1}, {"a": 0, "b": 1, "c": 2}) is None
    assert find_token_difference({"a": 0, "b": 1}, {"a": 0, "b": 2}) == (
        "the token 'b' is 1 in the policy and 2 in the teacher"
    )
    assert find_token_difference({"b": 1}, {}) == "the token 'b' is 1 in the policy and missing in the teacher"


def test_the_vocabulary_of_a_folder_is_read_without_loading_it(tmp_path):
    folder = make_tiny_model(tmp_path / "model")
    config = PolicyConfig(model=str(folder))
    assert read_vocabulary(config) == TOKENIZER.get_vocab()
    edit_json(folder / "tokenizer.json", model=None)
    assert read_vocabulary(config) is None
    assert read_vocabulary(PolicyConfig(model="gone/away")) is None
