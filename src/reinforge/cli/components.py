"""`reinforge components [KIND]`: lists every `_type`, with its settings, defaults and module."""

from __future__ import annotations

import json
from typing import Any

import click

from reinforge.cli.options import DEBUG, JSON, GroupedCommand
from reinforge.cli.report import exit_on_error


@click.command("components", cls=GroupedCommand)
@click.argument("kind", required=False)
@JSON
@DEBUG
def command(kind: str | None, as_json: bool, debug: bool) -> None:
    """List every `_type` that a configuration can use, with its settings, their defaults, and its module.

    KIND is one of llm, workflow, dataset, evaluator, trajectory_builder, trainer_adapter, trainer, algorithm, model.
    Plugins that failed to import are listed with their error.

    \b
    Example:
      reinforge components
      reinforge components evaluator
    """
    with exit_on_error(as_json=as_json, debug=debug):
        from reinforge.errors import did_you_mean
        from reinforge.registry import KINDS, REGISTRY

        if kind is not None and kind not in KINDS:
            hint = did_you_mean(kind, KINDS) or ";"
            raise click.UsageError(f'unknown kind "{kind}"{hint} allowed: {", ".join(KINDS)}')
        listed = [_describe_component(component) for component in REGISTRY.components(kind)]
        errors = REGISTRY.plugin_errors()
        if as_json:
            click.echo(json.dumps({"components": listed, "plugin_errors": errors}, ensure_ascii=False))
            return
        last = ""
        for component in listed:
            if component["kind"] != last:
                last = component["kind"]
                click.echo(("" if component is listed[0] else "\n") + click.style(last, bold=True))
            what = "  (a protocol)" if component["is_protocol"] else ""
            click.echo(f"  {component['name']:<28} {component['origin']}{what}")
            for line in component["fields"]:
                default = "required" if line["default"] is None else _first_line(str(line["default"]))
                click.echo(f"      {line['path']} = {default}   {line['description']}")
        for name, why in errors.items():
            click.echo(f'plugin "{name}" failed to import: {why}', err=True)


def _describe_component(component: Any) -> dict[str, Any]:
    from dataclasses import asdict

    from reinforge.config.describe import iterate_fields
    from reinforge.multiagent.protocol import DialogueConfig

    return {
        "kind": component.kind,
        "name": component.name,
        "origin": component.origin,
        "config_type": component.config_type.__name__,
        "is_protocol": issubclass(component.config_type, DialogueConfig),
        "fields": [asdict(line) for line in iterate_fields(component.config_type)],
    }


def _first_line(text: str) -> str:
    """Returns the first line of a default; the JSON schema has multi-line prompts in full."""
    first, *rest = text.splitlines() or [""]
    return f"{first} …" if rest else first
