"""Received model folders: what would run code, read elsewhere or never end is refused before anything is loaded."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import reinforge
from reinforge.config.policy import LoRAConfig, PolicyConfig
from reinforge.engine.model import model_files
from reinforge.engine.model.loading import add_adapter, init_random_module, load_model, load_module, load_tokenizer
from reinforge.engine.model.model_files import check_files, check_tokenizer_settings
from reinforge.engine.model.preflight import check_policy, read_tensor_names
from reinforge.errors import ConfigError, EngineError
from reinforge.exports.merging import load_merged
from tests.models import edit_json

MODEL = "finetuning.policy.model"


@pytest.fixture
def folder(tiny_model_dir, tmp_path):
    return shutil.copytree(tiny_model_dir, tmp_path / "model")


@pytest.fixture(scope="module")
def saved_adapter(tiny_model_dir, tmp_path_factory):
    """An adapter of the model, as PEFT saves it."""
    module = load_module(tiny_model_dir, torch.float32)
    add_adapter(module, LoRAConfig(r=2), seed=0)
    place = tmp_path_factory.mktemp("saved")
    module.save_pretrained(place)
    return place


@pytest.fixture
def adapter(saved_adapter, folder, tmp_path):
    made = shutil.copytree(saved_adapter, tmp_path / "adapter")
    edit_json(made / "adapter_config.json", base_model_name_or_path=str(folder))
    return made


def shard(folder, *names):
    names = names or ("model-00001-of-00001.safetensors",)
    if len(names) == 1 and "/" not in names[0]:
        (folder / "model.safetensors").rename(folder / names[0])
    else:
        (folder / "model.safetensors").unlink()
    weight_map = {f"layer.{index}": name for index, name in enumerate(names)}
    (folder / model_files.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def refuse(folder, message):
    (problem, *_) = check_policy(PolicyConfig(model=str(folder)))
    assert (problem.path, message in problem.message) == (MODEL, True), problem
    assert problem.fix
    with pytest.raises(ConfigError) as caught:
        load_module(folder, torch.float32)
    assert message in str(caught.value)


# Weights.


@pytest.mark.parametrize(
    "name",
    [
        "../bin/x.bin", "x.bin", "/tmp/x.safetensors", "sub/model.safetensors", "..\\x.safetensors", "C:x.safetensors",
        "", ".", "x.safetensors/", "a\u0000.safetensors",
    ],
)  # fmt: skip
def test_an_index_names_safetensors_of_its_own_folder_only(folder, name):
    shard(folder, "a/", name)
    refuse(folder, "but weights are *.safetensors in the same folder")


def test_an_index_of_plain_names_is_fine(folder):
    assert check_policy(PolicyConfig(model=str(shard(folder)))) == []


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": []}', "[" * 100_000, '{"weight_map": {}}', "\udcff"])
def test_an_unreadable_index_is_refused(folder, content):
    shard(folder)
    (folder / model_files.INDEX).write_bytes(content.encode("utf-8", "surrogateescape"))
    refuse(folder, "has no readable weight_map")


def test_an_index_that_names_missing_files_is_refused(folder):
    refuse(
        shard(folder, "a.safetensors", "b.safetensors"), "a.safetensors, b.safetensors, which the folder does not have"
    )


def test_links_are_followed_to_regular_files_only(folder, tmp_path):
    """The Hugging Face cache consists of links; a link to a device or a folder is not a model's file."""
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    assert check_policy(PolicyConfig(model=str(folder))) == []
    assert load_module(folder, torch.float32) is not None
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/dev/zero")
    refuse(folder, "model.safetensors is not a regular file")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/zero")
    assert "no readable config.json" in str(check_policy(PolicyConfig(model=str(folder))))


def test_the_header_of_a_weights_file_is_read_within_limits(folder):
    for content in (b"\xff" * 64, (8).to_bytes(8, "little") + b"[1,2,3] ", b"", (2).to_bytes(8, "little") + b"12"):
        (folder / "model.safetensors").write_bytes(content)
        assert list(read_tensor_names(folder)) == []


# Settings that load code.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attn_implementation": "org/kernel"}, 'sets attn_implementation to "org/kernel", but only eager, sdpa'),
        ({"_attn_implementation": "kernels-community/flash-attn"}, "sets _attn_implementation"),
        ({"attn_implementation": "flash_attention_2"}, "sets attn_implementation"),  # falls back to a kernel
        ({"attn_implementation": {"": "sdpa", "text_config": "org/kernel"}}, "sets attn_implementation"),
        ({"text_config": {"attn_implementation": "org/kernel@main:f"}}, "sets attn_implementation"),
        ({"experts_implementation": "org/kernel"}, "sets experts_implementation"),
        ({"_attn_implementation_internal": "org/kernel"}, "sets _attn_implementation_internal"),
        ({"auto_map": {"AutoModelForCausalLM": "model.Model"}}, "refers to custom code (auto_map)"),
        ({"text_config": {"auto_map": {}}}, "refers to custom code (auto_map)"),
        ({"quantization_config": {"quant_method": "awq"}}, "describes quantized weights (quantization_config)"),
        ({"transformers_weights": "adapter_model.bin"}, "names other weights (transformers_weights)"),
        ({"custom_generate": "org/repo"}, "names code to load (custom_generate)"),
        ({"kernels": ["org/kernel"]}, "names code to load (kernels)"),
        ({"use_kernels": True}, "names code to load (use_kernels)"),
    ],
)
def test_settings_that_load_code_are_refused(folder, settings, message):
    edit_json(folder / "config.json", **settings)
    refuse(folder, message)
    with pytest.raises(ConfigError):
        init_random_module(folder, torch.float32, 0)


