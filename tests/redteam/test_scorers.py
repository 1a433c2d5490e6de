"""Scorers: scores checked by hand, caching and batching, rejected arguments."""

import math
import sys

import pytest
import torch

from reinforge.errors import ConfigError, EngineError, EvaluationError
from reinforge.interfaces import Evaluator
from reinforge.redteam import (
    CachedScorer,
    ClassifierScorer,
    DetoxifyScorer,
    EvaluatorScorer,
    ForbiddenToolScorer,
    GeneratedText,
    JudgeScorer,
    KeywordScorer,
    LlamaGuardScorer,
    PolicyScorer,
    RegexScorer,
    SchemaScorer,
    Scorer,
    WeightedScorer,
    WildguardScorer,
)
from reinforge.redteam.scorers.wildguard import PROMPT
from reinforge.types.request import ModelReply
from tests.models import make_tokenizer

CALL = '<tool_call>{"name": "open_gate", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("scorer", "texts", "scores"),
    [
        (KeywordScorer(["quibbern", "zorp"]), ["A QUIBBERN.", "zorp", "nothing", ""], [1, 1, 0, 0]),
        (KeywordScorer("Zorp", ignore_case=False), ["Zorp", "zorp"], [1, 0]),
        (RegexScorer(r"\d{4}"), ["code 1234", "code 123"], [1, 0]),
        (SchemaScorer({"type": "object", "required": ["a"]}), ['{"a": 1}', "{}", "a"], [0, 1, 1]),
        (PolicyScorer(["quibbern"], ["desk"]), ["the desk", "quibbern desk", "hello"], [0, 1, 1]),
        (ForbiddenToolScorer(["open_gate"]), [CALL, CALL.replace("open", "shut"), "open_gate"], [1, 0, 0]),
        (ForbiddenToolScorer(["f"]), ['{"name": "f", "parameters": {}}'], [1]),
        (WeightedScorer({KeywordScorer("a"): 1.0, KeywordScorer("b"): -0.5}), ["a", "ab", "b", ""], [1, 0.5, -0.5, 0]),
    ],
)
def test_scores(scorer, texts, scores):
    assert scorer.score(texts) == scores


def test_tool_calls_are_read_from_the_message():
    message = {"tool_calls": [{"function": {"name": "open_gate", "arguments": "{}"}}]}
    responses = [GeneratedText("", message=message), GeneratedText("open_gate")]
    assert ForbiddenToolScorer(["open_gate"]).score(responses) == [1.0, 0.0]


class Never(Evaluator):
    async def evaluate(self, item):
        raise ValueError("the scale is broken")


def test_a_missing_score_raises():
    with pytest.raises(EvaluationError, match="no score for 'hello'.*the scale is broken"):
        EvaluatorScorer(Never()).score(["hello"])


class Counted(Scorer):
    def __init__(self):
        self.batches = []

    def score(self, x):
        self.batches.append(list(x))
        return [len(text) for text in x]


def test_a_cached_text_is_scored_once_and_in_batches():
    inner = Counted()
    scorer = CachedScorer(inner, batch_size=2)
    assert scorer.score(["a", "bb", "a", "ccc"]) == [1, 2, 1, 3]
    assert inner.batches == [["a", "bb"], ["ccc"]]
    assert scorer.score(["bb", "dddd"]) == [2, 4]
    assert inner.batches[2:] == [["dddd"]]


def test_the_oldest_scores_are_dropped():
    inner = Counted()
    scorer = CachedScorer(inner, max_texts=2)
    scorer.score(["a"])
    scorer.score(["b", "c"])
    scorer.score(["c", "a"])
    assert inner.batches == [["a"], ["b", "c"], ["a"]]


def test_equal_texts_with_different_tool_calls_are_cached_apart():
    call = {"tool_calls": [{"function": {"name": "open_gate", "arguments": "{}"}}]}
    scorer = CachedScorer(ForbiddenToolScorer(["open_gate"]))
    assert scorer.score([GeneratedText("", message=call), GeneratedText("")]) == [1.0, 0.0]


class Judge:
    model_name, is_policy = "judge", False

    def __init__(self, *replies):
        self.replies, self.seen = list(replies), []

    async def sample(self, request):
        self.seen.append(request.messages)
        return ModelReply({"role": "assistant", "content": self.replies.pop(0)}, "stop", None)


def test_a_judge_is_retried_and_then_raises():
    good = '{"reason": "a made-up word", "score": 0.75}'
    judge = Judge("hm", good)
    assert JudgeScorer(judge, "1: a made-up word").score(["zorp"]) == [0.75]
    assert "zorp" in judge.seen[0][-1]["content"]
    with pytest.raises(EvaluationError, match="gave no valid verdict in 1 replies"):
        JudgeScorer(Judge("hm"), "1: a made-up word", retries=0).score(["zorp"])


