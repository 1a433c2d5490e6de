"""The signal that a router decides by, chosen and calibrated on the journal of a run."""

import contextlib
import json

import pytest

from reinforge.routing.router import Router
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.summary import RunSummary
from reinforge.traces.calibration import RouterSignals, write_router
from reinforge.types.episode import EpisodeKey, EpisodeRecord, ModelCall
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem
from reinforge.types.request import ModelReply, ModelRequest, TokenLogprobs

COUNT = 60


def record(phase, epoch, number, text, score):
    """An episode whose reply has the same log-probs as any other."""
    item = EvalInputItem(id=f"e{number}", input_obj="q", expected_output_obj=None, full_dataset_entry={})
    tokens = TokenLogprobs((1,), (2,), (-0.5,), 0)
    reply = ModelReply({"role": "assistant", "content": text}, "stop", tokens)
    call = ModelCall(f"c{number}", "student", "m", ModelRequest([{"role": "user", "content": "q"}]), reply, (), 0, 1)
    scores = {"quality": EvalOutputItem(id=item.id, score=score, reasoning=None)}
    return EpisodeRecord(EpisodeKey(phase, epoch, item.id), item, calls=[call], scores=scores, reward=score)


@pytest.fixture
def summary(tmp_path):
    """A run whose model is right, and says "sure", in two of three examples; its teacher always is right."""
    run = tmp_path / "run"
    with contextlib.closing(RunJournal(run)) as journal:
        for number in range(COUNT):
            said, score = ("sure", 1.0) if number % 3 else ("hm", 0.0)
            for phase in ("validate", "confirm_tuned"):
                journal.record_episode(record(phase, 2, number, said, score))
            journal.record_episode(record("confirm_reference", -1, number, "right", 1.0))
        journal.flush()
    (run / "config.yml").write_text("finetuning: {reward_function: {name: quality}, gate: {margin: 0.1}}")
    rows = [{"id": f"e{number}", "conversation": f"t{number}"} for number in range(COUNT)]
    (tmp_path / "small.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return RunSummary("r", "completed", run, confirm_tuned=object(), best_epoch=2, non_inferiority=object())


def write(tmp_path, summary, further):
    file = tmp_path / "small.router.json"
    return "\n".join(write_router(summary, tmp_path / "small.jsonl", file, further)), Router.load(file)


def test_an_evaluator_that_separates_better_than_log_probs_decides(tmp_path, summary):
    said, router = write(tmp_path, summary, RouterSignals())
    assert (router.signal, router.threshold) == ("mean_logprob", None)
    assert "by mean_logprob (AUROC 0.500; min_logprob 0.500)" in said
    settings = {"_type": "regex", "pattern": "^sure"}
    said, router = write(tmp_path, summary, RouterSignals(evaluator=settings, folder=tmp_path))
    assert (router.signal, router.evaluator, router.kept) == ("evaluator", settings, (1.0,))
    assert (router.share, router.metric, router.num_samples) == (pytest.approx(2 / 3), "quality", 0)
    assert "by the evaluator regex (AUROC 1.000; mean_logprob 0.500; min_logprob 0.500)" in said


def test_samples_that_separate_better_decide(tmp_path, summary):
    class Agreeing(RouterSignals):
        """Knows how samples agree without a model."""

        async def measure(self, split, calls, run):
            said = {id_: call.reply.message["content"] for id_, call in calls.items()}
            return {id_: {"mean_logprob": -0.5, "agreement": 1.0 if said[id_] == "sure" else 0.5} for id_ in calls}

    said, router = write(tmp_path, summary, Agreeing(num_samples=2))
    assert (router.signal, router.num_samples, router.temperature) == ("agreement", 2, 1.0)
    assert "by agreement of 2 further samples at temperature 1 (AUROC 1.000; mean_logprob 0.500)" in said
