"""What families need of the engine: raw texts, forced calls, raw prompts, histories that continue."""

import asyncio
import json

import pytest

from reinforge.engine.prompts.chat_template import PromptRenderer
from reinforge.engine.prompts.reply_text import build_continuation
from reinforge.engine.sampling.grammar import bind_markers
from reinforge.errors import MessagesRejected
from reinforge.rollout.models.policy_llm import PolicyLLM
from reinforge.types.request import ContinuedTurn, Grammar, ModelRequest, SamplingParams
from tests.engines import load_engine
from tests.families import SPECS, TemplateTokenizer
from tests.models import make_tiny_model, make_tokenizer
from tests.samples import ask

MARKERS = ["<|im_start|>", "<|im_end|>", "<|tool_call_start|>", "<|tool_call_end|>", "<think>", "</think>"]
PARAMETERS = {
    "type": "object",
    "properties": {"to": {"enum": ["left", "right"]}, "far": {"type": "boolean"}},
    "required": ["to", "far"],
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("go", "turn")]
ASKED = [{"role": "user", "content": "go"}]
WENT_ON = [*ASKED, {"role": "assistant", "content": "left"}, {"role": "user", "content": "so?"}]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": MARKERS, "eos_token": "<|im_end|>"})
    tokenizer.chat_template = SPECS["lfm2"].text
    return tokenizer


@pytest.fixture(scope="module")
def engine(tmp_path_factory, tokenizer):
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=len(tokenizer), max_position_embeddings=2048)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    tokenizer.save_pretrained(folder)
    with load_engine(folder) as engine:
        yield engine


def sample(engine, choice="auto", count=4, max_tokens=120, **fields):
    llm = PolicyLLM(lambda: engine.policy)

    async def sample_all():
        asked = [
            ModelRequest(ASKED, SamplingParams(seed=s, max_tokens=max_tokens), TOOLS, tool_choice=choice, **fields)
            for s in range(count)
        ]
        return await asyncio.gather(*(llm.sample(each) for each in asked))

    return asyncio.run(sample_all())


def names_of(reply):
    return [call["function"]["name"] for call in reply.message.get("tool_calls") or ()]


@pytest.mark.parametrize("choice", ["required", "turn"])
def test_a_random_model_calls_the_tool_that_it_must_call(engine, tokenizer, choice):
    begun = tokenizer.convert_tokens_to_ids("<|tool_call_start|>")
    for reply in sample(engine, choice, parallel_tool_calls=False, template_kwargs={"enable_thinking": False}):
        assert names_of(reply) in ([["turn"]] if choice == "turn" else [["go"], ["turn"]]), reply
        arguments = json.loads(reply.message["tool_calls"][0]["function"]["arguments"])
        assert arguments["to"] in ("left", "right")
        assert arguments["far"] in (True, False)
        assert reply.finish_reason == "tool_calls"
        assert begun in reply.tokens.token_ids  # the special token, which `content` would have lost
        assert tokenizer.decode(reply.tokens.token_ids) in [
            f"{reply.raw_text}{end}" for end in ("<|im_end|>", "<|end|>")
        ]
        assert len(reply.tokens.supports.counts) == len(reply.tokens.token_ids)


def test_a_model_that_must_not_call_a_tool_calls_none(engine, tokenizer):
    begun = tokenizer.convert_tokens_to_ids("<|tool_call_start|>")
    for reply in sample(engine, "none", 6):
        assert begun not in reply.tokens.token_ids


def test_a_tool_that_does_not_exist_is_refused(engine):
    with pytest.raises(ValueError, match="there is no tool 'fly' in this request; its tools: go, turn"):
        sample(engine, "fly")


def test_raw_text_is_there_only_if_special_tokens_are(tokenizer):
    renderer = PromptRenderer(tokenizer, [tokenizer.eos_token_id])
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    assert renderer.decode_raw(encode("left")) is None
    assert renderer.decode_raw(encode("left<|im_end|>")) is None, "what ended it does not count"
    call = "<|tool_call_start|>[go()]<|tool_call_end|>"
    assert renderer.decode_raw(encode(f"{call}<|im_end|>")) == call
    assert renderer.decode(encode(call)) == "[go()]"


def test_a_stop_text_cuts_the_raw_text_too(engine, tokenizer, monkeypatch):
    monkeypatch.setattr(engine.policy.renderer, "decode_raw", lambda ids: "<|tool_call_start|>a#b")
    monkeypatch.setattr(engine.policy.renderer, "decode", lambda ids: "a#b")
    reply = ask(engine.policy, [ModelRequest(ASKED, SamplingParams(seed=1, max_tokens=4, stop=("#",)))])[0]
    assert (reply.message["content"], reply.raw_text) == ("a", "<|tool_call_start|>a")


