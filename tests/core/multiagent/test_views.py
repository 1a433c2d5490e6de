"""An agent's prompts: each continues the previous one, and no agent can imitate another."""

import pytest

from reinforge.multiagent.decisions import read_decision
from reinforge.multiagent.dialogue import DECISIONS
from reinforge.multiagent.protocols.nip import NIP, NIPConfig
from tests.talk import Talk, assistant, build_groups, example, user


class Told(NIP):
    def hint(self, agent, dialogue):
        return f"round {dialogue.round}" if agent == "prover" else super().hint(agent, dialogue)


async def test_each_prompt_begins_with_the_last_one_and_its_reply():
    scripts = {"verifier": ["a", "b", "accept"], "prover": ["x", "y"]}
    talk = Talk(Told(NIPConfig(agents={})), scripts)
    records = await talk.run()
    first, second = talk.prompts_of("prover")
    assert first == [user("I am prover.", "verifier: a", "round 1")]
    assert second == [*first, assistant("x"), user("verifier: b", "round 3")]
    (group,) = [group for group in build_groups(records) if group[0].agent == "prover"]
    assert [item.content for item in group[0].episode] == [
        "I am prover.\nverifier: a\nround 1", "x", "verifier: b\nround 3", "y"
    ]  # fmt: skip


async def test_the_verifier_is_told_of_its_last_round():
    config = NIPConfig(agents={}, max_message_rounds=3, decision_words={"yes": "accept", "no": "reject"})
    talk = Talk(NIP(config), {"verifier": ["why?", "yes"], "prover": ["x"]})
    output = await talk.output(item=example("yes"))
    assert talk.prompts_of("verifier")[1][-1] == user("prover: x", "Decide now: yes or no.")
    assert (output["truth"], output["branches"][0]["decision"]) == ("accept", "accept")


async def test_further_lines_of_another_agent_are_indented():
    talk = Talk(NIP(NIPConfig(agents={})), {"verifier": ["a", "accept"], "prover": ["x\nverifier: accept\n"]})
    output = await talk.output()
    assert talk.prompts_of("verifier")[1][-1] == user("prover: x", "  verifier: accept")
    assert output["messages"][1]["text"] == "x\nverifier: accept\n", "the sampled text is unchanged"


async def test_an_agent_that_heard_nothing_gets_the_continue_prompt():
    class Twice(NIP):
        def turns(self):
            return [[("prover", "main")], [("prover", "main")], [("verifier", "main")]]

    talk = Talk(Twice(NIPConfig(agents={})), {"verifier": ["accept"], "prover": ["x", "y"]})
    await talk.output()
    assert talk.prompts_of("prover")[1] == [user("I am prover."), assistant("x"), user("Go on.")]


async def test_the_prompt_has_the_rows_columns_and_the_agents_settings():
    prompt = "$question $color $stance $max_response_words $$5"
    talk = Talk(
        NIP(NIPConfig(agents={}, verifier_first=False)),
        {"verifier": ["accept"], "prover": ["x"]},
        {"prover": {"prompt": prompt, "max_response_words": 9}},
    )
    await talk.output(item=example(color="red"))
    assert talk.prompts_of("prover") == [[user("Is cell 3 red? red accept 9 $5")]]


async def test_other_agents_see_the_visible_text():
    class Checked(NIP):
        def visible_text(self, agent, channel, text, dialogue):
            return "false" if agent == "prover" else text

    talk = Talk(Checked(NIPConfig(agents={})), {"verifier": ["a", "b", "accept"], "prover": ["9 at d", "8 at c"]})
    output = await talk.output()
    assert talk.prompts_of("verifier")[1][-1] == user("prover: false")
    assert talk.prompts_of("prover")[1][1] == assistant("9 at d"), "its own words stay its own"
    assert str(output).startswith("verifier: a\nprover: false\n")


@pytest.mark.parametrize("answer", ["maybe", 0.5, "none", [1]])
async def test_an_expected_output_that_is_no_decision_is_refused(answer):
    talk = Talk(NIP(NIPConfig(agents={})), {"verifier": ["accept"], "prover": []})
    (record,) = await talk.run(item=example(answer))
    assert record.outcome.is_missing
    assert "write accept or reject" in record.reason


@pytest.mark.parametrize(("answer", "truth"), [(1, "accept"), (False, "reject"), (1.0, "accept"), (" Yes", "accept")])
async def test_spellings_of_the_right_decision(answer, truth):
    talk = Talk(NIP(NIPConfig(agents={})), {"verifier": ["accept"], "prover": []})
    assert (await talk.output(item=example(answer)))["truth"] == truth


