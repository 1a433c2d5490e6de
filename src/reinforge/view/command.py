"""`reinforge view`: the runs of a folder in the browser."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from reinforge.cli.exits import Command
from reinforge.cli.options import OUTPUT_DIR, GroupedOption, option
from reinforge.cli.output import say, say_as_is

DEFAULT_PORT = 7477


@click.command("view", cls=Command, short_help="Show all runs in the browser.")
@option(
    "port",
    type=click.IntRange(0, 65535),
    help=f"TCP port; 0 picks a free one. Default: {DEFAULT_PORT}, or a free one if that is taken.",
)
@click.option("--open", "opens_browser", cls=GroupedOption, is_flag=True, help="Open the address in the browser.")
@OUTPUT_DIR
def command(port: int | None, opens_browser: bool, output_dir: str) -> None:
    """Show all runs in the browser: live curves, every episode as a chat with its tokens, comparisons.

    It listens on 127.0.0.1 only, never changes a run, loads nothing from other hosts, and stops with Ctrl-C. The
    printed address contains a key; other users of this machine cannot read your runs without it.

    \b
    Example:
      reinforge view
      reinforge view --output_dir runs --port 8000 --open
    """
    asyncio.run(_serve(Path(output_dir), port, opens_browser))


async def _serve(output_dir: Path, port: int | None, opens_browser: bool) -> None:
    from reinforge.view.server import ViewServer, choose_port

    async with ViewServer(output_dir, choose_port(port, DEFAULT_PORT)) as server:
        say(f"Runs in {output_dir}, until you press Ctrl-C:")
        say_as_is(server.address)  # the key must not be hidden like other secrets
        if opens_browser:
            import webbrowser

            webbrowser.open(server.address)
        await asyncio.Event().wait()
