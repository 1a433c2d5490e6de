"""A protocol in which whatever a model says decides something, so that one without any training can take part."""

from reinforge.multiagent.protocol import ProtocolConfig
from reinforge.multiagent.protocols.nip import NIP
from reinforge.multiagent.registration import register_protocol

VOWELS = "aeiou"
DECISIONS = {"accept": "a", "reject": "x"}


class BabbleConfig(ProtocolConfig, name="babble"):
    """A prover says something, then a verifier."""

    verifier_first: bool = False
    max_message_rounds: int = 2


@register_protocol(BabbleConfig)
class Babble(NIP):
    """A text with a vowel accepts, any other rejects."""

    def decision_of(self, text):
        return "accept" if set(text.lower()) & set(VOWELS) else "reject"

    def decision_text(self, decision):
        return DECISIONS[decision]


def settings(**protocol):
    """The parts of a configuration that are about the dialogue."""
    agents = {name: {"prompt": f"{name}: $question", "max_tokens_per_message": 4} for name in ("prover", "verifier")}
    return {
        "workflow": {"_type": "babble", "agents": agents, **protocol},
        "evaluator": {"_type": "verifier_accuracy"},
    }
