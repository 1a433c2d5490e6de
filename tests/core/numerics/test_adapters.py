"""Adapters: PEFT loads, merges and switches off exactly what was trained."""

import pytest
import torch

from reinforge.config.policy import LoRAConfig, PolicyConfig
from reinforge.engine.model.loading import add_adapter, load_module
from reinforge.errors import ConfigError, EngineError
from reinforge.types.sample import Needs
from tests.engines import LIKELIHOOD, compute_sample_plainly, load_engine, measure_difference, measure_error, train
from tests.models import FAMILIES, make_tiny_model
from tests.samples import ask, request, sibling_samples


def load(folder, lora=None, **settings):
    lora = LoRAConfig(**{"r": 4, "lora_alpha": 8, **(lora or {})})
    return load_engine(folder, lora=lora, max_num_seqs=5, optimizer={"learning_rate": 1e-2}, **settings)


def train_once(engine, samples):
    train(engine, samples, LIKELIHOOD, progress=0.5)
    engine.policy.open(1)


@pytest.fixture(scope="module")
def find_base(tmp_path_factory):
    """The folder of a family's tiny model; Llama's embeddings are not tied."""
    made = {}

    def find(family):
        if family not in made:
            made[family] = make_tiny_model(tmp_path_factory.mktemp(family), family, **FAMILIES[family])
        return made[family]

    return find


@pytest.fixture(scope="module")
def untied(find_base):
    return find_base("llama")


def list_saved_modules(engine):
    """The modules that are trained in full."""
    return {name.partition(".modules_to_save")[0] for name in engine.learner.parameters if "lora_" not in name}


def assert_sampler_equals_learner(engine):
    assert measure_error(engine, ask(engine.policy, [request("a" * n) for n in range(1, 6)])) <= 1e-5


MODULES = ["lm_head", "embed_tokens"]
CASES = [
    ("llama", True, {"modules_to_save": ["embed_tokens"], "use_rslora": True}),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("llama", False, {}),
            ("gemma2", True, {}),
            ("gpt2", True, {}),
            ("llama", True, {"modules_to_save": [*MODULES, "mlp", "model.norm"]}),
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "fast_paths", "lora"), CASES, ids=str)
def test_sampler_learner_peft_and_merged_weights_agree(find_base, tmp_path, family, fast_paths, lora):
    """Before and after a step, and once the adapter is saved and loaded again, into a new engine or by itself."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    samples, base = sibling_samples(sizes=(4, 1, 2)), find_base(family)
    with load(base, lora, fast_paths=fast_paths) as engine:
        before = engine.logprobs(samples)
        assert_sampler_equals_learner(engine)
        train_once(engine, samples)
        trained, fingerprint = engine.logprobs(samples), engine.fingerprint()
        assert measure_difference(before, trained) > 0.01
        assert_sampler_equals_learner(engine)
        saved_whole = list_saved_modules(engine)
        for name in lora.get("modules_to_save", []):
            assert any(f".{path}".endswith(f".{name}") for path in saved_whole)
        engine.save(tmp_path / "a", 1)
    assert not (tmp_path / "a" / "model.safetensors").exists()
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), tmp_path / "a")
    for model in (plain, plain.merge_and_unload()):
        rows = [compute_sample_plainly(model, sample) for sample in samples]
        assert measure_difference(rows, trained) <= 2e-5
    with load(base, lora, fast_paths=fast_paths) as engine:
        engine.load_weights(tmp_path / "a")
        assert engine.fingerprint() == fingerprint
        assert measure_difference(engine.logprobs(samples), trained) == 0
        assert_sampler_equals_learner(engine)
    with load_engine(tmp_path / "a") as engine:
        assert engine.fingerprint() == fingerprint
        assert list_saved_modules(engine) == saved_whole
        train_once(engine, samples)
        assert engine.fingerprint() != fingerprint


@pytest.mark.parametrize(
    ("family", "lora"),
    [("llama", {"modules_to_save": MODULES}), pytest.param("gpt2", {}, marks=pytest.mark.slow)],
    ids=["saved modules", "gpt2"],
)
def test_only_what_is_trained_changes_and_the_reference_is_the_model_without_it(find_base, family, lora):
    """And a rollback puts it back. transformers switches saved modules off with the adapters, but not on again."""
    samples = sibling_samples(sizes=(4, 1, 2))
    with load(find_base(family), lora, keep_reference=True) as engine:
        assert engine.reference is None, "no second copy in memory"
        frozen = {n: p.clone() for n, p in engine.model.module.named_parameters() if not p.requires_grad}
        before = engine.logprobs(samples)
        train_once(engine, samples)
        trained, fingerprint = engine.logprobs(samples), engine.fingerprint()
        engine.begin_job()
        engine.score(samples, Needs(ref_logprobs=True))
        assert measure_difference([sample.ref_logprobs for sample in samples], before) == 0
        assert measure_difference(engine.logprobs(samples), trained) == 0
        engine.update(samples, LIKELIHOOD, progress_start=0.5, progress_end=0.6)
        assert engine.fingerprint() != fingerprint
        parameters = dict(engine.model.module.named_parameters())
        assert all(torch.equal(parameters[n], p) for n, p in frozen.items())
        engine.rollback()
        assert engine.fingerprint() == fingerprint
        assert set(engine.learner.parameters) == set(engine.model.trained_parameters)
        assert_sampler_equals_learner(engine)


@pytest.mark.slow
def test_other_adapters_are_refused(untied, tmp_path):
    with load(untied) as engine:
        engine.save(tmp_path / "saved", 1)
    for lora, message in (({"r": 2}, "another rank"), ({"use_rslora": True}, "with use_rslora False, but")):
        with load(untied, lora) as engine, pytest.raises(EngineError, match=message):
            engine.load_weights(tmp_path / "saved")


def test_modules_that_do_not_exist_get_no_adapter(untied):
    with pytest.raises(ConfigError, match=r"target_modules.*nowhere|nowhere.*target_modules|not found"):
        load(untied, {"target_modules": ["nowhere"]})


def test_rslora_scales_by_the_root_of_the_rank(untied):
    """With r 4 and lora_alpha 8 an adapter's output is multiplied by 8 / sqrt(4) = 4, not by 8 / 4 = 2."""
    for use_rslora, scaling in ((False, 2.0), (True, 4.0)):
        module = load_module(untied, torch.float32)
        add_adapter(module, LoRAConfig(r=4, lora_alpha=8, use_rslora=use_rslora), seed=0)
        assert {part.scaling["default"] for part in module.modules() if hasattr(part, "lora_A")} == {scaling}