@pytest.mark.parametrize("value", ["eager", "sdpa", None, {"": "sdpa"}])
def test_implementations_that_transformers_contains_are_accepted(folder, value):
    edit_json(folder / "config.json", attn_implementation=value, quantization_config=None, use_kernels=False)
    assert check_policy(PolicyConfig(model=str(folder))) == []


def test_deep_settings_are_refused_not_followed(folder):
    deep = "[" * 200 + "]" * 200
    text = (folder / "config.json").read_text().rstrip()[:-1] + f', "deep": {deep}}}'
    (folder / "config.json").write_text(text)
    assert check_files(folder, MODEL) == []
    (folder / "config.json").write_text(text.replace(deep, "[" * 200_000 + "]" * 200_000))
    assert "no readable config.json" in str(check_policy(PolicyConfig(model=str(folder))))


def test_code_next_to_a_model_is_refused_and_never_run(folder, tmp_path):
    (folder / "custom_generate").mkdir()
    marker = tmp_path / "ran"
    (folder / "custom_generate" / "generate.py").write_text(f"open({str(marker)!r}, 'w')\n")
    refuse(folder, "has custom code (custom_generate/)")
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tok.Tok", None]})
    (folder / "tok.py").write_text(f"open({str(marker)!r}, 'w')\n")
    assert check_tokenizer_settings(folder, MODEL)
    with pytest.raises(ConfigError, match="refers to custom code"):
        load_tokenizer(PolicyConfig(model=str(folder)))
    assert not marker.exists()


# Adapters.


def test_an_adapter_of_a_model_is_fine(adapter):
    assert check_files(adapter, MODEL) == []
    assert load_model(PolicyConfig(model=str(adapter)), 0, "cpu").has_adapters


def test_a_circle_of_adapters_is_refused(adapter, tmp_path):
    edit_json(adapter / "adapter_config.json", base_model_name_or_path=str(adapter))
    refuse(adapter, "holds adapters that name itself as their base model")
    other = shutil.copytree(adapter, tmp_path / "other")
    edit_json(adapter / "adapter_config.json", base_model_name_or_path=str(other))
    refuse(adapter, "other, which is an adapter, too, as their base model")
    edit_json(other / "adapter_config.json", base_model_name_or_path=str(adapter))
    refuse(adapter, "other, which is an adapter, too, as their base model")


def test_the_base_of_an_adapter_is_checked_too(adapter, folder):
    edit_json(folder / "config.json", attn_implementation="org/kernel")
    refuse(adapter, f"{adapter} holds adapters of {folder}: ")
    refuse(adapter, "sets attn_implementation")


def test_pickled_adapters_are_refused(adapter):
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    refuse(adapter, "an adapter with only pickled weights (adapter_model.bin)")
    (adapter / "adapter_model.bin").unlink()
    refuse(adapter, "an adapter with no weights")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"megatron_config": {"a": 1}, "megatron_core": "os"}, "sets megatron_config, with which PEFT loads more"),
        ({"corda_config": {"cache_file": "../x.bin"}}, "sets corda_config"),
        ({"peft_type": "XLORA", "adapters": {"0": "../x"}}, 'an adapter of the kind "XLORA"'),
        ({"peft_type": ["LORA"]}, "an adapter of the kind"),
        *(({"base_model_name_or_path": base}, "names no base model") for base in (None, 5, "", ["x"])),
        ({"use_dora": True}, "sets use_dora (DoRA), whose magnitudes are not loaded"),
        ({"alora_invocation_tokens": [3, 4]}, "sets alora_invocation_tokens (aLoRA)"),
        ({"init_lora_weights": "pissa_niter_4"}, "sets init_lora_weights to pissa_niter_4, with which loading it"),
        ({"init_lora_weights": "olora"}, "sets init_lora_weights to olora, with which loading it changes the weights"),
    ],
)
def test_adapter_settings_that_load_more_than_weights_or_other_weights_are_refused(adapter, settings, message):
    edit_json(adapter / "adapter_config.json", **settings)
    refuse(adapter, message)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_merged(adapter)


@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal", "eva"])
def test_adapters_whose_first_weights_came_from_elsewhere_are_fine(adapter, init):
    edit_json(adapter / "adapter_config.json", init_lora_weights=init)
    assert check_policy(PolicyConfig(model=str(adapter))) == []


