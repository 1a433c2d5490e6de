"""`reinforge config show FILE`, `reinforge config schema` and `reinforge components`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from reinforge.cli.options import CONFIG_FILE, JSON, OVERRIDE, GroupedOption
from reinforge.cli.output import say, say_as_is, say_json
from reinforge.cli.report import Command
from reinforge.errors import did_you_mean


@click.group("config")
def config_command() -> None:
    """Show a resolved configuration, or the JSON schema of the file.

    \b
    Example:
      reinforge config show run.yml --origin
    """


@config_command.command("show", cls=Command, short_help="Print the resolved configuration, with all defaults.")
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

    import yaml

    from reinforge.config.dump import dump_config, list_settings
    from reinforge.config.loader import load_config

    loaded = load_config(file, overrides=overrides)
    if not with_origin:
        text = dump_config(loaded)
        if as_json:
            say_json(yaml.safe_load(text))
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


@config_command.command("schema", cls=Command, short_help="Print the JSON schema of a configuration file.")
@JSON
def schema(as_json: bool) -> None:
    """Print the JSON schema of a configuration file, with all registered components, for editors.

    \b
    Example:
      reinforge config schema > reinforge.schema.json
    """
    from reinforge.config.json_schema import build_config_schema
    from reinforge.registry import REGISTRY

    say_json(build_config_schema(REGISTRY), indent=None if as_json else 2)


@click.command("components", cls=Command)
@click.argument("kind", required=False)
@JSON
def components_command(kind: str | None, as_json: bool) -> None:
    """List every `_type` that a configuration can use, with its settings, their defaults, and its module.

    KIND is one of llm, workflow, dataset, evaluator, trajectory_builder, trainer_adapter, trainer, algorithm, model.
    The kind `model` lists the bundled models, which are named like `bundled:tickets`.
    Plugins that failed to import are listed with their error.

    \b
    Example:
      reinforge components
      reinforge components evaluator
      reinforge components model
    """
    from reinforge.registry import KINDS, REGISTRY

    if kind is not None and kind not in KINDS:
        hint = did_you_mean(kind, KINDS) or ";"
        raise click.UsageError(f'unknown kind "{kind}"{hint} allowed: {", ".join(KINDS)}')
    listed = [_describe_component(component) for component in REGISTRY.components(kind)]
    errors = REGISTRY.plugin_errors()
    if as_json:
        say_json({"components": listed, "plugin_errors": errors})
        return
    last = ""
    for component in listed:
        if component["kind"] != last:
            last = component["kind"]
            say_as_is(("" if component is listed[0] else "\n") + click.style(last, bold=True))
        what = "  (a protocol)" if component["is_protocol"] else ""
        say(f"  {component['written']:<28} {component['origin']}{what}")
        if component["kind"] == "model":  # has no settings
            say(f"      {component['description']}")
        for line in component["fields"]:
            default = "required" if line["default"] is None else _first_line(str(line["default"]))
            say(f"      {line['path']} = {default}   {line['description']}")
    for name, why in errors.items():
        say(f'plugin "{name}" failed to import: {why}', err=True)


def _describe_component(component: Any) -> dict[str, Any]:
    from dataclasses import asdict

    from reinforge.config.describe import iterate_fields
    from reinforge.multiagent.protocol import DialogueConfig
    from reinforge.runs.saved_model import BUNDLED

    return {
        "kind": component.kind,
        "name": component.name,
        "written": f"{BUNDLED}{component.name}" if component.kind == "model" else component.name,
        "description": _first_line(component.config_type.__doc__ or ""),
        "origin": component.origin,
        "config_type": component.config_type.__name__,
        "is_protocol": issubclass(component.config_type, DialogueConfig),
        "fields": [asdict(line) for line in iterate_fields(component.config_type)],
    }


def _first_line(text: str) -> str:
    """Returns the first line of a default; the JSON schema has multi-line prompts in full."""
    first, *rest = text.splitlines() or [""]
    return f"{first} …" if rest else first
