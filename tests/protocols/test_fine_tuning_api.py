"""The fine-tuning API over HTTP with the official client; the runs of the jobs are copies of one that has ended."""

import asyncio
import json
import re
from dataclasses import replace

import aiohttp
import openai
import pytest

from reinforge.config.policy import PolicyConfig
from reinforge.errors import StorageError
from reinforge.protocols.openai.server import request as request_module
from reinforge.protocols.openai.server.api import FineTuningSettings
from reinforge.protocols.openai.server.plan import JobSettings
from reinforge.protocols.openai.server.progress import read_events
from tests.protocols.fine_tuning import CopyLauncher, FineTuningServer, NamesOnly, supervised_rows, to_jsonl
from tests.protocols.test_graders import string_check
from tests.serving.serving import async_openai

IMAGE = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}
ASKED = [{"role": "user", "content": "q"}]
PYTHON = {"type": "python", "name": "p", "source": "def grade(sample, item): return item['x'] / 2"}


def answered(content="a", **fields):
    return [*ASKED, {"role": "assistant", "content": content, **fields}]


def make_server(folder, run, **arguments):
    settings = FineTuningSettings(
        folder / "data", JobSettings(poll_s=0.02, relaunch_s=0.02, **arguments.pop("jobs", {}))
    )
    arguments.setdefault("launcher", CopyLauncher(run))
    return FineTuningServer(
        folder / "data",
        arguments.pop("bases", {"tiny": PolicyConfig(model="/nowhere/tiny")}),
        host=NamesOnly(),
        settings=arguments.pop("settings", settings),
        serve_bases=False,
        **arguments,
    )


@pytest.fixture
async def server(tmp_path, finished_run):
    async with make_server(tmp_path, finished_run) as server:
        yield server


@pytest.fixture
async def client(server):
    async with async_openai(server.app) as client:
        yield client


async def wait_for_launch(launcher):
    async with asyncio.timeout(60):
        while not launcher.launched:
            await asyncio.sleep(0.01)


async def upload(client, rows=None):
    content = rows if isinstance(rows, bytes) else to_jsonl(supervised_rows(12) if rows is None else rows)
    return await client.files.create(file=("rows.jsonl", content), purpose="fine-tune")


async def create(client, rows=None, **body):
    file = await upload(client, rows)
    return await client.fine_tuning.jobs.create(**{"model": "tiny", "training_file": file.id, **body})


async def test_a_job_succeeds_and_its_models_are_served(server, client):
    job = await create(client, suffix="my bot", metadata={"k": "v"}, seed=7)
    assert (job.status, job.seed, job.metadata, job.organization_id) == ("validating_files", 7, {"k": "v"}, "reinforge")
    await server.wait(job.id)
    done = await client.fine_tuning.jobs.retrieve(job.id)
    name = f"ft:tiny:reinforge:my-bot:{job.id.removeprefix('ftjob-')}"
    assert (done.status, done.fine_tuned_model, done.error) == ("succeeded", name, None)
    assert done.hyperparameters.n_epochs == 8, "100 rows' worth of 12 rows"
    assert done.trained_tokens > 0
    checkpoints = [each async for each in client.fine_tuning.jobs.checkpoints.list(job.id)]
    assert [each.step_number for each in checkpoints] == [4, 2]
    assert {name, *(each.fine_tuned_model_checkpoint for each in checkpoints)} == set(server.host.folders)
    assert checkpoints[0].fine_tuned_model_checkpoint == f"{name}:ckpt-step-4"
    assert checkpoints[0].metrics.train_loss < checkpoints[1].metrics.train_loss
    [results] = done.result_files
    lines = (await client.files.content(results)).text.splitlines()
    assert lines[0] == "step,train_loss,full_valid_loss"
    assert [line.split(",")[0] for line in lines[1:]] == ["2", "4"]
    assert (await client.files.retrieve(results)).purpose == "fine-tune-results"
    folder = server.host.folders[name]
    assert (folder / "adapter_model.safetensors").is_file()
    assert not (folder / "training").exists(), "without the state of the optimizer"


