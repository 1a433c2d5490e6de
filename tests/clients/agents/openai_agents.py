"""The OpenAI Agents SDK over chat completions."""

import openai
from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool

from tests.clients.tools import lookup

MODEL = OpenAIChatCompletionsModel


async def answer(question, connection, *, stream, model=MODEL):
    client = openai.AsyncOpenAI(**connection.async_openai)
    agent = Agent(name="clerk", model=model(model="agent", openai_client=client), tools=[function_tool(lookup)])
    config = RunConfig(tracing_disabled=True)
    if not stream:
        return (await Runner.run(agent, question, run_config=config)).final_output
    result = Runner.run_streamed(agent, question, run_config=config)
    async for _ in result.stream_events():
        pass
    return result.final_output
