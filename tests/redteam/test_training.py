"""Harness and trainer with a user's own torch system, in the loop that the bundled systems use too."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from reinforge import redteam
from reinforge.errors import ConfigError, JobFailed
from reinforge.redteam import (
    DPO,
    GRPO,
    PPO,
    Algorithm,
    ASTSampler,
    Graph,
    Harness,
    Node,
    Sampler,
    Trainer,
    TrainingConfiguration,
)
from reinforge.redteam.training.harness import ListDataset
from tests.redteam.toy import ToySystem


class Toy(Sampler):
    def __init__(self, system, tree_width=4):
        super().__init__(system)
        self.tree_width, self.seeds = tree_width, []

    def rollout(self, seed=None):
        self.seeds.append(seed)
        context = ["open"] * self.tree_width
        probes = self.system.sample_probes(context, [seed, *range(self.tree_width - 1)])
        rewards = self.system.reward(context, probes, context)
        return Graph("open", [Node("open", p, "", r) for p, r in zip(probes, rewards, strict=True)])


class Count(Algorithm):
    """A user's algorithm: one step per node; the loss is the sum of the tester's parameters."""

    def flatten(self, graph):
        return list(graph.children)

    @staticmethod
    def collate_fn(x):
        return x

    def step(self, batch):
        return self.system.logits.sum() * len(batch), {"size": len(batch)}


def trained(algorithm=Count, system=None, sampler=None, **settings):
    system = system or ToySystem()
    sampler = sampler or Toy(system)
    settings = {"lr": 0.05, "training_steps": 1, "num_episodes_per_experience": 5, **settings}
    trainer = Trainer(TrainingConfiguration(**settings), sampler, algorithm(system))
    trainer.train()
    return trainer


def test_astra_rls_six_settings_have_its_defaults():
    assert TrainingConfiguration().model_dump() | {
        "lr": 3e-3, "batch_size": 16, "optimizer": "adamw", "gradient_accumulation_steps": 1,
        "training_steps": 1024, "num_episodes_per_experience": 8,
    } == TrainingConfiguration().model_dump()  # fmt: skip
    with pytest.raises(ValueError, match="training_stepz"):
        TrainingConfiguration(training_stepz=1)


@pytest.mark.parametrize(("algorithm", "width"), [(DPO, 4), (GRPO, 4), pytest.param(PPO, 1, marks=pytest.mark.slow)])
def test_a_users_system_learns_the_reward(algorithm, width):
    system = ToySystem()
    with torch.no_grad():
        before = system.logits.softmax(-1)[:, 1].mean().item()
    kwargs = {"beta": 1.0} if algorithm is DPO else {}
    trained(
        lambda s: algorithm(s, **kwargs), system, Toy(system, width), training_steps=25, lr=0.1, batch_size=64,
        num_episodes_per_experience=8 if width > 1 else 24,
    )  # fmt: skip
    assert before == pytest.approx(1 / 3)
    assert system.logits.softmax(-1)[:, 1].mean().item() > 0.6


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "rmsprop", "adagrad"])
def test_optimizers_by_name(name):
    trainer = trained(optimizer=name)
    assert type(trainer.optimizer).__name__.lower() == name
    assert trainer.system.logits.abs().max() > 0


def test_batches_have_the_configured_size_and_the_last_is_not_dropped():
    """5 rollouts of 4 probes: 20 steps in batches of 8."""
    harness = Harness(Toy(ToySystem()), Count(ToySystem()), 5, dataloader_kwargs={"batch_size": 8})
    assert [len(batch) for batch in harness.experience(0)] == [8, 8, 4]
    assert [len(b) for b in Harness(Toy(ToySystem()), Count(ToySystem()), 5).experience(0)] == [16, 4]
    loss, metrics = harness.step(next(harness.experience(0)))
    assert loss.requires_grad
    assert metrics == {"size": 8}


def test_an_experience_knows_its_number_of_batches():
    harness = Harness(Toy(ToySystem()), Count(ToySystem()), 5, dataloader_kwargs={"batch_size": 8})
    batches = harness.experience(0)
    assert (len(batches), len(harness.graphs)) == (3, 5), "sampled before the first batch is taken"
    assert len(list(batches)) == 3
    dataset = ListDataset(["a", "b"])
    assert (len(dataset), dataset[1], list(dataset)) == (2, "b", ["a", "b"])


def test_an_experience_without_signal_has_no_batches():
    """Also with arguments that torch refuses for an empty dataset."""
    system = ToySystem("nothing")
    harness = Harness(Toy(system), DPO(system), 2, dataloader_kwargs={"shuffle": True, "batch_size": 2})
    batches = harness.experience(0)
    assert (len(batches), list(batches)) == (0, [])


def test_dataloader_arguments_are_passed_on():
    kwargs = {"batch_size": 3, "shuffle": True, "drop_last": True}
    harness = Harness(Toy(ToySystem()), Count(ToySystem()), 2, dataloader_kwargs=kwargs)
    assert [len(batch) for batch in harness.experience(0)] == [3, 3]


def test_each_episode_has_its_own_seed_and_experiences_differ():
    sampler = Toy(ToySystem())
    harness = Harness(sampler, Count(sampler.system), 4)
    for seed in (0, 0, 1, None, None):
        list(harness.experience(seed))
    seeds_by_experience = [sampler.seeds[i : i + 4] for i in range(0, 20, 4)]
    assert seeds_by_experience[0] == seeds_by_experience[1]
    assert len({seed for row in seeds_by_experience[1:] for seed in row}) == 16


def test_samplers_get_seeds_that_numpy_takes():
    """40 seeds of the harness and the trainer; of 63 bits, one in 2**31 would be small enough by chance."""

    class UsesNumpy(Toy):
        def rollout(self, seed=None):
            np.random.seed(seed)
            return super().rollout(seed)

    sampler = UsesNumpy(ToySystem())
    for seed in (None, 3):
        list(Harness(sampler, Count(sampler.system), 16).experience(seed))
    Trainer(
        TrainingConfiguration(training_steps=2, num_episodes_per_experience=4), sampler, Count(sampler.system)
    ).train()
    assert len(sampler.seeds) == 40
    assert max(sampler.seeds) > 2**30, "all 32 bits are used"


def test_metrics_of_a_step_reach_the_logger(caplog):
    harness = Harness(Toy(ToySystem()), Count(ToySystem()), 2)
    with caplog.at_level("INFO", logger="reinforge.redteam"):
        harness.log_current_step({"loss": 0.5})
    assert [(record.name, record.getMessage()) for record in caplog.records] == [("reinforge.redteam", "{'loss': 0.5}")]
    assert caplog.records[0].name == redteam.logger.name == redteam.utils.logger.name


def test_the_logging_of_programs_shows_the_metrics():
    """In a process of its own, because it configures the root logger."""
    code = (
        "from reinforge.redteam.utils import config_logging, logger\nconfig_logging()\nlogger.debug('loss %.1f', 0.5)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stderr.rstrip().endswith("reinforge.redteam DEBUG loss 0.5")


class OwnLoop(Trainer):
    def train(self):
        for _ in range(self.config.training_steps):
            for batch in self.harness.experience():
                loss, _ = self.harness.step(batch)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_loop_of_a_users_own_changes_the_weights(dtype):
    """SGD at rate 1e-2 on a gradient of 4, twice, from 0: bfloat16 weights are trained through float32 copies."""
    system = ToySystem()
    system.logits.data = system.logits.data.to(dtype)
    config = TrainingConfiguration(lr=1e-2, optimizer="sgd", training_steps=2, num_episodes_per_experience=1)
    OwnLoop(config, Toy(system), Count(system)).train()
    assert system.logits.dtype == dtype
    assert system.logits.flatten().tolist() == pytest.approx([-1e-2 * 4 * 2] * 6, rel=1e-2)

    bare = type("Bare", (OwnLoop,), {"optimizer": property(lambda self: self._scheduled_optimizer.optimizer)})
    untrained = ToySystem()
    untrained.logits.data = untrained.logits.data.to(dtype)
    bare(config, Toy(untrained), Count(untrained)).train()  # mutation: without the copies' part in a step
    assert bool(untrained.logits.any()) == (dtype is torch.float32)


def test_a_configuration_of_a_users_own_may_have_attributes():
    class Own(TrainingConfiguration):
        def __init__(self):
            super().__init__(lr=1e-3)
            self.ckpt_dir = "testers"
            self.training_steps = 7

    config = Own()
    assert (config.ckpt_dir, config.training_steps, config.lr) == ("testers", 7, 1e-3)
    assert config.model_copy(update={"lr": 1.0}).ckpt_dir == "testers"
    assert "ckpt_dir" not in config.model_dump()
    with pytest.raises(ValueError, match="ckpt_dir"):
        TrainingConfiguration().ckpt_dir = "testers"
    with pytest.raises(ValueError, match="ckpt_dir"):
        Own.__base__(ckpt_dir="testers")


def test_metrics_of_a_step_are_logged(tmp_path):
    harness = Harness(Toy(ToySystem()), Count(ToySystem()), 2, log_file=tmp_path / "log.jsonl")
    harness.log_current_step({"loss": 0.5, "size": 3})
    harness.log_current_step({"loss": float("nan")})
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines == [{"loss": 0.5, "size": 3}, {"loss": None}]


def test_weights_and_biases_installed_and_not_installed(tmp_path, monkeypatch):
    """With a fake package of that name: tests how it is called."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb is not installed(.|\n)*pip install wandb"):
        Harness(Toy(ToySystem()), Count(ToySystem()), 2, use_wandb=True)
    (tmp_path / "wandb.py").write_text(
        "calls = []\n"
        "class Run:\n"
        "    def log(self, row): calls.append(row)\n"
        "def init(**kwargs):\n"
        "    calls.append(kwargs)\n"
        "    return Run()\n"
    )
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.syspath_prepend(tmp_path)
    given = {"project": "p", "entity": "e", "name": "n"}
    harness = Harness(Toy(ToySystem()), Count(ToySystem()), 2, use_wandb=True, wandb_kwargs=given)
    harness.log_current_step({"loss": 1.0})
    assert sys.modules["wandb"].calls == [given, {"loss": 1.0}]
    assert given == {"project": "p", "entity": "e", "name": "n"}, "the caller's dict is unchanged"
    del sys.modules["wandb"]


