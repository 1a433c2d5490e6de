"""`reinforge export RUN`: the model of a run for transformers, vLLM, llama.cpp and Ollama."""

from __future__ import annotations

from typing import Any

import click

from reinforge.cli.exits import Command
from reinforge.cli.options import COMPAT, DATA, JSON, OUTPUT, GroupedOption, option
from reinforge.cli.output import say, say_json, without_secrets

JUDGE = "Judging"
HUB = "Hugging Face hub"


@click.command("export", cls=Command, context_settings={"show_default": True})
@click.argument("run", metavar="RUN|last")
@option(
    "format",
    type=click.Choice(["merged", "peft", "gguf"]),
    default="merged",
    group=OUTPUT,
    help="merged: a folder for transformers and vLLM; peft: the LoRA adapter; gguf: a file for llama.cpp and Ollama.",
)
@option("output", metavar="FOLDER", group=OUTPUT, help="Folder to write; default: .reinforge/exports/RUN-FORMAT.")
@option(
    "quantize",
    type=click.Choice(["f32", "f16", "bf16", "q8_0", "q4_k_m"]),
    group=OUTPUT,
    help="How a GGUF file stores matrices; default: in the data type of the training.",
)
@option(
    "dtype",
    type=click.Choice(["float32", "bfloat16"]),
    group=OUTPUT,
    help="Data type of a merged model; default: that of the training.",
)
@option("adapter", metavar="NAME", group=OUTPUT, help="Which adapter, of a run that trained several.")
@option("base_model", metavar="NAME", group=OUTPUT, help="Name that an adapter gives its base, such as its hub id.")
@click.option(
    "--judge/--no_judge",
    " /--no-judge",
    default=True,
    cls=GroupedOption,
    group=JUDGE,
    help="Run the exported model on the confirm examples, and compare its tokens with those of the run's model.",
)
@option(
    "judge_with",
    type=click.Choice(["auto", "transformers", "llama.cpp"]),
    default="auto",
    group=JUDGE,
    help="What runs it; auto: llama.cpp for a GGUF file if llama-cpp-python is installed, else transformers.",
)
@option("device", type=click.Choice(["auto", "cpu", "cuda", "mps"]), default="auto", group=JUDGE, help="Device.")
@option(
    "project_root",
    metavar="FOLDER",
    group=JUDGE,
    help="For a run from elsewhere: the folder of its Python files, if you trust them.",
)
@option("push", metavar="OWNER/NAME", group=HUB, help="Upload the folder; HF_TOKEN or `hf auth login` has the token.")
@option("public", is_flag=True, group=HUB, help="Make a new repository public.")
@option("allow_not_promoted", is_flag=True, group=HUB, help="Upload a model that the run did not promote.")
@option("output_dir", metavar="FOLDER", default="./.reinforge/runs", group=DATA, help="Folder that contains the runs.")
@COMPAT
@JSON
def command(run: str, public: bool, as_json: bool, **options: Any) -> None:
    """Write the model of a run for other programs, with a model card, and judge it again.

    The folder appears complete or not at all; the run is only read. Judging runs the run's agent on its confirm
    examples through the exported model, so that the card has the score of what you ship.

    \b
    Example:
      reinforge export last
      reinforge export last --format gguf --quantize q8_0
      reinforge export 20260101-120000-ab12 --format peft --base_model Qwen/Qwen3-0.6B --push me/my-adapter
    """
    from reinforge.runs.progress import open_progress

    with open_progress(silent=as_json) as progress:
        from reinforge.exports.api import export

        done = export(run, private=not public, progress=progress, **options)
    if as_json:
        say_json(without_secrets(done.as_dict()))
        return
    for name, text in done.format_lines():
        say(f"  {name:<12}{text}")
