"""The problems that preflight finds, one at a time."""

import json
import shutil

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


def test_a_hub_id_is_left_to_transformers():
    assert check_policy(PolicyConfig(model="owner/name")) == []
    assert check_policy(PolicyConfig(model="bundled:tic_tac_toe")) == []
    assert looks_like_hub_id("Qwen/Qwen2.5-0.5B")
    assert not any(map(looks_like_hub_id, ("./a", "/a", "~/a", "a/b/c", "a/", "name")))


@pytest.mark.parametrize(
    ("settings", "key", "message"),
    [
        ({"model": None}, "model", ""),
        ({"model": "./nowhere"}, "model", "no folder ./nowhere"),
        ({"model": "{folder}/config.json"}, "model", "is a file"),
        ({"tokenizer": "nowhere"}, "tokenizer", ""),
        ({"chat_template": "nowhere.jinja"}, "chat_template", ""),
    ],
)
def test_names_that_stand_for_nothing(folder, settings, key, message):
    given = {name: value and value.format(folder=folder) for name, value in settings.items()}
    problem = only_problem(**{"model": str(folder), **given})
    assert problem.path == f"finetuning.policy.{key}"
    assert message in problem.message


@pytest.mark.parametrize(
    ("files", "message", "fix", "instead"),
    [
        (["config.json"], "config.json", "", None),
        (["model.safetensors"], "no weights", "init: random", {"init": "random"}),
        (["tokenizer.json", "tokenizer_config.json"], "no tokenizer", "finetuning.policy.tokenizer", {"tokenizer": ""}),
        (["chat_template.jinja"], "no chat template", "finetuning.policy.chat_template", {"chat_template": "{{ x }}"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_files_that_are_missing(folder, tiny_model_dir, files, message, fix, instead):
    for name in files:
        (folder / name).unlink()
    problem = only_problem(model=str(folder))
    assert message in problem.message
    assert fix in problem.fix
    if instead is not None:
        settings = {name: value or str(tiny_model_dir) for name, value in instead.items()}
        assert check_policy(PolicyConfig(model=str(folder), **settings)) == []


def test_the_tokenizer_may_bring_the_chat_template(folder):
    (folder / "chat_template.jinja").unlink()
    edit_json(folder / "tokenizer_config.json", chat_template="{{ messages }}")
    assert check_policy(PolicyConfig(model=str(folder))) == []


def test_pickled_weights_are_rejected(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    problem = only_problem(model=str(folder))
    assert "pytorch_model.bin" in problem.message
    assert "save_pretrained" in problem.fix


def test_remote_code_of_a_tokenizer_is_rejected(folder):
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tok.Tok", None]})
    assert "tokenizer_config.json" in only_problem(model=str(folder)).message


def test_all_problems_come_at_once(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": {}, "model_type": "llama"}))
    assert len(check_policy(PolicyConfig(model=str(tmp_path)))) == 4
