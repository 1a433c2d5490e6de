"""The fine-tuning API trains for real: through the trainer adapter for hosted services, and the official client."""

import json
import time

import openai
import pytest

from reinforge.config.policy import PolicyConfig
from reinforge.protocols.openai.server.api import FineTuningSettings
from reinforge.protocols.openai.server.plan import JobSettings
from tests.protocols.fine_tuning import FineTuningServer, ThreadedServer, ThreadLauncher, supervised_rows, to_jsonl
from tests.protocols.hosted import use_openai_adapter

BASE = "gpt-test"
WORDS = ("xy", "ae", "bc", "ou", "ba", "rs")


@pytest.fixture
def start(tmp_path, tiny_model_dir):
    """Returns a function that makes a server over the tiny model; `launcher=None` runs jobs in processes."""

    def make(**arguments):
        settings = FineTuningSettings(tmp_path / "data", JobSettings(device="cpu", poll_s=0.1, max_reply_tokens=6))
        policy = PolicyConfig(model=str(tiny_model_dir), lora={"r": 8})
        arguments.setdefault("launcher", ThreadLauncher())
        return ThreadedServer(lambda: FineTuningServer(tmp_path, {BASE: policy}, settings=settings, **arguments))

    return make


@pytest.mark.slow
def test_the_trainer_adapter_for_hosted_services_trains_here_with_nothing_changed(project, start, monkeypatch):
    """The adapter that trains at OpenAI: its files, jobs, polls, cancellations and chats all go to this server."""
    monkeypatch.setenv("STANDIN_KEY", ThreadedServer.key)
    with start() as service, make_client(service) as client:
        rows = [row for word in WORDS for row in supervised_rows(4, word)]  # short answers that end, good and bad ones
        file = client.files.create(file=("words.jsonl", to_jsonl(rows)), purpose="fine-tune")
        hyperparameters = {"n_epochs": 24, "batch_size": 6, "learning_rate_multiplier": 8}
        method = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
        base = wait(client, client.fine_tuning.jobs.create(model=BASE, training_file=file.id, method=method, seed=1).id)
        settings = {"base_model": base.fine_tuned_model, "min_examples": 5, "timeout_s": 60.0, "ready_s": 60.0}
        use_openai_adapter(project, service, n_epochs=4, batch_size=4, **settings)
        project.set("finetuning.algorithm", {"_type": "rejection_sampling"})
        project.set("finetuning.num_epochs", 2)
        result = project.finetune()
        assert result.exit_code == 0, result.output
        second, first, _ = service.server.api.store.list_jobs(None, 9)[0]
        assert first.model == base.fine_tuned_model
        assert second.model == first.fine_tuned_model, "the second job goes on from the first"
        assert first.fine_tuned_model.startswith(f"ft:{BASE}:reinforge::")
        assert first.metadata["reinforge_run"] == "r"
        summary = project.summary
        assert [row["version"] for row in summary["policy_versions"]] == [0, 1, 2]
        assert summary["tokens"]["trained"] == first.trained_tokens + second.trained_tokens
        assert summary["final"]["mean"] > summary["baseline"]["mean"]
        if summary["promoted"]:
            promoted = json.loads((project.run / "model" / "openai_model.json").read_text())
            assert promoted["model"] in service.server.served.names


def make_client(service):
    plain = openai.DefaultHttpxClient(verify=False)
    return openai.OpenAI(base_url=service.url, api_key=service.key, max_retries=2, http_client=plain)


def wait(client, job_id):
    while (job := client.fine_tuning.jobs.retrieve(job_id)).status in ("validating_files", "queued", "running"):
        time.sleep(0.1)
    return job


def make_pair(question):
    asked = [{"role": "user", "name": "expert", "content": question}, {"role": "system", "content": "the last round"}]
    return {
        "input": {"messages": asked},
        "preferred_output": [{"role": "assistant", "content": "aeiou"}],
        "non_preferred_output": [{"role": "assistant", "content": "xyz"}],
    }


@pytest.mark.slow
def test_a_job_of_preferences(start):
    """DPO prefers what the rows prefer, and the model answers chats; as the trainers of nip ask for it."""
    with start() as service, make_client(service) as client:
        pairs = [make_pair(f"q{number}") for number in range(12)]
        pairs.append({**pairs[0], "non_preferred_output": pairs[0]["preferred_output"]})
        file = client.files.create(file=("pairs.jsonl", to_jsonl(pairs)), purpose="fine-tune")
        method = {"type": "dpo", "dpo": {"hyperparameters": {"n_epochs": 2, "batch_size": 4, "beta": 0.2}}}
        settings = {"method": method, "integrations": [{"type": "wandb", "wandb": {"project": "p"}}]}
        job = wait(client, client.fine_tuning.jobs.create(model=BASE, training_file=file.id, **settings).id)
        assert (job.status, job.error) == ("succeeded", None)
        last, first = client.fine_tuning.jobs.checkpoints.list(job.id).data
        assert last.metrics.train_loss < first.metrics.train_loss
        assert last.metrics.full_valid_mean_reward == 1.0, "the preferred replies are the more likely ones"
        asked = pairs[0]["input"]["messages"]
        reply = client.chat.completions.create(model=job.fine_tuned_model, messages=asked, max_tokens=4)
        assert reply.model == job.fine_tuned_model


