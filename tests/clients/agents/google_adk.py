"""Google's Agent Development Kit over LiteLLM, as a program."""

import asyncio
import os
import sys

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai.types import Content, Part

from tests.clients.tools import lookup


async def main(question, *, stream):
    clerk = LlmAgent(name="clerk", model=LiteLlm(model="openai/agent"), instruction="Answer.", tools=[lookup])
    runner = InMemoryRunner(agent=clerk, app_name="shop")
    session = await runner.session_service.create_session(app_name="shop", user_id="user")
    config = RunConfig(streaming_mode=StreamingMode.SSE if stream else StreamingMode.NONE)
    message = Content(role="user", parts=[Part(text=question)])
    async for event in runner.run_async(user_id="user", session_id=session.id, new_message=message, run_config=config):
        if event.is_final_response():
            print(event.content.parts[0].text)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main(sys.stdin.read(), stream=os.environ["REINFORGE_EXAMPLE_ID"].endswith("streamed")))