def test_a_partial_accumulation_is_stepped():
    """Five batches of 4, accumulated by 2: two steps, then one with the mean gradient of the last batch alone."""
    trainer = trained(batch_size=4, gradient_accumulation_steps=2, optimizer="sgd", max_grad_norm=1e9, lr=0.01)
    assert trainer._global_step_counter == 5
    assert trainer._scheduled_optimizer.num_steps == 3
    assert trainer.system.logits.flatten().tolist() == pytest.approx([-0.01 * 4 * 3] * 6)


def test_accumulation_continues_across_experiences():
    trainer = trained(batch_size=64, gradient_accumulation_steps=3, training_steps=4)
    assert (trainer._global_step_counter, trainer._scheduled_optimizer.num_steps) == (4, 2)


def test_gradients_are_clipped_and_the_schedule_changes_the_rate():
    """Six gradients of 4 have norm 9.8; clipped to norm 1, each is 0.408. Warm-up, then decay, halve the rate."""
    settings = {"optimizer": "sgd", "lr": 1.0, "batch_size": 4, "num_episodes_per_experience": 1}
    trainer = trained(**settings)
    assert trainer.system.logits.flatten().tolist() == pytest.approx([-(6**-0.5)] * 6)
    slow = trained(**settings, training_steps=2, warmup_steps=2, schedule="linear", final_fraction=0.0)
    assert slow.system.logits[0, 0].item() == pytest.approx(-(6**-0.5) * (0.5 + 0.5))