def test_weights_that_no_layer_takes_are_not_left_out_in_silence(adapter):
    """As transformers does with a DoRA adapter's magnitudes: it only logs them."""
    file = adapter / "adapter_model.safetensors"
    saved = load_file(file)
    first = next(iter(sorted(saved)))
    more = first.replace("lora_A.weight", "lora_magnitude_vector")
    save_file({**saved, more: torch.ones(2)}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match="does not fit its base model: its .*lora_magnitude_vector.* belongs to no"):
        load_module(adapter, torch.float32)
    save_file({name: value for name, value in saved.items() if name != first}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match="does not fit its base model: it has no weights for .*lora_A"):
        load_module(adapter, torch.float32)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_adapter_of_tied_weights_is_not_merged(folder, tmp_path):
    """The sum would change the embeddings, too, so the merged model would be another one."""
    edit_json(folder / "config.json", tie_word_embeddings=True)
    saved = load_file(folder / "model.safetensors")
    del saved["lm_head.weight"]
    save_file(saved, folder / "model.safetensors", {"format": "pt"})
    module = load_module(folder, torch.float32)
    add_adapter(module, LoRAConfig(r=2, target_modules=["q_proj", "lm_head"]), seed=0)
    module.save_pretrained(tmp_path / "tied")
    with pytest.raises(EngineError, match="adapts .*lm_head, whose weights another layer shares .*export the adapter"):
        load_merged(tmp_path / "tied")


def test_an_adapter_inside_a_model_hides_nothing_of_the_model(adapter, folder):
    """transformers then loads the folder's own model, not the base that the adapter names."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copyfile(adapter / name, folder / name)
    assert check_policy(PolicyConfig(model=str(folder))) == []
    edit_json(folder / "config.json", attn_implementation="org/kernel")
    refuse(folder, "sets attn_implementation")


def test_an_unreadable_adapter_is_refused(adapter):
    (adapter / "adapter_config.json").write_text("[]")
    refuse(adapter, "adapter_config.json is not readable")


# Hub ids.

LOAD = """
import torch
from reinforge.config.policy import PolicyConfig
from reinforge.engine.model.loading import load_module, load_tokenizer
for name in ("owner/absent", "owner/safe", "owner/unsafe"):
    try:
        load_module(name, torch.float32), load_tokenizer(PolicyConfig(model=name))
    except Exception as error:
        print(type(error).__name__, error)
    else:
        print("loaded", name)
"""


def put_into_cache(home, name, folder):
    """Puts a model into a Hugging Face cache, which consists of links to blobs."""
    root = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot, blobs = root / "snapshots" / ("0" * 40), root / "blobs"
    for each in (snapshot, blobs, root / "refs"):
        each.mkdir(parents=True)
    (root / "refs" / "main").write_text("0" * 40)
    for file in folder.iterdir():
        shutil.copyfile(file, blobs / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached ("),
    ],
)
def test_without_a_network_a_hub_id_comes_from_the_cache_or_fails_at_once(folder, tmp_path, environment, reason):
    put_into_cache(tmp_path, "owner/safe", folder)
    edit_json(folder / "config.json", attn_implementation="org/kernel")
    put_into_cache(tmp_path, "owner/unsafe", folder)
    inherited = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        env={**inherited, "HF_HOME": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    absent, safe, unsafe = done.stdout.splitlines()[:3]
    assert absent.startswith(f"BackendUnavailable cannot load the model owner/absent: {reason}"), absent
    assert "does not have owner/absent; " in absent
    assert "run `hf download owner/absent` where there is a network" in absent
    assert "HF_HUB_OFFLINE" in absent
    assert safe == "loaded owner/safe"
    assert unsafe.startswith("ConfigError finetuning.policy.model: ")
    assert 'sets attn_implementation to "org/kernel"' in unsafe
    assert "Retrying" not in done.stderr, "huggingface_hub retries each file for 23 seconds"


CHECKS = re.compile(r"= check_(?:model|tokenizer)_source\(|^ +check_tokenizer_source\(", re.MULTILINE)


def count_loads(text):
    """Counts the calls of `Auto....from_pretrained`; in a text, such as that of a model card, it is none."""
    calls = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    loads = [call.value for call in calls if isinstance(call, ast.Attribute) and call.attr == "from_pretrained"]
    return sum(isinstance(owner, ast.Name) and owner.id.startswith("Auto") for owner in loads)


def test_every_file_that_loads_by_transformers_checks_first():
    texts = {path: path.read_text() for path in Path(reinforge.__file__).parent.rglob("*.py")}
    calls = {path: count_loads(text) for path, text in texts.items() if ".from_pretrained" in text}
    loaders = {path: count for path, count in calls.items() if count}
    assert len(loaders) >= 3
    for path, count in loaders.items():
        assert len(CHECKS.findall(texts[path])) == count, path
