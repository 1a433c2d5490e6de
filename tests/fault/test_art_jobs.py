"""Jobs at an ART backend, over real HTTP and both protocols.

Neither protocol has an idempotency key. Wherever a run dies while it submits a job, and whichever response is lost, the
backend trains each epoch once: the run's journal has the job's id, or the job is found by the step that it makes.
"""

import json
import random
import signal

import pytest

from tests.fault import mutations
from tests.fault.kit import KILLED, PATIENCE_S, Toy, killed_at, killed_while, wait_until
from tests.fault.test_remote_jobs import STAGES
from tests.protocols.art import use_art_adapter
from tests.protocols.art_service import ARTService
from tests.protocols.stand_in import after, no_response

NUM_EPOCHS = 2
SLOW = {("submit.after_send", 1), ("submit.after_send", 2), ("submit.after_id:2", 2)}


@pytest.fixture
def art():
    with ARTService() as service:
        yield service


@pytest.fixture
def make_toy(tmp_path, tiny_model_dir, monkeypatch):
    def make(art, protocol, name="toy", **settings):
        toy = Toy(tmp_path / name, tiny_model_dir)
        use_art_adapter(toy, art, protocol, **settings)
        if protocol == 2:
            toy.set("trainer_adapters.adapter.backend.api_key", f"${{ART_KEY:-{art.key}}}")
        return toy.set("finetuning.num_epochs", NUM_EPOCHS).set("finetuning.gate", {"margin": -1.0})

    return make


def assert_one_job_an_epoch(toy, art):
    assert toy.summary["status"] == "completed"
    assert toy.summary["promoted"] is True
    done = [job for job in art.jobs if job.step is not None]
    assert [job.step for job in done] == list(range(1, NUM_EPOCHS + 1)), "each epoch is trained once"
    refs = [json.loads(ref)["metadata"] for (ref,) in toy.rows_of("SELECT ref FROM jobs ORDER BY epoch")]
    assert [ref["base_step"] for ref in refs] == list(range(NUM_EPOCHS))
    assert [row["version"] for row in toy.summary["policy_versions"]] == list(range(NUM_EPOCHS + 1))


@pytest.mark.parametrize(
    ("site", "protocol"),
    [
        pytest.param(site, protocol, marks=pytest.mark.slow if (site, protocol) in SLOW else pytest.mark.fault)
        for site in (*STAGES, "submit.after_id:2")
        for protocol in (1, 2)
    ],
)
def test_a_run_killed_in_any_stage_trains_each_epoch_once(make_toy, art, site, protocol):
    toy = make_toy(art, protocol)
    killed_at(toy, site)
    assert_one_job_an_epoch(toy, art)


@pytest.mark.slow
def test_a_server_that_stops_with_the_request_gets_the_job_again(make_toy, art):
    """Killed while it trains: the server of protocol 1 stopped too, and no step comes."""
    art.goes_on, art.seconds = False, 60.0
    toy = make_toy(art, 1, settle_s=0.3)
    child = toy.start()
    wait_until(lambda: art.jobs, child)
    child.send(signal.SIGKILL)
    assert child.wait() == KILLED
    art.seconds = 0.05
    child = toy.resume()
    assert child.wait() == 0, child.said
    assert_one_job_an_epoch(toy, art)
    assert len(art.jobs) == NUM_EPOCHS + 1


@pytest.mark.slow
@pytest.mark.parametrize("protocol", [1, pytest.param(2, marks=pytest.mark.fault)])
def test_a_run_killed_while_it_trains_finds_its_job(make_toy, art, protocol):
    art.seconds = 0.5
    toy = make_toy(art, protocol)
    killed_while(toy, lambda: art.jobs)
    assert_one_job_an_epoch(toy, art)
    assert len(art.jobs) == NUM_EPOCHS


@pytest.mark.slow
def test_a_run_killed_before_the_response_finds_its_job(make_toy, art):
    """The service has started the job, and the process dies before the id arrives."""
    art.faults["create"] = [after(no_response)]
    toy = make_toy(art, 2)
    killed_while(toy, lambda: art.jobs)
    assert_one_job_an_epoch(toy, art)
    assert len(art.jobs) == NUM_EPOCHS


@pytest.mark.fault
@pytest.mark.parametrize("protocol", [1, 2])
def test_a_job_that_is_not_looked_for_is_started_twice(make_toy, art, protocol):
    """Mutation check: without looking for the step of the lost job, a second one is started beside it."""
    art.ends = ["hangs"]
    if protocol == 2:
        art.faults["create"] = [after(no_response)]
    toy = make_toy(art, protocol, settle_s=2 * PATIENCE_S)
    child = toy.start()
    wait_until(lambda: art.jobs, child)
    child.send(signal.SIGKILL)
    assert child.wait() == KILLED
    child = toy.resume(mutation=mutations.look_for_no_step)
    wait_until(lambda: len(art.jobs) == 2, child)
    assert not art.jobs[0].is_over
    child.send(signal.SIGKILL)


@pytest.mark.fault
@pytest.mark.parametrize("protocol", [1, 2])
def test_a_run_killed_at_random_times_trains_each_epoch_once(make_toy, protocol):
    rng = random.Random(protocol)
    kills, number = 0, 0
    while kills < 12:
        with ARTService() as art:
            art.seconds = 0.3
            toy = make_toy(art, protocol, f"toy-{number}")
            kills, number = kills + toy.end_with_kills(rng), number + 1
            assert_one_job_an_epoch(toy, art)
