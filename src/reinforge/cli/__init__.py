"""The command line, one file per command; the module of a command is imported when the command is used."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import click

from reinforge.adapters.launchers import LAUNCHERS, find_launcher
from reinforge.cli.process import run_process
from reinforge.errors import ConfigError, did_you_mean
from reinforge.limits import get_limits
from reinforge.safe_text import CleanFormatter, to_printable
from reinforge.version import __version__

COMMANDS = {
    "finetune": ("reinforge.cli.finetune", "Train the model behind an agent, as configured in a YAML file."),
    "train": ("reinforge.cli.finetune", "Alias of finetune."),
    "improve": ("reinforge.improvement.command", "Search, within a budget, for what makes an agent better."),
    "init": ("reinforge.tasks.projects.command", "Write a project that trains: agent, data, reward, run.yml, tests."),
    "data": ("reinforge.cli.data", "Import traces and chat logs as rows; validate, describe and clean rows."),
    "check": ("reinforge.cli.check", "Validate configuration, data and rewards without running."),
    "preflight": (
        "reinforge.cli.preflight",
        "Sample a little, and predict whether training can help and how long it takes.",
    ),
    "components": ("reinforge.cli.components", "List every `_type` that a configuration can use."),
    "config": ("reinforge.cli.config", "Show a resolved configuration, or the JSON schema of the file."),
    "eval": ("reinforge.cli.eval", "Evaluate an agent, with its own model or with that of a run."),
    "reward": ("reinforge.cli.reward", "Attack the evaluators of a file with answers that deserve no reward."),
    "chat": ("reinforge.cli.chat", "Chat with the model of a run or of a folder."),
    "serve": ("reinforge.serving.command", "Serve models over OpenAI's and Anthropic's APIs, and to a chat page."),
    "environments": ("reinforge.environments.command", "List environments to train in, or play an episode of one."),
    "export": ("reinforge.exports.command", "Write the model of a run for transformers, vLLM, llama.cpp and Ollama."),
    "runs": ("reinforge.cli.runs", "List runs, show what happened to one, compare two, verify or remove one."),
    "view": ("reinforge.view.command", "Show all runs in the browser: live curves, every episode, comparisons."),
    "watch": ("reinforge.cli.watch", "Follow a run in the terminal until it ends."),
    "report": ("reinforge.cli.report", "Write the HTML report of a run: curves, verdict, episodes, settings."),
    "redteam": ("reinforge.redteam.command", "Train an attacker against a target, and report how the target fails."),
    "env": ("reinforge.cli.env", "Print versions and machine for a bug report."),
    "doctor": ("reinforge.cli.doctor", "Check the installation, and that a tiny model learns on this machine."),
    "demo": ("reinforge.cli.demo", "Train the bundled agent on the CPU of this machine, in minutes."),
}


KEEP_RESULTS = {"finetune", "train", "demo"}
"""Commands whose results are in the run folder, whatever happens to what they print."""


def choose_work(command: Callable[[], Any]) -> Callable[[], Any]:
    """Returns the command; in a process of torchrun other than the first, what holds an engine for that one."""
    if LAUNCHERS.keys().isdisjoint(os.environ):
        return command
    from reinforge.cli.exits import exit_on_error

    def work() -> None:
        with exit_on_error(as_json=False, debug=False):
            launcher = find_launcher()
            serve = None if launcher is None else launcher.get_first_process_server()
        if serve is None:
            try:
                command()
            finally:
                if launcher is not None:
                    launcher.close()
            return
        with exit_on_error(as_json=False, debug=False):
            serve()

    return work


class LazyGroup(click.Group):
    """Lists all commands without importing them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("args")
        given = sys.argv[1:] if given is None else given
        work = choose_work(lambda: self.main(*args, **kwargs))
        run_process(work, keeps_results=bool(KEEP_RESULTS.intersection(given[:1])))

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(COMMANDS[cmd_name][0]).command

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command; Ctrl-C exits with the code of a signal at any time, also before a run handles signals."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise SystemExit(128 + signal.SIGINT) from None
        except click.ClickException as error:  # names a file or a run, which may hold control characters
            vars(error)["message"] = to_printable(error.message)
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Finds a command; the error for a misspelled one suggests the nearest."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            hint = did_you_mean(args[0], COMMANDS) or ";"
            ctx.fail(f'unknown command "{args[0]}"{hint} allowed: {", ".join(COMMANDS)}')
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="reinforge")
def main() -> None:
    """Improve the model behind an LLM agent from the agent's own runs, and measure the improvement.

    \b
    Example:
      reinforge demo
      reinforge finetune run.yml -o finetuning.num_epochs 20
    """
    try:
        get_limits()
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    # stamina logs only "stamina.retry_scheduled"; our own error reports a call that failed after its last attempt
    logging.getLogger("stamina").setLevel(logging.ERROR)
    if logging.lastResort is not None:  # writes warnings to standard error
        logging.lastResort.setFormatter(CleanFormatter())
