"""AutoGen: a team of two agents that take turns, as a program."""

import asyncio
import os
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient

from tests.clients.agents.autogen import INFO
from tests.clients.tools import lookup


async def main(question, *, stream):
    client = OpenAIChatCompletionClient(model="agent", model_info=INFO)
    options = {"model_client": client, "max_tool_iterations": 3, "model_client_stream": stream}
    clerk = AssistantAgent("clerk", tools=[lookup], system_message="You sell.", **options)
    critic = AssistantAgent("critic", system_message="You judge.", **options)
    team = RoundRobinGroupChat([clerk, critic], termination_condition=MaxMessageTermination(6))
    result = await team.run(task=question)
    print(result.messages[-1].content)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main(sys.stdin.read(), stream=os.environ["REINFORGE_EXAMPLE_ID"].endswith("streamed")))
