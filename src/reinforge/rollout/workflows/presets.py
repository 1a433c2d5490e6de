"""Coding agents by name, as settings of `workflow: {_type: command}`: the table is presets.yml."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from reinforge.bounded import decode_json
from reinforge.errors import ConfigError, Problem, did_you_mean

PRESETS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yml").read_text(encoding="utf-8"))
"""The settings of each, `install`, the command that installs its program, and `environment`, what its settings get in a
run with one; `servers` in it are JSON files of HOME, each with the key of MCP servers and ours."""


def find_preset(name: str) -> dict[str, Any]:
    """Returns the settings of a preset; raises a `ValueError` if there is none."""
    if name not in PRESETS:
        raise ValueError(f"preset {name!r}: there are {', '.join(PRESETS)}{did_you_mean(name, PRESETS)}")
    return {"workspace": {}, **PRESETS[name]}


def add_environment(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what changes in the settings of a preset's program that has the MCP server `environment`."""
    added = PRESETS[name].get("environment")
    if added is None:
        able = [each for each, preset in PRESETS.items() if "environment" in preset]
        fix = f"use {', '.join(able)} or a program of your own, or let `reward` score the workspace"
        raise ConfigError(Problem("preset", f"{name} has no MCP client, so it cannot play the `environment`", fix))
    files = dict(settings["home_files"])
    for path, (key, server) in added.get("servers", {}).items():
        try:
            file = decode_json(files.get(path, "{}"))
            files[path] = json.dumps({**file, key: {**file.get(key, {}), "environment": server}})
        except (ValueError, TypeError, AttributeError):
            message = f"the `environment` cannot be added to {path}, which is not a JSON object of objects"
            raise ConfigError(Problem("home_files", message, "write it as JSON")) from None
    command, env = [*settings["command"], *added.get("arguments", ())], {**added.get("env", {}), **settings["env"]}
    return {"command": command, "env": env, "home_files": files}
