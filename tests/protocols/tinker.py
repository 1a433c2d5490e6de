"""A client of Tinker's protocol for tests: what the SDK 0.38 sends, made by hand, and bodies that it has sent."""

from __future__ import annotations

import base64
import contextlib
import itertools

import httpx
import numpy as np

from reinforge.config.policy import PolicyConfig
from reinforge.protocols.tinker.server.api import TinkerApi, TinkerSettings
from reinforge.protocols.tinker.server.wire import CONTENT_TYPE, _find_messages
from reinforge.serving.app import ServeApp
from reinforge.serving.models import ServedModels

RECORDED = {
    "sft": "CglTOnRyYWluOjAQARp6ChAKDgoMBQAAAAYAAAAHAAAACggKBgoECAAAABI4Cg10YXJnZXRfdG9rZW5zEicKIAYAAAAAAAAABwAAAAAAAAA"
    "IAAAAAAAAAAkAAAAAAAAAGAIiAQQSIgoHd2VpZ2h0cxIXChAAAAAAAAAAPwAAgD8AAABAGAEiAQQiDWNyb3NzX2VudHJvcHk=",
    "ppo": "CglTOnRyYWluOjAQARqiAQoQCg4KDAUAAAAGAAAABwAAAAoICgYKBAgAAAASOAoNdGFyZ2V0X3Rva2VucxInCiAGAAAAAAAAAAcAAAAAAAA"
    "ACAAAAAAAAAAJAAAAAAAAABgCIgEEEiUKCmFkdmFudGFnZXMSFwoQAAAAAAAAgD8AAIC/AAAAPxgBIgEEEiMKCGxvZ3Byb2JzEhcKEAAAAAAAAIC/"
    "AAAAwAAAQMAYASIBBCIDcHBvKh0KEmNsaXBfbG93X3RocmVzaG9sZBHNzMzMzMzsPyoeChNjbGlwX2hpZ2hfdGhyZXNob2xkEZqZmZmZmfE/Oh8KEm"
    "NsaXBfbG93X3RocmVzaG9sZBIJCc3MzMzMzOw/OiAKE2NsaXBfaGlnaF90aHJlc2hvbGQSCQmamZmZmZnxPw==",
    "text": "CglTOnRyYWluOjAQARpWChAKDgoMBQAAAAYAAAAHAAAACggKBgoECAAAABI4Cg10YXJnZXRfdG9rZW5zEicKIAYAAAAAAAAAB"
    "wAAAAAAAAA"
    "IAAAAAAAAAAkAAAAAAAAAGAIiAQQiA3BwbzoZChJjbGlwX2xvd190aHJlc2hvbGQSAxIBeA==",
}
"""Bodies of forward_backward as the SDK 0.38 wrote them, of model S:train:0: tokens 5 6 7, 8 and targets 6 7 8 9."""


def read_recorded(name):
    return base64.b64decode(RECORDED[name])


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


@contextlib.asynccontextmanager
async def serve_tinker(engine, folder, clock=None, **settings):
    """Yields a server of the protocol over an engine that outlives it, and the API behind it."""
    models = ServedModels()
    policy = PolicyConfig(model=engine.config.model)
    chosen = TinkerSettings(policy, "tiny", folder, max_rank=engine.config.lora.r, **settings)
    api = TinkerApi(models, chosen, lambda _: Lent(engine), **({} if clock is None else {"now": clock}))
    async with ServeApp(models, [api]) as app:
        yield app, api


