"""Checks the stand-in of OpenAI's API with the official client; `make clients` runs it in the client's environment.

python openai_sdk.py URL KEY
"""

import json
import sys
import time

import openai

url, key = sys.argv[1:3]
client = openai.OpenAI(base_url=url, api_key=key)
jobs = client.fine_tuning.jobs


def row(number):
    reply = {"role": "assistant", "content": "good", "weight": 1}
    return {"messages": [{"role": "user", "content": f"q{number}"}, reply]}


def assert_rejected(call, kind, status, code):
    raised = None
    try:
        call()
    except openai.APIStatusError as error:
        raised = type(error), error.status_code, error.code
    assert raised == (kind, status, code), raised


content = "".join(json.dumps(row(number)) + "\n" for number in range(12)).encode()
file = client.files.create(file=("rows.jsonl", content), purpose="fine-tune")
assert (file.filename, file.bytes, file.status) == ("rows.jsonl", len(content), "processed")
assert [each.id for each in client.files.list(purpose="fine-tune")] == [file.id]

method = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2}}}
job = jobs.create(
    model="gpt-test", training_file=file.id, method=method, metadata={"key": "k"}, seed=1, suffix="x"
)  # the first response is a 503, which the client retries
assert (job.status, job.method.type, job.metadata, job.seed) == ("validating_files", "supervised", {"key": "k"}, 1)
others = [jobs.create(model="gpt-test", training_file=file.id).id for _ in range(3)]
assert [each.id for each in jobs.list(limit=2)] == [*others[::-1], job.id], "page by page, newest first"
assert [each.id for each in jobs.list(extra_query={"metadata[key]": "k"})] == [job.id]
while (job := jobs.retrieve(job.id)).status not in ("succeeded", "failed", "cancelled"):
    time.sleep(0.02)
assert (job.status, job.error) == ("succeeded", None)
assert job.fine_tuned_model.startswith("ft:gpt-test:org-standin:x:")
assert [event.object for event in jobs.list_events(job.id)] == ["fine_tuning.job.event"]

reply = client.chat.completions.create(model=job.fine_tuned_model, messages=[{"role": "user", "content": "q"}], seed=3)
assert (reply.model, reply.choices[0].message.role) == (job.fine_tuned_model, "assistant")
stranger = openai.OpenAI(base_url=url, api_key="x")
assert_rejected(lambda: jobs.cancel(job.id), openai.BadRequestError, 400, "job_not_cancellable")
assert_rejected(lambda: jobs.retrieve("none"), openai.NotFoundError, 404, "fine_tune_not_found")
assert_rejected(lambda: stranger.files.list(), openai.AuthenticationError, 401, "invalid_api_key")
sys.stdout.write(f"  ok: openai {openai.__version__}: the stand-in passes the official client's checks\n")
