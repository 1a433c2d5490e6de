"""Judges that compare answers, at the port of a model: they read the answers out of the prompt."""

import json
import re

from reinforge.types.request import ModelReply

MATERIAL = re.compile(
    r'<material-(?P<key>[0-9a-f]{20}) kind="(?P<kind>[\w-]+)">\n(?P<text>.*?)\n</material-(?P=key)>', re.DOTALL
)


def read_materials(prompt):
    """Returns the quoted texts of a judge's prompt by kind."""
    return {found["kind"]: found["text"] for found in MATERIAL.finditer(prompt)}


def read_answers(prompt):
    return [text for kind, text in read_materials(prompt).items() if kind.startswith("answer-")]


def reply_to(system, prompt, worth, bias=lambda place: 0.0):
    """Returns a verdict on the answers of a prompt.

    Args:
        system: The system message, which asks for scores or for a winner.
        prompt: The message with the answers.
        worth: Worth of an answer between 0 and 1.
        bias: What the judge adds to an answer by its place, from 0.
    """
    felt = [worth(answer) + bias(place) for place, answer in enumerate(read_answers(prompt))]
    if '"winner"' in system:
        first, second = felt
        winner = "tie" if first == second else "1" if first > second else "2"
        return json.dumps({"reason": f"{first:g} against {second:g}", "winner": winner})
    scores = {str(place): round(value, 6) for place, value in enumerate(felt, start=1)}
    return json.dumps({"reason": "by worth", "scores": scores})


class ComparingJudge:
    """Compares answers by their worth; `replies` replaces the reply of a number, or of "all"; exceptions are raised."""

    is_policy, model_name = False, "judge"

    def __init__(self, worth, bias=lambda place: 0.0, replies=None):
        self.worth, self.bias, self.replies, self.requests = worth, bias, replies or {}, []

    async def sample(self, request):
        number = len(self.requests)
        self.requests.append(request)
        system, prompt = (message["content"] for message in request.messages[:2])
        reply = self.replies.get(number, self.replies.get("all"))
        if isinstance(reply, Exception):
            raise reply
        text = reply if reply is not None else reply_to(system, prompt, self.worth, self.bias)
        return ModelReply({"role": "assistant", "content": text}, "stop", None)
