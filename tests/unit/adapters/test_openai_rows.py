"""Rows of fine-tuning files, word for word."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reinforge.adapters.openai_rows import Rows, preference_rows, supervised_rows
from reinforge.algorithms.dpo import DPO
from reinforge.errors import TrajectoryError
from reinforge.rollout.episode import bind_prompts, episode_items, message_of
from reinforge.types.episode import EpisodeKey, EpisodeRecord, ModelCall
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.request import ChatPrompt, Message, ModelReply, ModelRequest
from reinforge.types.trajectory import DPOItem, EpisodeItem, Trajectory, TrajectoryGroup
from tests.openai_rows import what_is_wrong

USER, AGAIN = {"role": "user", "content": "q"}, {"role": "user", "content": "r"}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def assistant(text: str | None, **further: Any) -> Message:
    return {"role": "assistant", "content": text, **further}


def trajectory_of(
    *calls: tuple[list[Message], Message], targets: list[bool] | None = None, **fields: Any
) -> Trajectory:
    """An episode as the runner leaves it: what was asked and answered, by a policy that tells no tokens."""
    finish, tools = fields.pop("finish", "stop"), fields.pop("tools", None)
    item = EvalInputItem(id="1", input_obj="q", expected_output_obj="", full_dataset_entry={})
    made = [
        ModelCall(
            f"call-{number}", "agent", "m", ModelRequest(asked, tools=tools),
            ModelReply(said, finish, None, policy_version=3), (), 0.0, 0.0,
        )
        for number, (asked, said) in enumerate(calls)
    ]  # fmt: skip
    record = EpisodeRecord(EpisodeKey("collect", 0, "1"), item, calls=made)
    episode = episode_items(record, targets or [True] * len(made))
    return Trajectory(episode=episode, **{"reward": 1.0, **fields})


def lines(rows: Rows) -> list[dict[str, Any]]:
    return [json.loads(line) for line in rows.lines]


def test_turns_that_go_on_are_one_row_and_each_reply_is_learnt() -> None:
    first, second = assistant("a"), assistant("b")
    told = trajectory_of(([USER], first), ([USER, first, AGAIN], second))
    assert told.is_trainable
    assert lines(supervised_rows([told])) == [
        {"messages": [USER, {**first, "weight": 1}, AGAIN, {**second, "weight": 1}]}
    ]


def test_a_history_that_was_rewritten_begins_another_row() -> None:
    summary = {"role": "system", "content": "so far: a"}
    told = trajectory_of(([USER], assistant("a")), ([summary, AGAIN], assistant("b")))
    assert lines(supervised_rows([told])) == [
        {"messages": [USER, assistant("a", weight=1)]},
        {"messages": [summary, AGAIN, assistant("b", weight=1)]},
    ]


def test_what_others_said_is_context() -> None:
    other, mine = assistant("theirs"), assistant("mine")
    told = trajectory_of(([USER], other), ([USER, other, AGAIN], mine), targets=[False, True])
    (row,) = lines(supervised_rows([told]))
    assert [message.get("weight") for message in row["messages"]] == [None, 0, None, 1]
    only_theirs = trajectory_of(([USER], other), targets=[False])
    assert (only_theirs.is_trainable, lines(supervised_rows([only_theirs]))) == (False, [])


def test_tools_and_their_results_are_kept() -> None:
    call = assistant(None, tool_calls=[{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}])
    result = {"role": "tool", "content": "3", "tool_call_id": "1"}
    told = trajectory_of(([USER], call), ([USER, call, result], assistant("it is 3")), tools=TOOLS)
    (row,) = lines(supervised_rows([told]))
    assert row == {
        "messages": [USER, {**call, "weight": 1}, result, assistant("it is 3", weight=1)],
        "tools": TOOLS,
    }
    assert what_is_wrong("".join(f"{json.dumps(row)}\n" for _ in range(10)).encode(), "supervised") is None


def test_other_tools_begin_another_row() -> None:
    one, other = trajectory_of(([USER], assistant("a"))), trajectory_of(([USER], assistant("a")), tools=TOOLS)
    both = Trajectory(episode=[*one.episode, *other.episode], reward=1)
    assert [row.get("tools") for row in lines(supervised_rows([both]))] == [None, TOOLS]


def test_a_reply_that_was_cut_is_context_and_counted() -> None:
    rows = supervised_rows([trajectory_of(([USER], assistant("a lo")), finish="length")])
    assert (rows.lines, rows.left_out) == ([], {"cut at max_tokens": 1})


def test_equal_rows_count_once() -> None:
    rows = supervised_rows([trajectory_of(([USER], assistant(text))) for text in ("a", "b", "a", "a")])
    assert (len(rows.lines), rows.left_out) == (2, {"duplicates": 2})


def test_equal_content_is_equal_bytes() -> None:
    def content() -> bytes:
        return supervised_rows([trajectory_of(([USER], assistant("ä")))]).content

    assert (
        content()
        == content()
        == '{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"ä","weight":1}]}\n'.encode()
    )


def group(*siblings: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(group_id="g", trajectories=list(siblings))


def test_the_best_sibling_is_preferred_to_the_worst() -> None:
    told = [trajectory_of(([USER], assistant(str(reward))), reward=reward, tools=TOOLS) for reward in (0.0, 1.0, 0.5)]
    assert lines(preference_rows([group(*told)], DPO())) == [
        {
            "input": {"messages": [USER], "tools": TOOLS},
            "preferred_output": [assistant("1.0")],
            "non_preferred_output": [assistant("0.0")],
        }
    ]


def test_equal_replies_are_no_pair() -> None:
    told = [trajectory_of(([USER], assistant("a")), reward=reward) for reward in (0.0, 1.0)]
    rows = preference_rows([group(*told)], DPO())
    assert (rows.lines, rows.left_out) == ([], {"equal pairs": 1})
    ties = [trajectory_of(([USER], assistant(text)), reward=1.0) for text in ("a", "b")]
    assert preference_rows([group(*ties)], DPO()).lines == []


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ([([AGAIN], assistant("a"))], "answer different prompts"),
        ([([USER], assistant("a")), ([USER, assistant("a"), AGAIN], assistant("b"))], "holds 2 trained turns"),
    ],
)
def test_a_pair_that_the_service_cannot_compare_is_refused(calls: list[Any], said: str) -> None:
    good, bad = trajectory_of(([USER], assistant("x")), reward=0.0), trajectory_of(*calls)
    with pytest.raises(TrajectoryError, match=f"group g: .*{said}"):
        preference_rows([group(good, bad)], DPO())


def test_pairs_that_somebody_else_made() -> None:
    asked = [{"role": "system", "content": "be kind"}, USER]
    items = [
        DPOItem(prompt="q", chosen_response="a", rejected_response="b"),
        DPOItem(prompt=asked, chosen_response="a", rejected_response="b"),
        DPOItem(prompt="q", chosen_response="a", rejected_response="a"),
    ]
    rows = preference_rows([group(Trajectory(episode=items, reward=0))], DPO())
    assert [row["input"]["messages"] for row in lines(rows)] == [[USER], asked]
    assert rows.num_same == 1
    assert what_is_wrong(b"".join([rows.content] * 5), "dpo") is None


def test_episodes_written_by_hand_are_bound_to_what_stands_above() -> None:
    told = Trajectory(
        episode=[
            EpisodeItem(role="environment", content="q"),
            EpisodeItem(role="assistant", content="context"),
            EpisodeItem(role="user", content="r"),
            EpisodeItem(role="assistant", content="b", trained=True),
        ],
        reward=1,
    )
    assert not told.is_trainable, "nothing is known yet of what was asked"
    bind_prompts(told, TOOLS)
    assert told.turns[1].prompt == ChatPrompt((USER, assistant("context"), AGAIN), tuple(TOOLS), -1)
    (row,) = lines(supervised_rows([told]))
    assert [message.get("weight") for message in row["messages"]] == [None, 0, None, 1]


def test_a_message_comes_back_as_it_was() -> None:
    blocks = {"role": "user", "content": [{"type": "text", "text": "look"}]}
    told = trajectory_of(([blocks], assistant("a")))
    assert message_of(told.episode[0]) == blocks  # type: ignore[arg-type]
