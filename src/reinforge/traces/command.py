"""`reinforge data import`: traces and chat logs as rows to train on."""

from __future__ import annotations

from pathlib import Path

import click

from reinforge.cli.exits import Command
from reinforge.cli.options import DATA, JSON, OUTPUT, GroupedOption, option, parse_output_file
from reinforge.cli.output import say, say_json, without_secrets
from reinforge.errors import did_you_mean
from reinforge.traces.chat_logs import COLUMNS
from reinforge.traces.importer import ImportOptions, import_traces, make_formats

FORMATS = [each.name for each in make_formats(ImportOptions())]


def _parse_columns(
    context: click.Context, parameter: click.Parameter, value: tuple[tuple[str, str], ...]
) -> dict[str, str]:
    for kind, _ in value:
        if kind not in COLUMNS:
            hint = did_you_mean(kind, COLUMNS) or ";"
            raise click.BadParameter(f'"{kind}"{hint} allowed: {", ".join(COLUMNS)}', context, parameter)
    return dict(value)


@click.command("import", cls=Command)
@click.argument("sources", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path), metavar="SOURCE...")
@option(
    "output",
    metavar="FILE",
    required=True,
    callback=parse_output_file,
    group=OUTPUT,
    help="JSONL file of rows to write.",
)
@option(
    "format", type=click.Choice(FORMATS), group=DATA, help="Format of the records; default: detected for each record."
)
@option(
    "label", metavar="NAME", group=DATA, help="Score that is a thumb; default: one with a usual name, such as thumbs."
)
@option("reward", metavar="NAME", group=DATA, help="Score that is the reward; default: one called reward or score.")
@click.option(
    "--column",
    "columns",
    cls=GroupedOption,
    group=DATA,
    nargs=2,
    multiple=True,
    metavar="WHAT NAME",
    callback=_parse_columns,
    help="Column of a chat log: prompt, completion, messages, role, content, conversation, id, time, system or tools. "
    "Repeatable; usual names are found without it.",
)
@option("rated", is_flag=True, group=OUTPUT, help="Leave out rows without a label and without a reward.")
@option("redact", is_flag=True, group=OUTPUT, help="Mask e-mail addresses and keys.")
@option("overwrite", is_flag=True, group=OUTPUT, help="Replace the output file.")
@JSON
def command(
    sources: tuple[Path, ...],
    output: Path,
    format: str | None,
    label: str | None,
    reward: str | None,
    columns: dict[str, str],
    rated: bool,
    redact: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write the conversations of traces and chat logs as rows to train on.

    Reads exports of Langfuse, LangSmith, OpenTelemetry GenAI and LiteLLM, and chat logs (OpenAI messages, ShareGPT,
    columns of CSV files), in JSON, JSONL, CSV or Parquet; a folder stands for all its files. Nothing is sent anywhere.
    What could not be read is listed by reason, count and line.

    \b
    Example:
      reinforge data import traces.jsonl scores.jsonl --output rows.jsonl
      reinforge data import chats.csv --output rows.jsonl --column prompt Frage --column completion Antwort
      reinforge data import export/ --output rows.jsonl --reward helpfulness --rated
    """
    if output.exists() and not overwrite:
        raise click.UsageError(f"{output} exists already; add --overwrite to replace it")
    options = ImportOptions(format, label, reward, columns, rated_only=rated, redact=redact)
    report = import_traces(sources, output, options)
    if as_json:
        say_json(without_secrets(report.as_dict()))
        return
    for line in report.format_lines():
        say(line)
    say(f"next: reinforge data validate {output}")
