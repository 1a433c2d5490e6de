"""`reinforge config show FILE` and `reinforge config schema`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from reinforge.cli.exits import Command
from reinforge.cli.options import CONFIG_FILE, JSON, OVERRIDE, GroupedOption
from reinforge.cli.output import say, say_as_is, say_json


@click.group("config")
def command() -> None:
    """Show a resolved configuration, or the JSON schema of the file.

    \b
    Example:
      reinforge config show run.yml --origin
    """


@command.command("show", cls=Command, short_help="Print the resolved configuration, with all defaults.")
@CONFIG_FILE
@click.option(
    "--origin",
    "with_origin",
    cls=GroupedOption,
    is_flag=True,
    help="Print where each value is set: file, -o or default.",
)
@OVERRIDE
@JSON
def show(file: Path, with_origin: bool, overrides: tuple[tuple[str, str], ...], as_json: bool) -> None:
    """Print the resolved configuration: every value in effect, defaults included, with secrets as variables.

    \b
    Example:
      reinforge config show run.yml
      reinforge config show run.yml --origin -o finetuning.num_epochs 20
    """
    from dataclasses import asdict

    from reinforge.config.document import parse_yaml
    from reinforge.config.dump import dump_config, list_settings
    from reinforge.config.loader import load_config

    loaded = load_config(file, overrides=overrides)
    if not with_origin:
        text = dump_config(loaded)
        if as_json:
            say_json(parse_yaml(text).data)
        else:
            say_as_is(text, nl=False)
        return
    settings = list_settings(loaded)
    if as_json:
        say_json([asdict(setting) for setting in settings])
        return
    width = max(len(setting.path) for setting in settings)
    for setting in settings:
        value = json.dumps(setting.value, ensure_ascii=False)
        value = value if len(value) < 60 else f"{value[:57]}..."
        say(f"{setting.path:<{width}}  {value:<24}  {setting.origin}")


@command.command("schema", cls=Command, short_help="Print the JSON schema of a configuration file.")
@JSON
def schema(as_json: bool) -> None:
    """Print the JSON schema of a configuration file, with all registered components, for editors.

    \b
    Example:
      reinforge config schema > reinforge.schema.json
    """
    from reinforge.config.describe import build_config_schema
    from reinforge.registry import REGISTRY

    say_json(build_config_schema(REGISTRY), indent=None if as_json else 2)
