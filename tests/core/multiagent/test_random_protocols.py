"""Invariants of random protocols, each with its own seed: 250, and 750 more in the slow suite.

Channels, visibility, turns, rounds, absent agents, delivery order, trees, frozen agents and invalid replies are random.
Every reply has a number by which it is found again in prompts and in training data.
"""

import random
import re
from collections import Counter

import pytest

from reinforge.multiagent.protocol import ProtocolConfig, ProtocolHandler
from reinforge.multiagent.registration import find_protocol_problems
from tests.talk import Talk, build_groups, example

BATCH = 250


class Anything(ProtocolHandler):
    """A random protocol; replies with a "!" are invalid."""

    def __init__(self, rng):
        names = rng.sample(["ann", "bob", "cat", "dan"], rng.randint(2, 4))
        self.verifiers, self.provers = (names[0],), tuple(names[1:])
        seen = {f"c{number}": rng.sample(names, rng.randint(1, len(names))) for number in range(rng.randint(1, 3))}
        turns = [(name, channel) for channel, members in seen.items() for name in members]
        rounds = [rng.sample(turns, rng.randint(1, min(3, len(turns)))) for _ in range(rng.randint(1, 4))]
        self._seen, self._rounds = seen, rounds
        self._absent = frozenset(rng.sample(self.provers, 1)) if rng.random() < 0.2 else frozenset()
        self._order = tuple(rng.sample(names, len(names))) if rng.random() < 0.3 else ()
        super().__init__(
            ProtocolConfig(
                agents={},
                num_responses=rng.choice((1, 1, 2)),
                max_message_rounds=rng.randint(1, 4),
                shared_reward=rng.random() < 0.2,
                last_round_hint="",
            )
        )

    def turns(self):
        return self._rounds

    def channels(self):
        return self._seen

    def absent(self, problem, rng):
        return self._absent

    def order(self, problem, rng):
        return self._order

    def parse_decision(self, text):
        return next((word for word in ("accept", "reject", "none") if text.startswith(word)), None)

    def check_reply(self, agent, text, dialogue):
        return "a !" if "!" in text else None


def make_random_talk(seed):
    rng = random.Random(seed)
    while find_protocol_problems(handler := Anything(rng)):
        pass
    count = 0

    def say(request):
        nonlocal count
        count += 1
        mark = "!" if rng.random() < 0.15 else ""
        return f"{rng.choice(('accept', 'reject', 'none', 'go', 'go', 'go'))} m{count}{mark}"

    parameters = {
        name: {"freeze_agent": rng.random() < 0.25, "num_invalid_generation_retries": rng.randint(0, 2)}
        for name in handler.agent_names
    }
    return Talk(handler, dict.fromkeys(handler.agent_names, say), parameters)


def marks(messages, role):
    """Returns the numbers of the replies in a prompt's messages of one role, in order."""
    return [mark for m in messages if m["role"] == role for mark in re.findall(r"\bm\d+\b", m["content"])]


def above(message, output):
    path = message["path"]
    return [m for m in output["messages"] if m["round"] < message["round"] and m["path"] == path[: len(m["path"])]]


def hears(handler, agent, messages):
    rank = {name: number for number, name in enumerate(handler._order)}
    heard = [m for m in messages if m["agent"] != agent and agent in handler._seen[m["channel"]]]
    return [mark_of(m) for m in sorted(heard, key=lambda m: (m["round"], rank.get(m["agent"], -1)))]


def mark_of(message):
    return re.search(r"m\d+", message["text"])[0]


def check_views(talk, record, output):
    calls = {call.call_id: call for call in record.calls}
    for message in output["messages"]:
        prompt, agent = calls[message["call_id"]].request.messages, message["agent"]
        assert calls[message["call_id"]].llm == agent
        said = above(message, output)
        assert marks(prompt, "user") == hears(talk.handler, agent, said)
        assert marks(prompt, "assistant") == [mark_of(m) for m in said if m["agent"] == agent]
    valid = {message["call_id"] for message in output["messages"] if not message["refused"]}
    by_mark = {mark_of(m): m for m in output["messages"]}
    for call in record.calls:  # prompts of invalid replies hold no more than others
        assert (call.call_id in valid) == ("!" not in call.reply.message["content"])
        assert all(call.llm in talk.handler._seen[by_mark[m]["channel"]] for m in marks(call.request.messages, "user"))


