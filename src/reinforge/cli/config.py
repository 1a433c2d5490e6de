"""`reinforge config show FILE` and `reinforge config schema`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from reinforge.cli.report import DEBUG, JSON, OVERRIDE, existing_file, guarded


@click.group("config")
def command() -> None:
    """Show what a configuration file comes to, and what it may hold."""


@command.command("show")
@click.argument("file", callback=existing_file)
@click.option("--origin", "with_origin", is_flag=True, help="Say of each value whether file, -o or default set it.")
@OVERRIDE
@JSON
@DEBUG
def show(file: Path, with_origin: bool, overrides: tuple[tuple[str, str], ...], as_json: bool, debug: bool) -> None:
    """Show the resolved configuration: every default that takes effect, secrets as variables.

    \b
    Example:
      reinforge config show run.yml
      reinforge config show run.yml --origin -o finetuning.num_epochs 20
    """
    with guarded(as_json=as_json, debug=debug):
        from dataclasses import asdict

        import yaml

        from reinforge.config.dump import dump_config
        from reinforge.config.loader import load_config
        from reinforge.config.origin import settings_of

        loaded = load_config(file, overrides=overrides)
        if not with_origin:
            text = dump_config(loaded)
            click.echo(json.dumps(yaml.safe_load(text), ensure_ascii=False) if as_json else text, nl=as_json)
            return
        settings = settings_of(loaded)
        if as_json:
            click.echo(json.dumps([asdict(setting) for setting in settings], ensure_ascii=False))
            return
        width = max(len(setting.path) for setting in settings)
        for setting in settings:
            shown = json.dumps(setting.value, ensure_ascii=False)
            click.echo(
                f"{setting.path:<{width}}  {shown if len(shown) < 60 else shown[:57] + '...':<24}  {setting.origin}"
            )


@command.command("schema")
@JSON
@DEBUG
def schema(as_json: bool, debug: bool) -> None:
    """Write the JSON schema of a configuration file, registered components included.

    \b
    Example:
      reinforge config schema > reinforge.schema.json
    """
    with guarded(as_json=as_json, debug=debug):
        from reinforge.config.json_schema import config_schema
        from reinforge.registry import REGISTRY

        click.echo(json.dumps(config_schema(REGISTRY), indent=None if as_json else 2, ensure_ascii=False))
