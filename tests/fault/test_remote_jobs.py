"""Jobs at a fine-tuning service, over real HTTP.

Wherever a run dies while it submits a job, and whichever response is lost, the service gets one job per epoch.
A failed poll is not a failed job: polling continues at growing intervals, the user is warned, and the job completes.
"""

import asyncio
import itertools
import json
import logging
import random
import signal
import time

import pytest

from reinforge.errors import BackendUnavailable
from reinforge.protocols.openai.adapter import OpenAIAdapter
from reinforge.rollout.models.openai_http import RetryableError
from reinforge.types.job import TrainingStatusEnum
from tests.fault import mutations
from tests.fault.kit import Toy, killed_at, killed_while, wait_until
from tests.openai_server import cut, fails, page
from tests.protocols.hosted import connect_adapter, make_collection, use_openai_adapter
from tests.protocols.openai_service import OpenAIService
from tests.protocols.stand_in import after, lost_response, no_response

NUM_EPOCHS = 2
STAGES = (
    "rollout.after_journal:30",  # COLLECT
    "batch.sealed",
    "submit.after_intent",
    "submit.after_send",
    "submit.after_id",
    "ckpt.after_manifest:2",
    "ckpt.after_rename:2",
    "publish.before",
    "publish.mid",
    "export.mid",
    "batch.sealed:2",
    "submit.after_send:2",
    "publish.mid:2",
    "rollout.after_journal:150",  # the last validation, or the comparison on `confirm`
)
SLOW_STAGES = ("submit.after_intent", "submit.after_send", "submit.after_id")


@pytest.fixture
def make_toy(tmp_path, tiny_model_dir):
    """Returns a new project that trains through a service."""

    def make(service, name="toy", **settings):
        toy = Toy(tmp_path / name, tiny_model_dir)
        use_openai_adapter(toy, service, f"${{STANDIN_KEY:-{service.key}}}", **settings)
        return toy.set("finetuning.num_epochs", NUM_EPOCHS).set("finetuning.gate", {"margin": -1.0})

    return make


def assert_one_job_an_epoch(toy, service):
    assert toy.summary["status"] == "completed"
    assert toy.summary["promoted"] is True
    ids = [json.loads(ref)["metadata"]["job_id"] for (ref,) in toy.rows_of("SELECT ref FROM jobs ORDER BY epoch")]
    assert ids == list(service.jobs), "exactly one job an epoch, each the run's own"
    assert len(ids) == NUM_EPOCHS
    versions = [row["version"] for row in toy.summary["policy_versions"]]
    assert versions == list(range(NUM_EPOCHS + 1))
    first, second = service.jobs.values()
    assert second["model"] == first["fine_tuned_model"]


@pytest.mark.parametrize(
    "site",
    [pytest.param(site, marks=pytest.mark.slow if site in SLOW_STAGES else pytest.mark.fault) for site in STAGES],
)
def test_a_run_killed_in_any_stage_has_one_job_per_epoch(make_toy, openai_service, site):
    toy = make_toy(openai_service)
    killed_at(toy, site)
    assert_one_job_an_epoch(toy, openai_service)


def test_a_run_killed_before_the_response_has_one_job(make_toy, openai_service):
    """The service has created the job, and the process dies before the response arrives."""
    toy = make_toy(openai_service)
    openai_service.faults["create"] = [after(no_response)]
    killed_while(toy, lambda: openai_service.jobs)
    assert_one_job_an_epoch(toy, openai_service)


@pytest.mark.slow
def test_a_run_killed_while_it_waits_has_one_job(make_toy, openai_service):
    openai_service.seconds = 1.0
    toy = make_toy(openai_service)
    killed_while(toy, lambda: openai_service.calls["retrieve"] > 3)
    assert openai_service.calls["create"] == NUM_EPOCHS
    assert_one_job_an_epoch(toy, openai_service)


@pytest.mark.slow
@pytest.mark.parametrize("cancels", [False, True])
def test_a_run_that_is_stopped_leaves_its_job_or_cancels_it(make_toy, openai_service, cancels):
    """A job that was left running is awaited; for a cancelled one another is created."""
    openai_service.seconds = 600.0
    toy = make_toy(openai_service, cancel_on_stop=cancels)
    child = toy.start()
    wait_until(lambda: openai_service.calls["retrieve"] > 3, child)
    child.send(signal.SIGINT)
    assert child.wait() == 130, child.said
    (first,) = openai_service.jobs
    assert (openai_service.get_status(first) == "cancelled") is cancels
    openai_service.advance(600.0)
    openai_service.seconds = 0.05
    child = toy.resume()
    assert child.wait() == 0, child.said
    assert toy.summary["status"] == "completed"
    succeeded = [id_ for id_ in openai_service.jobs if openai_service.get_status(id_) == "succeeded"]
    assert (len(succeeded), len(openai_service.jobs)) == (NUM_EPOCHS, NUM_EPOCHS + cancels)


@pytest.mark.fault
def test_a_run_killed_at_random_times_has_one_job_per_epoch(make_toy):
    rng = random.Random(9)
    kills, number = 0, 0
    while kills < 30:
        with OpenAIService() as service:
            service.seconds = 0.3
            toy = make_toy(service, f"toy-{number}")
            kills, number = kills + toy.end_with_kills(rng), number + 1
            assert_one_job_an_epoch(toy, service)


