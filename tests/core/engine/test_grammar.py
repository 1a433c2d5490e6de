"""Replies held to a grammar: what they look like, how they end, and which requests fail alone."""

import asyncio
import json
import re
import sys
import threading
from dataclasses import replace

import pytest
from jsonschema import validate

from reinforge.engine.sampling import constraints, grammar
from reinforge.errors import ConfigError
from reinforge.types.request import Grammar, ModelRequest
from tests.engines import load_engine
from tests.samples import ask, outcomes, request

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["bug", "question"]},
        "level": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["name", "kind", "level"],
    "additionalProperties": False,
}
DIGITS = Grammar("regex", "[0-9]{3,5}")
NO_END = ((1, -100.0),)
"""Bans the tiny tokenizer's end token."""
AMBIGUOUS = Grammar("lark", 'start: s\ns: "" | "a" | s s s | s s')


@pytest.fixture(scope="module")
def engine(tiny_model_dir):
    with load_engine(tiny_model_dir, max_num_seqs=16, deterministic=True) as engine:
        yield engine


def held(text: str | Grammar, **params) -> ModelRequest:
    asked = text if isinstance(text, Grammar) else Grammar("json_schema", text)
    return replace(request(**{"max_tokens": 120, **params}), grammar=asked)


def contents(replies):
    return [reply.message["content"] for reply in replies]


def test_replies_match_the_schema_and_end_with_the_end_token(engine):
    kinds = [{}, {"top_p": 0.8}, {"top_k": 40, "temperature": 1.3}, {"temperature": 0}]
    asked = [held(json.dumps(SCHEMA), seed=seed, **params) for params in kinds for seed in range(3)]
    for reply in ask(engine.policy, asked):
        validate(json.loads(reply.message["content"]), SCHEMA)
        assert reply.finish_reason == "stop"
        assert reply.tokens.token_ids[-1] == engine.tokenizer.eos_token_id
        assert engine.tokenizer.eos_token_id not in reply.tokens.token_ids[:-1]


def test_without_the_grammar_the_same_model_writes_none_of_it(engine):
    """Mutation check: the grammar, not the model, makes the replies match."""
    for reply in ask(engine.policy, [request(seed=seed, max_tokens=60) for seed in range(4)]):
        with pytest.raises(ValueError):  # noqa: PT011  json's own error
            json.loads(reply.message["content"])


def test_regular_expressions_and_lark(engine):
    lark = Grammar("lark", 'start: "yes" | "no, " /[a-c]+/')
    replies = contents(ask(engine.policy, [held(asked, seed=i) for i in range(4) for asked in (DIGITS, lark)]))
    assert all(re.fullmatch("[0-9]{3,5}", text) for text in replies[::2])
    assert all(re.fullmatch("yes|no, [a-c]*", text) for text in replies[1::2])


@pytest.mark.parametrize(("whitespace", "finish_reason"), [(None, "stop"), (r"[ \n\r\t]*", "length")])
def test_a_model_that_loves_line_breaks_still_completes_its_json(engine, monkeypatch, whitespace, finish_reason):
    """Line breaks are biased. Mutation check: where JSON's own whitespace is allowed, nothing else is written."""
    schema = {**SCHEMA, "title": finish_reason}  # no compiled grammar is found in the cache
    if whitespace is not None:
        monkeypatch.setattr(grammar, "WHITESPACE", whitespace)
    (line_break,) = engine.tokenizer.encode("\n", add_special_tokens=False)
    (reply,) = ask(engine.policy, [held(json.dumps(schema), logit_bias=((line_break, 99.0),))])
    assert reply.finish_reason == finish_reason


def test_max_tokens_cuts_the_reply(engine):
    (reply,) = ask(engine.policy, [held(json.dumps(SCHEMA), max_tokens=4)])
    assert (reply.finish_reason, len(reply.tokens.token_ids)) == ("length", 4)


def test_a_stop_text_still_ends_the_reply(engine):
    replies = ask(engine.policy, [held(Grammar("regex", "(ab|cd){20}"), seed=seed, stop=("cd",)) for seed in range(8)])
    assert all(re.fullmatch("(ab)*", text) for text in contents(replies))
    assert {reply.finish_reason for reply in replies} == {"stop"}


@pytest.mark.slow
def test_seeds_repeat_and_neighbors_do_not_matter(engine):
    """Alone or next to others, constrained or not, a seed gives the same reply to the bit."""
    free, constrained = request(seed=3, max_tokens=40), held(json.dumps(SCHEMA), seed=3)
    banned = request(seed=3, logit_bias=((7, -100.0),))
    alone = [ask(engine.policy, [asked])[0] for asked in (free, constrained, banned)]
    others = [held(DIGITS, seed=9), request(seed=8, frequency_penalty=1.0), held(json.dumps(SCHEMA), top_p=0.9)]
    together = ask(engine.policy, [others[0], free, others[1], constrained, others[2], banned])
    assert [together[1], together[3], together[5]] == alone


