"""Dialogues as nested arrays and back, and each agent's views of them."""

from dataclasses import replace

import numpy as np
import pytest

from reinforge.errors import TrajectoryError
from reinforge.multiagent import Dialogue, HyperParameters, Message, NestedArrayDict, build_agents, build_protocol
from reinforge.multiagent.dialogue import parse_dialogues
from reinforge.multiagent.nip.rollouts import (
    ViewBuilder,
    build_rollouts,
    decode_dialogues,
    encode_dialogues,
    replace_guess_with_truth,
)
from tests.groups import dialogue, experiment, replies

PARAMS = experiment("m")
HANDLER = build_protocol(PARAMS)
SEED_KEYS = (
    "round", "question", "solution", "y", "prover_stance", "message_history", "message_agent_id",
    "raw_message_history",
)  # fmt: skip


def test_the_names_of_a_protocol_handler():
    """nip of four rounds, the verifier first: it asks in rounds 0 and decides by 2."""
    assert (HANDLER.agent_names, HANDLER.prover_names, HANDLER.verifier_names) == (
        ("prover", "verifier"),
        ("prover",),
        ("verifier",),
    )
    assert (HANDLER.max_message_rounds, HANDLER.min_message_rounds, HANDLER.max_verifier_questions) == (4, 1, 1)
    assert HANDLER.message_channel_names == ("main",)
    assert set(HANDLER.agent_channel_visibility) == {("prover", "main"), ("verifier", "main")}
    assert HANDLER.can_agent_see_channel("prover", "main")
    assert not HANDLER.can_agent_see_channel("prover", "other")
    active = [HANDLER.can_agent_be_active("prover", round_, "main") for round_ in range(6)]
    assert active == [False, True, False, True, False, False], "there are four rounds"
    assert (HANDLER.agent_first_active_round("verifier"), HANDLER.agent_first_active_round("prover")) == (0, 1)
    assert (HANDLER.reward_mid_point_estimate("prover"), HANDLER.reward_mid_point_estimate("verifier")) == (0.5, 0.0)
    whole = dialogue(1)
    assert HANDLER.step_interaction_protocol(whole).decision == "accept"
    assert not HANDLER.step_interaction_protocol(whole.before_round(1)).done


def test_a_dialogue_as_arrays():
    """Three of four rounds have messages; the fourth is padding."""
    arrays = encode_dialogues([dialogue(1)], HANDLER)
    assert arrays.batch_size == (1, 4)
    assert all(name in arrays and name in arrays["next"] for name in SEED_KEYS)
    [row] = arrays
    assert row["round"].tolist() == [0, 1, 2, 3]
    assert row["padding"].tolist() == [False, False, False, True]
    assert row["y"].tolist() == [1] * 4
    assert arrays["message_history"].shape == (1, 4, 4, 1)
    assert arrays["raw_message_history"].shape == (1, 4, 4, 2)
    assert row["message_history"][1, :, 0].tolist() == ["is it 1", None, None, None], "the state before round 1"
    assert row["next", "message_history"][2, :, 0].tolist() == ["is it 1", "it is 1", "accept", None]
    assert row["next", "message_agent_id"][2, :, 0].tolist() == [1, 0, 1, -1]
    assert row["next", "raw_message_history"][2].tolist() == [
        [None, "is it 1"],
        ["it is 1", None],
        [None, "accept"],
        [None, None],
    ]
    assert row["next", "agents", "decision"].tolist() == [[2, 2], [2, 2], [2, 1], [2, 1]]
    assert row["next", "agents", "reward"][2].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("reduced", [False, True], ids=["all keys", "keys of neural-interactive-proofs"])
def test_dialogues_come_back_from_their_arrays(reduced):
    given = [dialogue(1), dialogue(2, decision="reject", truth="accept"), dialogue(3, truth=None)]
    arrays = encode_dialogues(given, HANDLER)
    if reduced:
        kept = {name: arrays[name] for name in (*SEED_KEYS, "agents")}
        kept["next"] = {name: arrays["next"][name] for name in (*SEED_KEYS, "agents")}
        arrays = NestedArrayDict(kept, arrays.batch_size)[:, 2:3]
    found = decode_dialogues(arrays, HANDLER)
    assert [each.messages for each in found] == [each.messages for each in given]
    assert [each.problem.truth for each in found] == ["accept", "accept", None]
    assert [each.problem.question for each in found] == ["q1", "q2", "q3"]
    assert [each.step.decision for each in found] == ["accept", "reject", "accept"]
    assert [dict(each.rewards) for each in found] == [dict(each.rewards) for each in given]
    assert [dict(each.stances) for each in found] == [{"prover": "accept"}] * 3


