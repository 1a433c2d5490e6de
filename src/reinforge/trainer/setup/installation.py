"""Whether this installation can run reinforge: packages, their versions, devices, memory, disk, locks.

Each check says what was found, and what to do about what is broken. `reinforge.tasks.self_test` then trains.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from reinforge.engine import import_engine
from reinforge.engine.packages import INSTALL, check_packages
from reinforge.errors import ReinforgeError
from reinforge.files import find_existing_folder, home
from reinforge.registry import REGISTRY, Registry
from reinforge.runs.removal import find_obstacle
from reinforge.trainer.setup.disk_space import free_disk_bytes
from reinforge.version import __version__

State = Literal["ok", "absent", "warning", "broken"]

GIB = 2**30
MIN_FREE = GIB  # with less free space on a disk, the checkpoints of even a small run may not fit
_REQUIREMENT = re.compile(
    r'^(?P<name>[\w.-]+)(?:\[[^]]*\])?(?P<versions>[^;]*)(?:;.*extra == [\'"](?P<extra>[\w-]+)[\'"])?'
)
_PART = re.compile(r"(?P<operator>>=|<=|==|!=|<|>|~=)\s*(?P<version>[\d.]+)")


@dataclass(frozen=True, slots=True)
class InstallationCheck:
    name: str
    state: State  # `absent`: optional, and not installed; `warning`: reinforge works, but something will not
    text: str
    fix: str = ""  # what to do; empty where nothing is wrong


def check_installation(output_dir: Path) -> list[InstallationCheck]:
    """Returns every check of this installation, in the order in which problems should be solved."""
    python = f"{platform.python_implementation()} {platform.python_version()}"
    engine = check_engine()
    return [
        InstallationCheck("reinforge", "ok", f"{__version__} on {python}, {platform.system()} {platform.machine()}"),
        *check_required(importlib.metadata.requires("reinforge") or [], _find_version),
        engine,
        *check_components(REGISTRY),
        *(check_devices() if engine.state == "ok" else []),
        *check_folders({"runs": output_dir, "cache": home()}, free_disk_bytes),
    ]


def _find_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_required(requirements: Sequence[str], find_version: Callable[[str], str | None]) -> list[InstallationCheck]:
    """Returns whether the required packages are there in versions that fit, and which extras are complete.

    Example: ["click>=8.1", 'peft>=0.18; extra == "train"'] with click 7 -> broken: click 7 is installed, >=8.1 needed.
    """
    problems, fixes = [], []
    extras: dict[str, list[str]] = {}
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement.strip())
        if match is None or match["name"].lower() == "reinforge":
            continue
        name, versions, extra = match["name"], match["versions"].strip(" ()"), match["extra"]
        found = find_version(name)
        if extra is not None:
            extras.setdefault(extra, [])
        if found is None and extra is not None:
            extras[extra].append(name)
        elif found is None:
            problems.append(f"{name} is not installed")
            fixes.append(f'"{name}{versions}"')
        elif not fits(found, versions):
            problems.append(f"{name} {found} is installed, but {versions} is needed")
            fixes.append(f'"{name}{versions}"')
    checks = [
        InstallationCheck("packages", "broken", "; ".join(problems), f"pip install {' '.join(fixes)}")
        if problems
        else InstallationCheck("packages", "ok", "all required packages are installed in versions that fit")
    ]
    shown = sorted((name, missing) for name, missing in extras.items() if name not in ("all", "dev", "bench", "docs"))
    if complete := [name for name, missing in shown if not missing]:
        checks.append(InstallationCheck("extras", "ok", ", ".join(complete)))
    if absent := [f"{name} (no {', '.join(missing)})" for name, missing in shown if missing]:
        checks.append(
            InstallationCheck("extras", "absent", ", ".join(absent), 'pip install "reinforge[NAME]", if needed')
        )
    return checks


def fits(version: str, wanted: str) -> bool:
    """Returns False if a version is outside a range; parts of versions that are not numbers are ignored.

    Example: fits("2.13.0+cpu", ">=2.10,<2.16") -> True; fits("3.0", ">=2.10,<2.16") -> False.
    """
    found = _parse_version(version)
    for part in _PART.finditer(wanted):
        limit = _parse_version(part["version"])
        width = max(len(found), len(limit))
        a, b = (numbers + (0,) * (width - len(numbers)) for numbers in (found, limit))
        is_met = {">=": a >= b, "<=": a <= b, "==": a == b, "!=": a != b, "<": a < b, ">": a > b}
        if not is_met.get(part["operator"], a >= b):
            return False
    return True


def _parse_version(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release is not None else ()


def check_engine() -> InstallationCheck:
    if problems := check_packages():
        return InstallationCheck("engine", "broken", problems[0].message, problems[0].fix)
    try:
        import_engine()
    except ReinforgeError as error:
        message, _, fix = str(error).partition("\n    fix: ")
        return InstallationCheck("engine", "broken", message, fix or INSTALL)
    from reinforge.engine.devices import describe_torch  # imports torch, as the engine has

    return InstallationCheck("engine", "ok", describe_torch())


def check_components(registry: Registry) -> list[InstallationCheck]:
    """Returns a warning for each installed plugin that cannot be imported, and whether our own components can."""
    try:
        errors = registry.plugin_errors()
    except Exception as error:  # noqa: BLE001  a missing package or file may fail in any way
        text = f"the components cannot be imported: {type(error).__name__}: {error}"
        return [InstallationCheck("components", "broken", text, "install reinforge again, with all its packages")]
    fix = "update or uninstall that package; what it provides cannot be used"
    return [InstallationCheck("plugin", "warning", f"{name}: {why}", fix) for name, why in errors.items()]


def check_devices() -> list[InstallationCheck]:
    from reinforge.engine.devices import try_devices  # imports torch

    checks = []
    for trial in try_devices():
        if trial.problem:
            fix = "set finetuning.device: cpu, or repair the driver and the build of torch for it"
            checks.append(InstallationCheck("device", "broken", f"{trial.name}: {trial.problem}", fix))
        else:
            checks.append(InstallationCheck("device", "ok", trial.name))
    return checks


def check_folders(folders: Mapping[str, Path], free_bytes: Callable[[Path], int]) -> list[InstallationCheck]:
    checks = []
    for name, folder in folders.items():
        setting = "-o finetuning.output_dir FOLDER" if name == "runs" else "the environment variable REINFORGE_HOME"
        place = f"the folder for {name}, {folder.expanduser().absolute()}"
        if (obstacle := find_obstacle(folder)) is not None:
            text = f"{place}, cannot hold a run: {obstacle}"
            fix = f"choose a folder on a local disk that you can write to, with {setting}"
            checks.append(InstallationCheck("disk", "broken", text, fix))
            continue
        free = free_bytes(find_existing_folder(folder.expanduser()))
        text = f"{place}: {free / GIB:.1f} GiB free; files, locks and SQLite work"
        if free < MIN_FREE:
            fix = f"free some space, or choose a folder on another disk, with {setting}"
            checks.append(InstallationCheck("disk", "broken", text, fix))
        else:
            checks.append(InstallationCheck("disk", "ok", text))
    return checks
