"""A server that trains over ART's protocols, and what its clients send."""

from __future__ import annotations

import asyncio

from reinforge.config.policy import LoRAConfig, PolicyConfig
from reinforge.protocols.art.server.api import ARTApi
from reinforge.serving.app import ServeApp
from reinforge.serving.loading import BaseModels
from reinforge.serving.models import ServedModels
from tests.serving.serving import http

PROMPT = [{"role": "user", "content": "yes, no, or maybe"}]
SETTINGS = {"learning_rate": 0.03, "loss_fn": "cispo"}
DESCRIBED = {"name": "agent", "project": "games", "entity": None, "base_model": "tiny"}
"""The model `agent`, as protocol 1 names it."""
MADE_UP = [
    {"messages_and_choices": [*PROMPT, {"finish_reason": "stop", "message": {"content": "made up"}}], "reward": reward}
    for reward in (0.0, 1.0)
]
"""Replies that no model has sampled."""


class ARTServer:
    """A server that trains, and the clients' calls.

    Args:
        base: Folder of the base model, which is named `tiny`.
        folder: Where the trained models are kept.
        settings: Further arguments of `ARTApi`.
    """

    def __init__(self, base, folder, **settings):
        bases = BaseModels({"tiny": PolicyConfig(model=str(base), lora=LoRAConfig(r=4), batch={"batch_size": 8})})
        models = ServedModels()
        self.api = ARTApi(models, bases, folder, device="cpu", **settings)
        self.app = ServeApp(models, [self.api])

    async def __aenter__(self):
        await self.app.__aenter__()
        self.http = http(self.app)
        return self

    async def __aexit__(self, *exc_info):
        await self.http.aclose()
        await self.app.__aexit__(*exc_info)

    async def call(self, method, path, body=None, status=200):
        response = await self.http.request(method, path, json=body)
        assert response.status_code == status, response.text
        return response.json() if response.content else None

    async def create(self, name="agent", **fields):
        body = {"entity": None, "project": "games", "name": name, "base_model": "tiny", "return_existing": True}
        return await self.call("POST", "/v1/preview/models", {**body, **fields})

    async def sample(self, name, seed, **fields):
        body = {"model": name, "messages": PROMPT, "seed": seed, "max_tokens": 4, "logprobs": True, **fields}
        return await self.call("POST", "/v1/chat/completions", body)

    async def start_job(self, model, groups, **settings):
        body = {"model_id": model["id"], "trajectory_groups": groups, "experimental_config": {**SETTINGS, **settings}}
        return (await self.call("POST", "/v1/preview/training-jobs", body))["id"]

    async def wait(self, job):
        while True:
            events = (await self.call("GET", f"/v1/preview/training-jobs/{job}/events"))["data"]
            if events[-1]["type"] in ("training_ended", "training_failed"):
                return events
            await asyncio.sleep(0.01)

    async def list_steps(self, model):
        path = f"/v1/preview/models/{model['id']}/checkpoints?order=desc"
        return [each["step"] for each in (await self.call("GET", path))["data"]]


def get_choice(answer):
    """Returns a reply with its tokens, and without its log-probs: their last bits depend on the rest of the batch."""
    return {name: value for name, value in answer["choices"][0].items() if name != "logprobs"}


def get_artifact(model):
    return f"wandb-artifact:///{model['entity']}/{model['project']}/{model['name']}"


def build_trajectory(answer, reward, keep_ids=True):
    choice = dict(answer["choices"][0])
    if keep_ids:
        choice["prompt_token_ids"] = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
    else:
        choice.pop("token_ids", None)
    return {"messages_and_choices": [*PROMPT, choice], **({"reward": reward} if reward else {})}


def score(answer):
    """Rewards replies that begin with a letter of the first half of the alphabet."""
    text = (answer["choices"][0]["message"]["content"] or "").strip().lower()
    return 1.0 if text[:1] in set("abcdefghijklm") else 0.0


async def collect(server, name, first_seed, count=24, **fields):
    return await asyncio.gather(*(server.sample(name, first_seed + i, **fields) for i in range(count)))


async def build_group(server, name="agent", count=8, **fields):
    answers = await collect(server, name, 0, count, return_token_ids=True, **fields)
    return [build_trajectory(answer, number % 2) for number, answer in enumerate(answers)]


def build_call(group, described=DESCRIBED, config=None):
    """Returns the body of a training call of protocol 1."""
    groups = [{"trajectories": group}]
    return {"model": described, "trajectory_groups": groups, "config": config or {}, "dev_config": {}, "verbose": False}
