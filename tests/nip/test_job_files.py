"""A group's files are read back unchanged."""

import math
from dataclasses import replace

import numpy as np
import pytest

from reinforge.errors import StorageError, TrajectoryError
from reinforge.multiagent import build_agents, build_protocol
from reinforge.multiagent.nip.job_files import GroupFiles, JobRecord
from reinforge.multiagent.nip.rollouts import encode_dialogues
from reinforge.multiagent.nip.training_data import TrainingData
from reinforge.types.request import ChatPrompt, TokenLogprobs
from reinforge.types.supports import Supports
from reinforge.types.trajectory import EpisodeItem, Trajectory, TrajectoryCollection
from tests.groups import dialogue, experiment

SAMPLED = TokenLogprobs(
    (1, 2),
    (3, 4),
    (-0.5, -0.25),
    7,
    "length",
    0.7,
    True,
    (),
    (-0.4, 0.0),
    Supports.from_sets([np.array([3, 9]), np.zeros(0)]),
)
ENCODED = TokenLogprobs((1,), (5, 6), (math.nan, math.nan), -1)
PROMPT = ChatPrompt(({"role": "user", "content": "q"},), ({"type": "function"},), -1)


def trajectory(logprobs, **fields):
    asked = EpisodeItem(role="user", content="ü?", trained=False)
    return Trajectory(episode=[asked, EpisodeItem(role="assistant", content="a", logprobs=logprobs)], **fields)


def test_trajectories_come_back_to_the_token(tmp_path):
    siblings = [
        trajectory(SAMPLED, reward=1.0, agent="a", agent_weight=2.0),
        trajectory(ENCODED, reward=0.0, agent="a"),
    ]
    hosted = [trajectory(PROMPT, reward=0.5, group_id="g", metadata={"n": 1})]
    given = TrajectoryCollection(trajectories=[siblings, hosted], run_id="r", model_group="both", job_key="k")
    files = GroupFiles(tmp_path)
    files.write_trajectories("job", given)
    found = files.read_trajectories("job")
    first, second = found.trajectories[0]
    assert first == siblings[0]
    assert first.turns[0].tokens.supports.sets[0].tolist() == [3, 9]
    assert np.isnan(second.turns[0].tokens.logprobs).all(), "encoded tokens have no log-probs"
    assert second.turns[0].tokens.token_ids == (5, 6)
    assert found.trajectories[1] == hosted
    assert (found.run_id, found.model_group, found.job_key) == ("r", "both", "k")
    assert [item.is_trained for item in first.episode] == [False, True]


def test_jobs_and_state(tmp_path):
    files = GroupFiles(tmp_path / "group")
    assert (files.read_state(), files.read_job("a"), files.read_trajectories("a")) == ({}, None, None)
    job = JobRecord("a-0", "dpo", "named", "m")
    files.write_job(job)
    assert files.read_job("a-0") == job
    assert job.training_ref is None
    taken = replace(job, ref={"run_id": "r", "backend": "openai", "metadata": {"job_id": "j"}})
    files.write_job(taken)
    assert files.read_job("a-0").training_ref.metadata == {"job_id": "j"}
    files.write_state(fine_tune_job_id="j", fine_tuned_model_name=None, job="a-0")
    assert files.read_state()["job"] == "a-0"


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    files = GroupFiles(tmp_path)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(StorageError, match=r"cannot read .*state\.json"):
        files.read_state()


PARAMS = experiment("m")
HANDLER, AGENTS = build_protocol(PARAMS), build_agents(PARAMS)
DATA = TrainingData("both", HANDLER, AGENTS, AGENTS, dict.fromkeys(AGENTS, 1.0))


def test_a_dialogue_whose_verifier_said_nothing_costs_that_dialogue():
    whole = dialogue(1, decision="reject")
    silent = replace(whole, messages=tuple(m for m in whole.messages if m.agent == "prover"))
    rollouts = encode_dialogues([silent, whole], HANDLER)
    [[trajectory]] = DATA.build_supervised({}, {"verifier": rollouts})
    assert trajectory.episode_id == "verifier/truth/1"
    assert [turn.content for turn in trajectory.turns] == ["is it 1", "accept"]
    assert len(DATA.build_supervised({"verifier": rollouts}, {})) == 1
    unknown = encode_dialogues([dialogue(1, truth=None)], HANDLER)
    with pytest.raises(TrajectoryError, match="verifier/0: y is unknown"):
        DATA.build_supervised({}, {"verifier": unknown})
