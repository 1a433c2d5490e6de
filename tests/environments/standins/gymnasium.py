"""Stands in for gymnasium where it is not installed: two of its environments."""

import random
from types import SimpleNamespace

import numpy as np

MAP = ["SFFF", "FHFH", "FFFH", "HFFG"]
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
TWO = SimpleNamespace(contains=lambda action: action in (0, 1))


class FrozenLakeEnv:
    action_space = SimpleNamespace(contains=lambda action: action in range(4))
    ncol, desc = 4, np.asarray(MAP, dtype="c")
    unwrapped = property(lambda self: self)

    def __init__(self, is_slippery=True):
        self.is_slippery = is_slippery

    def reset(self, seed):
        self.random, self.place = random.Random(seed), (0, 0)
        return 0, {}

    def step(self, action):
        turn = self.random.choice((-1, 0, 1)) if self.is_slippery else 0
        self.place = tuple(
            min(3, max(0, old + new)) for old, new in zip(self.place, MOVES[(action + turn) % 4], strict=True)
        )
        field = MAP[self.place[0]][self.place[1]]
        return self.place[0] * 4 + self.place[1], float(field == "G"), field in "HG", False, {"prob": 1.0}

    def close(self):
        pass


class CartPoleEnv(FrozenLakeEnv):
    action_space = TWO

    def reset(self, seed):
        self.steps = 0
        return np.zeros(4), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(4), 1.0, self.steps == 9, False, {}


registry = {"FrozenLake-v1": FrozenLakeEnv, "CartPole-v1": CartPoleEnv}


def make(name, **arguments):
    if name not in registry:
        raise ValueError(f"Environment `{name}` doesn't exist")
    return registry[name](**arguments)