class Broken(Count):
    num = 1

    def step(self, batch):
        self.num -= 1
        loss, metrics = super().step(batch)
        return (loss * float("nan") if self.num >= 0 else loss), metrics


def test_a_non_finite_loss_is_skipped(tmp_path):
    trainer = trained(Broken, num_episodes_per_experience=2, batch_size=4, run_dir=tmp_path, optimizer="sgd")
    assert torch.isfinite(trainer.system.logits).all()
    assert (trainer._global_step_counter, trainer._scheduled_optimizer.num_steps) == (2, 1)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines[0]["skipped"] == "the loss is not finite"
    assert trainer.history[0]["num_skipped"] == 1


def test_a_non_finite_gradient_is_skipped():
    class Root(Count):
        def step(self, batch):
            return self.system.logits.clamp(min=0).sqrt().sum(), {}  # its slope at 0 is infinite

    trainer = trained(Root)
    assert (trainer.system.logits == 0).all()
    assert trainer._scheduled_optimizer.num_steps == 0


def test_training_without_signal_fails_with_the_reason():
    class Always(Broken):
        num = 10**6

    with pytest.raises(JobFailed, match="3 experiences in a row changed no weights; .* all 2 batches was not finite"):
        trained(Always, training_steps=9)
    with pytest.raises(JobFailed, match="2 experiences in a row.*siblings are all equal"):
        trained(DPO, ToySystem("nothing"), training_steps=9, max_empty=2)


