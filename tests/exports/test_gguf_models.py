"""Models from GGUF files: the same model as their source, and every damaged file is one message."""

from __future__ import annotations

import json
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import gguf
import pytest
import torch

from reinforge.config.policy import PolicyConfig
from reinforge.engine.model.loading import load_model, load_module, load_tokenizer
from reinforge.engine.model.preflight import check_policy
from reinforge.errors import ConfigError, StorageError
from reinforge.exports.gguf import convert as gguf_convert
from reinforge.exports.gguf import source
from reinforge.exports.gguf.families import find_llama3_rotation
from reinforge.exports.gguf.header import BLOCKS, GGUFError, read_header
from reinforge.exports.gguf.source import ensure_converted
from tests.exports.gguf_files import LLAMA3_ROPE, pack_header, pack_tensor, pack_text, write_gguf
from tests.models import SENTENCES, make_tiny_model
from tests.tokenizer_kinds import TOKENIZERS

TEXTS = ["the quick brown fox", "play at row 12, column  3", "<|user|>what is it?<|end|>", "tabs\t and\n\nlines é 日"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REINFORGE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models" / "gguf"


@pytest.fixture
def file(tiny_model_dir, tmp_path):
    return write_gguf(tmp_path / "tiny.gguf", tiny_model_dir)


def compute_logits(module):
    torch.manual_seed(0)
    with torch.no_grad():
        return module.eval()(torch.randint(0, 320, (2, 24))).logits


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 8}),
        ("llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 64, "max_position_embeddings": 131072}),
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32}),
    ],
    ids=["llama", "llama with biases", "llama 3.2", "mistral", "qwen2", "qwen3"],
)
def test_a_float32_file_has_the_log_probs_and_the_tokens_of_its_source(tmp_path, family, config):
    folder = make_tiny_model(tmp_path / "source", family, **config)
    file = write_gguf(tmp_path / "tiny.gguf", folder, pre="qwen2" if family == "qwen2" else "gpt-2")
    policy = PolicyConfig(model=str(file))
    assert check_policy(policy) == []
    expected = compute_logits(load_module(folder, torch.float32))
    found = compute_logits(load_model(policy, 0, "cpu").module)
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=2e-6)
    own, other = load_tokenizer(policy), load_tokenizer(PolicyConfig(model=str(folder)))
    assert [own.encode(text) for text in TEXTS] == [other.encode(text) for text in TEXTS]
    assert own.chat_template == other.chat_template
    assert (own.eos_token_id, own.pad_token_id) == (other.eos_token_id, other.pad_token_id)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "largest"), [("F16", 1e-3), ("BF16", 8e-3), ("Q8_0", 8e-3), ("Q5_1", 4e-2), ("Q4_0", 1e-1)]
)
def test_other_types_are_the_numbers_that_they_stand_for(tiny_model_dir, tmp_path, kind, largest):
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model_dir, kind)
    assert read_header(file).tensors["blk.0.ffn_up.weight"].type_name == kind
    expected = dict(load_module(tiny_model_dir, torch.float32).named_parameters())
    found = dict(load_module(str(file), torch.float32).named_parameters())
    assert found.keys() == expected.keys()
    for name, weights in expected.items():
        if weights.ndim > 1:  # within a step of this type; a wrong order of rows would be off by the weights' own size
            assert (found[name] - weights).abs().max() <= largest * weights.abs().max(), name
    exact = gguf.dequantize(
        gguf.quantize(expected["lm_head.weight"].detach().numpy(), q := gguf.GGMLQuantizationType[kind]), q
    )
    assert torch.equal(found["lm_head.weight"], torch.from_numpy(exact.astype("float32")))


def test_types_have_the_sizes_of_the_gguf_package():
    for number, (name, weights, num_bytes) in BLOCKS.items():
        type_ = gguf.GGMLQuantizationType(number)
        assert (type_.name, *gguf.GGML_QUANT_SIZES[type_]) == (name, weights, num_bytes)


def test_other_rotations_than_llama_3_are_refused():
    assert find_llama3_rotation(1e8, [1.0, 8.0])["factor"] == 8.0  # the second turns 8192 / 6.28 * 1e-4 < 1 times
    with pytest.raises(GGUFError, match="divisors of its own"):
        find_llama3_rotation(10000.0, [1.0, 3.0, 2.0, 8.0])


