"""`reinforge doctor`: whether this installation works; `reinforge env`: its versions, to paste into a bug report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from reinforge.cli.options import DEBUG, JSON, OUTPUT_DIR, GroupedCommand, option
from reinforge.cli.output import say, say_json, without_secrets
from reinforge.cli.report import Command, exit_on_error

if TYPE_CHECKING:
    from reinforge.trainer.installation import InstallationCheck


BROKEN = 4
"""The exit code of an environment that does not work."""
INSTALL_AGAIN = 'pip install --force-reinstall --no-deps reinforge, then pip install "reinforge[all]"'
REINSTALL = (
    "if the checks above passed, install torch again (docs/quickstart.md); `reinforge doctor --debug` prints the "
    "traceback, to report together with `reinforge env`"
)

SELF_TEST = "reinforge.tasks.self_test.learning:run_self_test"


@click.command("doctor", cls=GroupedCommand, context_settings={"show_default": True})
@OUTPUT_DIR
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda", "mps"]), default="auto", help="Device to train on.")
@option("no_training", is_flag=True, help="Only check the installation; train nothing.")
@JSON
@DEBUG
def doctor_command(output_dir: str, device: str, no_training: bool, as_json: bool, debug: bool) -> None:
    """Check packages, devices, disks and locks, then train a tiny model through the whole path (half a minute).

    The model starts from random weights, is stopped, resumed and verified, and must be better than before on fresh
    episodes. Exits with code 4 if something is broken, with what to do about it.

    \b
    Example:
      reinforge doctor
      reinforge doctor --no_training --output_dir /data/runs
    """
    with exit_on_error(as_json=as_json, debug=debug):
        try:
            from reinforge.trainer.installation import check_installation
        except ImportError as error:  # a package that every command needs
            _exit_without_packages(error, as_json=as_json)
        checks = check_installation(Path(output_dir))
        if not as_json:
            for check in checks:
                _show(check)
        is_broken = any(check.state == "broken" for check in checks)
        if not no_training and not is_broken:
            checks.append(_try_learning(device, debug=debug))
            if not as_json:
                _show(checks[-1])
        is_broken = any(check.state == "broken" for check in checks)
        if as_json:
            say_json(without_secrets({"ok": not is_broken, "checks": [asdict(check) for check in checks]}))
        else:
            say("something is broken: see above" if is_broken else "everything works")
        if is_broken:
            raise SystemExit(BROKEN)


def _exit_without_packages(error: ImportError, *, as_json: bool) -> NoReturn:
    text = f"reinforge cannot be imported: {type(error).__name__}: {error}"
    if as_json:
        check = {"name": "packages", "state": "broken", "text": text, "fix": INSTALL_AGAIN}
        say_json(without_secrets({"ok": False, "checks": [check]}))
    else:
        say(f"  broken   packages   {text}\n           fix: {INSTALL_AGAIN}")
    raise SystemExit(BROKEN) from error


def _show(check: InstallationCheck) -> None:
    say(f"  {check.state:<8} {check.name:<10} {check.text}")
    if check.fix:
        say(f"           fix: {check.fix}")


def _try_learning(device: str, *, debug: bool) -> InstallationCheck:
    """Runs the self-test; a failure of any kind is a finding, since that is what is looked for."""
    import traceback

    from reinforge.errors import Interrupted, describe_error
    from reinforge.registry import load_named
    from reinforge.runs.summary import format_duration
    from reinforge.trainer.installation import InstallationCheck

    try:
        with tempfile.TemporaryDirectory(prefix="reinforge-doctor-", ignore_cleanup_errors=True) as folder:
            result = load_named(SELF_TEST)(Path(folder), device=device)
    except Interrupted:
        raise
    except Exception as error:  # noqa: BLE001  whatever fails here is broken
        if debug:
            say(traceback.format_exc(), err=True)
        return InstallationCheck("learning", "broken", describe_error(error), REINSTALL)
    return InstallationCheck("learning", "ok", f"{result.text}, in {format_duration(result.seconds)}")


PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "peft", "jinja2", "llguidance", "numpy"),
    *("pydantic", "aiohttp", "click", "rich", "zstandard", "openai", "pyarrow", "datasets", "matplotlib"),
    *("gguf", "mcp", "bitsandbytes", "accelerate", "flash-attn"),
)
VARIABLES = (
    *("REINFORGE_HOME", "HF_HOME", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTHONOPTIMIZE", "TERM", "NO_COLOR", "CI", "LANG", "TMPDIR"),
)
"""Environment variables that change what reinforge does, and never hold a secret."""
SECRET_VARIABLES = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "HF_TOKEN", "ANTHROPIC_API_KEY", "WANDB_API_KEY")
"""Variables of which only the name is printed, if they are set."""
NOT_INSTALLED = "not installed"


@click.command("env", cls=Command)
@JSON
def env_command(as_json: bool) -> None:
    """Print versions, machine and settings for a bug report; values of secrets are left out.

    \b
    Example:
      reinforge env
      reinforge env --json
    """
    sections = {
        "reinforge": _describe_program(),
        "machine": _describe_machine(),
        "packages": {name: _find_version(name) for name in PACKAGES},
        "variables": _describe_variables(os.environ),
    }
    if as_json:
        say_json(sections)
        return
    width = max(len(name) for section in sections.values() for name in section)
    for title, section in sections.items():
        say(title)
        for name, value in section.items():
            say(f"  {name:<{width}}  {value}")


def _describe_program() -> dict[str, str]:
    from reinforge.files import home
    from reinforge.registry import REGISTRY
    from reinforge.version import __version__

    described = {
        "version": __version__,
        "folder": str(Path(__file__).parents[1]),
        "python": f"{platform.python_implementation()} {platform.python_version()} at {sys.executable}",
        "home": str(home()),
    }
    plugins = [f"{name}: {why}" for name, why in REGISTRY.plugin_errors().items()]
    return {**described, "broken plugins": "; ".join(plugins)} if plugins else described


def _describe_machine() -> dict[str, str]:
    from reinforge.engine.machine import count_cpus, measure_machine

    memory = measure_machine()
    return {
        "system": platform.platform(),
        "processor": f"{platform.machine()}, {os.cpu_count() or 'unknown'} CPUs, {count_cpus()} of them usable",
        "memory": "unknown" if memory is None else f"{memory / 2**30:.1f} GiB",
        "accelerators": _describe_accelerators(),
    }


def _describe_accelerators() -> str:
    """Returns what torch finds, or why it cannot look: a broken installation is what a report is about."""
    from reinforge.engine.packages import is_installed

    if not is_installed("torch"):
        return "unknown: torch is not installed"
    try:
        from reinforge.engine.devices import list_accelerators

        return "; ".join(list_accelerators()) or "none"
    except Exception as error:  # noqa: BLE001  a driver or a shared library may fail in any way
        return f"unknown: {type(error).__name__}: {error}"


def _find_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def _describe_variables(environment: Mapping[str, str]) -> dict[str, Any]:
    shown = {name: environment[name] for name in VARIABLES if name in environment}
    return {**shown, **{name: "set" for name in SECRET_VARIABLES if environment.get(name)}}
