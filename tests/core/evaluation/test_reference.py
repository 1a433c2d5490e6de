"""A verdict against a reference: the recorded replies of the rows, or another model, in whole runs without torch."""

import json

import pytest

from reinforge.config.loader import build_config
from reinforge.errors import ConfigError
from reinforge.evaluation.non_inferiority import NonInferiority
from reinforge.evaluation.reference import decide_promotion, read_recorded_reply
from reinforge.runs.summary import load_summary
from reinforge.trainer.evaluate import EvaluationOptions, evaluate
from reinforge.trainer.gate import Guard
from reinforge.types.evaluation import EvalInputItem
from tests.doubles import RecordingAdapter, ScriptedPolicy
from tests.openai_server import OpenAIServer, fails, says
from tests.scripted_run import ScriptedRun


class SavingAdapter(RecordingAdapter):
    """Saves which weights it serves: 0 for those before training."""

    trained = 0

    async def save(self, folder, version):
        folder.mkdir()
        (folder / "weights.json").write_text(str(self.server.version))
        return True

    async def restore(self, folder, version):
        self.trained = int((folder / "weights.json").read_text())
        await self.server.publish(version)
        return True


class ForgetfulAdapter(SavingAdapter):
    async def save(self, folder, version):
        return False


def is_right(output, expected):
    return float(output == expected)


async def ask(item, llm, context):
    question = item.input_obj[-1]["content"]
    reply = await llm.chat.completions.create(messages=[{"role": "user", "content": question}])
    return reply.choices[0].message.content


CONFIRM = 120


class Replacement(ScriptedRun):
    """200 rows whose recorded reply is right but for one in `teacher_fails`; the trained model fails at one in
    `student_fails`, and the untrained one at every second."""

    def __init__(self, folder, *, teacher_fails=50, student_fails=50, **gate):
        super().__init__(folder, workflow=ask, reward=is_right)
        self.student_fails = student_fails
        self.adapter = SavingAdapter(ScriptedPolicy(self.answer))
        rows = [
            {
                "messages": [
                    {"role": "user", "content": f"q{n}"},
                    {"role": "assistant", "content": "no" if n % teacher_fails == 0 else "yes"},
                ],
                "gold": "yes",
                "tags": ["late"] if n >= 160 else ["early"],
            }
            for n in range(200)
        ]
        self.settings["eval"]["general"]["dataset"] = {"_type": "rows", "rows": rows, "answer_key": "gold"}
        self.settings["finetuning"] |= {"num_epochs": 1, "splits": {"confirm": CONFIRM, "select": 20}, "gate": gate}
        self.settings["trajectory_builders"]["builder"]["examples_per_epoch"] = 4

    def answer(self, request):
        number = int(request.messages[-1]["content"][1:])
        is_trained = self.adapter.server.version > 0 if self.adapter.trained == 0 else True
        if not is_trained:
            return "yes" if request.sampling.seed % 2 else "no"
        return "no" if (number + 7) % self.student_fails == 0 else "yes"


@pytest.mark.slow
async def test_a_student_that_is_as_good_as_the_logs_is_promoted(tmp_path, pages):
    summary = await Replacement(tmp_path, reference="logs", margin=0.1).run()
    found = summary.non_inferiority
    assert (found.outcome, found.margin, found.num_pairs) == ("not worse", 0.1, CONFIRM)
    assert summary.promoted is True
    assert summary.reason == str(found)
    assert summary.reason.startswith("not worse than the logs by more than 0.1 (difference ")
    assert summary.headline() == "is not worse than the logs"
    assert {"tag early", "tag late"} <= set(found.slices)
    assert load_summary(tmp_path / "r").non_inferiority == found
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["non_inferiority"]["outcome"] == "not worse"
    for name in ("report.md", "report.html"):
        assert "not worse than the logs by more than 0.1" in (tmp_path / "r" / name).read_text()
    assert (tmp_path / "r" / "model").is_dir()


