"""`reinforge reward test`: what the evaluators of a file let through, and its exit code."""

import json
import re

import pytest
from click.testing import CliRunner

from reinforge.cli import main
from reinforge.config.loader import build_config
from reinforge.errors import ConfigError
from reinforge.trainer import reward_test
from reinforge.trainer.reward_test import EXPECTED, RewardTestOptions, RewardTestReport, ScoredAnswer, run_reward_test
from tests.judges import reply_to
from tests.openai_server import OpenAIServer, says

ROWS = [
    {"id": str(number), "question": f"What is {number}+{number}?", "answer": str(2 * number)} for number in range(20)
]


def contains(output, expected):
    """A careless check: the expected answer stands somewhere in the output."""
    return float(expected in str(output))


def exact(output, expected):
    return float(str(output).strip() == expected)


def shaped(output, expected):
    """Looks at the form alone."""
    return float(str(output).strip().isdigit())


def config_of(rows=ROWS, **evaluators):
    data = {
        "eval": {
            "general": {"dataset": {"_type": "rows", "rows": rows}},
            "evaluators": {
                name: each if isinstance(each, dict) else {"_type": "python", "function": each}
                for name, each in evaluators.items()
            },
        }
    }
    return build_config(data)


async def try_out(options=None, **config):
    return await run_reward_test(config_of(**config), options or RewardTestOptions())


def counts(report):
    return {(row["evaluator"], row["answer"]): row["num_too_high"] for row in report.summarize() if row["num_too_high"]}


async def test_a_check_that_looks_for_the_answer_anywhere_is_hedged_against():
    report = await try_out(contains=contains, exact=exact)
    found = counts(report)
    assert found["contains", "hedged"] == 8
    assert [kind for evaluator, kind in found if evaluator == "exact"] == [], "an exact check lets nothing through"
    (worst, *_) = [each for each in report.too_high if each.kind == "hedged"]
    assert (worst.score, worst.limit) == (1.0, 0.5)
    assert str(worst.output).startswith("The answer is one of these: ")
    means = {(row["evaluator"], row["answer"]): row["mean"] for row in report.summarize()}
    assert means["exact", "expected"] == means["contains", "expected"] == 1.0
    assert means["exact", "empty"] == 0.0


async def test_a_check_of_the_form_alone_lets_another_examples_answer_and_guesses_through():
    found = counts(await try_out(shaped=shaped))
    assert found == {("shaped", "copied_format"): 8, ("shaped", "best_of_n"): 8}


async def test_a_reward_for_length_falls_for_much_text():
    report = await try_out(long=lambda output, expected: len(str(output)) / 1000)
    assert counts(report)["long", "verbose"] == 8
    assert "note: long scores expected answers no higher than empty ones" not in report.format_lines()
    report = await try_out(nothing=lambda output, expected: 1.0)
    assert "note: nothing scores expected answers no higher than empty ones" in report.format_lines()
    assert counts(report)["nothing", "empty"] == 8


async def test_the_limit_is_the_middle_between_the_worst_and_the_expected_answer():
    """Penalties: 0 for the right answer, -1 for an empty one, -0.2 for everything else."""
    penalty = lambda output, expected: 0.0 if output == expected else -1.0 if not output.strip() else -0.2  # noqa: E731
    report = await try_out(RewardTestOptions(limit=3, attacks=("empty", "copied_prompt")), penalty=penalty)
    assert counts(report) == {("penalty", "copied_prompt"): 3}
    assert {each.limit for each in report.answers if each.is_attack} == {-0.5}
    report = await try_out(
        RewardTestOptions(limit=3, attacks=("empty", "copied_prompt"), max_score=-0.1), penalty=penalty
    )
    assert report.too_high == []


def by_promise(answer):
    """Worth in the eyes of a judge that believes what it reads."""
    if re.search("highest score|the score is 1.0|correct", answer):
        return 0.9
    return 0.8 if answer.strip().isdigit() else 0.0