async def test_events_come_newest_first_and_page_by_page(server, client):
    job = await create(client)
    await server.wait(job.id)
    events = [each async for each in client.fine_tuning.jobs.list_events(job.id, limit=2)]
    messages = [each.message for each in events]
    assert len({each.id for each in events}) == len(events) == 10
    assert messages[0].startswith("The job has successfully completed")
    assert messages[-1] == f"Created fine-tuning job: {job.id}"
    steps = [each for each in events if each.message.startswith("Step")]
    assert [each.data["step"] for each in steps] == [4, 2]
    assert any(re.match(r"Validation before training on \d+ rows of the training_file: ", each) for each in messages)
    assert {(each.type, each.level, each.object) for each in steps} == {("metrics", "info", "fine_tuning.job.event")}


BAD_ROWS = [
    ([*supervised_rows(2), {"messages": []}], "supervised", "line 3: messages: expected a list of messages"),
    (b'{"messages": [\n', "supervised", "line 1"),
    (b"", "supervised", "the file has no rows"),
    (b"\xff\xfe\n", "supervised", "UTF-8"),
    ([{"messages": [{"role": "bot", "content": "x"}]}], "supervised", "line 1: messages[0]: unknown role 'bot'"),
    ([{**supervised_rows(1)[0], "answer": 1}], "supervised", "line 1: unexpected keys answer"),
    ([{"messages": answered(weight=0)}], "supervised", "line 1: messages: no assistant message has a weight other"),
    ([{"messages": answered(weight=2)}], "supervised", "weight must be 0 or 1"),
    ([{"messages": answered([IMAGE])}], "supervised", "messages[1].content[0]: only parts of the type text are"),
    (supervised_rows(1), "dpo", "line 1: unexpected keys messages"),
    (supervised_rows(1), "reinforcement", "line 1: messages: the last message is the assistant's"),
    ([{"messages": ASKED}], "reinforcement", "line 1: item has no answer"),
    ([{"messages": ASKED, "answer": 1, "tools": [{"type": "function"}]}], "reinforcement", "line 1: tools: a job"),
]


@pytest.mark.slow
async def test_a_bad_row_fails_the_job_by_its_line_before_anything_runs(server, client):
    for rows, method, message in BAD_ROWS:
        settings = {"grader": string_check()} if method == "reinforcement" else {}
        job = await create(client, rows, method={"type": method, method: settings})
        await server.wait(job.id)
        done = await client.fine_tuning.jobs.retrieve(job.id)
        assert (done.status, done.error.code, done.error.param) == ("failed", "invalid_training_file", "training_file")
        assert message in done.error.message
        assert str(server.api.settings.folder) not in done.error.message, "the server's own paths stay its own"
    assert server.api.runner._launcher.launched == []


BAD_REQUESTS = [
    ({"model": "gpt-9"}, "model", "no model to train is named 'gpt-9'"),
    ({"training_file": "file-none"}, "training_file", "there is no file"),
    ({"validation_file": "file-none"}, "validation_file", "there is no file"),
    ({"method": {"type": ["dpo"]}}, "method.type", "allowed: supervised, dpo, reinforcement"),
    ({"hyperparameters": {"learning_rate_multiplier": 10**400}}, None, "a number above 0"),
    ({"method": {"type": "supervised", "supervised": {"hyperparameters": {"beta": 1}}}}, None, "no hyperparameter"),
    ({"hyperparameters": {"n_epochs": 0}}, None, "auto or a whole number from 1"),
    ({"hyperparameters": {"n_epochs": 10**9}}, None, "at most 1000"),
    ({"hyperparameters": {"batch_size": 1.5}}, None, "a whole number"),
    ({"method": {"type": "reinforcement", "reinforcement": {}}}, None, "grader is missing"),
    (
        {"method": {"type": "reinforcement", "reinforcement": {"grader": PYTHON}}},
        "method.reinforcement.grader",
        "graders in Python are turned off",
    ),
    ({"metadata": {"a": "x" * 513}}, "metadata", "at most 16 pairs"),
    ({"suffix": "x" * 65}, "suffix", "at most 64"),
    ({"seed": -1}, "seed", "whole number from 0"),
    ({"integrations": "wandb"}, "integrations", "must be a list of objects"),
    ({"extra_body": {"n_epochs": 3}}, None, "Unrecognized request argument supplied: n_epochs"),
    ({"extra_body": {"job_key": 3}}, "job_key", "must be a string"),
]  # fmt: skip


