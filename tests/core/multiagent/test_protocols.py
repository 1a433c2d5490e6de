"""Each protocol: who speaks when, the exact prompts, and the rewards."""

import random

import pytest

from reinforge.multiagent.dialogue import DialogueProblem
from reinforge.multiagent.protocols.adp import ADP, ADPConfig
from reinforge.multiagent.protocols.debate import Debate, DebateConfig
from reinforge.multiagent.protocols.merlin_arthur import MerlinArthur, MerlinArthurConfig
from reinforge.multiagent.protocols.mnip import MNIP, MNIPConfig
from reinforge.multiagent.protocols.multi_channel import MultiChannel, MultiChannelConfig
from reinforge.multiagent.protocols.nip import NIP, NIPConfig
from reinforge.multiagent.protocols.solo_verifier import SoloVerifier, SoloVerifierConfig
from tests.talk import Talk, assistant, example, format_messages, rewards, user


async def test_nip_verifier_and_prover_in_turn():
    talk = Talk(NIP(NIPConfig(agents={})), {"verifier": ["Why?", "accept"], "prover": ["Since it is."]})
    output = await talk.output()
    assert format_messages(output) == ["verifier@main: Why?", "prover@main: Since it is.", "verifier@main: accept"]
    assert output["branches"][0]["decision"] == output["truth"] == "accept"
    assert rewards(output) == {"prover": 1.0, "verifier": 1.0}
    assert talk.prompts_of("prover") == [[user("I am prover.", "verifier: Why?")]]
    assert talk.prompts_of("verifier") == [
        [user("I am verifier.")],
        [user("I am verifier."), assistant("Why?"), user("prover: Since it is.")],
    ]


@pytest.mark.parametrize(
    ("truth", "decision", "earned"),
    [
        ("reject", "reject", (0.0, 1.0)),
        ("reject", "accept", (1.0, -1.0)),
        ("accept", "reject", (0.0, -1.0)),
        ("accept", "none", (0.0, 0.25)),
    ],
)
async def test_rewards_of_a_decision(truth, decision, earned):
    config = NIPConfig(agents={}, verifier_first=False, verifier_no_guess_reward=0.25)
    output = await Talk(NIP(config), {"verifier": [decision], "prover": ["x"]}).output(item=example(truth))
    assert rewards(output) == dict(zip(("prover", "verifier"), earned, strict=True))


async def test_rounds_that_end_undecided_are_penalized():
    """The verifier must decide in its last round, so only a custom protocol can end without a decision."""

    class Lenient(NIP):
        def check_reply(self, agent, text, dialogue):
            return None

    config = NIPConfig(agents={}, max_message_rounds=3, verifier_terminated_penalty=-0.75)
    output = await Talk(Lenient(config), {"verifier": ["a", "b"], "prover": ["x"]}).output()
    assert output["branches"][0]["terminated"]
    assert rewards(output) == {"prover": 0.0, "verifier": -0.75}


async def test_shared_reward_is_the_verifiers():
    config = NIPConfig(agents={}, verifier_first=False, shared_reward=True)
    talk = Talk(NIP(config), {"verifier": ["reject"], "prover": ["x"]})
    assert rewards(await talk.output()) == {"prover": -1.0, "verifier": -1.0}


async def test_without_a_truth_the_verifiers_reward_is_unknown():
    talk = Talk(NIP(NIPConfig(agents={}, verifier_first=False)), {"verifier": ["accept"], "prover": ["x"]})
    assert rewards(await talk.output(item=example(None))) == {"prover": 1.0}


async def test_siblings_share_a_random_stance_that_the_prover_sees():
    config = NIPConfig(agents={}, verifier_first=False, randomize_prover_stance=True)
    drawn = set()
    for seed in range(12):
        talk = Talk(
            NIP(config),
            {"verifier": lambda request: "accept", "prover": lambda request: "x"},
            {"prover": {"prompt": "Argue $stance."}},
        )
        first, second = (record.item.output_obj for record in await talk.run("collect", seed=seed, generations=2))
        assert first["stances"] == second["stances"]
        stance = first["stances"]["prover"]
        assert talk.prompts_of("prover") == [[user(f"Argue {stance}.")]] * 2
        assert rewards(first)["prover"] == float(stance == "accept")
        drawn.add(stance)
    assert drawn == {"accept", "reject"}


async def test_adp_one_message_then_a_decision():
    handler = ADP(ADPConfig(agents={}))
    talk = Talk(handler, {"prover": ["Look at 3."], "verifier": ["Decision: accept"]})
    output = await talk.output()
    assert format_messages(output) == ["prover@main: Look at 3.", "verifier@main: Decision: accept"]
    assert talk.prompts_of("verifier") == [
        [user("I am verifier.", "prover: Look at 3.", "Decide now: accept or reject.")]
    ]
    assert (handler.max_message_rounds, handler.max_verifier_questions) == (2, 0)


def test_adp_has_no_other_length():
    with pytest.raises(ValueError, match="max_message_rounds"):
        ADPConfig(agents={}, max_message_rounds=4)


