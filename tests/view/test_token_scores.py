"""Tokens colored by what the models from before and after training say of them."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from reinforge.runs.journal.journal import RunJournal
from reinforge.types.episode import EpisodeKey, EpisodeRecord, ModelCall
from reinforge.types.request import ModelReply, ModelRequest, TokenLogprobs
from tests.doubles import examples
from tests.models import make_tiny_model
from tests.view.view_browser import Browser

PROMPT, REPLY = (5, 6, 7), (8, 9)
PAGE = "/runs/r/episode?key=collect/0/0/a/0"


@pytest.fixture
def folder(tmp_path):
    """A run of one episode, with the weights from before and after its training."""
    journal = RunJournal(tmp_path / "r")
    make_tiny_model(tmp_path / "r" / "checkpoints" / "step-000000", seed=1)
    make_tiny_model(tmp_path / "r" / "model", seed=2)
    answer = ModelReply({"role": "assistant", "content": "x"}, "stop", TokenLogprobs(PROMPT, REPLY, (-1.0, -2.0)), 3, 2)
    asked = ModelRequest([{"role": "user", "content": "?"}])
    made = ModelCall("c", "policy", "m", asked, answer, (), 0.0, 1.0)
    journal.record_episode(EpisodeRecord(EpisodeKey("collect", 0, "a", 0), examples(1)[0], calls=[made], reward=0.5))
    journal.close()
    return tmp_path


def read_distributions(path):
    """Returns log p at the places of the reply's tokens, `[T, V]`, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([[*PROMPT, *REPLY]])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)


async def test_entropies_and_changes_are_those_of_the_two_models(folder):
    before, after = (read_distributions(folder / "r" / name) for name in ("checkpoints/step-000000", "model"))
    async with Browser(folder) as browser:
        page = await browser.ask(PAGE)
        assert "by-entropy" not in page
        assert "key=collect%2F0%2F0%2Fa%2F0&amp;models=1" in page
        page = await browser.ask(f"{PAGE}&models=1")
    assert "Entropy of the promoted model; change of log-prob from checkpoints/step-000000 to it." in page
    assert {"by-entropy", "by-change"} <= set(re.findall('id="([^"]+)"', page))
    found = [(float(e), float(c)) for e, c in re.findall(r"entropy ([\d.]+), change ([-+][\d.]+)", page)]
    assert [entropy for entropy, _ in found] == pytest.approx((-after.exp() * after).sum(-1).tolist(), abs=1e-3)
    change = (after - before)[range(len(REPLY)), REPLY].tolist()
    assert [value for _, value in found] == pytest.approx(change, abs=1e-3)


async def test_without_the_first_weights_nothing_is_offered_and_asking_says_why(folder):
    (folder / "r" / "checkpoints" / "step-000000").rename(folder / "elsewhere")
    async with Browser(folder) as browser:
        assert "models=1" not in await browser.ask(PAGE)
        assert "has not saved one model" in await browser.ask(f"{PAGE}&models=1", 404)
