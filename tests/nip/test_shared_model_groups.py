"""Shared-model groups of neural-interactive-proofs on each backend: the engine in this process, and OpenAI's API."""

import asyncio
import json
from pathlib import Path

import pytest

from reinforge.errors import ConfigError, JobFailed, StorageError, TrajectoryError
from reinforge.multiagent import (
    EmbeddedSharedModelGroup,
    ExperimentSettings,
    PureTextSharedModelGroup,
    PureTextSharedModelGroupState,
    build_agents,
    build_protocol,
)
from reinforge.multiagent.nip.adapter_group import AdapterSharedModelGroup
from reinforge.types.request import ModelRequest, SamplingParams
from reinforge.types.trajectory import EpisodeItem, Trajectory
from tests.groups import Embedded, Hosted, experiment, replies, rollouts

ASKED = ModelRequest([{"role": "user", "content": "P q1"}], SamplingParams(temperature=0, max_tokens=3))


def both(params, **fields):
    return {"prover": rollouts(params, **fields), "verifier": rollouts(params, **fields)}


async def test_what_a_group_is(backend):
    params = backend.experiment(text_rl={"num_epochs": 2})
    group = backend.group(params)
    assert isinstance(group, PureTextSharedModelGroup)
    assert list(group.agent_ids_and_names()) == [(0, "prover"), (1, "verifier")]
    assert group.agent_names == ("prover", "verifier")
    assert (group.group_name, group.max_message_rounds, group.num_epochs) == ("both", 4, 2)
    assert (group.lora_alpha, group.rl_learning_rate, group.is_trainable) == (32, 0.003, True)
    assert group.shared_agent_params == params.agents["prover"]
    assert group.model_name == group.base_model_name == backend.model
    assert group.get_state() == PureTextSharedModelGroupState(None, None)
    assert await group.get_fine_tune_job_status() == "not_found"
    assert not await group.fine_tune_job_failed(), "there is none"
    assert await group.get_fine_tune_job_error_repr() == "no job has been created"
    await group.eval()
    assert not group.is_training
    await group.train()
    assert group.is_training


async def test_a_supervised_job_makes_the_model_that_is_switched_to(backend):
    group = backend.group()
    await group.wait_for_ready(60)
    before = await group.sample(ASKED)
    job = await group.create_supervised_fine_tune_job(both(group.hyper_params), job_name="first")
    assert job == group.fine_tune_job_id == group.get_state_dict()["fine_tune_job_id"]
    assert await group.get_fine_tune_job_status() in ("pending", "running", "succeeded")
    assert group.model_name == backend.model, "the job's model is not served yet"
    assert await group.wait_for_fine_tune_job(60) == "succeeded", await group.get_fine_tune_job_error_repr()
    assert not await group.fine_tune_job_failed()
    assert await group.get_fine_tune_job_error_repr() == "no error; the job's status is succeeded"
    assert (await group.sample(ASKED)).message == before.message, "the previous model is served until the switch"
    await group.switch_to_next_model()
    assert group.model_name == group.fine_tuned_model_name != backend.model
    await group.switch_to_next_model()
    assert backend.num_jobs(group) == 1
    await group.sample(ASKED)


