"""GGUF files, read back by transformers' own reader: the same log-probs, tokens and settings as the model."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from reinforge.config.finetuning_blocks import SamplingConfig
from reinforge.errors import ConfigError
from reinforge.exports.gguf import file as gguf_file
from reinforge.exports.gguf.file import (
    GgufSettings,
    build_vocabulary,
    check_architecture,
    name_pre_tokenizer,
    write_gguf,
)
from reinforge.exports.gguf.tokenizer import SPLITS
from tests.exports.gguf_files import LLAMA3_ROPE
from tests.models import make_tiny_model

# 128 is the size that transformers' reader takes for granted
FAMILIES = {"llama": {}, "mistral": {"sliding_window": None}, "qwen2": {}, "qwen3": {"head_dim": 128}}
TEXT = "what is the capital of France? It's 12 o'clock,\n\n  said Paris."


def export(folder, file_type="f32", family="llama", **config):
    made = make_tiny_model(folder / "model", family, **{**FAMILIES.get(family, {}), **config})
    module, tokenizer = AutoModelForCausalLM.from_pretrained(made), AutoTokenizer.from_pretrained(made)
    path = folder / "tiny.gguf"
    write_gguf(path, module, tokenizer, GgufSettings(file_type, "tiny", SamplingConfig(temperature=0.7), "mit", "base"))
    return module, tokenizer, path


def compute_difference(folder, module, tokenizer):
    ids = torch.tensor([tokenizer.encode(TEXT)])
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file="tiny.gguf", dtype=torch.float32)
    with torch.no_grad():
        both = [each(input_ids=ids).logits.log_softmax(-1) for each in (module.eval(), read.eval())]
    return (both[0] - both[1]).abs().max().item()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_has_the_log_probs_of_its_model(tmp_path, family):
    module, tokenizer, _ = export(tmp_path, family=family)
    assert compute_difference(tmp_path, module, tokenizer) < 1e-5


def test_a_writer_that_forgets_the_permutation_is_noticed(tmp_path, monkeypatch):
    """Mutation check."""
    monkeypatch.setattr(gguf_file, "PERMUTED", set())
    module, tokenizer, _ = export(tmp_path)
    assert compute_difference(tmp_path, module, tokenizer) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_output_layer_is_left_out(tmp_path, tied):
    gguf = pytest.importorskip("gguf")
    module, tokenizer, path = export(tmp_path, tie_word_embeddings=tied)
    names = {tensor.name for tensor in gguf.GGUFReader(path).tensors}
    assert ("output.weight" in names) is not tied
    assert compute_difference(tmp_path, module, tokenizer) < 1e-5


def test_what_the_file_says(tmp_path):
    import gguf

    _, tokenizer, path = export(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    fields = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    assert fields["general.license"] == "mit"
    assert fields["general.base_model.0.name"] == "base"
    assert fields["general.sampling.temp"] == pytest.approx(0.7)
    assert fields["llama.rope.freq_base"] == 5e5
    assert (fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]) == (4, 2)
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    assert fields["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    assert fields["tokenizer.ggml.add_bos_token"] is False
    assert fields["tokenizer.chat_template"] == tokenizer.chat_template
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert tokens[tokenizer.eos_token_id] == "<|end|>"
    assert types[tokenizer.eos_token_id] == 3
    assert types[tokenizer.convert_tokens_to_ids("a")] == 1


def test_rows_without_a_token_are_unused(tmp_path):
    made = make_tiny_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(made)
    vocabulary = build_vocabulary(tokenizer, 330, [])
    assert vocabulary.tokens[-1] == "[PAD329]"
    assert vocabulary.types[-1] == 5
    with pytest.raises(ConfigError, match="has no embedding: the model has 300 rows"):
        build_vocabulary(tokenizer, 300, [])


@pytest.mark.slow
@pytest.mark.parametrize(("file_type", "limit"), [("bf16", 0.1), ("f16", 0.02), ("q8_0", 0.1)])
def test_smaller_files_are_close(tmp_path, file_type, limit):
    module, tokenizer, path = export(tmp_path, file_type)
    assert 0 < compute_difference(tmp_path, module, tokenizer) < limit
    whole = sum(each.numel() for each in module.parameters()) * 4
    assert path.stat().st_size < 0.75 * whole + 40_000


def test_rope_scaling_of_llama_3_is_written(tmp_path):
    scaling = {**LLAMA3_ROPE, "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
    import gguf

    *_, path = export(tmp_path, rope_parameters=scaling)
    (factors,) = [each.data.tolist() for each in gguf.GGUFReader(path).tensors if each.name == "rope_freqs.weight"]
    # wavelengths 2 pi 10000^(i/8): 6.3 < 64 / 4 stays; 19.9 and 62.8 are in between; 199 > 64 / 1 is divided by 8
    between = [64 / (2 * torch.pi * 10000 ** (i / 8)) - 1 for i in (1, 2)]
    expected = [1.0, *(1 / ((1 - s / 3) / 8 + s / 3) for s in between), *[8.0] * 5]
    assert factors == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "gpt2"}, "the architecture 'gpt2' is not one of llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "its activation is gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "its rope type 'yarn' is not one of"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "rotates only a part"),
    ],
)
def test_other_models_are_refused_with_llama_cpps_converter(change, reason):
    config = type("Config", (), {"model_type": "llama", **change})()
    (problem,) = check_architecture(config)
    assert reason in problem.message
    assert "python convert_hf_to_gguf.py" in problem.fix


def test_a_bias_that_llama_cpp_does_not_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"architecture qwen3 has no tensor for model.layers.0.self_attn.q_proj.bias"):
        export(tmp_path, family="qwen3", attention_bias=True)


def test_the_context_ends_at_the_sliding_window(tmp_path):
    import gguf

    *_, path = export(tmp_path, family="mistral", sliding_window=8)
    assert gguf.GGUFReader(path).fields["llama.context_length"].contents() == 8


def define(*steps, ignore_merges=False, normalizer=None, **model):
    pre = {"type": "Sequence", "pretokenizers": list(steps)} if len(steps) != 1 else steps[0]
    model = {"type": "BPE", "ignore_merges": ignore_merges, **model}
    return {"model": model, "normalizer": normalizer, "pre_tokenizer": pre}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
BY_REGEX, DIGITS = {**BYTES, "use_regex": True}, {"type": "Digits", "individual_digits": True}


def split(name, **changes):
    step = {"type": "Split", "pattern": {"Regex": SPLITS[name].pattern}, "behavior": "Isolated", "invert": False}
    return {**step, **changes}


@pytest.mark.parametrize(
    ("definition", "name"),
    [
        (define(BY_REGEX), "gpt-2"),
        (define(DIGITS, BY_REGEX), "smollm"),
        (define(split("qwen2"), BYTES, normalizer={"type": "NFC"}), "qwen2"),
        (define(split("qwen2", behavior="Removed", invert=True), BYTES), "qwen2"),
        (define(split("llama-bpe"), BYTES, ignore_merges=True), "llama-bpe"),
        (define(split("tekken"), BYTES, ignore_merges=True), "tekken"),
    ],
)
def test_the_pre_tokenizer_is_named_by_what_it_does(definition, name):
    assert name_pre_tokenizer(definition) == name


@pytest.mark.parametrize(
    ("definition", "reason"),
    [
        (define(BYTES), "no name for its pre-tokenizer"),
        (define(split("llama-bpe"), BYTES), "no name for its pre-tokenizer"),
        (define(split("qwen2"), BY_REGEX), "no name for its pre-tokenizer"),
        (define({**BY_REGEX, "add_prefix_space": True}), "no name for its pre-tokenizer"),
        (define({**DIGITS, "individual_digits": False}, BY_REGEX), "no name for its pre-tokenizer"),
        (define(DIGITS), "no name for its pre-tokenizer"),
        (define(split("qwen2", pattern={"Regex": r"\S+"}), BYTES), "no name for its pre-tokenizer"),
        (define(BY_REGEX, normalizer={"type": "Lowercase"}), "normalizes text by Lowercase"),
        (define(BY_REGEX, byte_fallback=True), "SentencePiece"),
        ({**define(BY_REGEX), "model": {"type": "Unigram"}}, "its tokenizer is Unigram"),
    ],
)
def test_other_tokenizers_are_refused(definition, reason):
    with pytest.raises(ConfigError, match=reason) as refused:
        name_pre_tokenizer(definition)
    # llama.cpp's own converter finds the name by a hash of tokens, so it refuses an unknown split, too
    assert ("--format merged: transformers" if "pre-tokenizer" in reason else "convert_hf_to_gguf.py") in str(
        refused.value
    )


def test_a_starters_own_pattern_is_refused_by_name():
    from reinforge.tasks.tic_tac_toe.starter import make_tokenizer

    definition = json.loads(make_tokenizer().backend_tokenizer.to_str())
    with pytest.raises(ConfigError, match=r"gpt-2, smollm"):
        name_pre_tokenizer(definition)


def test_prompts_begin_with_a_bos_token_where_training_saw_one(tmp_path):
    from tokenizers.processors import TemplateProcessing

    made = make_tiny_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(made)
    tokenizer.bos_token = "<|system|>"
    assert not build_vocabulary(tokenizer, 320, []).adds_bos, "neither texts nor chats begin with one"
    special = [("<|system|>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|system|> $A", special_tokens=special)
    assert not build_vocabulary(tokenizer, 320, []).adds_bos, "chats do not, and llama.cpp would add one"
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    assert build_vocabulary(tokenizer, 320, []).adds_bos
