"""A packed episode holds each message and token once, and comes back as it was."""

import json
import math

import pytest
import zstandard

from reinforge.errors import RecordError
from reinforge.files import to_json
from reinforge.rollout.capture import AsyncLLM, Capture
from reinforge.runs.journal.episode_json import dump_episode
from reinforge.runs.journal.packing import EpisodePacker, read_packed, unpack_episode, write_line
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.request import ModelReply, SamplingParams, TokenLogprobs
from tests.doubles import examples

QUESTION, MORE = {"role": "user", "content": "What is 2 + 3? " * 4}, {"role": "user", "content": "and then?"}


class Talker:
    """Replies to a prompt of one token for each message, and one for the system prompt."""

    is_policy, model_name = True, "talker"

    def __init__(self, logprobs=(-0.5, -0.25), ids=(7, 150_000), **message):
        self.logprobs, self.ids = logprobs, ids
        self.message = {"role": "assistant", "content": "It is 5.", **message}

    async def sample(self, request):
        prompt = (1, *(100 + number for number in range(len(request.messages))))
        tokens = TokenLogprobs(prompt, self.ids, self.logprobs)
        return ModelReply(dict(self.message), "stop", tokens, len(prompt), len(self.ids))


async def record(model, *conversation, n=1, output=None):
    """Returns an episode in which each request is given as the messages that are added to the one before."""
    capture, messages = Capture(seed=1), []
    llm = AsyncLLM("agent", model, capture, SamplingParams())
    for new in conversation:
        messages = [*messages, *new]
        reply = await llm.chat.completions.create(messages=messages, n=n)
        messages = [*messages, reply.choices[0].message]
    item = examples(1)[0].copy_with_updates(output_obj=output)
    return EpisodeRecord(EpisodeKey("collect", 0, "e"), item, calls=capture.calls)


def pack(episode):
    return EpisodePacker(dump_episode(episode)).compress()


def as_json(data):
    return json.loads(to_json(data))


async def test_an_episode_comes_back_as_it_was_dumped():
    episode = await record(Talker(), [QUESTION], [MORE], [MORE, MORE], output="a long answer " * 9)
    assert as_json(unpack_episode(pack(episode))) == as_json(dump_episode(episode))


async def test_a_later_call_holds_what_is_new_in_it():
    """The second prompt has the tokens 1 100 101 102: of these 1 100 are the first prompt."""
    packed = read_packed(pack(await record(Talker(), [QUESTION], [MORE])))
    first, second = packed["calls"]
    assert (first["messages"], second["messages"]) == ([QUESTION], [MORE])
    assert second["continues"] == [0, 2, 2]
    assert [call["prompt_token_ids"] for call in (first, second)] == [2, 2]
    assert [call["logprobs"] for call in (first, second)] == [2, 2]


async def test_calls_share_their_messages_in_memory():
    episode = await record(Talker(), [QUESTION], [MORE], [MORE])
    for calls in (episode.calls, None):
        if calls is None:
            found = [(call["messages"], call["reply"]) for call in unpack_episode(pack(episode))["calls"]]
        else:
            found = [(call.request.messages, call.reply.message) for call in calls]
        (first, reply), (second, _), (third, _) = found
        assert second[0] is third[0] is first[0]
        assert second[1] is third[1] is reply
    prompts = [call.reply.tokens.prompt_token_ids for call in episode.calls]
    assert prompts == [(1, 100), (1, 100, 101, 102), (1, 100, 101, 102, 103, 104)]
    assert prompts[0]._shared is prompts[2]._shared


async def test_two_conversations_are_told_apart():
    capture = Capture(seed=1)
    ask = AsyncLLM("agent", Talker(), capture, SamplingParams()).chat.completions.create
    other = {"role": "user", "content": "another"}
    histories = {"a": [QUESTION], "b": [other]}
    for _ in range(3):
        for name, messages in histories.items():
            reply = await ask(messages=messages)
            histories[name] = [*messages, reply.choices[0].message, MORE]
    episode = EpisodeRecord(EpisodeKey("collect", 0, "e"), examples(1)[0], calls=capture.calls)
    packed = read_packed(pack(episode))
    assert [call.get("continues", [None])[0] for call in packed["calls"]] == [None, None, 0, 1, 2, 3]
    assert as_json(unpack_episode(pack(episode))) == as_json(dump_episode(episode))


async def test_numbers_that_are_equal_but_not_the_same_stay_what_they_were():
    def asked(value):
        return [{"role": "user", "content": "x", "tool_calls": [{"id": value}]}]

    capture = Capture(seed=1)
    ask = AsyncLLM("agent", Talker(), capture, SamplingParams()).chat.completions.create
    for value in (1, True, 1.0):
        await ask(messages=asked(value))
    assert [repr(call.request.messages[0]["tool_calls"][0]["id"]) for call in capture.calls] == ["1", "True", "1.0"]


async def test_an_object_that_cannot_be_compared_starts_its_own_conversation():
    class Hostile:
        def __eq__(self, other):
            raise SystemError("not you")

        __hash__ = None

    capture = Capture(seed=1)
    ask = AsyncLLM("agent", Talker(), capture, SamplingParams()).chat.completions.create
    await ask(messages=[{"role": "user", "content": "x", "name": "n"}])
    await ask(messages=[{"role": "user", "content": "x", "name": Hostile()}])
    assert len(capture.calls) == 2


async def test_other_choices_share_the_prompt():
    episode = await record(Talker(), [QUESTION], n=3)
    packed = read_packed(pack(episode))["calls"][0]
    assert [other["prompt_token_ids"] for other in packed["others"]] == [True, True]
    assert as_json(unpack_episode(pack(episode))) == as_json(dump_episode(episode))


@pytest.mark.parametrize(
    "model",
    [
        Talker(logprobs=(-0.1, 1e300)),
        Talker(logprobs=(math.nan, -math.inf)),
        Talker(logprobs=()),
        Talker(ids=(2**40, -1)),
        Talker(ids=("a", "b")),
        Talker(content="half a pair \ud800 of a long text, longer than those in JSON"),
        Talker(
            content=None, tool_calls=[{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
        ),
        Talker(content="", reasoning_content="I think so."),
    ],
)
async def test_whatever_a_model_reports_comes_back(model):
    episode = await record(model, [QUESTION], [MORE])
    blob = pack(episode)
    assert as_json(unpack_episode(blob)) == as_json(dump_episode(episode))
    assert json.loads(write_line(blob)) == as_json(dump_episode(episode))


async def test_an_output_that_looks_packed_stays_what_it_is():
    for output in ([{"content": None}, 3], {"content": "x" * 99}, "x" * 99, "x", None, 5):
        assert unpack_episode(pack(await record(Talker(), [QUESTION], output=output)))["output"] == output


async def test_a_damaged_or_huge_row_is_refused(set_limit):
    blob = pack(await record(Talker(), [QUESTION]))
    for damaged in (b"", blob[:-9], b"x" * 40, zstandard.ZstdCompressor().compress(b"\xff" * 40)):
        with pytest.raises(ValueError, match=r".+"):
            unpack_episode(damaged)
    set_limit("episode_chars", 100)
    with pytest.raises(RecordError, match="at most 100 can be recorded"):
        pack(await record(Talker(), [QUESTION]))
    with pytest.raises(ValueError, match="larger than any"):
        unpack_episode(zstandard.ZstdCompressor().compress(bytes(10_000)))
