"""The games of TextArena: `environment: textarena:TicTacToe-v0`.

A player sees its own conversation: what the game and the other players have said since its last move. The seats that
the policy does not have are played at random, or by an entry of `llms`, which the run asks.
"""

from __future__ import annotations

import copy
import importlib
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from reinforge.environments.games import GamesConfig, list_games
from reinforge.errors import ConfigError, Problem, did_you_mean, show
from reinforge.interfaces import Environment, EnvironmentSource
from reinforge.registry import register_environment
from reinforge.types.environment import RANDOM, Observation, Reply, StepResult
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.seeding import stable_random

PACKAGE = "textarena"
MAX_PLAYERS = 15
MAX_TRIES = 200  # moves that the random player tries on a copy of the game before it makes an illegal one
NAME = re.compile(r'^register\w*\(id="([^"]+)"', re.MULTILINE)
MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")
NUMBER = re.compile(r"\d+")
LETTER = re.compile(r"(?<![A-Za-z'])[A-Za-z](?![A-Za-z'])")


class TextArenaConfig(GamesConfig, name="textarena"):
    """Text games for one player or several; needs the package textarena."""

    install: ClassVar[str] = "pip install textarena"
    license: ClassVar[str] = "MIT"
    metrics: ClassVar[tuple[str, ...]] = ("solved",)
    penalties: ClassVar[dict[str, float]] = {"": -1.0}

    @classmethod
    def list_names(cls) -> list[str]:
        names: list[str] = NAME.findall(
            (cls.find_package(PACKAGE) / "envs" / "__init__.py").read_text(encoding="utf-8")
        )
        return sorted(names)

    opponent: str = Field(
        default=RANDOM,
        description="Who plays the other seats: `random` (legal moves where the game shows their form), `self` (the "
        "policy, whose moves there are not trained), or an entry of llms.",
    )
    num_players: int | None = Field(
        default=None, ge=1, le=MAX_PLAYERS, description="Number of players; null: the fewest that the game allows."
    )


@register_environment(config_type=TextArenaConfig)
class TextArena(EnvironmentSource):
    def __init__(self, config: TextArenaConfig):
        self.config = config
        config.find_package(PACKAGE)
        _refuse_downloads()
        textarena: Any = importlib.import_module(PACKAGE)
        known = textarena.envs.registration.ENV_REGISTRY
        if config.name not in known:
            message = f'textarena has no game "{config.name}"{did_you_mean(config.name, known)}'
            raise ConfigError(Problem("name", message, "`reinforge environments list textarena` has them"))
        self._make = textarena.make
        self.game_id = textarena.GAME_ID
        self.num_players = self._count_players()

    def _count_players(self) -> int:
        given = self.config.num_players
        for count in range(1, MAX_PLAYERS + 1) if given is None else [given]:
            try:
                return int(self.start(count, 0).state.num_players)
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001  it may allow another number, or be broken
                problem = error
        message = f"the game {self.config.name} cannot start: {show(problem)}"
        raise ConfigError(Problem("name", message, "choose another one, or set num_players")) from None

    def start(self, num_players: int, seed: int) -> Any:
        game = self._make(self.config.name, **self.config.arguments)
        game.reset(num_players=num_players, seed=seed)
        return game

    def load(self) -> list[EvalInputItem]:
        return list_games(self.config, self.num_players)

    def create(self) -> TextArenaGame:
        return TextArenaGame(self)