async def test_debate_at_the_same_time():
    config = DebateConfig(agents={}, verifier_first=False, randomize_channel_order=False)
    talk = Talk(Debate(config), {"prover_accept": ["red"], "prover_reject": ["blue"], "verifier": ["reject"]})
    output = await talk.output(item=example("reject"))
    assert talk.prompts_of("prover_reject") == [[user("I am prover_reject.")]], (
        "messages are not seen within their round"
    )
    assert talk.prompts_of("verifier") == [[user("I am verifier.", "prover_accept: red", "prover_reject: blue")]]
    assert rewards(output) == {"prover_accept": 0.0, "prover_reject": 1.0, "verifier": 1.0}


async def test_debate_one_after_the_other():
    config = DebateConfig(agents={}, verifier_first=False, sequential=True)
    talk = Talk(Debate(config), {"prover_accept": ["red"], "prover_reject": ["blue"], "verifier": ["accept"]})
    await talk.output()
    assert talk.prompts_of("prover_reject") == [[user("I am prover_reject.", "prover_accept: red")]]


async def test_debate_messages_are_delivered_in_random_order():
    orders = set()
    for seed in range(12):
        scripts = {"prover_accept": ["red"], "prover_reject": ["blue"], "verifier": ["accept"]}
        talk = Talk(Debate(DebateConfig(agents={}, verifier_first=False)), scripts)
        output = await talk.output(seed=seed)
        ((told,),) = talk.prompts_of("verifier")
        orders.add(told["content"])
        assert [m["agent"] for m in output["messages"][:2]] == ["prover_accept", "prover_reject"]
    assert orders == {
        "I am verifier.\nprover_accept: red\nprover_reject: blue",
        "I am verifier.\nprover_reject: blue\nprover_accept: red",
    }


async def test_debaters_are_called_by_the_side_that_they_argue_for():
    config = DebateConfig(agents={}, verifier_first=False, randomize_prover_stance=True, randomize_channel_order=False)
    told = set()
    for seed in range(12):
        scripts = {"prover_accept": ["one"], "prover_reject": ["two"], "verifier": ["accept"]}
        talk = Talk(Debate(config), scripts)
        output = await talk.output(seed=seed)
        swapped = output["stances"]["prover_accept"] == "reject"
        ((view,),) = talk.prompts_of("verifier")
        assert ("prover_reject: one" in view["content"]) == swapped
        assert rewards(output) == {"prover_accept": float(not swapped), "prover_reject": float(swapped), "verifier": 1}
        told.add(swapped)
    assert told == {True, False}


async def test_mnip_provers_cannot_hear_each_other():
    config = MNIPConfig(agents={}, randomize_channel_order=False)
    scripts = {"verifier": ["And a?", "And b?", "accept", "accept"], "prover0": ["a is 1"], "prover1": ["b is 2"]}
    talk = Talk(MNIP(config), scripts)
    output = await talk.output()
    assert talk.prompts_of("prover0") == [[user("I am prover0.", "verifier: And a?")]]
    assert talk.prompts_of("prover1") == [[user("I am prover1.", "verifier: And b?")]]
    assert talk.prompts_of("verifier")[2] == [
        user("I am verifier.", "[prover0_channel]"),
        assistant("And a?"),
        user("[prover1_channel]"),
        assistant("And b?"),
        user("[prover0_channel] prover0: a is 1", "[prover1_channel] prover1: b is 2", "[prover0_channel]"),
    ]
    assert rewards(output) == {"prover0": 1.0, "prover1": 1.0, "verifier": 1.0}


@pytest.mark.parametrize(
    ("replies", "decision"),
    [(["accept", "reject"], "none"), (["accept", "And c?"], "accept"), (["And c?", "reject"], "reject")],
)
async def test_mnip_a_verifier_that_decides_both_ways_has_not_decided(replies, decision):
    scripts = {"verifier": ["a?", "b?", *replies], "prover0": ["x"], "prover1": ["y"]}
    output = await Talk(MNIP(MNIPConfig(agents={})), scripts).output()
    assert output["branches"][0]["decision"] == decision


async def test_mnip_sequential_and_in_random_order():
    config = MNIPConfig(agents={}, sequential=True, verifier_first=False)
    handler = MNIP(config)
    assert [handler.turns_in_round(r) for r in range(3)] == [
        [("prover0", "prover0_channel")],
        [("prover1", "prover1_channel")],
        [("verifier", "prover0_channel"), ("verifier", "prover1_channel")],
    ]
    orders = {handler.order(DialogueProblem("q"), random.Random(seed)) for seed in range(12)}
    assert orders == {("prover0", "prover1"), ("prover1", "prover0")}


def test_mnip_has_one_stance_for_both():
    handler = MNIP(MNIPConfig(agents={}, randomize_prover_stance=True))
    drawn = {tuple(handler.stances(DialogueProblem("q"), random.Random(seed)).values()) for seed in range(12)}
    assert drawn == {("accept", "accept"), ("reject", "reject")}


