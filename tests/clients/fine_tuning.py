"""Trains a tiny model with the official client against `reinforge serve --fine_tuning`, in the client's environment.

python fine_tuning.py URL

The whole flow: files, an upload in parts, create, poll, events page by page, cancel, pause and resume, checkpoints, a
grader, and a chat with the tuned model and with its checkpoint.
"""

import json
import sys
import time

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="any", timeout=120)
jobs = client.fine_tuning.jobs
base = client.models.list().data[0].id


def to_jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def wait(job, *statuses):
    while job.status not in ("succeeded", "failed", "cancelled", *statuses):
        time.sleep(0.1)
        job = jobs.retrieve(job.id)
    return job


def refuse(call, kind, message):
    refused = None
    try:
        call()
    except openai.APIStatusError as error:
        refused = error
    assert isinstance(refused, kind), refused
    assert message in refused.message, refused.message
    assert refused.request_id


rows = [
    {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "aeiou"}]} for n in range(24)
]
content = to_jsonl(rows)
file = client.files.create(file=("rows.jsonl", content), purpose="fine-tune")
assert (file.filename, file.bytes, file.status) == ("rows.jsonl", len(content), "processed")
assert client.files.wait_for_processing(file.id).id == file.id
assert client.files.content(file.id).read() == content
upload = client.uploads.create(bytes=len(content), filename="u.jsonl", mime_type="text/jsonl", purpose="fine-tune")
half = len(content) // 2
parts = [client.uploads.parts.create(upload.id, data=each).id for each in (content[:half], content[half:])]
uploaded = client.uploads.complete(upload.id, part_ids=parts).file
assert [each.id for each in client.files.list(purpose="fine-tune")] == [uploaded.id, file.id]

refuse(lambda: jobs.create(model="gpt-none", training_file=file.id), openai.BadRequestError, "no model to train")
refuse(lambda: jobs.create(model=base, training_file="file-none"), openai.BadRequestError, "there is no file")
refuse(lambda: jobs.retrieve("ftjob-none"), openai.NotFoundError, "there is no fine-tuning job")
bad = client.files.create(file=("bad.jsonl", to_jsonl([*rows, {"messages": []}])), purpose="fine-tune")
failed = wait(jobs.create(model=base, training_file=bad.id))
assert (failed.status, failed.error.code) == ("failed", "invalid_training_file"), failed.error
assert "line 25" in failed.error.message, failed.error.message

long = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1000}}}
doomed = jobs.create(model=base, training_file=uploaded.id, method=long, metadata={"kind": "doomed"})
hyperparameters = {"n_epochs": 12, "batch_size": 4, "learning_rate_multiplier": 4}
method = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
job = jobs.create(model=base, training_file=file.id, method=method, suffix="x", seed=1, metadata={"kind": "kept"})
if hasattr(jobs, "pause"):  # the job waits for the other one
    assert jobs.pause(job.id).status == "paused"
    assert jobs.resume(job.id).status in ("queued", "validating_files")
assert [each.id for each in jobs.list(limit=1)] == [job.id, doomed.id, failed.id], "page by page, newest first"
assert [each.id for each in jobs.list(extra_query={"metadata[kind]": "doomed"})] == [doomed.id]
assert wait(doomed, "running").status == "running"
assert jobs.cancel(doomed.id).status == "cancelled"
refuse(lambda: jobs.cancel(doomed.id), openai.BadRequestError, "is cancelled")
job = wait(jobs.retrieve(job.id))
assert (job.status, job.error) == ("succeeded", None), job.error
assert job.fine_tuned_model.startswith(f"ft:{base}:reinforge:x:")
events = list(jobs.list_events(job.id, limit=3))
assert len({each.id for each in events}) == len(events)
assert sum(each.message.startswith("Step") for each in events) == 12
checkpoints = jobs.checkpoints.list(job.id).data
assert [each.step_number for each in checkpoints] == [72, 66, 60], checkpoints
assert checkpoints[0].metrics.train_loss < 1, checkpoints[0].metrics
assert client.files.content(job.result_files[0]).read().startswith(b"step,train_loss")
for model in (job.fine_tuned_model, checkpoints[-1].fine_tuned_model_checkpoint):
    reply = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "q1"}], max_tokens=5, temperature=0
    )
    assert (reply.model, reply.choices[0].message.content) == (model, "aeiou"), reply
if hasattr(client.fine_tuning, "alpha"):
    grader = {"type": "string_check", "name": "g", "operation": "eq", "input": "{{sample.output_text}}"}
    grader["reference"] = "{{item.a}}"
    graded = client.fine_tuning.alpha.graders.run(grader=grader, model_sample="x", item={"a": "x"})
    assert graded.reward == 1.0
assert client.models.delete(job.fine_tuned_model).deleted
sys.stdout.write(f"  ok: openai {openai.__version__}: the whole fine-tuning flow, and a chat with the tuned model\n")
