"""Unknown keys are found in nested classes, and known ones are accepted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, RootModel, ValidationError, model_validator
from typing_extensions import TypedDict

from reinforge.config.describe import build_config_schema
from reinforge.config.dump import dump_config, list_settings
from reinforge.config.loader import build_config, load_config, resolve_aliases
from reinforge.config.policy import LoRAConfig, PolicyConfig
from reinforge.config.schema_walk import find_description, find_keys
from reinforge.errors import ConfigError, Problem
from reinforge.registry import REGISTRY
from reinforge.types.key_aliases import ConfigModel


class Leaf(BaseModel):
    size: int = Field(default=1, description="How big.")


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int = 1


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    leaf: Leaf = Leaf()


class Renamed(BaseModel):
    size: int = Field(default=1, validation_alias=AliasChoices("size", "magnitude"))


class Rewrites(BaseModel):
    leaf: Leaf = Leaf()

    @model_validator(mode="before")
    @classmethod
    def _old_name(cls, data):
        return {("leaf" if key == "blatt" else key): value for key, value in data.items()}


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    tricks: int = 0


@dataclass
class Point:
    x: int
    y: int


class Pair(TypedDict):
    left: int


class Many(RootModel[list[Leaf]]):
    pass


class Short(ConfigModel):
    key_aliases: ClassVar[dict[str, str]] = {"len": "length"}
    length: int = 1


class Outer(ConfigModel):
    key_aliases: ClassVar[dict[str, str]] = {"inner": "short"}
    short: Short = Short()
    deep: Short = Short()


class Top(BaseModel):
    leaf: Leaf = Leaf()
    short: Short = Short()
    shorts: list[Outer] = Field(default_factory=list)
    maybe: Leaf | None = None
    listed: list[Leaf] = Field(default_factory=list)
    named: dict[str, Leaf] = Field(default_factory=dict)
    two: tuple[Leaf, Strict] | None = None
    strict: Strict = Strict()
    open: Open = Open()
    renamed: Renamed = Renamed()
    rewrites: Rewrites = Rewrites()
    pet: Cat | Dog | str | None = None
    point: Point | None = None
    pair: Pair | None = None
    many: Many | None = None
    anything: Any = None
    free: dict[str, Any] = Field(default_factory=dict)


@pytest.mark.parametrize(
    ("data", "unknown"),
    [
        ({"leaf": {"size": 1, "sise": 2}}, ["leaf.sise"]),
        ({"maybe": {"sise": 2}}, ["maybe.sise"]),
        ({"maybe": None}, []),
        ({"listed": [{}, {"sise": 2}]}, ["listed.1.sise"]),
        ({"named": {"a": {"sise": 2}}}, ["named.a.sise"]),
        ({"two": [{"sise": 1}, {"sise": 2}]}, ["two.0.sise", "two.1.sise"]),
        ({"strict": {"sise": 2}}, ["strict.sise"]),
        ({"open": {"sise": 2, "leaf": {"sise": 1}}}, ["open.leaf.sise"]),
        ({"renamed": {"magnitude": 2}}, []),
        ({"rewrites": {"blatt": {}}}, []),
        ({"pet": {"kind": "dog", "tricks": 1}}, []),
        ({"pet": {"kind": "dog", "lives": 1}}, ["pet.lives"]),
        ({"pet": {"kind": "bird", "tricks": 1}}, []),
        ({"pet": {"kind": "bird", "wings": 2}}, ["pet.wings"]),
        ({"short": {"len": 1, "length": 2, "lenght": 3}}, ["short.lenght"]),
        ({"pet": "rex"}, []),
        ({"point": {"x": 1, "y": 2, "z": 3}}, ["point.z"]),
        ({"pair": {"left": 1, "right": 2}}, ["pair.right"]),
        ({"many": [{"sise": 1}]}, ["many.0.sise"]),
        ({"anything": {"a": 1}, "free": {"b": {"c": 1}}}, []),
        ({"leaf": 5, "listed": "x", "named": []}, []),
        ({"laef": {}}, ["laef"]),
    ],
)
def test_unknown_keys_are_found_in_nested_models(data, unknown):
    assert [".".join(map(str, path)) for path, _ in find_keys(Top, data).unknown] == unknown


def test_aliases_are_found_at_any_depth_the_nested_ones_first():
    data = {"leaf": {"size": 1}, "short": {"len": 1}, "shorts": [{"inner": {"len": 2}, "deep": {"length": 3}}]}
    aliases = find_keys(Top, data).aliases
    assert list(aliases.items()) == [
        (("short", "len"), Short),
        (("shorts", 0, "inner", "len"), Short),
        (("shorts", 0, "inner"), Outer),
    ]


def test_a_description_is_found_below_lists_and_options():
    for path in [("leaf", "size"), ("maybe", "size"), ("listed", 0, "size"), ("named", "a", "size")]:
        assert find_description(Top, path) == "How big."
    assert find_description(Top, ("nothing", "size")) == ""


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