class TextArenaGame(Environment):
    """One game; the reward is what the game gives the policy's seat at the end, such as 1, 0 or -1."""

    def __init__(self, source: TextArena):
        self.source = source

    async def reset(self, item: EvalInputItem, seed: int) -> Observation:
        self.seat = item.full_dataset_entry["seat"]
        self.random = stable_random(seed, "opponent")
        self.game = self.source.start(self.source.num_players, item.full_dataset_entry["seed"])
        self.conversations: list[list[dict[str, Any]]] = [[] for _ in range(self.source.num_players)]
        return self._play_to_a_call().observation

    async def step(self, reply: Reply) -> StepResult:
        self._move(self.game.state.current_player_id, reply.text)
        return self._play_to_a_call()

    def _move(self, player: int, text: str) -> None:
        self.conversations[player].append({"role": "assistant", "content": text})
        self.game.step(action=text)

    def _hear(self, player: int) -> None:
        """Adds to a player's conversation what is new for it, without its own moves, which are there already."""
        state, lines = self.game.state, []
        for sender, text, _ in state.get_current_player_observation():
            if sender != player:
                name = state.role_mapping.get(sender, f"Player {sender}")
                lines.append(text if sender == self.source.game_id else f"[{name}] {text}")
        text = "\n".join(lines).strip() or "It is your turn again."
        self.conversations[player].append({"role": "user", "content": text})

    def _play_to_a_call(self) -> StepResult:
        """Plays on until a model has to reply or the game is over."""
        state = self.game.state
        while not state.done:
            self._hear(player := state.current_player_id)
            if player == self.seat:
                return StepResult(Observation(self.conversations[player][-1:]))
            if self.source.config.opponent != RANDOM:
                return StepResult(Observation(list(self.conversations[player]), player=self.source.config.opponent))
            self._move(player, self._choose_move(player))
        is_invalid = bool(state.game_info[self.seat].get("invalid_move"))
        given = None if state.rewards is None else state.rewards[self.seat]
        if is_invalid and isinstance(given, str):
            given = -1.0  # Countdown, Cryptarithm and Slitherlink pass the reason in place of the reward
        reward = None if given is None else float(given)
        info = {"solved": reward is not None and reward >= 1.0, "invalid_move": is_invalid}
        return StepResult(reward=reward, done=True, info=info)

    def _choose_move(self, player: int) -> str:
        for move in self._propose_moves(player):
            if self._is_legal(player, move):
                return move
        raise RuntimeError(f"the random player finds no legal move of {self.source.config.name}; set another opponent")

    def _propose_moves(self, player: int) -> Iterator[str]:
        """Yields moves in the form that the game shows: those of its last message, then others like them.

        Example: the game says "such as '[b4]'" and shows a board from a1 to e5 -> "[b4]", "[e2]", "[a1]", ...
        """
        heard = [message["content"] for message in self.conversations[player] if message["role"] == "user"]
        latest = list(dict.fromkeys(MOVE.findall(heard[-1])))
        self.random.shuffle(latest)
        if len(heard) > 1:  # those of the rules are examples
            yield from latest
        forms = list(dict.fromkeys(MOVE.findall("\n".join(heard))))
        shown = "\n".join([*forms, heard[-1]])
        numbers, letters = sorted(set(NUMBER.findall(shown))), sorted(set(LETTER.findall(shown)))

        def draw(letter: re.Match[str]) -> str:  # a number, too, since it may stand for one
            alike = [each for each in letters if each.islower() == letter[0].islower()]
            return self.random.choice([*alike, *numbers])

        for _ in range(MAX_TRIES if forms else 0):
            form = NUMBER.sub(lambda _: self.random.choice(numbers), self.random.choice(forms))
            yield LETTER.sub(draw, form)
        yield from latest

    def _is_legal(self, player: int, move: str) -> bool:
        """Returns whether the game accepts a move, tried on a copy of it."""
        outside, tried = random.getstate(), copy.deepcopy(self.game)
        try:
            tried.step(action=move)
        except Exception:  # noqa: BLE001  a move that breaks the game
            return False
        finally:
            random.setstate(outside)
        state = tried.state
        return not getattr(state, "error_count", 0) and not state.game_info[player].get("invalid_move")


def _refuse_downloads() -> None:
    """Replaces nltk's download in this process, which games call when they are imported."""
    nltk: Any = importlib.import_module("nltk")

    def require(names: str | Sequence[str], *_: object, **__: object) -> bool:
        wanted = [names] if isinstance(names, str) else list(names)
        folders = [Path(folder) for folder in nltk.data.path]
        if missing := [name for name in wanted if not any(any(each.glob(f"*/{name}*")) for each in folders)]:
            message = f"the game needs data of nltk that is not here: {', '.join(missing)}"
            raise ConfigError(Problem("name", message, f"python -m nltk.downloader {' '.join(missing)}"))
        return True

    nltk.download = require