async def test_a_student_that_is_worse_is_not_promoted_although_it_improved(tmp_path):
    summary = await Replacement(tmp_path, reference="logs", student_fails=4).run()
    assert summary.improvement.ci_low > 0
    assert (summary.promoted, summary.non_inferiority.outcome) == (False, "worse")
    assert summary.non_inferiority.margin == 0.02, "the default"
    assert summary.headline() == "is worse than the logs (read the warning)"
    assert any(text.startswith("tag early: worse than the logs by more than 0.02") for text in summary.warnings)
    assert not (tmp_path / "r" / "model").exists()


async def test_too_few_examples_to_decide_say_how_many_more(tmp_path):
    summary = await Replacement(tmp_path, reference="logs", margin=0.01).run()
    assert (summary.promoted, summary.non_inferiority.outcome) == (False, "not decided")
    assert summary.headline() == "may be worse than the logs: too few examples to decide"
    (why,) = summary.explanations
    assert why.reason == "too few confirm examples"
    needed = CONFIRM + summary.non_inferiority.num_more
    assert why.fix == f"start a run with finetuning.splits.confirm: {needed} and more rows"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("teacher_fails", "difference", "outcome", "headline"),
    [
        (2, 0.0, "not worse", "is not worse than the logs"),
        (1000, -0.5, "worse", "is worse than the logs (read the warning)"),
    ],
)
@pytest.mark.usefixtures("pages")
async def test_where_no_checkpoint_is_better_the_base_is_compared(
    tmp_path, teacher_fails, difference, outcome, headline
):
    """The base is right at every second question, the trained model at none, the logs at every second or at all."""
    run = Replacement(tmp_path, reference="logs", margin=0.2, teacher_fails=teacher_fails, student_fails=1)
    summary = await run.run()
    found, folder = summary.non_inferiority, tmp_path / "r"
    assert (summary.promoted, found.outcome, found.num_pairs) == (False, outcome, CONFIRM)
    assert found.difference == pytest.approx(difference, abs=0.1)
    assert summary.confirm_tuned is None
    assert summary.confirm_base.mean == pytest.approx(0.5, abs=0.1)
    lack = "no checkpoint beat the base model on the select examples, so the base model stays"
    assert summary.reason == f"{lack}; the untouched base model: {found}"
    assert summary.headline() == f"did not improve the agent; the untouched base model {headline}"
    for name in ("report.md", "report.html"):
        assert f"the untouched base model: {outcome} than the logs by more than 0.2" in (folder / name).read_text()
    assert load_summary(folder).headline() == summary.headline()
    assert not (folder / "model").exists()


async def test_a_base_that_cannot_be_restored_is_not_compared(tmp_path):
    run = Replacement(tmp_path, reference="logs", student_fails=1)
    run.adapter = ForgetfulAdapter(ScriptedPolicy(run.answer))
    summary = await run.run()
    assert summary.reason.endswith(
        "the untouched base model: not compared with logs, since the backend does not save its weights"
    )
    assert summary.non_inferiority is None