def test_a_raw_prompt_is_sampled_without_the_template(engine, tokenizer):
    ids = tuple(tokenizer.encode("the quick brown"))
    params = SamplingParams(seed=1, max_tokens=4)
    text, numbers = ask(engine.policy, [ModelRequest([], params, prompt=p) for p in ("the quick brown", ids)])
    assert text.tokens.prompt_token_ids == numbers.tokens.prompt_token_ids == ids
    assert text.tokens.token_ids == numbers.tokens.token_ids


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("", "the prompt is empty"),
        ((), "the prompt is empty"),
        ((1, 10**9), "the prompt has the token 1000000000; expected token ids from 0 to"),
        ((-1,), "the prompt has the token -1"),
        ((True,), "the prompt has the token True"),
        ("a\ud800", "an unpaired surrogate"),
    ],
)
def test_a_raw_prompt_that_is_none_is_refused(engine, prompt, reason):
    with pytest.raises(ValueError, match=reason):
        ask(engine.policy, [ModelRequest([], SamplingParams(max_tokens=4), prompt=prompt)])


def test_markers_become_tokens_where_the_tokenizer_has_them():
    text = 'start: until_0 marker_1 "<call>"\nuntil_0[suffix="</think>"]: /(?s:.*)/\nmarker_1: "<call>"\n'
    assert bind_markers(text, {}) == text
    assert bind_markers(text, {"<call>": 7}) == text.replace('marker_1: "<call>"', "marker_1: <[7]>")
    assert "until_0: /(?s:.*)/ <[8]>\n" in bind_markers(text, {"</think>": 8})


def test_grammars_of_other_kinds_are_left_alone(tokenizer):
    grammar = Grammar("regex", 'marker_1: "<think>"')
    assert PromptRenderer(tokenizer).bind_grammar(grammar) is grammar


CALL = {"id": "c", "type": "function", "function": {"name": "go", "arguments": '{"to": "left"}'}}
CALLED = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}]


MAPPING = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}-{{ c.function.arguments.to }}-{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "text"), [(SPECS["deepseek_v3"].text, 'go\n```json\n{"to": "left"}\n```'), (MAPPING, "-left-")]
)
def test_a_template_gets_arguments_as_it_takes_them(template, text):
    renderer = PromptRenderer(TemplateTokenizer(template))
    assert text in renderer._render_text(ModelRequest(CALLED), CALLED, add_generation_prompt=False)


def test_a_template_that_rejects_messages_still_does():
    renderer = PromptRenderer(TemplateTokenizer("{{ raise_exception('no') }}"))
    for messages in (ASKED, CALLED):
        with pytest.raises(MessagesRejected, match="no"):
            renderer._render_text(ModelRequest(messages), messages, add_generation_prompt=False)


def render_plainly(messages, prompt):
    return "".join(f"<{m['role']}>{m['content']}<end>\n" for m in messages) + "<assistant>" * prompt


@pytest.mark.parametrize(
    ("end", "ends", "text"),
    [
        ("<end>", ["<end>"], "\n<user>so?<end>\n<assistant>"),
        (None, ["<end>"], "<end>\n<user>so?<end>\n<assistant>"),  # cut off: the template's end is added
        ("<eos>", ["<eos>"], "<user>so?<end>\n<assistant>"),  # ended by a token that the template does not write
        ("<eos>", ["<eos>", "<end>"], "\n<user>so?<end>\n<assistant>"),  # by another end than the template's
    ],
)
def test_a_continuation_begins_behind_the_token_that_ended_the_reply(end, ends, text):
    assert build_continuation(render_plainly, WENT_ON, 2, end, ends) == text


def test_a_reply_that_the_template_does_not_show_is_not_continued(tokenizer):
    assert build_continuation(lambda messages, prompt: "fixed", WENT_ON, 2, "<end>", ["<end>"]) is None


def test_only_a_spliced_history_reads_the_earlier_call(tokenizer):
    ends = [tokenizer.eos_token_id]
    ids = (*tokenizer.encode("anything"), tokenizer.eos_token_id)
    asked = ModelRequest(WENT_ON, continued=ContinuedTurn(2, ids))
    plain, spliced = (PromptRenderer(tokenizer, ends, history=h).render(asked) for h in ("template", "splice"))
    assert "anything" not in tokenizer.decode(plain)
    new = "\n<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(spliced) == f"anything<|im_end|>{new}"
    assert spliced[: len(ids)] == ids
