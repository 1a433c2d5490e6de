"""The trained tokens are exactly the sampled tokens, in every turn; a rewritten history is noticed.

Dialogues of three turns with tools go from the agent through capture and builder to an algorithm's samples. The policy
records what it sampled, and each sample is compared with that. Most of these tokenizers do not round-trip, so a turn
that is part of the next prompt's text often becomes different tokens there.
"""

import asyncio
import json
import random
import zlib
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from reinforge.algorithms import samples as to_samples_module
from reinforge.algorithms.grpo import GRPO
from reinforge.config.finetuning_blocks import LimitsConfig, OutcomesConfig, SamplingConfig
from reinforge.config.policy import PolicyConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.engine import Engine
from reinforge.engine.prompts.chat_template import PromptRenderer
from reinforge.evaluation.run import DatasetEvaluation
from reinforge.interfaces import PolicyServer
from reinforge.rollout.models.policy_llm import PolicyLLM
from reinforge.rollout.runner import EpisodeRunner
from reinforge.rollout.workflow import bind_workflow
from reinforge.trainer.builders.group import GroupTrajectoryBuilder, GroupTrajectoryBuilderConfig
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.request import ModelReply, TokenLogprobs
from tests.doubles import Scored
from tests.fault.sizes import scaled
from tests.models import make_tiny_model
from tests.tokenizer_kinds import TOKENIZERS, make_tool_tokenizer

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("left", "right")]
ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz .,!?",
    "äöüßéñçøåĳ ",
    "a\u0301e\u0308\u200d\ufe0f\u00ad",
    "日本語中文한국어",
    "שלוםمرحبا\u202e",
    "👩👨👧🏽\u200d🏳️🌈",
    "\t\n\r\u00a0\u2028\x00\x1b\ufffd",
    '{}[]":,\\<>/|',
    "𝔘𝔫𝔦𓀀\U0010ffff",
)
LITERALS = ("<|end|>", "<|assistant|>", "<tool_call>", "\u2581", " ##ing ", "<0xE2>")


def unicode_text(rng):
    """Returns up to 40 characters of one to three scripts, sometimes with text that looks like a special token."""
    letters = "".join(rng.sample(ALPHABETS, rng.randint(1, 3)))
    text = "".join(rng.choice(letters) for _ in range(rng.randint(1, 40)))
    return text + rng.choice(LITERALS) if rng.random() < 0.2 else text


class Wrapped(PolicyServer):
    """A policy behind which another one does the work."""

    def __init__(self, policy):
        self.policy = policy

    version = property(lambda self: self.policy.version)
    model_name = property(lambda self: self.policy.model_name)
    chat_template = property(lambda self: self.policy.chat_template)
    history = property(lambda self: self.policy.history)

    async def sample(self, request):
        return await self.policy.sample(request)

    async def score(self, token_ids):
        return await self.policy.score(token_ids)

    async def publish(self, version):
        await self.policy.publish(version)

    async def fingerprint(self):
        return await self.policy.fingerprint()


class Watched(Wrapped):
    def __init__(self, policy):
        super().__init__(policy)
        self.sampled = {}

    async def sample(self, request):
        reply = await super().sample(request)
        tokens = reply.tokens
        self.sampled[request.sampling.seed] = (
            [*tokens.prompt_token_ids], [*tokens.token_ids], [*tokens.logprobs], tokens.policy_version,
        )  # fmt: skip
        return reply


class Caller(PolicyServer):
    """A policy without a model: replies with tool calls and plain texts, split into tokens at random places."""

    version, model_name = 3, "caller"

    def __init__(self, tokenizer):
        self.renderer = PromptRenderer(tokenizer)

    chat_template = property(lambda self: self.renderer.chat_template)

    async def sample(self, request):
        rng = random.Random(request.sampling.seed)
        text = unicode_text(rng)
        if rng.random() < 0.7:
            arguments = json.dumps({"text": text}, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, 1)))
            text = f'<tool_call>{{"name": "left", "arguments": {arguments}}}</tool_call>'
        cuts = [0, *sorted(rng.randrange(len(text)) for _ in range(3)), len(text)]
        pieces = [text[a:b] for a, b in pairwise(cuts)]
        ids = tuple(token for piece in pieces for token in self.renderer._text_tokenizer.tokenize(piece)) or (0,)
        logprobs = tuple(-rng.random() for _ in ids)
        prompt = self.renderer.render(request)
        tokens = TokenLogprobs(prompt, ids, logprobs, self.version)
        message = {"role": "assistant", "content": self.renderer.decode(ids)}
        return ModelReply(message, "stop", tokens, len(prompt), len(ids))

    async def score(self, token_ids):
        return [np.zeros(len(ids), np.float32) for ids in token_ids]

    async def publish(self, version):
        self.version = version

    async def fingerprint(self):
        return "no weights"


