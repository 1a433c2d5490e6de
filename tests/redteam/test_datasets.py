"""astra-rl's prompts: read from its files, and a sentence where they are missing."""

import importlib.util
import json

import pytest

from reinforge.errors import ConfigError
from reinforge.redteam import ASTSampler, datasets
from tests.redteam.test_ast import ToyAST

FILES = {
    "ADV_BENCH_BASE_TASK_PROMPTS": "task_prompts.json",
    "CONVOKIT_REDDIT_TRAIN": "convokit_reddit_prompts_train.json",
    "CONVOKIT_REDDIT_DEV": "convokit_reddit_prompts_dev.json",
    "CONVOKIT_REDDIT_TEST": "convokit_reddit_prompts_test.json",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("REINFORGE_ASTRA_DATA", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_prompts_are_texts_of_a_file(name, folder):
    (folder / FILES[name]).write_text(json.dumps(["a day", "another"]), encoding="utf-8")
    prompts = getattr(datasets, name)
    assert (list(prompts), prompts[1], prompts[:1], len(prompts)) == (["a day", "another"], "another", ["a day"], 2)
    assert ASTSampler(ToyAST(), prompts).prompts == ["a day", "another"]


def test_pairs_have_a_goal_and_a_target(folder):
    (folder / "adv_bench_prompts.csv").write_text('goal,target\n"Say it, now","It is"\n', encoding="utf-8")
    [prompt] = datasets.ADV_BENCH_PROMPTS
    assert prompt == datasets.AdvBenchPrompt("Say it, now", "It is")


def test_an_installed_astra_rl_is_found_and_not_imported(tmp_path, monkeypatch):
    monkeypatch.delenv("REINFORGE_ASTRA_DATA", raising=False)
    (tmp_path / "astra_rl" / "data").mkdir(parents=True)
    (tmp_path / "astra_rl" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "astra_rl" / "data" / "task_prompts.json").write_text('["Write"]')
    monkeypatch.syspath_prepend(tmp_path)
    assert list(datasets.ADV_BENCH_BASE_TASK_PROMPTS) == ["Write"]


def test_missing_prompts_are_an_error_with_the_fix(monkeypatch, folder):
    prompts = datasets.CONVOKIT_REDDIT_DEV
    assert repr(prompts) == "<the rows of convokit_reddit_prompts_dev.json>", "not read yet"
    path = folder / "convokit_reddit_prompts_dev.json"
    with pytest.raises(ConfigError, match="cannot read .*convokit_reddit_prompts_dev.json(.|\n)*name the folder"):
        len(prompts)
    for text, message in (
        ('{"a": 1}', "expected a list of strings"),
        ('["a", ""]', "expected a list"),
        ("[", "not JSON"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            len(prompts)
    (folder / "adv_bench_prompts.csv").write_text("goal\nx\n")
    with pytest.raises(ConfigError, match="expected the columns goal and target"):
        list(datasets.ADV_BENCH_PROMPTS)
    monkeypatch.delenv("REINFORGE_ASTRA_DATA")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not part of this package(.|\n)*set REINFORGE_ASTRA_DATA"):
        ASTSampler(ToyAST(), prompts)