async def test_every_way_to_pass_preferences(backend):
    """neural-interactive-proofs passes the timesteps first and the job's name by its keyword."""
    group = backend.group()
    good = {"prover": replies(group.hyper_params, "prover", [f"yes {i}" for i in range(12)])}
    bad = {"prover": replies(group.hyper_params, "prover", [f"no {i}" for i in range(12)])}
    timesteps = good
    job = await group.create_dpo_fine_tune_job(timesteps, good, bad, job_name="pairs")
    assert await group.wait_for_fine_tune_job(60) == "succeeded"
    assert await group.create_dpo_fine_tune_job(good, bad) == job
    assert await group.create_dpo_fine_tune_job(good, bad, job_name="pairs") == job
    assert await group.create_dpo_fine_tune_job(timesteps, good, bad, "pairs") == job
    named = {"positive_examples_per_agent": good, "negative_examples_per_agent": bad}
    assert await group.create_dpo_fine_tune_job(**named, timesteps_per_agent=timesteps, job_name="pairs") == job
    assert backend.num_jobs(group) == 1
    with pytest.raises(TypeError, match="job_name is passed twice, 'a' and 'b'"):
        await group.create_dpo_fine_tune_job(good, bad, "a", job_name="b")
    with pytest.raises(TypeError, match="the timesteps are passed twice"):
        await group.create_dpo_fine_tune_job(good, good, bad, timesteps_per_agent=good)
    with pytest.raises(TypeError, match="expected a job name as the last argument, not 7"):
        await group.create_dpo_fine_tune_job(good, bad, 7)
    await group.switch_to_next_model()
    assert group.fine_tuned_model_name is not None


async def test_a_frozen_group_has_nothing_to_wait_for(backend):
    """A loop over all groups, as in neural-interactive-proofs, creates a job, awaits it and switches."""
    frozen = {"prover": {"freeze_agent": True}, "verifier": {"freeze_agent": True}}
    params = backend.experiment(agents=frozen)
    group = backend.group(params)
    assert await group.create_supervised_fine_tune_job(both(params), job_name="first") == "frozen_job_id"
    pairs = {"prover": replies(params, "prover", ["yes"])}
    assert await group.create_dpo_fine_tune_job(pairs, pairs, pairs, job_name="second") == "frozen_job_id"
    assert await group.get_fine_tune_job_status() == "succeeded"
    assert not await group.fine_tune_job_failed()
    assert await group.wait_for_fine_tune_job() == "succeeded"
    await group.switch_to_next_model()
    assert group.model_name == backend.model
    assert not group.files.jobs.exists(), "nothing was created"
    group.set_state({"fine_tuned_model_name": "made before"})
    await group.switch_to_next_model()
    assert group.model_name == group.get_state().fine_tuned_model_name == "made before"
    if backend.service is not None and backend.name == "openai":
        assert not backend.service.jobs


def test_an_agent_is_in_one_group_and_in_the_one_that_it_names(backend):
    params = backend.experiment()
    handler, agents = build_protocol(params), build_agents(params)
    settings = ExperimentSettings("one", groups_dir=backend.folder)
    group = backend.make(params, settings, handler, agents.values(), "both")
    assert all(agent.shared_model_group is group for agent in agents.values())
    with pytest.raises(ValueError, match="the agent is already in the group both"):
        backend.make(params, settings, handler, [agents["prover"]], "both")
    group.sync.close()
    assert agents["prover"].shared_model_group is None
    with pytest.raises(ValueError, match="in a group named other, but it belongs to the group both"):
        backend.make(params, settings, handler, [agents["prover"]], "other")
    alone = backend.experiment(agents={"prover": {"shared_model_group": None}})
    with pytest.raises(ValueError, match="in a group named both, but it belongs to the group prover"):
        backend.make(alone, settings, handler, [build_agents(alone)["prover"]], "both")


def test_the_blocking_view_and_plain_event_loops(backend):
    group = backend.group()
    group.sync.wait_for_ready(60)
    job = group.create_supervised_fine_tune_job(both(group.hyper_params))
    asyncio.run(job)  # an event loop that is closed right after
    assert group.sync.wait_for_fine_tune_job(60) == "succeeded"
    group.sync.switch_to_next_model()
    assert group.sync.model_name == group.fine_tuned_model_name
    assert group.sync.get_state_dict() == group.get_state_dict()


async def test_jobs_accept_trajectories(backend):
    group = backend.group()
    asked = [
        [EpisodeItem(role="user", content=f"P q{i}"), EpisodeItem(role="assistant", content=f"it is {i}", trained=True)]
        for i in range(12)
    ]
    given = [Trajectory(episode=episode, reward=1.0) for episode in asked]
    await group.create_supervised_fine_tune_job({"prover": given})
    assert await group.wait_for_fine_tune_job(60) == "succeeded"
    with pytest.raises(TrajectoryError, match="verifier's view but is passed as prover's"):
        await group.create_supervised_fine_tune_job({"prover": [given[0].model_copy(update={"agent": "verifier"})]})


