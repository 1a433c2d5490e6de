"""`reinforge chat RUN|PATH`: talk to the result."""

from __future__ import annotations

import asyncio
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from reinforge.cli.report import DEBUG, guarded

if TYPE_CHECKING:
    from reinforge.interfaces import PolicyServer
    from reinforge.types.request import Message, SamplingParams

INTERRUPTED = 130
EXIT, RESET = "/exit", "/reset"


@click.command("chat", context_settings={"show_default": True})
@click.argument("model", metavar="RUN|PATH")
@click.option("--system", metavar="TEXT", help="What stands before the conversation.")
@click.option("--temperature", type=click.FloatRange(min=0), default=1.0, help="0 takes the most likely token.")
@click.option("--max_tokens", "--max-tokens", type=click.IntRange(min=1), default=256, help="Longest reply in tokens.")
@click.option("--seed", type=int, help="Makes replies repeatable.")
@click.option("--output_dir", "--output-dir", default="./.reinforge/runs", help="Folder of the run folders.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda", "mps"]), default="auto", help="Where it runs.")
@DEBUG
def command(
    model: str,
    system: str | None,
    temperature: float,
    max_tokens: int,
    seed: int | None,
    output_dir: str,
    device: str,
    debug: bool,
) -> None:
    """Talk to the model of a run, of a folder or of a hub id, in the terminal or through a pipe.

    Each line is one turn; /reset begins a new conversation, /exit or the end of the input ends it.

    \b
    Example:
      reinforge chat 20260101-120000-ab12
      echo "2 + 3?" | reinforge chat ./.reinforge/runs/r/model --temperature 0
    """
    with guarded(as_json=False, debug=debug):
        from reinforge.errors import ConfigError, Problem
        from reinforge.runs.saved_model import find_model
        from reinforge.types.request import SamplingParams

        found = find_model(model, Path(output_dir), "RUN|PATH")
        if found.adapters:
            message = f"{found.path} holds several adapters, {', '.join(found.adapters)}, and one can talk at a time"
            raise ConfigError(Problem("RUN|PATH", message, f"reinforge chat {found.path}/{found.adapters[0]}"))
        sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # a byte that is no text must not end the conversation
        click.echo(f"{found}: /reset begins anew, /exit ends", err=True)
        try:
            asyncio.run(_chat(found.path, device, system, sampling))
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None


async def _chat(path: str, device: str, system: str | None, sampling: SamplingParams) -> None:
    """Loads the model and answers line by line."""
    from reinforge.adapters.local import LocalAdapter, LocalAdapterConfig
    from reinforge.algorithms.grpo import GRPO, GRPOConfig
    from reinforge.config.schema import FinetuneConfig

    adapter = LocalAdapter(LocalAdapterConfig(), GRPO(GRPOConfig()))
    await adapter.initialize(FinetuneConfig.model_validate({"policy": {"model": path}, "device": device}))
    try:
        policy = adapter.policy()
        assert policy is not None  # the local adapter serves one once it is initialised
        await _talk(policy, [{"role": "system", "content": system}] if system else [], sampling)
    finally:
        await adapter.cleanup()


async def _talk(policy: PolicyServer, opening: list[Message], sampling: SamplingParams) -> None:
    from reinforge.interfaces import ContextOverflow
    from reinforge.rollout.threads import in_daemon_thread
    from reinforge.types.request import ModelRequest

    history = list(opening)
    while (line := await in_daemon_thread(_read_line, "chat-input")) is not None:
        if line.strip() == EXIT:
            return
        if line.strip() == RESET:
            history = list(opening)
        elif line.strip():
            asked: list[Message] = [*history, {"role": "user", "content": line}]
            try:
                reply = await policy.sample(ModelRequest(asked, sampling))
            except ContextOverflow as overflow:
                click.echo(f"{overflow}; {RESET} begins anew", err=True)
                continue
            history = [*asked, reply.message]
            click.echo(plain_text(str(reply.message.get("content") or "")))
            if reply.finish_reason == "length":
                click.echo(f"(cut at {reply.num_completion_tokens} tokens)", err=True)


def _read_line() -> str | None:
    """Returns the next line, or None at the input's end; a terminal is asked with a prompt."""
    if sys.stdin.isatty():
        try:
            return input("> ")
        except EOFError:
            return None
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None


def plain_text(text: str) -> str:
    """Returns text that cannot steer a terminal: `\x1b[31m` is shown as those characters, and so are bidi marks.

    Line breaks, tabs and the joiner inside emoji stay.
    """
    return "".join(c if c.isprintable() or c in "\n\t\u200d" else c.encode("unicode_escape").decode() for c in text)
