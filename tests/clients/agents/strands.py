"""Strands' Agent, as a program; it always streams."""

import sys

from strands import Agent, tool
from strands.models.openai import OpenAIModel

from tests.clients.tools import lookup


def main(question):
    clerk = Agent(model=OpenAIModel(model_id="agent"), tools=[tool(lookup)], callback_handler=None)
    print(clerk(question))  # noqa: T201


if __name__ == "__main__":
    main(sys.stdin.read())
