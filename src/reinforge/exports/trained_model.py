"""The model of a run that is exported: where it is, what it was trained from, and what the verdict said."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reinforge.adapters.hosted_model import HOSTED_MODEL
from reinforge.config.document import parse_yaml
from reinforge.config.finetuning_blocks import SamplingConfig
from reinforge.engine.model.model_files import ADAPTER_CONFIG, read_json
from reinforge.engine.model.preflight import read_headers
from reinforge.engine.model.source import find_base_source, find_source
from reinforge.errors import ConfigError, Problem, StorageError
from reinforge.files import MANIFEST, find_damage
from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.run_folder import find_run, is_in_use, read_config
from reinforge.runs.saved_model import SavedModel, find_model
from reinforge.runs.summary import RunSummary, load_summary, summarize_killed_run
from reinforge.trainer.provenance import LIBRARIES, Provenance
from reinforge.trainer.resume import PROVENANCE

RUN = "RUN"
LICENSE = "license"  # the key of a model card's front matter


@dataclass(frozen=True, slots=True)
class BaseModel:
    name: str  # as the run's configuration names it
    location: str  # folder or hub id that an adapter belongs to
    revision: str | None = None  # commit of a hub id; None: unknown, or it is not a hub id
    license: str | None = None

    @property
    def is_portable(self) -> bool:
        return not Path(self.location).exists()


@dataclass(frozen=True, slots=True)
class TrainedModel:
    run: Path  # the run folder
    folder: Path  # the folder with the model or the adapter
    description: str  # which of the run's models it is
    adapter: str | None  # its name among several adapters; None: it is the run's only policy
    summary: RunSummary
    config: Mapping[str, Any]  # the run's resolved configuration
    base: BaseModel
    provenance: Provenance = field(default_factory=Provenance)

    @property
    def name(self) -> str:
        return self.run.name if self.adapter is None else f"{self.run.name}-{self.adapter}"

    @property
    def is_adapter(self) -> bool:
        return (self.folder / ADAPTER_CONFIG).is_file()

    @property
    def settings(self) -> Mapping[str, Any]:
        section: Mapping[str, Any] = self.config.get("finetuning", {})
        return section

    @property
    def policy(self) -> Mapping[str, Any]:
        return self.settings.get("policy") or {}

    @property
    def sampling(self) -> SamplingConfig:
        return SamplingConfig.model_validate(self.settings.get("sampling") or {})

    @property
    def history(self) -> str:
        return str(self.policy.get("history") or "template")

    @property
    def dtype(self) -> str:
        if (named := self.policy.get("dtype")) in ("float32", "bfloat16"):
            return str(named)
        entries = [entry for header in read_headers(self.folder) for entry in header.values()]
        stored = {entry.get("dtype") for entry in entries if isinstance(entry, dict)}
        return "bfloat16" if "BF16" in stored else "float32"

    @property
    def has_value_head(self) -> bool:
        algorithm = self.settings.get("algorithm")
        return isinstance(algorithm, Mapping) and algorithm.get("_type") == "ppo"

    def list_versions(self) -> dict[str, str]:
        known = self.provenance.versions
        named = ("python", "reinforge", *LIBRARIES)
        return {name: known[name] for name in named if name in known} or {
            name: importlib.metadata.version(name) for name in ("reinforge", "torch", "transformers")
        }


def find_trained_model(name: str, output_dir: Path, adapter: str | None = None) -> TrainedModel:
    """Returns the model of a run in `output_dir`: the promoted one, else the best checkpoint."""
    run = _find_run(name, output_dir)
    if is_in_use(run):
        raise ConfigError(Problem(RUN, f"{run} is still running", "export it when it has ended"))
    config, found = read_config(run), find_model(str(run), output_dir, RUN)
    if found.description.startswith("the base model"):
        message = f"the run {run} has no model of its own: no checkpoint was better than the base model"
        raise ConfigError(Problem(RUN, message, f"see {run / 'report.md'}; longer training may help"))
    folder, chosen = _choose_adapter(found, adapter)
    if (folder / HOSTED_MODEL).is_file():
        message = f"the model of {run} is hosted by a service ({HOSTED_MODEL}), so its weights are not in the folder"
        raise ConfigError(Problem(RUN, message, "the service serves it under the name in that file"))
    whole = Path(found.path)
    if (whole / MANIFEST).is_file() and (damage := find_damage(whole)) is not None:
        raise StorageError(f"{whole} is damaged: {damage}")
    reader = JournalReader(run)
    facts = reader.facts()
    try:
        summary = load_summary(run)
    except StorageError:
        summary = summarize_killed_run(run, reader.validations(), config)
    provenance = Provenance.from_dict(facts.get(PROVENANCE) or {})
    base = _find_base(folder, config, provenance)
    return TrainedModel(run, folder, found.description, chosen, summary, config, base, provenance)


def _find_run(name: str, output_dir: Path) -> Path:
    folder = Path(name).expanduser()
    if folder.is_dir() and not (folder / "run.sqlite").is_file():
        message = f"{folder} is not a run folder (no run.sqlite)"
        raise ConfigError(Problem(RUN, message, "name a run; a model's folder needs no export"))
    if name.startswith("bundled:"):
        message = f"{name} is a starter that no run has trained; its folder is a model that transformers loads"
        raise ConfigError(Problem(RUN, message, "train it first, and name the run"))
    return find_run(name, output_dir)


def _choose_adapter(found: SavedModel, adapter: str | None) -> tuple[Path, str | None]:
    if not found.adapters:
        if adapter is not None:
            message = f"{found.path} has a single policy, so there is no adapter {adapter}"
            raise ConfigError(Problem("--adapter", message, "leave it out"))
        return Path(found.path), None
    if adapter not in found.adapters:
        listed = ", ".join(found.adapters)
        message = f"{found.path} has several adapters ({listed}), and a format holds one"
        message += "" if adapter is None else f"; there is none named {adapter}"
        raise ConfigError(Problem("--adapter", message, f"--adapter {found.adapters[0]}"))
    return Path(found.path) / str(adapter), adapter


def _find_base(folder: Path, config: Mapping[str, Any], provenance: Provenance) -> BaseModel:
    policy = config.get("finetuning", {}).get("policy") or {}
    name = str(policy.get("model") or (read_json(folder / ADAPTER_CONFIG) or {}).get("base_model_name_or_path") or "")
    held = find_base_source(folder, RUN)
    location, revision, license = (
        (held.location, held.revision, held.license) if held is not None else (name, None, None)
    )
    revision = revision or policy.get("revision") or provenance.versions.get(name)
    if license is None and name and not name.startswith("bundled:"):
        try:
            license = find_source(name, RUN).license
        except ConfigError:  # the package or the file is gone since the run
            license = None
    return BaseModel(name or location, location, revision, license or _read_card_license(location, revision))


def _read_card_license(location: str, revision: str | None) -> str | None:
    file: Any = Path(location) / "README.md"
    if not Path(location).is_dir():
        try:
            from huggingface_hub import try_to_load_from_cache

            file = try_to_load_from_cache(location, "README.md", revision=revision)
        except Exception:  # noqa: BLE001  no library, an odd name or cache: the license is unknown
            return None
    try:
        _, marker, rest = Path(file).read_text(encoding="utf-8").partition("---\n")
        front = parse_yaml(rest.partition("\n---")[0]).data if marker else None
    except (OSError, TypeError, ValueError):
        return None
    stated = front.get(LICENSE) if isinstance(front, dict) else None
    return stated if isinstance(stated, str) else None
