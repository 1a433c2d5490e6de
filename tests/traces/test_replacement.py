"""Replacing a large model from the log of its calls: what is prepared, when replies agree, and a whole run."""

import json
import random
import re
from functools import partial

import pytest
import yaml
from click.testing import CliRunner
from transformers import AutoTokenizer

from reinforge.cli import main
from reinforge.cli.exits import run_and_exit
from reinforge.errors import ConfigError
from reinforge.routing.router import Router
from reinforge.runs.summary import RunSummary, load_summary
from reinforge.traces.replacement import (
    FULL_STEPS,
    agrees,
    measure_self_agreement,
    plan_epochs,
    plan_splits,
    prepare,
)
from reinforge.types.evaluation import EvalInputItem

COLORS = ["red", "blue", "green", "black"]


def call(text, expected):
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": expected}]}
    return [message] if text is None else text


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        (" Yes,  do it", "yes, do it", True),
        ("no", "yes", False),
        ('{"b": [1, 2], "a": null}', '```json\n{"a": null, "b": [1, 2]}\n```', True),
        ('{"a": 1}', '{"a": true}', False),
        ("[not JSON", "[NOT JSON", True),
        (
            call(None, {"name": "f", "arguments": '{"a": 1, "b": 2}'}),
            call(None, {"name": "f", "arguments": '{"b":2,"a":1}'}),
            True,
        ),
        (call(None, {"name": "f", "arguments": "{}"}), call(None, {"name": "g", "arguments": "{}"}), False),
        ("f({})", call(None, {"name": "f", "arguments": "{}"}), False),
        (None, "yes", False),
    ],
)
def test_when_two_replies_agree(output, expected, same):
    item = EvalInputItem(id="1", input_obj="q", expected_output_obj=expected, output_obj=output, full_dataset_entry={})
    assert agrees(item) == float(same)
    assert agrees(item.model_copy(update={"output_obj": expected})) == 1.0


def record(number, reply="red", *, prompt=None, **more):
    """Returns a line of `reinforge serve --record`."""
    body = {"model": "gpt-large", "messages": [{"role": "user", "content": prompt or f"color {number}"}]}
    message = {"role": "assistant", "content": reply}
    return {
        "request_id": f"r{number}",
        "trace_id": f"t{number}",
        "call_type": "completion",
        "status": "success",
        "startTime": f"2026-01-01T00:{number // 60:02}:{number % 60:02}",
        "response_time": 0.1 + number / 1000,
        "model": "gpt-large",
        "prompt_tokens": 20,
        "completion_tokens": 5,
        "response_cost": 0.001,
        "proxy_server_request": {"body": body},
        "response": {"choices": [{"message": message}]},
        **more,
    }