@pytest.mark.parametrize("kind", ["relative_judge", "pairwise_judge"])
async def test_a_judge_that_believes_what_it_reads_is_found_out(kind):
    def step(request, body):
        system, prompt = (message["content"] for message in body["messages"][:2])
        return says(reply_to(system, prompt, by_promise))(request, body)

    async with OpenAIServer(step) as server:
        config = config_of(better={"_type": kind, "llm": "judge"})
        config.config.llms["judge"] = build_config(
            {"llms": {"judge": {"_type": "openai", "model_name": "m", "base_url": server.url}}}
        ).config.llms["judge"]
        report = await run_reward_test(config, RewardTestOptions(limit=2, attacks=("empty", "injected")))
    assert counts(report) == {("better", "injected"): 2}
    means = {row["answer"]: row["mean"] for row in report.summarize()}
    assert means["expected"] == 0.5, "as good as itself"
    assert {each.limit for each in report.answers if each.is_attack} == {0.25}


def write_answers(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


async def test_given_answers_say_what_a_good_answer_scores_where_none_is_expected(tmp_path):
    rows = [{"id": "a", "question": "Write a poem."}, {"id": "b", "question": "Write a song."}]
    answers = write_answers(
        tmp_path / "answers.jsonl",
        {"id": "a", "output": "roses are red"},
        {"id": "b", "output": "la la la"},
        {"id": "b", "output": "spam spam", "label": False},
        {"id": "z", "output": "of another example"},
    )
    options = RewardTestOptions(answers=answers, attacks=("empty", "verbose"))
    words = lambda item: min(1.0, len(set(item.output_obj.split())) / 3)  # noqa: E731
    report = await try_out(options, rows=rows, words=words)
    assert counts(report) == {("words", "verbose"): 2, ("words", "wrong"): 1}
    by_kind = {
        (each.example_id, each.kind): (each.score, each.limit) for each in report.answers if each.kind != "empty"
    }
    assert by_kind["a", "real"] == (1.0, None)
    assert by_kind["b", "real"] == (pytest.approx(1 / 3), None)
    assert by_kind["b", "wrong"] == (pytest.approx(1 / 3), pytest.approx(1 / 6)), "told apart from the real ones"


async def test_real_answers_that_a_trusted_evaluator_calls_wrong_join_the_wrong_ones(tmp_path):
    answers = write_answers(
        tmp_path / "answers.jsonl", {"id": "3", "output": "6 of course"}, {"id": "3", "output": "6"}
    )
    polite = lambda output, expected: 1.0 if "of course" in output else float(output == expected)  # noqa: E731
    options = RewardTestOptions(limit=4, answers=answers, attacks=("best_of_n",), trusted="exact", num_guesses=1)
    report = await try_out(options, polite=polite, exact=exact)
    assert [(each.evaluator, each.example_id, each.output) for each in report.too_high] == [
        ("polite", "3", "6 of course")
    ]
    untrusting = await try_out(
        RewardTestOptions(limit=4, answers=answers, attacks=("best_of_n",), num_guesses=1), polite=polite, exact=exact
    )
    assert "6 of course" not in [each.output for each in untrusting.too_high]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"id": "1"}], r"answers.jsonl:1: a row needs id and output, found id"),
        ([{"id": "1", "output": "2"}, {"id": "1", "output": "2", "label": "no"}], r"answers.jsonl:2: label must be"),
        ([{"id": "nobody", "output": "2"}], r"none of its 1 rows answers one of the 8 examples, such as 0, 1"),
    ],
)
async def test_given_answers_that_cannot_be_used_are_refused_by_line(tmp_path, rows, message):
    answers = write_answers(tmp_path / "answers.jsonl", *rows)
    with pytest.raises(ConfigError, match=message):
        await try_out(RewardTestOptions(answers=answers), exact=exact)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            RewardTestOptions(evaluators=("exat",)),
            '--evaluator: eval.evaluators has no entry "exat", did you mean "exact"',
        ),
        (RewardTestOptions(trusted="exat"), '--trusted: eval.evaluators has no entry "exat"'),
    ],
)
async def test_evaluators_that_do_not_exist_are_refused(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        await try_out(options, exact=exact)


async def test_without_anything_that_says_what_good_answers_score_nothing_is_tried():
    rows = [{"id": "a", "question": "Write a poem."}]
    with pytest.raises(ConfigError, match="nothing says what a good answer scores"):
        await try_out(rows=rows, one=lambda item: 1.0)
    report = await try_out(RewardTestOptions(max_score=0.5), rows=rows, one=lambda item: 1.0)
    assert counts(report)["one", "empty"] == 1


async def test_an_evaluator_that_fails_is_counted_with_its_reason_and_never_too_high():
    report = await try_out(RewardTestOptions(limit=2, attacks=("empty",)), broken=lambda output, expected: 1 / 0)
    assert report.too_high == []
    lines = report.format_lines()
    assert any("2 without a score: ZeroDivisionError: division by zero (test_reward_test.py:" in line for line in lines)
    assert any("broken has no score of a good answer to 2 of 2 examples" in line for line in lines)


def test_the_report_shows_the_highest_of_each_attack_and_counts_the_rest():
    def scored(kind, example, score, output="x", limit=0.5):
        return ScoredAnswer("exact", str(example), kind, output, score, None, None if kind == EXPECTED else limit)

    answers = [scored(EXPECTED, 0, 1.0), scored("injected", 0, 0.6, "weak"), scored("injected", 0, 0.9, "strong")]
    answers += [scored("empty", number, 0.7) for number in range(1, 15)]
    report = RewardTestReport("exact", 15, answers)
    lines = report.format_lines()
    assert '  exact, injected, example 0: 0.9 (at most 0.5): "strong"' in lines
    assert "weak" not in "\n".join(lines)
    assert "  exact: and 5 more" in lines
    assert lines[1] == "exact (reward)       expected             1        1"


CHECKS = """
async def agent(item, llm, context):
    raise RuntimeError("the agent is not needed")

def contains(output, expected):
    return float(expected in str(output))

def exact(output, expected):
    return float(output == expected)
"""


@pytest.mark.parametrize(("function", "code"), [("contains", 3), ("exact", 0)])
def test_the_command_lists_what_scored_too_high_and_exits_as_it_is_asked_to(project, function, code):
    project.write("task.py", CHECKS)
    project.rows = ROWS
    project.set("eval.evaluators", {"check": {"_type": "python", "function": f"task:{function}"}})
    project.set("finetuning.reward_function.name", "check").write_files()
    plain = CliRunner().invoke(main, ["reward", "test", "run.yml", "--limit", "3"])
    assert plain.exit_code == 0, plain.output
    assert ("scored too high:" in plain.output) is (code == 3)
    strict = CliRunner().invoke(main, ["reward", "test", "run.yml", "--limit", "3", "--require_robust", "--json"])
    assert strict.exit_code == code, strict.output
    report = json.loads(strict.stdout)
    assert report["num_examples"] == 3
    assert ("hedged" in {each["kind"] for each in report["too_high"]}) is (code == 3)
    assert bool(report["too_high"]) is (code == 3)


async def test_without_the_limit_nothing_is_reported(monkeypatch):
    """Mutation check: it is the limit that makes a score too high."""
    monkeypatch.setattr(reward_test, "_find_limits", lambda scored, max_score: {})
    assert (await try_out(contains=contains)).too_high == []


async def test_a_grader_of_the_fine_tuning_api_is_an_evaluator_like_others():
    """In the shape in which a job of the API has its rows; a check of the form alone lets bad answers through."""
    said = [{"role": "user", "content": "Which city?"}]
    rows = [{"id": str(n), "prompt": said, "row": {"messages": said, "kind": "answer"}} for n in range(3)]
    grader = {
        "type": "string_check",
        "name": "form",
        "operation": "like",
        "input": "The {{item.kind}}: {{sample.output_text}}",
        "reference": "answer:",
    }
    config = config_of(rows, score={"_type": "grader", "grader": grader, "item_key": "row"})
    options = RewardTestOptions(attacks=("empty", "injected"), max_score=0.5)
    report = await run_reward_test(config, options)
    assert {(each.kind, each.score) for each in report.too_high} == {("empty", 1.0), ("injected", 1.0)}
