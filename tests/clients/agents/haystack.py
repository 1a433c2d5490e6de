"""Haystack's Agent, as a program."""

import os
import sys

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.components.generators.utils import print_streaming_chunk
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function

from tests.clients.tools import lookup


def main(question, *, stream):
    shown = print_streaming_chunk if stream else None
    clerk = Agent(
        chat_generator=OpenAIChatGenerator(model="agent"),
        tools=[create_tool_from_function(lookup)],
        streaming_callback=shown,
    )
    print(clerk.run(messages=[ChatMessage.from_user(question)])["last_message"].text)  # noqa: T201


if __name__ == "__main__":
    main(sys.stdin.read(), stream=os.environ["REINFORGE_EXAMPLE_ID"].endswith("streamed"))
