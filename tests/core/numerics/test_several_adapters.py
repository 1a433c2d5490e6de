"""Several adapters in one batch: each row uses its own, as if alone; each is trained, served and saved separately."""

import asyncio
import logging
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from reinforge.config.policy import LoRAConfig
from reinforge.engine.sampling import fast_llama, projection
from reinforge.engine.sampling.fast_llama import FastLlama
from reinforge.engine.sampling.projection import order_rows
from reinforge.errors import ConfigError, EngineError
from tests.engines import LIKELIHOOD, compute_sample_plainly, load_engine, measure_error, measure_plain_error
from tests.engines import train as make_job
from tests.models import FAMILIES, make_tiny_model
from tests.samples import ask, request, sample_replies, sibling_samples

NAMES = ("prover", "verifier")


def load(folder, adapters=NAMES, **settings):
    lora, optimizer = LoRAConfig(r=4, lora_alpha=8), {"learning_rate": 1e-2}
    settings = {"lora": lora, "max_num_seqs": 6, "optimizer": optimizer, "schedule": {"warmup_steps": 0}, **settings}
    return load_engine(folder, adapters=adapters, **settings)


def train(engine, adapter, version, seed):
    make_job(engine, sibling_samples(seed), LIKELIHOOD, adapters=[adapter], progress=0.5)
    asyncio.run(engine.policies[adapter].publish(version))


def train_both(engine):
    for number, name in enumerate(NAMES, 1):
        train(engine, name, number, number)


def uses_fast_llama(engine):
    return engine.policy.sampler._prefiller.fast_llama is not None


@contextmanager
def load_trained(folder, fast_paths):
    with load(folder, keep_reference=True, fast_paths=fast_paths) as engine:
        train_both(engine)
        yield engine
        assert uses_fast_llama(engine) == fast_paths


@pytest.fixture(scope="module")
def fast(tiny_model_dir):
    with load_trained(tiny_model_dir, True) as engine:
        yield engine


@pytest.fixture(scope="module")
def general(tmp_path_factory):
    base = make_tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2", **FAMILIES["qwen2"])
    with load_trained(base, False) as engine:
        yield engine


@pytest.fixture(params=["fast", pytest.param("general", marks=pytest.mark.slow)])
def engine(request):
    return request.getfixturevalue(request.param)


def tokens(count, seed=0):
    return tuple(np.random.default_rng(seed).integers(6, 320, count).tolist())


