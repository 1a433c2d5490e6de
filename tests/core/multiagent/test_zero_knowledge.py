"""Zero-knowledge variants: an adversarial verifier with channels of its own, and a simulator that hears nobody."""

import pytest

from reinforge.config.loader import build_config
from reinforge.errors import ConfigError
from reinforge.multiagent import ExperimentSettings, HyperParameters, build_agents, build_protocol, experiment_config
from reinforge.multiagent.nip.rollouts import build_rollouts, decode_dialogues
from reinforge.multiagent.protocols.adp import ADP, ADPConfig
from reinforge.multiagent.protocols.debate import Debate, DebateConfig
from reinforge.multiagent.protocols.merlin_arthur import MerlinArthur, MerlinArthurConfig
from reinforge.multiagent.protocols.mnip import MNIP, MNIPConfig
from reinforge.multiagent.protocols.multi_channel import MultiChannel, MultiChannelConfig
from reinforge.multiagent.protocols.nip import NIP, NIPConfig
from reinforge.multiagent.protocols.roles import RolesConfig
from reinforge.multiagent.protocols.solo_verifier import SoloVerifier, SoloVerifierConfig
from reinforge.multiagent.registration import find_protocol_problems
from reinforge.multiagent.zero_knowledge import ZeroKnowledge, compare_word_counts
from tests.talk import Talk, assistant, example, format_messages, rewards, user

BASES = [
    (ADP, ADPConfig),
    (Debate, DebateConfig),
    (MerlinArthur, MerlinArthurConfig),
    (MNIP, MNIPConfig),
    (NIP, NIPConfig),
]
SCRIPTS = {
    "verifier": ["is cell 3 red", "accept"],
    "adversarial_verifier": ["is cell 4 red", "reject"],
    "prover": ["Yes.", "Yes, this too."],
    "simulator": ["is cell 5 red", "accept"],
}


def variant(handler=NIP, config=NIPConfig, **fields):
    return ZeroKnowledge(handler(config(agents={}, zero_knowledge=True, **fields)))


async def test_a_dialogue_of_nip():
    """Both verifiers question the prover; the simulator's first message shares three of four words, its second none."""
    talk = Talk(variant(), SCRIPTS)
    output = await talk.output()
    assert format_messages(output) == [
        "verifier@main_standard: is cell 3 red",
        "adversarial_verifier@main_adversarial: is cell 4 red",
        "simulator@main_simulator: is cell 5 red",
        "prover@main_standard: Yes.",
        "prover@main_adversarial: Yes, this too.",
        "verifier@main_standard: accept",
        "adversarial_verifier@main_adversarial: reject",
        "simulator@main_simulator: accept",
    ]
    assert output["branches"][0]["decision"] == "accept", "the verifier's; the adversarial one rejected"
    similarity = (0.75 + 0.0) / 2
    assert rewards(output) == {
        "prover": 1.0 + similarity,
        "verifier": 1.0,
        "adversarial_verifier": -similarity,
        "simulator": similarity,
    }


async def test_who_hears_what():
    talk = Talk(variant(), SCRIPTS)
    await talk.output()
    assert talk.prompts_of("simulator")[1] == [user("I am simulator."), assistant("is cell 5 red"), user("Go on.")]
    assert talk.prompts_of("adversarial_verifier")[1][-1] == user("prover: Yes, this too.")
    assert talk.prompts_of("verifier")[1][-1] == user("prover: Yes.")
    [first, second] = talk.prompts_of("prover")
    both = ["[main_standard] verifier: is cell 3 red", "[main_adversarial] verifier: is cell 4 red"]
    assert first == [user("I am prover.", *both, "[main_standard]")]
    assert second == [user("I am prover.", *both, "[main_adversarial]")], "a round's messages are seen from the next on"