async def test_a_bad_request_is_refused_and_nothing_is_stored(server, client):
    for body, param, message in BAD_REQUESTS:
        with pytest.raises(openai.BadRequestError) as refused:
            await create(client, **body)
        assert message in refused.value.message
        assert param is None or refused.value.param == param
    assert server.api.store.list_jobs(None, 9) == ([], False)


async def test_integrations_are_ignored_with_a_warning(server, client):
    """The trainers of neural-interactive-proofs always ask for one."""
    job = await create(client, integrations=[{"type": "wandb", "wandb": {"project": "p", "api_key": "canary-7"}}])
    assert job.integrations == []
    created, warning = [each async for each in client.fine_tuning.jobs.list_events(job.id)][::-1][:2]
    assert created.message == f"Created fine-tuning job: {job.id}"
    assert (warning.level, warning.type, "integrations are ignored" in warning.message) == ("warn", "message", True)
    await server.wait(job.id)
    files = [file for file in server.api.settings.folder.rglob("*") if file.is_file()]
    assert len(files) > 3
    assert not any(b"canary-7" in file.read_bytes() for file in files)


def pair(preferred, non_preferred):
    replies = {"preferred_output": preferred, "non_preferred_output": non_preferred}
    asked = {"input": {"messages": ASKED}}
    return asked | {name: [{"role": "assistant", "content": text}] for name, text in replies.items()}


async def test_pairs_of_equal_replies_are_left_out_with_a_warning(server, client):
    """The trainers of neural-interactive-proofs pair sampled messages, and equal ones may lead to different rewards."""
    job = await create(client, [pair("a", "b"), pair("a", "a"), pair("b", "a")], method={"type": "dpo"})
    assert (await server.wait(job.id)).error is None
    [warning] = [each async for each in client.fine_tuning.jobs.list_events(job.id) if each.level == "warn"]
    assert warning.message == f"1 of 3 pairs in {job.training_file} are left out: equal replies"
    job = await create(client, [pair("a", "a")] * 3, method={"type": "dpo"})
    assert "are the same in every row" in (await server.wait(job.id)).error.message


async def test_a_field_that_a_grader_reads_after_the_answers_json_is_checked_too(server, client):
    template = "{{sample.output_json.city}} in {{item.country}}"
    method = {"type": "reinforcement", "reinforcement": {"grader": string_check(input=template, reference="x")}}
    job = await create(client, [{"messages": ASKED}], method=method)
    done = await server.wait(job.id)
    assert "line 1: item has no country" in done.error.message


async def test_held_out_rows_that_are_none_are_refused_before_anything_runs(server, client):
    """The run itself would refuse them too, in the words of its own configuration."""
    for held_out, message in (
        (supervised_rows(13)[11:], "line 1: the row is also in the training file"),
        ([*supervised_rows(14)[12:], dict(reversed(supervised_rows(1)[0].items()))], "line 3: the row is also"),
        (supervised_rows(13)[12:] * 2, "at least two rows that differ"),
    ):
        job = await create(client, validation_file=(await upload(client, held_out)).id)
        done = await server.wait(job.id)
        assert (done.state.value, done.error.code) == ("failed", "invalid_validation_file")
        assert message in done.error.message
    assert server.api.runner._launcher.launched == []


