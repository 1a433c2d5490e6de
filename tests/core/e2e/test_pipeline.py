"""Distillation and pipelines from the command line: several stages, one run folder, one verdict."""

import json
import re
from pathlib import Path

import pytest
import yaml
from aiohttp import web

from reinforge.config.policy import PolicyConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.rollout.models.local_llm import LocalLLM
from tests.loop_thread import serve_in_thread
from tests.models import make_tiny_model
from tests.openai_server import OpenAIServer
from tests.project import Project, call, leave_out_plots_and_pages

ROOT = Path(__file__).parents[3]
SFT = {"num_epochs": 2, "algorithm": {"_type": "sft"}, "trajectory_builder": "rows", "dataset": "shown.jsonl"}
DISTILL = {"algorithm": {"_type": "distill", "teacher": "teacher"}}
LETTERS = "abcdefgh"
GRPO = {"algorithm": {"_type": "grpo"}, "policy": {"optimizer": {"learning_rate": 0.001}}}


def write_rows(project, name, rows):
    project.write(name, "".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def staged(project):
    """A project with demonstrations of vowels, on examples that the run does not have."""
    project.set("trajectory_builders.rows", {"_type": "dataset"})
    project.set("trajectory_builders.builder.examples_per_epoch", 4)
    project.set("finetuning.policy.schedule", {"warmup_steps": 0})
    write_rows(project, "shown.jsonl", [{"prompt": f"tell {n}", "completion": "aeiou"} for n in range(24)])
    return project


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, tiny_model_dir):
    """The tiny model after supervised training on vowels: the model/ of a run of its own."""
    folder = tmp_path_factory.mktemp("teacher")
    project = Project(folder, tiny_model_dir)
    write_rows(project, "shown.jsonl", [{"prompt": f"say {n}", "completion": "aeiou"} for n in range(64)])
    project.set("trajectory_builders.builder", {"_type": "dataset"}).set("finetuning.algorithm", {"_type": "sft"})
    project.set("eval.general.dataset", {"_type": "jsonl", "file_path": "shown.jsonl"})
    project.set("finetuning.policy.optimizer.learning_rate", 0.01).set("finetuning.num_epochs", 4)
    with pytest.MonkeyPatch.context() as patch:
        leave_out_plots_and_pages(patch)
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        result = project.finetune("--require_improvement")
    assert result.exit_code == 0, result.output
    return project.run / "model"


@pytest.mark.parametrize("kind", ["rows", "jsonl"])
def test_replies_of_a_stage_need_not_look_like_the_examples_of_the_run(staged, kind):
    """Those are rows in the configuration, or have columns of their own."""
    rows = [{"id": str(n), "q": f"say {n}", "a": "a"} for n in range(64)]
    columns = {"question_key": "q", "answer_key": "a"}
    source = {"rows": rows} if kind == "rows" else {"file_path": "asked.jsonl"}
    write_rows(staged, "asked.jsonl", rows)
    staged.set("eval.general.dataset", {"_type": kind, **source, **columns})
    staged.set("finetuning.pipeline", {"sft": SFT, "grpo": GRPO}).set("finetuning.num_epochs", 3).save()
    shown = call("check", "run.yml", code=0).output
    assert "24 rows of shown.jsonl" in shown


def test_three_stages_are_one_run_with_one_verdict(staged, teacher, pages):
    staged.set("llms.teacher", {"_type": "local", "model": str(teacher)})
    staged.set(
        "finetuning.pipeline", {"sft": {**SFT, "num_epochs": 1}, "distill": {"num_epochs": 2, **DISTILL}, "grpo": GRPO}
    )
    staged.set("trajectory_builders.builder.examples_per_epoch", 16)
    del staged.settings["finetuning"]["num_epochs"]
    result = staged.finetune("--require_improvement", code=0)
    rows, summary = staged.history, staged.summary
    assert [row["stage"] for row in rows] == ["sft", "distill", "distill", "grpo"]
    assert not any("repeats" in text for text in summary["warnings"]), "a stage's own examples are no held-out ones"
    assert [row["avg_reward"] is None for row in rows] == [True, False, False, False], "demonstrations have no rewards"
    assert rows[3]["lr"] == 0.001
    assert rows[1]["teacher_kl"] > rows[2]["teacher_kl"] > 0
    validated = json.loads((staged.run / "validation_history.json").read_text())
    assert [row["epoch"] for row in validated] == [-1, 0, 2, 3], "each stage ends with a validation"
    assert summary["stages"] == {"sft": 1, "distill": 2, "grpo": 1}
    assert summary["confirm_base"]["mean"] < 0.5 < summary["confirm_tuned"]["mean"]
    for text in ("stage sft (1/3): epoch 0", "stage distill (2/3): epochs 1 to 2", "stage grpo (3/3): epoch 3"):
        assert text in result.output
    assert "sft (1 epoch), distill (2 epochs), grpo (1 epoch)" in call("runs", "show", str(staged.run)).output
    assert "epoch 1 (distill): collected" in call("runs", "show", str(staged.run)).output
    assert "sft (1 epoch), distill (2 epochs)" in (staged.run / "report.html").read_text()
    report = (staged.run / "report.md").read_text()
    assert "| 2 | distill |" in report
    assert "| base |  |" in report


