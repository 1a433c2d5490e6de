"""From exports with thumbs to a trained model and its verdict, through the command line."""

import json

import pytest
from click.testing import CliRunner

from reinforge.cli import main

AGENT = """
async def agent(item, llm, context):
    reply = await llm.chat.completions.create(messages=item.input_obj, max_tokens=6)
    return reply.choices[0].message.content
"""


def call(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def generation(number, text, value, **more):
    messages = [{"role": "user", "content": f"say {number}"}]
    fields = {"id": f"o{number}{text}", "traceId": f"t{number}{text}", "sessionId": f"s{number // 2}", **more}
    score = {"traceId": f"t{number}{text}", "name": "user-feedback", "value": value, "dataType": "BOOLEAN"}
    return [{"type": "GENERATION", "input": messages, "output": text, **fields}, score]


@pytest.fixture
def traced(project):
    """An export in which users like `yes` and dislike `no`; two traces make a session."""
    project.write("task.py", AGENT)
    project.set("eval.evaluators", {"right": {"_type": "contains", "texts": "yes"}})
    project.set("finetuning.reward_function.name", "right")
    project.set("trajectory_builders.builder", {"_type": "dataset"})
    project.set("finetuning.policy.optimizer.learning_rate", 1e-2)
    project.set("finetuning.policy.schedule", {"warmup_steps": 2})
    project.rows = None  # the import writes them
    return project


def export(folder, *records):
    (folder / "export.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return call("data", "import", folder / "export.jsonl", "--output", folder / "data.jsonl", "--overwrite")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "num_epochs"),
    [
        ({"_type": "sft", "min_reward": 0.5}, 3),
        ({"_type": "kto", "beta": 0.05}, 8),
        ({"_type": "rejection_sampling"}, 3),
    ],
    ids=["sft", "kto", "rejection_sampling"],
)
def test_thumbs_of_an_export_train_a_better_model(traced, algorithm, num_epochs):
    records = [each for n in range(64) for each in generation(n, *(("no", 0) if n % 2 else ("yes", 1)))]
    if algorithm["_type"] == "rejection_sampling":  # keeps the best of several replies to one prompt
        records += [each for n in range(64) for each in generation(n, *(("yes", 1) if n % 2 else ("no", 0)))]
    imported = export(traced.folder, *records)
    assert imported.exit_code == 0, imported.output
    rows = [json.loads(line) for line in (traced.folder / "data.jsonl").read_text().splitlines()]
    assert {row["label"] for row in rows} == {True, False}
    checked = call("data", "validate", traced.folder / "data.jsonl")
    assert checked.exit_code == 0, checked.output
    traced.set("finetuning.algorithm", algorithm).set("finetuning.num_epochs", num_epochs)
    result = traced.finetune("--require_improvement")
    assert result.exit_code == 0, result.output
    assert "confirm examples of 8 prompts cannot show less than" in " ".join(result.output.split())
    assert traced.summary["confirm_base"]["mean"] < 0.1
    assert traced.summary["confirm_tuned"]["mean"] > 0.9
    assert "over 8 clusters" in traced.summary["improvement"]["method"], "two traces of a session are one cluster"


def test_two_thumbs_for_replies_to_one_prompt_train_dpo(traced):
    records = [
        each for n in range(48) for text, value in (("yes", 1), ("no", 0)) for each in generation(n, text, value)
    ]
    assert export(traced.folder, *records).exit_code == 0
    traced.set("finetuning.algorithm", {"_type": "dpo", "beta": 0.5}).set("finetuning.num_epochs", 1)
    result = traced.finetune()
    assert result.exit_code == 0, result.output
    history = json.loads((traced.run / "reward_history.json").read_text())
    assert all(row["direction"] > 0 for row in history)


def test_the_commands_about_data(tmp_path):
    records = [*generation(1, "yes", 1), *generation(2, "no", 0), *generation(3, "no", 0)]
    imported = export(tmp_path, *records, {"what": "ever"}, {"type": "SPAN", "traceId": "t", "id": "x"})
    assert imported.exit_code == 0, imported.output
    assert "3 rows of 2 conversations (records read: langfuse 7; files: 1)" in imported.output
    assert "label     1 true, 2 false, 0 without (from user-feedback)" in imported.output
    assert "ignored   1 Langfuse observations of the type SPAN" in imported.output
    assert f"1 × no known format (the record has what); give --format, or --column for chat logs ({tmp_path}" in (
        imported.output
    )
    rows = tmp_path / "data.jsonl"
    assert rows.stat().st_mode & 0o777 == 0o600, "replies of users are for their owner"
    again = call("data", "import", tmp_path / "export.jsonl", "--output", rows)
    assert (again.exit_code, "add --overwrite to replace it" in again.output) == (2, True)
    stats = json.loads(call("data", "stats", rows, "--json").output)
    assert (stats["num_rows"], stats["num_conversations"], stats["labels"]) == (3, 2, {"true": 1, "false": 2})
    text = call("data", "stats", rows).output
    assert "1 true, 2 false, 0 without" in text
    fits = json.loads(call("data", "validate", rows, "--json").output)
    assert (fits["ok"], fits["shape"], fits["algorithms"]["kto"]) == (True, "messages", None)
    rows.write_text(rows.read_text() * 2)
    broken = call("data", "validate", rows)
    assert (broken.exit_code, 'id "o1yes" is already used at' in broken.output) == (2, True)
    without_ids = [{key: value for key, value in json.loads(line).items() if key != "id"} for line in rows.open()]
    rows.write_text("".join(json.dumps(row) + "\n" for row in without_ids))
    cleaned = call("data", "dedupe", rows, "--output", tmp_path / "clean.jsonl")
    assert cleaned.exit_code == 0, cleaned.output
    assert "clean.jsonl: 3 of 6 rows" in cleaned.output
    assert f"left out {rows}:4: it repeats {rows}:1 (similarity 1.00)" in cleaned.output
    report = call("data", "import", tmp_path / "export.jsonl", "--output", tmp_path / "b.jsonl", "--json", "--redact")
    assert json.loads(report.output)["unread"][0]["count"] == 1


def test_an_unknown_kind_of_column_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    result = call("data", "import", tmp_path / "a.csv", "--output", tmp_path / "o.jsonl", "--column", "promt", "a")
    assert (result.exit_code, 'did you mean "prompt"?' in result.output) == (2, True)