async def test_texts_that_cannot_be_stored_are_refused_or_written_out(server, client):
    """Half a surrogate pair in JSON, and a header that is not UTF-8; the official client can send neither."""
    body = {"model": "tiny", "training_file": (await upload(client)).id}
    url = f"{server.url}/fine_tuning/jobs"
    async with aiohttp.ClientSession() as session:
        for name in ("model", "training_file", "job_key"):
            async with session.post(url, json={**body, name: "\ud800"}) as response:
                assert (response.status, (await response.json())["error"]["param"]) == (400, name)
        ids = []
        for _ in range(2):
            async with session.post(url, json=body, headers={"Idempotency-Key": "k\udcff"}) as response:
                ids.append((await response.json())["id"])
    assert ids[0] == ids[1]


async def test_a_cancelled_job_stays_cancelled_and_leaves_no_model(server, client):
    launcher = server.api.runner._launcher
    launcher.hold.clear()
    job = await create(client)
    await wait_for_launch(launcher)
    assert (await client.fine_tuning.jobs.cancel(job.id)).status == "cancelled"
    await server.wait(job.id)
    assert launcher.stopped == launcher.launched
    assert (await client.fine_tuning.jobs.retrieve(job.id)).status == "cancelled"
    assert server.host.folders == {}
    for verb in ("cancel", "pause", "resume"):
        with pytest.raises(openai.BadRequestError, match="is cancelled"):
            await getattr(client.fine_tuning.jobs, verb)(job.id)


async def test_cancelling_wins_over_a_success_that_is_being_published(tmp_path, finished_run):
    """The job is cancelled while its models are being loaded."""
    server = make_server(tmp_path, finished_run)

    class SlowHost(NamesOnly):
        async def load(self, name, folder, base):
            await super().load(name, folder, base)
            [job] = server.api.store.list_jobs(None, 9)[0]
            async with async_openai(server.app) as client:
                if job.state.value == "running":
                    await client.fine_tuning.jobs.cancel(job.id)

    server.host = server.api.models.host = SlowHost()
    async with server, async_openai(server.app) as client:
        job = await create(client)
        done = await server.wait(job.id)
        assert done.state.value == "cancelled"
        assert server.host.folders == {}, "what was loaded is unloaded"
        assert list((tmp_path / "data" / "models").iterdir()) == []
        assert server.api.store.list_models() == []
        purposes = [file.purpose for file in (await client.files.list()).data]
        assert purposes == ["fine-tune"], "no file of results is left"


async def test_a_job_can_be_paused_and_resumed(server, client):
    launcher = server.api.runner._launcher
    launcher.hold.clear()
    job = await create(client)
    await wait_for_launch(launcher)
    assert (await client.fine_tuning.jobs.pause(job.id)).status == "paused"
    await server.wait(job.id)
    assert (await client.fine_tuning.jobs.retrieve(job.id)).status == "paused"
    launcher.hold.set()
    assert (await client.fine_tuning.jobs.resume(job.id)).status == "queued"
    assert (await server.wait(job.id)).state.value == "succeeded"
    assert launcher.launched[0] == launcher.launched[1], "the same run goes on"


async def test_jobs_wait_for_each_other(server, client):
    launcher = server.api.runner._launcher
    launcher.hold.clear()
    file = await upload(client)
    jobs = [await client.fine_tuning.jobs.create(model="tiny", training_file=file.id) for _ in range(3)]

    async def get_states():
        return sorted([(await client.fine_tuning.jobs.retrieve(job.id)).status for job in jobs])

    async with asyncio.timeout(60):  # which of them is validated first is open
        while await get_states() != ["queued", "queued", "running"]:
            await asyncio.sleep(0.01)
        while not launcher.launched:
            await asyncio.sleep(0.01)
    assert len(launcher.launched) == 1
    launcher.hold.set()
    for job in jobs:
        assert (await server.wait(job.id)).state.value == "succeeded"
    assert sorted(folder.name for folder in launcher.launched) == sorted(job.id for job in jobs), "each once"


async def test_a_process_that_is_killed_is_started_again_and_gives_up_in_the_end(server, client):
    """Also one to which an operator sent SIGTERM: its run says that it was interrupted, and no client asked for it."""
    launcher = server.api.runner._launcher
    for ends in (["killed", OSError("Resource temporarily unavailable")], [("interrupted", "stopped by SIGTERM")]):
        launcher.launched.clear()
        launcher.ends = [*ends]
        job = await create(client)
        assert (await server.wait(job.id)).state.value == "succeeded"
        assert len(launcher.launched) == len(ends) + 1
    launcher.ends = ["killed"] * 3
    failed = await server.wait((await create(client)).id)
    assert (failed.state.value, failed.error.code) == ("failed", "process_killed")