def test_a_mixed_batch_is_each_adapter_alone(engine):
    """With equal prompts, which the adapters answer differently, and more requests than slots."""
    prompts = [tokens(5 + 7 * (n // 2), seed=n // 2) for n in range(10)]
    adapters = [NAMES[n % 2] for n in range(10)]
    seeds = [n // 2 for n in range(10)]
    mixed = sample_replies(engine, prompts, 6, seeds, adapters)
    for n, together in enumerate(mixed):
        alone = sample_replies(engine, prompts[n : n + 1], 6, seeds[n : n + 1], adapters[n : n + 1])[0]
        assert alone.token_ids == together.token_ids
        assert np.abs(np.subtract(alone.logprobs, together.logprobs)).max() <= 1e-5
    assert measure_error(engine, mixed) <= 1e-5
    firsts = [(one.logprobs[0], other.logprobs[0]) for one, other in zip(mixed[::2], mixed[1::2], strict=True)]
    assert max(abs(one - other) for one, other in firsts) > 0.01, "the policies differ"


def test_both_adapters_share_the_decode_steps(engine):
    before = engine.policy.stats().steps
    sample_replies(engine, [tokens(9)] * 6, 10, adapters=NAMES * 3)
    assert engine.policy.stats().steps - before == 9


def test_an_adapter_reuses_only_its_own_cached_prefixes(engine):
    first = sample_replies(engine, [tokens(40, seed=77)], adapters=NAMES[:1])[0]
    path = (*first.prompt, *first.token_ids, 9)
    before = engine.policy.stats().reused_tokens
    other = sample_replies(engine, [path], adapters=NAMES[1:])
    assert engine.policy.stats().reused_tokens == before
    same = sample_replies(engine, [path], adapters=NAMES[:1])
    assert engine.policy.stats().reused_tokens - before == len(path) - 2
    assert measure_error(engine, [*other, *same]) <= 1e-5


def test_one_learns_while_the_other_serves(fast):
    prints = {name: fast.fingerprint(name) for name in NAMES}
    before = {name: fast.policies[name].version for name in NAMES}
    frozen = {n: p.clone() for n, p in fast.model.module.named_parameters() if ".prover." not in n}
    fast.begin_job("prover")
    waiting = asyncio.run(asks_both(fast))
    assert waiting == {"prover": False, "verifier": True}
    learn(fast, "prover", 0)
    with pytest.raises(EngineError, match="a job for prover is already open"):
        fast.begin_job("verifier")
    assert sample_replies(fast, [tokens(5)], adapters=["verifier"])[0].version == before["verifier"]
    fast.end_job()
    asyncio.run(fast.policies["prover"].publish(9))
    assert {name: fast.policies[name].version for name in NAMES} == {**before, "prover": 9}
    assert fast.fingerprint("prover") != prints["prover"]
    assert fast.fingerprint("verifier") == prints["verifier"]
    parameters = dict(fast.model.module.named_parameters())
    assert all(torch.equal(parameters[n], p) for n, p in frozen.items())
    changed = fast.fingerprint("prover")
    train(fast, "verifier", 10, seed=1)
    fast.begin_job("prover")
    learn(fast, "prover", 2)
    verifier = fast.fingerprint("verifier")
    fast.rollback()
    assert [fast.fingerprint(name) for name in NAMES] == [changed, verifier]


async def asks_both(engine):
    """Which of two requests is answered first; the other is cancelled."""
    asked = {name: asyncio.create_task(engine.policies[name].sample(request(max_tokens=2))) for name in NAMES}
    await asyncio.wait(asked.values(), timeout=60, return_when=asyncio.FIRST_COMPLETED)
    answered = {name: task.done() for name, task in asked.items()}
    for task in asked.values():
        task.cancel()
    await asyncio.gather(*asked.values(), return_exceptions=True)
    return answered


def test_each_is_saved_as_a_folder_of_its_own(engine, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    samples, base = sibling_samples(sizes=(2, 1)), engine.config.model
    for name in NAMES:
        engine.save(tmp_path / name, 1, name)
    with load(base) as again:
        for name in NAMES:
            again.load_weights(tmp_path / name, name)
            assert again.fingerprint(name) == engine.fingerprint(name)
        again.load_weights(tmp_path / "prover", "verifier")
        assert again.fingerprint("verifier") == engine.fingerprint("prover"), (
            "the hash does not depend on the adapter's name"
        )
    for name in NAMES:
        own = engine.logprobs(samples, name)
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model = PeftModel.from_pretrained(plain, tmp_path / name)
        for sample, logprobs in zip(samples, own, strict=True):
            assert np.abs(compute_sample_plainly(model, sample) - logprobs).max() <= 2e-5
        with load_engine(tmp_path / name) as alone:
            assert alone.fingerprint() == engine.fingerprint(name)


def learn(engine, adapter, seed):
    samples = sibling_samples(seed)
    engine.update(samples, LIKELIHOOD, progress_start=0.5, progress_end=0.5, adapter=adapter)


def test_a_job_of_both_ends_as_one_version(tiny_model_dir):
    """That nothing of it is left after a rollback: tests/fault/test_several_adapters.py."""
    with load(tiny_model_dir) as engine:
        engine.begin_job(*NAMES)
        learn(engine, "prover", 2)
        with pytest.raises(EngineError, match="a job for prover, verifier is already open"):
            engine.begin_job("verifier")
        engine.end_job()
        replies = [ask(engine.policies[name], [request()])[0] for name in NAMES]
        assert [reply.tokens.policy_version for reply in replies] == [1, 1], "the first request opens each"
        with pytest.raises(EngineError, match="no job has begun"):
            engine.rollback()


def test_a_job_changes_its_own_adapters_only(engine, tmp_path):
    engine.save(tmp_path / "saved", 1, "prover")
    engine.begin_job("prover")
    with pytest.raises(EngineError, match="update: the open job is for prover, not for verifier"):
        learn(engine, "verifier", 1)
    with pytest.raises(EngineError, match="load_weights: the open job is for prover, not for verifier"):
        engine.load_weights(tmp_path / "saved", "verifier")
    engine.rollback()


def count_changed_replies(base, fast_paths, rounds=6):
    """Returns the number of replies whose bits change with the other replies sampled at the same time."""
    rng, count = np.random.default_rng(0), 0
    with load(base, deterministic=True, fast_paths=fast_paths) as engine:
        train_both(engine)
        prompt, seeds = tokens(9, seed=5), [11, 12]
        alone = [
            sample_replies(engine, [prompt], 8, [seed], [name])[0] for seed, name in zip(seeds, NAMES, strict=True)
        ]
        for _ in range(rounds):
            others = int(rng.integers(0, 5))
            adapters = [*NAMES, *(NAMES[int(n)] for n in rng.integers(0, 2, others))]
            prompts = [prompt, prompt, *(tokens(int(n), seed=int(n)) for n in rng.integers(3, 40, others))]
            mixed = sample_replies(engine, prompts, 8, [*seeds, *range(others)], adapters)[:2]
            count += sum(
                (one.token_ids, one.logprobs) != (same.token_ids, same.logprobs)
                for one, same in zip(alone, mixed, strict=True)
            )
    return count


@pytest.mark.slow
@pytest.mark.parametrize("fast_paths", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_bits_of_deterministic_replies_do_not_depend_on_other_rows(tiny_model_dir, fast_paths):
    assert count_changed_replies(tiny_model_dir, fast_paths) == 0


def sample_mixed(engine):
    """Replies of the two adapters in turn, and of six prompts in whose batch neither comes first."""
    return sample_replies(engine, [tokens(5 + n, seed=n) for n in range(6)], 8, adapters=["verifier", "prover"] * 3)


@pytest.mark.slow
def test_rows_of_a_wrong_adapter_or_place_are_found(fast, monkeypatch):
    """Mutation check: the fast decoder with adapters swapped, rows in no order, or results in the wrong rows."""
    mutations = {
        "none": lambda adapters, rows: (adapters, rows),
        "adapters": lambda adapters, rows: (adapters[::-1], rows),
        "order": lambda adapters, rows: (
            adapters,
            rows._replace(order=rows.order.sort().values, places=rows.order.sort().values),
        ),
        "places": lambda adapters, rows: (adapters, rows._replace(places=rows.places.roll(1))),
    }
    for name, mutate in mutations.items():

        def order_wrongly(*args, mutate=mutate):
            adapters, rows = order_rows(*args)
            return (adapters, rows) if rows.order is None else mutate(adapters, rows)

        monkeypatch.setattr(fast_llama, "order_rows", order_wrongly)
        error = measure_error(fast, sample_mixed(fast))
        assert error <= 1e-5 if name == "none" else error > 0.01, name


@pytest.mark.slow
def test_a_fast_decoder_that_confuses_rows_is_not_used(tiny_model_dir, monkeypatch, caplog):
    """The trial at load mixes two adapters."""

    def wrong(*args):
        adapters, rows = order_rows(*args)
        return adapters, rows if rows.places is None else rows._replace(places=rows.places.roll(1))

    monkeypatch.setattr(fast_llama, "order_rows", wrong)
    with caplog.at_level(logging.WARNING), load(tiny_model_dir) as engine:
        assert not uses_fast_llama(engine)
        assert "sampling with transformers' own modules (slower)" in caplog.text
        assert measure_error(engine, sample_mixed(engine)) <= 1e-5


def sample_while_the_other_learns(engine):
    """Replies of both after one was trained, between whose steps the other was sampled."""
    sample_mixed(engine)
    engine.begin_job("prover")
    for seed in (1, 2):
        learn(engine, "prover", seed)
        assert measure_error(engine, sample_replies(engine, [tokens(7)], adapters=["verifier"])) <= 1e-5
    engine.end_job()
    asyncio.run(engine.policies["prover"].publish(1))
    return sample_mixed(engine)


@pytest.mark.slow
def test_an_adapter_that_learns_is_sampled_with_its_new_weights_only(fast, monkeypatch):
    """Mutation check: copies of weights that are never dropped are found."""
    assert measure_error(fast, sample_while_the_other_learns(fast)) <= 1e-5
    with monkeypatch.context() as patch:
        patch.setattr(FastLlama, "drop_weights", lambda *args: None)
        assert measure_error(fast, sample_while_the_other_learns(fast)) > 0.01
    fast.policy.sampler.call(fast.policy.sampler._prefiller.fast_llama.drop_weights)


def save_foreign_adapter(base, folder, **settings):
    """Writes an adapter with random weights as PEFT does; returns PEFT's model with it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = get_peft_model(whole, LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    generator = torch.Generator().manual_seed(len(folder.name))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.save_pretrained(folder)
    return model


def assert_sampled_by(models, replies):
    for reply in replies:
        assert measure_plain_error(models[reply.adapter], [reply]) <= 1e-4, reply.adapter


FOREIGN = {
    "narrow": {"r": 2, "target_modules": ["q_proj"], "lora_dropout": 0.3},
    "scaled": {"r": 6, "lora_alpha": 3, "use_rslora": True, "target_modules": ["v_proj", "down_proj"]},
    "uneven": {
        "r": 6,
        "target_modules": ["k_proj", "up_proj"],
        "rank_pattern": {"k_proj": 3},
        "alpha_pattern": {"up_proj": 9},
        "layers_to_transform": [1],
    },
    "whole": {"r": 4, "target_modules": "all-linear"},
}


@pytest.mark.slow
def test_adapters_of_any_rank_and_layers_share_a_batch_while_others_come_and_go(tiny_model_dir, tmp_path):
    from transformers import AutoModelForCausalLM

    models = {
        name: save_foreign_adapter(tiny_model_dir, tmp_path / name, **settings) for name, settings in FOREIGN.items()
    }
    models["default"] = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)  # adds nothing
    with load(tiny_model_dir, adapters=()) as engine:
        served = ["default"]
        for name in FOREIGN:
            engine.add_adapter(name, tmp_path / name)
            served = [name, *served]
            mixed = [served[n % len(served)] for n in range(7)]
            assert_sampled_by(models, sample_replies(engine, [tokens(4 + n, n) for n in range(7)], 4, adapters=mixed))
        engine.remove_adapter("scaled")
        engine.remove_adapter("whole")
        engine.add_adapter("whole", tmp_path / "narrow")  # the name of one that is gone
        models["whole"] = models["narrow"]
        mixed = ["whole", "uneven", "default", "narrow", "whole"]
        assert_sampled_by(models, sample_replies(engine, [tokens(9, n) for n in range(5)], 6, adapters=mixed))
        assert uses_fast_llama(engine)


@pytest.fixture(scope="module")
def serving(tiny_model_dir):
    """An engine of one adapter, which others may join."""
    with load(tiny_model_dir, adapters=()) as engine:
        yield engine


def test_a_request_that_reaches_the_sampler_after_its_adapter_is_gone_fails_alone(serving, tiny_model_dir, tmp_path):
    """It is on its way while the adapter is removed, and the replies of others go on."""
    save_foreign_adapter(tiny_model_dir, tmp_path / "narrow", **FOREIGN["narrow"])
    removed = serving.add_adapter("narrow", tmp_path / "narrow")
    serving.remove_adapter("narrow")

    async def ask_both():
        return await asyncio.gather(
            *(policy.sample(request()) for policy in (serving.policy, removed)), return_exceptions=True
        )

    reply, error = asyncio.run(asyncio.wait_for(ask_both(), 60))
    assert reply.tokens.policy_version == 0
    assert str(error) == "the adapter narrow was removed"


@pytest.mark.slow
def test_an_adapter_that_the_fast_decoder_does_not_know_is_sampled_by_the_modules(
    tiny_model_dir, tmp_path, monkeypatch, caplog
):
    """As if a release of PEFT computed more than s B A x."""
    models = {"whole": save_foreign_adapter(tiny_model_dir, tmp_path / "whole", **FOREIGN["whole"])}
    with load(tiny_model_dir, adapters=()) as engine, caplog.at_level(logging.INFO):
        assert uses_fast_llama(engine)
        monkeypatch.setattr(projection, "_is_plain_lora", lambda *args: False)
        engine.add_adapter("whole", tmp_path / "whole")
        assert not uses_fast_llama(engine)
        assert "whole: sampling with transformers' own modules (slower) from now on" in caplog.text
        mixed = sample_replies(engine, [tokens(5), tokens(6)], 6, adapters=["default", "whole"])
        assert_sampled_by(models, mixed[1:])
        assert measure_error(engine, mixed) <= 1e-5


SPECIAL = {
    "lm_head": ({"target_modules": ["q_proj", "lm_head"]}, "it changes lm_head", "lm_head has an adapter"),
    "embed_tokens": (
        {"target_modules": ["q_proj", "embed_tokens"]},
        r"it changes model\.embed_tokens",
        "embed_tokens has an adapter",
    ),
    "bias": (
        {"target_modules": ["q_proj"], "lora_bias": True},
        "q_proj has an adapter that is not plain LoRA",
        "q_proj has an adapter that is not plain LoRA",
    ),
    "tokens": (
        {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]},
        r"it changes model\.embed_tokens",
        "embed_tokens is trained in full, or for some tokens,",
    ),
    "biases": (
        {"target_modules": ["q_proj"], "bias": "all"},
        "bias is all",
        r"biases belong to default \(bias is all\)",
    ),
}


FOREIGN_TO_ALL = {
    "dora": ({"use_dora": True}, "use_dora is True"),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights is pissa"),
    "replicated": ({"layer_replication": [[0, 1], [0, 2]]}, "layer_replication is"),
}
REFUSED = FOREIGN_TO_ALL | {
    kind: (settings, f"{joins}, so the adapter cannot share a batch with others")
    for kind, (settings, joins, _) in SPECIAL.items()
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "kind",
    [kind if kind in ("lm_head", "bias", "dora") else pytest.param(kind, marks=pytest.mark.slow) for kind in REFUSED],
)
def test_an_adapter_that_cannot_share_a_batch_is_refused_before_it_changes_anything(
    serving, tiny_model_dir, tmp_path, kind
):
    settings, joins = REFUSED[kind]
    save_foreign_adapter(tiny_model_dir, tmp_path / "special", **{"r": 2, "target_modules": ["q_proj"], **settings})
    before = sample_replies(serving, [tokens(5)])[0]
    with pytest.raises(EngineError, match=joins):
        serving.add_adapter("special", tmp_path / "special")
    after = sample_replies(serving, [tokens(5)])
    assert after[0].logprobs == before.logprobs
    assert measure_error(serving, after) <= 1e-5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "kind", [kind if kind == "bias" else pytest.param(kind, marks=pytest.mark.slow) for kind in SPECIAL]
)
def test_an_engine_of_its_own_samples_such_an_adapter_and_others_cannot_join_it(tiny_model_dir, tmp_path, kind):
    settings, _, is_joined = SPECIAL[kind]
    model = save_foreign_adapter(tiny_model_dir, tmp_path / "special", r=2, **settings)
    save_foreign_adapter(tiny_model_dir, tmp_path / "plain", r=2, target_modules=["q_proj"])
    with load_engine(tmp_path / "special") as engine:
        with pytest.raises(EngineError, match=f"{is_joined} in the model that it would join"):
            engine.add_adapter("plain", tmp_path / "plain")
        replies = sample_replies(engine, [tokens(5)])
        assert_sampled_by({"default": model}, replies)
        assert measure_error(engine, replies) <= 1e-5, "tokens are scored with their adapter, too"


def test_several_adapters_of_the_embeddings_are_refused(tiny_model_dir):
    """Rows would be sampled without them, but trained with them."""
    lora = LoRAConfig(r=2, target_modules=["q_proj", "embed_tokens"])
    with pytest.raises(EngineError, match=r"several adapters in one batch: model\.embed_tokens has one; remove it"):
        load(tiny_model_dir, lora=lora)


@pytest.mark.slow
def test_impossible_adapter_settings_are_rejected(tmp_path, engine):
    base = engine.config.model
    with pytest.raises(ConfigError, match="LoRA is off"):
        load(base, lora=None)
    for names in (("a", "a"), ("a.b", "c")):
        with pytest.raises(ConfigError, match="names must differ and contain only letters"):
            load(base, adapters=names)
    with pytest.raises(ConfigError, match="one policy's features"):
        load(base, critic=True)
    engine.save(tmp_path / "saved", 1)
    with pytest.raises(ConfigError, match="already has an adapter"):
        load(tmp_path / "saved")
    with pytest.raises(EngineError, match="no adapter is named judge; the adapters are: prover, verifier"):
        engine.begin_job("judge")
    for name in ("layers", "values", "q_proj"):
        with pytest.raises(ConfigError, match=f"a module of the model is also called {name}"):
            load(base, adapters=("prover", name))