def write_sentence_piece(path, folder, tokenizer):
    """A tiny model with SentencePiece's BPE: pieces, scores (the earlier merge the higher) and bytes, no merges."""
    vocab = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"]
    added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
    tokens = [token for token, _ in sorted({**vocab, **added}.items(), key=lambda entry: entry[1])]
    values = {
        "model": "llama",
        "pre": None,
        "tokens": tokens,
        "scores": [-float(number) for number in range(len(tokens))],
        "token_type": [3 if token in added else 6 if token.startswith("<0x") else 1 for token in tokens],
        "merges": None,
        "eos_token_id": tokenizer.eos_token_id,
        "padding_token_id": tokenizer.pad_token_id,
    }
    return write_gguf(path, folder, **{f"tokenizer__ggml__{name}": value for name, value in values.items()})


def test_pieces_of_sentencepiece_give_the_tokens_of_its_merges(tmp_path):
    expected = TOKENIZERS["pairs with bytes"]()
    folder = make_tiny_model(tmp_path / "source", vocab_size=512)
    file = write_sentence_piece(tmp_path / "pieces.gguf", folder, expected)
    assert check_policy(PolicyConfig(model=str(file))) == []
    tokenizer = load_tokenizer(PolicyConfig(model=str(file)))
    for text in [*SENTENCES, *TEXTS]:
        assert tokenizer.encode(text, add_special_tokens=False) == expected.encode(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == expected.decode(expected.encode(text))


# damaged, hostile and unsupported files

TEXT = 8


def pack_setting(value):
    return pack_header(settings=1, rest=pack_text("a") + value)


ARCHITECTURE = pack_text("general.architecture") + struct.pack("<I", TEXT) + pack_text("llama")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is not a GGUF file: it has 0 bytes"),
        (b"PK\x03\x04" + bytes(60), "is not a GGUF file: it begins with b'PK"),
        (pack_header(version=1), "has version 1 of GGUF"),
        (pack_header(version=3 << 24), "is big-endian"),
        (b"GGUF\x03\0\0\0\x01", "ends in the middle of its header"),
        (pack_header(tensors=2**63), "claims to have 9,223,372,036,854,775,808 tensors"),
        (pack_header(settings=2**40), "claims to have 1,099,511,627,776 settings"),
        (pack_header(settings=1, rest=struct.pack("<Q", 2**60) + bytes(40)), "of 1,152,921,504,606,846,976 bytes"),
        (pack_setting(struct.pack("<IQ", TEXT, 2**50) + bytes(9)), "ends in the middle"),
        (pack_setting(struct.pack("<IIQ", 9, 4, 2**50)), "values in a list, more than"),
        (pack_setting(struct.pack("<IIQ", 9, 9, 1)), "a list of the unknown type 9"),
        (pack_setting(struct.pack("<I", 77)), "of the unknown type 77"),
        (pack_header(settings=2, rest=ARCHITECTURE * 2), "has two settings called 'general.architecture'"),
        (pack_header(tensors=1, rest=pack_text("t") + struct.pack("<I", 2**31) + bytes(40)), "2147483648 dimensions"),
        (pack_header(tensors=1, rest=pack_tensor("t", (4, 2**62, 2**62))), "is too short: the tensor 't' ends at byte"),
        (
            pack_header(tensors=1, rest=pack_tensor("t", (4,), offset=2**62)),
            "is too short: the tensor 't' ends at byte",
        ),
        (pack_header(tensors=1, rest=pack_tensor("t", (4,), type_=200) + bytes(64)), "of type 200, which is not known"),
        (pack_header(tensors=1, rest=pack_tensor("t", (33,), type_=8) + bytes(99)), "which Q8_0 cannot have"),
        (pack_header(tensors=1, rest=pack_tensor("t", (0,)) + bytes(64)), "the shape [0]"),
        (pack_header(tensors=2, rest=pack_tensor("t", (4,)) * 2 + bytes(64)), "has two tensors called 't'"),
        (pack_header(), "names no architecture"),
        (pack_header(settings=1, rest=ARCHITECTURE), "has no embedding"),
    ],
)
@pytest.mark.timeout(20)
def test_a_damaged_file_is_one_message_before_work_starts(tmp_path, cache, content, expected):
    file = tmp_path / "bad.gguf"
    file.write_bytes(content)
    (problem,) = check_policy(PolicyConfig(model=str(file), chat_template="{{ messages }}"))
    assert problem.path == "finetuning.policy.model"
    assert problem.message.startswith(f"{file} ")
    assert expected in problem.message
    assert problem.fix
    with pytest.raises(ConfigError) as caught:
        load_module(str(file), torch.float32)
    assert expected in str(caught.value)
    assert not cache.exists() or not list(cache.glob("bad*"))


