"""DSPy's ReAct, which writes its calls in a format of its own; in process through a language model of five lines."""

import dspy
import openai

from tests.clients.tools import RESULT, lookup

WAYS = ("in process", "gateway", "gateway, streamed")
program = dspy.ReAct("question -> answer", tools=[lookup], max_iters=3)


class EpisodeLM(dspy.BaseLM):
    """A model behind a client of the `openai` package."""

    def __init__(self, client):
        super().__init__(model="agent", cache=False)
        self.client = client

    def forward(self, prompt=None, messages=None, **arguments):
        messages = messages or [{"role": "user", "content": prompt}]
        return self.client.chat.completions.create(model="agent", messages=messages)

    def __deepcopy__(self, memo):
        return self


def answer(question, connection, *, stream):
    if connection.http_client is not None:
        model = EpisodeLM(openai.OpenAI(**connection.openai))
    else:
        model = dspy.LM("openai/agent", api_base=connection.base_url, api_key=connection.api_key, cache=False)
    with dspy.context(lm=model):
        if not stream:
            return program(question=question).answer
        *_, last = dspy.streamify(program, async_streaming=False)(question=question)
        return last.answer


def choose(request):
    """Returns what the model writes: a call, the end, or the answer."""
    asked = str(request.messages)
    if RESULT not in asked:
        call = r'\{"item": "(lamp|chair)"\}'
        return fields(next_thought="I (look|search)", next_tool_name="lookup", next_tool_args=call)
    if "next_tool_name" in asked:
        return fields(next_thought="I (know|see)", next_tool_name="finish", next_tool_args=r"\{\}")
    return fields(reasoning="It is (clear|known)", answer="(24|25)")


def fields(**values):
    return r"\n\n".join(rf"\[\[ ## {name} ## \]\]\n{value}" for name, value in {**values, "completed": ""}.items())
