"""Agents over several channels, who sees which, and who speaks when: all of it from the configuration.

    channels: {table: [alice, bob, judge], aside: [alice, judge]}
    rounds: [[alice@table, bob@table], [judge@aside]]
    provers: [alice, bob]
    verifiers: [judge]

It is for trying a protocol out. One that needs more than this (evidence, rewards of its own, other names) is thirty
lines of Python (docs/multiagent.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import Field, field_validator

from reinforge.multiagent.protocol import ProtocolConfig, ProtocolHandler, Turn
from reinforge.multiagent.registration import register_protocol


class MultiChannelConfig(ProtocolConfig, name="multi_channel"):
    """Agents, channels and turns as they are written here; `verifier_first` is what the rounds say."""

    channels: dict[str, list[str]] = Field(min_length=1, description="Agents that see each channel.")
    rounds: list[list[str]] = Field(
        min_length=1, description="Who speaks in each round, as agent@channel; then from the first again."
    )
    provers: list[str] = Field(default_factory=list, description="Agents that argue and are paid if they convince.")
    verifiers: list[str] = Field(min_length=1, description="Agents that decide; the first one's decision counts.")

    @field_validator("rounds")
    @classmethod
    def _are_turns(cls, rounds: list[list[str]]) -> list[list[str]]:
        for said in (turn for round_ in rounds for turn in round_):
            if not all(said.partition("@")):
                raise ValueError(f'"{said}" does not say who speaks where; write agent@channel')
        return rounds


@register_protocol(MultiChannelConfig)
class MultiChannel(ProtocolHandler):
    """What the configuration says."""

    config: MultiChannelConfig

    def __init__(self, config: MultiChannelConfig):
        super().__init__(config)
        self.provers, self.verifiers = tuple(config.provers), tuple(config.verifiers)
        named = dict.fromkeys(name for members in config.channels.values() for name in members)
        self.others = tuple(name for name in named if name not in (*self.provers, *self.verifiers))

    def channels(self) -> Mapping[str, Sequence[str]]:
        """Returns the configured channels."""
        return self.config.channels

    def turns(self) -> Sequence[Sequence[Turn]]:
        """Returns the configured rounds."""
        return [[(agent, channel) for agent, _, channel in map(_parted, round_)] for round_ in self.config.rounds]


def _parted(said: str) -> tuple[str, str, str]:
    return said.partition("@")