class Dialogs:
    """An agent of three turns over random texts, and everything between it and an algorithm.

    Args:
        policy: The policy that the agent calls.
        count: Number of texts.
        rewrites: True: the agent drops the history before its last turn.
    """

    def __init__(self, policy, count, *, rewrites=False):
        self.policy, self.rewrites, self.num_tool_calls = Watched(policy), rewrites, 0
        rng = random.Random(count)
        items = [
            EvalInputItem(
                id=str(i), input_obj=unicode_text(rng), expected_output_obj=unicode_text(rng), full_dataset_entry={}
            )
            for i in range(count)
        ]
        limits, outcomes = LimitsConfig(), OutcomesConfig(retries=0)
        runner = EpisodeRunner(
            bind_workflow(self.agent),
            {"agent": PolicyLLM(lambda: self.policy)},
            sampling=SamplingConfig(temperature=0.9),
            limits=limits,
            outcomes=outcomes,
            run_seed=0,
            max_concurrency=64,
        )
        self.builder = GroupTrajectoryBuilder(GroupTrajectoryBuilderConfig(num_generations=1), ["agent"])
        self.builder.evaluation = DatasetEvaluation(
            runner,
            {"train": items, "select": []},
            {"reward": Scored(lambda item: float(zlib.crc32(item.id.encode()) % 2))},
            reward_metric="reward",
            outcomes=outcomes,
        )

    async def agent(self, item, llm, context):
        messages = [
            {"role": "system", "content": item.expected_output_obj},
            {"role": "user", "content": item.input_obj},
        ]
        for turn in range(3):
            reply = await llm.chat.completions.create(messages=messages, tools=TOOLS, max_tokens=6)
            message = reply.choices[0].message
            messages = [*messages, message]
            if turn == 1 and self.rewrites:
                messages = [{"role": "user", "content": f"so far: {item.input_obj}"}]
            elif message.tool_calls:
                self.num_tool_calls += 1
                call = message.tool_calls[0]
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": call["function"]["arguments"]})
            else:
                messages.append({"role": "user", "content": item.input_obj[::-1]})
        return "done"

    async def _collect(self):
        await self.builder.initialize(FinetuneConfig(reward_function={"name": "reward"}))
        await self.builder.start_run("r", {"epoch": 0})
        return await self.builder.finalize("r", {"epoch": 0})

    def check(self):
        """Compares every sample with what was sampled; returns how many turns continued and how many started one."""
        collection = asyncio.run(self._collect())
        samples = GRPO().build_samples(collection.groups)
        by_trajectory = {}
        for sample in samples:
            by_trajectory.setdefault(sample.trajectory_index, []).append(sample)
        records = {str(record.key): record for record in self.builder.records}
        trajectories = [trajectory for group in collection.groups for trajectory in group.trajectories]
        assert sorted(by_trajectory) == [*range(len(trajectories))] == [*range(len(records))], "none is lost"
        found = Counter()
        for index, trajectory in enumerate(trajectories):
            seeds = [call.request.sampling.seed for call in records[trajectory.episode_id].calls]
            found += self._check_one([self.policy.sampled[seed] for seed in seeds], by_trajectory[index])
        return found

    def _check_one(self, sampled, samples):
        assert len(sampled) == 3
        trained, breaks = 0, 0
        for turn, (prompt, ids, logprobs, version) in enumerate(sampled):
            (sample,) = [sample for sample in samples if (sample.turn_ids == turn).any()]
            places = np.flatnonzero(sample.turn_ids == turn)
            assert places.tolist() == [*range(len(prompt), len(prompt) + len(ids))]
            assert sample.token_ids[: places[0]].tolist() == prompt
            assert sample.token_ids[places].tolist() == ids
            assert sample.sampling_logprobs[places].tolist() == np.float32(logprobs).tolist()
            assert sample.loss_mask[places].all()
            assert set(sample.policy_versions[places]) == {version}
            trained += len(ids)
            said = [token for part in sampled[turn - 1][:2] for token in part] if turn else []
            breaks += prompt[: len(said)] != said
        assert sum(sample.num_trained for sample in samples) == trained, "and nothing but what was sampled"
        assert len(samples) == 1 + breaks
        return Counter(went_on=2 - breaks, began_anew=breaks)