@pytest.mark.fault
@pytest.mark.parametrize("kill", [False, True], ids=["the answer is lost", "the process dies"])
def test_a_job_that_is_not_searched_for_is_created_twice(make_toy, openai_service, kill):
    """Mutation check: without asking the service first, a second job is created and paid for."""
    openai_service.faults["create"] = [after(no_response) if kill else lost_response]
    toy = make_toy(openai_service)
    if kill:
        killed_while(toy, lambda: openai_service.jobs, mutations.look_for_no_job)
    else:
        assert toy.start(mutation=mutations.look_for_no_job).wait() == 0
    assert len(openai_service.jobs) == NUM_EPOCHS + 1


# Failed polls.

FAULTS = [*[fails(503)] * 20, cut, page(200), page(502)]


class Hasty(OpenAIAdapter):
    async def wait_until_complete(self, ref, poll_interval=None):
        try:
            job = await self._require_jobs().service.retrieve_job(ref.metadata["job_id"])
        except RetryableError as error:
            update = {"status": TrainingStatusEnum.FAILED, "message": str(error)}
            return (await self.status(ref)).model_copy(update=update)
        return self._require_jobs().record(ref, job)


async def waited_through(service, faults, kind=OpenAIAdapter, **settings):
    """Returns the final status of a job whose polls failed, and the pauses between the polls in seconds."""
    times = []
    async with connect_adapter(service, kind=kind, **settings) as adapter:
        ref = await adapter.submit(make_collection())
        service.faults["retrieve"] = [timed(fault, times) for fault in faults]
        status = await adapter.wait_until_complete(ref)
    return status, [later - earlier for earlier, later in itertools.pairwise(times)]


def timed(fault, times):
    def step(request, body):
        times.append(time.monotonic())
        return fault(request, body)

    return step


@pytest.mark.usefixtures("_no_backoff")
async def test_failed_polls_do_not_fail_the_job(openai_service, caplog):
    caplog.set_level(logging.WARNING)
    status, pauses = await waited_through(openai_service, FAULTS)
    assert status.status is TrainingStatusEnum.COMPLETED
    assert status.metadata["num_poll_errors"] == len(FAULTS)
    messages = [record.getMessage() for record in caplog.records]
    (warning,) = [text for text in messages if "the last 3 polls failed" in text]
    assert warning.startswith("job ftjob-")
    assert "still polling; latest error: " in warning
    assert "503 broken 503" in warning
    assert sum(text.startswith("polling job ftjob-") for text in messages) == 1
    usual_s = 0.01
    assert min(pauses[3:]) > 8 * usual_s * 0.7, "looks that fail come further apart"
    assert len({round(pause / usual_s, 2) for pause in pauses[3:]}) > 5, "and not in step with others"


@pytest.mark.usefixtures("_no_backoff")
async def test_a_pause_that_the_service_requests_is_respected(openai_service):
    _, pauses = await waited_through(openai_service, [fails(429, retry_after="1"), fails(503)])
    assert pauses[0] >= 1


@pytest.mark.usefixtures("_no_backoff")
async def test_a_wait_for_a_service_that_stays_down_ends_with_its_budget(openai_service):
    openai_service.seconds = 30
    status, _ = await waited_through(openai_service, [fails(503)] * 1_000, max_wait_s=0.5)
    assert status.status is TrainingStatusEnum.CANCELED
    assert "after max_wait_s (0.5 s)" in status.message


@pytest.mark.usefixtures("_no_backoff")
async def test_the_status_during_an_outage_is_the_last_known_one_and_says_so(openai_service):
    openai_service.seconds = 30
    async with connect_adapter(openai_service) as adapter:
        ref = await adapter.submit(make_collection())
        openai_service.faults["retrieve"] = [fails(503)] * 2
        for polls in ("poll", "2 polls"):
            status = await adapter.status(ref)
            assert status.status is TrainingStatusEnum.PENDING
            assert f"the last {polls} failed" in status.message
        assert "failed" not in (await adapter.status(ref)).message
    async with connect_adapter(openai_service) as adapter:
        openai_service.faults["retrieve"] = [fails(503)]
        with pytest.raises(BackendUnavailable):
            await adapter.status(ref)


@pytest.mark.usefixtures("_no_backoff")
async def test_a_failed_poll_taken_for_a_failed_job_fails_the_job(openai_service):
    """Mutation check."""
    status, _ = await waited_through(openai_service, FAULTS, Hasty)
    assert status.status is TrainingStatusEnum.FAILED


@pytest.mark.slow
def test_a_lost_response_creates_no_second_job(make_toy, openai_service):
    openai_service.faults = {"create": [lost_response], "upload": [lost_response]}
    toy = make_toy(openai_service)
    child = toy.start()
    assert child.wait() == 0, child.said
    assert_one_job_an_epoch(toy, openai_service)
    assert len(openai_service.files) == NUM_EPOCHS


@pytest.mark.slow
def test_a_run_survives_an_outage_of_the_service(make_toy, openai_service):
    """Its record mentions the outage."""
    openai_service.faults["retrieve"] = [fails(503), *[cut] * 3, page(200), page(503)]
    toy = make_toy(openai_service)
    child = toy.start()
    assert child.wait() == 0, child.said
    assert_one_job_an_epoch(toy, openai_service)
    first = json.loads((toy.run / "training_metrics.jsonl").read_text().splitlines()[0])
    assert first["num_poll_errors"] == 6
    assert "the last 3 polls failed" in (toy.run / "run.log").read_text()


@pytest.mark.usefixtures("_no_backoff")
async def test_concurrent_waits_survive_the_same_outage(openai_service):
    openai_service.faults["retrieve"] = [fails(503)] * 40
    async with connect_adapter(openai_service) as adapter:
        refs = [await adapter.submit(make_collection(job_key=str(number))) for number in range(8)]
        ended = await asyncio.gather(*map(adapter.wait_until_complete, refs))
    assert [status.status for status in ended] == [TrainingStatusEnum.COMPLETED] * 8
