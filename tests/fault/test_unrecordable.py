"""Text and values that cannot be written as JSON cost their episode or their score, never the run or its siblings."""

import asyncio
import json
import signal
import threading
import time
from collections import defaultdict
from types import SimpleNamespace

import pytest
import zstandard

from reinforge import files
from reinforge.errors import RecordError, StorageError
from reinforge.evaluation.evaluators.base import score_item
from reinforge.rollout import runner as runner_module
from reinforge.rollout.ending import drop_unrecordable
from reinforge.rollout.workflow import PolicyFailure, bind_workflow
from reinforge.runs.episodes import find_episode
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.journal.writer import JournalWriter
from reinforge.types.episode import EpisodeKey, EpisodeRecord, Mark, ModelCall
from reinforge.types.evaluation import EvalOutputItem
from reinforge.types.request import ModelReply, ModelRequest
from reinforge.types.trajectory import Outcome
from tests.doubles import Scored, examples
from tests.fault.test_episode_counts import Epoch
from tests.journal_rows import read_rows
from tests.scripted_run import ScriptedRun, ask

SURROGATE = "caf\ud83d \udc80"
"""Half of a character twice: legal in JSON and in Python, in no encoding."""


class Mute:
    def __str__(self):
        raise RuntimeError("no text")


class Leaves:
    def __str__(self):
        raise SystemExit(3)


class Exits:
    """Raises SystemExit wherever it is read."""

    def __getattribute__(self, name):
        raise SystemExit(3)

    __str__ = __repr__ = __len__ = __iter__ = __float__ = __bool__ = Leaves.__str__


class Interrupts(Exits):
    @property
    def __class__(self):
        raise KeyboardInterrupt

    def __getattribute__(self, name):
        return object.__getattribute__(self, name)


class Unspeakable(Exception):
    __str__ = __repr__ = Exits.__str__


def cyclic():
    found = []
    found.append(found)
    return found


def nested(levels):
    found = 1
    for _ in range(levels):
        found = [found]
    return found


UNWRITABLE = {
    "it contains itself": cyclic,
    "it is nested too deeply": lambda: nested(3000),
    "it is nested more than 200 levels deep": lambda: nested(201),
    "a key is a tuple; keys must be strings, numbers or None": lambda: {(1, 2): 3},
    "an integer has more than 4,300 digits": lambda: 10**10_000,
    "RuntimeError: no text": Mute,
    "SystemExit: 3": Leaves,
    "it has 4,194,305 characters, and at most 4,194,304 can be recorded": lambda: "x" * 4_194_305,
}


def failing(fail):
    async def agent(item, llm, context):
        said = await ask(item, llm, context)
        return fail(context) if int(item.id) % 4 == 3 else said

    return agent


