"""CrewAI. Its public way is a base URL; in this process the test replaces the two clients that it makes."""

import openai
from crewai import LLM, Agent
from crewai.tools import tool

from tests.clients import tools


@tool("lookup")
def lookup(item: str) -> str:
    """Returns the price of an article."""
    return tools.lookup(item)


def answer(question, connection, *, stream):
    llm = LLM(model="openai/agent", base_url=connection.base_url, api_key=connection.api_key, stream=stream)
    if connection.http_client is not None:
        llm._client = openai.OpenAI(**connection.openai)
        llm._async_client = openai.AsyncOpenAI(**connection.async_openai)
    clerk = Agent(role="clerk", goal="Answer.", backstory="You sell.", tools=[lookup], llm=llm, max_iter=3)
    return clerk.kickoff(question).raw
