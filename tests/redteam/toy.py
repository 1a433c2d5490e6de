"""A user's system in plain torch: the tester samples two of three words, the target repeats the last one."""

from __future__ import annotations

import torch

from reinforge.redteam.core import Scorer, ValueFunctionSystem

WORDS = ("red", "green", "blue")


class Likes(Scorer):
    def __init__(self, word="green"):
        self.word = word

    def score(self, x):
        return [float(self.word in text) for text in x]


class ToySystem(ValueFunctionSystem[str, str]):
    """The tester is a row of logits for each of two tokens, the critic one number per position."""

    def __init__(self, word="green"):
        super().__init__(Likes(word))
        self.logits = torch.nn.Parameter(torch.zeros(2, 3))
        self.values = torch.nn.Parameter(torch.zeros(2))
        self.batch_sizes = []

    def get_tester_logprobs(self, context, continuation):
        return self._logprobs(self.logits, continuation)

    def get_baseline_logprobs(self, context, continuation):
        return self._logprobs(torch.zeros(2, 3), continuation)

    get_target_logprobs = get_baseline_logprobs

    def _logprobs(self, logits, continuation):
        logprobs = logits.log_softmax(dim=-1)
        rows = [torch.stack([logprobs[t, WORDS.index(w)] for t, w in enumerate(c.split())]) for c in continuation]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def value(self, context, continuation):
        rows = [self.values[: len(c.split())] for c in continuation]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def rollout_prompt_with_tester(self, x):
        self.batch_sizes.append(len(x))
        sampled = torch.multinomial(self.logits.softmax(dim=-1), len(x), replacement=True).T.tolist()
        return [" ".join(WORDS[i] for i in row) for row in sampled]

    def rollout_prompt_with_target(self, x):
        return ["." + text.split()[-1] for text in x]

    def advance(self, context, probe, response):
        return context + " " + probe + response

    def parameters(self):
        yield self.logits
        yield self.values

    def reward(self, context, probe, response):
        return self.scorer.score(probe)
