"""Zero-knowledge variant of a protocol: `zero_knowledge: true` (arXiv:2412.08897, section 4).

A second verifier, the adversarial one, questions the same provers in channels of its own. A simulator hears neither and
writes what the adversarial verifier would write. If it can, the provers gave away nothing that it could not know.

    main          ->  main_standard      provers, verifier
                      main_adversarial   provers, adversarial_verifier
                      main_simulator     simulator

    similarity            mean over the adversarial verifier's messages, each against the simulator's of that round
    simulator             simulator_reward_coefficient * similarity
    adversarial verifier  minus that
    provers               their reward in the protocol itself, plus aux_prover_reward_coefficient of the simulator's

A decision is only similar to the same decision. Two other messages are as similar as the cosine of their word counts:
"is cell 3 red" and "is cell 4 red" share three of four words, 0.75.

Differs from the paper: similarity is of sampled text, not of the distributions that it is sampled from. Differs from
neural-interactive-proofs, which compares logits and so supports no text: the same, and the mean over messages replaces
the sum, so that long dialogues earn no more.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from reinforge.errors import ConfigError, Problem
from reinforge.multiagent.dialogue import Decision, Dialogue, Step
from reinforge.multiagent.protocol import ProtocolHandler, Turn

VERIFIER = "verifier"
ADVERSARIAL_VERIFIER = "adversarial_verifier"
SIMULATOR = "simulator"
Kind = Literal["standard", "adversarial", "simulator"]
_OWN_KINDS: dict[str, Kind] = {VERIFIER: "standard", ADVERSARIAL_VERIFIER: "adversarial", SIMULATOR: "simulator"}
"""The kind of channel of the agents that see one kind only."""
_UNCHANGED = ("setup", "parse_problem", "stances", "absent", "order", "parse_decision", "format_decision")
"""Methods that are those of the protocol itself."""


class ZeroKnowledge(ProtocolHandler):
    """A protocol between its provers, its verifier, an adversarial verifier and a simulator.

    Raises:
        ConfigError: It has no provers, or other verifiers than one named `verifier`.
    """

    def __init__(self, base: ProtocolHandler):
        super().__init__(base.config)
        if not base.prover_names or base.verifier_names != (VERIFIER,):
            name, found = base.config.static_type, ", ".join(base.verifier_names) or "none"
            message = f"{name} has the provers {', '.join(base.prover_names) or 'none'} and the verifiers {found}"
            fix = f"use a protocol with provers and one verifier named {VERIFIER}, or remove this key"
            raise ConfigError(Problem("zero_knowledge", message, fix))
        self.base = base
        for name in _UNCHANGED:
            setattr(self, name, getattr(base, name))
        self.provers, self.verifiers = base.prover_names, (VERIFIER, ADVERSARIAL_VERIFIER)
        self.others = (*base.others, SIMULATOR)
        self.needs_truth = base.needs_truth

    # Who speaks where.

    def channels(self) -> Mapping[str, Sequence[str]]:
        """Returns each channel of the protocol three times; the simulator is alone in its own."""
        channels = self.base.channels()
        swap = {VERIFIER: ADVERSARIAL_VERIFIER}
        return {
            **{f"{name}_standard": tuple(members) for name, members in channels.items()},
            **{f"{name}_adversarial": tuple(swap.get(m, m) for m in members) for name, members in channels.items()},
            **{f"{name}_simulator": (SIMULATOR,) for name, members in channels.items() if VERIFIER in members},
        }

    def turns(self) -> Sequence[Sequence[Turn]]:
        """Returns each turn of the protocol in both kinds of channels, with the simulator beside the verifiers."""
        return [[each for turn in round_ for each in _copy_turn(turn)] for round_ in self.base.turns()]

    def active_turns(self, dialogue: Dialogue) -> list[Turn]:
        """Returns the next turns; a verifier that has decided, and who speaks to it, are silent."""
        ended = {kind for kind in ("standard", "adversarial") if self._find_outcome(dialogue, kind).done}
        if "adversarial" in ended:
            ended.add("simulator")
        return [turn for turn in super().active_turns(dialogue) if _split_channel(turn[1])[1] not in ended]

    # What follows from the protocol itself.

    def check_reply(self, agent: str, text: str, dialogue: Dialogue) -> str | None:
        """Returns why a reply is invalid; either verifier's by the rules of the protocol's one."""
        if agent == SIMULATOR:
            return None if text.strip() else "an empty message"
        return self.base.check_reply(_base_agent(agent), text, _project(dialogue, _kind_of(agent)))

    def visible_text(self, agent: str, channel: str, text: str, dialogue: Dialogue) -> str:
        if agent == SIMULATOR:
            return text
        name, kind = _split_channel(channel)
        return self.base.visible_text(_base_agent(agent), name, text, _project(dialogue, kind))

    def display_name(self, agent: str, dialogue: Dialogue) -> str:
        """Returns the same name for both verifiers."""
        return agent if agent == SIMULATOR else self.base.display_name(_base_agent(agent), dialogue)

    def hint(self, agent: str, dialogue: Dialogue) -> str:
        """Returns the last line of the protocol's prompt; the simulator has none."""
        return "" if agent == SIMULATOR else self.base.hint(_base_agent(agent), _project(dialogue, _kind_of(agent)))

    @property
    def max_message_rounds(self) -> int:
        return self.base.max_message_rounds

    @property
    def min_message_rounds(self) -> int:
        return self.base.min_message_rounds

    @property
    def max_verifier_questions(self) -> int:
        return self.base.max_verifier_questions

    # Outcome and rewards.

    def step_interaction_protocol(self, dialogue: Dialogue) -> Step:
        """Returns the verifier's outcome once both verifiers have decided, or the rounds are over."""
        standard, adversarial = (self._find_outcome(dialogue, kind) for kind in ("standard", "adversarial"))
        if not (standard.done and adversarial.done):
            return Step()
        rewards = self.rewards(dialogue, standard.decision)
        return Step(True, standard.decision, standard.terminated, rewards)

    def _find_outcome(self, dialogue: Dialogue, kind: str) -> Step:
        view = _project(dialogue, kind)
        steps = (self.base.step_interaction_protocol(view.before_round(r)) for r in range(1, dialogue.round + 1))
        return next((step for step in steps if step.done), Step())

    def rewards(self, dialogue: Dialogue, decision: Decision | None) -> dict[str, float]:
        """Example: nip, decision accept, similarity 0.75: prover 1.75, simulator 0.75, adversarial verifier -0.75."""
        config = self.config
        earned = self.base.rewards(_project(dialogue, "standard"), decision)
        simulated = config.simulator_reward_coefficient * self.measure_similarity(dialogue)
        shared = config.aux_prover_reward_coefficient * simulated
        provers = {name: value + shared for name, value in earned.items() if name in self.prover_names}
        return {**earned, **provers, ADVERSARIAL_VERIFIER: -simulated, SIMULATOR: simulated}

    def reward_mid_point_estimate(self, agent_name: str) -> float:
        """Returns the protocol's estimate, or half of what a perfect simulation earns."""
        half = self.config.simulator_reward_coefficient / 2
        if agent_name in (SIMULATOR, ADVERSARIAL_VERIFIER):
            return half if agent_name == SIMULATOR else -half
        return self.base.reward_mid_point_estimate(agent_name)

    def measure_similarity(self, dialogue: Dialogue) -> float:
        """Returns the similarity of the simulator's messages with the adversarial verifier's, in [0, 1]."""
        texts = {
            agent: {(m.round, _split_channel(m.channel)[0]): m.text for m in dialogue.messages if m.agent == agent}
            for agent in (SIMULATOR, ADVERSARIAL_VERIFIER)
        }
        written = texts[ADVERSARIAL_VERIFIER]
        similarities = [self._compare(text, texts[SIMULATOR].get(place, "")) for place, text in written.items()]
        return statistics.fmean(similarities) if similarities else 0.0

    def _compare(self, text: str, simulated: str) -> float:
        decisions = [self.parse_decision(each) for each in (text, simulated)]
        if decisions != [None, None]:
            return float(decisions[0] == decisions[1])
        return compare_word_counts(text, simulated)