def check_turns(talk, output):
    handler = talk.handler
    for branch in output["branches"]:
        way = [m for m in output["messages"] if m["path"] == branch["path"][: len(m["path"])]]
        assert [m["round"] for m in way] == sorted(m["round"] for m in way)
        num_rounds = max((m["round"] for m in way), default=-1) + 1
        for round_ in range(num_rounds):
            turns = [turn for turn in handler._rounds[round_ % len(handler._rounds)] if turn[0] not in handler._absent]
            spoken = [(m["agent"], m["channel"]) for m in way if m["round"] == round_]
            complete = round_ < num_rounds - 1 or branch["failed"] is None
            assert spoken == turns if complete else set(spoken) <= set(turns)
        assert num_rounds <= handler.max_message_rounds


def check_rewards(talk, output):
    """Recomputes the rewards: 1 or 0 for a prover, 1, 0 or -1 for the verifier; the truth is accept."""
    handler = talk.handler
    for branch in output["branches"]:
        if branch["failed"]:
            assert branch["rewards"] == {branch["failed"][0]: -0.5}
            continue
        decided = {None: -1.0, "none": 0.0, "accept": 1.0, "reject": -1.0}[branch["decision"]]
        convinced = float(branch["decision"] == "accept")
        present = [name for name in handler.agent_names if name not in handler._absent]
        shared = handler.config.shared_reward
        assert branch["rewards"] == {
            name: decided if shared or name in handler.verifiers else convinced for name in present
        }


def check_training(talk, record, output):
    trainable = {name for name, agent in talk.agents.items() if agent.is_trainable}
    rewards = {}
    trained = Counter()
    for group in build_groups([record]):
        assert len({t.agent for t in group}) == 1
        for trajectory in group:
            assert trajectory.agent in trainable
            for item in trajectory.episode:
                if item.tokens is not None and item.trained is not False:
                    trained[re.search(r"m\d+!?", item.content)[0]] += 1
                    rewards[re.search(r"m\d+", item.content)[0]] = trajectory.reward
    assert set(trained.values()) <= {1}, "each reply once"
    last_tries = {f"{mark_of(m)}!" for m in output["messages"] if m["refused"]}
    assert {mark for mark in trained if "!" in mark} <= last_tries, "no invalid reply but an agent's last attempt"
    expected = {}
    for message in output["messages"]:
        path, agent = message["path"], message["agent"]
        following = [b["rewards"] for b in output["branches"] if b["path"][: len(path)] == path]
        known = [earned[agent] for earned in following if agent in earned]
        if agent in trainable and known:
            expected[mark_of(message)] = sum(known) / len(known)
    assert rewards == pytest.approx(expected), "replies with an unknown value are not trained"
    return len(trained)


@pytest.mark.parametrize("batch", [0, *(pytest.param(batch, marks=pytest.mark.slow) for batch in (1, 2, 3))])
async def test_invariants_of_every_protocol(batch):
    seen = Counter()
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        talk = make_random_talk(seed)
        (record,) = await talk.run("collect", seed=seed, item=example("accept"))
        output = record.item.output_obj
        assert record.outcome in ("ok", "policy_error"), record.reason
        check_views(talk, record, output)
        check_turns(talk, output)
        check_rewards(talk, output)
        seen["trained"] += check_training(talk, record, output)
        seen["trees"] += len(output["branches"]) > 1
        seen["failed"] += any(branch["failed"] for branch in output["branches"])
        seen["retried"] += output["num_invalid"] > 0
        seen["absent"] += bool(talk.handler._absent)
        seen["channels"] += len(talk.handler._seen) > 1
    assert seen["trained"] > BATCH
    assert min(seen[what] for what in ("trees", "failed", "retried", "absent", "channels")) > BATCH // 20, seen
