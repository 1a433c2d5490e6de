"""The clerk as a LangGraph agent: `ChatOpenAI` gets the episode's HTTP clients, and nothing else changes."""

from agent import SYSTEM, calculate, lookup
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


async def agent(item, llm, context):
    """Runs one episode."""
    model = ChatOpenAI(
        model="clerk",
        api_key="unused",
        max_tokens=40,
        http_client=context.http_client(),
        http_async_client=context.async_http_client(),
    )
    clerk = create_agent(model, [lookup, calculate], system_prompt=SYSTEM)
    state = await clerk.ainvoke({"messages": [("user", item.input_obj)]}, {"recursion_limit": 10})
    return state["messages"][-1].content
