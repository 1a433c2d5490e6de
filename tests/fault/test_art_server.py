"""A server of ART's protocols that is killed at any time makes exactly one step of each training call, and serves it.

The client is made from the official one, as ART's is, with its retries. The server is killed with SIGKILL while it
creates the model, records the job, trains, saves, publishes and answers, and started again at the same address.
"""

import itertools
import json
import time
from functools import partial

import httpx
import pytest

from reinforge.files import find_damage
from reinforge.protocols.art.server.records import ModelFolder
from tests.fault import art_server
from tests.fault.sizes import scaled
from tests.protocols.art_client import PROMPT, SETTINGS, build_trajectory, score

NUM_KILLS = scaled(100)
PARTS = ("create", "record_job", "train", "publish", "name", "record_result")
SITES = (
    *(f"{part}:{place}" for part in PARTS for place in ("before", "after")),
    "step.after_backward",
    "step.after_optim",
    "ckpt.after_tensor",
    "ckpt.after_manifest",
)
SLOW = {"publish:before"}


@pytest.fixture
def serve(tiny_model_dir):
    return partial(art_server.serve, tiny_model_dir)


class Trainer:
    """A client's loop: sample, train, wait.

    Attributes:
        jobs: The ids of its jobs, in order.
    """

    def __init__(self, client):
        self.client, self.jobs = client, []

    def sample(self, seed):
        settings = {"max_tokens": 2, "logprobs": True, "extra_body": {"return_token_ids": True}}
        reply = self.client.chat.completions.create(model="agent", messages=PROMPT, seed=seed, **settings)
        return reply.model_dump()

    def train(self):
        """Makes one step, and returns the events of its job; polls every 20 ms."""
        names = {"entity": None, "project": "games", "name": "agent", "base_model": "tiny", "return_existing": True}
        model = self.client.post("/preview/models", cast_to=object, body=names)
        answers = [self.sample(100 * len(self.jobs) + number) for number in range(8)]
        group = [build_trajectory(answer, score(answer) + number % 2) for number, answer in enumerate(answers)]
        body = {"model_id": model["id"], "experimental_config": SETTINGS}
        body["trajectory_groups"] = [{"trajectories": group}]
        self.jobs.append(self.client.post("/preview/training-jobs", cast_to=object, body=body)["id"])
        while True:
            path = f"/preview/training-jobs/{self.jobs[-1]}/events"
            events = self.client.get(path, cast_to=object)["data"]
            if events[-1]["type"] != "training_started":
                return events
            time.sleep(0.02)


def assert_once(servers, trainer):
    [path] = [path for path in servers.folder.iterdir() if (path / "model.json").exists()]
    folder, steps = ModelFolder(path), list(range(1, len(trainer.jobs) + 1))
    assert sorted(folder.list_jobs()) == sorted(trainer.jobs)
    results = [folder.read_result(job) for job in trainer.jobs]
    assert [(result.step, result.error) for result in results] == [(step, None) for step in steps]
    assert folder.list_steps() == steps
    checkpoints = [folder.get_checkpoint(step) for step in steps]
    assert [find_damage(checkpoint) for checkpoint in checkpoints] == [None] * len(steps)
    made_by = [json.loads((checkpoint / "manifest.json").read_text())["job"] for checkpoint in checkpoints]
    assert made_by == trainer.jobs
    states = [json.loads((checkpoint / "training/state.json").read_text()) for checkpoint in checkpoints]
    assert [state["num_steps"] for state in states] == steps, "each job is one update of the weights before it"
    served = trainer.sample(5)
    servers.kill()
    servers.start()
    saved = trainer.sample(5)
    assert served["model_version"] == saved["model_version"] == steps[-1]
    assert served["choices"] == saved["choices"]


@pytest.mark.parametrize(
    "site", [pytest.param(site, marks=pytest.mark.slow if site in SLOW else pytest.mark.fault) for site in SITES]
)
def test_a_server_that_dies_at_one_point_makes_the_step_once(servers, site):
    with servers.restarted_after(site), servers.client() as client:
        trainer = Trainer(client)
        events = trainer.train()
    assert [events[-1]["type"], events[-1]["data"]] == ["training_ended", {"step": 1}]
    with servers.client() as trainer.client:
        trainer.train()
        assert_once(servers, trainer)


@pytest.mark.fault
@pytest.mark.parametrize("mutation", ["forget record_job:after", "twice record_result:before"])
def test_without_its_memory_a_server_trains_twice(servers, mutation):
    """Mutation check: of the requests it has seen, and of the job that has made a step."""
    with servers.restarted_after(mutation, then=mutation.split()[0]), servers.client() as client:
        trainer = Trainer(client)
        trainer.train()
    with servers.client() as trainer.client, pytest.raises(AssertionError):
        assert_once(servers, trainer)


@pytest.mark.fault
def test_a_training_call_of_protocol_1_whose_server_dies_ends_by_its_step(servers):
    """Its caller waits on one connection, which breaks off; after the restart the step says that the job has ended."""
    described = {"name": "agent", "project": "games", "entity": None, "base_model": "tiny"}
    with servers.restarted_after("publish:before"), servers.client() as client:
        trainer = Trainer(client)
        url = f"http://127.0.0.1:{servers.port}"
        servers.wait_ready()
        httpx.post(f"{url}/register", json=described, timeout=60)
        answers = [trainer.sample(number) for number in range(8)]
        group = [build_trajectory(answer, number % 2) for number, answer in enumerate(answers)]
        body = {"model": described, "trajectory_groups": [{"trajectories": group}], "config": {}, "dev_config": {}}
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{url}/_train_model", json=body, timeout=60)
    servers.wait_ready()
    assert httpx.post(f"{url}/_get_step", json=described, timeout=60).json() == 1
    [path] = servers.folder.iterdir()
    with servers.client() as trainer.client:
        trainer.jobs = ModelFolder(path).list_jobs()
        trainer.train()
        assert_once(servers, trainer)


@pytest.mark.fault
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_kills", [NUM_KILLS])
def test_kills_at_random_times_over_submit_train_and_publish(servers, num_kills):
    """A server lives for its start and a random part of one and a half undisturbed jobs, then it is killed."""
    servers.start()
    with servers.client() as client:
        trainer = Trainer(client)
        servers.wait_ready()
        began = time.monotonic()
        trainer.train()
        job_s = time.monotonic() - began
        with servers.killed_at_random(num_kills, 1.5 * job_s) as over:
            for _ in itertools.count():
                trainer.train()
                if over.is_set():
                    break
        assert_once(servers, trainer)
