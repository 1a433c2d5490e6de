"""A key may have a second spelling; both set the same value, in files, overrides and classes."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from reinforge.config.describe import build_config_schema
from reinforge.config.dump import dump_config, list_settings
from reinforge.config.loader import build_config, load_config, resolve_aliases
from reinforge.config.policy import LoRAConfig, PolicyConfig
from reinforge.errors import ConfigError, Problem
from reinforge.registry import REGISTRY


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def load_text(text, *overrides, **environ):
        Path("f.yml").write_text(text)
        return load_config("f.yml", overrides=overrides, environ=environ)

    return load_text


def read_rank(loaded):
    assert loaded.config.finetuning.policy.lora is not None
    return loaded.config.finetuning.policy.lora.r


def test_both_spellings_are_equal(load):
    ours = load("finetuning: {policy: {lora: {rank: 8, alpha: 24}}}")
    peft = load("finetuning: {policy: {lora: {r: 8, lora_alpha: 24}}}")
    assert ours.config == peft.config
    assert ours.config.finetuning.policy.lora == LoRAConfig(r=8, lora_alpha=24)
    assert dump_config(ours) == dump_config(peft)


@pytest.mark.parametrize("in_file", ["rank", "r"])
@pytest.mark.parametrize("in_override", ["rank", "r"])
def test_an_override_wins_over_either_spelling(load, in_file, in_override):
    loaded = load(f"finetuning: {{policy: {{lora: {{{in_file}: 5}}}}}}", (f"finetuning.policy.lora.{in_override}", "7"))
    assert read_rank(loaded) == 7
    setting = next(s for s in list_settings(loaded) if s.path == "finetuning.policy.lora.r")
    assert (setting.value, setting.origin) == (7, f"-o finetuning.policy.lora.{in_override}")


def test_both_spellings_at_once_are_an_error(load):
    with pytest.raises(ConfigError) as caught:
        load("finetuning:\n  policy:\n    lora: {rank: 4, r: 8}\n")
    message = '"rank" and "r" are the same key; write "r" only'
    assert caught.value.problems == [Problem("finetuning.policy.lora.rank", message, 'remove "rank"', "f.yml:3:12")]
    with pytest.raises(ValidationError, match='"rank" and "r" are the same key'):
        LoRAConfig.model_validate({"rank": 7, "r": 7})


def test_problems_and_origins_are_located_at_the_alias(load):
    with pytest.raises(ConfigError) as caught:
        load("finetuning:\n  policy:\n    lora:\n      rank: none\n")
    (problem,) = caught.value.problems
    assert (problem.location, problem.path) == ("f.yml:4:7", "finetuning.policy.lora.r")
    loaded = load("finetuning:\n  policy:\n    lora:\n      rank: 7\n")
    assert loaded.locate("finetuning.policy.lora.r") == "f.yml:4:7"


def test_variables_stay_variables_under_the_key(load):
    loaded = load("finetuning: {policy: {lora: {rank: '${RANK}'}}}", RANK="7")
    assert read_rank(loaded) == 7
    assert "r: ${RANK}" in dump_config(loaded)


def test_the_keys_of_a_block_keep_their_order(load):
    loaded = load("finetuning: {policy: {lora: {use_rslora: true, rank: 7, alpha: 8}}}")
    assert list(loaded.data["finetuning"]["policy"]["lora"]) == ["use_rslora", "r", "lora_alpha"]


def test_data_from_python_is_renamed_and_stays_as_it_was():
    data = {"finetuning": {"policy": {"lora": {"rank": 7}}}}
    assert read_rank(build_config(data)) == 7
    assert data == {"finetuning": {"policy": {"lora": {"rank": 7}}}}
    assert resolve_aliases(data) == {"finetuning": {"policy": {"lora": {"r": 7}}}}
    assert PolicyConfig.model_validate({"lora": {"rank": 7}}).lora == LoRAConfig(**{"rank": 7}) == LoRAConfig(r=7)


def test_the_json_schema_has_every_spelling():
    lora = build_config_schema(REGISTRY)["$defs"]["LoRAConfig"]["properties"]
    assert lora["rank"] == lora["r"]
