"""Rows of training files, compared exactly."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reinforge.algorithms.dpo import DPO
from reinforge.errors import TrajectoryError
from reinforge.protocols.openai.rows import TrainingFile, build_preference_file, build_supervised_file
from reinforge.rollout.episode import attach_sources, build_episode_items, build_message
from reinforge.types.episode import EpisodeKey, EpisodeRecord, ModelCall
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.request import ChatPrompt, Message, ModelReply, ModelRequest
from reinforge.types.trajectory import DPOItem, EpisodeItem, Trajectory, TrajectoryGroup
from tests.protocols.hosted import make_trajectory
from tests.protocols.openai_rows import find_file_error

USER, AGAIN = {"role": "user", "content": "q"}, {"role": "user", "content": "r"}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def assistant(text: str | None, **further: Any) -> Message:
    return {"role": "assistant", "content": text, **further}


def build_trajectory(
    *calls: tuple[list[Message], Message], targets: list[bool] | None = None, **fields: Any
) -> Trajectory:
    finish, tools = fields.pop("finish", "stop"), fields.pop("tools", None)
    item = EvalInputItem(id="1", input_obj="q", expected_output_obj="", full_dataset_entry={})
    made = [
        ModelCall(
            f"call-{number}", "agent", "m", ModelRequest(messages, tools=tools),
            ModelReply(reply, finish, None, policy_version=3), (), 0.0, 0.0,
        )
        for number, (messages, reply) in enumerate(calls)
    ]  # fmt: skip
    record = EpisodeRecord(EpisodeKey("collect", 0, "1"), item, calls=made)
    episode = build_episode_items(record, targets or [True] * len(made))
    return Trajectory(episode=episode, **{"reward": 1.0, **fields})


def lines(rows: TrainingFile) -> list[dict[str, Any]]:
    return [json.loads(line) for line in rows.lines]


def test_continued_turns_are_one_row_with_every_reply_trained() -> None:
    first, second = assistant("a"), assistant("b")
    trajectory = build_trajectory(([USER], first), ([USER, first, AGAIN], second))
    assert trajectory.is_trainable
    assert lines(build_supervised_file([trajectory])) == [
        {"messages": [USER, {**first, "weight": 1}, AGAIN, {**second, "weight": 1}]}
    ]


def test_a_rewritten_history_starts_another_row() -> None:
    summary = {"role": "system", "content": "so far: a"}
    trajectory = build_trajectory(([USER], assistant("a")), ([summary, AGAIN], assistant("b")))
    assert lines(build_supervised_file([trajectory])) == [
        {"messages": [USER, assistant("a", weight=1)]},
        {"messages": [summary, AGAIN, assistant("b", weight=1)]},
    ]


def test_messages_of_other_models_are_context() -> None:
    other, mine = assistant("theirs"), assistant("mine")
    trajectory = build_trajectory(([USER], other), ([USER, other, AGAIN], mine), targets=[False, True])
    (row,) = lines(build_supervised_file([trajectory]))
    assert [message.get("weight") for message in row["messages"]] == [None, 0, None, 1]
    only_theirs = build_trajectory(([USER], other), targets=[False])
    assert (only_theirs.is_trainable, lines(build_supervised_file([only_theirs]))) == (False, [])


def test_tools_and_their_results_are_kept() -> None:
    call = assistant(None, tool_calls=[{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}])
    result = {"role": "tool", "content": "3", "tool_call_id": "1"}
    trajectory = build_trajectory(([USER], call), ([USER, call, result], assistant("it is 3")), tools=TOOLS)
    (row,) = lines(build_supervised_file([trajectory]))
    assert row == {
        "messages": [USER, {**call, "weight": 1}, result, assistant("it is 3", weight=1)],
        "tools": TOOLS,
    }
    assert find_file_error("".join(f"{json.dumps(row)}\n" for _ in range(10)).encode(), "supervised") is None


def test_different_tools_start_another_row() -> None:
    one, other = build_trajectory(([USER], assistant("a"))), build_trajectory(([USER], assistant("a")), tools=TOOLS)
    both = Trajectory(episode=[*one.episode, *other.episode], reward=1)
    assert [row.get("tools") for row in lines(build_supervised_file([both]))] == [None, TOOLS]


def test_a_truncated_reply_is_context_and_counted() -> None:
    rows = build_supervised_file([build_trajectory(([USER], assistant("a lo")), finish="length")])
    assert (rows.lines, rows.left_out) == ([], {"truncated at max_tokens": 1})


def test_duplicate_rows_are_written_once() -> None:
    rows = build_supervised_file([build_trajectory(([USER], assistant(text))) for text in ("a", "b", "a", "a")])
    assert (len(rows.lines), rows.left_out) == (2, {"duplicates": 2})


def test_equal_content_is_equal_bytes() -> None:
    def content() -> bytes:
        return build_supervised_file([build_trajectory(([USER], assistant("ä")))]).content

    assert (
        content()
        == content()
        == '{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"ä","weight":1}]}\n'.encode()
    )


def group(*siblings: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(group_id="g", trajectories=list(siblings))


def test_the_best_sibling_is_preferred_to_the_worst() -> None:
    siblings = [
        build_trajectory(([USER], assistant(str(reward))), reward=reward, tools=TOOLS) for reward in (0.0, 1.0, 0.5)
    ]
    assert lines(build_preference_file([group(*siblings)], DPO())) == [
        {
            "input": {"messages": [USER], "tools": TOOLS},
            "preferred_output": [assistant("1.0")],
            "non_preferred_output": [assistant("0.0")],
        }
    ]


def test_identical_replies_make_no_pair() -> None:
    siblings = [build_trajectory(([USER], assistant("a")), reward=reward) for reward in (0.0, 1.0)]
    rows = build_preference_file([group(*siblings)], DPO())
    assert (rows.lines, rows.left_out) == ([], {"identical pairs": 1})
    ties = [build_trajectory(([USER], assistant(text)), reward=1.0) for text in ("a", "b")]
    assert build_preference_file([group(*ties)], DPO()).lines == []


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([([AGAIN], assistant("a"))], "answer different prompts"),
        ([([USER], assistant("a")), ([USER, assistant("a"), AGAIN], assistant("b"))], "has 2 trained turns"),
    ],
)
def test_a_pair_that_the_api_cannot_compare_is_rejected(calls: list[Any], message: str) -> None:
    good, bad = build_trajectory(([USER], assistant("x")), reward=0.0), build_trajectory(*calls)
    with pytest.raises(TrajectoryError, match=f"group g: .*{message}"):
        build_preference_file([group(good, bad)], DPO())


def test_stored_pairs() -> None:
    prompt = [{"role": "system", "content": "be kind"}, USER]
    items = [
        DPOItem(prompt="q", chosen_response="a", rejected_response="b"),
        DPOItem(prompt=prompt, chosen_response="a", rejected_response="b"),
        DPOItem(prompt="q", chosen_response="a", rejected_response="a"),
    ]
    rows = build_preference_file([group(Trajectory(episode=items, reward=0))], DPO())
    assert [row["input"]["messages"] for row in lines(rows)] == [[USER], prompt]
    assert rows.num_identical == 1
    assert find_file_error(b"".join([rows.content] * 5), "dpo") is None


def test_hand_written_episodes_get_their_prompts() -> None:
    trajectory = Trajectory(
        episode=[
            EpisodeItem(role="environment", content="q"),
            EpisodeItem(role="assistant", content="context"),
            EpisodeItem(role="user", content="r"),
            EpisodeItem(role="assistant", content="b", trained=True),
        ],
        reward=1,
    )
    assert not trajectory.is_trainable, "it has no prompts yet"
    attach_sources([trajectory], trains_on="messages")
    assert trajectory.turns[1].prompt == ChatPrompt((USER, assistant("context"), AGAIN), None, -1)
    (row,) = lines(build_supervised_file([trajectory]))
    assert [message.get("weight") for message in row["messages"]] == [None, 0, None, 1]


def test_a_message_round_trips() -> None:
    blocks = {"role": "user", "content": [{"type": "text", "text": "look"}]}
    trajectory = build_trajectory(([blocks], assistant("a")))
    assert build_message(trajectory.episode[0]) == blocks  # type: ignore[arg-type]


def test_a_row_that_utf_8_cannot_hold_is_left_out_and_counted() -> None:
    """One such row would make the service refuse the whole file."""
    texts = ["plain", "half \ud800", "escaped \\ud800", "whole \U0001f600", "é"]
    file = build_supervised_file([make_trajectory("q", text) for text in texts])
    kept = [json.loads(line)["messages"][-1]["content"] for line in file.lines]
    assert kept == ["plain", "escaped \\ud800", "whole \U0001f600", "é"]
    assert file.left_out == {"no valid Unicode": 1}
    file.content.decode()
