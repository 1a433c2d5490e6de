"""Stands in for textarena where it is not installed: three of its games, with its rules for illegal moves."""

import random
import re

import nltk

from textarena import envs

GAME_ID = -1


def make(env_id):
    return {"Nim": Nim, "GuessTheNumber": GuessTheNumber, "Wordle": Wordle}[envs.ENV_REGISTRY[env_id]]()


class State:
    def __init__(self, num_players, seed):
        random.seed(seed)
        self.num_players, self.current_player_id, self.error_count = num_players, 0, 0
        self.done, self.rewards, self.was_legal = False, None, True
        self.role_mapping = {player: f"Player {player}" for player in range(num_players)}
        self.game_info = {player: {"invalid_move": False} for player in range(num_players)}
        self.said = {player: [] for player in range(num_players)}

    def say(self, text, sender=GAME_ID):
        for said in self.said.values():
            said.append((sender, text, "GAME"))

    def get_current_player_observation(self):
        said, self.said[self.current_player_id] = self.said[self.current_player_id], []
        return said

    def end(self, winner):
        self.rewards = {player: 1 if player == winner else -1 for player in range(self.num_players)}
        self.done = True

    def refuse(self):
        self.was_legal, self.error_count = False, self.error_count + 1
        if self.error_count > 1:
            self.game_info[self.current_player_id]["invalid_move"] = True
            self.end(1 - self.current_player_id)

    def next(self):
        if self.was_legal:
            self.error_count, self.current_player_id = 0, (self.current_player_id + 1) % self.num_players
        self.was_legal = True


class Nim:
    def reset(self, num_players, seed):
        assert num_players == 2
        self.state, self.piles = State(2, seed), [3, 4, 5]
        self.state.say("Remove objects with the format '[pile quantity]', e.g. '[0 3]'.")
        self.show()

    def show(self):
        self.state.say("\n".join(f"  pile {number}: {size}" for number, size in enumerate(self.piles)))

    def step(self, action):
        self.state.say(action, self.state.current_player_id)
        pile, count = map(int, move.groups()) if (move := re.search(r"\[(\d+) (\d+)\]", action)) else (0, 0)
        if pile < 3 and 0 < count <= self.piles[pile]:
            self.piles[pile] -= count
        else:
            self.state.refuse()
        self.show()
        if not any(self.piles):
            self.state.end(self.state.current_player_id)
        self.state.next()


class GuessTheNumber:
    def reset(self, num_players, seed):
        assert num_players == 1
        self.state, self.turns = State(1, seed), 0
        self.number = random.randint(1, 20)
        self.state.say("Guess the number, e.g. '[5]'.")

    def step(self, action):
        self.turns += 1
        guess = int(re.search(r"\d+", action)[0])
        self.state.say(f"The number is {'higher' if self.number > guess else 'lower'}")
        if guess == self.number or self.turns == 10:
            self.state.end(0 if guess == self.number else None)


class Wordle:
    def __init__(self):
        nltk.download("words")