@pytest.mark.parametrize("start", ["best", pytest.param("last", marks=pytest.mark.slow)])
def test_a_stage_may_start_from_the_best_weights_so_far(staged, start):
    """Demonstrations of consonants make the model worse; a stage that starts from the best one has it as it was."""
    write_rows(staged, "shown.jsonl", [{"prompt": f"tell {n}", "completion": "bcdfg"} for n in range(24)])
    staged.set("finetuning.policy.optimizer", {"learning_rate": 0.01}).set("finetuning.num_epochs", 3)
    staged.set("finetuning.pipeline", {"sft": SFT, "grpo": {**GRPO, "start_from": start}})
    output = " ".join(staged.finetune(code=0).output.split())
    base, worse, _ = (row["avg_reward"] for row in json.loads((staged.run / "validation_history.json").read_text()))
    assert worse < base
    versions = [(each["num_updates"], each["fingerprint"]) for each in staged.summary["policy_versions"]]
    updates, fingerprints = zip(*versions, strict=True)
    told = "training continues from the weights of the untouched model, which are the best so far on select"
    assert (told in output) == (start == "best")
    if start == "best":
        assert (updates[3], fingerprints[3]) == (0, fingerprints[0])
    assert len(set(fingerprints)) == 4, "the base, two of the first stage, one of the second"


@pytest.mark.slow
def test_a_pipeline_that_reaches_a_limit_ends_with_its_verdict(staged):
    """It is about the best checkpoint of all stages, whichever of them the limit ended."""
    staged.set("finetuning.pipeline", {"sft": SFT, "grpo": {"num_epochs": 9, **GRPO}}).set("finetuning.num_epochs", 11)
    staged.set("finetuning.limits.max_tokens", 1200)
    result = staged.finetune()
    assert "limits.max_tokens reached" in result.output
    assert len(staged.history) < 11
    assert staged.summary["promoted"] is True, staged.summary["reason"]


class ScoringEndpoint(OpenAIServer):
    def __init__(self, folder, limit=10**6):
        super().__init__(self.score)
        self.model = LocalLLM(PolicyConfig(model=str(folder)), FinetuneConfig(device="cpu"))
        self.num_scored, self.limit = 0, limit

    async def score(self, request, body):
        if self.num_scored >= self.limit:
            return web.Response(status=503, text="down")
        self.num_scored += 1
        [logprobs] = await self.model.score([body["prompt"]])
        tokenizer = (await self.model._load_engine()).tokenizer
        names = [tokenizer.decode([token]) for token in body["prompt"]]
        found = {"tokens": [*names, "!"], "token_logprobs": [None, *map(float, logprobs[1:]), -1.0]}
        return web.json_response({"choices": [{"logprobs": found}]})

    async def __aexit__(self, *exc_info):
        await super().__aexit__(*exc_info)
        await self.model.close()


@pytest.mark.slow
def test_an_endpoint_that_goes_down_ends_the_run_which_resumes_with_the_same_episodes(staged, teacher):
    staged.set("finetuning.algorithm", DISTILL["algorithm"]).set("finetuning.num_epochs", 1)
    with serve_in_thread(ScoringEndpoint(teacher, limit=1)) as endpoint:
        known = {"_type": "openai", "model_name": "big", "base_url": endpoint.url, "max_retries": 0}
        staged.set("llms.teacher", known)
        result = staged.finetune(code=4)
        assert f"teacher: {endpoint.url}" in result.output, "the settings say where the tokens go"
        assert "--resume" in result.output
        collected, endpoint.limit = staged.summary["episodes"], 10**6
        call("finetune", "--resume", str(staged.run), code=0)
    assert [row["num_updates"] for row in staged.history] == [4]
    assert collected["ok"] == 10 + 32, "the baseline and the epoch, which does not run again"


