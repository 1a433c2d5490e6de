"""A protocol in which any reply is a decision, so that an untrained model can take part."""

from reinforge.multiagent.protocol import ProtocolConfig
from reinforge.multiagent.protocols.nip import NIP
from reinforge.multiagent.registration import register_protocol

VOWELS = "aeiou"
DECISIONS = {"accept": "a", "reject": "x"}


class BabbleConfig(ProtocolConfig, name="babble"):
    """A prover sends one message, then a verifier."""

    verifier_first: bool = False
    max_message_rounds: int = 2


@register_protocol(BabbleConfig)
class Babble(NIP):
    """A text with a vowel accepts, any other rejects."""

    def parse_decision(self, text):
        return "accept" if set(text.lower()) & set(VOWELS) else "reject"

    def format_decision(self, decision):
        return DECISIONS[decision]


def settings(**protocol):
    """The parts of a configuration that concern the protocol."""
    agents = {name: {"prompt": f"{name}: $question", "max_tokens_per_message": 4} for name in ("prover", "verifier")}
    return {
        "workflow": {"_type": "babble", "agents": agents, **protocol},
        "evaluator": {"_type": "verifier_accuracy"},
    }