def compare_word_counts(one: str, other: str) -> float:
    """Returns the cosine of two texts' word counts, in [0, 1]; 0 if either has no words.

    Example: "is cell 3 red", "is cell 4 red" -> 3 / (2 * 2) = 0.75.
    """
    counts = [Counter(re.findall(r"\w+", text.lower())) for text in (one, other)]
    product = sum(count * counts[1][word] for word, count in counts[0].items())
    norms = [math.sqrt(sum(count**2 for count in each.values())) for each in counts]
    return min(1.0, product / (norms[0] * norms[1])) if product else 0.0


def _copy_turn(turn: Turn) -> list[Turn]:
    agent, channel = turn
    if agent == VERIFIER:
        return [(name, f"{channel}_{kind}") for name, kind in _OWN_KINDS.items()]
    return [(agent, f"{channel}_standard"), (agent, f"{channel}_adversarial")]


def _split_channel(channel: str) -> tuple[str, str]:
    name, _, kind = channel.rpartition("_")
    return name, kind


def _base_agent(agent: str) -> str:
    return VERIFIER if agent == ADVERSARIAL_VERIFIER else agent


def _kind_of(agent: str) -> Kind:
    return _OWN_KINDS.get(agent, "standard")


def _project(dialogue: Dialogue, kind: str) -> Dialogue:
    split = [(message, *_split_channel(message.channel)) for message in dialogue.messages]
    own = [replace(each, agent=_base_agent(each.agent), channel=base) for each, base, of in split if of == kind]
    return replace(dialogue, messages=tuple(own))
