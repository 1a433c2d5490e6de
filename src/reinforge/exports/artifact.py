"""Writes a run's model in one of three formats into a folder that does not matter yet if it fails."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from reinforge.config.finetuning_blocks import SamplingConfig
from reinforge.config.policy import PolicyConfig
from reinforge.engine.model.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG, read_json
from reinforge.engine.model.source import find_source, open_source
from reinforge.engine.packages import check_packages
from reinforge.errors import BackendError, ConfigError, Problem
from reinforge.exports.trained_model import RUN, BaseModel, TrainedModel
from reinforge.files import MANIFEST
from reinforge.types.request import Message

Format = Literal["merged", "peft", "gguf"]
FORMATS: tuple[Format, ...] = ("merged", "peft", "gguf")
QUANTIZATIONS = ("f32", "f16", "bf16", "q8_0", "q4_k_m")
MODELFILE = "Modelfile"
QUANTIZER = "llama-quantize"
INSTALL_QUANTIZER = "brew install llama.cpp, or download a release of llama.cpp, and put llama-quantize on the PATH"
QUANTIZE_S = 3600


@dataclass(frozen=True, slots=True)
class ArtifactOptions:
    format: Format
    dtype: str | None = None  # of a merged model: `float32` or `bfloat16`; None: that of the training
    quantize: str | None = None  # how a GGUF file stores matrices; None: in the data type of the training
    base_model: str | None = None  # name to write into an adapter as that of its base; None: as the run knows it


@dataclass(frozen=True, slots=True)
class Artifact:
    path: Path  # what a program loads: the folder, or the GGUF file
    storage: str  # how the weights are stored: a data type or a quantization
    base: BaseModel  # as the artifact names it
    notes: tuple[str, ...] = ()  # what to know about it, one sentence each


def check_options(model: TrainedModel, options: ArtifactOptions) -> list[Problem]:
    """Returns why a model cannot be written like this, before any work starts."""
    problems = [Problem("", each.message, each.fix) for each in check_packages(lora=model.is_adapter)]
    if options.format == "peft" and not model.is_adapter:
        message = f"{model.run} trained all weights of the model, so there is no adapter"
        problems.append(Problem("--format peft", message, "use --format merged"))
    if options.quantize is not None and options.format != "gguf":
        problems.append(Problem("--quantize", f"only GGUF files are quantized, not {options.format}", "--format gguf"))
    if options.dtype is not None and options.format != "merged":
        fix = "use --quantize f16, bf16 or f32" if options.format == "gguf" else "leave it out"
        problems.append(Problem("--dtype", f"it is for --format merged, not {options.format}", fix))
    if options.base_model is not None and options.format != "peft":
        problems.append(Problem("--base_model", "only an adapter names its base", "leave it out, or use --format peft"))
    if options.format != "gguf" or problems:
        return problems
    from reinforge.engine.model.loading import load_tokenizer
    from reinforge.exports.gguf.file import check_architecture, check_gguf_package, check_tokenizer

    if options.quantize == "q4_k_m" and shutil.which(QUANTIZER) is None:
        message = f"q4_k_m is written by llama.cpp's own {QUANTIZER}, which is not on the PATH"
        problems.append(Problem("--quantize", message, f"{INSTALL_QUANTIZER}; or use --quantize q8_0"))
    config = _read_base_config(model)
    problems += [*check_gguf_package(), *(check_architecture(SimpleNamespace(**config)) if config else [])]
    return problems or check_tokenizer(load_tokenizer(PolicyConfig(model=str(model.folder))))


def _read_base_config(model: TrainedModel) -> dict[str, Any] | None:
    if not model.is_adapter:
        return read_json(model.folder / CONFIG)
    folder = Path(model.base.location)
    return read_json(folder / CONFIG) if folder.is_dir() else None


def write_artifact(model: TrainedModel, options: ArtifactOptions, folder: Path) -> Artifact:
    if options.format == "peft":
        return _write_adapter(model, options, folder)
    from reinforge.engine.model.loading import load_tokenizer
    from reinforge.exports.merging import load_merged, save_model, set_sampling

    module, tokenizer = load_merged(model.folder), load_tokenizer(PolicyConfig(model=str(model.folder)))
    set_sampling(module, model.sampling)
    if options.format == "merged":
        dtype = options.dtype or model.dtype
        save_model(module, tokenizer, folder, dtype)
        return Artifact(folder, dtype, model.base)
    return _write_gguf(model, options, folder, module, tokenizer)


def _write_adapter(model: TrainedModel, options: ArtifactOptions, folder: Path) -> Artifact:
    from reinforge.exports.merging import name_base

    kept = shutil.ignore_patterns("training", MANIFEST)
    shutil.copytree(model.folder, folder, ignore=kept, dirs_exist_ok=True)
    if not (folder / ADAPTER_WEIGHTS).is_file() or not (folder / ADAPTER_CONFIG).is_file():
        raise ConfigError(Problem(RUN, f"{model.folder} holds no adapter in PEFT's layout", "use --format merged"))
    named = options.base_model
    base = BaseModel(named, named, None, model.base.license) if named else _open_base(model)
    name_base(folder, base.location, base.revision)
    notes = () if base.is_portable else ("The base model is a folder of the machine that exported it.",)
    return Artifact(folder, model.dtype, base, notes)


def _open_base(model: TrainedModel) -> BaseModel:
    base = model.base
    if base.is_portable and not base.location.startswith("pip:"):
        return base
    opened = open_source(find_source(base.location, RUN), RUN)
    return BaseModel(base.name, str(Path(opened.location).absolute()), opened.revision, base.license)


def _write_gguf(model: TrainedModel, options: ArtifactOptions, folder: Path, module: Any, tokenizer: Any) -> Artifact:
    from reinforge.engine.prompts.chat_template import PromptRenderer
    from reinforge.exports.gguf.file import GgufSettings, find_context_length, write_gguf
    from reinforge.types.request import ModelRequest

    storage = options.quantize or ("f32" if model.dtype == "float32" else "bf16")
    direct = "f32" if storage == "q4_k_m" else storage
    file = folder / f"{model.name}-{storage}.gguf"
    written = folder / f"{model.name}-{direct}.gguf"
    name = model.base.name if not Path(model.base.name).exists() else Path(model.base.name).name
    settings = GgufSettings(direct, model.name, model.sampling, model.base.license, name)
    vocabulary = write_gguf(written, module, tokenizer, settings)
    if file != written:
        _run_quantizer(written, file, storage)
        written.unlink()
    renderer = PromptRenderer(tokenizer)

    def render(messages: Any, with_prompt: bool) -> str:
        given: list[Message] = list(messages)
        return renderer._render_text(ModelRequest(given), given, add_generation_prompt=with_prompt)

    blocks, ends = find_blocks(render), [tokenizer.decode([token]) for token in vocabulary.ends]
    (folder / MODELFILE).write_text(format_modelfile(file.name, model.sampling, ends, blocks), encoding="utf-8")
    notes = []
    if find_context_length(module.config) < module.config.max_position_embeddings:
        notes.append(
            "llama.cpp attends to the whole context, so the file's context length is the model's sliding window."
        )
    if blocks is None:
        notes.append("Ollama's template language cannot express the chat template: see the Modelfile.")
    return Artifact(file, storage, model.base, tuple(notes))


def _run_quantizer(source: Path, target: Path, storage: str) -> None:
    program = shutil.which(QUANTIZER)
    assert program is not None  # check_options has looked
    command = [program, str(source), str(target), storage.upper()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUANTIZE_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise BackendError(f"{QUANTIZER} cannot run: {error}") from error
    if done.returncode or not target.is_file():
        tail = " ".join((done.stderr or done.stdout).split())[-300:]
        raise BackendError(f"{QUANTIZER} failed with exit code {done.returncode}: {tail}")


Render = Callable[[Sequence[Message], bool], str]
"""Renders messages by the chat template; True: with the generation prompt."""

MARK = "\u241fcontent\u241f"  # stands for a message's content; no template writes it itself


@dataclass(frozen=True, slots=True)
class BlockTemplate:
    """A chat template that writes each message by itself, so that an Ollama `Modelfile` can hold it.

    Ollama reads no Jinja. It knows templates of its own for a few families, and for any other model it sends the bare
    prompt. So the template is rewritten in Ollama's language where it is a sequence of blocks, one a message:

        <|user|>2+3?<|end|><|assistant|>
        =>  {{ if eq .Role "user" }}<|user|>{{ .Content }}<|end|>{{ end }} ... <|assistant|>

    The result is checked: rendered over several conversations it must give the text of the Jinja template.
    """

    start: str  # text before everything
    default: str  # text for a conversation without a system message, such as a default one
    blocks: dict[str, tuple[str, str]]  # role -> text before and after the content
    prompt: str  # the generation prompt

    def render(self, messages: Sequence[Message]) -> str:
        has_system = any(message["role"] == "system" for message in messages)
        parts = [self.start, "" if has_system else self.default]
        for message in messages:
            before, after = self.blocks[message["role"]]
            parts += [before, message["content"], after]
        return "".join([*parts, self.prompt])

    def format(self) -> str:
        """Returns it in the language of Ollama's templates (Go's text/template)."""
        default = f"{{{{ if not .System }}}}{self.default}{{{{ end }}}}" if self.default else ""
        branches = [
            f'{{{{ if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}{{{{ end }}}}'
            for role, (before, after) in self.blocks.items()
        ]
        return f"{self.start}{default}{{{{ range .Messages }}}}{''.join(branches)}{{{{ end }}}}{self.prompt}"


def find_blocks(render: Render) -> BlockTemplate | None:
    """Returns a chat template as blocks; None: it is not a sequence of them, or Ollama's language cannot hold it."""
    try:
        found = _split(render)
        if found is None or any("{{" in part or '"""' in part for part in _list_texts(found)):
            return None
        conversations: list[list[Message]] = [
            [{"role": role, "content": f"{role} {index}\n {{}}"} for index, role in enumerate(roles.split())]
            for roles in ("user", "system user", "user assistant user", "system user assistant user assistant user")
        ]
        return found if all(found.render(each) == render(each, True) for each in conversations) else None
    except Exception:  # noqa: BLE001  a template may raise anything, for example for a role that it does not know
        return None


