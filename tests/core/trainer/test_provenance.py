"""What a run is made of: hashes of code, files and model, versions; and who made a run folder."""

import functools
import os
import sys
import time

import pytest

from reinforge.config.loader import build_config, load_config
from reinforge.trainer import provenance
from reinforge.trainer.provenance import Provenance, collect_provenance, find_key_file, is_own_run, seal_run


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def load(folder, text=""):
    write(folder / "f.yml", text.encode())
    return load_config(folder / "f.yml")


def test_modules_below_the_project_are_found_and_installed_ones_are_not(tmp_path, monkeypatch):
    for name in ("rfp_agent.py", "rfp_pack/__init__.py", "rfp_pack/tools.py", ".venv/lib/site-packages/rfp_lib.py"):
        write(tmp_path / name, b"X = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path / ".venv/lib/site-packages"))
    import rfp_agent  # noqa: F401
    import rfp_lib  # noqa: F401
    import rfp_pack.tools  # noqa: F401

    try:
        assert set(collect_provenance(load(tmp_path)).files) == {
            "rfp_agent.py", "rfp_pack/__init__.py", "rfp_pack/tools.py",
        }  # fmt: skip
    finally:
        for name in [name for name in sys.modules if name.startswith("rfp_")]:
            del sys.modules[name]


def test_files_that_the_configuration_names_are_found_and_the_dataset_is_not(tmp_path):
    for name in ("schema.json", "template.jinja", "data.jsonl"):
        write(tmp_path / name, b"{}")
    loaded = load(
        tmp_path,
        "eval:\n  general: {dataset: {_type: jsonl, file_path: data.jsonl}}\n"
        "  evaluators: {v: {_type: json_schema, schema: schema.json}}\n"
        "finetuning: {policy: {chat_template: template.jinja}}\n",
    )
    assert set(collect_provenance(loaded).files) == {"schema.json", "template.jinja"}


def test_a_model_is_found_with_its_tokenizer_template_weights_and_adapters(tmp_path):
    names = ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors", "a/adapter_config.json"]
    for name in [*names, "README.md", "checkpoint-5/config.json"]:
        write(tmp_path / "tiny" / name, b"x")
    for model in ("./tiny", "tiny", str(tmp_path / "tiny")):
        loaded = load(tmp_path, f"finetuning: {{policy: {{model: {model}}}}}")
        assert set(collect_provenance(loaded).files) == {f"tiny/{name}" for name in names}
    assert set(collect_provenance(load(tmp_path), str(tmp_path / "tiny")).files) == {f"tiny/{name}" for name in names}


def test_a_function_outside_the_project_counts_by_its_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    @functools.lru_cache
    def agent(item, llm, context):
        return "one"

    found = collect_provenance(build_config({"workflow": {"_type": "python", "function": agent}}))
    (name,) = found.functions
    assert name.endswith("test_a_function_outside_the_project_counts_by_its_source.<locals>.agent")
    assert found.find_changes(Provenance(found.versions, {}, {name: "other"}), tmp_path) == [
        f"the function {name} changed"
    ]


@pytest.mark.parametrize(
    ("before", "now", "changes"),
    [
        ({"torch": "1"}, {"torch": "1"}, []),
        ({"torch": "1"}, {"torch": "2"}, ["torch 1 -> 2"]),
        ({"peft": "1"}, {}, ["peft 1 -> not installed"]),
        ({}, {"peft": "1"}, ["peft not installed -> 1"]),
        ({"org/model": "abc"}, {"org/model": "def"}, ["org/model abc -> def"]),
        ({"org/model": "abc"}, {}, []),
    ],
)
def test_versions_are_compared_by_name(tmp_path, before, now, changes):
    """A hub model that is not in the cache yet may be the same one."""
    assert Provenance(before).find_changes(Provenance(now), tmp_path) == changes


def test_files_that_are_recorded_are_read_again_though_no_module_needs_them_now(tmp_path):
    write(tmp_path / "late.py", b"X = 1\n")
    before = Provenance(files={"late.py": provenance._hash(tmp_path / "late.py")})
    assert before.find_changes(Provenance(), tmp_path) == []
    write(tmp_path / "late.py", b"X = 2\n")
    assert before.find_changes(Provenance(), tmp_path) == ["late.py changed"]
    (tmp_path / "late.py").unlink()
    assert before.find_changes(Provenance(), tmp_path) == ["late.py is gone"]


def test_what_is_recorded_first_stays_and_later_parts_are_added():
    first, later = Provenance({"a": "1"}, {"f": "1"}), Provenance({"a": "2", "b": "2"}, {"f": "2", "g": "2"})
    both = first.extended_by(later)
    assert (both.versions, both.files) == ({"a": "1", "b": "2"}, {"f": "1", "g": "2"})
    assert Provenance.from_dict({**both.as_dict(), "of a later release": {}}) == both


def test_large_weights_are_read_in_part_and_a_change_of_size_start_end_or_many_bytes_shows(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "WHOLE_BYTES", 1 << 20)
    path, size = tmp_path / "model.safetensors", 1 << 33
    with open(path, "wb") as file:
        file.truncate(size)  # sparse: 8 GiB that take no room
    started = time.perf_counter()
    before = provenance._hash(path)
    assert time.perf_counter() - started < 2
    for place in (0, size - 1):
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(b"x")
        assert provenance._hash(path) != before, place
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(b"\0")
    assert provenance._hash(path) == before
    with open(path, "ab") as file:
        file.write(b"\0")
    assert provenance._hash(path) != before


@pytest.mark.parametrize("path", ["/dev/zero", "pipe", "a\0b", "x" * 5000, "."])
def test_a_record_that_names_no_file_is_not_read(tmp_path, path):
    os.mkfifo(tmp_path / "pipe")
    assert Provenance(files={path: "0" * 64}).find_changes(Provenance(), tmp_path) == [f"{path} is gone"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("REINFORGE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_only_the_folder_and_the_project_that_were_sealed_are_ones_own(home, tmp_path):
    run, root = tmp_path / "runs" / "r", tmp_path / "project"
    run.mkdir(parents=True)
    seal = seal_run(run, root)
    assert is_own_run(run, root, seal)
    assert not is_own_run(tmp_path / "copy", root, seal), "moved"
    assert not is_own_run(run, tmp_path, seal), "another project"
    for other in (None, "", "0" * 64, "é", 5):
        assert not is_own_run(run, root, other)
    assert find_key_file().stat().st_mode & 0o777 == 0o600
    find_key_file().unlink()
    assert not is_own_run(run, root, seal), "another user has no key, or another one"
    assert seal_run(run, root) != seal


def test_without_a_key_nothing_is_sealed_and_nothing_fails(home, tmp_path):
    home.write_text("a file where the folder should be")
    assert seal_run(tmp_path, tmp_path) is None
    assert not is_own_run(tmp_path, tmp_path, None)


def test_a_link_to_a_run_folder_is_that_folder(home, tmp_path):
    run = tmp_path / "r"
    run.mkdir()
    os.symlink(run, tmp_path / "link")
    assert is_own_run(tmp_path / "link", tmp_path, seal_run(run, tmp_path))


def test_a_gguf_file_and_the_model_of_a_package_are_compared_as_other_files(tmp_path, monkeypatch):
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(str(site))
    write(site / "carrier/model.gguf", b"GGUF 1")
    write(site / "carrier-1.0.dist-info/METADATA", b"Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\n")
    write(site / "carrier-1.0.dist-info/RECORD", b"carrier/model.gguf,,\n")
    file = write(tmp_path / "mine.gguf", b"GGUF 1")
    for name in ("./mine.gguf", "pip:carrier"):
        monkeypatch.chdir(tmp_path)
        loaded = load(tmp_path, f"finetuning: {{policy: {{model: '{name}'}}}}\n")
        before = collect_provenance(loaded)
        (held,) = before.files
        assert held.endswith("mine.gguf" if name.endswith("gguf") else "carrier/model.gguf")
        assert before.find_changes(collect_provenance(loaded), tmp_path) == []
        write(tmp_path / held, b"GGUF 2")
        assert before.find_changes(collect_provenance(loaded), tmp_path) == [f"{held} changed"]
    assert file.read_bytes() == b"GGUF 2"
    gone = load(tmp_path, "finetuning: {policy: {model: 'pip:of-nobody'}}\n")
    assert collect_provenance(gone).files == {}


def test_the_commit_of_a_hub_model_is_that_of_its_revision(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--owner--name"
    for commit, name in {"0" * 40: "main", "1" * 40: "v2"}.items():
        write(repository / "snapshots" / commit / "config.json", b"{}")
        write(repository / "refs" / name, commit.encode())
    policy = "finetuning: {policy: {model: owner/name"
    assert collect_provenance(load(tmp_path, f"{policy}}}}}\n")).versions["owner/name"] == "0" * 40
    assert collect_provenance(load(tmp_path, f"{policy}, revision: v2}}}}\n")).versions["owner/name"] == "1" * 40
