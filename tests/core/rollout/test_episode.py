"""From recorded calls to messages and samples: no message is lost or duplicated."""

import json
from dataclasses import replace

from reinforge.algorithms.samples import samples_from_trajectory
from reinforge.rollout.episode import (
    attach_sources,
    build_trajectory,
    extract_text,
    is_trained_call,
    sum_step_rewards,
)
from reinforge.rollout.handle.completion import build_completion
from reinforge.rollout.isolation.worker_protocol import dump_call, load_call
from reinforge.runs.journal.episode_json import dump_episode, parse_episode
from reinforge.types.episode import EpisodeKey, EpisodeRecord, Mark, ModelCall
from reinforge.types.request import ChatPrompt, ModelReply, ModelRequest, TokenLogprob, TokenLogprobs
from reinforge.types.trajectory import EpisodeItem, Trajectory
from tests.doubles import examples
from tests.replies import assistant, user


def record_of(*calls, marks=()):
    """Each call: messages, reply text, prompt ids, reply ids."""
    made = []
    for number, (messages, text, prompt, ids) in enumerate(calls):
        tokens = TokenLogprobs(tuple(prompt), tuple(ids), (-0.1,) * len(ids))
        reply = ModelReply(assistant(text), "stop", tokens)
        made.append(ModelCall(f"c{number}", "agent", "m", ModelRequest(messages), reply, (), 0.0, 0.0))
    return EpisodeRecord(EpisodeKey("collect", 0, "e"), examples(1)[0], calls=made, marks=list(marks))


def messages_in(record):
    trajectory = build_trajectory(record, 1.0, [True] * len(record.calls))
    return [(item.role.value, item.content) for item in trajectory.episode]


def test_a_growing_conversation_adds_only_new_messages():
    first = [user("hi")]
    second = [*first, assistant("yo"), user("next"), user("next")]
    record = record_of((first, "yo", [1, 2], [4]), (second, "ok", [1, 2, 4, 8], [5]))
    assert messages_in(record) == [
        ("user", "hi"),
        ("assistant", "yo"),
        ("user", "next"),
        ("user", "next"),
        ("assistant", "ok"),
    ]
    (sample,) = samples_from_trajectory(build_trajectory(record, 1.0, [True, True]))
    assert sample.token_ids.tolist() == [1, 2, 4, 8, 5]
    assert sample.loss_mask.tolist() == [False, False, True, False, True]
    assert sample.turn_ids.tolist() == [-1, -1, 0, -1, 1]


def test_a_fresh_prompt_starts_a_second_sample():
    record = record_of(([user("a")], "x", [1, 2], [4]), ([user("b")], "y", [9], [7]))
    assert messages_in(record) == [("user", "a"), ("assistant", "x"), ("user", "b"), ("assistant", "y")]
    first, second = samples_from_trajectory(build_trajectory(record, 1.0, [True, True]))
    assert (first.token_ids.tolist(), second.token_ids.tolist()) == ([1, 2, 4], [9, 7])
    assert second.loss_mask.tolist() == [False, True]


def test_the_same_messages_with_other_tokens_are_not_merged():
    """A template that re-renders the history breaks the prefix: two samples, and no text is tokenized again."""
    first = [user("a")]
    record = record_of((first, "x", [1, 2], [4]), ([*first, assistant("x"), user("b")], "y", [1, 2, 5, 8], [7]))
    samples = samples_from_trajectory(build_trajectory(record, 1.0, [True, True]))
    assert [sample.token_ids.tolist() for sample in samples] == [[1, 2, 4], [1, 2, 5, 8, 7]]


def test_a_turn_that_is_not_a_target_is_context():
    first = [user("a")]
    second = [*first, assistant("x"), user("b")]
    record = record_of((first, "x", [1, 2], [4]), (second, "y", [1, 2, 4, 8], [7]))
    (sample,) = samples_from_trajectory(build_trajectory(record, 1.0, [False, True]))
    assert sample.token_ids.tolist() == [1, 2, 4, 8, 7]
    assert sample.loss_mask.tolist() == [False, False, False, False, True]


def test_restricted_tokens_are_left_untrained():
    record = record_of(([user("a")], "x", [1, 2], [4]))
    tokens = record.calls[0].reply.tokens
    record.calls[0].reply = ModelReply(assistant("x"), "stop", replace(tokens, restricted=True))
    assert samples_from_trajectory(build_trajectory(record, 1.0, [True])) == []


def test_tool_calls_and_content_blocks_are_kept():
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "t1", "function": {"name": "f"}}]}
    result = {"role": "tool", "tool_call_id": "t1", "content": [{"type": "text", "text": "42"}]}
    record = record_of(([user("a"), call, result], "x", [1], [4]))
    episode = build_trajectory(record, 1.0, [True]).episode
    assert episode[1].metadata["tool_calls"][0]["id"] == "t1"
    assert (episode[2].content, episode[2].metadata["tool_call_id"]) == ("42", "t1")
    assert episode[2].metadata["content"] == [{"type": "text", "text": "42"}]


def test_marked_rewards_belong_to_the_turn_before_them():
    marks = [Mark(0, 9.0, None, (), 0.0), Mark(1, 0.5, None, (), 0.0), Mark(2, 0.25, None, (), 0.0)]
    record = record_of(([user("a")], "x", [1], [4]), ([user("b")], "y", [2], [5]), marks=marks)
    assert sum_step_rewards(record) == [0.5, 0.25]
    assert sum_step_rewards(record_of(([user("a")], "x", [1], [4]))) is None