COUNTS = [20, pytest.param(scaled(1000), marks=pytest.mark.fault)]


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory):
    """Returns an engine with one of the tokenizers; cached."""
    made = {}

    def make(kind):
        if kind not in made:
            folder, tokenizer = tmp_path_factory.mktemp("model"), make_tool_tokenizer(kind)
            make_tiny_model(folder, vocab_size=len(tokenizer), max_position_embeddings=1024)
            for file in folder.glob("tokenizer*"):
                file.unlink()
            tokenizer.save_pretrained(folder)
            made[kind] = Engine.load(PolicyConfig(model=str(folder)), seed=0, device="cpu")
        return made[kind]

    yield make
    for engine in made.values():
        engine.close()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_trained_tokens_are_the_sampled_tokens(engine_of, kind, count):
    found = Dialogs(engine_of(kind).policy, count).check()
    assert found["began_anew"] > 0, "no reply was read back as other tokens: this shows nothing"
    assert found.total() == 2 * count


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tool_calls_are_trained_as_the_sampled_tokens(kind, count):
    """The agent sees the call as parsed JSON; the tokens are the sampled ones."""
    dialogs = Dialogs(Caller(make_tool_tokenizer(kind)), count)
    assert dialogs.check()["began_anew"] > 0
    assert dialogs.num_tool_calls > count / 4 or kind in ("unigram", "word pieces", "characters")


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_rewritten_history_starts_another_sample(engine_of, kind):
    assert Dialogs(engine_of(kind).policy, 20, rewrites=True).check()["began_anew"] >= 20


def test_a_history_that_round_trips_continues_the_sample(engine_of):
    """Otherwise the tests above might never merge two turns."""
    assert Dialogs(engine_of("byte-level pairs").policy, 40).check()["went_on"] > 0


def tokenise_again(kind):
    tokenizer = make_tool_tokenizer(kind)
    add_reply = to_samples_module._Row.add_reply

    def mutated(row, tokens, turn):
        ids = tokenizer.encode(tokenizer.decode(tokens.token_ids), add_special_tokens=False)[: len(tokens.token_ids)]
        ids = (*ids, *tokens.token_ids[len(ids) :])
        add_reply(row, TokenLogprobs(tokens.prompt_token_ids, ids, tokens.logprobs, tokens.policy_version), turn)

    return mutated


def train_the_context(row, ids):
    start = len(row.token_ids)
    row.token_ids += list(ids)
    row.mask += [True] * (len(row.token_ids) - start)
    for name, value in {"logprobs": 0.0, "temperatures": 1.0, "versions": -1, "turns": -1}.items():
        getattr(row, name).extend([value] * (len(row.token_ids) - start))


@pytest.mark.parametrize(
    ("method", "mutation"),
    [
        ("extends_to", lambda row, prompt: bool(row.token_ids)),
        ("add_context", train_the_context),
        ("add_reply", tokenise_again("byte-level pairs")),
    ],
    ids=["breaks are not seen", "context is trained", "tokenized again"],
)
def test_tokens_that_were_not_sampled_are_noticed(engine_of, monkeypatch, method, mutation):
    """Mutation check."""
    monkeypatch.setattr(to_samples_module._Row, method, mutation)
    with pytest.raises(AssertionError):
        Dialogs(engine_of("byte-level pairs").policy, 20).check()
