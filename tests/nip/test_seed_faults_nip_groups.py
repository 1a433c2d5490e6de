"""Faults of neural-interactive-proofs in shared-model groups (seed-faults.md), on both backends."""

import copy
import json
import logging
import pickle

import pytest

from reinforge.errors import JobFailed
from reinforge.types.request import ModelRequest, SamplingParams
from tests.faults import assert_every_fault_has_a_test
from tests.groups import Embedded, Hosted, rollouts
from tests.openai_server import fails
from tests.protocols.stand_in import lost_response

COVERED = {
    3: ["tests/fault/test_group_jobs.py::test_a_killed_group_continues"],
    4: ["tests/fault/test_group_jobs.py::test_a_killed_group_continues"],
    10: ["tests/nip/test_shared_model_groups.py::test_a_frozen_group_has_nothing_to_wait_for"],
    11: ["tests/nip/test_seed_faults_nip_groups.py::test_nip_1_errors_of_a_service_are_tried_again"],
}
OF_GROUPS = (1, 3, 4, 6, 7, 8, 9, 10, 11, 14)


def test_every_fault_has_a_test():
    assert_every_fault_has_a_test(OF_GROUPS, "nip", __file__, COVERED, not_there_yet=())


@pytest.fixture
def hosted(tmp_path, tiny_model_dir, openai_service):
    made = Hosted(tmp_path / "groups", tiny_model_dir, openai_service)
    yield made
    made.close()


@pytest.fixture
def embedded(tmp_path, tiny_model_dir):
    made = Embedded(tmp_path / "groups", tiny_model_dir)
    yield made
    made.close()


def both(backend, count=12):
    params = backend.experiment()
    return {"prover": rollouts(params, count), "verifier": rollouts(params, count)}


async def test_nip_1_a_cancelled_job_ends(hosted):
    """neural-interactive-proofs polls forever; here the job ends with a reason, and the same data makes a new one."""
    hosted.service.ends = ["cancelled"]
    group = hosted.group()
    first = await group.create_supervised_fine_tune_job(both(hosted))
    assert await group.wait_for_fine_tune_job(60) == "cancelled"
    assert await group.get_fine_tune_job_status() == "cancelled"
    assert await group.fine_tune_job_failed()
    assert "cancel" in await group.get_fine_tune_job_error_repr()
    with pytest.raises(JobFailed, match="the job is cancelled"):
        await group.switch_to_next_model()
    assert await hosted.group().get_fine_tune_job_status() == "cancelled", "another process knows it"
    second = await group.create_supervised_fine_tune_job(both(hosted))
    assert second != first
    assert await group.wait_for_fine_tune_job(60) == "succeeded"


async def test_nip_1_a_wait_may_have_an_end(hosted):
    hosted.service.seconds = 3600
    group = hosted.group()
    job = await group.create_supervised_fine_tune_job(both(hosted))
    with pytest.raises(TimeoutError):
        await group.wait_for_fine_tune_job(0.05)
    assert await group.get_fine_tune_job_status() in ("pending", "running"), "the job is still running"
    other = {"prover": rollouts(hosted.experiment(), claim="no")}
    with pytest.raises(JobFailed, match=f"the job {job} is (pending|running); wait until it has ended"):
        await group.create_supervised_fine_tune_job(other)
    assert len(hosted.service.jobs) == 1


async def test_nip_1_errors_of_a_service_are_tried_again(hosted):
    """Lost responses and errors while a job is submitted and polled: one job, and it succeeds."""
    faults = hosted.service.faults
    faults["upload"], faults["create"] = [fails(503), lost_response], [lost_response, fails(500)]
    faults["retrieve"] = [fails(503), fails(502), fails(500)]
    group = hosted.group()
    await group.create_supervised_fine_tune_job(both(hosted))
    assert await group.wait_for_fine_tune_job(60) == "succeeded"
    assert len(hosted.service.jobs) == 1
    await group.switch_to_next_model()
    faults["chat"] = [fails(429)]
    await group.sample(ModelRequest([{"role": "user", "content": "q"}], SamplingParams(max_tokens=2)))


async def test_nip_1_a_job_that_nobody_knows_is_not_found(hosted, caplog):
    group = hosted.group()
    group.set_state({"fine_tune_job_id": "ftjob-elsewhere"})
    assert await group.get_fine_tune_job_status() == "not_found"
    assert await group.fine_tune_job_failed()
    assert await group.get_fine_tune_job_error_repr() == "job ftjob-elsewhere not found"
    hosted.made.remove(group)
    await group.close()
    assert "keeps running" not in caplog.text, "it was never sent"


async def test_nip_3_each_group_keeps_its_own_job(hosted):
    """The second group fails; on resume the first group finds its job instead of creating another."""
    params = hosted.experiment(agents={"verifier": {"shared_model_group": "judges"}})
    one, two = hosted.group(params, name="both"), hosted.group(params, name="judges")
    hosted.service.ends = ["succeeded", "failed"]
    job = await one.create_supervised_fine_tune_job({"prover": rollouts(params)})
    await two.create_supervised_fine_tune_job({"verifier": rollouts(params)})
    assert [await each.wait_for_fine_tune_job(60) for each in (one, two)] == ["succeeded", "failed"]
    again = hosted.group(params, name="both")
    assert again.get_state_dict() == {"fine_tune_job_id": job, "fine_tuned_model_name": None}
    assert await again.create_supervised_fine_tune_job({"prover": rollouts(params)}) == job
    assert len(hosted.service.jobs) == 2