def test_targets_by_model_and_function():
    call = record_of(([user("a")], "x", [1], [4])).calls[0]
    call.functions = ("plan",)
    whole, policies = ["<workflow>"], {"agent"}
    assert is_trained_call(call, None, whole, policies)
    assert is_trained_call(call, "agent", ["plan"], policies)
    assert is_trained_call(call, "m", whole, policies), "the model's own name works too"
    assert not is_trained_call(call, "other", whole, policies)
    assert not is_trained_call(call, None, ["act"], policies)
    assert not is_trained_call(call, None, whole, {"judge"})


def test_extract_text():
    assert extract_text(None) == ""
    assert extract_text("a") == "a"
    assert extract_text([{"type": "text", "text": "a"}, {"type": "image_url"}, "b"]) == "ab"


def hosted_call(version):
    reply = ModelReply(assistant("yo"), "stop", None, policy_version=version)
    return ModelCall("c0", "agent", "m", ModelRequest([user("hi")]), reply, (), 0.0, 0.0)


def test_a_policys_turn_without_tokens_has_its_prompt():
    """A version of -1: something else serves the model, and a user's own backend trains it."""
    for version, known in ((2, 2), (None, -1)):
        record = EpisodeRecord(EpisodeKey("collect", 0, "e"), examples(1)[0], calls=[hosted_call(version)])
        trajectory = build_trajectory(record, 1.0, [True])
        [turn] = trajectory.turns
        assert (turn.prompt, turn.is_trained) == (ChatPrompt((user("hi"),), None, known), True)
        assert turn.metadata is None, "the prompt is no field of the item"
        assert samples_from_trajectory(trajectory) == [], "there are no tokens to train on"
        assert not build_trajectory(record, 1.0, [False]).is_trainable


def test_a_remote_models_turn_has_what_its_endpoint_returned():
    call = hosted_call(None)
    token = {"token": "yo", "logprob": -0.5, "top_logprobs": [{"token": "no", "logprob": -1.0}]}
    call.reply = replace(call.reply, logprobs={"content": [token], "token_ids": [7]})
    record = EpisodeRecord(EpisodeKey("collect", 0, "e"), examples(1)[0], calls=[call])
    [turn] = build_trajectory(record, 1.0, [True]).turns
    assert (turn.logprobs.content[0].logprob, turn.logprobs.token_ids, turn.tokens) == (-0.5, [7], None)
    assert turn.model_dump(mode="json")["logprobs"] == {"content": [token], "token_ids": [7]}
    assert samples_from_trajectory(build_trajectory(record, 1.0, [True])) == [], "the embedded engine never trains it"
    [turn] = build_trajectory(record, 1.0, [False]).turns
    assert (turn.logprobs, turn.is_trained) == (None, False)
    seen = build_completion(load_call(json.loads(json.dumps(dump_call(call)))))
    assert seen == build_completion(call), "an agent in a process of its own sees the same"
    assert parse_episode(json.loads(json.dumps(dump_episode(record))), record.item).calls[0].reply == call.reply


def test_likely_tokens_reach_an_agent_in_its_process_and_no_record():
    tops = ((TokenLogprob("a", -0.5), TokenLogprob("é", -2.0)),)
    reply = ModelReply(assistant("a"), "stop", TokenLogprobs((1,), (7,), (-0.5,), texts=("a",), top_logprobs=tops))
    call = ModelCall("c0", "agent", "m", ModelRequest([user("hi")], num_top_logprobs=2), reply, (), 0.0, 1.0)
    seen = load_call(json.loads(json.dumps(dump_call(call))))
    assert seen.reply.tokens.content == reply.tokens.content
    record = EpisodeRecord(EpisodeKey("collect", 0, "e"), examples(1)[0], calls=[call])
    text = json.dumps(dump_episode(record))
    assert "top_logprobs" not in text
    assert parse_episode(json.loads(text), record.item).calls[0].reply.tokens.top_logprobs == ()


def attach_remote(find_call, *turns):
    episode = [EpisodeItem(role="user", content="hi"), *turns]
    attach_sources([Trajectory(episode=episode, reward=1.0)], find_call, is_remote=True)


def test_turns_that_a_remote_backend_trains():
    """Those that name their call or have log-probs; if the builder says nothing about any turn, all of them."""
    given = EpisodeItem(role="assistant", content="from the data")
    named = EpisodeItem(role="assistant", content="yo", metadata={"call_id": "c0"})
    scored = EpisodeItem(role="assistant", content="no", logprobs=[-0.5])
    attach_remote({"c0": hosted_call(None)}.get, given, named, scored)
    assert [turn.is_trained for turn in (given, named, scored)] == [False, True, True]
    assert named.prompt == ChatPrompt((user("hi"),), None, -1), "of the call, which did not get the first turn"
    assert [message["content"] for message in scored.prompt.messages] == ["hi", "from the data", "yo"]

    alone = EpisodeItem(role="assistant", content="yo")
    attach_remote(lambda call_id: None, alone)
    assert (alone.is_trained, alone.prompt) == (True, ChatPrompt((user("hi"),), None, -1))

    context, refused = (EpisodeItem(role="assistant", content="yo", trained=flag) for flag in (None, False))
    attach_remote(lambda call_id: None, context, refused)
    assert not any(turn.is_trained for turn in (context, refused)), "the builder says that none of them is"


def test_a_custom_builders_turn_gets_the_prompt_of_the_call_it_names():
    turns = [
        EpisodeItem(role="assistant", content="yo", metadata={"call_id": "c0"}),
        EpisodeItem(role="assistant", content="yo", metadata={"call_id": "c0"}, trained=False),
        EpisodeItem(role="assistant", content="theirs"),
    ]
    attach_sources([Trajectory(episode=turns, reward=1.0)], {"c0": hosted_call(3)}.get)
    assert [turn.is_trained for turn in turns] == [True, False, False]
    assert turns[0].prompt == ChatPrompt((user("hi"),), None, 3)
