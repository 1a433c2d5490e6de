"""`reinforge components [KIND]`: lists every `_type`; those of one kind with settings and defaults."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from reinforge.cli.options import JSON
from reinforge.cli.output import say, say_as_is, say_json
from reinforge.cli.report import Command

if TYPE_CHECKING:
    from reinforge.registry import Listing


@click.command("components", cls=Command)
@click.argument("kind", required=False)
@JSON
def command(kind: str | None, as_json: bool) -> None:
    """List every `_type` that a configuration can use, with its module; those of one KIND with settings and defaults.

    KIND is one of llm, workflow, dataset, evaluator, trajectory_builder, trainer_adapter, trainer, algorithm, model.
    The kind `model` lists the bundled models, which are named like `bundled:tickets`.
    Plugins that failed to import are listed with their error.

    \b
    Example:
      reinforge components
      reinforge components evaluator
      reinforge components model
    """
    from reinforge.errors import did_you_mean
    from reinforge.registry import KINDS, REGISTRY

    if kind is not None and kind not in KINDS:
        hint = did_you_mean(kind, KINDS) or ";"
        raise click.UsageError(f'unknown kind "{kind}"{hint} allowed: {", ".join(KINDS)}')
    if kind is None and not as_json:
        _list_names(REGISTRY.list_names(), REGISTRY.plugin_errors(load=False))
        return
    listed = [_describe_component(component) for component in REGISTRY.components(kind)]
    errors = REGISTRY.plugin_errors()
    if as_json:
        say_json({"components": listed, "plugin_errors": errors})
        return
    say_as_is(click.style(kind, bold=True))
    for component in listed:
        what = "  (a protocol)" if component["is_protocol"] else ""
        say(f"  {component['written']:<28} {component['origin']}{what}")
        if kind == "model":  # has no settings
            say(f"      {component['description']}")
        for line in component["fields"]:
            default = "required" if line["default"] is None else _first_line(str(line["default"]))
            say(f"      {line['path']} = {default}   {line['description']}")
    _show_errors(errors)


def _list_names(listed: Sequence[Listing], errors: Mapping[str, str]) -> None:
    for kind, group in itertools.groupby(listed, key=lambda each: each.kind):
        say_as_is(click.style(kind, bold=True))
        for each in group:
            say(f"  {each.name:<28} {each.origin}")
        say("")
    say("settings and defaults: reinforge components KIND")
    _show_errors(errors)


def _show_errors(errors: Mapping[str, str]) -> None:
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
