"""The bundled systems in the training loop: the engine trains, checkpoints load elsewhere, Hugging Face variants."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from reinforge.errors import EngineError
from reinforge.redteam import (
    DPO,
    GRPO,
    PPO,
    ASTNode,
    ASTSampler,
    Graph,
    HFASTConfiguration,
    HFASTSystem,
    HFASTTrainer,
    HFEvaluationSystem,
    KeywordScorer,
    Trainer,
    TrainingConfiguration,
)
from reinforge.redteam.methods.ast import WeightChanges
from tests.redteam.test_ast import ToyAST

SETTINGS = {"lr": 1e-3, "training_steps": 2, "num_episodes_per_experience": 3, "batch_size": 4}


def trainer_of(problem, algorithm=DPO, width=2, **settings):
    sampler = ASTSampler(problem, ["hello", "Paris"], width, 2)
    return Trainer(TrainingConfiguration(**{**SETTINGS, **settings}), sampler, algorithm(problem))


@pytest.mark.parametrize(
    ("algorithm", "width", "lora"),
    [(DPO, 2, True), (GRPO, 3, False), pytest.param(PPO, 1, False, marks=pytest.mark.slow)],
)
def test_the_engine_trains_and_the_baseline_stays(make_problem, algorithm, width, lora):
    problem = make_problem(policy={"lora": {"r": 4}} if lora else {})
    context, probe = ["hello"], ["the dog"]
    before, fingerprint = problem.get_baseline_logprobs(context, probe), problem.engine.fingerprint()
    trainer = trainer_of(problem, algorithm, width)
    trainer.train()
    assert trainer._scheduled_optimizer.num_steps > 0
    assert problem.engine.fingerprint() != fingerprint
    assert torch.allclose(problem.get_baseline_logprobs(context, probe), before, atol=1e-6)
    assert problem.engine.policy.version == 2, "one version per experience"
    if algorithm is PPO:
        assert problem.engine.critic.weight.abs().max() > 0, "the value head is trained"
    after = ASTSampler(problem, ["hello"], 2, 1).rollout(0).children[0].probe
    assert after.tokens.policy_version == 2


@pytest.mark.slow
def test_the_first_step_equals_the_engines(make_problem):
    """The same pairs through `Harness.step` and through `engine.update` give the same weights."""
    from reinforge.types.sample import LossSpec
    from tests.samples import make_sample

    ours, theirs = make_problem(), make_problem()
    trainer = trainer_of(ours, training_steps=1, batch_size=99)
    [batch] = list(trainer.harness.experience(5))
    with ours.updating():
        ours.compute(lambda: trainer._train_on_batch(batch))
    samples = []
    for i, row in enumerate(zip(batch.prefixes, batch.suffix_pos, batch.suffix_neg, strict=True)):
        for reward, probe in ((1.0, row[1]), (0.0, row[2])):
            sample = make_sample(probe.tokens)
            sample.reward, sample.pair_id = reward, str(i)
            samples.append(sample)
    theirs.make_scheduled_optimizer(trainer._scheduled_optimizer._settings, trainer._scheduled_optimizer._schedule)
    theirs.engine.config.batch.steps_per_job = 1
    theirs.engine.begin_job()
    from reinforge.types.sample import Needs

    theirs.engine.score(samples, Needs(ref_logprobs=True))
    theirs.engine.update(samples, LossSpec("dpo", {"beta": 0.1}), progress_start=0, progress_end=1)
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    assert all(torch.allclose(a, b, atol=2e-6) for a, b in pairs)


@pytest.mark.slow
def test_training_on_the_engine_resumes(make_problem, tmp_path):
    whole = make_problem(deterministic=True)
    trainer_of(whole, PPO, training_steps=2).train()
    first = trainer_of(make_problem(deterministic=True), PPO, training_steps=1, run_dir=tmp_path)
    first.train()
    problem = make_problem(deterministic=True)
    again = trainer_of(problem, PPO, training_steps=2, run_dir=tmp_path, resume=True)
    assert problem.engine.fingerprint() == first.system.engine.fingerprint()
    assert again.optimizer is problem.engine.learner.optimizer
    again.train()
    assert problem.engine.fingerprint() == whole.engine.fingerprint()
    assert torch.equal(problem.engine.critic.weight, whole.engine.critic.weight)
    AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoints/step-000002")


def compare(problem):
    """Returns the largest difference between the sampler's log-probs and the learner's."""
    context = ["hello the quick brown fox jumps over"]
    rows = context, problem.sample_probes(context, [1])
    return (problem.get_sampling_logprobs(*rows) - problem.get_tester_logprobs(*rows)).abs().max()


def test_a_custom_loop_samples_from_the_weights_it_trained(make_problem, monkeypatch):
    problem = make_problem()

    def change_weights(optimizer):
        for parameter in problem.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    parameters = list(problem.parameters())
    optimizers = [torch.optim.SGD(parameters, 0.5), torch.optim.AdamW(parameters, 0.3, fused=True)]
    assert compare(problem) < 1e-4
    for version, optimizer in enumerate(optimizers, start=1):
        change_weights(optimizer)
        assert compare(problem) < 1e-4
        assert problem.engine.policy.version == version
        problem.sample_probes(["hello"], [2])
        assert problem.engine.policy.version == version, "weights that did not change are not published again"
    monkeypatch.setattr(type(problem), "_publish_changed_weights", lambda self: None)  # mutation
    change_weights(optimizer)
    assert compare(problem) > 0.1


def test_a_loop_without_an_optimizer_samples_from_the_weights_it_trained(make_problem, monkeypatch):
    """torch counts no change through `parameter.data`: neither in place nor by another tensor."""
    problem = make_problem()

    def step_in_place():
        for parameter in problem.parameters():
            parameter.data -= 0.1 * torch.randn_like(parameter)

    compare(problem)
    step_in_place()
    assert compare(problem) < 1e-4
    for parameter in problem.parameters():
        parameter.data = parameter.data + 0.1 * torch.randn_like(parameter)
    assert compare(problem) < 1e-4
    version = problem.engine.policy.version
    compare(problem)
    assert problem.engine.policy.version == version, "weights that did not change are not published again"
    monkeypatch.setattr(WeightChanges, "_take_sample", lambda self: [])  # mutation
    problem._changes._sample = []
    step_in_place()
    assert compare(problem) > 0.1


@pytest.fixture
def hf(tiny_model_dir, tiny_target_dir):
    made = []

    def make(kind=HFASTSystem, *args, **settings):
        settings = {"max_tokens": 4, "target_max_tokens": 4, **settings}
        made.append(kind(*(args or (tiny_model_dir, tiny_target_dir, None, KeywordScorer("e"))), **settings))
        return made[-1]

    yield make
    for system in made:
        system.close()


@pytest.mark.slow
def test_hugging_face_variants(hf, tiny_model_dir, tiny_target_dir, tmp_path):
    """Training writes the best and the last tester, which load here and with `from_pretrained`."""
    config = HFASTConfiguration(training_steps=2, lr=1e-3)
    assert (config.batch_size, config.num_episodes_per_experience, HFASTConfiguration().lr) == (4, 2, 1e-5)
    system = hf()
    trainer = HFASTTrainer(
        config, ASTSampler(system, ["hello"], 2, 1), DPO(system), dev_prompts=["hello", "Paris"], eval_every=1,
        ckpt_dir=tmp_path,
    )  # fmt: skip
    trainer.train()
    scores = [row["dev_score"] for row in trainer.history if "dev_score" in row]
    assert len(scores) == 2
    assert trainer.best_score == max(scores)
    assert trainer.save(7) == tmp_path / "step-7"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "last")
    for name, value in loaded.named_parameters():
        assert torch.equal(value, dict(system.tester.named_parameters())[name])
    assert AutoTokenizer.from_pretrained(tmp_path / "best").get_vocab() == system.tokenizer.get_vocab()
    other = hf(HFEvaluationSystem, tmp_path / "last", tiny_model_dir, tiny_target_dir, "cpu", KeywordScorer("e"))
    assert torch.allclose(
        other.get_tester_logprobs(["hi"], ["dog"]), system.get_tester_logprobs(["hi"], ["dog"]), atol=1e-6
    )
    assert (system.device, system.baseline, other.device) == ("cpu", None, "cpu")
    assert system.baseline_tokenizer is system.tokenizer
    assert other.baseline.config.model_type == system.tester.config.model_type, "the base model"
    assert other.baseline_tokenizer.get_vocab() == other.tester_tokenizer.get_vocab()
    baseline = other.get_baseline_logprobs(["hi"], ["dog"])
    assert torch.allclose(baseline, system.get_baseline_logprobs(["hi"], ["dog"]), atol=1e-6)
    assert HFASTTrainer(config, trainer.sampler, DPO(system), ckpt_dir=tmp_path).eval_epoch(1) is None


def test_a_checkpoint_that_cannot_be_loaded_is_an_error(hf, tiny_model_dir, tiny_target_dir, tmp_path):
    with pytest.raises(EngineError):
        hf(HFEvaluationSystem, tmp_path / "not-there", tiny_model_dir, tiny_target_dir)


@pytest.mark.slow
def test_models_without_a_template_see_one_text(hf, tiny_model_dir, tiny_target_dir, tmp_path):
    for source, name in ((tiny_model_dir, "tester"), (tiny_target_dir, "target")):
        AutoModelForCausalLM.from_pretrained(source).save_pretrained(tmp_path / name)
        tokenizer = AutoTokenizer.from_pretrained(source)
        tokenizer.chat_template = None
        tokenizer.save_pretrained(tmp_path / name)
    system = hf(HFASTSystem, tmp_path / "tester", tmp_path / "target", None, KeywordScorer("e"))
    node = ASTSampler(system, ["play at row"], 1, 1).rollout(0).children[0]
    assert system.tokenizer.decode(node.probe.tokens.prompt_token_ids) == "play at row"


class Pretrained(ToyAST):
    def __init__(self, folder, **tokenizers):
        super().__init__(ppl_weight=0.0)
        self.tester = AutoModelForCausalLM.from_pretrained(folder)
        vars(self).update(tokenizers)

    def get_tester_logprobs(self, context, continuation):
        logprobs = super().get_tester_logprobs(context, continuation)
        return logprobs * (1 + sum(p.mean() for p in self.tester.parameters()).tanh() / 2)

    def parameters(self):
        return self.tester.parameters()


class Interrupted(DPO):
    """Ends the process's patience in the second experience."""

    def flatten(self, graph):
        if self.num_flattened == 4:
            raise KeyboardInterrupt
        self.num_flattened += 1
        return super().flatten(graph)

    num_flattened = 0