async def test_a_verifier_that_has_decided_is_silent():
    scripts = {
        "verifier": ["accept"],
        "adversarial_verifier": ["is cell 4 red", "accept"],
        "prover": ["Yes."],
        "simulator": ["is cell 4 red", "accept"],
    }
    output = await Talk(variant(), scripts).output()
    assert format_messages(output)[3:] == [
        "prover@main_adversarial: Yes.",
        "adversarial_verifier@main_adversarial: accept",
        "simulator@main_simulator: accept",
    ]
    assert rewards(output) == {"prover": 2.0, "verifier": 1.0, "adversarial_verifier": -1.0, "simulator": 1.0}


async def test_the_coefficients():
    handler = variant(simulator_reward_coefficient=2.0, aux_prover_reward_coefficient=0.5)
    output = await Talk(handler, SCRIPTS).output(item=example("reject"))
    assert rewards(output) == {
        "prover": 1.0 + 0.5 * 2 * 0.375,
        "verifier": -1.0,
        "adversarial_verifier": -0.75,
        "simulator": 0.75,
    }
    estimates = {name: handler.reward_mid_point_estimate(name) for name in handler.agent_names}
    assert estimates == {"prover": 0.5, "verifier": 0.0, "adversarial_verifier": -1.0, "simulator": 1.0}


def test_similarity_of_words():
    assert compare_word_counts("is cell 3 red", "Is cell 4 red?") == 0.75
    assert compare_word_counts("a a b", "a b b") == pytest.approx(4 / 5)
    assert compare_word_counts("same words", "words same") == pytest.approx(1.0)
    assert compare_word_counts("!", "!") == compare_word_counts("", "a") == 0.0


@pytest.mark.parametrize(("handler", "config"), BASES, ids=[base.__name__ for base, _ in BASES])
async def test_every_protocol_with_provers_has_a_variant(handler, config):
    """Channels three times, agents two more, and a dialogue to its end with any replies."""
    found, base = variant(handler, config), handler(config(agents={}))
    assert found.agent_names == (*base.agent_names, "adversarial_verifier", "simulator")
    names = base.message_channel_names
    kinds = [f"{name}_{kind}" for kind in ("standard", "adversarial", "simulator") for name in names]
    assert list(found.message_channel_names) == kinds
    assert find_protocol_problems(found) == []
    output = await Talk(found, lambda request: "accept").output()
    assert output["branches"][0]["decision"] == "accept"
    earned = rewards(output)
    assert (earned["simulator"], earned["adversarial_verifier"]) == (1.0, -1.0), "the same decision everywhere"
    assert set(earned) == set(found.agent_names) - set(output["absent"])


def test_what_has_no_variant_says_why():
    with pytest.raises(ConfigError, match="solo_verifier has the provers none and the verifiers verifier(.|\n)*remove"):
        variant(SoloVerifier, SoloVerifierConfig)
    channels = {"channels": {"c": ["p", "judge"]}, "rounds": [["p@c"], ["judge@c"]]}
    with pytest.raises(ConfigError, match="the provers p and the verifiers judge"):
        variant(MultiChannel, MultiChannelConfig, **channels, provers=["p"], verifiers=["judge"])
    assert "zero_knowledge" not in RolesConfig.model_fields, "a team has no verifier"


async def test_an_experiment_with_a_variant():
    agents = {"_default": {"model_name": "m", "prompt": "$question"}}
    params = HyperParameters(
        "s",
        "pure_text_ei",
        "rows.jsonl",
        agents=agents,
        protocol_common={"zero_knowledge": True},
        zk_protocol={"simulator_reward_coefficient": 0.5},
    )
    handler = build_protocol(params)
    assert isinstance(handler, ZeroKnowledge)
    assert list(build_agents(params)) == ["prover", "verifier", "adversarial_verifier", "simulator"]
    assert build_agents(params)["adversarial_verifier"].is_verifier
    row = {"id": "1", "question": "q", "answer": "accept"}
    workflow = build_config(experiment_config(params, ExperimentSettings("r"), [row])).config.workflow
    assert (workflow.zero_knowledge, workflow.simulator_reward_coefficient) == (True, 0.5)
    output = await Talk(handler, SCRIPTS).output()
    [found] = decode_dialogues(build_rollouts([output], handler), handler)
    assert len(found.messages) == 8
    assert found.rewards["simulator"] == 0.1875
