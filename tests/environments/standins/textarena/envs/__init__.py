"""The names of the stand-in's games, written as textarena writes them."""

from types import SimpleNamespace

ENV_REGISTRY = {}
registration = SimpleNamespace(ENV_REGISTRY=ENV_REGISTRY)


def register(id, entry_point):
    ENV_REGISTRY[id] = entry_point


register(id="Nim-v0", entry_point="Nim")
register(id="GuessTheNumber-v0", entry_point="GuessTheNumber")
register(id="Wordle-v0", entry_point="Wordle")
