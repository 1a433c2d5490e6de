"""`reinforge init [NAME]`: a project to start from, which trains as it stands."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from reinforge.cli.exits import Command
from reinforge.cli.options import JSON
from reinforge.cli.output import say, say_json

KINDS = ("function", "tools", "coding_agent", "logs", "replace")
"""The templates; a test compares them with `reinforge.tasks.projects.TEMPLATES`, which is imported on use."""


@click.command("init", cls=Command, context_settings={"show_default": True})
@click.argument("name", required=False, default=".")
@click.option("--template", "-t", type=click.Choice(KINDS), default="function", help="What the project trains.")
@JSON
def command(name: str, template: str, as_json: bool) -> None:
    """Write a project that trains as it stands: agent, data, reward, run.yml, tests, README.

    NAME is the folder, which may exist; without it the current folder is used. No file is ever overwritten. It also
    writes a skill, SKILL.md, that tells coding agents how to work in the folder.

    \b
    Templates:
      function  an agent function whose answers can be checked (GRPO)
      tools     an agent with two tools (GRPO)
      logs      logged chats with thumbs up and down (KTO)
      replace   recorded calls to a large model, which a small one replaces (SFT, router)
      coding_agent  a coding agent in eight repositories with bugs, scored by hidden tests (GRPO)

    The project trains offline on a CPU, with a tiny model that is made on first use; one line of run.yml names a
    pretrained model instead. coding_agent needs a pretrained model, a GPU and the agent.

    \b
    Example:
      reinforge init my_agent
      reinforge init support --template logs
    """
    from reinforge.tasks.projects import TEMPLATES, write_project

    folder, chosen = Path(name), TEMPLATES[template]
    written = write_project(chosen, folder)
    commands = list(chosen.commands)
    if folder.resolve() != Path.cwd():
        commands[0] = f"cd {shlex.quote(str(folder))} && {commands[0]}"
    if as_json:
        files = [path.relative_to(folder).as_posix() for path in written]
        say_json({"folder": str(folder.resolve()), "template": template, "files": files, "next": commands})
        return
    say(f"wrote {len(written)} files to {folder.resolve()}: {chosen.description}")
    for path in written:
        say(f"  {path.relative_to(folder).as_posix()}")
    say("next:")
    for line in commands:
        say(f"  {line}")