def hf_trainer(system, folder, algorithm=DPO, **settings):
    settings = {"training_steps": 2, "lr": 1e-3, "num_episodes_per_experience": 4, **settings}
    sampler = ASTSampler(system, ["open"], 4, 1)
    return HFASTTrainer(HFASTConfiguration(**settings), sampler, algorithm(system), ckpt_dir=folder, eval_every=1)


def assert_same_weights(folder, module):
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("name", ["tokenizer", "tester_tokenizer"])
def test_the_trained_tester_of_a_users_own_system_is_saved(name, tiny_model_dir, tmp_path, caplog):
    """With the tokenizer, at whichever of its two names, loadable with `from_pretrained`."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    system = Pretrained(tiny_model_dir, **{name: tokenizer})
    with torch.no_grad():
        system.logits.copy_(torch.arange(6.0).view(2, 3) / 6)  # probes must differ in log-probs to train the model
    before = [parameter.clone() for parameter in system.parameters()]
    hf_trainer(system, tmp_path / "a" / "b").train()
    assert not all(torch.equal(old, new) for old, new in zip(before, system.parameters(), strict=True))
    assert_same_weights(tmp_path / "a/b/last", system.tester)
    assert AutoTokenizer.from_pretrained(tmp_path / "a/b/last").get_vocab() == tokenizer.get_vocab()
    assert "testers are written as" not in caplog.text


def test_a_systems_own_save_is_called(tiny_model_dir, tmp_path):
    saved = []
    system = Pretrained(tiny_model_dir)
    system.save = saved.append
    hf_trainer(system, tmp_path).train()
    assert saved == [tmp_path / "last"]


def test_a_tester_that_is_no_hugging_face_model_is_written_as_parameters(tmp_path, caplog):
    system = ToyAST()
    trainer = hf_trainer(system, tmp_path)
    assert "ToyAST has neither save(folder) nor a tester with save_pretrained" in caplog.text, "before training"
    trainer.train()
    again = ToyAST()
    again.read(tmp_path / "last", hf_trainer(again, tmp_path / "other")._scheduled_optimizer, 0)
    assert again.logits.any()
    assert torch.equal(again.logits, system.logits)


def test_an_interrupted_training_keeps_its_tester(tiny_model_dir, tmp_path, caplog, monkeypatch):
    def train(folder):
        system = ToyAST()
        with pytest.raises(KeyboardInterrupt):
            hf_trainer(system, folder, Interrupted).train()
        return system

    system = train(tmp_path / "first")
    assert f"the tester trained so far is in {tmp_path / 'first' / 'last'}" in caplog.text
    again = ToyAST()
    again.read(tmp_path / "first/last", hf_trainer(again, tmp_path / "other")._scheduled_optimizer, 0)
    assert torch.equal(again.logits, system.logits)
    (tmp_path / "file").write_text("")
    train(tmp_path / "file" / "folder")
    assert "training stopped, and the tester could not be saved" in caplog.text, "and KeyboardInterrupt is raised"
    monkeypatch.setattr(HFASTTrainer, "_save_what_was_trained", lambda self: None)  # mutation
    train(tmp_path / "second")
    assert not (tmp_path / "second").exists()


class Silent(ASTSampler):
    """Evaluation trees whose last probes and rewards are given."""

    def eval_rollouts(self, seeds):
        return [
            Graph(opening, [ASTNode(opening, probe, "no", reward, [], 0)])
            for opening, (probe, reward) in zip(seeds, self.turns, strict=True)
        ]


@pytest.mark.parametrize(
    ("turns", "score"),
    [
        ([("say", -0.2), ("why", 0.1)], -0.05),
        ([("say", -0.2), ("why", 0.1), ("", 0.15)], -0.1),
        ([("say", 0.2), ("", 0.3)], 0.1),
        ([("", 0.15), ("", 0.15)], None),
    ],
)
def test_silence_does_not_win(tmp_path, turns, score):
    """An empty probe counts as the worst of the others and at most 0: it has no perplexity to pay for."""
    sampler = Silent(ToyAST(), ["hello"])
    sampler.turns = turns
    openings = [f"o{n}" for n in range(len(turns))]
    trainer = HFASTTrainer(HFASTConfiguration(), sampler, DPO(sampler.system), dev_prompts=openings, ckpt_dir=tmp_path)
    found = trainer.eval_epoch(1)
    assert found == (None if score is None else pytest.approx(score))
    assert (tmp_path / "best").is_dir() is (score is not None)
    assert trainer.history[-1]["dev_empty_probes"] == sum(not probe for probe, _ in turns)