def outcomes_by_kind(folder, kinds, fail):
    """Runs an agent that fails at odd examples, in each in another way; returns kind -> its outcomes and reasons."""
    names, found = [*kinds], defaultdict(set)

    def find_kind(id_):
        return names[int(id_) // 2 % len(names)] if int(id_) % 2 else ""

    async def agent(item, llm, context):
        said = await ask(item, llm, context)
        return fail(kinds[kind], context) if (kind := find_kind(item.id)) else said

    assert asyncio.run(run_of(folder, agent, count=32).run()).status == "completed"
    for id_, outcome, reason in read_rows(folder / "r", "SELECT DISTINCT example_id, outcome, reason FROM episodes"):
        found[find_kind(id_)].add((outcome, reason))
    assert {outcome for outcome, _ in found.pop("")} == {"ok"}
    return found


def by_answer(output, expected):
    return float(output[-1]) if output else 0.0


def run_of(folder, agent, count=16, **fields):
    made = ScriptedRun(folder, workflow=agent, reward=by_answer, count=count, **fields)
    made.settings["finetuning"] |= {"num_epochs": 1, "outcomes": {"retries": 0, "max_missing": 1.0}}
    return made


def outcomes_of(folder, remainder=3):
    query = "SELECT outcome, reason FROM episodes WHERE example_id % 4 = ? GROUP BY 1, 2"
    return read_rows(folder / "r", query, (remainder,))


def test_an_output_that_cannot_be_written_costs_its_episodes(tmp_path):
    found = outcomes_by_kind(tmp_path, UNWRITABLE, lambda make, context: make())
    assert found == {why: {("tool_error", f"the agent's output cannot be recorded: {why}")} for why in UNWRITABLE}


@pytest.mark.slow
def test_outputs_that_are_too_large_take_neither_time_nor_memory(tmp_path):
    """Without the limit, 12 outputs of 50 MB take more than half a minute."""
    started = time.monotonic()
    asyncio.run(run_of(tmp_path, failing(lambda context: [["x" * 1_000] * 50_000])).run())
    assert time.monotonic() - started < 20
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 2**20


@pytest.mark.parametrize("text", ["[" * 300 + "]" * 300, "9" * 5000], ids=["deep", "digits"])
def test_an_output_that_the_policy_wrote_is_its_own_failure(tmp_path, text):
    """The agent only parses the reply; if this were missing, the policy could hide its answers so."""

    async def parse(item, llm, context):
        said = await ask(item, llm, context)
        return json.loads(said) if said[0] == "[" else 10 ** (len(said) - 1) if said[0] == "9" else said

    script = lambda request: text if request.sampling.seed % 2 else f"answer {request.sampling.seed % 7}"  # noqa: E731
    done = asyncio.run(run_of(tmp_path, parse, script=script).run())
    assert done.episodes.keys() == {"policy_error", "ok"}


def test_without_the_check_such_an_output_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(runner_module, "drop_unrecordable", lambda record, is_policy: None)
    monkeypatch.setattr(runner_module, "fail_unrecordable", lambda record, reason: None)
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(run_of(tmp_path, failing(lambda context: cyclic())).run())
    assert raised.group_contains(RecordError, match=r"^it contains itself$")


def test_without_json_in_the_caller_such_an_output_ends_the_journal(tmp_path, monkeypatch):
    """What the writer's thread raises is the end of the journal, and of every call that follows."""
    put = JournalWriter.put
    journal = RunJournal(tmp_path / "r")
    monkeypatch.setattr(JournalWriter, "put", lambda writer, work: put(writer, lambda db: json.dumps(cyclic())))
    journal.record_episode(EpisodeRecord(EpisodeKey("collect", 0, "0"), examples(1)[0]))
    with pytest.raises(StorageError, match="Circular reference"):
        journal.flush()
    journal._writer._error = None
    journal.close()


def test_an_output_that_changes_while_it_is_recorded_costs_its_episode(tmp_path):
    """It was sound when it was checked, and is not when the journal writes it: the agent still holds it."""
    kept = []

    def fail(context):
        kept.append([])
        return kept[-1]

    class Spoiling(Scored):
        async def evaluate(self, item):
            if item.output_obj in kept:
                item.output_obj.append(item.output_obj)
            return await super().evaluate(item)

    epoch = Epoch(tmp_path / "r", [], 0.0, 0, 4)
    epoch.builder.evaluation.runner.workflow = bind_workflow(failing(fail))
    epoch.builder.evaluation.evaluators["reward"] = Spoiling(
        lambda item: 0.0 if isinstance(item.output_obj, list) else float(item.output_obj[-1])
    )
    asyncio.run(epoch.run())
    epoch.context.journal.close()
    assert outcomes_of(tmp_path) == [("tool_error", "the episode cannot be recorded: it contains itself")]
    assert {outcome for outcome, _ in outcomes_of(tmp_path, 0)} == {"ok"}


def raising(error):
    raise error


HOSTILE = {
    "exits": (lambda context: Exits(), "SystemExit: 3"),
    "interrupts": (lambda context: Interrupts(), "KeyboardInterrupt: "),
    "raises": (lambda context: raising(Unspeakable()), "Unspeakable: an object of type Unspeakable, whose str()"),
    "fails": (lambda context: raising(PolicyFailure(Exits())), "an object of type PolicyFailure, whose str() raised"),
    "marks": (
        lambda context: context.mark(threading.Lock()),
        "the episode cannot be recorded: TypeError: cannot pickle",
    ),
}
"""What an agent does, and a part of the reason why its episode has failed."""


def test_objects_that_raise_where_they_are_read_cost_their_episodes(tmp_path):
    found = outcomes_by_kind(tmp_path, HOSTILE, lambda kind, context: kind[0](context))
    assert found.keys() == HOSTILE.keys()
    for kind, (_, why) in HOSTILE.items():
        assert all(why in reason for _, reason in found[kind]), found


def test_a_ctrl_c_while_an_output_is_read_is_not_taken_for_the_agents():
    """Outside a run, whose own handler of SIGINT never raises, a KeyboardInterrupt may be the user's."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            files.to_json(Interrupts())
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("score", [Exits, Interrupts, lambda: EvalOutputItem.model_construct(id="0", score=Exits())])
def test_a_score_that_raises_where_it_is_read_is_missing(score):
    found = asyncio.run(score_item(SimpleNamespace(evaluate=lambda item: asyncio.sleep(0, score())), examples(1)[0]))
    assert found.score is None
    assert found.error is not None


def test_a_failure_of_the_policy_stays_one(tmp_path):
    """An output for the other evaluators that cannot be written must not turn a bad answer into a missing one."""
    found = outcomes_by_kind(tmp_path, UNWRITABLE, lambda make, _: raising(PolicyFailure("illegal move", make())))
    said = "illegal move; the agent's output cannot be recorded"
    assert found == {why: {("policy_error", f"{said}: {why}")} for why in UNWRITABLE}


def test_a_mark_that_cannot_be_written_costs_its_episodes(tmp_path):
    found = outcomes_by_kind(tmp_path, UNWRITABLE, lambda make, context: context.mark(make()))
    assert found == {why: {("tool_error", f"a mark of the agent cannot be recorded: {why}")} for why in UNWRITABLE}


def call_of(request=None, reply=None):
    message = {"role": "assistant", "content": "yes", **(reply or {})}
    asked = ModelRequest([{"role": "user", "content": "hi", **(request or {})}])
    return ModelCall("c", "agent", "m", asked, ModelReply(message, "stop", None), (), 0.0, 1.0)


@pytest.mark.parametrize(
    ("call", "is_policy", "outcome", "reason"),
    [
        (call_of(reply={"x": nested(300)}), True, "policy_error", "a reply of agent cannot be recorded: it is nested"),
        (call_of(reply={"x": cyclic()}), False, "backend_error", "a reply of agent cannot be recorded: it contains"),
        (call_of(request={"x": cyclic()}), True, "tool_error", "a request of the agent to agent cannot be recorded"),
    ],
)
def test_a_call_that_cannot_be_written_is_the_failure_of_whoever_made_it(call, is_policy, outcome, reason):
    record = EpisodeRecord(EpisodeKey("collect", 0, "0"), examples(1)[0], calls=[call_of(), call, call_of()])
    record.marks = [Mark(1, 0.5, None, (), 0.0), Mark(2, 1.0, None, (), 0.0)]
    drop_unrecordable(record, lambda name: is_policy)
    assert (record.outcome, record.reason[: len(reason)]) == (Outcome(outcome), reason)
    assert (len(record.calls), len(record.marks)) == (1, 1), "what came before can still be trained"


def test_a_reasoning_that_cannot_be_written_is_a_missing_score():
    async def score(reasoning):
        evaluator = SimpleNamespace()

        async def evaluate(item):
            return EvalOutputItem(id=item.id, score=0.5, reasoning=reasoning)

        evaluator.evaluate = evaluate
        return await score_item(evaluator, examples(1)[0])

    for why, make in UNWRITABLE.items():
        found = asyncio.run(score({"because": make()}))
        assert found.score is None
        why = why.replace("201", "202").replace("4,194,305", "4,194,319")
        assert found.error == f"the evaluator's reasoning cannot be recorded: {why}"
    assert asyncio.run(score(SURROGATE)).score == 0.5


def test_lone_surrogates_come_back_as_they_were(tmp_path):
    """From a reply, an output, a reason and an evaluator's error: JSON has an escape for them."""
    folder = tmp_path / "r"
    journal = RunJournal(folder)
    record = EpisodeRecord(EpisodeKey("collect", 0, "0"), examples(1)[0], calls=[call_of(reply={"content": SURROGATE})])
    record.item = record.item.copy_with_updates(output_obj=[SURROGATE, float("nan")])
    record.reason = SURROGATE
    record.scores = {"reward": EvalOutputItem(id="0", score=None, reasoning=SURROGATE, error=SURROGATE)}
    journal.record_episode(record)
    journal.set_facts(reason=SURROGATE)
    journal.start_session()
    journal.end_session(f"failed: {SURROGATE}")
    path = journal.export_epoch(0)
    data = find_episode(folder, "0").data
    assert (data["output"], data["reason"]) == ([SURROGATE, None], SURROGATE)
    assert data["calls"][0]["reply"]["content"] == SURROGATE
    assert data["scores"]["reward"] == {"score": None, "reasoning": SURROGATE, "error": SURROGATE}
    assert journal.facts()["reason"] == SURROGATE
    assert journal.sessions()[0].ended == "failed: caf\\ud83d \\udc80", "plain text shows the escape"
    exported = zstandard.ZstdDecompressor().decompress(path.read_bytes(), max_output_size=1 << 20)
    assert json.loads(exported) == data
    journal.close()


def test_a_run_whose_policy_says_lone_surrogates_is_completed(tmp_path):
    run = run_of(tmp_path, ask)
    reply = run.adapter.server.sample

    async def sample(request):
        said = await reply(request)
        text = f"{SURROGATE}{said.message['content'][-1]}"
        return ModelReply({"role": "assistant", "content": text}, "stop", said.tokens, 1, 3)

    run.adapter.server.sample = sample
    done = asyncio.run(run.run())
    assert done.status == "completed"
    assert set(done.episodes) == {"ok"}
    texts = read_rows(tmp_path / "r", "SELECT data FROM episodes")
    assert all(json.loads(text)["output"].startswith(SURROGATE) for (text,) in texts)


def test_every_episode_is_accounted_for_whatever_the_agent_returns(tmp_path):
    """requested = trained + dropped + failed, with outputs of every kind among the siblings."""
    makers = list(UNWRITABLE.values())
    epoch = Epoch(tmp_path / "r", [], 0.0, 0, 6)
    started = []

    async def agent(item, llm, context):
        said = await ask(item, llm, context)
        epoch.generations[item.id] += 1
        started.append(item.id)
        return makers[len(started) % len(makers)]() if len(started) % 3 == 0 else said

    epoch.builder.evaluation.runner.workflow = bind_workflow(agent)
    asyncio.run(epoch.run())
    epoch.context.journal.close()
    rows = dict(read_rows(tmp_path / "r", "SELECT outcome, count(*) FROM episodes GROUP BY outcome"))
    assert sum(rows.values()) == len(started)
    assert rows["tool_error"] == len(started) // 3
    [metrics] = [row.as_dict() for row in epoch.trainer._reward_history]
    assert metrics["num_trajectories"] + metrics["num_missing"] == len(started)