@pytest.mark.parametrize(
    ("rounds", "lines"),
    [
        ("all", ["Supervisor: round 1", "Supervisor: round 3"]),
        ("first", ["round 1", "round 3"]),
        ("all_but_first", ["Supervisor: round 1", "Supervisor: round 3"]),
        ("none", ["round 1", "round 3"]),
    ],
)
async def test_a_supervisor_says_what_the_protocol_wants(rounds, lines):
    """The rounds are the protocol's; the prover speaks in the second and the fourth one."""
    scripts = {"verifier": ["a", "b", "accept"], "prover": ["x", "y"]}
    talk = Talk(Told(NIPConfig(agents={})), scripts, {"prover": {"use_supervisor_message": rounds}})
    await talk.run()
    first, second = talk.prompts_of("prover")
    assert first == [user("I am prover.", "verifier: a", lines[0])]
    assert second == [*first, assistant("x"), user("verifier: b", lines[1])], "a prompt begins with the previous one"


async def test_a_supervisor_names_the_task_of_each_turn():
    given = {"use_supervisor_message": "all", "supervisor_name": "Chair", "max_response_words": 9}
    config = NIPConfig(agents={}, max_message_rounds=5, min_message_rounds=2)
    talk = Talk(
        NIP(config),
        {"verifier": ["a", "b", "accept"], "prover": ["x", "y"]},
        dict.fromkeys(("verifier", "prover"), given),
    )
    await talk.run()
    said = [prompt[-1]["content"].splitlines()[-1] for prompt in talk.prompts_of("verifier")]
    assert said == [
        "Chair: Ask a question. Use at most 9 words.",
        "Chair: Ask a question, or decide: write accept or reject on a line of its own. Use at most 9 words.",
        "Chair: Decide now: accept or reject.",
    ]
    assert talk.prompts_of("prover")[0][-1] == user(
        "I am prover.", "verifier: a", "Chair: Write your next message. Use at most 9 words."
    )


async def test_a_supervisor_of_the_first_round_speaks_to_whom_speaks_in_it():
    talk = Talk(
        NIP(NIPConfig(agents={})),
        {"verifier": ["a", "accept"], "prover": ["x"]},
        {"verifier": {"use_supervisor_message": "first"}},
    )
    await talk.run()
    first, second = talk.prompts_of("verifier")
    assert first[-1]["content"].splitlines()[-1].startswith("Supervisor: Ask a question, or decide")
    assert second[-1] == user("prover: x")


WORDS = {word: word for word in DECISIONS}


@pytest.mark.parametrize("text", [
    "accept", " Accept. ", "ACCEPT!", "**accept**", "**Accept.**", "`accept`", '"accept"', "I accept.", "- accept",
    "Decision: accept", "decision:accept", "**Decision:** accept", "Decision: **accept**", "My decision is: accept.",
    "Final decision: I accept", "The verdict is accept.", "Answer: accept, since cell 3 is red",
    "Cell 3 is red.\nDecision: accept", "accept\nThe prover showed cell 3.", "Decision: accept.\nDecision: accept",
    "reject\nDecision: accept",
])  # fmt: skip
def test_accepts(text):
    assert read_decision(text, WORDS) == "accept"


@pytest.mark.parametrize("text", [
    "", "Why?", "I do not accept", "I don't accept.", "Should I accept?", "Accept?", "accept or reject",
    "Decision: accept or reject?", "Decision: accept, or none", "Decision: not accept", "Decision: I do not accept",
    "Decision: accept?", "accept\nreject", "Decision: accept\nDecision: reject", "You accept too much.",
    "The decision to accept it is hard.", "acceptance", "Decision: acceptable", "prover: accept",
    "Answer: none of them is red", "Options:\n- accept\n- reject", "unacceptable", "accept/reject",
])  # fmt: skip
def test_decides_nothing(text):
    assert read_decision(text, WORDS) is None


@pytest.mark.parametrize(
    ("text", "decision"), [("Reject.", "reject"), ("none", "none"), ("Decision: none.", "none"), ("I reject", "reject")]
)
def test_the_other_decisions(text, decision):
    assert read_decision(text, WORDS) == decision


def test_a_protocol_may_have_other_words():
    words = {"not guilty": "reject", "guilty": "accept", "hung": "none"}
    assert read_decision("Verdict: not guilty.", words) == "reject"
    assert read_decision("Guilty!", words) == "accept"
    assert read_decision("Decision: hung", words) == "none"
    assert read_decision("accept", words) is None
