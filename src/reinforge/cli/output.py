"""What the command line writes. Every command writes through here, so that no untrusted text controls the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from reinforge.safe_text import redact_secrets, to_printable


def say(text: str = "", *, err: bool = False) -> None:
    """Writes text without control characters and secrets: names, reasons and replies may contain anything."""
    click.echo(to_printable(text), err=err)


def say_as_is(text: str, *, nl: bool = True) -> None:
    """Writes text that is clean already: a resolved configuration, or a line whose parts were cleaned, then styled."""
    click.echo(text, nl=nl)


def say_table(rows: Sequence[Sequence[str]]) -> None:
    """Writes rows whose columns are aligned; the first row is the header."""
    shown = [tuple(map(to_printable, row)) for row in rows]
    widths = [max(len(row[column]) for row in shown) for column in range(len(shown[0]))]
    for row in shown:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def say_json(value: Any, indent: int | None = None) -> None:
    """Writes one JSON value in ASCII, in which control characters are escapes."""
    click.echo(json.dumps(value, indent=indent))


def without_secrets(value: Any) -> Any:
    if isinstance(value, str):
        return redact_secrets(value)
    if isinstance(value, dict):
        return {key: without_secrets(item) for key, item in value.items()}
    return [without_secrets(item) for item in value] if isinstance(value, list | tuple) else value