def test_dropout_is_refused():
    assert LoRAConfig(lora_dropout=0).lora_dropout == 0
    with pytest.raises(ValueError, match=r"lora_dropout is 0\.1.*log-probs differ from the sampler's; remove it"):
        LoRAConfig(lora_dropout=0.1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lm_hed", r'modules_to_save: the model has no module "lm_hed", did you mean "lm_head"\?'),
        ("norm", r'"norm" also matches model\.layers\.0\.input_layernorm.*\n.*such as model\.norm'),
        ("layers", r"modules_to_save: No modules were targeted"),
    ],
)
def test_modules_that_cannot_be_saved_are_refused(untied, name, message):
    with pytest.raises(ConfigError, match=message):
        load(untied, {"modules_to_save": [name]})


@pytest.mark.parametrize(("family", "name"), [("qwen2", "lm_head"), ("gpt2", "wte")])
def test_tied_embeddings_are_refused(find_base, family, name):
    base = find_base(family)
    with pytest.raises(ConfigError, match=rf"modules_to_save: .*{name}.weight and .* are tied \(one tensor\)"):
        load(base, {"modules_to_save": [name]})


def test_what_the_files_show_is_refused_before_loading(untied, find_base):
    from reinforge.engine.model.preflight import check_adapters, check_policy

    def check(folder, *names):
        config = PolicyConfig(model=str(folder), lora=LoRAConfig(modules_to_save=list(names)))
        return [str(problem) for problem in check_policy(config)]

    assert check(untied, "lm_head", "embed_tokens", "mlp", "model.norm", "layers.0") == []
    [problem] = check(untied, "lm_head", "embd_tokens")
    assert "modules_to_save: " in problem
    assert 'has no module "embd_tokens", did you mean "embed_tokens"?' in problem
    [problem] = check(find_base("qwen2"), "lm_head")
    assert "ties lm_head to embed_tokens" in problem
    assert check(find_base("gpt2"), "transformer.h") == []
    several = PolicyConfig(model=str(untied), lora=LoRAConfig(modules_to_save=["lm_head"]))
    [problem] = [str(problem) for problem in check_adapters(several, ["a", "b"], critic=False)]
    assert "lm_head cannot be trained in full for several adapters (a, b)" in problem
    assert check_adapters(several, ["a"], critic=False) == []
    with pytest.raises(ConfigError, match="several adapters"):
        load(untied, {"modules_to_save": ["lm_head"]}, adapters=("a", "b"))
