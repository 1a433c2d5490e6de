"""Random YAML, and random changes of shipped files: each is valid or rejected with a location, without a traceback."""

import functools
import random
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from reinforge.config import document
from reinforge.config.document import parse_yaml
from reinforge.config.dump import dump_config
from reinforge.config.loader import load_config
from reinforge.errors import ConfigError
from reinforge.registry import REGISTRY
from tests.guide.registry import guide_registry

ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests" / "data"
NOT_CONFIGURATIONS = {
    "plan.yml",  # a cluster: tests/scale/test_cluster_plan.py
    "coding_tasks.yml",
    "gateway_openapi.yml",
    "kuberay.yml",
    "seed_fields.yml",
    "seed_symbols.yml",
    "skypilot.yml",
}
SHIPPED = sorted(
    [*(ROOT / "src" / "reinforge" / "tasks").rglob("*.yml"), *(ROOT / "examples").rglob("*.yml"), *DATA.glob("*.yml")]
)
SHIPPED = [path for path in SHIPPED if path.name not in NOT_CONFIGURATIONS]
ENVIRON = {"TRAINING_API_KEY": "sk-1", "HF_TOKEN": "hf-1", "RAY_ADDRESS": "10.0.0.1:6379"}

WORDS = [
    "_type", "null", "~", "true", "no", "1e-5", "-1", "0", "99999999999999999999", ".nan", ".inf", "0o17", "2001-01-01",
    "${X}", "${X:-1}", "${", "$${", "*a", "&a b", "!!python/object:os.system {}", "[", "]", "{", "}", "{}", "[]", "''",
    "|", ">", "<<: *a", "? a", "- ", ": ", "#", "\t", "\x00", "\u2028", "é", "😀", "a: b: c", "%", "@", "`", "---",
    "...", "epoch", "policy", "openpipe_art_trainer", "a" * 300, "finetuning", "[[[[[[[[[[", "\ufeff",
]  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(WORDS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.sampled_from(WORDS), inner, max_size=3)
    ),
    max_leaves=5,
)


@functools.cache
def read_shipped(name):
    path = next(path for path in SHIPPED if path.name == name)
    return path.read_text(encoding="utf-8")


def iterate_paths(value, path=()):
    yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in pairs:
        yield from iterate_paths(below, (*path, key))


def change_data(text, rng, value):
    """Returns the file with one value replaced, removed, renamed or added."""
    data = parse_yaml(text).data
    *above, key = rng.choice([path for path in iterate_paths(data) if path])
    container = data
    for part in above:
        container = container[part]
    action = rng.randrange(4)
    if action == 0:
        container[key] = value
    elif action == 1:
        del container[key]
    elif isinstance(container, list):
        container.append(value)
    else:
        name = str(rng.choice([rng.choice(WORDS), f"{key}x", str(key)[1:]]))
        container[name] = container.pop(key) if action == 2 else value
    return yaml.safe_dump(data, allow_unicode=True, sort_keys=False)


def change_text(text, rng):
    """Returns the file with a range of characters replaced, removed or repeated, or with a line indented."""
    start = rng.randrange(len(text))
    end = min(len(text), start + rng.randrange(40))
    action = rng.randrange(4)
    if action == 0:
        return text[:start] + rng.choice(WORDS) + text[end:]
    if action == 1:
        return text[:start] + text[end:]
    if action == 2:
        return text[:end] + text[start:end] + text[end:]
    line = text.rfind("\n", 0, start) + 1
    return text[:line] + " " * rng.randrange(1, 6) + text[line:]


MUTATIONS = given(
    name=st.sampled_from([path.name for path in SHIPPED]),
    seed=st.integers(min_value=0, max_value=2**32),
    count=st.integers(min_value=1, max_value=4),
    on_text=st.booleans(),
    value=VALUES,
)


def check(path, name, seed, count, on_text, value):
    rng = random.Random(seed)
    text = read_shipped(name)
    for _ in range(count):
        if on_text:
            text = change_text(text, rng)
        else:
            try:
                text = change_data(text, rng, value)
            except ConfigError:
                break  # after the previous change it is not YAML
    path.write_text(text, encoding="utf-8", errors="surrogatepass", newline="")
    problems = find_problems(path)
    assert [p for p in problems if not p.location.startswith(str(path)) or not p.message] == [], text


def find_problems(path, overrides=()):
    """Returns the problems of a file; none if it loads and can be dumped."""
    try:
        dump_config(load_config(path, overrides=overrides, registry=guide_registry(), environ=ENVIRON)).encode()
    except ConfigError as error:
        return error.problems
    return []


def make_settings(count):
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("count", [10, pytest.param(300, marks=pytest.mark.slow)])
def test_a_changed_file_is_valid_or_rejected_with_a_location(tmp_path, count):
    @make_settings(count)
    @example(name="demo.yml", seed=0, count=1, on_text=False, value=None)
    @example(name="demo.yml", seed=1, count=1, on_text=False, value={})
    @MUTATIONS
    def change(**mutation):
        check(tmp_path / "mutated.yml", **mutation)

    change()