async def test_nip_6_too_little_data_is_a_failed_job_with_its_reason(hosted, caplog):
    group = hosted.group()
    await group.create_supervised_fine_tune_job({"prover": rollouts(hosted.experiment(), 9)})
    assert await group.get_fine_tune_job_status() == "failed"
    assert await group.get_fine_tune_job_error_repr() == (
        "not enough training data: found 9 rows, but a job needs at least 10 (min_examples); nothing was sent. Collect "
        "more (examples_per_epoch, num_generations), or keep more (min_reward, best_k, pairs)"
    )
    with pytest.raises(JobFailed, match="not enough training data: found 9 rows, but a job needs at least 10"):
        await group.switch_to_next_model()
    assert hosted.service.jobs == {}
    assert await hosted.group().get_fine_tune_job_status() == "failed", "another process knows it"


async def test_nip_6_nothing_to_train_is_no_success_either(embedded):
    group = embedded.group()
    await group.create_supervised_fine_tune_job({"prover": []})
    assert await group.wait_for_fine_tune_job(60) == "failed"
    assert "nothing to train" in await group.get_fine_tune_job_error_repr()


async def test_nip_7_a_job_has_its_settings_and_its_seed(hosted):
    params = hosted.experiment(text_rl={"num_epochs": 3})
    group = hosted.group(params)
    await group.create_supervised_fine_tune_job(both(hosted), job_name="round 1")
    [job] = hosted.service.jobs.values()
    assert job["method"]["supervised"]["hyperparameters"]["n_epochs"] == 3
    assert isinstance(job["seed"], int)
    assert job.get("integrations") in (None, [])
    assert (job["metadata"]["reinforge_run"], job["metadata"]["reinforge_model_group"]) == ("r", "both")
    assert await group.wait_for_fine_tune_job(60) == "succeeded"
    await group.switch_to_next_model()
    assert ":round 1:" in group.model_name, "a job's name is part of its model's"


@pytest.mark.slow
async def test_nip_8_each_role_has_its_share(backend, caplog):
    """A prover with 24 dialogues, a verifier with 12: 12 rows each at the service, sample weights in this process."""
    params = backend.experiment()
    group = backend.group(params)
    data = {"prover": rollouts(params, 24), "verifier": rollouts(params, 12)}
    with caplog.at_level(logging.INFO):
        await group.create_supervised_fine_tune_job(data)
    assert await group.wait_for_fine_tune_job(60) == "succeeded"
    [name] = [path.name for path in group.files.jobs.iterdir()]
    agents = [siblings[0].agent for siblings in group.files.read_trajectories(name).trajectories]
    counts = {agent: agents.count(agent) for agent in ("prover", "verifier")}
    if isinstance(backend, Hosted):
        assert counts == {"prover": 12, "verifier": 12}
        assert "12 of 36 rows are left out, so that each agent has its share" in caplog.text
    else:
        assert counts == {"prover": 24, "verifier": 12}, "the algorithms weight the samples: tests/core/algorithms"


async def test_nip_8_equal_rows_count_once_and_a_role_may_count_more(hosted):
    params = hosted.experiment(agents={"prover": {"agent_weight": 2.0}})
    group = hosted.group(params)
    prover = [trajectory for trajectory in await views(hosted, "prover", 24) for _ in range(2)]
    await group.create_supervised_fine_tune_job({"prover": prover, "verifier": rollouts(params, 8)})
    [job] = hosted.service.jobs.values()
    rows = hosted.service.rows(job["training_file"])
    asked = [row["messages"][0]["content"][0] for row in rows]
    assert (asked.count("P"), asked.count("V")) == (16, 8)


async def views(backend, agent, count):
    group = backend.group(run_id="other")
    made = group._training_data.build_supervised({agent: rollouts(backend.experiment(), count)}, {})
    return [trajectory.model_copy(update={"group_id": None}) for [trajectory] in made]


async def test_nip_9_one_role_of_a_shared_model_may_be_frozen(backend):
    params = backend.experiment(agents={"verifier": {"freeze_agent": True}})
    group = backend.group(params)
    assert group.is_trainable
    await group.create_supervised_fine_tune_job(both(backend))
    assert await group.wait_for_fine_tune_job(60) == "succeeded"
    [name] = [path.name for path in group.files.jobs.iterdir()]
    assert {siblings[0].agent for siblings in group.files.read_trajectories(name).trajectories} == {"prover"}


def test_nip_14_a_group_is_not_pickled_and_stays_alive(backend):
    """In neural-interactive-proofs a pickled group loses its live client."""
    group = backend.group()
    for spoil in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match=r"cannot be pickled; send get_state_dict\(\) and pass it"):
            spoil(group)
    assert json.loads(json.dumps(group.get_state_dict())) == {"fine_tune_job_id": None, "fine_tuned_model_name": None}
    group.sync.sample(ModelRequest([{"role": "user", "content": "q"}], SamplingParams(max_tokens=2)))