async def test_a_verifiers_guess_becomes_the_truth(backend):
    group = backend.group()
    wrong = rollouts(group.hyper_params, decision="reject", truth="accept")
    await group.create_supervised_fine_tune_job({}, {"verifier": wrong})
    assert await group.wait_for_fine_tune_job(60) == "succeeded"
    collection = group.files.read_trajectories(next(group.files.jobs.iterdir()).name)
    for [trajectory] in collection.trajectories:
        assert [turn.content for turn in trajectory.turns][-1] == "accept"
        assert trajectory.turns[0].content.startswith("is it"), "its other replies are unchanged"
    unknown = rollouts(group.hyper_params, truth=None)
    with pytest.raises(TrajectoryError, match="y is unknown, so the guess cannot be replaced"):
        await group.create_supervised_fine_tune_job({}, {"verifier": unknown})
    with pytest.raises(TrajectoryError, match="prover is not a verifier"):
        await group.create_supervised_fine_tune_job({}, {"prover": wrong})


async def test_another_process_resumes_with_the_model(backend):
    params = backend.experiment()
    group = backend.group(params)
    await group.create_supervised_fine_tune_job(both(params))
    await group.wait_for_fine_tune_job(60)
    await group.switch_to_next_model()
    state = json.loads(json.dumps(group.get_state_dict()))
    served = await group.sample(ASKED)
    again = backend.group(params)
    assert again.get_state_dict() == state, "read from the folder"
    assert (await again.sample(ASKED)).message == served.message
    elsewhere = backend.group(params, run_id="other")
    elsewhere.set_state(state)
    assert elsewhere.model_name == group.model_name
    assert await elsewhere.wait_for_fine_tune_job(60) == "succeeded", "found under the other run id"
    assert not await elsewhere.fine_tune_job_failed()
    assert (await elsewhere.sample(ASKED)).message == served.message
    with pytest.raises(ConfigError, match="a group's state has the keys fine_tune_job_id, fine_tuned_model_name"):
        elsewhere.set_state({"model": "x"})


async def test_switching_without_a_model_is_an_error(backend):
    group = backend.group()
    with pytest.raises(JobFailed, match="no model to switch to: the job is not_found"):
        await group.switch_to_next_model()


async def test_inconsistent_data_is_refused(backend):
    params = backend.experiment()
    group = backend.group(params)
    with pytest.raises(ConfigError, match="judge.*the group both has no such agent"):
        await group.create_supervised_fine_tune_job({"judge": rollouts(params)})
    with pytest.raises(
        TrajectoryError, match="prover: preferred and rejected replies must be paired, but there are 2 and 1"
    ):
        await group.create_dpo_fine_tune_job(
            {"prover": replies(params, "prover", ["a", "b"])}, {"prover": replies(params, "prover", ["c"])}
        )
    with pytest.raises(TrajectoryError, match="but there are 1 and 0"):
        await group.create_dpo_fine_tune_job({"prover": replies(params, "prover", ["a"])}, {})
    assert backend.num_jobs(group) == 0


def test_parameters_that_agents_share_must_be_equal(backend):
    params = backend.experiment(agents={"verifier": {"fine_tune_from_scratch": False}})
    with pytest.raises(
        ConfigError, match="fine_tune_from_scratch: differs within the group both.*prover True, verifier"
    ):
        backend.group(params)


def test_unsupported_fields_of_a_group_are_refused_by_name(backend):
    params = backend.experiment(agents={"verifier": {"use_dummy_api": True}})
    with pytest.raises(
        ConfigError, match="hyper_params.agents.verifier.use_dummy_api: is True, but this field is not supported"
    ):
        backend.group(params)


