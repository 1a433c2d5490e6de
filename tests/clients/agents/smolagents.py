"""smolagents' agent with tools."""

from smolagents import OpenAIModel, ToolCallingAgent, tool

from tests.clients import tools


@tool
def lookup(item: str) -> str:
    """Returns the price of an article.

    Args:
        item: Name of the article.
    """
    return tools.lookup(item)


def answer(question, connection, *, stream):
    own = {} if connection.http_client is None else {"client_kwargs": {"http_client": connection.http_client}}
    model = OpenAIModel("agent", api_base=connection.base_url, api_key=connection.api_key, **own)
    return ToolCallingAgent(tools=[lookup], model=model, max_steps=3, stream_outputs=stream, verbosity_level=-1).run(
        question
    )
