"""Faults 2-6, 8, 12 and 13 of neural-interactive-proofs (seed-faults.md): its trainers."""

import os
import subprocess
import sys

import pytest

from reinforge.algorithms.expert_iteration import compute_sampling_probabilities
from reinforge.errors import BackendUnavailable, JobFailed
from tests.babble import settings
from tests.doubles import RecordingAdapter
from tests.faults import assert_every_fault_has_a_test
from tests.scripted_run import ScriptedRun

BUILDER, AGENTS = "tests/core/multiagent/test_builder.py::", "tests/core/e2e/test_agents.py::"
IMITATION = "tests/core/algorithms/test_imitation.py::"
COVERED = {
    2: [f"{AGENTS}test_the_verifier_learns_in_one_epoch_and_the_trained_weights_are_tested"],
    3: [
        f"{AGENTS}test_a_resumed_run_still_trains_on_the_rollouts_of_previous_epochs",
        "tests/core/e2e/test_resume.py::test_a_killed_run_resumes_by_name_and_says_from_where",
    ],
    5: [f"{IMITATION}test_sampling_probabilities_grow_with_the_reward"],
    6: [
        f"{IMITATION}test_too_few_trajectories_give_a_skip_reason",
        "tests/core/e2e/test_algorithms.py::test_an_epoch_with_fewer_examples_than_asked_for_is_empty_and_says_why",
    ],
    8: [
        f"{BUILDER}test_the_chattiest_role_counts_no_more_than_the_others",
        f"{BUILDER}test_rows_with_equal_tokens_are_trained_once",
    ],
    12: [f"{BUILDER}test_a_trees_first_round_has_a_pair_too"],
    13: [f"{BUILDER}test_ids_are_their_own_in_every_tree_and_epoch"],
}


def test_every_fault_has_a_test():
    assert_every_fault_has_a_test((2, 3, 4, 5, 6, 8, 12, 13), "nip", __file__, COVERED, not_there_yet=())


def scripted(folder, *, answer="accept", algorithm=None, **builder):
    """A run with two scripted agents; a reply with a vowel accepts, and every second seed gives one."""
    run = ScriptedRun(folder, script=lambda request: "ab" if request.sampling.seed % 2 else "xyz")
    parts = settings()
    run.settings["workflow"] = parts["workflow"]
    run.settings["eval"]["evaluators"] = {"reward": parts["evaluator"]}
    rows = [{"id": i, "question": f"q{i}", "answer": answer} for i in range(20)]
    run.settings["eval"]["general"]["dataset"]["rows"] = rows
    run.settings["trajectory_builders"]["builder"] = {"_type": "agents", "num_generations": 4, **builder}
    run.settings["finetuning"]["algorithm"] = {"_type": "expert_iteration", **(algorithm or {})}
    return run


async def test_nip_2_the_last_iteration_is_trained_on(tmp_path):
    run = scripted(tmp_path)
    run.settings["finetuning"]["num_epochs"] = 1
    await run.run()
    assert [job.epoch for job in run.adapter.jobs] == [0]


class FailsOnce(RecordingAdapter):
    """A trainer adapter that cannot be reached on the second job."""

    def __init__(self, policy):
        super().__init__(policy)
        self.failures = ["r/1"]

    async def submit(self, trajectories):
        if trajectories.job_key in self.failures:
            self.failures.remove(trajectories.job_key)
            raise BackendUnavailable("unreachable")
        return await super().submit(trajectories)


async def test_nip_3_a_job_that_is_done_is_not_made_again(tmp_path):
    run = scripted(tmp_path)
    run.adapter = FailsOnce(run.adapter.server)
    with pytest.raises(BackendUnavailable):
        await run.run()
    summary = await run.run(resume=tmp_path / "r")
    assert summary.status == "completed"
    assert [job.job_key for job in run.adapter.jobs] == ["r/0", "r/1"], "the journal has the first job by its key"


def test_nip_4_draws_do_not_depend_on_the_process():
    """Python salts `hash(str)` per process; no random choice depends on it."""
    code = (
        "from tests.core.algorithms.test_imitation import weighted_sampling, two_agents\n"
        "print(weighted_sampling().sample_trajectories(two_agents(*[0.1 * n for n in range(20)])))"
    )
    found = set()
    for salt in ("1", "2"):
        env = {"PYTHONHASHSEED": salt, "PYTHONPATH": os.pathsep.join(sys.path)}
        out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        found.add(out.stdout)
    assert len(found) == 1


def test_nip_5_equal_rewards_are_drawn_alike():
    assert compute_sampling_probabilities([0.5] * 4, None, 0.0).tolist() == [0.25] * 4
    assert compute_sampling_probabilities([-1.0], None, 0.01).tolist() == [1.0]


async def test_nip_6_nothing_good_enough_is_an_empty_epoch_and_no_job(tmp_path):
    run = scripted(tmp_path, algorithm={"reward_threshold": 2.0})
    run.settings["finetuning"]["limits"] = {"max_empty_updates": 2}
    with pytest.raises(JobFailed, match="2 epochs in a row had nothing to train on"):
        await run.run()
    assert run.adapter.jobs == []


async def test_nip_8_rows_say_whose_they_are(tmp_path):
    """Both agents share a model and a job; the job has the weight of each."""
    run = scripted(tmp_path, agent_weights={"prover": 0.5})
    await run.run()
    weights = {(t.agent, t.agent_weight) for g in run.adapter.jobs[0].groups for t in g.trajectories}
    assert weights == {("prover", 0.5), ("verifier", 1.0)}


async def test_nip_13_ids_are_unique_over_iterations(tmp_path):
    run = scripted(tmp_path, fine_tune_on_all_previous_rollouts=True)
    run.settings["finetuning"]["num_epochs"] = 3
    await run.run()
    last = run.adapter.jobs[-1].groups
    episodes = [t.episode_id for group in last for t in group.trajectories]
    assert len({group.group_id for group in last}) == len(last)
    assert len(set(episodes)) == len(episodes) / 2, "each episode once per agent"
    assert {episode.split("/")[1] for episode in episodes} == {"0", "1", "2"}
