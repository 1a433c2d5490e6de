"""Whole runs on hostile parts: whatever a policy, an agent or an evaluator returns costs its own episode at most."""

import asyncio
import itertools
import json
import tempfile
from pathlib import Path

from hypothesis import strategies as st

from reinforge.errors import ReinforgeError
from reinforge.runs.journal.verify import verify_run
from tests.fuzz.fuzzing import OBJECTS, TEXTS, VALUES, fuzzed, to_bytes
from tests.journal_rows import read_rows
from tests.scripted_run import ScriptedRun

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def call_tool(value):
    """Returns a reply that calls a tool with these arguments."""
    return (
        f'<tool_call>\n{{"name": "add", "arguments": {to_bytes(value).decode("utf-8", "surrogatepass")}}}\n</tool_call>'
    )


REPLIES = st.one_of(
    TEXTS,
    VALUES.map(call_tool),
    st.sampled_from(
        [
            "<tool_call>" + "[" * 3000,
            '<tool_call>{"name": "add", "arguments": {"n": ' + "9" * 6000 + "}}</tool_call>",
            "<tool_call>" * 500,
            "<" * 5000,
        ]
    ),
)


class Parts:
    """An agent and a reward that return the drawn values in turn, with a good one between two of them."""

    def __init__(self, replies, outputs, scores):
        self.replies, self.outputs, self.scores = (
            itertools.cycle([each for value in drawn for each in (good, value)])
            for drawn, good in ((replies, "yes"), (outputs, "done"), (scores, 0.5))
        )

    def script(self, request):
        return next(self.replies)

    async def agent(self, item, llm, context):
        reply = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}], tools=TOOLS)
        message = reply.choices[0].message
        output = next(self.outputs)
        if isinstance(output, Exception):
            raise output
        await llm.chat.completions.create(messages=[message, {"role": "user", "content": "and?"}])
        return output

    def reward(self, output, expected):
        score = next(self.scores)
        if isinstance(score, Exception):
            raise score
        return score


async def run_and_check(folder, parts):
    run = ScriptedRun(folder, workflow=parts.agent, reward=parts.reward, script=parts.script, count=12)
    run.settings["finetuning"] |= {"outcomes": {"retries": 0, "max_missing": 1.0}, "num_epochs": 1}
    raised = None
    try:
        await run.run()
    except ReinforgeError as error:  # nothing is left to compare or to train on
        raised = error
    assert raised is None or raised.exit_code in (2, 3), f"{raised.exit_code}: {raised}"
    summary = json.loads((folder / "r" / "summary.json").read_text())
    assert summary["status"] == ("completed" if raised is None else "failed")
    verification = verify_run(folder / "r")
    assert verification.is_sound, verification.findings
    ((count,),) = read_rows(folder / "r", "SELECT count(*) FROM episodes WHERE phase = 'collect'")
    trained = sum(job.num_trajectories for job in run.adapter.jobs)
    assert trained <= count


@fuzzed(
    st.lists(REPLIES, min_size=1, max_size=6),
    st.lists(OBJECTS, min_size=1, max_size=6),
    st.lists(st.floats(0, 1) | OBJECTS, min_size=1, max_size=6),
    quick=3,
)
def test_a_run_survives_whatever_its_parts_return(replies, outputs, scores):
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run_and_check(Path(folder), Parts(replies, outputs, scores)))