def test_a_file_cut_anywhere_is_refused(file, tmp_path):
    whole, cut = file.read_bytes(), tmp_path / "cut.gguf"
    for length in [*range(0, 400, 7), len(whole) // 2, len(whole) - 1]:
        cut.write_bytes(whole[:length])
        (problem,) = check_policy(PolicyConfig(model=str(cut)))
        assert str(cut) in problem.message


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"llama__block_count": 3}, "lacks 9 tensors of its model, such as model.layers.2"),
        ({"llama__block_count": 1}, "has the tensor 'blk.1."),
        ({"llama__feed_forward_length": 100}, "in the shape"),
        ({"llama__embedding_length": None}, "has an unusable setting llama.embedding_length: it is missing"),
        ({"llama__attention__head_count": 0}, "has an unusable setting llama.attention.head_count: found 0"),
        ({"llama__context_length": "many"}, "has an unusable setting llama.context_length: found 'many'"),
        ({"llama__expert_count": 8}, "is a mixture of experts"),
        ({"llama__rope__scaling__type": "longrope"}, "scales its positions by 'longrope'"),
        ({"llama__logit_scale": 2.0}, "sets llama.logit_scale to 2.0"),
        ({"llama__rope__dimension_count": 8}, "has heads of 16 numbers, but rope.dimension_count 8"),
        ({"split__count": 3}, "is one of several parts of a model"),
        ({"tokenizer__ggml__pre": "of-a-new-model"}, "splits text as 'of-a-new-model'"),
        ({"tokenizer__ggml__pre": None}, "does not say how its tokenizer splits text"),
        ({"tokenizer__ggml__model": "t5"}, "has a tokenizer of the kind 't5'"),
        ({"tokenizer__ggml__tokens": ["a"]}, "has an unusable list tokenizer.ggml.token_type"),
        ({"tokenizer__ggml__merges": ["a b"]}, "has an unusable tokenizer: "),
        ({"tokenizer__ggml__tokens": ["a"] * 999, "tokenizer__ggml__token_type": None}, "has 999 tokens, but 320 rows"),
    ],
)
def test_what_would_be_another_model_is_refused(tiny_model_dir, tmp_path, settings, expected):
    file = write_gguf(tmp_path / "odd.gguf", tiny_model_dir, **settings)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(PolicyConfig(model=str(file))), load_module(str(file), torch.float32)
    assert expected in str(caught.value)
    assert str(file) in str(caught.value)
    assert "fix: " in str(caught.value)


def test_an_architecture_that_is_not_read_names_its_origin(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "falcon.gguf", "falcon")
    writer.add_string("general.base_model.0.repo_url", "https://example.org/falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    (problem,) = check_policy(PolicyConfig(model=str(tmp_path / "falcon.gguf"), chat_template="{{ messages }}"))
    assert "has the architecture 'falcon'; reinforge reads llama, qwen2, qwen3" in problem.message
    assert "https://example.org/falcon" in problem.fix


def test_numbers_that_are_not_finite_are_refused(tiny_model_dir, tmp_path):
    file = write_gguf(tmp_path / "nan.gguf", tiny_model_dir)
    place = read_header(file).tensors["blk.1.ffn_up.weight"]
    content = bytearray(file.read_bytes())
    content[place.start : place.start + 4] = struct.pack("<f", float("nan"))
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"nan.gguf has numbers in the tensor 'blk.1.ffn_up.weight'.*not finite"):
        load_module(str(file), torch.float32)


def test_a_bad_chat_template_is_found_in_the_header(tiny_model_dir, tmp_path):
    file = write_gguf(tmp_path / "t.gguf", tiny_model_dir, tokenizer__chat_template="{% for m in %}")
    (problem,) = check_policy(PolicyConfig(model=str(file)))
    assert f"the chat template of {file} " in problem.message
    file = write_gguf(tmp_path / "none.gguf", tiny_model_dir, tokenizer__chat_template=None)
    (problem,) = check_policy(PolicyConfig(model=str(file)))
    assert "has no chat template (tokenizer.chat_template)" in problem.message
    assert check_policy(PolicyConfig(model=str(file), chat_template="{{ messages }}")) == []


def test_another_tokenizer_stands_in_for_one_that_is_not_supported(tiny_model_dir, tmp_path):
    file = write_gguf(tmp_path / "odd.gguf", tiny_model_dir, pre="of-a-new-model")
    policy = PolicyConfig(model=str(file), tokenizer=str(tiny_model_dir))
    assert check_policy(policy) == []
    assert load_tokenizer(policy).encode("the fox")
    assert load_model(policy, 0, "cpu") is not None


