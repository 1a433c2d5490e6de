"""Weights are published while clients chat with a server: each reply is from the version that it names.

Clients ask for whole replies, streams and several choices without a pause. A copy of each version's weights is kept,
and every choice is scored again with the copy of the version that it names.
"""

import asyncio
import random
from types import SimpleNamespace

import pytest

from reinforge.config.policy import PolicyConfig
from reinforge.engine import Engine
from reinforge.engine.policy import EmbeddedPolicy
from reinforge.types.request import TokenLogprobs
from reinforge.types.sample import LossSpec
from tests.fault.sizes import scaled
from tests.fault.test_swaps import TOLERANCE, assert_named_weights, differences, weights_of
from tests.samples import random_samples
from tests.serving.serving import async_openai, says, serve

NUM_CLIENTS = 8


class Chats:
    def __init__(self, client):
        self.client, self.stopping, self.num_asked, self.replies = client, False, 0, []

    async def run(self, number):
        rng = random.Random(number)
        while not self.stopping:
            self.num_asked += 1
            ask = {
                "model": "m", "messages": says(f"{rng.randrange(20)}"), "max_tokens": rng.randrange(1, 12),
                "seed": rng.getrandbits(32), "n": rng.choice([1, 1, 3]), "logprobs": True,
                "extra_body": {"return_token_ids": True},
            }  # fmt: skip
            read = self.read_stream if rng.random() < 0.4 else self.read_whole
            self.replies += await read(ask)

    async def read_whole(self, ask):
        reply = await self.client.chat.completions.create(**ask)
        return [
            build_tokens(reply.prompt_token_ids, choice.token_ids, choice.logprobs.content, choice.model_version)
            for choice in reply.choices
        ]

    async def read_stream(self, ask):
        choices = [SimpleNamespace(ids=[], content=[], version=None) for _ in range(ask["n"])]
        async for chunk in await self.client.chat.completions.create(**ask, stream=True):
            if getattr(chunk, "prompt_token_ids", None):
                prompt = chunk.prompt_token_ids
            for part in chunk.choices:
                choices[part.index].ids += getattr(part, "token_ids", None) or []
                choices[part.index].content += part.logprobs.content if part.logprobs else []
                choices[part.index].version = getattr(part, "model_version", None)
        return [build_tokens(prompt, choice.ids, choice.content, choice.version) for choice in choices]


def build_tokens(prompt, token_ids, content, version):
    logprobs = tuple(token.logprob for token in content)
    assert len(token_ids) == len(logprobs) > 0
    return None, TokenLogprobs(tuple(prompt), tuple(token_ids), logprobs, version)


async def hammer(folder, num_swaps, tmp_path):
    config = PolicyConfig(model=str(folder), max_num_seqs=32)
    config.optimizer.learning_rate = 3e-3
    config.schedule.warmup_steps = 0
    with Engine.load(config, seed=0, device="cpu") as engine:
        copies = [weights_of(engine)]
        async with serve({"m": engine.policy}) as app, async_openai(app) as client:
            chats = Chats(client)
            running = [asyncio.ensure_future(chats.run(number)) for number in range(NUM_CLIENTS)]
            for version in range(num_swaps + 1):
                if version:
                    copies.append(await asyncio.to_thread(train, engine, version))
                    await engine.policy.publish(version)
                while not any(tokens.policy_version == version for _, tokens in chats.replies[-50:]):
                    assert not any(task.done() for task in running), [
                        task.exception() for task in running if task.done()
                    ]
                    await asyncio.sleep(0.001)
            chats.stopping = True
            await asyncio.gather(*running)
    return chats.replies, copies


def train(engine, version):
    engine.begin_job()
    engine.update(random_samples(2, seed=version), LossSpec("cross_entropy"), progress_start=0.5, progress_end=0.5)
    copy = engine.policy.sampler.call(lambda: weights_of(engine))
    engine.end_job()
    return copy


@pytest.mark.parametrize(
    "num_swaps", [4, pytest.param(scaled(200), marks=[pytest.mark.fault, pytest.mark.timeout(1200)])]
)
async def test_each_reply_is_from_the_version_that_it_names(tiny_model_dir, num_swaps, tmp_path):
    replies, copies = await hammer(tiny_model_dir, num_swaps, tmp_path)
    assert {tokens.policy_version for _, tokens in replies} == set(range(num_swaps + 1)), "every version answers"
    found = await asyncio.to_thread(differences, tiny_model_dir, replies, copies)
    assert_named_weights(found)
    assert max(await asyncio.to_thread(differences, tiny_model_dir, replies, copies, 1)) > TOLERANCE


@pytest.mark.fault
async def test_without_closing_admission_replies_mix_versions(tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(EmbeddedPolicy, "close_admission", lambda self: None)
    replies, copies = await hammer(tiny_model_dir, 8, tmp_path)
    found = await asyncio.to_thread(differences, tiny_model_dir, replies, copies)
    assert max(found) > TOLERANCE
