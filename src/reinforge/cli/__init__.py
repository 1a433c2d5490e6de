"""The command line, one file per command; the module of a command is imported when the command is used."""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from reinforge.adapters.launchers import LAUNCHERS, find_launcher
from reinforge.cli.output import say
from reinforge.cli.process import run_process
from reinforge.errors import ConfigError, did_you_mean
from reinforge.limits import get_limits
from reinforge.safe_text import CleanFormatter, to_printable
from reinforge.version import __version__

COMMANDS = {
    "demo": ("Start", "cli.demo", "demo", "Train the bundled agent on the CPU of this machine, in minutes."),
    "init": ("Start", "tasks.projects.command", "init my_agent", "Write a project that trains as it stands."),
    "data": ("Start", "cli.data", "data validate rows.jsonl", "Import logs as rows; validate and clean rows."),
    "check": ("Start", "cli.check", "check run.yml --sample 3", "Validate a run without starting it."),
    "preflight": ("Start", "cli.preflight", "preflight run.yml", "Predict whether training can help, and how long."),
    "finetune": ("Run", "cli.finetune", "finetune run.yml", "Train the model behind an agent, and judge it."),
    "train": ("Run", "cli.finetune", "train run.yml", "Alias of finetune."),
    "improve": ("Run", "improvement.command", "improve run.yml --hours 8", "Search for what makes an agent better."),
    "replace": ("Run", "traces.replace_command", "replace logs --model M", "Replace a large model that was recorded."),
    "learn": ("Run", "learning.command", "learn export .reinforge/serve", "Train on the chats of a server."),
    "redteam": ("Run", "redteam.command", "redteam train attack.yml", "Train an attacker against a target."),
    "environments": ("Run", "environments.command", "environments list", "List environments to train in; play one."),
    "view": ("Look", "view.command", "view", "Show all runs in the browser: live curves, every episode."),
    "watch": ("Look", "cli.watch", "watch last", "Follow a run in the terminal until it ends."),
    "runs": ("Look", "cli.runs", "runs show last", "List, show, compare, verify and remove runs."),
    "report": ("Look", "cli.report", "report last", "Write the HTML report of a run."),
    "eval": ("Judge", "cli.eval", "eval run.yml --model last", "Evaluate an agent, with its own model or a run's."),
    "reward": ("Judge", "cli.reward", "reward test run.yml", "Attack evaluators with answers worth nothing."),
    "chat": ("Serve", "cli.chat", "chat last", "Chat with the model of a run or of a folder."),
    "serve": ("Serve", "serving.command", "serve last", "Serve models over OpenAI's and Anthropic's APIs."),
    "versions": ("Serve", "serving.versions_command", "versions support", "List, add, promote and try versions."),
    "rollback": ("Serve", "serving.rollback_command", "rollback support", "Serve the version before the promoted one."),
    "export": ("Serve", "exports.command", "export last", "Write a model for transformers, vLLM, llama.cpp, Ollama."),
    "doctor": ("Maintain", "cli.doctor", "doctor", "Check the installation; a tiny model has to learn."),
    "env": ("Maintain", "cli.env", "env", "Print versions and machine for a bug report."),
    "config": ("Maintain", "cli.config", "config show run.yml", "Show a resolved configuration, or the JSON schema."),
    "components": ("Maintain", "cli.components", "components group", "List every `_type`, or the settings of one."),
}
"""Name -> what one wants with it (neighbors are listed together), module in `reinforge`, example, what it does."""
NEXT_STEPS = ["check", "preflight", "finetune", "improve"]


KEEP_RESULTS = {"finetune", "train", "demo", "replace"}
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
        return importlib.import_module(f"reinforge.{COMMANDS[cmd_name][1]}").command

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
        """Writes an example of each command, by what one wants, without importing them."""
        for title, commands in itertools.groupby(COMMANDS.values(), key=lambda entry: entry[0]):
            with formatter.section(title):
                formatter.write_dl([(example, text) for _, _, example, text in commands])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Finds a command; the error for a misspelled one suggests the nearest."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            hint = did_you_mean(args[0], COMMANDS) or ";"
            ctx.fail(f'unknown command "{args[0]}"{hint} allowed: {", ".join(COMMANDS)}')
        return super().resolve_command(ctx, args)


def format_next_steps(folder: Path) -> str:
    """Returns what can be done next in a folder with `run.yml` or a single configuration; empty: there is none."""
    from reinforge.runs.run_folder import list_runs, read_overview_of_any

    texts = {path.name: path.read_text("utf-8", "replace") for path in sorted(folder.glob("*.y*ml")) if path.is_file()}
    files = [name for name, text in texts.items() if re.search("^finetuning:", text, re.MULTILINE)]
    if not files or (len(files) > 1 and "run.yml" not in files):
        return ""
    file, runs = shlex.quote("run.yml" if "run.yml" in files else files[0]), list_runs(folder / ".reinforge" / "runs")
    formatter, names, rows = click.HelpFormatter(), NEXT_STEPS, list[tuple[str, str]]()
    if runs:
        last, names = read_overview_of_any(runs[-1]), ["runs", "view", "chat", *NEXT_STEPS]
        ended = last.status if last.summary is None else last.summary.headline()
        advice = f". Try: {last.summary.explanations[0].fix}" if last.summary and last.summary.explanations else ""
        formatter.write_text(f"The last run here, {last.folder.name}: {ended}{advice}.")
        rows = [(last.resume_command, "Resume it.")] if last.resume_command is not None else []
    chosen = [COMMANDS[name] for name in names]
    rows += [(f"reinforge {example.replace('run.yml', file)}", text) for _, _, example, text in chosen]
    with formatter.section("Next"):
        formatter.write_dl(rows)
    return f"{formatter.getvalue()}\nAll commands: reinforge --help"


@click.group(cls=LazyGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="reinforge")
@click.pass_context
def main(context: click.Context) -> None:
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
    if context.invoked_subcommand is None:
        say(format_next_steps(Path.cwd()) or context.get_help())
