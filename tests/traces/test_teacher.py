"""Asking the large model again: which of its replies is imitated, what that costs, and what is not asked twice."""

import json
import random
import re
from collections import Counter

import pytest
import yaml
from click.testing import CliRunner

from reinforge.cli import main
from reinforge.errors import BackendError, BudgetReached, ConfigError
from reinforge.runs.summary import load_summary
from reinforge.traces.replacement import prepare
from reinforge.traces.reply_quality import count_votes
from reinforge.traces.teacher import TeacherOptions
from tests.loop_thread import serve_in_thread
from tests.openai_server import OpenAIServer, fails, says
from tests.traces.test_replacement import COLORS, record, write


@pytest.mark.parametrize(
    ("replies", "chosen", "share"),
    [
        (["billing", "refund", "Billing ", "billing"], "billing", 0.75),
        (["refund", "billing", "billing"], "billing", 2 / 3),
        (["refund", "billing"], "refund", 0.0),
        (["a", "a", "b", "b"], "a", 0.0),
        (["a", "b", "c", "c"], "c", 0.5),
        (['{"a": 1, "b": 2}', '{"b": 2, "a": 1}'], '{"a": 1, "b": 2}', 1.0),
        (["alone"], "alone", 1.0),
    ],
)
def test_the_first_reply_that_most_agree_with_is_chosen(replies, chosen, share):
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]} for text in replies
    ]
    row, found = count_votes(rows)
    assert (row["messages"][-1]["content"], found) == (chosen, pytest.approx(share))


def reply(request, body):
    """Says red, but for some prompts: another word each time, an error, a reply without text; scores no tokens."""
    if "prompt" in body:
        return fails(404)(request, body)
    number = int(body["messages"][-1]["content"].removeprefix("color "))
    steps = {1: says(f"word {random.random()}"), 2: fails(400), 3: says("")}
    return steps.get(number % 5, says("Red"))(request, body)


def count_calls(server):
    return sum("messages" in body for body in server.bodies)


@pytest.fixture
def ask(tmp_path, tiny_model_dir):
    """Prepares a run with a teacher; returns what was found, the rows that are imitated, and the configuration.

    60 requests, of which 36 are trained on; every fifth recorded reply is wrong.
    """

    def ask(server, evaluator=None, usage=None, **options):
        if not (tmp_path / "logs").exists():
            replies = ["blue" if number % 5 == 0 else "red" for number in range(60)]
            write(tmp_path / "logs", [record(number, text, **(usage or {})) for number, text in enumerate(replies)])
        entry = {"_type": "openai", "base_url": server.url, "model_name": "large", "max_retries": 0}
        (tmp_path / "teacher.yml").write_text(yaml.safe_dump({"llms": {"teacher": entry}}))
        options = {"evaluator": evaluator, "teacher": TeacherOptions(tmp_path / "teacher.yml", **options)}
        found = prepare([tmp_path / "logs"], tmp_path / "small", str(tiny_model_dir), margin=0.5, **options)
        rows = [json.loads(line) for line in (tmp_path / "small.voted.jsonl").read_text().splitlines()]
        by_number = {int(row["messages"][0]["content"].removeprefix("color ")): row for row in rows}
        return found, by_number, yaml.safe_load(found.config.read_text())

    return ask


def test_the_prompts_that_are_trained_on_are_asked_again_and_all_replies_vote(ask):
    told = []
    with serve_in_thread(OpenAIServer(reply)) as server:
        found, rows, config = ask(server, note=told.append)
        assert told == [
            f"  distill   no, only imitation: {server.url}/completions: 404 broken 404",
            "  asking    large again, for 36 prompts: 108 requests, about 2,700 tokens, about $0.108",
        ]
        assert [tuple(body) for body in server.bodies[1:]] == [("model", "messages")] * 108
        kinds = [number % 5 for number in rows]
        num_failed = 3 * (kinds.count(2) + kinds.count(3))
        ask(server)
        assert len(server.bodies) == 2 + 108 + num_failed, "only what failed is asked again"
    chosen = {number % 5: (row["messages"][-1]["content"], row["agreement"]) for number, row in rows.items()}
    assert chosen == {0: ("Red", 0.75), 1: ("red", 0.0), 2: ("red", 1.0), 3: ("red", 1.0), 4: ("red", 1.0)}
    lines = "\n".join(found.format_lines())
    assert f"vote      {kinds.count(0)} prompts get another reply than the recorded one; {num_failed} requests" in lines
    assert f"nothing is trained on the {kinds.count(1)} below 0.5" in lines
    each = [kinds.count(0) / 2, 0, kinds.count(4)]  # 3 of 6 pairs agree, none, all
    assert found.self_agreement == pytest.approx(sum(each) / (kinds.count(0) + kinds.count(1) + kinds.count(4)))
    assert config["finetuning"]["pipeline"] == {"imitate": {"num_epochs": 20, "dataset": "small.voted.jsonl"}}
    assert config["finetuning"]["algorithm"] == {"_type": "sft", "min_reward": 0.5}
    assert config["trajectory_builders"]["logs"]["reward_key"] == "agreement"