@pytest.mark.slow
async def test_another_model_answers_the_confirm_examples_once(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    async with OpenAIServer(says("yes")) as server:
        run = Replacement(tmp_path, reference="llms.teacher", student_fails=1000, margin=0.1)
        run.settings["finetuning"]["splits"]["confirm"] = 40
        run.settings["llms"]["teacher"] = {"_type": "openai", "model_name": "large", "base_url": server.url}
        run.settings["workflow"]["llm"] = "agent"
        summary = await run.run()
        assert len(server.bodies) == 40
        assert summary.reason.startswith("not worse than llms.teacher by more than 0.1 (difference +0.000 ")
        assert summary.promoted is True
        assert "not worse than llms.teacher needs one above -0.1" in (tmp_path / "r" / "run.log").read_text()
        run.settings["finetuning"]["num_epochs"] = 2
        assert (await run.run(resume=tmp_path / "r")).non_inferiority.outcome == "not worse"
        assert len(server.bodies) == 40, "a run that resumes asks for none of them twice"
        run.settings["finetuning"] |= {"num_epochs": 3, "gate": {"reference": "llms.teacher", "margin": 0.2}}
        with pytest.raises(ConfigError, match="finetuning.gate.margin: 0.1 -> 0.2"):
            await run.run(resume=tmp_path / "r")


@pytest.mark.slow
@pytest.mark.usefixtures("_no_backoff")
async def test_a_reference_that_fails_gives_no_verdict(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    async with OpenAIServer(fails(400)) as server:
        run = Replacement(tmp_path, reference="llms.teacher")
        run.settings["finetuning"]["splits"]["confirm"] = 40
        run.settings["llms"]["teacher"] = {"_type": "openai", "model_name": "large", "base_url": server.url}
        run.settings["workflow"]["llm"] = "agent"
        summary = await run.run()
    assert summary.promoted is None
    assert summary.reason.startswith("the evaluation of the reference model failed: 40 of 40 episodes have no score")


async def test_an_evaluation_compares_with_the_reference_too(tmp_path):
    run = Replacement(tmp_path, reference="logs", margin=0.1)
    run.adapter.trained, registry = 1, run.registry()
    loaded = build_config(run.settings, registry=registry)
    found = await evaluate(loaded, EvaluationOptions(split="confirm", with_reference=True), registry)
    assert found.non_inferiority.outcome == "not worse"
    assert any(line.startswith("reference not worse than the logs by more than 0.1") for line in found.format_lines())
    assert found.as_dict()["non_inferiority"]["margin"] == 0.1
    plain = await evaluate(loaded, EvaluationOptions(split="confirm"), registry)
    assert plain.non_inferiority is None
    assert "non_inferiority" not in plain.as_dict()


@pytest.mark.parametrize(
    ("gate", "said"),
    [
        ({"reference": "llms.techer"}, 'expected logs or an entry of llms that is not the policy, found "llms.techer"'),
        ({"reference": "llms.agent"}, "use logs"),
        ({"reference": "logs", "margin": 0.0}, "margin must be above 0 with a reference"),
    ],
)
async def test_a_wrong_reference_is_refused(tmp_path, gate, said):
    with pytest.raises(ConfigError, match=said):
        await Replacement(tmp_path, **gate).run()


async def test_rows_without_a_recorded_reply_are_refused(tmp_path):
    run = Replacement(tmp_path, reference="logs")
    del run.settings["eval"]["general"]["dataset"]
    rows = [{"id": n, "question": [{"role": "user", "content": f"q{n}"}]} for n in range(200)]
    run.settings["eval"]["general"]["dataset"] = {"_type": "rows", "rows": rows}
    with pytest.raises(ConfigError, match="120 of 120 confirm examples record no reply, such as "):
        await run.run()


@pytest.mark.parametrize(
    ("outcome", "passed", "promoted"),
    [("not worse", True, True), ("not worse", False, False), ("not worse", None, None), ("worse", True, False)],
)
def test_the_guards_must_hold_too(outcome, passed, promoted):
    found = NonInferiority(outcome, 0.02, 0.0, -0.01, 0.01, 500, 500, None, 0.95, "", "the logs")
    decided, reason = decide_promotion(found, [Guard("legal", 0.1, None, passed, "guard metric legal dropped")])
    assert decided is promoted
    assert reason.startswith(f"{outcome} than the logs by more than 0.02 (")
    assert reason.endswith("; but guard metric legal dropped") == (outcome == "not worse" and not passed)


@pytest.mark.parametrize(
    ("row", "reply"),
    [
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "answer": "b"}, "a"),
        ({"messages": [{"role": "user", "content": "q"}]}, "expected"),
        ({"prompt": "q", "completion": "c", "label": False}, "c"),
        ({"messages": [call := {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]}, [call]),
        ("text", "expected"),
    ],
)
def test_the_recorded_reply_of_a_row(row, reply):
    item = EvalInputItem(id="1", input_obj="q", expected_output_obj="expected", full_dataset_entry=row)
    assert read_recorded_reply(item) == reply
