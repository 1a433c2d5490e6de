"""Given replies as tokens: exactly the tokens that the sampler would have sampled."""

import math

import pytest

from reinforge.algorithms.samples import samples_from_trajectory
from reinforge.engine.prompts.chat_template import PromptRenderer
from reinforge.errors import ContextOverflow, EngineError
from reinforge.evaluation.demonstrations import detect_format
from reinforge.trainer.builders.dataset import DatasetTrajectoryBuilder, DatasetTrajectoryBuilderConfig
from reinforge.types.request import ModelRequest
from tests.engines import load_engine
from tests.models import make_tokenizer

USER = {"role": "user", "content": "what is the capital of France?"}
REPLY = {"role": "assistant", "content": "Paris."}
TOOLS = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}[{{ call['function']['name'] }} {{ call['function']['arguments']['q'] }}]"
    "{% endfor %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": "fox"}'}}
PLAIN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
PLAIN += "{% if add_generation_prompt %}assistant:{% endif %}"


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def encode(tokenizer, template, messages, reply):
    tokenizer.chat_template = template
    end = tokenizer.eos_token_id
    prompt, ids = PromptRenderer(tokenizer).encode(ModelRequest(messages), reply, [end])
    assert prompt == PromptRenderer(tokenizer).render(ModelRequest(messages))
    return tokenizer.decode(prompt), tokenizer.decode(ids)


def test_the_reply_is_the_assistants_text_and_its_end(tokenizer):
    template = make_tokenizer().chat_template
    asked, said = encode(tokenizer, template, [USER], REPLY)
    assert (asked, said) == ("<|user|>what is the capital of France?<|end|><|assistant|>", "Paris.<|end|>")


def test_text_after_the_end_token_is_not_trained(tokenizer):
    _, said = encode(tokenizer, TOOLS, [USER], {**REPLY, "tool_calls": [CALL], "content": ""})
    assert said == "[find fox]<|end|>"


def test_an_end_token_is_added_where_the_template_writes_none(tokenizer):
    assert encode(tokenizer, PLAIN, [USER], REPLY)[1] == " Paris.\n<|end|>"


def test_a_token_across_prompt_and_reply_is_not_used(tokenizer):
    """The prompt must be what the sampler continues, so the reply is tokenized by itself."""
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}qu{% endif %}"
    template = template.replace("{{ m['content'] }}", "{{ 'qu' if m['role'] == 'assistant' }}{{ m['content'] }}")
    asked, said = encode(tokenizer, template, [USER], {"role": "assistant", "content": "ick"})
    assert (asked, said) == ("what is the capital of France? qu", "ick <|end|>")


def test_a_template_whose_reply_does_not_continue_its_prompt_is_rejected(tokenizer):
    template = make_tokenizer().chat_template.replace("<|assistant|>{% endif %}", "<|assistant|>think: {% endif %}")
    with pytest.raises(EngineError, match="does not continue its generation prompt"):
        encode(tokenizer, template, [USER], REPLY)


@pytest.fixture(scope="module")
def policy(tiny_model_dir):
    with load_engine(tiny_model_dir, max_model_len=60) as engine:
        yield engine.policy


async def test_given_replies_have_no_sampling_log_probs(policy):
    tokens = await policy.encode(ModelRequest([USER]), REPLY)
    assert await policy.count_prompt(ModelRequest([USER])) == len(tokens.prompt_token_ids)
    assert all(map(math.isnan, tokens.logprobs))
    assert (tokens.policy_version, len(tokens.logprobs)) == (-1, len(tokens.token_ids))
    with pytest.raises(ContextOverflow, match="the limit is 60"):
        await policy.encode(ModelRequest([USER]), {"role": "assistant", "content": "a b c " * 30})


@pytest.mark.parametrize(("train_on", "learnt"), [("all", ["yes<|end|>", "no<|end|>"]), ("last", ["no<|end|>"])])
async def test_a_conversation_becomes_one_sample_that_trains_the_assistants_tokens(policy, train_on, learnt):
    said = ("go on", "yes", "and now?", "no")
    row = {"messages": [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]}
    builder = DatasetTrajectoryBuilder(DatasetTrajectoryBuilderConfig(train_on=train_on), lambda: policy)
    [trajectory] = await builder._build_group("1", {"1": row}, detect_format([row], None))
    [sample] = samples_from_trajectory(trajectory)
    decode = policy.renderer.tokenizer.decode
    whole = "<|user|>go on<|end|><|assistant|>yes<|end|><|user|>and now?<|end|><|assistant|>no<|end|>"
    assert decode(sample.token_ids) == whole
    turns = [turn for turn in sorted(set(sample.turn_ids.tolist())) if turn >= 0]
    assert [decode(sample.token_ids[sample.turn_ids == turn]) for turn in turns] == learnt
    assert (sample.loss_mask == (sample.turn_ids >= 0)).all()


WITHOUT_CALLS = (
    "{# <tool_call> #}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] or '' }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


async def test_a_given_call_is_trained_as_text_where_the_template_ignores_calls(tiny_model_dir):
    row = {
        "messages": [USER, REPLY | {"content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "fox"}, REPLY]
    }
    with load_engine(tiny_model_dir, chat_template=WITHOUT_CALLS) as engine:
        builder = DatasetTrajectoryBuilder(DatasetTrajectoryBuilderConfig(train_on="all"), lambda: engine.policy)
        [trajectory] = await builder._build_group("1", {"1": row}, detect_format([row], None))
        decode = engine.policy.renderer.tokenizer.decode
    [sample] = samples_from_trajectory(trajectory)
    turns = [turn for turn in sorted(set(sample.turn_ids.tolist())) if turn >= 0]
    call = '<tool_call>\n{"name": "find", "arguments": {"q": "fox"}}\n</tool_call><|end|>'
    assert [decode(sample.token_ids[sample.turn_ids == turn]) for turn in turns] == [call, "Paris.<|end|>"]
    assert decode(sample.token_ids).endswith(f"<|assistant|>{call}<|tool|>fox<|end|><|assistant|>Paris.<|end|>")
