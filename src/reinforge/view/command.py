"""`reinforge view`: the runs of a folder in the browser."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from reinforge.cli.exits import Command
from reinforge.cli.options import OUTPUT_DIR, GroupedOption, option, parse_existing_file
from reinforge.cli.output import say, say_as_is

DEFAULT_PORT = 7477
LEARNING = "Learning from live chats"


@click.command("view", cls=Command, context_settings={"show_default": True}, short_help="Show all runs in the browser.")
@option(
    "port",
    type=click.IntRange(0, 65535),
    help=f"TCP port; 0 picks a free one. Default: {DEFAULT_PORT}, or a free one if that is taken.",
)
@click.option("--open", "opens_browser", cls=GroupedOption, is_flag=True, help="Open the address in the browser.")
@OUTPUT_DIR
@option("versions_dir", metavar="FOLDER", default=".reinforge/versions", group=LEARNING, help="Folders of versions.")
@option("data_dir", metavar="FOLDER", default=".reinforge/serve", group=LEARNING, help="The --data_dir of the server.")
@option("server", metavar="URL", default="http://127.0.0.1:8000", group=LEARNING, help="The server with --learn.")
@option("token_file", metavar="FILE", callback=parse_existing_file, group=LEARNING, help="File with its key.")
def command(port: int | None, opens_browser: bool, output_dir: str, **learning: Any) -> None:
    """Show all runs in the browser: live curves, every episode as a chat with its tokens, comparisons.

    It listens on 127.0.0.1 only, never changes a run, loads nothing from other hosts, and stops with Ctrl-C. The
    printed address contains a key; other users of this machine cannot read your runs without it.

    \b
    Example:
      reinforge view
      reinforge view --output_dir runs --port 8000 --open
    """
    asyncio.run(_serve(Path(output_dir), port, opens_browser, learning))


async def _serve(output_dir: Path, port: int | None, opens_browser: bool, learning: dict[str, Any]) -> None:
    from reinforge.serving.access import read_token
    from reinforge.view.learning_page import LearningSource
    from reinforge.view.server import ViewServer, choose_port

    token = read_token(None if learning["token_file"] is None else str(learning["token_file"]))
    folders = Path(learning["versions_dir"]), Path(learning["data_dir"])
    source = LearningSource(*folders, learning["server"].rstrip("/"), token)
    async with ViewServer(output_dir, choose_port(port, DEFAULT_PORT), learning=source) as server:
        say(f"Runs in {output_dir}, until you press Ctrl-C:")
        say_as_is(server.address)  # the key must not be hidden like other secrets
        if opens_browser:
            import webbrowser

            webbrowser.open(server.address)
        await asyncio.Event().wait()
