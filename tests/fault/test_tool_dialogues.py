"""Dialogues with tools of seven families over five tokenizers: what is trained is what was sampled, in either history.

With `history: splice` every prompt continues the sampled tokens, so that an episode is always one sample. With
`template` it is as many samples as the template changes earlier replies.
"""

import asyncio
import itertools
import json
import random
from itertools import pairwise

import pytest

from reinforge.algorithms.samples import samples_from_trajectory
from reinforge.config.policy import PolicyConfig
from reinforge.dialects.tool_calls import prepare_request
from reinforge.engine import Engine
from reinforge.engine.prompts.chat_template import PromptRenderer
from reinforge.interfaces import PolicyServer
from reinforge.rollout import history as history_module
from reinforge.rollout.capture import AsyncLLM, Capture
from reinforge.rollout.models.policy_llm import PolicyLLM
from reinforge.types.request import ModelReply, TokenLogprobs
from reinforge.types.trajectory import EpisodeItem, Trajectory
from tests.families import SPECS, DialogueMaker
from tests.fault.sizes import scaled
from tests.fault.test_token_fidelity import Dialogs
from tests.models import make_tiny_model
from tests.tokenizer_kinds import TOKENIZERS

FAMILIES = ("hermes", "qwen_xml", "lfm2", "mistral", "deepseek_v3", "gemma", "harmony")
MARKERS = (
    "<|im_start|>", "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[INST]",
    "[/INST]", "[THINK]", "[/THINK]", "<|tool_call_start|>", "<|tool_call_end|>", "<|turn>", "<|tool_call>",
    "<tool_call|>", '<|"|>', "<｜Assistant｜>", "<｜User｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|channel|>", "<|message|>", "<|start|>",
    "<|end|>",
    "<|call|>",
)  # fmt: skip
NUM_DIALOGUES = scaled(10_000)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": {"text": {"type": "string"}}}}}
    for name in ("left", "right")
]
QUICK = list(zip(FAMILIES, itertools.cycle(TOKENIZERS)))
"""Each family, and each tokenizer."""
LONG = -(-NUM_DIALOGUES // (len(FAMILIES) * len(TOKENIZERS)))
CASES = pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        *((name, kind, 4) for name, kind in QUICK),
        *(pytest.param(*case, LONG, marks=pytest.mark.fault) for case in itertools.product(FAMILIES, TOKENIZERS)),
    ],
)


def make_family_tokenizer(kind, name):
    tokenizer, spec = TOKENIZERS[kind](), SPECS[name]
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKERS), "eos_token": spec.end})
    tokenizer.chat_template = spec.text
    return tokenizer


class FamilyCaller(PolicyServer):
    """A policy without a model: writes calls, reasoning and text as its family does, split into tokens at random."""

    version, model_name = 3, "family caller"
    chat_template = property(lambda self: self.renderer.chat_template)
    history = property(lambda self: self.renderer.history)

    def __init__(self, tokenizer, spec, history):
        ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|call|>")]
        self.renderer, self.spec = PromptRenderer(tokenizer, ends, history=history), spec

    async def sample(self, request):
        rng = random.Random(request.sampling.seed)
        ids = self._sample(rng, self._write(request, rng))
        prompt = self.renderer.render(request)
        tokens = TokenLogprobs(prompt, ids, tuple(-rng.random() for _ in ids), self.version)
        message = {"role": "assistant", "content": self.renderer.decode(ids)}
        return ModelReply(message, "stop", tokens, len(prompt), len(ids), raw_text=self.renderer.decode_raw(ids))

    def _write(self, request, rng):
        reply = DialogueMaker(self.spec, rng.random()).make_reply(request.tools)
        messages = [{"role": "user", "content": "?"}]
        asked = self.renderer._render_text(request, messages, add_generation_prompt=True)
        whole = self.renderer._render_text(request, [*messages, reply], add_generation_prompt=False)
        return whole[len(asked) :].rstrip("\n")

    def _sample(self, rng, text):
        cuts = [0, *sorted(rng.randrange(len(text)) for _ in range(3)), len(text)]
        ids = [token for a, b in pairwise(cuts) for token in self.renderer._text_tokenizer.tokenize(text[a:b])]
        return tuple(ids[: rng.randint(1, len(ids))] if rng.random() < 0.1 else ids) or (0,)  # some are cut off

    async def score(self, token_ids):
        raise NotImplementedError

    async def publish(self, version):
        self.version = version

    async def fingerprint(self):
        return "no weights"


class ToolDialogs(Dialogs):
    async def agent(self, item, llm, context):
        rng = random.Random(item.input_obj)
        messages = [{"role": "user", "content": item.input_obj}]
        for _ in range(3):
            reply = await llm.chat.completions.create(messages=messages, tools=TOOLS)
            message = json.loads(json.dumps(reply.choices[0].message))
            if rng.random() < 0.5:
                message.pop("reasoning_content", None)
            messages = [*messages, message]
            calls = message.get("tool_calls") or []
            self.num_tool_calls += len(calls)
            messages += [{"role": "tool", "tool_call_id": c["id"], "content": item.input_obj} for c in calls]
            if not calls:
                messages.append({"role": "user", "content": item.input_obj[::-1]})
        return "done"