@pytest.mark.slow
def test_a_job_with_a_grader(start):
    """Reinforcement raises the grader's score, with a verdict on held-out prompts."""
    with start() as service, make_client(service) as client:
        prompts = [{"messages": [{"role": "user", "content": f"say {n}"}], "wanted": "aeiou"} for n in range(16)]
        held_out = [{"messages": [{"role": "user", "content": f"tell {n}"}], "wanted": "aeiou"} for n in range(8)]
        files = [
            client.files.create(file=("p.jsonl", to_jsonl(rows)), purpose="fine-tune").id
            for rows in (prompts, held_out)
        ]
        grader = {
            "type": "text_similarity",
            "name": "near",
            "input": "{{sample.output_text}}",
            "reference": "{{item.wanted}}",
            "evaluation_metric": "fuzzy_match",
        }
        hyperparameters = {"n_epochs": 3, "batch_size": 8, "learning_rate_multiplier": 3, "eval_samples": 2}
        created = client.fine_tuning.jobs.create(
            model=BASE,
            training_file=files[0],
            validation_file=files[1],
            method={"type": "reinforcement", "reinforcement": {"grader": grader, "hyperparameters": hyperparameters}},
            seed=3,
        )
        job = wait(client, created.id)
        assert (job.status, job.error) == ("succeeded", None)
        rewards = [
            each.data["train_mean_reward"]
            for each in reversed(client.fine_tuning.jobs.list_events(job.id, limit=50).data)
            if each.message.startswith("Step")
        ]
        assert len(rewards) == 6
        assert sum(rewards[-2:]) > sum(rewards[:2])
        assert any("Verdict" in each.message for each in client.fine_tuning.jobs.list_events(job.id))


@pytest.mark.slow
def test_rows_that_are_too_long_are_an_event_of_the_job(start):
    with start() as service, make_client(service) as client:
        rows = [*supervised_rows(7), *supervised_rows(1, "a" * 20_000)]
        file = client.files.create(file=("rows.jsonl", to_jsonl(rows)), purpose="fine-tune")
        settings = {"n_epochs": 1, "batch_size": 8}
        job = client.fine_tuning.jobs.create(model=BASE, training_file=file.id, hyperparameters=settings)
        assert wait(client, job.id).status == "succeeded"
        [warning] = [each for each in client.fine_tuning.jobs.list_events(job.id) if each.level == "warn"]
        assert warning.message.startswith("1 of 8 training rows do not fit the model's context and are left out (")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_flow_with_jobs_in_processes_of_their_own(start, tmp_path):
    """Cancel one job while it trains, pause and resume another, chat with what it made; the server restarts between."""
    with start(launcher=None) as service, make_client(service) as client:
        file = client.files.create(file=("rows.jsonl", to_jsonl(supervised_rows(24))), purpose="fine-tune")
        jobs = client.fine_tuning.jobs
        long = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 400, "batch_size": 4}}}
        doomed = jobs.create(model=BASE, training_file=file.id, method=long)

        def has_step(job_id):
            return any(each.message.startswith("Step") for each in jobs.list_events(job_id))

        while not has_step(doomed.id):
            time.sleep(0.1)
        short = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 12, "batch_size": 4}}}
        paused = jobs.create(model=BASE, training_file=file.id, method=short, suffix="kept", seed=5)
        while jobs.retrieve(paused.id).status == "validating_files":
            time.sleep(0.05)
        assert jobs.retrieve(paused.id).status == "queued", "one job at a time"
        assert jobs.cancel(doomed.id).status == "cancelled"
        while not has_step(paused.id):
            time.sleep(0.05)
        assert jobs.pause(paused.id).status == "paused"
        before = jobs.retrieve(paused.id)
    with start(launcher=None) as service, make_client(service) as client:
        jobs = client.fine_tuning.jobs
        assert jobs.retrieve(doomed.id).status == "cancelled"
        assert jobs.retrieve(paused.id).status == before.status == "paused"
        jobs.resume(paused.id)
        job = wait(client, paused.id)
        assert (job.status, job.error) == ("succeeded", None)
        steps = [each.data["step"] for each in jobs.list_events(job.id, limit=99) if each.message.startswith("Step")]
        assert sorted(steps) == [6 * (epoch + 1) for epoch in range(12)], "each step once"
        reply = client.chat.completions.create(
            model=job.fine_tuned_model, messages=[{"role": "user", "content": "q1"}], max_tokens=5, temperature=0
        )
        assert reply.choices[0].message.content == "aeiou"
        assert reply.model == job.fine_tuned_model
        assert not list((tmp_path / "data" / "models").glob(f"{doomed.id}*"))
