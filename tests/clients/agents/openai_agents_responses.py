"""The OpenAI Agents SDK over the Responses API."""

from agents import OpenAIResponsesModel

from tests.clients.agents import openai_agents


async def answer(question, connection, *, stream):
    return await openai_agents.answer(question, connection, stream=stream, model=OpenAIResponsesModel)
