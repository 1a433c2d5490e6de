"""The stand-in of OpenAI's API has the shapes, errors and rules that OpenAI documents."""

import json

import aiohttp
import pytest

from tests.protocols.openai_service import DATED, OpenAIService

STATUSES = {"validating_files", "queued", "running", "paused", "succeeded", "failed", "cancelled"}
FILE = {"id": str, "bytes": int, "created_at": int, "filename": str, "object": str, "purpose": str, "status": str}
JOB = {
    "id": str,
    "created_at": int,
    "hyperparameters": dict,
    "model": str,
    "object": str,
    "organization_id": str,
    "result_files": list,
    "seed": int,
    "status": str,
    "training_file": str,
}
NULLABLE = {
    "error": dict,
    "fine_tuned_model": str,
    "finished_at": int,
    "trained_tokens": int,
    "validation_file": str,
    "metadata": dict,
    "method": dict,
}
EVENT = {"id": str, "created_at": int, "level": str, "message": str, "object": str}


class Client:
    """A plain HTTP client, without the package's code."""

    def __init__(self, session, service):
        self.session, self.service = session, service
        self.headers = {"Authorization": f"Bearer {service.key}"}

    async def call(self, method, path, **arguments):
        arguments.setdefault("headers", self.headers)
        async with self.session.request(method, f"{self.service.url}{path}", **arguments) as response:
            assert response.headers["x-request-id"]
            return response.status, await response.json()

    async def send(self, rows):
        form = aiohttp.FormData({"purpose": "fine-tune"})
        content = "".join(json.dumps(row) + "\n" for row in rows)
        form.add_field("file", content.encode(), filename="rows.jsonl")
        status, file = await self.call("POST", "/files", data=form)
        assert status == 200
        return file

    async def make(self, file, **body):
        return await self.call(
            "POST", "/fine_tuning/jobs", json={"model": "gpt-test", "training_file": file["id"], **body}
        )

    async def ended(self, job):
        self.service.advance(3600)
        return (await self.call("GET", f"/fine_tuning/jobs/{job['id']}"))[1]


@pytest.fixture
async def client(openai_service: OpenAIService):
    async with aiohttp.ClientSession() as session:
        yield Client(session, openai_service)


