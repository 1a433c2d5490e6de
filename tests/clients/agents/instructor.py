"""Instructor: each reply is a model of pydantic, so a call of the tool that the request names."""

import os
import sys
from typing import Literal

import instructor
from pydantic import BaseModel


class Lookup(BaseModel):
    """Returns the price of an article."""

    item: Literal["lamp", "chair", "table"]


class Answer(BaseModel):
    """The answer to the question."""

    answer: Literal["yes", "no", "maybe"]


client = instructor.from_provider("openai/gpt-4o")
messages = [{"role": "user", "content": sys.stdin.read()}]
if os.environ["REINFORGE_EXAMPLE_ID"].endswith("streamed"):
    *_, call = client.create_partial(response_model=Lookup, messages=messages)
else:
    call = client.create(response_model=Lookup, messages=messages)
messages += [
    {"role": "assistant", "content": f"lookup: {call.item}"},
    {"role": "user", "content": f"The {call.item} costs 24 coins."},
]
sys.stdout.write(client.create(response_model=Answer, messages=messages).answer)
