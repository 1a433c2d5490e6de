"""YAML text -> plain data with the position of each key."""

import math

import pytest

from reinforge.config.document import parse_yaml
from reinforge.errors import ConfigError
from reinforge.limits import Limits


def test_json_escapes_of_one_character_are_joined_and_a_lone_half_is_rejected():
    assert parse_yaml('"\\ud83d\\ude00": "\\ud83d\\ude00!"').data == {"😀": "😀!"}
    with pytest.raises(ConfigError, match=r"f.yml:2:4 a: '\\ud800' is an unpaired surrogate"):
        parse_yaml('b: 1\na: "x\\ud800"\n', "f.yml")
    with pytest.raises(ConfigError, match=r"f.yml:1:\d+: not valid YAML: an escape names no character"):
        parse_yaml('a: "\\Uffffffff"\n', "f.yml")


def problems(text):
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "f.yml")
    return [f"{p.location} {p.path}: {p.message}" for p in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1", 1),
        ("-0.5", -0.5),
        (".5", 0.5),
        ("0o17", 15),
        ("0x1F", 31),
        ("012", 12),
        ("-.inf", -math.inf),
        ("true", True),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("no", "no"),
        ("~", None),
        ("null", None),
        ("", None),
        ("2024-01-02", "2024-01-02"),
        ("12:30:00", "12:30:00"),
        ("1_000", "1_000"),
        ('"5"', "5"),
        ("!!str 5", "5"),
        ("1.5.2", "1.5.2"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    read = parse_yaml(f"key: {text}").data["key"]
    assert read == value
    assert type(read) is type(value)


def test_every_path_has_the_line_and_column_of_its_key():
    document = parse_yaml("a:\n  b:\n    - x\n    - {c: 1}\n", "f.yml")
    assert document.data == {"a": {"b": ["x", {"c": 1}]}}
    assert document.marks == {
        (): (1, 1),
        ("a",): (1, 1),
        ("a", "b"): (2, 3),
        ("a", "b", 0): (3, 7),
        ("a", "b", 1): (4, 7),
        ("a", "b", 1, "c"): (4, 8),
    }


def test_merge_keys_and_aliases_do_not_override_own_keys():
    document = parse_yaml("base: &base {k: 1, z: 2}\nmine: {k: 3, <<: *base}\n")
    assert document.data["mine"] == {"z": 2, "k": 3}
    assert document.marks["mine", "k"] == (2, 8)


def test_duplicate_keys_are_rejected_with_both_lines():
    assert problems("a: 1\nb:\n  c: 1\n  c: 2\na: 3\n") == [
        'f.yml:4:3 b.c: duplicate key "c"; it is already set on line 3',
        'f.yml:5:1 a: duplicate key "a"; it is already set on line 1',
    ]


def test_tags_that_create_objects_are_rejected():
    found = problems("a: !!python/object/apply:os.system [ls]\nb: !mine x\nc: !!binary aGk=\n")
    assert [p.partition(": the tag ")[2].split()[0] for p in found] == [
        "!!python/object/apply:os.system",
        "!mine",
        "!!binary",
    ]


def test_an_alias_bomb_is_rejected_before_it_expands():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    assert "100,000 values after expanding aliases" in problems("\n".join(lines))[0]


def test_without_its_limit_an_alias_bomb_expands(set_limit):
    """Mutation check, with a small bomb: 5 lines of text, 111,111 values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 5)]
    assert "values after expanding aliases" in problems("\n".join(lines))[0]
    set_limit("config_values", 10**9)
    assert len(parse_yaml("\n".join(lines)).data["a4"]) == 10


def test_many_aliases_deep_nesting_loops_and_large_files_are_rejected():
    assert "more than 100 aliases" in problems("a: &a 1\nb: [" + "*a, " * 101 + "]")[0]
    assert "nested deeper than 64 levels" in problems("a: " + "[" * 70 + "]" * 70)[0]
    assert "an alias (*name) refers to a value that contains it" in problems("a: &a\n  b: *a\n")[0]
    assert "bytes of YAML" in problems("a: " + "x" * (1 << 20))[0]


def test_bytes_are_utf_8_and_a_file_that_is_too_large_is_not_called_something_else() -> None:
    assert parse_yaml(b"\xef\xbb\xbfa: 1").data == {"a": 1}
    with pytest.raises(ConfigError, match=r"^f.yml:2: the file is not UTF-8"):
        parse_yaml(b"a: 1\nb: \xff\n", "f.yml")
    cut = ("a: " + "\u00e4" * (1 << 20)).encode()[: Limits().config_bytes + 2]
    with pytest.raises(ConfigError, match="bytes of YAML"):
        parse_yaml(cut, "f.yml")


@pytest.mark.parametrize(
    ("text", "location", "fix"),
    [
        ("a:\n\t- b", "f.yml:2:1", "spaces, not tabs"),
        ("a: b: c", "f.yml:1:5", "quotes"),
        ("a: [${X}]", "f.yml:1:6", '"${VAR}"'),
        ("a: 1\n---\nb: 2", "f.yml:2:1", ""),
        ("a: 'x", "f.yml:1:6", ""),
        ("a: 1\nb: \x07", "f.yml:2:1", "remove"),
    ],
)
def test_broken_yaml_is_located(text, location, fix):
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "f.yml")
    assert caught.value.problems[0].location == location
    assert fix in caught.value.problems[0].fix
