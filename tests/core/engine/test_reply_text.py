"""A reply's text while its tokens arrive: whole characters, no stop text, no special tokens that it leaves out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforge.engine.prompts.chat_template import PromptRenderer
from reinforge.types.request import ModelReply, ModelRequest, SamplingParams
from reinforge.types.text_markers import count_held, find_marker
from tests.models import make_tokenizer

TOKENIZER = make_tokenizer()
RENDERER = PromptRenderer(TOKENIZER, [TOKENIZER.eos_token_id])


def stream(pieces, markers=(), stop=()):
    text = RENDERER.open_text(markers, stop)
    return [text.add(piece) for piece in pieces]


def tokenize(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_a_character_comes_when_its_last_token_does():
    ids = tokenize("é🙂!")
    assert len(ids) > 3
    texts = stream([[token] for token in ids])
    assert [text for text in texts if text] == ["é", "🙂", "!"]


def test_special_tokens_are_left_out_unless_they_are_markers():
    ids = tokenize("yes<|tools|>no<|end|>")
    assert stream([ids]) == ["yesno"]
    assert "".join(stream([[token] for token in ids], markers=("<|tools|>[",))) == "yes<|tools|>no"


def test_what_may_be_a_stop_text_is_held_back():
    assert "".join(stream([[token] for token in tokenize("a fox jump")], stop=("fox jumps",))) == "a "
    assert "".join(stream([[token] for token in tokenize("a fox jumps")], stop=("fox jumped",))) == "a fox jumps"
    assert "".join(stream([[token] for token in tokenize("the dog; no")], stop=("cat", "dog"))) == "the "


@settings(max_examples=40)
@given(
    text=st.text(alphabet="abfox jumps.é🙂漢\n", max_size=40),
    cuts=st.lists(st.integers(1, 4), min_size=1, max_size=20),
    stop=st.sampled_from([(), ("fox",), ("漢", "ju")]),
)
def test_the_pieces_are_the_beginning_of_the_whole_text(text, cuts, stop):
    ids, pieces = tokenize(text), []
    while ids:
        count = cuts[len(pieces) % len(cuts)]
        pieces.append(ids[:count])
        ids = ids[count:]
    sent = "".join(stream(pieces, stop=stop))
    place = find_marker(text, stop)
    assert sent == text[: place if place >= 0 else len(text) - count_held(text, stop)]


@pytest.mark.parametrize(
    ("text", "markers", "count"),
    [("a <tool", ("<tool_call>",), 5), ("a < b", ("<tool_call>",), 0), ("ab", ("abc", "b!"), 2), ("", ("x",), 0)],
)
def test_how_much_may_be_the_beginning_of_a_marker(text, markers, count):
    assert count_held(text, markers) == count


async def test_a_policy_streams_the_reply_that_it_would_sample(tiny_model_dir):
    from tests.engines import load_engine

    with load_engine(tiny_model_dir, device="cpu", frozen=True) as engine:
        for seed, stop in ((1, ()), (2, ("a", "e")), (3, ())):
            params = SamplingParams(max_tokens=30, seed=seed, stop=stop)
            request = ModelRequest([{"role": "user", "content": "hi"}], params, num_top_logprobs=2)
            whole = await engine.policy.sample(request)
            *pieces, reply = [each async for each in engine.policy.stream(request)]
            assert isinstance(reply, ModelReply)
            assert reply.message == whole.message
            assert reply.tokens.token_ids == whole.tokens.token_ids
            assert sum((piece.tokens.token_ids for piece in pieces), ()) == whole.tokens.token_ids
            sampled = sum((piece.tokens.logprobs for piece in pieces), ())
            assert sampled == pytest.approx(whole.tokens.logprobs, abs=1e-5)
            assert sum((piece.tokens.top_logprobs for piece in pieces), ()) == reply.tokens.top_logprobs
            assert whole.message["content"].startswith("".join(piece.text for piece in pieces))