async def test_a_subclass_with_only_the_abstract_methods_works():
    """Only the abstract methods; everything else has a default."""
    params = experiment("m", agents={"verifier": {"shared_model_group": "other"}})

    class Mine(PureTextSharedModelGroup):
        status = "not_found"

        async def create_supervised_fine_tune_job(
            self, rollouts_per_agent, guess_replaced_rollouts=None, job_name=None
        ):
            self.status, self.fine_tune_job_id = "succeeded", "mine"

        async def create_dpo_fine_tune_job(
            self, positive_examples_per_agent, negative_examples_per_agent, job_name=None
        ):
            self.status = "failed"

        async def get_fine_tune_job_status(self):
            return self.status

        async def get_fine_tune_job_error_repr(self):
            return "too little"

    agents = (agent for agent in build_agents(params).values() if agent.name == "prover")
    group = Mine(params, ExperimentSettings("r"), build_protocol(params), agents, "both")
    await group.wait_for_ready()
    await group.create_supervised_fine_tune_job({})
    await group.switch_to_next_model()
    assert group.get_state_dict() == {"fine_tune_job_id": "mine", "fine_tuned_model_name": None}
    await group.create_dpo_fine_tune_job({}, {})
    assert await group.fine_tune_job_failed()
    with pytest.raises(JobFailed, match=r"the job is failed \(too little\)"):
        await group.switch_to_next_model()


@pytest.mark.slow
@pytest.mark.parametrize("backend", [Hosted], ids=["openai"], indirect=True)
async def test_jobs_of_several_groups_run_side_by_side(backend, openai_service):
    """All four jobs are created before the first of them ends: together they take as long as the slowest."""
    names = ("prover", "verifier")
    groups = []
    for number in range(2):
        params = backend.experiment(agents={name: {"shared_model_group": f"{name}{number}"} for name in names})
        groups += [(name, backend.group(params, name=f"{name}{number}")) for name in names]
    openai_service.seconds = 3.0
    await asyncio.gather(*(group.wait_for_ready(60) for _, group in groups))

    async def train(name, group):
        await group.create_supervised_fine_tune_job({name: rollouts(backend.experiment())})
        return await group.wait_for_fine_tune_job(60)

    assert await asyncio.gather(*(train(*each) for each in groups)) == ["succeeded"] * 4
    jobs = openai_service.jobs.values()
    assert len(jobs) == 4
    assert max(job["created_at"] for job in jobs) < min(job["finished_at"] for job in jobs)


@pytest.mark.slow
@pytest.mark.parametrize("from_scratch", [True, False])
async def test_the_next_job_begins_with_the_base_model_or_with_the_one_that_serves(
    backend, from_scratch, openai_service
):
    shared = {name: {"fine_tune_from_scratch": from_scratch} for name in ("prover", "verifier")}
    params = backend.experiment(agents=shared)
    group = backend.group(params)
    ids = []
    for claim in ("one", "two"):
        ids.append(await group.create_supervised_fine_tune_job({"prover": rollouts(params, claim=claim)}))
        assert await group.wait_for_fine_tune_job(60) == "succeeded"
        await group.switch_to_next_model()
    if isinstance(backend, Hosted):
        begun_with = openai_service.jobs[ids[1]]["model"]
        assert (begun_with == backend.model) is from_scratch
        return
    alone = backend.group(params, run_id="alone")
    await alone.create_supervised_fine_tune_job({"prover": rollouts(params, claim="two")})
    await alone.wait_for_fine_tune_job(60)
    await alone.switch_to_next_model()
    files = [Path(each.model_name, "adapter_model.safetensors") for each in (group, alone)]
    assert (files[0].read_bytes() == files[1].read_bytes()) is from_scratch