def _split(render: Render) -> BlockTemplate | None:
    """Returns the blocks that the template shows in conversations of one to three messages."""
    user, system, reply = ({"role": role, "content": MARK} for role in ("user", "system", "assistant"))
    alone, prompted, pair = render([user], False), render([user], True), render([system, user], False)
    turns, longer = render([user, reply], False), render([user, reply, user], False)
    counts = [text.count(MARK) for text in (alone, pair, turns, longer)]
    if counts != [1, 2, 2, 3] or not prompted.startswith(alone) or not longer.startswith(turns):
        return None
    before, after_user = alone.split(MARK)
    _, before_reply, after_reply = turns.split(MARK)
    own = longer.removeprefix(turns).split(MARK)[0]
    before_system, between, _ = pair.split(MARK)
    opening = before.removesuffix(own)
    has_default = not before_system.startswith(opening)  # else it comes before a system message, too, as BOS does
    blocks = {
        "system": (before_system if has_default else before_system.removeprefix(opening), between.removesuffix(own)),
        "user": (own, after_user),
        "assistant": (before_reply.removeprefix(after_user), after_reply),
    }
    start, default = ("", opening) if has_default else (opening, "")
    return BlockTemplate(start, default, blocks, prompted.removeprefix(alone))


def _list_texts(found: BlockTemplate) -> list[str]:
    return [found.start, found.default, found.prompt, *(text for pair in found.blocks.values() for text in pair)]


def format_modelfile(file: str, sampling: SamplingConfig, ends: Sequence[str], template: BlockTemplate | None) -> str:
    """Returns a Modelfile for a GGUF file beside it; without a template, it says how to choose one."""
    lines = ["# ollama create NAME -f Modelfile", f"FROM ./{file}"]
    if template is not None:
        lines.append(f'TEMPLATE """{template.format()}"""')
    else:
        lines += [
            "# The chat template cannot be written in Ollama's language. Ollama picks one by the model's family:",
            "# compare `ollama show --template NAME` with the file's chat template, or use llama-server --jinja.",
        ]
    lines += [f"PARAMETER stop {json.dumps(end, ensure_ascii=False)}" for end in ends]
    values = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    lines += [f"PARAMETER {name} {value:g}" for name, value in {**values, "min_p": sampling.min_p}.items()]
    return "\n".join([*lines, "PARAMETER repeat_penalty 1", ""])
