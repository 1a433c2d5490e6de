"""Agno's Agent, as a program."""

import os
import sys

from agno.agent import Agent
from agno.models.openai import OpenAIChat

from tests.clients.tools import lookup


def main(question, *, stream):
    clerk = Agent(model=OpenAIChat(id="agent"), tools=[lookup])
    if stream:
        answer = "".join(event.content or "" for event in clerk.run(question, stream=True))
    else:
        answer = clerk.run(question).content
    print(answer)  # noqa: T201


if __name__ == "__main__":
    main(sys.stdin.read(), stream=os.environ["REINFORGE_EXAMPLE_ID"].endswith("streamed"))