@pytest.mark.slow
@pytest.mark.parametrize("backend", [Embedded], ids=["embedded"], indirect=True)
async def test_a_damaged_model_is_not_served(backend):
    params = backend.experiment()
    group = backend.group(params)
    await group.create_supervised_fine_tune_job({"prover": rollouts(params)})
    await group.wait_for_fine_tune_job(60)
    await group.switch_to_next_model()
    file = Path(group.model_name, "adapter_model.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    again = backend.group(params)
    with pytest.raises(StorageError, match="it is damaged: adapter_model.safetensors was changed"):
        await again.sample(ASKED)


@pytest.mark.slow
async def test_pairs_of_equal_replies_are_left_out(backend, caplog):
    """Their gradients cancel: a job of nothing else ends as failed, and one of other pairs too trains on those."""
    group = backend.group()
    same = [f"say {i}" for i in range(12)]
    good = {"prover": replies(group.hyper_params, "prover", same)}
    await group.create_dpo_fine_tune_job(good, good)
    assert await group.wait_for_fine_tune_job(60) == "failed"
    assert "pairs" in (reason := await group.get_fine_tune_job_error_repr())
    assert "12" in reason
    assert group.model_name == backend.model
    mixed = {"prover": replies(group.hyper_params, "prover", [*same[:2], *(f"no {i}" for i in range(10))])}
    first = await group.create_dpo_fine_tune_job(good, mixed)
    assert await group.wait_for_fine_tune_job(60) == "succeeded", await group.get_fine_tune_job_error_repr()
    assert await group.create_dpo_fine_tune_job(good, mixed) == first
    assert backend.num_jobs(group) == 1


@pytest.mark.slow
async def test_changed_settings_of_the_backend_make_another_job(backend):
    """Under the same run_id; settings that say where and how often to call do not count."""
    params = backend.experiment()
    data = both(params)
    group = backend.group(params)
    first = await group.create_supervised_fine_tune_job(data)
    assert await group.wait_for_fine_tune_job(60) == "succeeded"
    await group.close()
    backend.settings = backend.same_settings
    again = backend.group(params)
    assert await again.create_supervised_fine_tune_job(data) == first
    await again.close()
    backend.settings = backend.changed_settings
    changed = backend.group(params)
    assert await changed.create_supervised_fine_tune_job(data) != first
    assert await changed.wait_for_fine_tune_job(60) == "succeeded"


@pytest.mark.slow
async def test_changed_parameters_of_the_experiment_make_another_job(backend):
    """Under the same run_id: how often a job passes over its data, and the weight of its preferences."""
    params = backend.experiment()
    good, bad = ({"prover": replies(params, "prover", [f"{word} {i}" for i in range(12)])} for word in ("yes", "no"))
    weights, ids = {name: {"dpo_beta": 0.3} for name in ("prover", "verifier")}, []
    for changes in ({}, {}, {"text_rl": {"num_epochs": 2}}, {"agents": weights}):
        group = backend.group(backend.experiment(**changes))
        ids.append(await group.create_dpo_fine_tune_job(good, bad))
        assert await group.wait_for_fine_tune_job(60) == "succeeded"
        await group.close()
    assert len(set(ids)) == 3, "only the repeated call has the same job"


@pytest.mark.slow
async def test_without_the_safeties_of_a_dpo_job(tmp_path, tiny_model_dir, monkeypatch):
    """Mutations: a job of equal pairs ends as succeeded, and changed settings return the old job."""
    backend = Embedded(tmp_path / "groups", tiny_model_dir)
    params = backend.experiment()
    good = {"prover": replies(params, "prover", [f"say {i}" for i in range(12)])}
    monkeypatch.setattr(AdapterSharedModelGroup, "_drop_identical_pairs", lambda self, collection: collection)
    monkeypatch.setattr(EmbeddedSharedModelGroup, "_job_settings", {})
    group = backend.group(params)
    first = await group.create_dpo_fine_tune_job(good, good)
    assert await group.wait_for_fine_tune_job(60) == "succeeded"
    await group.close()
    backend.settings = backend.changed_settings
    changed = backend.group(params)
    assert await changed.create_dpo_fine_tune_job(good, good) == first
    await changed.close()
