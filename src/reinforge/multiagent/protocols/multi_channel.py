"""A protocol defined entirely in the configuration: agents, channels, who sees which, and who speaks when.

    channels: {table: [alice, bob, judge], aside: [alice, judge]}
    rounds: [[alice@table, bob@table], [judge@aside]]
    provers: [alice, bob]
    verifiers: [judge]

Use it to try out a protocol. One that needs more (evidence, custom rewards, other names) takes about thirty lines of
Python (docs/multiagent.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import Field, field_validator

from reinforge.multiagent.protocol import ProtocolConfig, ProtocolHandler, Turn
from reinforge.multiagent.registration import register_protocol


class MultiChannelConfig(ProtocolConfig, name="multi_channel"):
    """Agents, channels and turns; the order of `rounds` replaces `verifier_first`."""

    channels: dict[str, list[str]] = Field(min_length=1, description="The agents that see each channel.")
    rounds: list[list[str]] = Field(
        min_length=1, description="Turns of each round, as agent@channel; rounds repeat in this order."
    )
    provers: list[str] = Field(default_factory=list, description="Agents that argue; each has a stance.")
    verifiers: list[str] = Field(min_length=1, description="Agents that decide; the decision of the first one counts.")

    @field_validator("rounds")
    @classmethod
    def _are_turns(cls, rounds: list[list[str]]) -> list[list[str]]:
        for turn in (turn for round_ in rounds for turn in round_):
            if not all(turn.partition("@")):
                raise ValueError(f'"{turn}" is not a turn; write agent@channel')
        return rounds


@register_protocol(MultiChannelConfig)
class MultiChannel(ProtocolHandler):
    config: MultiChannelConfig

    def __init__(self, config: MultiChannelConfig):
        super().__init__(config)
        self.provers, self.verifiers = tuple(config.provers), tuple(config.verifiers)
        named = dict.fromkeys(name for members in config.channels.values() for name in members)
        self.others = tuple(name for name in named if name not in (*self.provers, *self.verifiers))

    def channels(self) -> Mapping[str, Sequence[str]]:
        return self.config.channels

    def turns(self) -> Sequence[Sequence[Turn]]:
        rounds = [[turn.partition("@") for turn in round_] for round_ in self.config.rounds]
        return [[(agent, channel) for agent, _, channel in round_] for round_ in rounds]