@pytest.mark.parametrize("algorithm", [DPO, GRPO])
def test_width_one_is_rejected_by_algorithms_that_compare_siblings(algorithm):
    system = ToySystem()
    with pytest.raises(ConfigError, match=f"{algorithm.__name__} compares siblings(.|\n)*use PPO"):
        Harness(Toy(system, 1), algorithm(system))
    with pytest.raises(ConfigError, match="every point of this tree has one child"):
        algorithm(system).flatten(Graph("x", [Node("x", "red", "", 1.0)]))


def test_ppo_needs_a_value_function():
    class NoValues:
        value_head = None

    with pytest.raises(ConfigError, match="NoValues has no value function"):
        PPO(NoValues())


def test_equal_rewards_and_equal_texts_make_no_pair():
    def children(*probes):
        return Graph("x", [Node("x", probe, "", reward) for probe, reward in probes])

    algorithm = DPO(ToySystem())
    assert algorithm.flatten(children(("red", 1.0), ("blue", 1.0))) == []
    assert algorithm.flatten(children(("red", 1.0), ("red", 0.0))) == []
    [pair] = algorithm.flatten(children(("red", 0.0), ("blue", 1.0), ("green", 0.5)))
    assert (pair.suffix_pos, pair.suffix_neg) == ("blue", "red")
    assert algorithm.flatten(Graph("x", [])) == []
    least = DPO(ToySystem(), min_margin=0.5)
    assert least.flatten(children(("red", 0.0), ("blue", 0.4))) == []
    assert len(least.flatten(children(("red", 0.0), ("blue", 0.5)))) == 1


def weights(trainer):
    return {k: v.clone() for k, v in trainer._scheduled_optimizer.state().items()} | {
        f"w{i}": p.detach().clone() for i, p in enumerate(trainer.system.parameters())
    }


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_resumed_training_equals_uninterrupted_training(tmp_path, accumulation):
    """16 probes in 4 batches per experience. Sampling depends on the weights, so any difference would show."""
    settings = {"num_episodes_per_experience": 4, "batch_size": 4, "gradient_accumulation_steps": accumulation}
    whole = trained(PPO, **settings, training_steps=6)
    first = trained(PPO, **settings, training_steps=4, run_dir=tmp_path, checkpoint_every=3)
    system = ToySystem()
    config = TrainingConfiguration(**settings, lr=0.05, training_steps=6, run_dir=tmp_path, resume=True)
    again = Trainer(config, Toy(system), PPO(system))
    assert (again._state.experience, again._global_step_counter) == (4, 16)
    assert again._scheduled_optimizer.num_steps == first._scheduled_optimizer.num_steps == 16 // accumulation
    assert all(torch.equal(value, weights(first)[name]) for name, value in weights(again).items())
    again.train()
    assert again._state.experience == 6
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(again).items())
    assert not torch.equal(weights(again)["w0"], weights(first)["w0"])


