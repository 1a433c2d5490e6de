"""A group of commands with a subcommand from outside the core; only the groups that have one import it."""

from __future__ import annotations

from typing import Any

import click


class OpenGroup(click.Group):
    """A group with a subcommand that stands around the core, and is found by name when it is used."""

    def __init__(self, *args: Any, around: tuple[str, str], **attributes: Any):
        super().__init__(*args, **attributes)
        self._name, self._target = around  # such as "import" and "package.module:command"

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([self._name, *super().list_commands(ctx)])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        from reinforge.registry import load_named

        if cmd_name != self._name:
            return super().get_command(ctx, cmd_name)
        found: click.Command = load_named(self._target)
        return found
