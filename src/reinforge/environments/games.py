"""What packages of games share: a game is a number, which seeds it."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from reinforge.config.schema import EnvironmentConfig
from reinforge.types.evaluation import EvalInputItem

FAILURES = ("policy_error", "overlong", "context_overflow", "policy_timeout")


class GamesConfig(EnvironmentConfig):
    """Base of the configuration of a package of games."""

    penalties: ClassVar[dict[str, float]] = {}
    """Reward of an episode that fails because of the policy, by how the game's name begins."""

    @classmethod
    def build_sections(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Returns penalties: where losing has a negative reward, the default of 0 would teach the policy to fail."""
        name = str(settings.get("name"))
        penalty = next((value for start, value in cls.penalties.items() if name.startswith(start)), 0.0)
        return {"finetuning": {"outcomes": dict.fromkeys(FAILURES, penalty)}} if penalty else {}

    name: str = Field(description="The game.")
    size: int = Field(default=600, ge=3, description="Number of tasks; each is the game with a seed of its own.")
    seed: int = Field(default=0, ge=0, description="Seed of the tasks.")
    arguments: dict[str, Any] = Field(default={}, description="Keyword arguments with which the game is made.")


def list_games(config: GamesConfig, num_players: int = 1) -> list[EvalInputItem]:
    """Returns rows such as `{"id": "Nim-v0-00003", "question": "Nim-v0, game 3 as player 1", "seed": 3, "seat": 1}`.

    The policy sits at each seat in turn.
    """
    rows = []
    for index in range(config.size):
        seat = index % num_players
        question = f"{config.name}, game {index}" + (f" as player {seat}" if num_players > 1 else "")
        # seeds that lie close together would give two configurations the same games
        seed = (config.seed * 1_000_003 + index) % 2**31
        rows.append({"id": f"{config.name}-{index:05}", "question": question, "seed": seed, "seat": seat})
    return list(map(EvalInputItem.from_row, rows))