async def test_an_unexpected_error_fails_the_job_instead_of_leaving_it_running(server, client, monkeypatch):
    async def load(*arguments):
        raise RuntimeError("size mismatch for lora_A")

    monkeypatch.setattr(server.host, "load", load)
    done = await server.wait((await create(client)).id)
    assert (done.state.value, done.error.code) == ("failed", "server_error")
    assert "size mismatch" in done.error.message


async def test_graders_in_python_that_were_turned_off_do_not_run_in_older_jobs(tmp_path, finished_run):
    """The job was queued by a server that allowed them; the next server does not."""
    launcher = CopyLauncher(finished_run)
    launcher.hold.clear()
    rows = [{"messages": ASKED, "x": 1}]
    method = {"type": "reinforcement", "reinforcement": {"grader": PYTHON}}
    allowing = make_server(tmp_path, finished_run, launcher=launcher, jobs={"allow_python": True})
    async with allowing, async_openai(allowing.app) as client:
        job = await create(client, rows, method=method)
        await wait_for_launch(launcher)
    async with make_server(tmp_path, finished_run) as server:
        done = await server.wait(job.id)
        assert (done.state.value, done.error.code) == ("failed", "invalid_grader")
        assert server.api.runner._launcher.launched == []


async def test_the_reason_of_a_failed_run_reaches_the_client(server, client):
    path = server.api.settings.folder / "jobs" / "x"
    server.api.runner._launcher.ends = [("training_failed", f"3 epochs trained nothing, see {path}")]
    job = await create(client)
    await server.wait(job.id)
    done = await client.fine_tuning.jobs.retrieve(job.id)
    assert (done.status, done.error.code, done.error.message) == (
        "failed", "training_failed", "3 epochs trained nothing, see x",
    )  # fmt: skip
    assert done.fine_tuned_model is None


async def test_a_restarted_server_goes_on(tmp_path, finished_run):
    launcher = CopyLauncher(finished_run)
    launcher.hold.clear()
    async with (
        make_server(tmp_path, finished_run, launcher=launcher) as server,
        async_openai(server.app) as client,
    ):
        job = await create(client)
        await wait_for_launch(launcher)
        with pytest.raises(StorageError, match="another server works on"):
            make_server(tmp_path, finished_run)
    again = CopyLauncher(finished_run)
    async with (
        make_server(tmp_path, finished_run, launcher=again) as server,
        async_openai(server.app) as client,
    ):
        done = await server.wait(job.id)
        assert done.state.value == "succeeded"
        assert again.launched == launcher.launched
        messages = [each.message async for each in client.fine_tuning.jobs.list_events(job.id)]
        assert "The server was restarted; the job resumes from its last checkpoint" in messages
        names = set(server.host.folders)
    async with make_server(tmp_path, finished_run) as server:
        assert set(server.host.folders) == names, "and serves the models of earlier jobs"
        assert done.fine_tuned_model in names


