"""Gymnasium's environments as text: `environment: gymnasium:FrozenLake-v1`.

FrozenLake, Taxi, Blackjack and CliffWalking have texts here; any other environment needs two functions of the user:
`observe(observation) -> str` and `act(text) -> action`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import AsyncIterator, Callable
from numbers import Real
from typing import Any, ClassVar

from pydantic import Field

from reinforge.config.imports import import_object
from reinforge.environments.games import GamesConfig, list_games
from reinforge.errors import ConfigError, PolicyFailure, Problem, did_you_mean, show
from reinforge.interfaces import Environment, EnvironmentSource
from reinforge.registry import register_environment
from reinforge.types.environment import Observation, Reply, StepResult
from reinforge.types.evaluation import EvalInputItem


class GymnasiumConfig(GamesConfig, name="gymnasium"):
    """Environments of reinforcement learning as text; needs the package gymnasium."""

    install: ClassVar[str] = "pip install gymnasium"
    license: ClassVar[str] = "MIT"
    penalties: ClassVar[dict[str, float]] = {"Taxi": -100.0, "CliffWalking": -100.0, "Blackjack": -1.0}

    @classmethod
    def list_names(cls) -> list[str]:
        return sorted(_import_gymnasium().registry)

    observe: str | None = Field(
        default=None, description="`module:name` of a function that returns an observation as a string."
    )
    act: str | None = Field(
        default=None, description="`module:name` of a function that returns a reply's action, or raises a ValueError."
    )


def _draw(rows: Any, row: int, column: int) -> str:
    lines = [list(line) for line in rows]
    lines[row][column] = "P"
    return "\n".join("".join(line) for line in lines)


def _show_lake(game: Any, state: Any) -> str:
    return _draw(game.desc.astype(str), *divmod(int(state), game.ncol))


def _show_cliff(game: Any, state: Any) -> str:
    return _draw([*["." * 12] * 3, "S" + "C" * 10 + "G"], *divmod(int(state), 12))


def _show_taxi(game: Any, state: Any) -> str:
    row, column, passenger, destination = game.decode(int(state))
    where = ("at R", "at G", "at Y", "at B", "in the taxi")[passenger]
    rows, place = game.desc.astype(str), (row + 1, 2 * column + 1)
    here = f"You are at {rows[place]}. " if rows[place] in "RGYB" else ""  # the taxi hides the letter
    return f"{_draw(rows, *place)}\n{here}The passenger is {where} and wants to go to {'RGYB'[destination]}."


def _show_cards(game: Any, state: Any) -> str:
    total, dealer, ace = state
    return f"Your cards sum to {total}{' with a usable ace' if ace else ''}. The dealer shows {dealer}."


TEXTS: dict[str, tuple[Callable[[Any, Any], str], str, str]] = {
    "FrozenLakeEnv": (
        _show_lake,
        "left down right up",
        "You are P on a lake. Walk to the goal G. F is frozen; a hole H ends the game, and the ice may be slippery.",
    ),
    "CliffWalkingEnv": (
        _show_cliff,
        "up right down left",
        "You are P. Walk to the goal G. A step costs 1 point; the cliff C costs 100 and puts you back to the start S.",
    ),
    "TaxiEnv": (
        _show_taxi,
        "south north east west pickup dropoff",
        "You are the taxi P between walls |. Pick the passenger up and drop them off where they want to go.",
    ),
    "BlackjackEnv": (
        _show_cards,
        "stick hit",
        "Get closer to 21 than the dealer, but not above it. Hit takes another card, stick ends your turn.",
    ),
}
"""Of a game's class: what shows an observation, the words for its actions, and its rules."""


@register_environment(config_type=GymnasiumConfig)
async def gymnasium(config: GymnasiumConfig, builder: Any) -> AsyncIterator[EnvironmentSource]:
    given = {key: spec for key in ("observe", "act") if (spec := getattr(config, key)) is not None}
    yield Gymnasium(config, **{key: import_object(spec, builder.project_root, path=key) for key, spec in given.items()})


class Gymnasium(EnvironmentSource):
    def __init__(self, config: GymnasiumConfig, observe: Any = None, act: Any = None):
        self.config = config
        game = self.make()
        show_state, words, rules = TEXTS.get(type(game.unwrapped).__name__, (None, "", ""))
        game.close()
        if show_state is None and (observe is None or act is None):
            message = f"{config.name} has no text here, so it needs functions of yours: observe and act"
            raise ConfigError(Problem("name", message, "set both to module:function"))
        self.words = words.split()
        self.rules = f"{rules} Reply with one word: {', '.join(self.words)}.\n\n" if act is None else ""
        self.observe: Any = show_state if observe is None else lambda _, observation: observe(observation)
        self.act: Any = self._read_word if act is None else act

    def make(self) -> Any:
        module = _import_gymnasium()
        try:
            return module.make(self.config.name, **self.config.arguments)
        except Exception as error:  # noqa: BLE001  its name, its package, its version or its arguments
            message = f"gymnasium cannot make it: {show(error)}{did_you_mean(self.config.name, module.registry)}"
            raise ConfigError(Problem("name", message, "`reinforge environments list gymnasium`")) from None

    def _read_word(self, text: str) -> int:
        """Returns the action whose word comes last in a reply."""
        text = re.sub(r"\b(pick|drop)[ -](up|off)\b", r"\1\2", text.lower())
        if not (words := [word for word in re.findall(r"[a-z]+", text) if word in self.words]):
            raise ValueError(f"the reply names none of {', '.join(self.words)}")
        return self.words.index(words[-1])

    def load(self) -> list[EvalInputItem]:
        return list_games(self.config)

    def create(self) -> GymnasiumGame:
        return GymnasiumGame(self)


class GymnasiumGame(Environment):
    def __init__(self, source: Gymnasium):
        self.source, self.game = source, source.make()

    async def reset(self, item: EvalInputItem, seed: int) -> Observation:
        observation, _ = self.game.reset(seed=item.full_dataset_entry["seed"])
        return self._show(observation, self.source.rules)

    async def step(self, reply: Reply) -> StepResult:
        try:
            action = self.source.act(reply.text)
        except ValueError as error:
            raise PolicyFailure(str(error), output=reply.text) from None
        if not self.game.action_space.contains(action):
            raise PolicyFailure(f"{action!r} is not an action of {self.source.config.name}", output=reply.text)
        observation, reward, is_terminated, is_truncated, info = self.game.step(action)
        known = {name: float(value) for name, value in info.items() if isinstance(value, Real)}
        return StepResult(self._show(observation), float(reward), bool(is_terminated or is_truncated), known)

    def _show(self, observation: Any, rules: str = "") -> Observation:
        text = self.source.observe(self.game.unwrapped, observation)
        return Observation([{"role": "user", "content": f"{rules}{text}"}])

    async def close(self) -> None:
        self.game.close()


def _import_gymnasium() -> Any:
    GymnasiumConfig.find_package("gymnasium")
    return importlib.import_module("gymnasium")
