"""A shared-model group is killed in each stage of a job and continues in another process; no job is created twice.

job created            intent recorded, or sent and the response not recorded, or its id recorded
running                within an optimizer step here; while the service trains there
finished, not adopted  the model exists and is not served yet
"""

import asyncio
import hashlib
import os
import signal

import pytest

from reinforge import crash
from tests.fault import mutations
from tests.fault.kit import KILLED, PATIENCE_S, SERVER, start_server
from tests.groups import Embedded, Hosted, rollouts
from tests.protocols.openai_service import OpenAIService

FINISHED = "finished"
CREATED = ("submit.after_intent", "submit.after_send", "submit.after_id")
STAGES = {
    Embedded: (*CREATED, "step.after_optim", "ckpt.after_tensor", "ckpt.after_manifest", FINISHED),
    Hosted: (*CREATED, FINISHED),
}
QUICK = {(Hosted, "submit.after_send")}
CASES = [
    pytest.param((kind, stage), id=f"{kind.name}-{stage}", marks=() if (kind, stage) in QUICK else pytest.mark.slow)
    for kind, stages in STAGES.items()
    for stage in stages
]


class Address:
    """A stand-in in another process."""

    def __init__(self, url, key):
        self.url, self.key = url, key


@pytest.fixture(params=CASES)
def killed(request, tmp_path, tiny_model_dir):
    """A backend in whose folder a process started a job and was killed."""
    kind, stage = request.param
    with OpenAIService() as service:
        backend = kind(tmp_path / "killed", tiny_model_dir, service)
        kill(backend, tiny_model_dir, stage)
        yield backend, stage
        backend.close()


def kill(backend, model, stage, mutation=None):
    start_server()
    where = (type(backend), backend.folder, model, backend.service.url, backend.service.key)
    child = SERVER.Process(target=begin, args=(*where, stage, mutation), daemon=True)
    child.start()
    child.join(PATIENCE_S)
    assert child.exitcode == KILLED


def begin(kind, folder, model, url, key, stage, mutation):
    if mutation is not None:
        mutation()
    backend = kind(folder, model, Address(url, key))
    group = backend.group()
    group.sync.wait_for_ready()
    crash.arm(None if stage == FINISHED else stage)
    group.sync.create_supervised_fine_tune_job(data(backend))
    group.sync.wait_for_fine_tune_job()
    os.kill(os.getpid(), signal.SIGKILL)


def data(backend):
    return {name: rollouts(backend.experiment()) for name in ("prover", "verifier")}


def weights(folder):
    return hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()


def test_a_killed_group_continues(killed, tmp_path, tiny_model_dir):
    backend, stage = killed
    models = list(backend.folder.glob("**/model/manifest.json"))
    made_at = [path.stat().st_mtime_ns for path in models]
    assert len(models) == (isinstance(backend, Embedded) and stage == FINISHED)
    group = backend.group()
    assert asyncio.run(group.wait_for_fine_tune_job(60)) == "succeeded", "it does not have to be requested again"
    job = group.fine_tune_job_id
    assert asyncio.run(group.create_supervised_fine_tune_job(data(backend))) == job, "and who does gets the same"
    assert group.model_name == group.base_model_name
    asyncio.run(group.switch_to_next_model())
    assert group.fine_tuned_model_name is not None
    assert backend.num_jobs(group) == 1
    assert len(list(group.files.jobs.iterdir())) == 1
    assert [path.stat().st_mtime_ns for path in models] == made_at, "what was trained is not trained again"
    if isinstance(backend, Embedded):
        undisturbed = Embedded(tmp_path / "undisturbed", tiny_model_dir)
        other = undisturbed.group()
        asyncio.run(other.create_supervised_fine_tune_job(data(undisturbed)))
        assert asyncio.run(other.wait_for_fine_tune_job(60)) == "succeeded"
        assert weights(group.files.jobs / job / "model") == weights(other.files.jobs / job / "model")
        undisturbed.close()


def test_another_process_continues_a_job_that_the_service_still_trains(tmp_path, tiny_model_dir):
    with OpenAIService() as service:
        service.seconds = 3600
        backend = Hosted(tmp_path / "groups", tiny_model_dir, service)
        group = backend.group()
        asyncio.run(group.create_supervised_fine_tune_job(data(backend)))
        again = backend.group()  # as in another process: the first one makes no more requests
        assert asyncio.run(again.get_fine_tune_job_status()) in ("pending", "running")
        state = again.get_state_dict()
        service.advance(7200)
        elsewhere = backend.group(run_id="other")
        elsewhere.set_state(state)
        for each in (again, elsewhere):
            assert asyncio.run(each.wait_for_fine_tune_job(60)) == "succeeded"
            asyncio.run(each.switch_to_next_model())
        assert again.model_name == elsewhere.model_name
        assert len(service.jobs) == 1
        backend.close()


@pytest.mark.fault
def test_without_its_state_file_a_group_does_not_find_its_job(tmp_path, tiny_model_dir, openai_service):
    """Mutation check: nothing is recorded before and after the job is sent."""
    backend = Hosted(tmp_path / "groups", tiny_model_dir, openai_service)
    kill(backend, tiny_model_dir, "submit.after_id", mutations.note_no_job_of_a_group)
    assert asyncio.run(backend.group().get_fine_tune_job_status()) == "not_found"
    backend.close()


@pytest.mark.fault
def test_without_names_by_content_a_job_is_created_twice(tmp_path, tiny_model_dir, openai_service):
    """Mutation check: a job is named by the process that requested it."""
    backend = Hosted(tmp_path / "groups", tiny_model_dir, openai_service)
    for _ in range(2):
        kill(backend, tiny_model_dir, FINISHED, mutations.give_each_job_a_name_of_its_own)
    assert len(openai_service.jobs) == 2


@pytest.mark.fault
def test_without_checking_its_folder_a_job_is_trained_twice(tmp_path, tiny_model_dir, openai_service):
    """Mutation check: the next process does not check whether the model exists."""
    backend = Embedded(tmp_path / "groups", tiny_model_dir, openai_service)
    kill(backend, tiny_model_dir, FINISHED)
    [model] = backend.folder.glob("**/model/manifest.json")
    made_at = model.stat().st_mtime_ns
    kill(backend, tiny_model_dir, FINISHED)
    assert model.stat().st_mtime_ns == made_at
    kill(backend, tiny_model_dir, FINISHED, mutations.train_what_is_there)
    assert model.stat().st_mtime_ns != made_at
