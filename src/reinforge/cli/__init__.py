"""The command line, one file a command; a command's module is imported when the command is used."""

from __future__ import annotations

import importlib
import logging
import signal
from typing import Any

import click

from reinforge.version import __version__

COMMANDS = {
    "finetune": ("reinforge.cli.finetune", "Train the model behind an agent from a YAML file."),
    "train": ("reinforge.cli.finetune", "The same as finetune."),
    "check": ("reinforge.cli.check", "Check configuration, data, components and rewards without running."),
    "components": ("reinforge.cli.components", "List what a configuration may name, with fields and defaults."),
    "config": ("reinforge.cli.config", "Show a resolved configuration, or the schema of the file."),
    "eval": ("reinforge.cli.eval", "Evaluate an agent, as it is or with the model of a run, with intervals."),
    "chat": ("reinforge.cli.chat", "Talk to the model of a run or of a folder."),
    "runs": ("reinforge.cli.runs", "List runs, tell what happened to one, check its folder, or remove it."),
    "redteam": ("reinforge.cli.redteam", "Train an attacker against a target, and tell how the target fails."),
    "demo": ("reinforge.cli.demo", "Make the bundled agent better, on this machine's CPU, in minutes."),
}


class LazyGroup(click.Group):
    """Lists every command without importing any."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names in the order of the table above."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports one command."""
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(COMMANDS[cmd_name][0]).command

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command; Ctrl-C ends it with the code of a signal wherever it is, also before a run handles it."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise SystemExit(128 + signal.SIGINT) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the table without importing any command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Finds a command; a misspelt one is told its nearest."""
        from reinforge.errors import did_you_mean

        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            hint = did_you_mean(args[0], COMMANDS) or ";"
            ctx.fail(f'there is no command "{args[0]}"{hint} commands: {", ".join(COMMANDS)}')
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="reinforge")
def main() -> None:
    """Improves the model behind an LLM agent from the agent's own runs, and proves that it did.

    \b
    Example:
      reinforge demo
      reinforge finetune run.yml -o finetuning.num_epochs 20
    """
    # its lines say no more than "stamina.retry_scheduled"; a call that fails after every attempt says so itself
    logging.getLogger("stamina").setLevel(logging.ERROR)