class TestCreatingOnce:
    async def test_the_clients_own_retry_makes_one_job(self, tmp_path, finished_run):
        """The response to the first request is lost; the official client sends it again."""
        server, lost = make_server(tmp_path, finished_run), []
        create_job = server.api.create_job

        async def lose_first(request):
            response = await create_job(request)
            if not lost:
                lost.append(response)
                request.transport.abort()
            return response

        server.api.create_job = lose_first
        async with server, async_openai(server.app, max_retries=2) as client:
            file = await upload(client)
            job = await client.fine_tuning.jobs.create(model="tiny", training_file=file.id)
            assert json.loads(lost[0].body)["id"] == job.id
            assert [each.id for each in server.api.store.list_jobs(None, 9)[0]] == [job.id]

    async def test_a_key_makes_one_job_and_another_request_under_it_is_refused(self, server, client):
        file = await upload(client)
        headers = {"Idempotency-Key": "k1"}
        body = {"model": "tiny", "training_file": file.id}
        first = await client.fine_tuning.jobs.create(**body, extra_headers=headers)
        second = await client.fine_tuning.jobs.create(**body, extra_headers=headers)
        third = await client.fine_tuning.jobs.create(**body, extra_body={"job_key": "k1"})
        fourth = await client.fine_tuning.jobs.create(**body, extra_body={"job_key": "k1"})
        assert first.id == second.id != third.id == fourth.id
        with pytest.raises(openai.ConflictError, match="belongs to another request") as refused:
            await client.fine_tuning.jobs.create(**body, suffix="x", extra_headers=headers)
        assert refused.value.response.headers["x-should-retry"] == "false"
        assert refused.value.code == "idempotency_key_reused"

    @pytest.mark.slow
    async def test_a_request_sent_again_gets_its_job_although_the_file_is_deleted(self, server, client):
        file = await upload(client)
        body = {"model": "tiny", "training_file": file.id}
        first = await client.fine_tuning.jobs.create(**body, extra_headers={"Idempotency-Key": "k"})
        await server.wait(first.id)
        await client.files.delete(file.id)
        again = await client.fine_tuning.jobs.create(**body, extra_headers={"Idempotency-Key": "k"})
        retried = await client.fine_tuning.jobs.create(**body, extra_headers={"x-stainless-retry-count": "1"})
        assert again.id == retried.id == first.id
        with pytest.raises(openai.BadRequestError, match="there is no file"):
            await client.fine_tuning.jobs.create(**body)

    async def test_a_verb_sent_again_is_answered_alike(self, server, client):
        """The response to `cancel` is lost; the official client asks again and is not told that it is too late."""
        server.api.runner._launcher.hold.clear()
        jobs, retry = client.fine_tuning.jobs, {"x-stainless-retry-count": "1"}
        job = await create(client)
        for verb, states in (("pause", {"paused"}), ("resume", {"queued", "running", "validating_files"})):
            await getattr(jobs, verb)(job.id)
            assert (await getattr(jobs, verb)(job.id, extra_headers=retry)).status in states
            with pytest.raises(openai.BadRequestError):
                await getattr(jobs, verb)(job.id)
        await jobs.cancel(job.id)
        assert (await jobs.cancel(job.id, extra_headers=retry)).status == "cancelled"
        with pytest.raises(openai.BadRequestError, match="is cancelled"):
            await jobs.pause(job.id, extra_headers=retry)

    async def test_a_repeated_upload_is_the_same_file(self, server, client):
        retry = {"x-stainless-retry-count": "1"}
        first = await upload(client)
        again = await client.files.create(
            file=("rows.jsonl", to_jsonl(supervised_rows(12))), purpose="fine-tune", extra_headers=retry
        )
        assert again.id == first.id
        assert (await upload(client)).id != first.id


async def test_lists_of_jobs_are_filtered_by_metadata(server, client):
    file = await upload(client)
    jobs = client.fine_tuning.jobs
    made = [
        await jobs.create(model="tiny", training_file=file.id, metadata={"n": str(n)} if n else None) for n in range(3)
    ]
    assert [each.id async for each in jobs.list(limit=1)] == [job.id for job in reversed(made)]
    assert [each.id async for each in jobs.list(metadata={"n": "2"})] == [made[2].id]
    assert [each.id async for each in jobs.list(extra_query={"metadata": "null"})] == [made[0].id]
    with pytest.raises(openai.BadRequestError, match="limit must be from 1 to 100"):
        await jobs.list(limit=0)
    with pytest.raises(openai.NotFoundError, match="after: there is no"):
        await jobs.list(after="ftjob-gone")
    with pytest.raises(openai.NotFoundError):
        await jobs.retrieve("ftjob-gone")