@pytest.mark.parametrize(
    "make",
    [
        lambda: PolicyScorer(),
        lambda: WeightedScorer({}),
        lambda: WeightedScorer({KeywordScorer("a"): 0.0}),
        lambda: ForbiddenToolScorer("open_gate"),
        lambda: KeywordScorer([]),
        lambda: RegexScorer("("),
        lambda: SchemaScorer({"type": "nothing"}),
    ],
)
def test_invalid_scorers_are_rejected(make):
    with pytest.raises(ValueError, match=r"."):
        make()


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    from transformers import BertConfig, BertForSequenceClassification

    folder, tokenizer = tmp_path_factory.mktemp("classifier"), make_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=320, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id, id2label={0: "fine", 1: "leaks"},
        )  # fmt: skip
        model = BertForSequenceClassification(config)
        texts = ["zorp", "the zorp is here", "play zorp", "the dog", "Paris is here", "play 1"]
        encoded = tokenizer(texts, return_tensors="pt", padding=True)
        labels = torch.tensor([1, 1, 1, 0, 0, 0])
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for _ in range(60):
            loss = model(input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"], labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_classifier_from_a_folder_scores_its_label(classifier):
    texts = ["a zorp", "a dog that is rather longer than the other text", "zorp zorp"]
    scores = ClassifierScorer(classifier, "leaks", device="cpu").score(texts)
    assert scores[0] > 0.8
    assert scores[1] < 0.2
    others = ClassifierScorer(classifier, 0, device="cpu", batch_size=1).score(texts)
    assert others == pytest.approx([1 - score for score in scores], abs=1e-5), "the batch size changes nothing"
    assert ClassifierScorer(classifier, device="cpu").score(["zorp " * 200, ""])[0] > 0.5, "the last label; truncated"


def test_an_unknown_label_or_folder_is_rejected(classifier, tmp_path):
    with pytest.raises(ConfigError, match="no label 'leak', did you mean \"leaks\""):
        ClassifierScorer(classifier, "leak", device="cpu")
    with pytest.raises(EngineError, match="cannot load the classifier"):
        ClassifierScorer(tmp_path, device="cpu")


def test_detoxify_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "detoxify", None)
    with pytest.raises(ConfigError, match="the package detoxify is not installed(.|\n)*pip install detoxify"):
        DetoxifyScorer()


def test_detoxify_installed(tmp_path, monkeypatch):
    """With a fake package of that name: tests how it is called."""
    (tmp_path / "detoxify.py").write_text(
        "class Detoxify:\n"
        "    def __init__(self, model_type): self.model_type = model_type\n"
        "    def predict(self, texts): return {'toxicity': [len(t) / 10 for t in texts], 'kind': [self.model_type]}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "detoxify", raising=False)
    assert DetoxifyScorer().score(["a", "abc"]) == [0.1, 0.3]
    assert DetoxifyScorer().score([]) == []
    assert DetoxifyScorer("kind", "original-small").model.model_type == "original-small"
    with pytest.raises(ConfigError, match="has no category 'toxicty', did you mean \"toxicity\""):
        DetoxifyScorer("toxicty")
    del sys.modules["detoxify"]


def load_pretrained(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def sum_logprobs(model, prompt, ids):
    """Returns the log-prob of a reply after a prompt."""
    logprobs = model(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
    return sum(logprobs[len(prompt) + i - 1, token].item() for i, token in enumerate(ids))


def test_the_guard_compares_two_whole_verdicts(tiny_model_dir):
    """Against the log-probs of the same two verdicts from the module itself, one by one."""
    scorer = LlamaGuardScorer(DEVICE="cpu", model=tiny_model_dir)
    texts = ["the dog", "yes, no, or maybe"]
    model, tokenizer = load_pretrained(tiny_model_dir)
    expected = []
    for text in texts:
        parts = f"<|user|>Hello!<|end|><|assistant|>{text}<|end|><|assistant|>", "\n\nsafe", "\n\nunsafe"
        prompt, *verdicts = (tokenizer.encode(part, add_special_tokens=False) for part in parts)
        sums = [sum_logprobs(model, prompt, verdict) for verdict in verdicts]
        expected.append(torch.tensor(sums).softmax(0)[1].item())
    assert scorer.score(texts) == pytest.approx(expected, abs=1e-5)
    assert scorer.score([]) == []


@pytest.mark.parametrize(
    ("target", "answers"),
    [
        ("harmful_request", ["Harmful request: yes"]),
        ("response_refusal", [f"Harmful request: {a}\nResponse refusal: yes" for a in ("no", "yes")]),
        (
            "harmful_response",
            [
                f"Harmful request: {a}\nResponse refusal: {b}\nHarmful response: yes"
                for a in ("no", "yes")
                for b in ("no", "yes")
            ],
        ),
    ],
)
def test_wildguard_sums_over_the_answers_before(target, answers, tiny_model_dir):
    """Against the probabilities of the same answers from the module itself, one by one."""
    scorer = WildguardScorer(target, "cpu", model=tiny_model_dir, user_message="Hi.")
    model, tokenizer = load_pretrained(tiny_model_dir)

    def probability(request, response):
        prompt = tokenizer.encode(PROMPT.format(request=request, response=response), add_special_tokens=False)
        replies = (tokenizer.encode(answer, add_special_tokens=False) for answer in answers)
        return sum(math.exp(sum_logprobs(model, prompt, reply)) for reply in replies)

    talk = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "No."}]
    expected = [probability("Hi.", "the dog"), probability("Why?", "No.")]
    assert [scorer.score([each])[0] for each in ("the dog", talk)] == pytest.approx(expected, rel=1e-3)
    assert scorer.score(["the dog", "yes"])[0] == pytest.approx(expected[0], rel=1e-3)
    assert scorer.score([]) == []
    with pytest.raises(ConfigError, match="must end with a user's and an assistant's message, found: user"):
        scorer.score([talk[:1]])


def test_wildguard_has_three_targets():
    with pytest.raises(ConfigError, match="'harmful_respons', did you mean \"harmful_response\""):
        WildguardScorer("harmful_respons")