BAD = [
    (Grammar("regex", "(("), "cannot constrain the reply to this regex: at 1(8): invalid regex"),
    (Grammar("lark", "start: x"), 'cannot constrain the reply to this lark: at 1(8): unknown name: "x"'),
    (
        Grammar("json_schema", '{"type": "strin"}'),
        "cannot constrain the reply to this json schema: Invalid type: strin",
    ),
    (Grammar("json_schema", '{"not": {}}'), 'Unimplemented keys: ["not"]'),
    (Grammar("json_schema", '{"type'), "cannot constrain the reply to this json schema: EOF"),
    (Grammar("regex", r"[^\s\S]"), "no text matches it"),
    (Grammar("regex", "a" * 300_000), "it has 300,000 characters, but the limit is 256,000"),
    (Grammar("json_schema", "[" * 5000), "recursion limit"),
]


@pytest.mark.parametrize(("asked", "message"), BAD, ids=range(len(BAD)))
def test_a_grammar_that_cannot_be_enforced_fails_alone_before_sampling(engine, asked, message):
    before = engine.policy.stats().prompt_tokens
    good, bad = outcomes(engine, request(seed=1), held(asked))
    assert isinstance(bad, ValueError)
    assert not isinstance(bad, ConfigError)
    assert message in str(bad)
    assert engine.policy.stats().prompt_tokens - before == good.num_prompt_tokens


def test_bans_that_leave_the_grammar_nothing_end_the_reply(engine):
    """Digits are banned after the first letter; `stop` where the text is complete, `length` where it is not."""
    digits = tuple(
        (token, -100.0) for token in range(320) if any(c.isdigit() for c in engine.tokenizer.decode([token]))
    )
    complete, cut = ask(
        engine.policy,
        [
            held(Grammar("regex", "x[0-9]*"), logit_bias=(*digits, (engine.tokenizer.eos_token_id, -100.0))),
            held(Grammar("regex", "x[0-9]+"), logit_bias=digits),
        ],
    )
    assert [(reply.message["content"], reply.finish_reason) for reply in (complete, cut)] == [
        ("x", "stop"),
        ("x", "length"),
    ]


def test_a_grammar_is_compiled_once(engine):
    compiler = grammar.GrammarCompiler(engine.tokenizer, 320, [engine.tokenizer.eos_token_id])

    async def both():
        return await asyncio.gather(compiler.compile(DIGITS), compiler.compile(DIGITS))

    first, second = asyncio.run(both())
    assert first is second
    assert asyncio.run(compiler.compile(DIGITS)) is first
    compiler.close()


def test_the_loop_and_the_sampler_go_on_while_a_grammar_is_compiled(engine, monkeypatch):
    """The compile is held until another reply is there; a caller that gives up does not cancel it for others."""
    released, package = threading.Event(), grammar.import_llguidance()

    def wait():
        assert released.wait(60)
        return package

    monkeypatch.setattr(grammar, "import_llguidance", wait)
    asked = held(Grammar("regex", "held-[a-z]"))

    async def sample():
        waiting, leaving = (asyncio.ensure_future(engine.policy.sample(asked)) for _ in range(2))
        free = await engine.policy.sample(request())
        leaving.cancel()
        released.set()
        return free, await waiting

    free, reply = asyncio.run(sample())
    assert free.num_completion_tokens > 0
    assert re.fullmatch("held-[a-z]", reply.message["content"])


def test_an_explosive_grammar_fails_alone_at_the_limit_of_ways(engine, monkeypatch):
    """The more letters, the more ways to read them: with a limit of 40 ways the reply ends with that error, alone.

    Mutation check: with the real limit of 500, twenty letters are no error.
    """
    limits = {"logit_bias": NO_END, "max_tokens": 20}
    with monkeypatch.context() as patch:
        patch.setattr(grammar, "MAX_ROW_ITEMS", 40)
        good, bad = outcomes(engine, request(seed=1), held(AMBIGUOUS, **limits))
    assert isinstance(bad, ValueError)
    assert "the reply's grammar is too complex" in str(bad)
    assert good == ask(engine.policy, [request(seed=1)])[0]
    anew = Grammar(AMBIGUOUS.kind, f"{AMBIGUOUS.text}\n")
    assert outcomes(engine, held(anew, **limits))[0].num_completion_tokens == 20


def test_a_grammar_that_takes_too_long_fails_alone(engine, monkeypatch):
    monkeypatch.setattr(constraints, "GRACE_S", 0.0)
    monkeypatch.setattr(constraints, "SECONDS_PER_TOKEN", 0.0)
    good, bad = outcomes(engine, request(seed=1), held(DIGITS, seed=1))
    assert isinstance(bad, ValueError)
    assert "the reply's grammar is too slow" in str(bad)
    assert good == ask(engine.policy, [request(seed=1)])[0]


def test_without_llguidance_the_error_names_the_extra(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    free, constrained = outcomes(engine, request(), held(Grammar("regex", "not compiled before")))
    assert free.num_completion_tokens > 0
    assert isinstance(constrained, ConfigError)
    assert 'pip install "reinforge[train]"' in str(constrained)
