"""A journalled episode comes back as it was: the same calls, and the same samples from them."""

import json

import numpy as np
import pytest

from reinforge.algorithms.samples import samples_from_trajectory
from reinforge.files import to_json
from reinforge.rollout.episode import build_trajectory
from reinforge.runs.episodes import describe_versions
from reinforge.runs.journal.episode_json import dump_episode, dump_tokens, parse_episode, parse_tokens
from reinforge.runs.journal.packing import EpisodePacker, unpack_episode
from reinforge.types.episode import EpisodeKey, EpisodeRecord, ModelCall
from reinforge.types.request import Grammar, ModelReply, ModelRequest, SamplingParams, TokenLogprobs
from reinforge.types.supports import Supports
from tests.doubles import examples

PROMPT = [{"role": "user", "content": "hi"}]


def record_of(tokens, sampling):
    reply = ModelReply({"role": "assistant", "content": "x"}, "stop", tokens, 2, len(tokens.token_ids))
    call = ModelCall("c0", "agent", "m", ModelRequest(PROMPT, sampling), reply, (), 0.0, 1.0)
    return EpisodeRecord(EpisodeKey("collect", 0, "e"), examples(1)[0], calls=[call])


def again(record):
    return parse_episode(json.loads(to_json(dump_episode(record))), record.item)


def cut_tokens(rng, sampling, length=9, vocab_size=152_000):
    sets = [np.unique(rng.integers(0, vocab_size, size)).astype(np.int32) for size in rng.integers(0, 60, length)]
    return TokenLogprobs(
        (1, 2),
        tuple(int(words[0]) if len(words) else 7 for words in sets),
        tuple(rng.normal(-3, 1, length).astype(np.float32).tolist()),
        policy_version=4,
        temperature=sampling.temperature,
        restricted=True,
        processed_logprobs=tuple(rng.normal(-1, 1, length).astype(np.float32).tolist()),
        supports=Supports.from_sets(sets),
    )


@pytest.mark.parametrize("seed", range(3))
def test_supports_round_trip_bit_for_bit(seed):
    sampling = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, min_p=0.02, seed=2**62 + 1)
    record = record_of(cut_tokens(np.random.default_rng(seed), sampling), sampling)
    back = again(record)
    assert back.calls[0].reply == record.calls[0].reply
    assert back.calls[0].request.sampling == sampling
    (before,), (after,) = (samples_from_trajectory(build_trajectory(r, 1.0, [True])) for r in (record, back))
    assert before.supports == after.supports
    assert before.supports.counts.max() > 0
    for name in ("token_ids", "loss_mask", "sampling_logprobs", "temperatures", "policy_versions", "turn_ids"):
        assert (getattr(before, name) == getattr(after, name)).all(), name


def test_a_sample_holds_the_tokens_with_recorded_supports():
    """A token without a set is context; the others carry their processed log-probs and their words."""
    sets = [np.array([4, 9], np.int32), np.zeros(0, np.int32), np.array([7], np.int32)]
    tokens = TokenLogprobs(
        (1, 2),
        (9, 5, 7),
        (-2.0, -3.0, -1.0),
        restricted=True,
        processed_logprobs=(-0.5, -2.5, 0.0),
        supports=Supports.from_sets(sets),
    )
    (sample,) = samples_from_trajectory(build_trajectory(record_of(tokens, SamplingParams(top_p=0.5)), 1.0, [True]))
    assert sample.loss_mask.tolist() == [False, False, True, False, True]
    assert sample.sampling_logprobs.tolist() == [0, 0, -0.5, 0, 0]
    assert sample.turn_ids.tolist() == [-1, -1, 0, -1, 0]
    assert [words.tolist() for words in sample.supports.sets] == [[], [], [4, 9], [], [7]]


def test_wide_supports_take_little_space():
    """64 tokens of 300 neighboring words each would be 76,800 bytes as they are."""
    sets = [np.arange(token, token + 300, dtype=np.int32) for token in range(64)]
    supports = Supports.from_sets(sets)
    assert len(supports.packed_token_ids) == 76_800
    tokens = TokenLogprobs(
        (1,), (5,) * 64, (-1.0,) * 64, restricted=True, processed_logprobs=(-1.0,) * 64, supports=supports
    )
    assert len(to_json(dump_episode(record_of(tokens, SamplingParams(top_p=0.9)))["calls"][0]["supports"])) < 1000


