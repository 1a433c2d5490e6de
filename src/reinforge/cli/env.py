"""`reinforge env`: the versions and the machine, to paste into a bug report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from reinforge.cli.exits import Command
from reinforge.cli.options import JSON
from reinforge.cli.output import say, say_json
from reinforge.limits import VARIABLES as LIMITS

PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "peft", "jinja2", "llguidance", "numpy"),
    *("pydantic", "aiohttp", "click", "rich", "zstandard", "openai", "pyarrow", "datasets", "matplotlib"),
    *("gguf", "mcp", "bitsandbytes", "accelerate", "flash-attn"),
)
VARIABLES = (
    *("REINFORGE_HOME", "HF_HOME", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTHONOPTIMIZE", "TERM", "NO_COLOR", "CI", "LANG", "TMPDIR"),
    *LIMITS,
)
"""Environment variables that change what reinforge does, and never hold a secret."""
SECRET_VARIABLES = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "HF_TOKEN", "ANTHROPIC_API_KEY", "WANDB_API_KEY")
"""Variables of which only the name is printed, if they are set."""
NOT_INSTALLED = "not installed"


@click.command("env", cls=Command)
@JSON
def command(as_json: bool) -> None:
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