def test_train_called_twice_trains_twice(tmp_path):
    trainer = trained(PPO, training_steps=2, run_dir=tmp_path)
    before = weights(trainer)
    trainer.train()
    assert trainer._state.experience == 4
    assert not torch.equal(weights(trainer)["w0"], before["w0"])
    again = Trainer(
        trainer.config.model_copy(update={"resume": True}), trainer.harness.sampler, trainer.harness.algorithm
    )
    again.train()
    assert again._state.experience == 4, "what was finished is not trained once more by a resumed trainer"


def test_a_converged_tester_stops():
    system = ToySystem()
    trainer = trained(GRPO, system, training_steps=200, lr=0.3)
    assert trainer.stopped.startswith("max_empty: 3 experiences in a row changed no weights")
    assert system.logits.softmax(-1)[:, 1].max() > 0.9


def test_old_checkpoints_are_deleted_and_used_folders_rejected(tmp_path):
    trainer = trained(training_steps=5, run_dir=tmp_path, checkpoint_every=1, keep_checkpoints=2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-000004", "step-000005"]
    with pytest.raises(ConfigError, match="already contains checkpoints of another training run(.|\n)*resume=True"):
        Trainer(trainer.config, trainer.harness.sampler, trainer.harness.algorithm)
    with pytest.raises(ConfigError, match="run_dir is not set"):
        trained(resume=True)


def test_a_damaged_checkpoint_is_skipped(tmp_path):
    first = trained(training_steps=3, run_dir=tmp_path, checkpoint_every=1, keep_checkpoints=3)
    (tmp_path / "checkpoints/step-000003/parameters.safetensors").write_bytes(b"half")
    again = Trainer(first.config.model_copy(update={"resume": True}), first.harness.sampler, first.harness.algorithm)
    assert again._state.experience == 2


def test_max_minutes_stops_training(tmp_path):
    trainer = trained(training_steps=10**6, max_minutes=1e-4)
    assert trainer.stopped.startswith("max_minutes")
    assert len(trainer.history) < 10**6


def test_evaluations_keep_the_best_and_stop_by_patience(tmp_path):
    from tests.redteam.test_core import Contexts

    scores = iter([0.2, 0.5, 0.1, 0.5, 0.9])

    class Scored(Trainer):
        def compute_score(self, metrics):
            return next(scores)

    system = ToySystem()
    config = TrainingConfiguration(
        training_steps=9, num_episodes_per_experience=1, eval_every=1, eval_rollouts=1, patience=2, run_dir=tmp_path
    )
    trainer = Scored(config, Toy(system), Count(system), evaluator=Contexts(Toy(system)))
    trainer.train()
    assert trainer.stopped == "patience: 2 evaluations without a score above 0.5"
    assert [row["score"] for row in trainer.history if "score" in row] == [0.2, 0.5, 0.1, 0.5]
    assert json.loads((tmp_path / "best/trainer.json").read_text())["experience"] == 1
    with pytest.raises(ConfigError, match="give the trainer an evaluator"):
        Trainer(TrainingConfiguration(eval_every=1), Toy(system), Count(system))


def test_an_ast_sampler_has_a_default_evaluator():
    from tests.redteam.test_ast import ToyAST

    system = ToyAST()
    trainer = trained(
        DPO, system, ASTSampler(system, ["open"], tree_depth=1), eval_every=1, eval_rollouts=4, training_steps=2
    )
    scores = [row["score"] for row in trainer.history if "score" in row]
    assert len(scores) == 3
    assert all(0 <= score <= 1 for score in scores)
