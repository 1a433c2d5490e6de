"""Run folders that others made: whatever their journal says, nothing is imported and the refusal is a sentence."""

import pytest

from reinforge.errors import ConfigError
from reinforge.runs.journal.journal import RunJournal
from reinforge.trainer.provenance import seal_run
from reinforge.trainer.resume import load_run_config, read_provenance

CONFIG = "workflow: {_type: python, function: 'rfx_agent:agent'}\n"


def make_run(folder, config=CONFIG, **facts):
    journal = RunJournal(folder / "r")
    journal.set_facts(**facts)
    journal.close()
    (folder / "r" / "config.yml").write_text(config)
    return folder / "r"


@pytest.mark.parametrize(
    ("root", "seal"),
    [
        (".", None),
        ("/", 5),
        ("~", ""),
        ("~nobody/x", "0" * 64),
        ("a/b", "\u00e9"),
        ("x" * 5000, ["x"]),
        ("\x1b[2J", ""),
    ],
)
def test_a_folder_without_a_valid_seal_is_refused(tmp_path, seal, root):
    with pytest.raises(ConfigError, match="was not started here by you"):
        load_run_config(make_run(tmp_path, project_root=root, seal=seal))


@pytest.mark.parametrize("root", [5, None, "a\0b", ["x"]])
def test_a_folder_that_names_no_project_asks_for_the_file(tmp_path, root):
    with pytest.raises(ConfigError, match="has no configuration"):
        load_run_config(make_run(tmp_path, project_root=root))


def test_a_configuration_with_problems_is_refused_all_the_same(tmp_path):
    run = make_run(tmp_path, "workflow: {_type: python, function: 5, api_key: ${NOT_SET}}\n", project_root="/")
    with pytest.raises(ConfigError, match="was not started here by you"):
        load_run_config(run)


def test_a_sealed_run_is_loaded_with_its_project(tmp_path, monkeypatch):
    monkeypatch.setenv("REINFORGE_HOME", str(tmp_path / "home"))
    run = make_run(tmp_path, project_root=str(tmp_path), seal=seal_run(tmp_path / "r", tmp_path))
    assert load_run_config(run).project_root == tmp_path
    (tmp_path / "home" / "run-seal.key").unlink()
    with pytest.raises(ConfigError, match=r"workflow.function: rfx_agent:agent \(not found\)"):
        load_run_config(run)
    assert load_run_config(run, project_root=tmp_path).project_root == tmp_path


@pytest.mark.parametrize("known", [5, "x", [1], None])
def test_a_record_that_is_none_counts_as_missing(known):
    assert read_provenance({"provenance": known}) is None


def test_odd_parts_of_a_record_are_left_out():
    found = read_provenance({"provenance": {"versions": 5, "files": {"a": 1}, "functions": ["x"]}})
    assert (found.versions, found.files, found.functions) == ({}, {"a": "1"}, {})