def test_a_teacher_that_is_down_stops_the_run_before_it_collects(staged, teacher):
    staged.set("finetuning.algorithm", DISTILL["algorithm"])
    with serve_in_thread(ScoringEndpoint(teacher, limit=0)) as endpoint:
        known = {"_type": "openai", "model_name": "big", "base_url": endpoint.url, "max_retries": 0}
        result = staged.set("llms.teacher", known).finetune()
    assert result.exit_code == 4, result.output
    assert staged.summary["episodes"] == {}


def test_a_teacher_with_another_tokenizer_is_refused_before_work_starts(staged, tmp_path):
    other = make_tiny_model(tmp_path / "other", vocab_size=300)
    staged.set("llms.teacher", {"_type": "local", "model": str(other)}).set(
        "finetuning.pipeline", {"sft": SFT, "distill": DISTILL}
    )
    staged.set("finetuning.num_epochs", 3).write_files()
    result = call("check", "run.yml", code=2)
    line = 1 + [text.strip() for text in (staged.folder / "run.yml").read_text().splitlines()].index("teacher: teacher")
    assert f"run.yml:{line}:" in result.output
    assert (
        f"finetuning.pipeline.distill.algorithm.teacher: the teacher {other} has a different tokenizer" in result.output
    )


def test_all_stages_are_validated_before_work_starts(staged):
    stages = {
        "sft": {**SFT, "algorithm": {"_type": "sft", "min_reward": 0.5}},
        "more": {**SFT, "dataset": "gone.jsonl"},
        "grpo": {**GRPO, "trajectory_builder": "single"},
        "distill": DISTILL,
    }
    staged.set("finetuning.pipeline", stages).set(
        "trajectory_builders.single", {"_type": "group", "num_generations": 1}
    )
    del staged.settings["finetuning"]["num_epochs"]
    staged.write_files()
    result = call("check", "run.yml", "--json")
    found = {each["path"]: each for each in json.loads(result.output)["problems"]}
    assert set(found) == {
        "finetuning.pipeline.sft.algorithm.min_reward",
        "finetuning.pipeline.more.dataset",
        "trajectory_builders.single.num_generations",
        "finetuning.pipeline.distill.algorithm.teacher",
    }
    assert all(each["location"].startswith("run.yml:") for each in found.values()), found
    assert found["trajectory_builders.single.num_generations"]["message"].startswith("in stage grpo: ")
    refused = staged.finetune()
    assert (refused.exit_code, staged.run.exists()) == (2, False)


def test_the_settings_of_each_stage_are_shown_and_written(staged):
    staged.set("finetuning.pipeline", {"sft": SFT, "grpo": {"num_epochs": 3, **GRPO}})
    staged.write_files()
    shown = call("check", "run.yml", code=0)
    assert "epochs 0 to 1; SFT: defaults; dataset: defaults; 24 rows of shown.jsonl" in shown.output
    assert "epochs 2 to 4; GRPO: defaults; group: examples_per_epoch 4" in shown.output
    assert "optimizer grpo adamw, lr 0.001, constant, 4 steps per job" in " ".join(shown.output.split())
    call("finetune", "run.yml", "--run_name", "r", "--dry_run", code=0)
    written = yaml.safe_load((staged.folder / "runs/r-dry/config.yml").read_text())["finetuning"]
    assert written["num_epochs"] == 5
    assert written["pipeline"]["grpo"]["policy"]["optimizer"]["name"] == "adamw"


@pytest.mark.slow
def test_demonstrations_of_held_out_examples_are_left_out(staged):
    """A file with a demonstration of every example of the run: those of `select` and `confirm` are not trained on."""
    chats = [[{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "aeiou"}] for n in range(64)]
    write_rows(staged, "shown.jsonl", [{"messages": messages} for messages in chats])
    staged.set("finetuning.pipeline", {"sft": {**SFT, "num_epochs": 1}}).set("finetuning.num_epochs", 1).write_files()
    report = json.loads(call("check", "run.yml", "--json").output)
    assert report["examples"]["train (sft)"] == report["examples"]["train"] == 38
    staged.finetune(code=0)
    assert staged.history[0]["num_trajectories"] == 38