def test_a_tokenizer_that_its_family_would_replace_is_refused(tmp_path):
    file = write_gguf(tmp_path / "odd.gguf", make_tiny_model(tmp_path / "qwen", "qwen2"), pre="smollm")
    with pytest.raises(ConfigError, match="loads Qwen2Tokenizer for it, which gives other tokens than smollm"):
        load_tokenizer(PolicyConfig(model=str(file)))


def test_only_quantized_weights_need_the_package(file, tiny_model_dir, tmp_path, monkeypatch):
    quantized = write_gguf(tmp_path / "q8.gguf", tiny_model_dir, "Q8_0")
    find = source.importlib.util.find_spec
    monkeypatch.setattr(source.importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name))
    (problem,) = check_policy(PolicyConfig(model=str(quantized)))
    assert "has weights of the type Q8_0; reading them needs gguf" in problem.message
    assert "pip install" in problem.fix
    assert check_policy(PolicyConfig(model=str(file))) == []


# the cache


def test_a_file_is_converted_once_whatever_its_name_and_again_if_it_changes(file, tiny_model_dir, tmp_path, cache):
    first = ensure_converted(file, "model")
    made = (first / "config.json").stat().st_mtime_ns
    assert ensure_converted(file, "model") == first
    assert (first / "config.json").stat().st_mtime_ns == made
    write_gguf(file, make_tiny_model(tmp_path / "other", seed=1))
    second = ensure_converted(file, "model")
    assert second != first
    assert {path.name for path in cache.iterdir()} == {first.name, second.name, ".lock"}


class Stopped(BaseException):
    """What a signal raises in the middle of a conversion."""


def interrupt_conversion(file, monkeypatch):
    def stop(tensors, path, metadata=None):
        path.write_bytes(b"half")
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(gguf_convert, "save_file", stop)
        with pytest.raises(Stopped):
            ensure_converted(file, "model")


def test_an_interrupted_conversion_leaves_nothing(file, cache, monkeypatch):
    interrupt_conversion(file, monkeypatch)
    assert [path.name for path in cache.iterdir()] == [".lock"]
    assert load_module(str(file), torch.float32) is not None


def test_without_staging_an_interrupted_conversion_is_taken_for_a_model(file, cache, monkeypatch):
    monkeypatch.setattr(source, "write_folder", lambda folder, fill, **_: fill(folder))
    interrupt_conversion(file, monkeypatch)
    with pytest.raises(Exception, match="cannot load the model"):
        load_module(str(file), torch.float32)


def test_what_a_killed_conversion_left_is_removed_by_the_next(file, cache):
    (cache / ".tmp-12345-0").mkdir(parents=True)
    (cache / ".tmp-12345-0" / "model.safetensors").write_bytes(bytes(1000))
    folder = ensure_converted(file, "model")
    assert {path.name for path in cache.iterdir()} == {folder.name, ".lock"}


def convert_in_two_threads(file, monkeypatch, until):
    """Returns how many of two conversions at once were begun; each waits until `until` are."""
    convert, begun, both = gguf_convert.convert, [], threading.Event()

    def begin(*arguments, **settings):
        begun.append(None)
        if len(begun) >= until:
            both.set()
        assert both.wait(60)
        convert(*arguments, **settings)

    monkeypatch.setattr(gguf_convert, "convert", begin)
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(ensure_converted, file, "model") for _ in range(2)]
    errors = [error for error in (each.exception() for each in running) if error is not None]
    assert len({each.result() for each in running if each.exception() is None}) == 1
    assert not errors or (until == 2 and len(errors) == 1 and isinstance(errors[0], StorageError)), (
        "without the lock, the second may find the folder that the first has just made"
    )
    return len(begun)


def test_one_of_several_processes_converts_and_the_others_wait(file, monkeypatch):
    assert convert_in_two_threads(file, monkeypatch, until=1) == 1


def test_without_the_lock_both_convert(file, monkeypatch):
    monkeypatch.setattr("filelock.FileLock", lambda path: nullcontext())
    monkeypatch.setattr(source, "remove_leftovers", lambda folder: [])
    assert convert_in_two_threads(file, monkeypatch, until=2) == 2


def test_a_full_disk_is_seen_before_the_conversion(file, cache, monkeypatch):
    usage = source.shutil.disk_usage(".")
    monkeypatch.setattr(source.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(StorageError, match=r"converting .*tiny.gguf needs 0.0 GiB in .*\n    fix: free some space"):
        ensure_converted(file, "model")
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_the_converted_folder_is_plain(file):
    folder = ensure_converted(file, "model")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    assert check_policy(PolicyConfig(model=str(folder))) == []