class Lent:
    """An engine that a server closes and that stays open."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def close(self):
        """Does nothing."""


class TinkerClient:
    """One client program.

    Args:
        app: The server.
    """

    def __init__(self, app):
        self.http = httpx.AsyncClient(base_url=f"{app.address}/api/v1", timeout=60, verify=False)
        self.session_id, self._numbers = "", itertools.count()

    async def __aenter__(self):
        opened = await self.post("create_session", tags=[], user_metadata={}, sdk_version="0.38.0")
        self.session_id = opened["session_id"]
        return self

    async def __aexit__(self, *exc_info):
        await self.http.aclose()

    async def send(self, route, **body):
        return await self.http.post(route, json=body)

    async def post(self, route, **body):
        response = await self.send(route, **body)
        assert response.status_code == 200, response.text
        return response.json()

    async def result(self, promise):
        """Returns the result of a request: JSON, or a message by the SDK's type."""
        while (response := await self.send("retrieve_future", request_id=promise["request_id"])).status_code == 408:
            assert response.json()["type"] == "try_again"
        assert response.status_code == 200, response.text
        if response.headers["content-type"] != CONTENT_TYPE:
            return response.json()
        kind = "SampleResponse" if ":sample:" in promise["request_id"] else "ForwardBackwardOutput"
        message = _find_messages()[kind]()
        message.ParseFromString(response.content)
        return message

    async def create_model(self, number=0, rank=4, seed=1, base_model="tiny", **lora):
        body = {"session_id": self.session_id, "model_seq_id": number, "base_model": base_model}
        lora = {"rank": rank, "seed": seed, "train_unembed": True, "train_mlp": True, "train_attn": True, **lora}
        return await self.result(await self.post("create_model", **body, lora_config=lora))

    async def send_data(self, body):
        return await self.http.post("forward_backward", content=body, headers={"content-type": CONTENT_TYPE})

    async def train(self, model_id, seq_id, data, loss="cross_entropy", config=None, forward_only=False):
        response = await self.send_data(build_body(model_id, seq_id, data, loss, config, forward_only))
        assert response.status_code == 200, response.text
        return response.json()

    async def step(self, model_id, seq_id, **adam):
        return await self.post("optim_step", model_id=model_id, seq_id=seq_id, adam_params=adam, type="optim_step")

    async def save_for_sampler(self, model_id, seq_id, **fields):
        """Saves weights for sampling; returns the result."""
        body = {"model_id": model_id, "seq_id": seq_id, **fields}
        return await self.result(await self.post("save_weights_for_sampler", **body))

    async def open_sampler(self, number=0, **what):
        body = {"session_id": self.session_id, "sampling_session_seq_id": number, **what}
        return (await self.post("create_sampling_session", **body))["sampling_session_id"]

    async def measure(self, sampler_id, seq_id, prompt=(5, 6, 7, 8, 9)):
        """Returns the log-probs of a prompt under a sampler's weights, without that of its first token."""
        answer = await self.result(await self.sample(sampler_id, seq_id, prompt, max_tokens=1, prompt_logprobs=True))
        return np.frombuffer(answer.prompt_logprobs, "<f4")[1:]

    async def sample(self, sampler_id, seq_id, prompt, num_samples=1, **params):
        extra = {name: params.pop(name) for name in list(params) if name.startswith(("prompt_", "topk_", "target_"))}
        chunks = [{"tokens": list(prompt), "type": "encoded_text"}]
        return await self.post(
            "asample", sampling_session_id=sampler_id, seq_id=seq_id, num_samples=num_samples,
            prompt={"chunks": chunks}, sampling_params={"max_tokens": 8, **params}, type="sample", **extra,
        )  # fmt: skip


def build_body(model_id, seq_id, data, loss="cross_entropy", config=None, forward_only=False):
    """Returns the body of forward_backward.

    Args:
        model_id: The model.
        seq_id: Its number.
        data: For each datum its tokens and its arrays by name.
        loss: The loss.
        config: Its settings.
        forward_only: Compute no gradient.
    """
    message = _find_messages()["ForwardBackwardRequest"](
        model_id=model_id, seq_id=seq_id, loss_fn=loss, forward_only=forward_only
    )
    for tokens, inputs in data:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(tokens, "<i4").tobytes()
        for name, values in inputs.items():
            array = np.asarray(values, "<i8" if name == "target_tokens" else "<f4")
            tensor = datum.loss_fn_inputs.add(key=name).value
            tensor.dense, tensor.dtype = array.tobytes(), 2 if name == "target_tokens" else 1
            tensor.shape.extend(array.shape)
    for name, value in (config or {}).items():
        entry = message.loss_fn_config_v2.add(key=name)
        setattr(entry.value, "text" if isinstance(value, str) else "number", value)
    return message.SerializeToString()


def share_beginning(*replies):
    """Returns data whose first 20 tokens are the same, with a reply each."""
    prompt, data = list(range(10, 30)), []
    for reply in replies:
        tokens, silent = [*prompt, *reply], [0.0] * (len(prompt) - 1)
        logprobs, advantages = [*silent, *[-2.0] * len(reply)], [*silent, *[1.0] * len(reply)]
        data.append((tokens[:-1], {"target_tokens": tokens[1:], "logprobs": logprobs, "advantages": advantages}))
    return data


def read_rows(output):
    [record] = output.loss_fn_outputs
    [field] = record.fields
    assert field.key == "logprobs"
    ends = np.frombuffer(field.value.offsets, "<i8") // 4
    values = np.frombuffer(field.value.data, "<f4")
    return [values[a:b] for a, b in itertools.pairwise(ends)]


def read_metrics(output):
    return {metric.key: metric.value for metric in output.metrics}


def read_sequence(sequence):
    return np.frombuffer(sequence.tokens, "<i4").tolist(), np.frombuffer(sequence.logprobs, "<f4")