def test_an_evaluator_decides_before_the_vote(ask, tmp_path):
    (tmp_path / "voted_checks.py").write_text("def is_right(item):\n    return item.output_obj in ('red', 'green')\n")
    asked = Counter()

    def reply(request, body):
        if "prompt" in body:
            return fails(404)(request, body)
        prompt = body["messages"][-1]["content"]
        asked[prompt] += 1
        return says("green" if asked[prompt] == 2 else "blue")(request, body)

    with serve_in_thread(OpenAIServer(reply)) as server:
        found, rows, config = ask(server, "voted_checks:is_right")
    assert {number % 5 == 0: row["messages"][-1]["content"] for number, row in rows.items()} == {
        True: "green",  # recorded blue, asked again blue, green, blue
        False: "red",
    }
    assert {row["quality"] for row in rows.values()} == {1.0}
    assert "quality   the replies score 1.000 on average; all are trained on" in "\n".join(found.format_lines())
    assert config["finetuning"]["algorithm"] == {"_type": "sft"}


def test_what_costs_too_much_is_refused_before_anything_is_requested(ask):
    needed = "36 prompts need 108 requests, about 2,700 tokens, about \\$0.108, and the limit is enough for 16 of them"
    with serve_in_thread(OpenAIServer(says("Red"))) as server:
        with pytest.raises(ConfigError, match=f"--max_price: {needed}"):
            ask(server, max_price=0.05)
        with pytest.raises(ConfigError, match=f"--max_teacher_tokens: {needed}"):
            ask(server, max_tokens=1250)
        assert count_calls(server) == 0
        ask(server, max_price=0.108, max_tokens=2700)
        assert count_calls(server) == 108


def test_replies_longer_than_the_recorded_ones_do_not_exceed_the_limit(ask):
    """A reply of 3 tokens may cost three times as much as a recorded one of 1 token."""
    with serve_in_thread(OpenAIServer(says("Red"))) as server:
        with pytest.raises(BudgetReached, match="have cost what is allowed: .* of 108 requests were sent"):
            ask(server, usage={"completion_tokens": 1}, max_price=0.15)
        assert 50 <= count_calls(server) < 50 + 64
        ask(server, max_price=0.5)
        assert count_calls(server) == 108


def test_a_price_limit_needs_prices_in_the_logs(ask):
    with (
        serve_in_thread(OpenAIServer(says("Red"))) as server,
        pytest.raises(ConfigError, match="--max_price: the logs do not say what a request takes"),
    ):
        ask(server, usage={"response_cost": None}, max_price=1)


def test_a_teacher_that_is_down_is_not_asked_for_the_rest(ask):
    with serve_in_thread(OpenAIServer(fails(500))) as server:
        with pytest.raises(BackendError, match=r"\d+ requests failed, most often: .*500.* \d+ of 108 requests were"):
            ask(server)
        assert 8 < count_calls(server) <= 8 + 64


def test_other_uses_of_the_options_are_refused(tmp_path):
    write(tmp_path / "logs", [record(number) for number in range(60)])
    teacher = tmp_path / "teacher.yml"
    teacher.write_text("llms: {student: {_type: policy}}\n")
    command = ["replace", str(tmp_path / "logs"), "--model", "bundled:help_desk", "--output", str(tmp_path / "new")]
    result = CliRunner().invoke(main, [*command, "--teacher", str(teacher)])
    assert (result.exit_code, "teacher.yml llms: expected one entry" in result.output) == (2, True), result.output
    result = CliRunner().invoke(main, [*command, "--overwrite", "--max_price", "1"])
    assert (result.exit_code, "add it" in result.output) == (2, True)


@pytest.mark.slow
def test_a_student_imitates_the_votes_and_is_distilled_from_a_teacher_that_scores_its_tokens(
    tmp_path, tiny_model_dir, monkeypatch
):
    """The teacher has learned to repeat a color; in the log every fifth of its replies is wrong."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    asked = [f"{draw.choice(COLORS)} {draw.randrange(10**6)}" for _ in range(300)]
    for name, wrong in (("clean", 10**6), ("noisy", 5)):
        replies = [text.split()[0] if number % wrong else "none" for number, text in enumerate(asked)]
        write(tmp_path / name, [record(number, replies[number], prompt=text) for number, text in enumerate(asked)])
    train = ["--model", str(tiny_model_dir), "--margin", "0.1"]
    rate = "policy.optimizer.learning_rate"
    command = [
        "replace",
        "clean",
        *train,
        "--output",
        "large",
        "--run_name",
        "large",
        "-o",
        f"finetuning.{rate}",
        "0.003",
    ]
    result = CliRunner().invoke(main, [*command, "-o", "finetuning.num_epochs", "5"])
    assert result.exit_code == 0, result.output
    (tmp_path / "teacher.yml").write_text("llms: {large: {_type: local, model: .reinforge/runs/large/model}}\n")
    command = ["replace", "noisy", *train, "--output", "small", "--run_name", "small", "--teacher", "teacher.yml"]
    stage = "finetuning.pipeline.imitate"
    result = CliRunner().invoke(main, [*command, "-o", f"{stage}.num_epochs", "3", "-o", f"{stage}.{rate}", "0.003"])
    assert result.exit_code == 0, result.output
    assert "distill   yes, after imitation: the teacher scores the student's tokens" in result.output
    assert re.search(r"vote +(2\d|3\d|4\d) prompts get another reply than the recorded one", result.output)
    summary = load_summary(tmp_path / ".reinforge" / "runs" / "small")
    assert summary.stages == {"imitate": 3, "distill": 2}
    history = json.loads((summary.folder / "reward_history.json").read_text())
    assert [("teacher_kl" in row and row["teacher_kl"] is not None) for row in history] == [False] * 3 + [True] * 2
    assert summary.confirm_tuned.mean > 0.7, "of the recorded replies, a fifth is wrong"
    assert len((tmp_path / "small.answers.jsonl").read_text().splitlines()) == 3 * 180
