"""Runs a command in a container of docker or podman: the arguments of the engine's own client."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from reinforge.config.schema import Block
from reinforge.errors import ConfigError, Problem
from reinforge.rollout.workflows.program_runner import ProgramLimits
from reinforge.rollout.workflows.templates import fill_text
from reinforge.rollout.workflows.workspace import Place

ENGINES = ("docker", "podman")
CLIENT_VARIABLES = (
    "DOCKER_HOST",
    "DOCKER_CONTEXT",
    "DOCKER_CONFIG",
    "DOCKER_TLS_VERIFY",
    "DOCKER_CERT_PATH",
    "CONTAINER_HOST",
    "XDG_RUNTIME_DIR",
)
"""Variables that the engine's client needs besides those of every program."""
KILL_S = 10.0  # seconds that the engine may take to kill a container


class ContainerConfig(Block):
    """A container in which the command runs."""

    image: str = Field(
        min_length=1,
        description="The image; it must be present, or the engine pulls it. With a `workspace`, `{NAME}` stands for "
        "the column NAME of the row.",
    )
    engine: Literal["docker", "podman"] | None = Field(
        default=None, description="The engine, whose client must be installed; null: docker, or else podman."
    )
    mount_cwd: bool = Field(
        default=True,
        description="Mount `cwd` at the same path, read-only, and start there; false: start where the image starts.",
    )


@dataclass(frozen=True, slots=True)
class Container:
    client: str
    image: str
    mount_cwd: bool

    def build_command(
        self, command: Sequence[str], place: Place, *, name: str, variables: Mapping[str, str], limits: ProgramLimits
    ) -> list[str]:
        """Returns the client's arguments.

        The gateway listens on the loopback address alone, so the container uses the host's network. The variables are
        named without their values, which the client takes from its own environment: arguments can be read by any user.
        """
        arguments = [self.client, "run", "--rm", "--interactive", "--init", "--name", name, "--network", "host"]
        arguments += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        arguments += ["--user", f"{os.getuid()}:{os.getgid()}"]
        for folder, seen in place.mounts or [(place.folder, place.folder)]:
            arguments += ["--volume", f"{folder}:{seen}"]
        if Path(self.client).name == "podman" and os.getuid() != 0:
            arguments.append("--userns=keep-id")  # or the user's own folders would belong to another one inside
        if self.mount_cwd and not place.mounts:
            arguments += ["--volume", f"{place.cwd}:{place.cwd}:ro"]
        if self.mount_cwd or place.mounts:
            arguments += ["--workdir", str(place.cwd)]
        if limits.max_memory_mb is not None:
            arguments += ["--memory", f"{limits.max_memory_mb}m", "--memory-swap", f"{limits.max_memory_mb}m"]
        if limits.max_processes is not None:
            arguments += ["--pids-limit", str(limits.max_processes)]
        for variable, value in variables.items():
            arguments += ["--env", f"HOME={value}" if variable == "HOME" else variable]  # the client has its own HOME
        return [*arguments, fill_text(self.image, place.values) if place.mounts else self.image, *command]

    async def kill(self, name: str, env: Mapping[str, str]) -> None:
        """Kills a container that may still run: its processes are not children of the client."""
        with contextlib.suppress(OSError):
            process = await asyncio.create_subprocess_exec(
                self.client,
                "rm",
                "--force",
                name,
                env=dict(env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                await asyncio.wait_for(process.wait(), KILL_S)
            except TimeoutError:
                process.kill()


def find_container(config: ContainerConfig, cwd: Path) -> Container:
    names = [config.engine] if config.engine is not None else list(ENGINES)
    client = next(filter(None, map(shutil.which, names)), None)
    if client is None:
        message = f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not installed (not found in PATH)"
        raise ConfigError(Problem("container", message, "install one, or run the command without a container"))
    if config.image.startswith("-"):
        message = f'"{config.image}" begins with -, so it is not the name of an image'
        raise ConfigError(Problem("container.image", message))
    if config.mount_cwd and ":" in str(cwd):
        message = f"the folder {cwd} cannot be mounted: its path contains a colon"
        raise ConfigError(Problem("cwd", message, "rename it, or set `container.mount_cwd: false`"))
    return Container(client, config.image, config.mount_cwd)
