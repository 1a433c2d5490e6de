"""Today's architectures: sampler = learner = plain transformers forward, in float32, through the public engine.

Where a layer keeps states, prompts end together, cached sequences are continued from their end only, and prefixes that
siblings share end in a state with gradient. Quick cases are few, the slow ones one for each kind of cache.
"""

import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from reinforge.config.policy import LoRAConfig
from reinforge.engine.model import architecture
from reinforge.engine.model.architecture import HUB_KERNELS, shorten_kernel_warnings
from reinforge.engine.model.model_cache import LeftPadding
from reinforge.engine.sampling import sampler
from reinforge.engine.training.collate import collate
from reinforge.engine.training.logprobs import sample_logprobs
from reinforge.engine.training.micro_batches import make_micro_batches
from reinforge.errors import ConfigError, EngineError
from tests.architectures import ARCHITECTURES, KINDS, MULTIMODAL, make_tiny_architecture, make_tiny_multimodal
from tests.engines import (
    assert_close,
    compute_gradients,
    compute_plainly,
    compute_sample_plainly,
    copy_weights,
    load_engine,
    measure_difference,
    measure_plain_error,
    train,
)
from tests.models import make_tiny_model
from tests.samples import ask, hold_steps, make_sample, request, sample_replies, sibling_samples, trained_samples


def sort_cases(names, quick, slow):
    """One quick case, some slow ones, and the long forms."""
    marks = {quick: ()} | {name: pytest.mark.slow for name in slow if name != quick}
    return [pytest.param(name, marks=marks.get(name, pytest.mark.fault)) for name in names]


TOLERANCE = 1e-4
"""Recurrent scans add many terms in float32; the others stay under 1e-5."""

ALONE = {"jamba", "mamba", "falcon_mamba"}
"""Their modules start from an empty state wherever there are several tokens, so nothing is continued."""


@pytest.fixture(scope="module", params=sort_cases(ARCHITECTURES, "qwen3_5_text", KINDS))
def engine(request, tmp_path_factory):
    folder = make_tiny_architecture(tmp_path_factory.mktemp(request.param), request.param)
    with load_engine(folder, max_num_seqs=6) as engine:
        engine.name = request.param
        yield engine


