"""`reinforge components [KIND|NAME]`: lists every `_type` on a line; one by name with settings and defaults."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from reinforge.cli.exits import Command
from reinforge.cli.options import JSON
from reinforge.cli.output import say, say_as_is, say_json

if TYPE_CHECKING:
    from reinforge.registry import Listing

DETAILS = "settings and defaults: reinforge components NAME"


@click.command("components", cls=Command)
@click.argument("name", metavar="[KIND|NAME]", required=False)
@JSON
def command(name: str | None, as_json: bool) -> None:
    """List every `_type` that a configuration can use, or those of one KIND; one by NAME with settings and defaults.

    KIND is one of llm, workflow, dataset, evaluator, trajectory_builder, trainer_adapter, trainer, algorithm, model.
    The kind `model` lists the bundled models, which are named like `bundled:tickets`.
    Plugins that failed to import are listed with their error.

    \b
    Example:
      reinforge components
      reinforge components evaluator
      reinforge components exact_match
    """
    from reinforge.errors import did_you_mean
    from reinforge.registry import KINDS, REGISTRY
    from reinforge.runs.saved_model import BUNDLED

    listed = REGISTRY.list_names()
    if name is None and not as_json:
        _list_names(listed, REGISTRY.plugin_errors(load=False))
        return
    named = (name or "").removeprefix(BUNDLED)
    chosen = [each for each in listed if each.kind == name] or [each for each in listed if each.name == named]
    if name is not None and not chosen:
        hint = did_you_mean(name, [*KINDS, *(each.name for each in listed)]) or ";"
        raise click.UsageError(f'unknown kind or name "{name}"{hint} the kinds are {", ".join(KINDS)}')
    components = [REGISTRY.get(each.kind, each.name) for each in chosen] if name else REGISTRY.components()
    found = [_describe_component(component) for component in components]
    errors = REGISTRY.plugin_errors()
    if as_json:
        say_json({"components": found, "plugin_errors": errors})
        return
    show = _show_line if name in KINDS else _show_details
    for component in found:
        show(component)
    if name in KINDS:
        say(DETAILS)
    _show_errors(errors)


def _show_line(component: Mapping[str, Any]) -> None:
    what = " (a protocol)" if component["is_protocol"] else ""
    say(f"  {component['written']:<28} {component['description']}{what}")


def _show_details(component: Mapping[str, Any]) -> None:
    say_as_is(click.style(f"{component['kind']} {component['written']}", bold=True) + f"  {component['origin']}")
    say(f"  {component['description']}")
    for line in component["fields"] if component["kind"] != "model" else ():  # which has no settings
        default = "required" if line["default"] is None else _first_line(str(line["default"]))
        say(f"      {line['path']} = {default}   {line['description']}")


def _list_names(listed: Sequence[Listing], errors: Mapping[str, str]) -> None:
    for kind, group in itertools.groupby(listed, key=lambda each: each.kind):
        say_as_is(click.style(kind, bold=True))
        for each in group:
            say(f"  {each.name:<28} {each.origin}")
        say("")
    say(DETAILS)
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
