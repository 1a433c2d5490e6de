"""The problems that preflight finds, one at a time."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from reinforge.config.policy import PolicyConfig
from reinforge.engine.model.preflight import check_policy, looks_like_hub_id
from tests.models import edit_json


@pytest.fixture
def folder(tiny_model_dir, tmp_path):
    return shutil.copytree(tiny_model_dir, tmp_path / "model")


def only_problem(**config):
    problems = check_policy(PolicyConfig(**config))
    assert len(problems) == 1, problems
    assert problems[0].fix
    return problems[0]


def test_a_whole_folder_has_no_problem(folder):
    assert check_policy(PolicyConfig(model=str(folder))) == []


def test_no_model():
    assert only_problem().path == "finetuning.policy.model"


def test_no_such_folder():
    problem = only_problem(model="./nowhere")
    assert problem.path == "finetuning.policy.model"
    assert "no folder ./nowhere" in problem.message


def test_a_file_is_not_a_folder(folder):
    assert "is a file" in only_problem(model=str(folder / "config.json")).message


def test_a_hub_id_is_left_to_transformers():
    assert check_policy(PolicyConfig(model="owner/name")) == []
    assert check_policy(PolicyConfig(model="bundled:tic_tac_toe")) == []
    assert looks_like_hub_id("Qwen/Qwen2.5-0.5B")
    assert not any(map(looks_like_hub_id, ("./a", "/a", "~/a", "a/b/c", "a/", "name")))


def test_no_config(folder):
    (folder / "config.json").unlink()
    assert "config.json" in only_problem(model=str(folder)).message


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    problem = only_problem(model=str(folder))
    assert "no weights" in problem.message
    assert "init: random" in problem.fix
    assert check_policy(PolicyConfig(model=str(folder), init="random")) == []


def test_pickled_weights_are_rejected(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    problem = only_problem(model=str(folder))
    assert "pytorch_model.bin" in problem.message
    assert "save_pretrained" in problem.fix


def test_remote_code_is_rejected(folder):
    edit_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "model.Model"})
    assert "auto_map" in only_problem(model=str(folder)).message


def test_remote_code_of_a_tokenizer_is_rejected(folder):
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tok.Tok", None]})
    assert "tokenizer_config.json" in only_problem(model=str(folder)).message


def test_no_tokenizer(folder, tiny_model_dir):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    problem = only_problem(model=str(folder))
    assert "no tokenizer" in problem.message
    assert "finetuning.policy.tokenizer" in problem.fix
    assert check_policy(PolicyConfig(model=str(folder), tokenizer=str(tiny_model_dir))) == []


def test_no_such_tokenizer(folder):
    assert only_problem(model=str(folder), tokenizer="nowhere").path == "finetuning.policy.tokenizer"


def test_no_chat_template(folder):
    (folder / "chat_template.jinja").unlink()
    problem = only_problem(model=str(folder))
    assert "no chat template" in problem.message
    assert "set finetuning.policy.chat_template" in problem.fix
    assert check_policy(PolicyConfig(model=str(folder), chat_template="{{ messages }}")) == []
    edit_json(folder / "tokenizer_config.json", chat_template="{{ messages }}")
    assert check_policy(PolicyConfig(model=str(folder))) == []


def test_no_such_template_file(folder):
    assert only_problem(model=str(folder), chat_template="nowhere.jinja").path == "finetuning.policy.chat_template"


def test_all_problems_come_at_once(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": {}, "model_type": "llama"}))
    assert len(check_policy(PolicyConfig(model=str(tmp_path)))) == 4


def test_preflight_imports_no_torch(folder):
    code = (
        "import sys; from reinforge.config.policy import PolicyConfig; from reinforge.engine.model.preflight import "
        f"check_policy; check_policy(PolicyConfig(model={str(folder)!r})); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
