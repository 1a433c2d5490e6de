"""Old names of keys keep working for one release, with one warning that names the old and the new key."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from reinforge.config.dump import dump_config, list_settings
from reinforge.config.json_schema import build_config_schema
from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.loader import build_config, load_config, with_current_keys
from reinforge.config.policy import BatchConfig, LoRAConfig, PolicyConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import ConfigError, Problem
from reinforge.registry import REGISTRY
from reinforge.types.key_aliases import ConfigModel, warn_renamed

RENAMED = {
    "finetuning.policy.max_batch": ("max_num_seqs", 7),
    "finetuning.policy.max_context": ("max_model_len", 77),
    "finetuning.policy.precision": ("dtype", "bfloat16"),
    "finetuning.policy.batch.passes": ("num_iterations", 3),
    "finetuning.gate.draws": ("num_samples", 2),
    "finetuning.limits.max_refused_steps": ("max_skipped_steps", 9),
    "finetuning.algorithm.aggregation": ("loss_aggregation", "token"),
    "finetuning.algorithm.scale_advantages": ("scale_rewards", False),
    "llms.judge.max_batch": ("max_num_seqs", 7),
    "llms.judge.max_context": ("max_model_len", 77),
    "llms.judge.precision": ("dtype", "bfloat16"),
}


@pytest.fixture(autouse=True)
def _nothing_warned_yet() -> Iterator[None]:
    warn_renamed.cache_clear()
    yield
    warn_renamed.cache_clear()


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LoadedConfig]:
    monkeypatch.chdir(tmp_path)

    def load_text(text: str, *overrides: tuple[str, str], **environ: str) -> LoadedConfig:
        Path("f.yml").write_text(text)
        return load_config("f.yml", overrides=overrides, environ=environ)

    return load_text


def nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    data: dict[str, Any] = value
    if "algorithm" in path:
        data["finetuning"]["algorithm"]["_type"] = "grpo"
    if "llms" in data:
        data["llms"]["judge"] |= {"_type": "local", "model": "m"}
    return data


def value_at(config: Any, path: str) -> Any:
    for key in path.split("."):
        config = config[key] if isinstance(config, dict) else getattr(config, key)
    return config


@pytest.mark.parametrize("old_path", RENAMED)
def test_each_old_name_sets_the_new_key_and_warns(
    load: Callable[..., LoadedConfig], caplog: pytest.LogCaptureFixture, old_path: str
) -> None:
    key, value = RENAMED[old_path]
    new_path = f"{old_path.rpartition('.')[0]}.{key}"
    loaded = load(yaml.safe_dump(nested(old_path, value)))
    assert value_at(loaded.config, new_path) == value
    (message,) = caplog.messages
    assert f"{old_path} is now {new_path}; the old name stops working in the next release" in message
    assert message.startswith("f.yml:")
    assert value_at(yaml.safe_load(dump_config(loaded)), new_path) == value
    assert f" {old_path.rpartition('.')[2]}:" not in dump_config(loaded)


@pytest.mark.parametrize("old_path", RENAMED)
def test_the_new_names_do_not_warn(
    load: Callable[..., LoadedConfig], caplog: pytest.LogCaptureFixture, old_path: str
) -> None:
    key, value = RENAMED[old_path]
    load(yaml.safe_dump(nested(f"{old_path.rpartition('.')[0]}.{key}", value)))
    assert caplog.messages == []


def test_the_warning_is_shown_once(load: Callable[..., LoadedConfig], caplog: pytest.LogCaptureFixture) -> None:
    text = "finetuning:\n  policy:\n    max_batch: 7\n"
    load(text)
    load(text)
    assert caplog.messages == [
        "f.yml:3:5 finetuning.policy.max_batch is now finetuning.policy.max_num_seqs; "
        "the old name stops working in the next release"
    ]
    assert caplog.records[0].levelno == logging.WARNING


def test_an_override_by_the_old_name_works(load: Callable[..., LoadedConfig], caplog: pytest.LogCaptureFixture) -> None:
    loaded = load("finetuning: {seed: 1}", ("finetuning.policy.max_batch", "7"))
    assert loaded.config.finetuning.policy.max_num_seqs == 7
    assert caplog.messages[0].startswith("-o finetuning.policy.max_batch is now finetuning.policy.max_num_seqs;")


@pytest.mark.parametrize("in_file", ["max_batch", "max_num_seqs"])
@pytest.mark.parametrize("in_override", ["max_batch", "max_num_seqs"])
def test_an_override_wins_over_either_spelling(
    load: Callable[..., LoadedConfig], in_file: str, in_override: str
) -> None:
    loaded = load(f"finetuning: {{policy: {{{in_file}: 5}}}}", (f"finetuning.policy.{in_override}", "7"))
    assert loaded.config.finetuning.policy.max_num_seqs == 7
    setting = next(s for s in list_settings(loaded) if s.path == "finetuning.policy.max_num_seqs")
    assert (setting.value, setting.origin) == (7, f"-o finetuning.policy.{in_override}")


def test_both_spellings_at_once_are_an_error(load: Callable[..., LoadedConfig]) -> None:
    with pytest.raises(ConfigError) as caught:
        load("finetuning:\n  policy:\n    max_num_seqs: 5\n    max_batch: 7\n    lora: {rank: 4, r: 8}\n")
    assert caught.value.problems == [
        Problem(
            "finetuning.policy.max_batch",
            '"max_batch" and "max_num_seqs" are the same key; write "max_num_seqs" only',
            'remove "max_batch"',
            "f.yml:4:5",
        ),
        Problem(
            "finetuning.policy.lora.rank",
            '"rank" and "r" are the same key; write "r" only',
            'remove "rank"',
            "f.yml:5:12",
        ),
    ]


def test_problems_and_origins_are_located_at_the_old_name(load: Callable[..., LoadedConfig]) -> None:
    with pytest.raises(ConfigError) as caught:
        load("finetuning:\n  policy:\n    max_batch: none\n")
    (problem,) = caught.value.problems
    assert (problem.location, problem.path) == ("f.yml:3:5", "finetuning.policy.max_num_seqs")
    loaded = load("finetuning:\n  policy:\n    max_batch: 7\n")
    assert loaded.locate("finetuning.policy.max_num_seqs") == "f.yml:3:5"


def test_variables_stay_variables_under_the_new_name(load: Callable[..., LoadedConfig]) -> None:
    loaded = load("finetuning: {policy: {max_batch: '${SEQS}'}}", SEQS="7")
    assert loaded.config.finetuning.policy.max_num_seqs == 7
    assert "max_num_seqs: ${SEQS}" in dump_config(loaded)


def test_the_keys_of_a_block_keep_their_order(load: Callable[..., LoadedConfig]) -> None:
    loaded = load("finetuning: {policy: {model: m, max_batch: 7, kv_cache_mb: 0}}")
    assert list(loaded.data["finetuning"]["policy"]) == ["model", "max_num_seqs", "kv_cache_mb"]


def test_a_key_that_a_class_does_not_have_is_unknown_under_its_old_name_too(load: Callable[..., LoadedConfig]) -> None:
    with pytest.raises(ConfigError, match='unknown key "scale_advantages"'):
        load("finetuning: {algorithm: {_type: rloo, scale_advantages: true}}")


def test_suggestions_name_the_new_key(load: Callable[..., LoadedConfig]) -> None:
    with pytest.raises(ConfigError) as caught:
        load("finetuning: {policy: {max_num_seq: 7}}")
    message = caught.value.problems[0].message
    assert 'did you mean "max_num_seqs"?' in message
    assert "max_batch" not in message


def test_data_from_python_is_renamed_and_stays_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    data = {"finetuning": {"policy": {"max_batch": 7}}}
    assert build_config(data).config.finetuning.policy.max_num_seqs == 7
    assert data == {"finetuning": {"policy": {"max_batch": 7}}}
    assert caplog.messages[0].startswith("finetuning.policy.max_batch is now finetuning.policy.max_num_seqs;")
    assert with_current_keys({"finetuning": {"gate": {"draws": 2}}}) == {"finetuning": {"gate": {"num_samples": 2}}}


def test_classes_take_old_names(caplog: pytest.LogCaptureFixture) -> None:
    assert PolicyConfig.model_validate({"max_batch": 7}).max_num_seqs == 7
    assert PolicyConfig(**{"max_batch": 7}).max_num_seqs == 7
    assert caplog.messages == [
        "PolicyConfig.max_batch is now PolicyConfig.max_num_seqs; the old name stops working in the next release"
    ]
    nested_block = FinetuneConfig.model_validate({"policy": {"batch": {"passes": 3}}})
    assert nested_block.policy.batch == BatchConfig(num_iterations=3)
    with pytest.raises(ValidationError, match='"max_batch" and "max_num_seqs" are the same key'):
        PolicyConfig.model_validate({"max_batch": 7, "max_num_seqs": 7})


def test_both_spellings_of_lora_are_equal_and_silent(
    load: Callable[..., LoadedConfig], caplog: pytest.LogCaptureFixture
) -> None:
    ours = load("finetuning: {policy: {lora: {rank: 8, alpha: 24}}}")
    peft = load("finetuning: {policy: {lora: {r: 8, lora_alpha: 24}}}")
    assert ours.config == peft.config
    assert ours.config.finetuning.policy.lora == LoRAConfig(r=8, lora_alpha=24)
    assert dump_config(ours) == dump_config(peft)
    assert caplog.messages == []


def test_the_json_schema_has_every_spelling_and_marks_old_names() -> None:
    definitions = build_config_schema(REGISTRY)["$defs"]
    policy, lora = definitions["PolicyConfig"]["properties"], definitions["LoRAConfig"]["properties"]
    assert "deprecated" not in policy["max_num_seqs"]
    assert policy["max_batch"] == {
        **policy["max_num_seqs"],
        "deprecated": True,
        "description": "Old name of max_num_seqs.",
    }
    assert lora["rank"] == lora["r"]
    assert definitions["algorithm.grpo"]["properties"]["aggregation"]["deprecated"]


class Parent(ConfigModel):
    renamed_keys = {"old": "new", "elsewhere": "absent"}

    new: int = 0


class Child(Parent):
    renamed_keys = {"before": "after"}

    after: int = 0
    items: list[Parent] = []


def test_classes_inherit_renamed_keys_and_have_those_of_their_own_fields() -> None:
    assert Child.old_names() == {"old": "new", "before": "after"}
    assert Child.model_validate({"old": 1, "before": 2, "items": [{"old": 3}]}).model_dump() == {
        "new": 1,
        "after": 2,
        "items": [{"new": 3}],
    }
