"""Faults 2-6, 8, 9 and 11-14 of neural-interactive-proofs (seed-faults.md): its agents and trainers."""

import os
import subprocess
import sys

import yaml

from reinforge.config.loader import load_config
from reinforge.multiagent.protocols.debate import Debate, DebateConfig
from reinforge.multiagent.protocols.mnip import MNIP, MNIPConfig
from reinforge.registry import REGISTRY
from reinforge.trainer.setup.components import ComponentBuilder
from tests.faults import assert_every_fault_has_a_test
from tests.talk import Talk, build_groups

BUILDER, AGENTS = "tests/core/multiagent/test_builder.py::", "tests/core/e2e/test_agents.py::"
IMITATION = "tests/core/algorithms/test_imitation.py::"
COVERED = {
    2: [f"{AGENTS}test_the_verifier_learns_in_one_epoch_and_the_trained_weights_are_tested"],
    3: [
        f"{AGENTS}test_a_resumed_run_still_trains_on_the_rollouts_of_previous_epochs",
        "tests/core/e2e/test_resume.py::test_a_killed_run_resumes_by_name_and_says_from_where",
        "tests/fault/test_kill_anywhere.py::test_a_run_killed_at_crash_points_ends_as_if_undisturbed",
    ],
    5: [f"{IMITATION}test_sampling_probabilities_grow_with_the_reward"],
    6: [
        f"{IMITATION}test_too_few_trajectories_give_a_skip_reason",
        "tests/core/e2e/test_algorithms.py::test_an_epoch_with_fewer_examples_than_asked_for_is_empty_and_says_why",
    ],
    8: [
        f"{BUILDER}test_the_chattiest_role_counts_no_more_than_the_others",
        f"{IMITATION}test_duplicate_samples_are_trained_once",
    ],
    11: [
        "tests/core/rollout/test_openai_llm.py::test_temporary_failures_are_retried",
        "tests/core/rollout/test_runner.py::test_an_exception_in_a_workflow_affects_only_its_episode",
    ],
    12: [f"{BUILDER}test_a_trees_first_round_has_a_pair_too"],
    13: [f"{BUILDER}test_ids_are_their_own_in_every_tree_and_epoch"],
}

DRAWS = """
import asyncio
from reinforge.multiagent.protocols.debate import Debate, DebateConfig
from reinforge.multiagent.protocols.merlin_arthur import MerlinArthur, MerlinArthurConfig
from tests.core.algorithms.test_imitation import two_agents, weighted_sampling
from tests.talk import Talk

async def main():
    print(weighted_sampling().sample_trajectories(two_agents(*[0.1 * n for n in range(20)])))
    stances = Debate(DebateConfig(agents={}, max_message_rounds=3, randomize_prover_stance=True))
    for handler in (stances, MerlinArthur(MerlinArthurConfig(agents={}))):
        for seed in range(6):
            talk = Talk(handler, lambda request: f"Decision: accept, {request.sampling.seed}")
            output = await talk.output(seed=seed)
            print(output["stances"], [(m["agent"], m["text"]) for m in output["messages"]])

asyncio.run(main())
"""


def test_every_fault_has_a_test():
    assert_every_fault_has_a_test((*range(2, 7), 8, 9, *range(11, 15)), "nip", __file__, COVERED, not_there_yet=())


def test_nip_4_nothing_drawn_depends_on_the_process(capsys):
    """Weighted rollouts, stances, absent agents, delivery order and seeds of samples, although hash() is salted."""
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", DRAWS]
    there = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    exec(DRAWS, {})
    assert capsys.readouterr().out == there
    assert len(set(there.splitlines())) == 13, "different seeds give different values"


async def test_nip_9_one_role_of_a_shared_model_may_be_frozen():
    """All three agents share one model; the verifier is frozen, so none of its replies is trained."""
    config = DebateConfig(agents={}, verifier_first=False, max_message_rounds=2)
    talk = Talk(Debate(config), lambda request: "accept", {"verifier": {"freeze_agent": True}})
    records = await talk.run("collect")
    assert {call.llm for call in records[0].calls} == {"shared"}
    trained = {t.agent: t for group in build_groups(records) for t in group}
    assert set(trained) == {"prover_accept", "prover_reject"}
    assert all(sum(item.tokens is not None for item in t.episode) == 1 for t in trained.values())


async def test_nip_14_a_round_is_a_round_for_every_agent_and_channel():
    """The verifier speaks in two channels in a round, and the next agent is still asked about that round."""
    scripts = {"verifier": ["a", "b", "c", "d", "accept", "accept"], "prover0": ["x", "y"], "prover1": ["u", "v"]}
    output = await Talk(MNIP(MNIPConfig(agents={}, max_message_rounds=5)), scripts).output()
    assert [(m["round"], m["agent"], m["text"]) for m in output["messages"]] == [
        (0, "verifier", "a"), (0, "verifier", "b"), (1, "prover0", "x"), (1, "prover1", "u"),
        (2, "verifier", "c"), (2, "verifier", "d"), (3, "prover0", "y"), (3, "prover1", "v"),
        (4, "verifier", "accept"), (4, "verifier", "accept"),
    ]  # fmt: skip


async def test_nip_14_agents_speak_by_any_provider_each_by_its_own(tmp_path):
    settings = {
        "llms": {
            "ours": {"_type": "policy"},
            "theirs": {"_type": "openai", "base_url": "http://127.0.0.1:1/v1", "model_name": "m"},
        },
        "workflow": {"_type": "nip", "agents": {"prover": {"llm": "theirs"}, "verifier": {"llm": "ours"}}},
    }
    (tmp_path / "f.yml").write_text(yaml.safe_dump(settings))
    async with ComponentBuilder(load_config(tmp_path / "f.yml"), REGISTRY) as builder:
        agents = (await builder.get_workflow()).function.agents
    assert {name: (agent.llm, agent.is_trainable) for name, agent in agents.items()} == {
        "prover": ("theirs", False),
        "verifier": ("ours", True),
    }