def test_the_sampler_and_the_learner_are_the_plain_forward(engine):
    """Rows of different lengths at once, some filtered; more requests than slots, so that rows are compacted."""
    settings = [{"top_p": 0.9}, {}, {"top_k": 5, "temperature": 0.7}, {"temperature": 1.5}, {"min_p": 0.05}]
    asked = [request("a" * (1 + i // 2), **settings[i % 5], max_tokens=2 + 4 * (i % 4)) for i in range(12)]
    replies = ask(engine.policy, asked)
    samples = [sample for reply in replies for sample in trained_samples(reply.tokens)]
    learned = engine.logprobs(samples)
    for reply, sample, logprobs in zip(replies, samples, learned, strict=True):
        ids, first = sample.token_ids.tolist(), len(reply.tokens.prompt_token_ids)
        kept = None if sample.supports is None else sample.supports.sets
        plain = compute_plainly(engine.model.module, ids, first, reply.tokens.temperature, kept)
        assert np.abs(sample.sampling_logprobs[first:] - plain).max() <= TOLERANCE
        assert np.abs(logprobs[first:] - plain).max() <= TOLERANCE


@pytest.mark.slow
def test_second_turns_come_from_the_prefix_cache(engine):
    """Six conversations of three turns side by side, of different lengths; then two branches of one node."""
    rng = np.random.default_rng(3)
    histories = [()] * 6
    before = engine.policy.stats().reused_tokens
    for turn in range(3):
        sizes = [(34 if turn == 0 else 5) + (i % 3) for i in range(6)]
        prompts = [h + tuple(rng.integers(6, 320, n).tolist()) for h, n in zip(histories, sizes, strict=True)]
        replies = sample_replies(engine, prompts, 7)
        assert measure_plain_error(engine.model.module, replies) <= TOLERANCE
        if turn:
            reused = engine.policy.stats().reused_tokens - before
            assert (reused == 0) == (engine.name in ALONE)
            if reused:
                assert reused == sum(len(history) - 1 for history in histories)
        before = engine.policy.stats().reused_tokens
        histories = [reply.prompt + reply.token_ids for reply in replies]
    branches = [histories[0] + tuple(rng.integers(6, 320, n).tolist()) for n in (3, 3, 6)]
    assert measure_plain_error(engine.model.module, sample_replies(engine, branches, 5)) <= TOLERANCE


def test_memory_of_long_replies_is_freed_while_another_reply_is_sampled(engine, monkeypatch):
    monkeypatch.setattr(sampler, "UNUSED_S", 0.0)
    sample_replies(engine, [tuple(range(6 + i, 106 + i)) for i in range(6)], 3)
    grown = engine.policy.stats().kv_cache_bytes
    with ThreadPoolExecutor(1) as thread, hold_steps(engine) as held:
        reply = thread.submit(sample_replies, engine, [tuple(range(20, 30)), tuple(range(30, 42))], 9)
        assert held.wait(60)
        engine.policy.release_memory()
    assert measure_plain_error(engine.model.module, reply.result()) <= TOLERANCE
    assert engine.policy.stats().kv_cache_bytes < grown


def test_shared_prefixes_equal_whole_rows(engine):
    """Log-probs to 1e-4, every parameter's gradient to 1e-4 of its size; and prefixes are really shared."""
    samples, masks = sibling_samples(seed=1), engine.learner.masks
    assert (masks is None) == (engine.name in ALONE)
    batches = [collate([samples[i] for i in batch]) for batch in make_micro_batches(samples, 2000)]
    assert any(batch.prefixes for batch in batches)
    rows, shared = (sample_logprobs(engine.model, samples, 2000, way) for way in (None, masks))
    assert measure_difference(rows, shared) <= TOLERANCE
    assert_close(compute_gradients(engine, samples, 2000, masks), compute_gradients(engine, samples, 2000))


def load(folder, **settings):
    return load_engine(folder, max_num_seqs=6, **settings)


def sample_and_measure(engine):
    """Samples prompts of different lengths and returns the samples and the largest error of their log-probs."""
    replies = ask(engine.policy, [request("a" * (1 + 4 * i), max_tokens=6) for i in range(5)])
    tokens = [reply.tokens for reply in replies]
    samples = [make_sample(*each) for each in zip(tokens, (1.0, -1.0, 0.5, -0.5, 1.0), strict=True)]
    plain = [compute_sample_plainly(engine.model.module, sample) for sample in samples]
    return samples, measure_difference(plain, [sample.sampling_logprobs for sample in samples])


def train_twice(engine, samples):
    """Trains on the samples with and without shared prompts, from the same weights; returns both results."""
    learner, masks, results = engine.learner, engine.learner.masks, []
    for way in (masks, None):
        learner.masks = way
        before = copy_weights(learner)
        assert train(engine, samples).num_updates
        results.append({name: p.detach() - before[name] for name, p in learner.parameters.items()})
        engine.rollback()
    learner.masks = masks
    return results


SGD = {"name": "sgd", "learning_rate": 1.0}
"""Adam divides by the gradient's own size, so that a gradient near 0 makes a step of rounding errors."""

LORA_NAMES = ("qwen3_5_text", "lfm2", "qwen3_moe", "gpt_oss", "llama4_text", "falcon_h1", "nemotron_h", "gemma3n_text")


@pytest.mark.parametrize("name", sort_cases(LORA_NAMES, "lfm2", ("gpt_oss", "falcon_h1")))
def test_a_step_on_shared_prompts_is_the_step_on_rows(name, tmp_path):
    """GRPO's loss, adapters on all linear layers and on the experts; afterwards the sampler uses the new weights."""
    folder = make_tiny_architecture(tmp_path, name)
    lora = LoRAConfig(r=4, target_parameters="all-experts")
    with load(folder, lora=lora, optimizer=SGD) as engine:
        names = list(engine.learner.parameters)
        assert all(".lora_" in each for each in names)
        assert any("experts" in each for each in names) == (
            name not in ("qwen3_5_text", "lfm2", "falcon_h1", "gemma3n_text")
        )
        assert_close(*train_twice(engine, sibling_samples(seed=2)))
        samples, error = sample_and_measure(engine)
        assert error <= TOLERANCE
        train(engine, samples)
        assert sample_and_measure(engine)[1] <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("family", sort_cases(MULTIMODAL, "smolvlm", ("qwen3_vl", "gemma4")))
def test_the_text_part_of_a_multimodal_checkpoint(family, tmp_path):
    """Sampled and trained alone: towers for pictures and sound are frozen and get no adapters."""
    folder = make_tiny_multimodal(tmp_path / "model", family)
    for lora in (None, LoRAConfig(r=4)):
        with load(folder, lora=lora, optimizer=SGD) as engine:
            samples, error = sample_and_measure(engine)
            assert error <= TOLERANCE
            learned = engine.logprobs(samples)
            for sample, logprobs in zip(samples, learned, strict=True):
                assert np.abs(logprobs - sample.sampling_logprobs)[sample.loss_mask].max() <= TOLERANCE
            names = list(engine.learner.parameters)
            assert not [name for name in names if "vision" in name or "audio" in name or "projector" in name]
            if lora is None:
                continue
            assert_close(*train_twice(engine, sibling_samples(seed=2)))


@pytest.fixture(scope="module")
def convolutions(tmp_path_factory):
    with load(make_tiny_architecture(tmp_path_factory.mktemp("lfm2"), "lfm2")) as engine:
        yield engine


def test_states_end_with_the_last_token_of_each_prompt(convolutions, monkeypatch):
    """Mutation check: prompts that are padded on the right feed padding into the states of the shorter ones."""
    assert sample_and_measure(convolutions)[1] <= TOLERANCE
    from_lengths = LeftPadding.from_lengths
    monkeypatch.setattr(
        LeftPadding, "from_lengths", lambda lengths, *rest: from_lengths(torch.full_like(lengths, rest[0]), *rest)
    )
    assert sample_and_measure(convolutions)[1] > 0.01


def test_only_whole_sequences_are_continued_where_there_are_states(convolutions, monkeypatch):
    """A history that was rewritten near its end is computed again.

    Mutation check: continued from its common beginning, it starts from the state after another ending.
    """
    rng = np.random.default_rng(0)
    start, end, other = (tuple(rng.integers(6, 320, n).tolist()) for n in (36, 6, 9))

    def measure():
        convolutions.policy.sampler._prefix_cache.clear()
        sample_replies(convolutions, [start + end], 8)
        before = convolutions.policy.stats().reused_tokens
        error = measure_plain_error(convolutions.model.module, sample_replies(convolutions, [start + other], 8))
        return convolutions.policy.stats().reused_tokens - before, error

    reused, error = measure()
    assert reused == 0
    assert error <= TOLERANCE
    monkeypatch.setattr(convolutions.policy.sampler._prefix_cache, "whole_only", False)
    reused, error = measure()
    assert reused == len(start)
    assert error > 0.01


def test_a_model_that_keeps_states_in_its_modules_is_refused(tmp_path, monkeypatch):
    """By its name before its weights are read, and without that by a trial of two rows, which share its states."""
    settings = {"lru_width": 64, "attention_window_size": 8, "num_hidden_layers": 3, "head_dim": 16}
    folder = make_tiny_model(tmp_path, "recurrent_gemma", **settings)
    with pytest.raises(ConfigError, match='"recurrent_gemma", which keeps its recurrent states in its modules'):
        load(folder)
    monkeypatch.setattr(architecture, "UNCACHED_FAMILIES", {})
    with pytest.raises(EngineError, match="cannot sample from 'recurrent_gemma' models: cached logits differ"):
        load(folder)


@pytest.mark.parametrize("part", ["text_config", None])
def test_layers_without_a_cache_are_refused_by_their_type(part):
    layers = {"layer_types": ["full_attention", "indexed_attention"]}
    settings = {"model_type": "qwen3_vl" if part else "qwen3", **({part: layers} if part else layers)}
    assert [message for message, _ in architecture.find_untrainable(settings)] == [
        'has layers of type "indexed_attention", which the sampler has no cache for'
    ]


def test_missing_kernels_are_named_once(caplog):
    """transformers warns of each function; 4 functions of 2 libraries make 2 lines here, and none on the terminal."""
    caplog.set_level(logging.INFO, logger="reinforge")
    source = logging.getLogger(HUB_KERNELS)
    before, source.filters = source.filters, []
    try:
        shorten_kernel_warnings()
        shorten_kernel_warnings()
        for name, library in (("a", "one"), ("b", "one"), ("c", "two"), ("d", "two")):
            source.warning(
                f"`{name}` is falling back to its reference PyTorch implementation because `{library}` is not installed"
            )
        source.warning("another warning")
    finally:
        source.filters = before
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "one is not installed",
        "two is not installed",
        "another warning",
    ]