def test_the_version_of_a_reply_without_tokens_round_trips():
    for version in (3, None):
        reply = ModelReply({"role": "assistant", "content": "x"}, "stop", None, 2, 1, policy_version=version)
        call = ModelCall("c0", "agent", "m", ModelRequest(PROMPT), reply, (), 0.0, 1.0)
        found = again(EpisodeRecord(EpisodeKey("collect", 0, "e"), examples(1)[0], calls=[call])).calls[0]
        assert (found.reply, found.training_source) == (reply, call.training_source)
        assert found.reply.version == version


def test_the_versions_of_a_reply_that_newer_weights_continued_round_trip():
    """Each token is trained with the version that sampled it."""
    tokens = TokenLogprobs((1, 2), (5, 6, 7), (-1.0, -2.0, -3.0), 4, later_versions=((1, 5), (2, 6)))
    episode = record_of(tokens, SamplingParams())
    found = again(episode).calls[0].reply
    assert (found.tokens, found.version, found.newest_version) == (tokens, 4, 6)
    packed = EpisodePacker(dump_episode(episode)).compress()
    assert parse_episode(unpack_episode(packed), examples(1)[0]).calls[0].reply.tokens == tokens
    [sample] = samples_from_trajectory(build_trajectory(episode, 1.0, [True]))
    assert sample.policy_versions.tolist() == [-1, -1, 4, 5, 6]
    assert "versions 4, 5, 6" in describe_versions(dump_episode(episode)["calls"][0])


TOOLS = [{"type": "function", "function": {"name": "add"}}]
SAMPLING = SamplingParams(
    0.7, max_tokens=9, stop=("a", "b"), frequency_penalty=0.5, presence_penalty=-1.0, logit_bias=((5, 1.5), (11, -100))
)


@pytest.mark.parametrize(
    "request_",
    [
        ModelRequest(PROMPT, SAMPLING, TOOLS, {"enable_thinking": False}, tool_choice="add", parallel_tool_calls=False),
        ModelRequest(PROMPT, SamplingParams(), grammar=Grammar("json_schema", '{"type":"object"}')),
        ModelRequest(PROMPT, SamplingParams(), prompt="2 + 2 ="),
        ModelRequest(PROMPT, SamplingParams(), prompt=(5, 6)),
    ],
)
def test_a_record_tells_how_a_reply_was_sampled(request_):
    record = record_of(TokenLogprobs((1, 2), (5,), (-1.0,)), SamplingParams())
    record.calls[0].request = request_
    assert again(record).calls[0].request == request_


def test_defaults_are_not_written():
    record = record_of(TokenLogprobs((1, 2), (5,), (-1.0,)), SamplingParams())
    (call,) = dump_episode(record)["calls"]
    assert set(call) == {
        "call_id", "llm", "model", "functions", "messages", "tools", "temperature", "top_p", "top_k", "min_p", "seed",
        "reply", "finish_reason", "num_prompt_tokens", "num_completion_tokens", "prompt_token_ids", "token_ids",
        "logprobs", "policy_version", "restricted", "started_s", "ended_s",
    }  # fmt: skip
    assert again(record).calls[0].request == ModelRequest(PROMPT)


def test_a_prompt_that_was_too_long_stays_in_the_record_of_an_agent_that_went_on():
    record = record_of(TokenLogprobs((1, 2), (5,), (-1.0,)), SamplingParams())
    assert "overflow" not in dump_episode(record)
    record.overflow = "the prompt has 300 tokens, but the limit is 256"
    assert again(record).overflow == record.overflow


def make_tokens(*sets):
    return TokenLogprobs(
        (1, 2),
        (5,) * len(sets),
        (-1.0,) * len(sets),
        restricted=True,
        processed_logprobs=(-0.5,) * len(sets),
        supports=Supports.from_sets(sets),
    )


def test_masks_round_trip_bit_for_bit():
    rng = np.random.default_rng(0)
    first, second = rng.bytes(6144), rng.bytes(6144)
    tokens = make_tokens(first, np.array([3, 5], np.int32), second, first, np.zeros(0, np.int32))
    assert parse_tokens(json.loads(to_json(dump_tokens(tokens)))) == tokens


def test_the_masks_of_a_text_take_little_room():
    """Ten masks that differ in a few tokens: 60 KB in memory, under 4 KB in the record."""
    masks = []
    for number in range(10):
        bits = bytearray(b"\xff" * 6144)
        bits[number * 7] = 0
        masks.append(bytes(bits))
    assert len(to_json(dump_tokens(make_tokens(*masks)))) < 4000


def test_a_record_without_masks_has_no_keys_for_them():
    tokens = make_tokens(np.array([3, 5], np.int32))
    dumped = dump_tokens(tokens)
    assert dumped["supports"].keys() == {"counts", "token_ids"}
    assert parse_tokens(dumped) == tokens