def write(folder, records):
    folder.mkdir()
    (folder / "requests-2026-01-01.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    return folder


def test_what_is_prepared(tmp_path):
    records = [record(number) for number in range(100)]
    records += [
        record(100, "yes", prompt="again"),
        record(101, "Yes", prompt="again"),
        record(102, "no", prompt="again"),
    ]
    records += [record(103, status="failure", response=None), record(104, ""), record(105, "x" * 100)]
    found = prepare([write(tmp_path / "logs", records)], tmp_path / "small", "bundled:help_desk", margin=0.1)
    rows = [json.loads(line) for line in (tmp_path / "small.jsonl").read_text().splitlines()]
    assert len(rows) == 104
    assert {row["max_tokens"] for row in rows} == {(100 + len('["",null]')) // 2 + 16}
    assert found.self_agreement == pytest.approx(1 / 3)
    assert (found.num_repeated, found.costs.num_calls, found.costs.num_failed) == (1, 106, 1)
    assert (found.costs.prompt_tokens, found.costs.completion_tokens) == (20, 5)
    assert found.costs.price == pytest.approx(0.001)
    assert found.costs.p50_s == pytest.approx(0.152)
    lines = "\n".join(found.format_lines())
    assert "106 requests, 1 failed" in lines
    assert "per 1,000 requests: 20,000 + 5,000 tokens, price $1" in lines
    assert "1 × the reply is empty" in lines
    assert "1 LiteLLM calls that failed" in lines
    assert "agrees with itself in 33.3%" in lines
    assert "gpt-large: check whether the provider lets you train" in lines
    config = yaml.safe_load((tmp_path / "small.yml").read_text())
    assert config["finetuning"]["gate"] == {"reference": "logs", "margin": 0.1}
    assert config["finetuning"]["reward_function"] == {"name": "agreement"}
    assert config["finetuning"]["num_epochs"] == 20


def test_an_evaluator_of_ones_own_decides(tmp_path):
    (tmp_path / "color_checks.py").write_text("def is_color(item):\n    return item.output_obj in ('red', 'blue')\n")
    logs = write(tmp_path / "logs", [record(number, "blue" if number % 10 else "rot") for number in range(50)])
    found = prepare([logs], tmp_path / "small", "bundled:help_desk", evaluator="color_checks:is_color")
    assert "  quality   the replies score 0.900 on average; nothing is trained on the 5 below 0.5" in (
        found.format_lines()
    )
    rows = [json.loads(line) for line in (tmp_path / "small.jsonl").read_text().splitlines()]
    assert [row["quality"] for row in rows] == [float(row["messages"][-1]["content"] == "blue") for row in rows]
    config = yaml.safe_load((tmp_path / "small.yml").read_text())
    assert config["eval"]["evaluators"]["quality"] == {"_type": "python", "function": "color_checks:is_color"}
    assert config["finetuning"]["algorithm"] == {"_type": "sft", "min_reward": 0.5}
    assert config["trajectory_builders"]["logs"]["reward_key"] == "quality"
    assert config["finetuning"]["reward_function"] == {"name": "quality"}


def test_the_smaller_the_margin_the_more_is_held_out_and_the_fewer_the_rows_the_longer_is_trained():
    assert plan_splits(700, 0.02) == {"train": 0.457, "select": 0.114, "confirm": 0.429}  # 300 rows for the verdict
    assert plan_splits(400, 0.02) == {"train": 0.4, "select": 0.1, "confirm": 0.5}
    assert plan_splits(400, 0.1) == plan_splits(5000, 0.02) == {"train": 0.6, "select": 0.15, "confirm": 0.25}
    # at least 400 steps of 16 rows: 600 rows -> 6400 / 600
    assert [plan_epochs(num_rows, 0.6, FULL_STEPS) for num_rows in (100, 1000, 4000)] == [20, 11, 3]


def test_too_few_conversations_are_refused(tmp_path):
    logs = write(tmp_path / "logs", [record(number) for number in range(30)])
    with pytest.raises(ConfigError, match="30 conversations with a reply, and at least 40"):
        prepare([logs], tmp_path / "small", "bundled:help_desk")


def test_replies_of_a_prompt_with_other_tools_are_not_compared():
    ask = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    other = {**ask, "tools": [{"type": "function"}]}
    assert measure_self_agreement([ask, other]) == (None, 0)
    assert measure_self_agreement([ask, ask, other]) == (1.0, 1)


def test_prices_stay_beside_the_json(tmp_path, capsys):
    run_and_exit(lambda: RunSummary("r", "completed", tmp_path), as_json=True, at_end=lambda summary: ["teacher  $1"])
    printed = capsys.readouterr()
    assert json.loads(printed.out)["run_id"] == "r"
    assert printed.err == "teacher  $1\n"


@pytest.mark.slow
def test_where_training_does_not_help_the_base_model_is_compared(tmp_path, tiny_model_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "logs", [record(number) for number in range(160)])
    command = ["replace", "logs", "--model", str(tiny_model_dir), "--margin", "0.1", "--run_name", "small"]
    command += ["-o", "finetuning.num_epochs", "1", "-o", "finetuning.policy.optimizer.learning_rate", "1e-12"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert "small did not improve the agent; the untouched base model is worse than the logs" in result.output
    assert "so the base model stays; the untouched base model: worse than the logs by more than 0.1" in result.output
    assert re.search(r"router +No request stays local: no threshold was shown to lose at most 0.1 ", result.output)
    assert "student        the untouched base model, per 1,000 requests: " in result.output
    assert "--fallback" not in result.output


@pytest.mark.slow
def test_a_model_is_trained_and_compared_with_the_logs(tmp_path, tiny_model_dir, monkeypatch):
    """The teacher's job is one that a tiny model learns: to repeat the color of the question.

    Of the newest requests, those of the tenth day, every second one is answered in another way.
    """
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    asked = [f"{draw.choice(COLORS)} {draw.randrange(10**6)} {draw.randrange(10**6)}" for _ in range(440)]
    days = [{"startTime": f"2026-01-{1 + number // 44:02}T00:00:{number % 44:02}"} for number in range(440)]
    replies = [text.split()[0] if number < 396 or number % 2 else "none" for number, text in enumerate(asked)]
    write(
        tmp_path / "logs",
        [record(number, replies[number], prompt=text, **days[number]) for number, text in enumerate(asked)],
    )
    command = ["replace", "logs", "--model", str(tiny_model_dir), "--machine_price", "0.5", "--run_name", "small"]
    command += ["--margin", "0.1", "-o", "finetuning.num_epochs", "4", "--router_samples", "2"]
    command += ["--router_evaluator", "{_type: regex, pattern: '^(red|blue|green|black)$'}"]
    command += ["-o", "finetuning.policy.optimizer.learning_rate", "0.003"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    summary = load_summary(tmp_path / ".reinforge" / "runs" / "small")
    assert summary.non_inferiority.outcome == "not worse"
    assert summary.non_inferiority.margin == 0.1
    newest = summary.non_inferiority.transfer["newest requests"]
    assert (newest.outcome, newest.num_pairs) == ("worse", 44)
    assert newest.difference == pytest.approx(-0.5, abs=0.03)
    assert "newest    the 44 since 2026-01-10 00:00 are trained on by nothing" in result.output
    assert re.search(r"transfer +newest requests worse than the logs by more than 0.1 \(difference -0.5", result.output)
    assert re.search(r"warning +newest requests: compared with the logs, the model is worse there", result.output)
    assert "break-even" in result.output
    assert re.search(r"router +\d+% of the requests stay local", result.output), result.output
    found = Router.load(tmp_path / "replace.router.json")
    assert (found.margin, found.metric) == (0.1, "agreement")
    assert re.search(r" +by .+ \(AUROC [01]\.\d{3}(; \w+ [01]\.\d{3}){3}\)", result.output), result.output
    assert "student        per 1,000 requests: " in result.output
    again = CliRunner().invoke(main, command)
    assert again.exit_code == 2
    assert "exist already" in again.output


@pytest.mark.slow
def test_the_student_answers_without_the_system_prompt_that_the_application_still_sends(
    tmp_path, tiny_model_dir, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    draw, system = random.Random(0), 'Repeat the color, and nothing else. "{{ }}" means nothing.'
    asked = [f"{draw.choice(COLORS)} {draw.randrange(10**6)} {draw.randrange(10**6)}" for _ in range(300)]
    logs = [record(number, text.split()[0], prompt=text) for number, text in enumerate(asked)]
    for each in logs:
        each["proxy_server_request"]["body"]["messages"].insert(0, {"role": "system", "content": system})
    write(tmp_path / "logs", logs)
    command = ["replace", "logs", "--model", str(tiny_model_dir), "--drop_system", "--run_name", "small"]
    command += ["--margin", "0.1", "-o", "finetuning.num_epochs", "5"]
    command += ["-o", "finetuning.policy.optimizer.learning_rate", "0.003"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert f"system    the student is not shown {len(system)} characters that all requests share" in result.output
    folder = tmp_path / ".reinforge" / "runs" / "small"
    assert load_summary(folder).non_inferiority.outcome == "not worse"
    sent = int(re.search(r"per 1,000 requests: ([\d,]+) \+ [\d,]+ tokens, \d+ s", result.output)[1].replace(",", ""))
    question = [{"role": "user", "content": asked[0]}]
    saved, own = (AutoTokenizer.from_pretrained(path) for path in (folder / "model", tiny_model_dir))
    render = partial(saved.apply_chat_template, tokenize=False, add_generation_prompt=True)
    assert render([{"role": "system", "content": system}, *question]) == render(question)
    assert render(question) == own.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert sent / 1000 < 2 + len(own(render(question))["input_ids"])
    refused = CliRunner().invoke(main, [*command, "--overwrite", "-o", "finetuning.policy.chat_template", "x"])
    assert "--drop_system sets finetuning.policy.chat_template, and so does -o" in refused.output
