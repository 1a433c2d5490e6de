"""Microsoft's Agent Framework over the Responses API, whose calls name the response that they continue."""

import asyncio
import os
import sys
from typing import Annotated

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient


def lookup(item: Annotated[str, "Name of the article."]) -> str:
    """Returns the price of an article."""
    return f"The {item} costs 24 coins."


async def main():
    agent = Agent(client=OpenAIChatClient(model="gpt-4o"), instructions="You are a clerk.", tools=[lookup])
    question = sys.stdin.read()
    if os.environ["REINFORGE_EXAMPLE_ID"].endswith("streamed"):
        async for update in agent.run(question, stream=True):
            sys.stdout.write(update.text)
    else:
        sys.stdout.write((await agent.run(question)).text)


asyncio.run(main())
