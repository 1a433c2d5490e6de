"""The model card of an export: `README.md` with what was trained, how much better it is, and how to run it.

What a user, a model or a service wrote is escaped: a card is shown as HTML on the hub.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from reinforge.evaluation.statistics import Improvement, format_interval
from reinforge.exports.artifact import MODELFILE, Artifact, Format
from reinforge.exports.judge import Judgement
from reinforge.exports.trained_model import TrainedModel
from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.saved_model import BUNDLED
from reinforge.safe_text import escape_markdown, redact_secrets
from reinforge.types.evaluation import MetricSummary, count_examples

CARD = "README.md"
UNKNOWN = "unknown"
SETTINGS = (
    ("num_epochs", "num_epochs"),
    ("algorithm", "algorithm._type"),
    ("LoRA rank", "policy.lora.r"),
    ("learning rate", "policy.optimizer.learning_rate"),
    ("seed", "seed"),
)
"""Name and path below `finetuning` of the settings in a card."""
GGUF_USAGE = """{how}

```
llama-server -m {file} --jinja        # http://127.0.0.1:8080/v1, OpenAI's API
ollama create {name} -f {modelfile} && ollama run {name}
```"""
USAGE = """{how}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModelForCausalLM.from_pretrained("FOLDER"){hint}
prompt = tokenizer.apply_chat_template([{{"role": "user", "content": "..."}}], add_generation_prompt=True, \
return_tensors="pt", return_dict=True)
reply = model.generate(**prompt, max_new_tokens=256, do_sample={sampling})
```

```
vllm serve {serve}
```"""


def format_card(model: TrainedModel, artifact: Artifact, kind: Format, judgement: Judgement | None) -> str:
    sections = [
        _format_front_matter(model, artifact, kind),
        f"# {escape_markdown(model.name)}",
        _describe(model, artifact, kind),
        "## Is it better?",
        _format_verdict(model),
        "## This file, judged again",
        _format_judgement(judgement),
        "## Run it",
        _format_usage(model, artifact, kind),
        "## Training",
        _format_table(("", ""), _list_training(model, artifact)),
        "Versions: "
        + ", ".join(f"{name} {escape_markdown(each)}" for name, each in model.list_versions().items())
        + ".",
    ]
    return redact_secrets("\n\n".join(sections) + "\n")


def _format_front_matter(model: TrainedModel, artifact: Artifact, kind: Format) -> str:
    library = {"merged": "transformers", "peft": "peft", "gguf": "gguf"}[kind]
    front: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation", "tags": ["reinforge", kind]}
    base = artifact.base
    if base.is_portable and "/" in base.location and ":" not in base.location:
        front["base_model"] = base.location
    if base.license:
        front["license"] = base.license.lower() if " " not in base.license else "other"
    return f"---\n{yaml.safe_dump(front, sort_keys=True, allow_unicode=False).rstrip()}\n---"


def _describe(model: TrainedModel, artifact: Artifact, kind: Format) -> str:
    merged = ", with the trained adapters merged into the base" if model.is_adapter else ""
    what = {
        "merged": f"A whole model ({artifact.storage}){merged}",
        "peft": "A LoRA adapter in PEFT's layout",
        "gguf": f"A GGUF file ({artifact.storage}) for llama.cpp and Ollama",
    }[kind]
    base, name = artifact.base, model.base.name
    name = escape_markdown(Path(name).name if Path(name).exists() else name)
    revision = f", revision {escape_markdown(base.revision)}" if base.revision else ""
    license = f"license {escape_markdown(base.license)}" if base.license else "license unknown: see the base model"
    if model.base.name.startswith(BUNDLED):
        license = "a small model that reinforge makes itself"
    lines = [
        f"{what}, trained from {name}{revision} ({license}) by the agent's own runs with reinforge. "
        f"It is {escape_markdown(model.description or 'the model of the run')}.",
        *artifact.notes,
    ]
    if model.has_value_head:
        lines.append("The value head of the training is not part of it.")
    return " ".join(lines)


def _format_verdict(model: TrainedModel) -> str:
    summary = model.summary
    verdict = {True: "yes", False: "no", None: "no verdict"}[summary.promoted]
    text = f"Promoted: **{verdict}**. {escape_markdown(summary.reason)}"
    before, after = summary.confirm_base, summary.confirm_tuned
    split = "confirm: held out from training and model selection"
    if before is None or after is None:
        before, after, split = summary.baseline, summary.best or summary.final, "select: it chose the checkpoint"
    rows = [("base model", *_format_figure(before)), ("trained model", *_format_figure(after))]
    if summary.improvement is not None:
        rows.append(("difference", escape_markdown(str(summary.improvement)), _count(summary.improvement)))
    metric = after.metric if after is not None else "score"
    table = _format_table((split, f"{metric}, 95 % interval", "examples"), rows)
    others = [str(change) for change in summary.evaluators if change.metric != metric]
    notes = [
        *(f"- {escape_markdown(each)}" for each in others),
        *(f"- **{escape_markdown(w)}**" for w in summary.warnings),
    ]
    return "\n\n".join([text, table, *(["\n".join(notes)] if notes else [])])


def _format_figure(summary: MetricSummary | None) -> tuple[str, str]:
    if summary is None:
        return UNKNOWN, ""
    return format_interval(summary.mean, summary.ci_low, summary.ci_high), _count(summary)


def _count(figure: MetricSummary | Improvement) -> str:
    count = figure.num_examples if isinstance(figure, MetricSummary) else figure.num_pairs
    return count_examples(count, figure.num_clusters).replace(" examples", "", 1)


def _format_judgement(judgement: Judgement | None) -> str:
    if judgement is None:
        return "Not judged: exported with `--no_judge`."
    rows: list[tuple[str, ...]] = []
    if judgement.run_figure is not None:
        rows.append(("in the run", *_format_figure(judgement.run_figure)))
    if judgement.figure is not None:
        rows.append(("this export", *_format_figure(judgement.figure)))
    if judgement.difference is not None:
        rows.append(("difference", str(judgement.difference), _count(judgement.difference)))
    parts = [f"Run by {escape_markdown(judgement.program)}, not by the program that trained it."]
    if judgement.parity is not None:
        parts.append(f"{str(judgement.parity)[0].upper()}{str(judgement.parity)[1:]}.")
    if rows:
        metric = (judgement.figure or judgement.run_figure).metric  # type: ignore[union-attr]  # one of them made a row
        parts.append(_format_table(("confirm, fresh samples", f"{metric}, 95 % interval", "examples"), rows))
    if judgement.note:
        parts.append(f"Not measured: {escape_markdown(judgement.note)}")
    return "\n\n".join(parts)


def _format_usage(model: TrainedModel, artifact: Artifact, kind: Format) -> str:
    sampling = model.sampling
    how = (
        f"It was trained and measured at temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, "
        f"top_k {sampling.top_k}, min_p {sampling.min_p:g}."
    )
    if kind == "gguf":
        return GGUF_USAGE.format(how=how, file=artifact.path.name, name=model.name.lower(), modelfile=MODELFILE)
    filters = f", temperature={sampling.temperature:g}, top_p={sampling.top_p:g}, top_k={sampling.top_k}"
    where = "`generate` and vLLM read this from `generation_config.json`."
    return USAGE.format(
        how=f"{how} {where if kind == 'merged' else 'Pass this to `generate`.'}",
        hint="   # with peft installed it loads the base, too" if kind == "peft" else "",
        sampling=f"{sampling.temperature > 0}{filters if sampling.temperature else ''}",
        serve="BASE --enable-lora --lora-modules trained=FOLDER" if kind == "peft" else "FOLDER",
    )


def _list_training(model: TrainedModel, artifact: Artifact) -> list[tuple[str, str]]:
    config, summary, settings = model.config, model.summary, model.settings
    evaluation = config.get("eval") or {}
    dataset = (evaluation.get("general") or {}).get("dataset") or {}
    held = [summary.baseline.num_examples if summary.baseline else None]
    held.append(summary.confirm_tuned.num_examples if summary.confirm_tuned else None)
    counts = zip(
        ("train", "select", "confirm"), (JournalReader(model.run).count_examples("collect"), *held), strict=True
    )
    source = Path(str(dataset.get("file_path"))).name if dataset.get("file_path") else dataset.get("_type", UNKNOWN)
    rows = [
        ("agent", _describe_component(config.get("workflow"))),
        ("data", f"{source}: " + ", ".join(f"{count} {name}" for name, count in counts if count is not None)),
        (
            "evaluators",
            ", ".join(
                f"{name} ({_describe_component(each)})" for name, each in (evaluation.get("evaluators") or {}).items()
            ),
        ),
        *((name, str(value)) for name, path in SETTINGS if (value := _find(settings, path)) is not None),
        ("history", f"{model.history}: how earlier replies of a conversation reached the model"),
        ("data type", f"trained in {model.dtype}, stored as {artifact.storage}"),
        ("optimizer steps", UNKNOWN if summary.num_updates is None else f"{summary.num_updates:,}"),
        ("tokens", ", ".join(f"{count:,} {name}" for name, count in summary.tokens.items()) or UNKNOWN),
        ("configuration", f"SHA-256 {summary.config_sha256}" if summary.config_sha256 else UNKNOWN),
    ]
    return rows


def _describe_component(block: Any) -> str:
    if not isinstance(block, Mapping):
        return UNKNOWN
    named = next((block[key] for key in ("function", "protocol") if isinstance(block.get(key), str)), None)
    kind = str(block.get("_type", UNKNOWN))
    return f"{kind} {Path(str(named)).name}" if named else kind


def _find(settings: Mapping[str, Any], path: str) -> Any:
    found: Any = settings
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, *rows]
    cells = [f"| {' | '.join(escape_markdown(str(cell)) for cell in line)} |" for line in lines]
    return "\n".join([cells[0], f"|{'---|' * len(header)}", *cells[1:]])
