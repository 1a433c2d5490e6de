"""PydanticAI."""

import openai
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.tools import lookup


async def answer(question, connection, *, stream):
    client = openai.AsyncOpenAI(**connection.async_openai)
    agent = Agent(OpenAIChatModel("agent", provider=OpenAIProvider(openai_client=client)), tools=[lookup])
    if not stream:
        return (await agent.run(question)).output
    async with agent.run_stream(question) as result:
        return await result.get_output()