KEYS = [
    "llms", "functions", "workflow", "eval", "general", "dataset", "evaluators", "trainers", "trainer_adapters",
    "trajectory_builders", "finetuning", "policy", "sampling", "limits", "_type", "openai", "python", "function",
    "base_url", "api_key", "extra_body", "model", "enabled", "true",
]  # fmt: skip
TOKENS = [
    ": ", "\n", "\n  ", "\n    ", "- ", "? ", "{", "}", "[", "]", ", ", "&a ", "*a ", "<<: ", "!!", "'", '"', "|\n",
    "%YAML 1.2\n---\n", "1e999", "0x", "0o8", "9" * 5000, "${X}", "${", "\\ud800", '"\\ud800"', '"\\ud83d\\ude00"',
    '"\\Uffffffff"', '"\\x00"', "\x00", "\x1b[2J", "\u202e", "\ud800", "http://a:b@c/${HF_TOKEN}",
]  # fmt: skip
DOCUMENTS = st.one_of(
    st.binary(max_size=100),
    st.lists(st.sampled_from(KEYS) | st.sampled_from(TOKENS) | st.text(max_size=4), max_size=30)
    .map("".join)
    .map(lambda text: text.encode("utf-8", "surrogatepass")),
)


def check_document(path, content):
    path.write_bytes(content)
    problems = find_problems(path)
    assert [p for p in problems if not p.location.startswith(str(path)) or not p.message] == [], content
    "\n".join(map(str, problems)).encode()


@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_any_bytes_are_valid_or_rejected_with_a_location(tmp_path, count):
    @make_settings(count)
    @example(content=b'"\\ud800": 1')
    @example(content=b'llms: "\\Uffffffff"')
    @example(content=b"[" * 5000)
    @given(content=DOCUMENTS)
    def read(content):
        check_document(tmp_path / "random.yml", content)

    read()


def read_outcome(content):
    try:
        read = parse_yaml(content, "f.yml")
    except ConfigError as error:
        return error.problems
    return repr(read.data), read.marks


@pytest.mark.parametrize("count", [30, pytest.param(2000, marks=pytest.mark.slow)])
def test_both_parsers_read_the_same(monkeypatch, count):
    """libyaml reads what it reads as PyYAML's own parser does, which is the only one where PyYAML is built without."""

    @make_settings(count)
    @example(content=b"a:\tb", seed=None)
    @example(content=b"{a: b?c}", seed=None)
    @example(content=b"a: |# no\n  b", seed=None)
    @example(content=b"a: !", seed=None)
    @example(content=b"---", seed=None)
    @example(content=b"a: 0x" + b"9" * 4000, seed=None)
    @example(content="a: 1\n\ufeff b: 2".encode(), seed=None)
    @given(content=DOCUMENTS, seed=st.none() | st.integers(min_value=0, max_value=2**32))
    def read(content, seed):
        if seed is not None:  # a few lines of a shipped file, changed
            rng = random.Random(seed)
            lines = read_shipped(rng.choice(SHIPPED).name).splitlines()
            start = rng.randrange(len(lines))
            content = change_text("\n".join(lines[start : start + rng.randrange(1, 12)]) + "\n", rng)
        outcome = read_outcome(content)
        with monkeypatch.context() as patched:
            patched.setattr(document, "CParser", None)
            assert read_outcome(content) == outcome

    read()


def test_what_libyaml_reads_differently_is_left_to_the_other_parser(monkeypatch):
    """Mutation check: without the pattern a value that one parser refuses is accepted by the other."""
    assert len(read_outcome("{a: b?c}")) == 1
    monkeypatch.setattr(document, "READ_OTHERWISE", re.compile("(?!)"))
    assert read_outcome("{a: b?c}")[0] == "{'a': 'b?c'}"


def test_text_that_is_not_read_as_text_ends_in_another_error(tmp_path, monkeypatch):
    """Mutation check: a lone half of a character goes through, and the message itself cannot be written."""
    monkeypatch.setattr(document, "find_surrogate", lambda text: None)
    with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
        check_document(tmp_path / "f.yml", b'"\\ud800": 1')


@make_settings(40)
@example(path="finetuning.\udcff", value="\udcff")
@given(
    path=st.lists(st.sampled_from([*KEYS, "0", ""]) | st.text(max_size=4), min_size=1, max_size=4).map(".".join),
    value=st.sampled_from([*WORDS, *TOKENS]) | st.text(max_size=8),
)
def test_any_override_is_valid_or_rejected_with_its_path(path, value):
    assert [p for p in find_problems(SHIPPED[0], [(path, value)]) if not p.location or not p.message] == []


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_files_are_valid_and_equal_to_their_dump_when_reloaded(path, tmp_path):
    text = dump_config(load_config(path, registry=guide_registry(), environ=ENVIRON))
    again = tmp_path / "again.yml"
    again.write_text(text, encoding="utf-8")
    assert dump_config(load_config(again, registry=guide_registry(), environ=ENVIRON)) == text


def test_no_task_is_missing():
    assert {path.name for path in SHIPPED} >= {"demo.yml", "tickets.yml", "002-complete.yml", "art_example.yml"}
    assert REGISTRY.plugin_errors() == {}
    assert all(re.search(r"^finetuning:", path.read_text(), re.MULTILINE) for path in SHIPPED)
