"""Unknown keys are found in nested classes, and known ones are accepted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, RootModel, model_validator
from typing_extensions import TypedDict

from reinforge.config.schema_walk import find_description, find_keys
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
