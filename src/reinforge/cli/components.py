"""`reinforge components [KIND]`: what a configuration may name, with fields, defaults and origin."""

from __future__ import annotations

import json
from typing import Any

import click

from reinforge.cli.report import DEBUG, JSON, guarded


@click.command("components")
@click.argument("kind", required=False)
@JSON
@DEBUG
def command(kind: str | None, as_json: bool, debug: bool) -> None:
    """List what a configuration may name as a `_type`: fields, defaults, and the module that it comes from.

    A plugin that could not be imported is named with its own error.

    \b
    Example:
      reinforge components
      reinforge components evaluator
    """
    with guarded(as_json=as_json, debug=debug):
        from reinforge.errors import did_you_mean
        from reinforge.registry import KINDS, REGISTRY

        if kind is not None and kind not in KINDS:
            hint = did_you_mean(kind, KINDS) or ";"
            raise click.UsageError(f'there is no kind "{kind}"{hint} kinds: {", ".join(KINDS)}')
        listed = [_described(component) for component in REGISTRY.components(kind)]
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
                default = "required" if line["default"] is None else _on_one_line(str(line["default"]))
                click.echo(f"      {line['path']} = {default}   {line['description']}")
        for name, why in errors.items():
            click.echo(f'plugin "{name}" could not be imported: {why}', err=True)


def _described(component: Any) -> dict[str, Any]:
    from dataclasses import asdict

    from reinforge.config.describe import field_lines
    from reinforge.multiagent.protocol import DialogueConfig

    return {
        "kind": component.kind,
        "name": component.name,
        "origin": component.origin,
        "config_type": component.config_type.__name__,
        "is_protocol": issubclass(component.config_type, DialogueConfig),
        "fields": [asdict(line) for line in field_lines(component.config_type)],
    }


def _on_one_line(text: str) -> str:
    """Returns a default's first line; a prompt of many lines is in the schema whole."""
    first, *rest = text.splitlines() or [""]
    return f"{first} …" if rest else first
