"""Faults 1-19 of the ART plugin (seed-faults.md), as far as what they concern exists here."""

import asyncio
import json

import pytest

from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.algorithms.samples import samples_from_groups
from reinforge.config.loader import load_config
from reinforge.config.policy import PolicyConfig
from reinforge.errors import ConfigError
from reinforge.finetuning import (
    ARTTrainer,
    ARTTrainerConfig,
    ARTTrajectoryBuilder,
    ARTTrajectoryBuilderConfig,
    EpisodeItem,
    FinetuneConfig,
    TokenLogprobs,
    Trajectory,
    TrajectoryCollection,
)
from tests.faults import assert_every_fault_has_a_test
from tests.scripted_run import ScriptedRun, ask

COVERED = {
    1: [
        "tests/core/trainer/test_loop.py"
        "::test_a_job_that_does_not_complete_and_weights_that_are_not_served_stop_the_run",
        "tests/core/e2e/test_whole_run.py::test_every_file_of_the_run_folder",
    ],
    4: ["tests/core/rollout/test_episode.py::test_tool_calls_and_content_blocks_are_kept"],
    5: ["tests/core/algorithms/test_algorithms.py::test_an_untrainable_sibling_still_counts_in_the_mean"],
    6: ["tests/core/trainer/test_loop.py::test_an_unhealthy_backend_is_noticed_before_anything_runs"],
    9: ["tests/core/e2e/test_user_components.py::test_a_failed_job_that_a_trainer_only_returns_fails_the_run"],
    11: ["tests/core/e2e/test_bad_input.py::test_groups_of_one"],
    14: ["tests/core/trainer/test_loop.py::test_epochs_without_signal_end_the_run_with_the_reason"],
    16: ["tests/core/trainer/test_loop.py::test_the_curriculum_is_in_the_history_and_the_files"],
    18: ["tests/core/rollout/test_episode.py::test_targets_by_model_and_function"],
    19: ["tests/core/e2e/test_commands.py::test_a_plugin_that_fails_to_import_is_listed_with_its_error"],
}
NOT_THERE_YET = (7, 8)
"""They concern the client of a remote ART server, which comes with the remote backends."""


def test_every_fault_has_a_test():
    assert_every_fault_has_a_test(range(1, 20), "art", __file__, COVERED, NOT_THERE_YET)


def turn(*ids, **fields):
    tokens = TokenLogprobs((1, 2), ids, (-0.1,) * len(ids)) if ids else None
    return EpisodeItem(role="assistant", content="x", logprobs=tokens, **fields)


def trajectory(reward, *items):
    return Trajectory(episode=[EpisodeItem(role="user", content="q"), *items], reward=reward)


@pytest.mark.parametrize("learning_rate", [1e-4, 3e-3])
def test_art_2_the_configured_learning_rate_is_used(tiny_model_dir, learning_rate):
    """The first step of AdamW moves a weight by the learning rate, whatever the gradient."""
    import torch

    from reinforge.engine import Engine

    optimizer = {"learning_rate": learning_rate}
    policy = PolicyConfig(model=str(tiny_model_dir), optimizer=optimizer, schedule={"warmup_steps": 0})
    grpo = GRPO()
    groups = TrajectoryCollection(trajectories=[[trajectory(0, turn(5, 6)), trajectory(1, turn(7))]], run_id="r").groups
    samples = grpo.build_samples(groups)
    for sample, advantages in zip(samples, grpo.credit(samples), strict=True):
        sample.advantages = advantages
    with Engine.load(policy, seed=0, device="cpu") as engine, torch.no_grad():
        before = [parameter.detach().clone() for parameter in engine.model.module.parameters()]
        engine.begin_job()
        engine.update(samples, grpo.loss, progress_start=0.0, progress_end=1.0)
        engine.end_job()
        after = list(engine.model.module.parameters())
        moved = max(float((b - a).abs().max()) for a, b in zip(before, after, strict=True))
    assert moved == pytest.approx(learning_rate, rel=0.05)


def test_art_2_a_training_key_that_nothing_reads_is_refused(tmp_path):
    (tmp_path / "f.yml").write_text("finetuning:\n  policy:\n    optimizer: {beta: 0.1}\n")
    with pytest.raises(ConfigError, match='f.yml:3:17 finetuning.policy.optimizer.beta: unknown key "beta"'):
        load_config(tmp_path / "f.yml")


def test_art_3_the_algorithms_settings_reach_the_loss():
    loss = GRPO(GRPOConfig(clip_high=0.28, kl_coef=0.01, loss_aggregation="token")).loss
    assert (loss.name, loss.params["clip_high"], loss.params["kl_coef"]) == ("clipped_pg", 0.28, 0.01)


def test_art_5_one_bad_trajectory_does_not_lose_the_others():
    bad = trajectory(0.5, turn())
    group = TrajectoryCollection(
        trajectories=[[trajectory(0, turn(3)), bad, trajectory(1, turn(4))]], run_id="r"
    ).groups
    samples = samples_from_groups(group)
    assert [sample.reward for sample in samples] == [0, 1]
    assert all(sample.group_rewards == (0, 0.5, 1) for sample in samples), "it still counts in the group's mean"