@CASES
def test_a_spliced_history_continues_the_sampled_tokens(name, kind, count):
    dialogs = ToolDialogs(FamilyCaller(make_family_tokenizer(kind, name), SPECS[name], "splice"), count)
    assert dialogs.check() == {"went_on": 2 * count}


@CASES
def test_a_rendered_history_is_trained_as_it_was_sampled(name, kind, count):
    dialogs = ToolDialogs(FamilyCaller(make_family_tokenizer(kind, name), SPECS[name], "template"), count)
    assert dialogs.check().total() == 2 * count
    assert dialogs.num_tool_calls > 0 or kind != "byte-level pairs"


def test_without_the_earlier_call_a_spliced_history_breaks(monkeypatch):
    """Mutation check: this shows what the test above would see."""
    monkeypatch.setattr(history_module, "_find_reply", lambda call, request: None)
    tokenizer = make_family_tokenizer("byte-level pairs", "hermes")
    assert ToolDialogs(FamilyCaller(tokenizer, SPECS["hermes"], "splice"), 20).check()["began_anew"] > 0


@pytest.mark.parametrize("history", ["template", "splice"])
def test_the_engine_continues_what_it_sampled(tmp_path, history):
    tokenizer = make_family_tokenizer("byte-level pairs", "hermes")
    make_tiny_model(tmp_path, vocab_size=len(tokenizer), max_position_embeddings=2048)
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    tokenizer.save_pretrained(tmp_path)
    with Engine.load(PolicyConfig(model=str(tmp_path), history=history), seed=0, device="cpu") as engine:
        assert engine.policy.history == history
        found = ShortDialogs(engine.policy, 20).check()
    assert (found["began_anew"] == 0) is (history == "splice")
    assert found.total() == 40


class ShortDialogs(Dialogs):
    async def agent(self, item, llm, context):
        messages = [{"role": "user", "content": "a"}]
        for _ in range(3):
            reply = await llm.chat.completions.create(messages=messages, tools=TOOLS, max_tokens=12)
            messages = [*messages, reply.choices[0].message, {"role": "user", "content": "b"}]
        return "done"


class Scripted(FamilyCaller):
    """Writes given texts, one after the other."""

    def __init__(self, tokenizer, spec, history, texts):
        super().__init__(tokenizer, spec, history)
        self.texts = [*texts]

    def _write(self, request, rng):
        return self.texts.pop(0)

    def _sample(self, rng, text):
        return tuple(self.renderer._text_tokenizer.tokenize(text))


async def talk(policy):
    capture = Capture(seed=1)
    llm = AsyncLLM("agent", PolicyLLM(lambda: policy), capture, None)
    messages = [{"role": "user", "content": "2+3?"}]
    for _ in range(2):
        reply = await llm.chat.completions.create(messages=messages)
        message = reply.choices[0].message
        messages += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": "really?"}]
    items = [EpisodeItem(role="assistant", content="", logprobs=call.reply.tokens) for call in capture.calls]
    return Trajectory(episode=items, reward=1.0)


@pytest.mark.parametrize(("history", "num_samples"), [("template", 2), ("splice", 1)])
def test_a_template_that_drops_earlier_reasoning_splits_the_episode(history, num_samples):
    tokenizer = make_family_tokenizer("byte-level pairs", "hermes")
    texts = ["<think>\nhm\n</think>\n\n5<|im_end|>", "yes<|im_end|>"]
    policy = Scripted(tokenizer, SPECS["hermes"], history, texts)
    samples = samples_from_trajectory(asyncio.run(talk(policy)))
    assert len(samples) == num_samples
    trained = "".join(tokenizer.decode(sample.token_ids[sample.loss_mask]) for sample in samples)
    assert trained == "".join(texts)
    whole = [tokenizer.decode(sample.token_ids) for sample in samples]
    begin, again = "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>user\nreally?<|im_end|>\n"
    second = f"{again}<|im_start|>assistant\n{texts[1]}"
    if history == "splice":
        assert whole == [f"{begin}{texts[0]}\n{second}"]
    else:
        assert whole == [f"{begin}{texts[0]}", f"{begin}5<|im_end|>\n{second}"]


def test_messages_are_rendered_as_the_request_has_them():
    """`prepare_request` must not change what `continued` counts."""
    tools = [*TOOLS]
    maker = DialogueMaker(SPECS["gemma3"], 1)
    while not (reply := maker.make_reply(tools)).get("tool_calls"):
        pass
    from reinforge.types.request import ModelRequest

    request = ModelRequest([{"role": "user", "content": "?"}, reply], tools=tools)
    assert len(prepare_request(request, SPECS["gemma3"].text).messages) == len(request.messages)