async def test_solo_verifier_decides_at_once():
    talk = Talk(SoloVerifier(SoloVerifierConfig(agents={})), {"verifier": ["accept"]})
    output = await talk.output()
    assert format_messages(output) == ["verifier@main: accept"]
    assert rewards(output) == {"verifier": 1.0}


@pytest.mark.parametrize("truth", ["accept", "reject"])
async def test_merlin_or_morgana_and_the_verifier_is_not_told_which(truth):
    speakers = set()
    for seed in range(16):
        scripts = {"merlin": ["see 3"], "morgana": ["see 3"], "verifier": ["Decision: accept"]}
        talk = Talk(MerlinArthur(MerlinArthurConfig(agents={})), scripts)
        output = await talk.output(item=example(truth), seed=seed)
        speaker = output["messages"][0]["agent"]
        speakers.add(speaker)
        assert [m["agent"] for m in output["messages"]] == [speaker, "verifier"]
        assert talk.prompts_of("verifier") == [
            [user("I am verifier.", "prover: see 3", "Decide now: accept or reject.")]
        ]
        helpful = speaker == "merlin"
        assert output["stances"][speaker] == truth if helpful else output["stances"][speaker] != truth
        right = truth == "accept"
        assert rewards(output) == {speaker: float(right == helpful), "verifier": 1.0 if right else -1.0}
    assert speakers == {"merlin", "morgana"}


async def test_multi_channel_is_what_the_configuration_says():
    config = MultiChannelConfig(
        agents={},
        channels={"table": ["alice", "bob", "judge"], "aside": ["alice", "judge"]},
        rounds=[["alice@aside", "bob@table"], ["judge@table"]],
        provers=["alice"],
        verifiers=["judge"],
    )
    handler = MultiChannel(config)
    assert handler.agent_names == ("alice", "judge", "bob")
    assert handler.agent_channel_visibility == [
        ("alice", "table"), ("bob", "table"), ("judge", "table"), ("alice", "aside"), ("judge", "aside")
    ]  # fmt: skip
    talk = Talk(handler, {"alice": ["psst", "yes"], "bob": ["hm", "no"], "judge": ["Well?", "reject"]})
    output = await talk.output()
    assert talk.prompts_of("bob")[1] == [user("I am bob."), assistant("hm"), user("judge: Well?")], (
        "it never hears aside"
    )
    assert talk.prompts_of("alice")[1] == [
        user("I am alice.", "[aside]"),
        assistant("psst"),
        user("[table] bob: hm", "[table] judge: Well?", "[aside]"),
    ]
    assert rewards(output) == {"alice": 0.0, "judge": -1.0}


def test_multi_channel_names_a_turn_that_says_not_where():
    with pytest.raises(ValueError, match="agent@channel"):
        MultiChannelConfig(agents={}, channels={"t": ["a"]}, rounds=[["a"]], verifiers=["a"])


FIVE = {"strongly agree": 1, "agree": 0.5, "undecided": 0, "disagree": -0.5, "strongly disagree": -1}
MEANT = {word: "accept" if value > 0 else "reject" if value < 0 else "none" for word, value in FIVE.items()}


@pytest.mark.parametrize(
    ("word", "earned"),
    [
        ("strongly agree", (1.0, -1.0)),
        ("Decision: agree", (0.75, -0.375)),
        ("undecided", (0.5, 0.25)),
        ("I disagree.", (0.25, 0.625)),
        ("strongly disagree", (0.0, 1.0)),
    ],
)
async def test_rewards_on_a_scale(word, earned):
    """Truth reject, undecided earns 0.25: half of the way to 1 is 0.625, half of the way to -1 is -0.375."""
    settings = {"decision_words": MEANT, "decision_values": FIVE, "verifier_no_guess_reward": 0.25}
    config = NIPConfig(agents={}, verifier_first=False, max_message_rounds=2, **settings)
    talk = Talk(NIP(config), {"verifier": [word], "prover": ["x"]})
    output = await talk.output(item=example("reject"))
    assert rewards(output) == dict(zip(("prover", "verifier"), earned, strict=True))
    assert talk.prompts_of("verifier")[0][-1]["content"].endswith(
        "Decide now: strongly disagree, disagree, undecided, agree or strongly agree."
    )


def test_numbers_of_a_scale_are_not_truths():
    words = {str(number): "reject" if number < 5 else "accept" for number in range(11) if number != 5}
    values = {word: int(word) / 5 - 1 for word in words}
    handler = NIP(NIPConfig(agents={}, decision_words=words, decision_values=values))
    assert handler.parse_problem(example(1)).truth == "accept", "the row's 1, not the scale's"
    assert handler.parse_decision("Decision: 1") == "reject"
    assert handler.parse_decision("Decision: 10") == "accept"
    assert (handler.format_decision("accept"), handler.format_decision("reject")) == ("10", "0")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"accept": 1.0}, "must have the words of decision_words"),
        ({"accept": -0.5, "reject": -1, "none": 0}, "'accept' is -0.5; write 0 to 1 for accept"),
        ({"accept": 2, "reject": -1, "none": 0}, "'accept' is 2.0"),
    ],
)
def test_values_that_contradict_the_words_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        NIPConfig(agents={}, decision_values=values)