async def test_a_tuned_model_can_be_trained_further_and_deleted(server, client):
    first = await server.wait((await create(client)).id)
    second = await server.wait((await create(client, model=first.fine_tuned_model, suffix="b")).id)
    assert second.fine_tuned_model.startswith("ft:tiny:reinforge:b:"), "named after the base of the whole chain"
    config = json.loads((server.api.settings.folder / "jobs" / second.id / "config.json").read_text())
    assert config["finetuning"]["policy"]["model"] == str(server.host.folders[first.fine_tuned_model])
    assert config["trainers"]["trainer"]["keep_last"] == 3, "as many checkpoints as are served"
    gone = await client.models.delete(first.fine_tuned_model)
    assert (gone.deleted, gone.id) == (True, first.fine_tuned_model)
    assert first.fine_tuned_model not in server.host.folders
    with pytest.raises(openai.NotFoundError):
        await client.models.delete(first.fine_tuned_model)
    with pytest.raises(openai.NotFoundError):
        await client.models.delete("tiny")


async def test_a_model_of_the_hub_has_a_slash_in_its_name(tmp_path, finished_run):
    server = make_server(tmp_path, finished_run, bases={"org/tiny": PolicyConfig(model="/nowhere/tiny")})
    async with server, async_openai(server.app) as client:
        done = await server.wait((await create(client, model="org/tiny")).id)
        assert done.fine_tuned_model.startswith("ft:org/tiny:reinforge::")
        assert (await client.models.delete(done.fine_tuned_model)).deleted


async def test_permissions_of_checkpoints_are_not_implemented(server, client):
    with pytest.raises(openai.APIStatusError) as refused:
        await client.fine_tuning.checkpoints.permissions.create("ft:tiny:x", project_ids=["p"])
    assert (refused.value.status_code, refused.value.code) == (501, "not_implemented")


class TestGraders:
    async def test_a_grader_is_run_on_one_answer(self, server, client):
        grader = string_check(name="same")
        graders = client.fine_tuning.alpha.graders
        assert (await graders.validate(grader=grader)).grader.name == "same"
        found = await graders.run(grader=grader, model_sample="Rome", item={"answer": "Rome"})
        assert (found.reward, found.metadata.name, found.metadata.type) == (1.0, "same", "string_check")
        assert found.metadata.scores == {"same": 1.0}
        missing = await graders.run(grader=grader, model_sample="Rome", item={})
        assert missing.reward is None, "no score is no 0"
        assert missing.metadata.errors.invalid_variable_error is True
        with pytest.raises(openai.BadRequestError, match="type must be one of"):
            await graders.validate(grader={"type": "x", "name": "y"})

    async def test_python_runs_only_where_it_is_allowed(self, tmp_path, finished_run, server, client):
        with pytest.raises(openai.BadRequestError, match="turned off"):
            await client.fine_tuning.alpha.graders.run(grader=PYTHON, model_sample="a", item={"x": 1})
        allowed = make_server(tmp_path / "other", finished_run, jobs={"allow_python": True})
        async with allowed, async_openai(allowed.app) as other:
            found = await other.fine_tuning.alpha.graders.run(grader=PYTHON, model_sample="a", item={"x": 1})
            assert found.reward == 0.5
            broken = {**PYTHON, "source": "def grade(sample, item): return 1 / 0"}
            found = await other.fine_tuning.alpha.graders.run(grader=broken, model_sample="a")
            assert found.reward is None
            assert found.metadata.errors.python_grader_runtime_error is True
            assert "ZeroDivisionError" in found.metadata.errors.python_grader_runtime_error_details


def test_a_request_reads_the_deprecated_form():
    job = request_module.read_job({"model": "m", "training_file": "f", "hyperparameters": {"n_epochs": 2}})
    assert job.method == {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2}}}
    assert replace(job, seed=0).as_answer()["method"]["type"] == "supervised"


def test_figures_that_are_not_there_are_no_failure(tmp_path):
    """A run that resumes writes its figures anew, so a look at them may come in between."""
    assert read_events("ftjob-1", tmp_path / "gone") == []
    (tmp_path / "training_metrics.jsonl").mkdir()
    assert read_events("ftjob-1", tmp_path) == []
