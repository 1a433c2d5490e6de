"""`doctor` finds what is broken and says what to do; every check is given something broken."""

import pytest

from reinforge.config.loader import build_config
from reinforge.engine import devices
from reinforge.engine.machine import measure_machine
from reinforge.registry import REGISTRY, TypedConfig
from reinforge.trainer.setup import components, installation
from reinforge.trainer.setup.components import ComponentBuilder
from reinforge.trainer.setup.installation import (
    check_components,
    check_devices,
    check_engine,
    check_folders,
    check_installation,
    check_required,
    fits,
)

VERSIONS = {"click": "8.1.7", "torch": "2.13.0+cpu", "aiohttp": "3.14"}
REQUIREMENTS = [
    "click>=8.1",
    "aiohttp>=3.14",
    'torch<2.16,>=2.10; extra == "train"',
    'matplotlib>=3.8; extra == "plot"',
    'reinforge[train,plot]; extra == "all"',
    'pytest>=8; extra == "dev"',
]
GIB = 2**30


@pytest.mark.parametrize(
    ("version", "wanted", "expected"),
    [
        ("2.13.0+cpu", "<2.16,>=2.10", True),
        ("2.16", "<2.16,>=2.10", False),
        ("2.9.1", ">=2.10", False),
        ("8.1", ">=8.1.0", True),
        ("1.0", "==1.0", True),
        ("1.1", "==1.0", False),
        ("3.0rc1", ">=2,!=3.0", False),
        ("1.4.2", "~=1.4", True),
        ("anything", "", True),
    ],
)
def test_versions_are_compared_by_number(version, wanted, expected):
    assert fits(version, wanted) is expected


def test_packages_that_fit_are_ok_and_extras_are_listed():
    packages, complete, absent = check_required(REQUIREMENTS, VERSIONS.get)
    assert (packages.state, packages.fix) == ("ok", "")
    assert (complete.state, complete.text) == ("ok", "train")
    assert (absent.state, absent.text) == ("absent", "plot (no matplotlib)")


def test_missing_and_old_packages_are_named_with_the_command():
    found = check_required(REQUIREMENTS, {**VERSIONS, "click": "7.0", "aiohttp": None, "torch": "2.1"}.get)[0]
    assert found.state == "broken"
    assert found.text == (
        "click 7.0 is installed, but >=8.1 is needed; aiohttp is not installed; "
        "torch 2.1 is installed, but <2.16,>=2.10 is needed"
    )
    assert found.fix == 'pip install "click>=8.1" "aiohttp>=3.14" "torch<2.16,>=2.10"'


def test_this_installation_works(tmp_path):
    checks = check_installation(tmp_path / "runs")
    assert {check.name for check in checks} >= {"reinforge", "packages", "extras", "engine", "device", "disk"}
    assert [check for check in checks if check.state == "broken"] == []
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_a_full_disk_and_a_folder_without_permission_are_broken(tmp_path):
    (tmp_path / "file").write_text("")
    full, blocked = check_folders({"runs": tmp_path, "cache": tmp_path / "file" / "x"}, lambda folder: GIB // 2)
    assert (full.state, blocked.state) == ("broken", "broken")
    assert "0.5 GiB free" in full.text
    assert "finetuning.output_dir" in full.fix
    assert "cannot hold a run" in blocked.text
    assert "REINFORGE_HOME" in blocked.fix
    (fine,) = check_folders({"runs": tmp_path / "new" / "deep"}, lambda folder: 20 * GIB)
    assert fine.state == "ok"
    assert "20.0 GiB free" in fine.text


class Components:
    def __init__(self, errors):
        self.errors = errors

    def plugin_errors(self):
        if isinstance(self.errors, Exception):
            raise self.errors
        return self.errors


def test_a_broken_plugin_is_a_warning():
    (plugin,) = check_components(Components({"mine": "ImportError: no module named x"}))
    assert plugin.state == "warning"
    assert "no module named x" in plugin.text


def test_components_that_cannot_be_imported_are_broken():
    (found,) = check_components(Components(ModuleNotFoundError("No module named 'y'")))
    assert (found.name, found.state) == ("components", "broken")
    assert "No module named 'y'" in found.text


def test_an_engine_that_cannot_be_imported_is_broken_with_the_command(monkeypatch):
    monkeypatch.setattr("reinforge.engine.packages.PACKAGES", ("torch", "no_such_package"))
    found = check_engine()
    assert (found.state, found.name) == ("broken", "engine")
    assert "no_such_package" in found.text
    assert "pip install" in found.fix


def test_a_device_that_computes_nonsense_is_broken(monkeypatch):
    monkeypatch.setattr(devices, "TOLERANCE", -1.0)
    (found,) = check_devices()[:1]
    assert found.state == "broken"
    assert "a gradient is wrong by" in found.text
    assert "finetuning.device" in found.fix


def test_a_device_that_fails_says_so():
    assert "Error" in devices.find_wrong_result("nonsense")
    assert devices.find_wrong_result("cpu") == ""


def test_nothing_else_is_tried_without_an_engine(tmp_path, monkeypatch):
    broken = installation.InstallationCheck("engine", "broken", "no torch")
    monkeypatch.setattr(installation, "check_engine", lambda: broken)
    assert "device" not in {check.name for check in check_installation(tmp_path)}


def test_the_memory_of_a_container_is_its_limit(tmp_path):
    limit = tmp_path / "memory.max"
    machine = measure_machine(tmp_path / "none")
    limit.write_text("max\n")
    assert measure_machine(limit) == machine
    limit.write_text("1048576\n")
    assert measure_machine(limit) == 1 << 20


class SlowModelConfig(TypedConfig, name="slow"):
    """A model that takes ten minutes to make."""


class Clock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


async def test_the_time_of_making_a_model_is_known_since_only_the_first_run_takes_it(tmp_path, monkeypatch):
    clock, registry = Clock(), REGISTRY.child()

    async def make(config, builder):
        clock.now += 600
        yield tmp_path

    registry.add("model", SlowModelConfig, make)
    monkeypatch.setattr(components, "time", clock)
    settings = {"finetuning": {"policy": {"model": "bundled:slow"}}}
    async with ComponentBuilder(build_config(settings), registry) as builder:
        assert await builder.get_model_path() == str(tmp_path)
        assert await builder.get_model_path() == str(tmp_path)
        assert builder.making_s == pytest.approx(600)