@pytest.mark.parametrize(("near_duplicates", "exit_code"), [("allow", 0), ("refuse", 2)])
def test_near_duplicates_in_a_stages_examples_are_refused(staged, near_duplicates, exit_code):
    questions = [" ".join(f"{first}{second}{third}" for third in LETTERS) for first in LETTERS for second in LETTERS]
    staged.rows = [{**row, "question": text} for row, text in zip(staged.rows, questions, strict=True)]
    write_rows(staged, "shown.jsonl", [{"prompt": f"{text} now", "completion": "aeiou"} for text in questions])
    staged.set("finetuning.pipeline", {"sft": SFT}).set("finetuning.num_epochs", 2)
    staged.set("finetuning.splits", {"near_duplicates": near_duplicates, "near_duplicate_similarity": 0.7})
    staged.write_files()
    result = call("check", "run.yml")
    assert result.exit_code == exit_code, result.output
    assert ("held-out examples repeat a training example" in result.output) == (exit_code == 2)


@pytest.mark.slow
def test_a_smoke_test_runs_every_stage(staged):
    staged.set("finetuning.pipeline", {"sft": SFT, "grpo": {"num_epochs": 3, **GRPO}})
    staged.finetune("--smoke", code=0)
    rows = json.loads((staged.folder / "runs/r-smoke/reward_history.json").read_text())
    assert [(row["stage"], row["num_updates"]) for row in rows] == [("sft", 1), ("grpo", 1)]


@pytest.mark.slow
def test_the_last_stage_can_be_extended_and_no_other(staged):
    staged.set("finetuning.pipeline", {"sft": SFT, "grpo": {"num_epochs": 1, **GRPO}}).set("finetuning.num_epochs", 3)
    staged.finetune(code=0)
    resume = ("finetune", "--resume", "runs/r", "-o")
    refused = call(*resume, "finetuning.pipeline.sft.num_epochs", "3", code=2)
    assert "finetuning.pipeline.sft.num_epochs: 2 -> 3" in refused.output
    call(*resume, "finetuning.pipeline.grpo.num_epochs", "2", code=0)
    assert [row["stage"] for row in staged.history] == ["sft", "sft", "grpo", "grpo"]
    assert staged.summary["stages"] == {"sft": 2, "grpo": 2}


@pytest.mark.slow
def test_stages_in_another_order_are_a_change(staged):
    """They compare equal key by key, but each epoch would belong to another stage."""
    stages = {"sft": {**SFT, "num_epochs": 1}, "grpo": {"num_epochs": 1, **GRPO}}
    staged.set("finetuning.pipeline", stages).set("finetuning.num_epochs", 2).set(
        "finetuning.limits", {"max_tokens": 1}
    )
    assert staged.finetune().exit_code != 0, "the run stops at its limit"
    staged.set("finetuning.pipeline", {name: stages[name] for name in ("grpo", "sft")})
    staged.save()
    refused = call("finetune", "run.yml", "--resume", "runs/r", code=2)
    assert "the order of finetuning.pipeline: sft, grpo -> grpo, sft" in refused.output


@pytest.mark.parametrize("part", ["whole", "answers"])
def test_the_file_of_the_docs_is_valid_with_models_of_this_machine(project, tiny_model_dir, part):
    """The page's own YAML, its agent and data as the project has them."""
    text = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8")
    settings, answers = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", text, re.DOTALL))
    if part == "answers":
        settings["trajectory_builders"] = answers["trajectory_builders"]
        settings["finetuning"] |= answers["finetuning"]
    settings["llms"]["teacher"]["model"] = settings["finetuning"]["policy"]["model"] = str(tiny_model_dir)
    project.write("task.py", (project.folder / "task.py").read_text().replace("vowels", "right"))
    project.write("run.yml", yaml.safe_dump(settings, sort_keys=False))
    write_rows(project, "questions.jsonl", project.rows)
    write_rows(project, "demonstrations.jsonl", [{"prompt": f"tell {n}", "completion": "aeiou"} for n in range(8)])
    result = call("check", "run.yml", code=0)
    shown = {"whole": "epochs 2 to 6; Distill: teacher teacher", "answers": "epochs 0 to 2; SFT: defaults; answers"}
    assert shown[part] in result.output


def test_a_pipeline_needs_a_trainer_and_an_adapter_that_know_stages(staged):
    staged.set("finetuning.pipeline", {"sft": SFT, "grpo": GRPO}).set("finetuning.num_epochs", 3)
    staged.set("trainer_adapters.adapter", {"_type": "openai", "base_url": "http://127.0.0.1:1/v1"}).write_files()
    paths = [each["path"] for each in json.loads(call("check", "run.yml", "--json").output)["problems"]]
    assert "finetuning.pipeline" in paths
