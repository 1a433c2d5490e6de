"""Sessions over plain HTTP: what a client may choose, and what is refused before anything is loaded or trained."""

import json
from contextlib import asynccontextmanager

import pytest

from reinforge.config.policy import PolicyConfig
from reinforge.protocols.sessions.server.api import SessionLimits, SessionsApi
from reinforge.protocols.sessions.server.session import read_policy
from reinforge.protocols.sessions.wire import SESSIONS
from reinforge.serving.app import ServeApp
from reinforge.serving.loading import BaseModels
from reinforge.serving.models import ServedModels
from tests.serving.serving import http as plain_http

KEY = "0" * 32
OPEN = {"key": KEY, "model": "tiny", "algorithm": {"_type": "grpo"}, "policy": {"lora": {"r": 4}}}
TOKENS = {"prompt_token_ids": [1, 2], "token_ids": [3], "logprobs": [-1.0]}


@asynccontextmanager
async def serving(model, folder, **limits):
    api = SessionsApi(
        BaseModels({"tiny": PolicyConfig(model=str(model))}), folder, device="cpu", limits=SessionLimits(**limits)
    )
    async with ServeApp(ServedModels(), [api], token="the-key") as app:
        headers = {"authorization": "Bearer the-key"}
        async with plain_http(app, headers=headers) as http:
            yield http


@pytest.fixture
async def http(tiny_model_dir, tmp_path):
    async with serving(tiny_model_dir, tmp_path / "kept") as client:
        yield client


async def refusal(http, method, path, body, status=422):
    response = await http.request(method, f"{SESSIONS}{path}", json=body)
    assert response.status_code == status, response.text
    return response.json()["error"]["message"]


async def open_session(http, **settings):
    response = await http.post(SESSIONS, json={**OPEN, **settings})
    assert response.status_code == 200, response.text
    return response.json()


def test_files_and_memory_are_the_servers_to_choose():
    base = PolicyConfig(model="/models/own", max_model_len=100, batch={"micro_batch_tokens": 50}, dtype="bfloat16")
    given = {"lora": {"r": 4}, "max_model_len": 1000, "batch": {"micro_batch_tokens": 10**9, "batch_size": 7}}
    policy = read_policy(given, base)
    assert (policy.model, policy.dtype, policy.max_model_len) == ("/models/own", "bfloat16", 100)
    assert (policy.batch.micro_batch_tokens, policy.batch.batch_size, policy.lora.r) == (50, 7, 4)


async def test_a_session_that_cannot_be_is_refused_before_a_model_is_loaded(http):
    for changes, status, message in (
        ({"model": "/etc"}, 404, "no model to train is named '/etc'; this server has: tiny"),
        ({"policy": {"model": "/etc"}}, 422, "policy.model is the server's to choose"),
        ({"policy": {"tokenizer": "/etc"}}, 422, "policy.tokenizer is the server's to choose"),
        ({"policy": {"chat_template": "{{ 1 }}"}}, 422, "policy.chat_template is the server's to choose"),
        ({"policy": {"lora": {"r": 0}}}, 422, "policy: lora.r"),
        ({"policy": {"lora": {"r": 400_000}}}, 422, "policy: lora.r"),
        ({"algorithm": {"_type": "distill", "teacher": "x"}}, 422, "no algorithm 'distill' is available to sessions"),
        ({"algorithm": {"_type": "task:mine"}}, 422, "no algorithm 'task:mine' is available to sessions"),
        ({"algorithm": {"_type": "grpo", "kl_coef": -1}}, 422, "algorithm: kl_coef"),
        ({"device": "cuda"}, 422, "device: Extra inputs are not permitted"),
        ({"key": "../x"}, 422, "key: String should match pattern"),
    ):
        assert message in await refusal(http, "POST", "", {**OPEN, **changes}, status)


async def test_what_the_server_has_no_room_for_is_refused(tiny_model_dir, tmp_path):
    async with serving(tiny_model_dir, tmp_path / "kept", max_sessions=1, max_job_bytes=100) as http:
        first = await open_session(http)
        response = await http.post(f"{SESSIONS}/{first['id']}/jobs", content=json.dumps(job()))
        assert response.status_code == 413, "the job is too long"
        response = await http.post(SESSIONS, json={**OPEN, "key": "1" * 32})
        assert response.status_code == 429
        assert 1 <= int(response.headers["retry-after"]) <= 61
        assert (await http.delete(f"{SESSIONS}/{first['id']}")).status_code == 200
        await open_session(http, key="1" * 32)


def job(**tokens):
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "tokens": {**TOKENS, **tokens}}]
    return {"job_key": "r/0", "run_id": "r", "groups": [[{"turns": turns, "reward": 1.0}]]}


async def test_tokens_that_the_model_does_not_have_never_reach_it(http):
    session = await open_session(http)
    large = {"packed_counts": "AQAAAA==", "packed_token_ids": "QEIPAA=="}
    for tokens, message in (
        ({"token_ids": [10**6]}, "the model has the tokens 0 to"),
        ({"prompt_token_ids": [-1]}, "the model has the tokens 0 to"),
        ({"logprobs": []}, "1 tokens with 0 log-probs"),
        ({"restricted": True, "supports": large}, "found 1000000"),
        ({"restricted": True, "supports": {"packed_counts": "", "packed_token_ids": ""}}, "the supports do not fit"),
        ({"logprobs": ["x"]}, "logprobs.0"),
        ({"policy_version": 10**30}, "there is no policy_version 1"),
    ):
        assert message in await refusal(http, "POST", f"/{session['id']}/jobs", job(**tokens))
    shown = await http.get(f"{SESSIONS}/{session['id']}/jobs", params={"job_key": "r/0"})
    assert shown.status_code == 404, "there is no job"


async def test_one_key_opens_one_session_and_what_ended_is_told_from_what_never_was_saved(http):
    session = await open_session(http)
    assert (await open_session(http))["id"] == session["id"]
    assert "other settings" in await refusal(http, "POST", "", {**OPEN, "seed": 1})
    body = {"session": KEY, "save": KEY, "version": 1}
    assert "are not here" in await refusal(http, "POST", f"/{session['id']}/restore", body, 404)
    assert "there is no session" in await refusal(http, "POST", f"/{KEY}/restore", body, 404)
    assert await refusal(http, "PUT", f"/{session['id']}/saves/..%2fx", {"version": 1}, 404)