def test_two_agents_that_speak_at_once_in_one_channel():
    names = ("prover_accept", "prover_reject", "verifier")
    params = HyperParameters(
        "s",
        "pure_text_ei",
        "d",
        interaction_protocol="debate",
        agents={name: {"model_name": "m"} for name in names},
        debate_protocol={"max_message_rounds": 3},
    )
    handler = build_protocol(params)
    said = [
        (0, "verifier", "speak"),
        (1, "prover_accept", "yes"),
        (1, "prover_reject", "no"),
        (2, "verifier", "accept"),
    ]
    messages = tuple(Message(round_, agent, "main", text, f"shown {text}") for round_, agent, text in said)
    whole = Dialogue(dialogue(1).problem, {}, messages, 3)
    arrays = encode_dialogues([whole], handler)
    assert arrays["next", "message_history"][0, 2, 1, 0] == "shown yes\nshown no"
    [found] = decode_dialogues(arrays, handler)
    assert found.messages == messages


def make_output(messages, branches, question="q", **more):
    said = {"agent": "verifier", "channel": "main", "call_id": "c", "num_retries": 0, "path": [], "round": 0}
    spoken = [{**said, "shown": message["text"], **message} for message in messages]
    ended = [{"path": [], "decision": None, "terminated": False, **branch} for branch in branches]
    stances = {"prover": "accept"}
    return {"question": question, "truth": "accept", "stances": stances, "messages": spoken, "branches": ended, **more}


WON = {"decision": "accept", "rewards": {"prover": 1.0, "verifier": 1.0}}


def test_a_dialogue_without_a_valid_reply_costs_that_dialogue(caplog):
    """What the other agents earned in it is unknown, and an array has no other way to say so than NaN."""
    refused = {"agent": "prover", "round": 1, "text": " ", "shown": "", "refused": "an empty message"}
    failed = {"rewards": {"prover": -0.5}, "failed": ["prover", "empty"]}
    output, valid = make_output([{"text": "Why?"}, refused], [failed]), make_output([{"text": "accept"}], [WON])
    arrays = build_rollouts([output, valid], HANDLER)
    assert arrays.batch_size == (1, 4)
    assert arrays["next", "agents", "reward"].sum(1).tolist() == [[1.0, 1.0]]
    assert [record.getMessage() for record in caplog.records] == [
        "1 of 2 dialogues are left out, since an agent gave no valid reply; the first: prover: empty"
    ]
    with pytest.raises(TrajectoryError, match="every agent gave valid replies; the first: prover: empty"):
        build_rollouts([output], HANDLER)
    [found] = parse_dialogues(output)
    assert [message.text for message in found.messages] == ["Why?"], "an invalid reply is not part of the dialogue"
    kept = encode_dialogues([found, *parse_dialogues(valid)], HANDLER)["next", "agents", "reward"][..., 1].sum(1)
    with pytest.raises(ValueError, match="NaN"):  # what weighted sampling does with that dialogue in the arrays
        np.random.default_rng(0).choice(2, p=(kept - kept.min()) / kept.sum())


def test_done_terminated_retries_and_the_number_of_the_example():
    """done: the verifier has decided; terminated: the rounds are over; `next` is the state after the round."""
    decided, endless = dialogue(1), dialogue(2)
    seen = {"num_retries": 3, "token_limit": True}
    retried = tuple(replace(m, **seen) if m.agent == "prover" else m for m in decided.messages)
    ended = replace(endless, round=4, step=replace(endless.step, decision=None, terminated=True))
    arrays = encode_dialogues([replace(decided, messages=retried), ended], HANDLER, [7, 5])
    assert arrays["done"].tolist() == [[False, False, False, True], [False] * 4]
    assert arrays["next", "done"].tolist() == [[False, False, True, True], [False] * 4]
    assert arrays["terminated"].tolist() == [[False] * 4] * 2
    assert arrays["next", "terminated"].tolist() == [[False] * 4, [False, False, False, True]]
    assert arrays["datapoint_id"].tolist() == [[7] * 4, [5] * 4]
    assert arrays["agents", "retry_count"].shape == (2, 4, 2, 1)
    assert arrays["agents", "retry_count"][0, :, 0, 0].tolist() == [0, 3, 0, 0]
    assert arrays["agents", "token_limit"][0, :, :, 0].tolist() == [[False, False], [True, False], *[[False] * 2] * 2]
    assert [found.step.terminated for found in decode_dialogues(arrays, HANDLER)] == [False, True]


