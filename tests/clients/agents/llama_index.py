"""LlamaIndex's FunctionAgent, as a program."""

import asyncio
import os
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike

from tests.clients.tools import lookup


async def main(question, *, stream):
    model = OpenAILike(model="agent", is_chat_model=True, is_function_calling_model=True)
    clerk = FunctionAgent(name="clerk", tools=[lookup], llm=model, streaming=stream)
    print(await clerk.run(question))  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main(sys.stdin.read(), stream=os.environ["REINFORGE_EXAMPLE_ID"].endswith("streamed")))