def rows_of(count, **last):
    return [
        {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a", **last}]}
        for i in range(count)
    ]


def assert_shape(found, required, nullable=None):
    for name, kind in required.items():
        assert isinstance(found[name], kind), name
    for name, kind in (nullable or {}).items():
        assert found[name] is None or isinstance(found[name], kind), name


async def test_files_and_jobs_have_the_published_shapes(client):
    file = await client.send(rows_of(10))
    assert_shape(file, FILE)
    assert (file["object"], file["purpose"], file["filename"]) == ("file", "fine-tune", "rows.jsonl")
    status, job = await client.make(file, metadata={"a": "b"}, suffix="x", seed=3)
    assert (status, job["status"], job["seed"]) == (200, "validating_files", 3)
    assert_shape(job, JOB, NULLABLE)
    done = await client.ended(job)
    assert_shape(done, JOB, NULLABLE)
    assert (done["status"], done["error"]) == ("succeeded", None)
    assert done["fine_tuned_model"].split(":")[:4] == ["ft", "gpt-test", "org-standin", "x"]
    _, events = await client.call("GET", f"/fine_tuning/jobs/{job['id']}/events")
    assert events["object"] == "list"
    assert_shape(events["data"][0], EVENT)


async def test_statuses_come_in_order(client):
    client.service.seconds = 100
    _, job = await client.make(await client.send(rows_of(10)))
    seen = []
    for _ in range(11):
        status = (await client.call("GET", f"/fine_tuning/jobs/{job['id']}"))[1]["status"]
        seen += [status] if status not in seen else []
        client.service.advance(10)
    assert seen == ["validating_files", "queued", "running", "succeeded"]
    assert set(seen) <= STATUSES


async def test_lists_are_paged_from_the_newest_and_filtered_by_metadata(client):
    file = await client.send(rows_of(10))
    ids = [(await client.make(file, metadata={"n": str(n % 2), "m": "x"}))[1]["id"] for n in range(5)]
    seen, after = [], {}
    while True:
        query = {"limit": "2", "metadata[m]": "x", **after}
        _, page = await client.call("GET", "/fine_tuning/jobs", params=query)
        seen += [job["id"] for job in page["data"]]
        assert (page["object"], page["first_id"], page["last_id"]) == ("list", seen[-len(page["data"])], seen[-1])
        if not page["has_more"]:
            break
        after = {"after": page["data"][-1]["id"]}
    assert seen == ids[::-1]
    _, page = await client.call("GET", "/fine_tuning/jobs", params={"metadata[n]": "1"})
    assert [job["id"] for job in page["data"]] == [ids[3], ids[1]]


@pytest.mark.parametrize(
    ("rows", "method", "message"),
    [
        (rows_of(9), "supervised", "must have at least 10 examples"),
        (rows_of(10, weight=0), "supervised", "no assistant message has a weight other than 0"),
        (rows_of(10, weight=0.5), "supervised", "weight must be 0 or 1"),
        (rows_of(10, metadata={}), "supervised", "unexpected keys"),
        ([{"messages": [{"role": "bot", "content": "x"}]}] * 10, "supervised", "unknown role"),
        ([{"messages": [{"role": "tool", "content": "x"}]}] * 10, "supervised", "tool_call_id is missing"),
        (rows_of(10), "dpo", "expected input, preferred_output and non_preferred_output"),
        (
            [{"input": {"messages": []}, "preferred_output": [{"role": "user"}], "non_preferred_output": []}] * 10,
            "dpo",
            "preferred_output must be one assistant message",
        ),
    ],
)
async def test_invalid_training_files_fail_the_job(client, rows, method, message):
    _, job = await client.make(await client.send(rows), method={"type": method})
    done = await client.ended(job)
    assert (done["status"], done["fine_tuned_model"]) == ("failed", None)
    assert done["error"]["code"] == "invalid_training_file"
    assert message in done["error"]["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"model": "gpt-unknown"}, "not available for fine-tuning"),
        ({"training_file": "file-none"}, "No such File object"),
        ({"method": {"type": "magic"}}, "unknown method"),
        ({"method": {"type": "supervised", "supervised": {"hyperparameters": {"beta": 1}}}}, "unknown hyperparameter"),
        ({"metadata": {"a": "x" * 513}}, "at most 16 pairs"),
        ({"metadata": {"a": 1}}, "at most 16 pairs"),
        ({"suffix": "x" * 65}, "suffix is too long"),
        ({"n_epochs": 3}, "Unrecognized request argument"),
    ],
)
async def test_invalid_jobs_are_rejected_in_openais_format(client, body, message):
    status, answer = await client.make(await client.send(rows_of(10)), **body)
    assert status == 400
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert message in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


async def test_cancelling_works_once(client):
    _, job = await client.make(await client.send(rows_of(10)))
    path = f"/fine_tuning/jobs/{job['id']}/cancel"
    assert [(await client.call("POST", path))[0] for _ in range(2)] == [200, 400]
    assert (await client.ended(job))["status"] == "cancelled"
    assert (await client.call("POST", "/fine_tuning/jobs/none/cancel"))[0] == 404


async def test_a_call_without_the_key_is_rejected(client):
    status, answer = await client.call("GET", "/fine_tuning/jobs", headers={"Authorization": "Bearer sk-x"})
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")


async def test_chat_completions_of_base_and_fine_tuned_models(client):
    body = {"model": "gpt-test", "messages": [{"role": "user", "content": "q"}], "seed": 1}
    _, completion = await client.call("POST", "/chat/completions", json=body)
    assert (completion["object"], completion["model"]) == ("chat.completion", f"gpt-test{DATED}")
    assert completion["choices"][0]["message"]["role"] == "assistant"
    assert (
        completion["usage"]["total_tokens"]
        == completion["usage"]["prompt_tokens"] + completion["usage"]["completion_tokens"]
    )
    assert (await client.call("POST", "/chat/completions", json=body))[1]["choices"] == completion["choices"]
    _, job = await client.make(await client.send(rows_of(10)))
    name = (await client.ended(job))["fine_tuned_model"]
    _, completion = await client.call("POST", "/chat/completions", json={**body, "model": name})
    assert completion["model"] == name
    status, answer = await client.call("POST", "/chat/completions", json={**body, "model": f"{name}x"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