def test_examples_are_numbered_by_their_ids_or_else_by_their_questions():
    outputs = [make_output([{"text": "accept"}], [WON], question) for question in "qrq"]
    assert build_rollouts(outputs, HANDLER)["datapoint_id"][:, 0].tolist() == [0, 1, 0]
    rows = [{"id": "a"}, {"id": "b"}, {"id": "c"}]
    assert build_rollouts(outputs, HANDLER, rows)["datapoint_id"][:, 0].tolist() == [0, 1, 2]
    assert build_rollouts(outputs, HANDLER, datapoint_ids=[4, 2, 4])["datapoint_id"][:, 0].tolist() == [4, 2, 4]


def test_episodes_of_a_tree_are_a_rollout_each():
    messages = [{"path": [0], "text": "accept"}, {"path": [1], "text": "reject"}]
    lost = {"path": [1], "decision": "reject", "rewards": {"prover": 0.0}}
    output = make_output(messages, [{**WON, "path": [0]}, lost], absent=[], order=["verifier", "prover"])
    arrays = build_rollouts([output], HANDLER, rows=[{"cells": [1, 2]}])
    assert arrays.batch_size == (2, 4)
    assert arrays["next", "message_history"][:, 0, 0, 0].tolist() == ["accept", "reject"]
    assert np.isnan(arrays["next", "agents", "reward"][1, 0, 1]), "an unknown reward is not a number"
    first, second = decode_dialogues(arrays, HANDLER)
    assert first.problem.row["cells"] == [1, 2]
    assert first.order == ("verifier", "prover")
    assert dict(second.rewards) == {"prover": 0.0}


def test_an_agents_view_of_a_dialogue():
    """Its own messages are assistant turns, the others user; each turn has the exact prompt that it answers."""
    agents = build_agents(PARAMS)
    views = ViewBuilder(agents["verifier"], HANDLER, "both", 2.0)
    trajectory = views.build_view(dialogue(1), "e")
    assert [(item.role.value, item.content) for item in trajectory.episode] == [
        ("user", "V q1"),
        ("assistant", "is it 1"),
        ("user", "prover: it is 1\nDecide now: accept or reject."),
        ("assistant", "accept"),
    ]
    first, second = trajectory.turns
    assert [message["content"] for message in first.prompt.messages] == ["V q1"]
    assert [message["role"] for message in second.prompt.messages] == ["user", "assistant", "user"]
    assert all(turn.is_trained for turn in trajectory.turns)
    assert (trajectory.agent, trajectory.model_group, trajectory.agent_weight) == ("verifier", "both", 2.0)
    assert trajectory.reward == 1.0
    last = views.build_last_reply(dialogue(1), 0.5, "e")
    assert [turn.is_trained for turn in last.turns] == [False, True]
    assert last.reward == 0.5


def test_single_steps_end_with_the_message_that_is_compared():
    steps = replies(PARAMS, "prover", ["yes", "no"])
    assert steps.batch_size == (2,)
    views = ViewBuilder(build_agents(PARAMS)["prover"], HANDLER, "both")
    last = [views.build_last_reply(each, 1.0, "e") for each in decode_dialogues(steps, HANDLER)]
    assert [trajectory.turns[-1].content for trajectory in last] == ["yes", "no"]
    silent = Dialogue(dialogue(1).problem)
    with pytest.raises(TrajectoryError, match="e: verifier has no message there"):
        ViewBuilder(build_agents(PARAMS)["verifier"], HANDLER, "both").build_last_reply(silent, 1.0, "e")


def test_the_truth_in_place_of_a_guess():
    right = replace_guess_with_truth(dialogue(1, decision="reject", truth="accept"), HANDLER)
    assert [message.text for message in right.messages] == ["is it 1", "it is 1", "accept"]
    assert replace_guess_with_truth(dialogue(1, truth=None), HANDLER) is None


def test_arrays_that_cannot_be_a_dialogue_are_refused():
    arrays = encode_dialogues([dialogue(1)], HANDLER)
    kept = {name: arrays[name] for name in ("question", "message_history")}
    with pytest.raises(TrajectoryError, match="has no message_agent_id, so there is nothing to train on"):
        decode_dialogues(NestedArrayDict(kept, (1, 4)), HANDLER)
    arrays["padding"] = np.ones((1, 4), np.bool_)
    with pytest.raises(TrajectoryError, match="consists of padding only"):
        decode_dialogues(arrays, HANDLER)
