"""Options that commands share, and help pages that group options and show each spelling once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

OPTIONS = "Options"
DATA, RUN, LIMITS, SAMPLING, OUTPUT = "Data", "Run", "Limits", "Sampling", "Output"  # titles of groups of options
CONFIG_FLAG = re.compile("--config[_-]file(?:=|$)")


class GroupedOption(click.Option):
    """An option with the title of its group on the help page."""

    def __init__(self, *args: Any, group: str = OPTIONS, **attributes: Any):
        super().__init__(*args, **attributes)
        self.group = group

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Returns names and help text; `--run-name` is left out next to `--run_name`."""
        record = super().get_help_record(ctx)
        if record is None:
            return None
        names, text = record
        for name in self.opts:
            if (underscored := f"--{name[2:].replace('-', '_')}") != name and underscored in self.opts:
                names = names.replace(f", {name}", "")
        return names, text


class GroupedCommand(click.Command):
    """A command whose help page has one section for each group of options.

    Its argument FILE may be written `--config_file FILE`, as for the commands of the NeMo Agent Toolkit.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if any(parameter.name == "file" for parameter in self.params):
            args = [CONFIG_FLAG.sub("", each) for each in args if not CONFIG_FLAG.fullmatch(each)]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            path = _find_setting(error) if any(each.name == "overrides" for each in self.params) else None
            if path is None:
                raise
            ctx.fail(f"No such option {error.option_name!r}. It is a setting of the file: -o {path} VALUE.")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the groups in the order of their first option, general options last."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                groups.setdefault(getattr(parameter, "group", OPTIONS), []).append(record)
        for title, records in sorted(groups.items(), key=lambda item: item[0] == OPTIONS):
            with formatter.section(title):
                formatter.write_dl(records)


def _find_setting(error: click.NoSuchOption) -> str | None:
    """Returns the setting that an unknown option probably means; None: there is none, or an option is spelled alike."""
    from reinforge.config.document import Document
    from reinforge.config.problems import OTHER_NAMES, suggest_setting
    from reinforge.registry import Registry

    name = error.option_name.lstrip("-").replace("-", "_")
    path = suggest_setting(Document({}), Registry(), ("finetuning", name)) or ""
    is_exact = path.endswith(f".{OTHER_NAMES.get(name, name)}")
    return path if is_exact or (path and not error.possibilities) else None


def option(name: str, *short: str, **attributes: Any) -> Callable[[Any], Any]:
    """Returns the decorator of an option that may be written with underscores or with dashes, and in short.

    Args:
        attributes: Arguments of `click.option`, and `group`, the title of its section on the help page.
    """
    names = dict.fromkeys([*short, f"--{name}", f"--{name.replace('_', '-')}"])
    return click.option(*names, cls=GroupedOption, **attributes)


def parse_existing_file(context: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
    if value is None:
        return None
    path = Path(value)
    if not path.is_file():
        raise click.BadParameter(f"file not found: {value}", context, parameter)
    return path


def parse_output_file(context: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
    """Returns an output file as a path; a missing folder is a usage error before any work starts."""
    path = Path(value) if value is not None else None
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        reason = "it is a folder, not a file" if path.is_dir() else "the folder does not exist"
        raise click.BadParameter(f"cannot write {value}: {reason}", context, parameter)
    return path


def install_compat(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    """Makes the import paths of another project lead here, and imports its installed plugins."""
    if value is None or context.resilient_parsing:
        return
    from reinforge.registry import load_named

    if load_named("reinforge.compat.nat:install")():
        load_named("reinforge.compat.nat:load_plugins")()


CONFIG_FILE = click.argument("file", type=click.Path(), callback=parse_existing_file)
NAMED_FILE = option("config_file", metavar="FILE", expose_value=False, group=DATA, help="Another way to pass FILE.")
"""For the help page: `GroupedCommand` takes its value as the argument."""
DATASET = option("dataset", metavar="FILE", group=DATA, help="Dataset to use instead of the one in the YAML file.")
ENVIRONMENT = option(
    "environment", metavar="TYPE:NAME", group=DATA, help="Environment to play, such as reasoning_gym:spell_backward."
)
OVERRIDE = click.option(
    "-o",
    "--override",
    "overrides",
    cls=GroupedOption,
    nargs=2,
    multiple=True,
    metavar="PATH VALUE",
    help="Set any key of the file, for example -o finetuning.num_epochs 20. Repeatable.",
)
OUTPUT_DIR = option(
    "output_dir",
    metavar="FOLDER",
    default="./.reinforge/runs",
    show_default=True,
    help="Folder that contains the run folders.",
)
DATA_PATHS = {
    "dataset": "eval.general.dataset.file_path",
    "environment": "environment",
    "endpoint": "finetuning.run_configuration.endpoint",
    "endpoint_timeout": "finetuning.run_configuration.endpoint_timeout",
    "result_json_path": "finetuning.run_configuration.result_json_path",
}
"""The configuration path of each flag about the data and a deployed agent."""
ENDPOINT = option("endpoint", metavar="URL", group=DATA, help="URL of a deployed agent to run instead of `workflow`.")
ENDPOINT_TIMEOUT = option(
    "endpoint_timeout", metavar="SECONDS", type=int, group=DATA, help="Time limit of one of its episodes."
)
RESULT_JSON_PATH = option(
    "result_json_path", metavar="PATH", group=DATA, help="JSONPath of the output in the agent's response."
)
COMPAT = option(
    "compat",
    type=click.Choice(["nat"]),
    expose_value=False,
    is_eager=True,
    callback=install_compat,
    group=RUN,
    help="nat: components that import from the NeMo Agent Toolkit run on reinforge, unchanged.",
)
JSON = click.option("--json", "as_json", cls=GroupedOption, is_flag=True, help="Print the result as JSON.")
"""Arguments and options that several commands have."""


def collect_overrides(options: Mapping[str, Any], paths: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns the overrides of a call, pairs of path and YAML value: those of flags, then those of `-o`, which win."""
    flags = [(path, json.dumps(options[name])) for name, path in paths.items() if options.get(name) is not None]
    return [*flags, *options["overrides"]]
