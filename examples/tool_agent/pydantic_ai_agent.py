"""The clerk as a PydanticAI agent: the provider gets the episode's OpenAI client, and nothing else changes."""

from agent import SYSTEM, calculate, lookup
from pydantic_ai import Agent, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


async def agent(item, llm, context):
    """Runs one episode."""
    model = OpenAIChatModel("clerk", provider=OpenAIProvider(openai_client=context.async_openai()))
    clerk = Agent(model, instructions=SYSTEM, tools=[lookup, calculate], model_settings={"max_tokens": 40})
    return (await clerk.run(item.input_obj, usage_limits=UsageLimits(request_limit=4))).output