async def test_art_9_cleanup_cancels_what_still_runs():
    builder = ARTTrajectoryBuilder(ARTTrajectoryBuilderConfig())

    class Slow:
        example_ids = staticmethod(lambda split: ["1"])

        async def collect(self, keys):
            await asyncio.sleep(60)

    builder.evaluation, builder.run_config = Slow(), FinetuneConfig()
    await builder.start_run("r")
    task = builder.evaluation_runs["r"]
    await builder.cleanup()
    assert task.cancelled()
    assert builder.evaluation_runs == {}


async def test_art_10_a_failed_generation_loses_only_itself(tmp_path):
    """Every example's first generation fails; its siblings are trained."""
    seen = set()

    async def first_fails(item, llm, context):
        if item.id not in seen:
            seen.add(item.id)
            raise RuntimeError("cold cache")
        return await ask(item, llm, context)

    run = ScriptedRun(tmp_path, workflow=first_fails)
    run.settings["finetuning"].update(num_epochs=1, splits={"train": 10, "select": 2, "confirm": 2})
    run.settings["finetuning"]["outcomes"] = {"retries": 1}
    summary = await run.run()
    assert summary.status == "completed"
    assert all(len(group.trajectories) == 4 for group in run.adapter.jobs[0].groups), "the world's failure is retried"


async def test_art_10_a_collection_that_fails_leaves_nothing_behind():
    builder = ARTTrajectoryBuilder(ARTTrajectoryBuilderConfig())

    class Broken:
        example_ids = staticmethod(lambda split: ["1"])

        async def collect(self, keys):
            raise RuntimeError("lost")

    builder.evaluation, builder.run_config = Broken(), FinetuneConfig()
    await builder.start_run("r")
    with pytest.raises(RuntimeError, match="lost"):
        await builder.finalize("r")
    assert builder.evaluation_runs == {}
    await builder.cleanup()


async def test_art_11_a_group_of_one_is_refused_for_their_builder_too(tmp_path):
    run = ScriptedRun(tmp_path)
    run.settings["trajectory_builders"]["builder"] = {"_type": "openpipe_art_traj_builder", "num_generations": 1}
    with pytest.raises(ConfigError, match="each group has one episode"):
        await run.run()


def test_art_12_a_turn_without_logprobs_is_context_that_the_model_saw():
    kept = trajectory(1.0, turn(), EpisodeItem(role="user", content="again"), turn(5))
    assert [item.role.value for item in kept.episode] == ["user", "assistant", "user", "assistant"]
    assert [item.is_trained for item in kept.turns] == [False, True]
    assert kept.is_trainable


async def test_art_13_evaluations_at_the_same_time_do_not_touch_each_other(tmp_path):
    """Their runs share one output folder and delete each other's files; ours share one journal with a key for each."""
    keys = []

    async def twice(item, llm, context):
        return await ask(item, llm, context)

    run = ScriptedRun(tmp_path, workflow=twice)
    original = run.adapter.submit

    async def submit(trajectories):
        for group in trajectories.groups:
            keys.extend(t.episode_id for t in group.trajectories)
        return await original(trajectories)

    run.adapter.submit = submit
    await run.run()
    assert len(keys) == len(set(keys)) > 40


async def test_art_15_the_base_and_the_final_model_are_both_validated(tmp_path):
    run = ScriptedRun(tmp_path)
    await run.run()
    rows = json.loads((tmp_path / "r" / "validation_history.json").read_text())
    assert [row["epoch"] for row in rows] == [-1, 1]
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["baseline"]["num_examples"] == summary["final"]["num_examples"] == 3
    assert summary["best"] is not None


@pytest.mark.parametrize("enabled", [False, True])
async def test_art_17_a_group_without_variance_goes_with_or_without_a_curriculum(enabled):
    trainer = ARTTrainer(ARTTrainerConfig())
    trainer.curriculum_config = FinetuneConfig(curriculum_learning={"enabled": enabled}).curriculum_learning
    trainer.run_config = FinetuneConfig()
    trainer._curriculum_state = {"current_percentile": 0.3, "last_expansion_epoch": -1}
    same = [trajectory(1, turn(3)), trajectory(1, turn(4))]
    one = TrajectoryCollection(trajectories=[same], run_id="r")
    assert trainer.apply_curriculum_learning(one, 0).trajectories == [], "also where it is the only group"
    differs = [t.model_copy(update={"group_id": "example-7"}) for t in (trajectory(0, turn(3)), trajectory(1, turn(4)))]
    both = TrajectoryCollection(trajectories=[same, differs], run_id="r")
    assert len(trainer.apply_curriculum_learning(both, 0).trajectories) == 1
    assert trainer.get_curriculum_state()["included_groups"] == ["example-7"], "ids, not positions"


async def test_art_18_a_target_model_is_the_entry_of_llms_or_the_models_name(tmp_path):
    for number, name in enumerate(["agent", None]):
        run = ScriptedRun(tmp_path / str(number))
        run.settings["finetuning"].update(num_epochs=1, target_model=name)
        assert (await run.run()).status == "completed"
    run = ScriptedRun(tmp_path / "wrong")
    run.settings["finetuning"]["target_model"] = "training_llm"
    with pytest.raises(ConfigError, match='llms has no entry "training_llm"'):
        await run.run()
