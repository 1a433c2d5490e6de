"""LangGraph's agent over `langchain-openai`."""

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

from tests.clients.tools import lookup


async def answer(question, connection, *, stream):
    model = ChatOpenAI(
        model="agent",
        streaming=stream,
        base_url=connection.base_url,
        api_key=connection.api_key,
        http_client=connection.http_client,
        http_async_client=connection.async_http_client,
    )
    graph, question = create_agent(model, [lookup]), {"messages": [("user", question)]}
    if not stream:
        return (await graph.ainvoke(question))["messages"][-1].content
    async for state in graph.astream(question, stream_mode="values"):
        text = state["messages"][-1].content
    return text
