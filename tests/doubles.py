"""Doubles that implement a port: a policy that answers at once, and what a run needs around it."""

import asyncio
from types import SimpleNamespace

import numpy as np

from reinforge.config.schema import TrainerAdapterConfig
from reinforge.interfaces import Evaluator, PolicyServer, TrainerAdapter
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem
from reinforge.types.job import TrainingJobRef, TrainingJobStatus
from reinforge.types.request import ModelReply, TokenLogprobs


class ScriptedPolicy(PolicyServer):
    """Answers with what `script(request)` returns; a text, an exception to raise, or a number of seconds to hang."""

    def __init__(self, script=lambda request: "yes"):
        self.script, self.requests, self._version = script, [], 0

    version = property(lambda self: self._version)
    model_name = "scripted"

    async def sample(self, request):
        self.requests.append(request)
        answer = self.script(request)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, int | float):
            await asyncio.sleep(answer)
            answer = "late"
        prompt = tuple(sum((ids_of(str(message["content"])) for message in request.messages), ()))
        ids = ids_of(answer)
        tokens = TokenLogprobs(prompt, ids, (-0.5,) * len(ids), self._version)
        cut = request.sampling.max_tokens is not None and len(ids) > request.sampling.max_tokens
        reason = "length" if cut else "stop"
        return ModelReply({"role": "assistant", "content": answer}, reason, tokens, len(prompt), len(ids))

    async def score(self, token_ids):
        return [np.full(len(ids), -0.5, dtype=np.float32) for ids in token_ids]

    async def publish(self, version):
        self._version = version

    async def fingerprint(self):
        return f"weights-{self._version}"


def ids_of(text):
    return tuple(text.encode(errors="surrogatepass"))  # a server may return half a character


class PolicyModel:
    """`llms.<name>` over a policy."""

    is_policy = True

    def __init__(self, policy):
        self.policy = policy

    model_name = "scripted"

    async def sample(self, request):
        return await self.policy.sample(request)


class Scored(Evaluator):
    """Scores with a function of the item."""

    def __init__(self, score):
        self.score = score

    async def evaluate(self, item):
        return EvalOutputItem(id=item.id, score=self.score(item), reasoning=None)


def examples(count):
    return [
        EvalInputItem(
            id=str(i), input_obj=f"question {i}", expected_output_obj="yes", full_dataset_entry={"id": str(i)}
        )
        for i in range(count)
    ]


def make_item(output=None, expected=None, asked="2+3?", **fields):
    """An example with an output to score."""
    fields = {"id": "q1", "full_dataset_entry": {}, **fields}
    return EvalInputItem(input_obj=asked, expected_output_obj=expected, output_obj=output, **fields)


class RecordingAdapter(TrainerAdapter):
    """Takes every job and says what it was told to say."""

    def __init__(self, policy, outcome="completed", num_updates=1):
        super().__init__(TrainerAdapterConfig())
        self.server, self.outcome, self.num_updates, self.jobs = policy, outcome, num_updates, []
        self.healthy = True

    async def is_healthy(self):
        return self.healthy

    async def submit(self, trajectories):
        self.jobs.append(trajectories)
        return TrainingJobRef(
            run_id=trajectories.run_id, backend="recording", metadata={"job_key": trajectories.job_key}
        )

    async def status(self, ref):
        metadata = {"num_updates": self.num_updates, "num_tokens": 10}
        return TrainingJobStatus(run_id=ref.run_id, backend=ref.backend, status=self.outcome, metadata=metadata)

    async def wait_until_complete(self, ref, poll_interval=10.0):
        return await self.status(ref)

    def policy(self):
        return self.server


class ScriptedChat:
    """The `llm` of an agent function: gives the answers in turn, or a function's; a dict is a call of a tool."""

    def __init__(self, *answers):
        self.answers, self.requests = list(answers), []
        self.chat = SimpleNamespace(completions=self)

    async def create(self, **request):
        self.requests.append({**request, "messages": [*request["messages"]]})
        first = self.answers[0]
        content, calls = first(self.prompts[-1]) if callable(first) else self.answers.pop(0), []
        if isinstance(content, dict):
            content, calls = None, [SimpleNamespace(id="c1", function=SimpleNamespace(**content))]
        message = SimpleNamespace(role="assistant", content=content, tool_calls=calls)
        return SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason="stop")])

    @property
    def prompts(self):
        """The last message of each request."""
        return [request["messages"][-1]["content"] for request in self.requests]
