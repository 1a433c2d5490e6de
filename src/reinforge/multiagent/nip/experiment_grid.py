"""`SequentialHyperparameterExperiment`: a script that runs an experiment for each point of a grid, one after the other.

    experiment = SequentialHyperparameterExperiment(
        param_grid={"trainer": ["pure_text_ei"], "max_message_rounds": [4, 8]},
        experiment_fn=lambda arguments: run_experiment(build(arguments.combo), run_id=arguments.run_id),
    )
    experiment.parser.add_argument("--num-rollout-workers", type=int, default=4)
    experiment.run()                                          # python script.py --run-infix first

Without `param_grid` the script takes `--config-file FILE`, a JSON, JSON5 or YAML file:

    {"kind": "single_experiment", "parameters": {"max_message_rounds": 8}}
    {"kind": "grid", "parameters": {"max_message_rounds": [4, 8]}}

Names and options are those of `nip.utils.experiments` and `nip.utils.env`.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import re
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from reinforge.bounded import load_json
from reinforge.config.document import parse_yaml
from reinforge.errors import ConfigError, Problem, ReinforgeError, boundary
from reinforge.multiagent.nip.trainers import PreparedExperimentInfo

logger = logging.getLogger(__name__)

_JSON5_TOKEN = re.compile(r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|//[^\n]*|/\*.*?\*/|:|\t""", re.DOTALL)
"""What YAML reads otherwise: strings in single quotes, comments, colons without a space, and tabs."""

Combination = dict[str, Any]
_REQUIRED = object()


def get_env_var(var_name: str, default: Any = _REQUIRED) -> Any:
    """Returns an environment variable, or the default if it is not set; no `.env` file is read.

    Raises:
        ConfigError: It is not set, and there is no default.
    """
    value = os.environ.get(var_name, default)
    if value is _REQUIRED:
        raise ConfigError(Problem(var_name, "the environment variable is not set", f"export {var_name}=..."))
    return value


@dataclass
class RunIDFunctionArguments:
    """What the function that names runs gets, if it has a single parameter."""

    combo_index: int | None  # the number of the point; None: what the names of all runs have in common
    cmd_args: Namespace
    config_file_stem: str | None = None
    """Name of the file with the grid, without its ending; None if the grid is in the script."""


RunIdFunction = Callable[[int | None, Namespace], str] | Callable[[RunIDFunctionArguments], str]
"""Returns the name of a run, from the number of its point and the command line, or from one object with both."""


def unflatten_dict_keys(flat: Mapping[str, Any], separator: str = ".") -> dict[str, Any]:
    """Returns nested dicts: {"prover.model": "m", "seed": 1} -> {"prover": {"model": "m"}, "seed": 1}."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(separator)
        block = nested
        for key in path:
            block = block.setdefault(key, {})
        block[last] = value
    return nested


def list_unchanged(items: Iterable[Any], *arguments: Any, **keywords: Any) -> Iterable[Any]:
    return items


@dataclass
class ExperimentFunctionArguments:
    """What the function that runs one experiment gets."""

    combo: Combination  # the point of the grid
    run_id: str
    cmd_args: Namespace
    common_run_name: str  # what the names of all runs have in common
    tqdm_func: Callable[..., Iterable[Any]] = list_unchanged
    """Returns its items unchanged, and `global_tqdm_step_fn` does nothing: a run has a progress display of its own."""
    global_tqdm_step_fn: Callable[[], None] = lambda: None
    log_level: int = logging.INFO  # for `logging.Logger.setLevel`
    child_logger_adapter: Any = logger


class SequentialHyperparameterExperiment:
    """Runs an experiment for each point of a grid.

    A run that fails is logged, and the next one starts; at the end the script exits with status 1.

    Args:
        param_grid: Values to try, by name; several grids run one after the other. None: `--config-file` names a file.
            Names below a name are joined, {"rl": {"lr": [1, 2]}} -> "rl.lr".
        run_id_fn: Returns the name of a run, see `RunIdFunction`; None: the experiment's name and the point's number.
        run_preparer_fn: Validates one experiment, see `prepare_experiment`; called with each point and the parsed
            command line before the first run.
        config_file_base_path: Folder that `--config-file` is relative to; None: the current one.
        allow_resuming_wandb_run: Not read; an unfinished run of the same name is always resumed.

    Attributes:
        parser: Add arguments of your own before `run`.
    """

    def __init__(
        self,
        experiment_fn: Callable[[ExperimentFunctionArguments], Any],
        param_grid: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        run_id_fn: RunIdFunction | None = None,
        run_preparer_fn: Callable[[Combination, Namespace], PreparedExperimentInfo] | None = None,
        experiment_name: str = "EXPERIMENT",
        arg_parser_description: str = "Run an experiment for each point of a grid",
        default_config_filename: str | None = None,
        config_file_base_path: str | Path | None = None,
        default_wandb_project: str | None = None,
        allow_resuming_wandb_run: bool = False,
        add_run_infix_argument: bool = True,
    ):
        self.experiment_fn, self.param_grid, self.run_preparer_fn = experiment_fn, param_grid, run_preparer_fn
        self.experiment_name = experiment_name
        self.run_id_fn = run_id_fn or self._name_run
        self.config_file_base_path = Path(config_file_base_path or Path.cwd())
        self.cmd_args: Namespace | None = None
        self.parser = _build_parser(arg_parser_description, default_wandb_project)
        if param_grid is None:
            text = f"JSON, JSON5 or YAML file with the grid, relative to {self.config_file_base_path}"
            self.parser.add_argument("-c", "--config-file", default=default_config_filename, help=text)
        if add_run_infix_argument:
            self.parser.add_argument("--run-infix", default="a", help="Middle part of the run's name")

    def _name_run(self, combo_index: int | None, cmd_args: Namespace) -> str:
        name = self.experiment_name.lower()
        return name if combo_index is None else f"{name}_{combo_index}"

    @property
    def combinations(self) -> Iterator[Combination]:
        """The points of the grid; the value of the last name changes fastest, names in alphabetical order."""
        assert self.param_grid is not None
        grids = [self.param_grid] if isinstance(self.param_grid, Mapping) else self.param_grid
        return itertools.chain.from_iterable(map(_list_points, grids))

    def run(self, arguments: Sequence[str] | None = None) -> None:
        """Validates all points, then runs them.

        Args:
            arguments: The command line; None: that of the process.

        Raises:
            ConfigError: The file with the grid, or a point of it, is not valid.
            SystemExit: A run failed.
        """
        self.cmd_args = args = self.parser.parse_args(arguments)
        if self.param_grid is None:
            self.param_grid = read_grid(self.config_file_base_path, args.config_file)
        combinations, failed = list(self.combinations), []
        if self.run_preparer_fn is not None:
            for combo in combinations:
                self.run_preparer_fn(combo, args)
        for index, combo in enumerate(combinations):
            if index >= args.num_skip and not self._run_point(run_id := self._get_run_id(index, args), combo, args):
                failed.append(run_id)
        if failed:
            raise SystemExit(f"{len(failed)} of {len(combinations)} runs failed: {', '.join(failed)}")

    def _get_run_id(self, index: int | None, args: Namespace) -> str:
        name_run: Callable[..., str] = self.run_id_fn
        if len(inspect.signature(name_run).parameters) > 1:
            return name_run(index, args)
        file = getattr(args, "config_file", None)
        return name_run(RunIDFunctionArguments(index, args, None if file is None else Path(file).stem))

    def _run_point(self, run_id: str, combo: Combination, args: Namespace) -> bool:
        level = logging.DEBUG if args.debug else logging.WARNING if args.quiet else logging.INFO
        common = self._get_run_id(None, args)
        arguments = ExperimentFunctionArguments(combo, run_id, args, common, log_level=level)
        try:
            self.experiment_fn(arguments)
        except ReinforgeError as error:
            logger.error("%s failed: %s", run_id, error)
            return False
        logger.info("%s finished", run_id)
        return True


def _list_points(grid: Mapping[str, Any]) -> Iterator[Combination]:
    flat = flatten_grid(grid)
    for name, values in flat.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            message = f"is {values!r:.80}, not a list of values"  # a string would be tried letter by letter
            raise ConfigError(Problem(f"param_grid.{name}", message, "write [value]"))
    names = sorted(flat)
    return (dict(zip(names, point, strict=True)) for point in itertools.product(*(flat[name] for name in names)))


def read_grid(folder: Path, name: str | None) -> dict[str, list[Any]]:
    if name is None:
        raise ConfigError(Problem("--config-file", "is missing", "name a JSON, JSON5 or YAML file"))
    path = folder / name
    ending = path.suffix.lower()
    if ending not in (".json", ".json5", ".yaml", ".yml"):
        message = f"{path}: {path.suffix or 'no ending'} is not supported"
        raise ConfigError(Problem("--config-file", message, "use .json, .json5, .yaml or .yml"))
    if not path.is_file():
        raise ConfigError(Problem("--config-file", f"file not found: {path}"))
    with boundary(ConfigError, f"--config-file: cannot read {path}"):
        text = path.read_text(encoding="utf-8")
    data = _parse(text, ending, path)
    kind, parameters = (data.get("kind"), data.get("parameters")) if isinstance(data, dict) else (None, None)
    if kind not in ("single_experiment", "grid") or not isinstance(parameters, dict):
        fix = "write kind, which is single_experiment or grid, and parameters, which is a mapping"
        raise ConfigError(Problem("--config-file", f"{path} has no grid", fix))
    flat = flatten_grid(parameters)
    if kind == "single_experiment":
        return {key: [value] for key, value in flat.items()}
    if single := [key for key, value in flat.items() if not isinstance(value, list)]:
        raise ConfigError(Problem(f"parameters.{single[0]}", f"{path}: a grid needs a list of values", "write [value]"))
    return flat


def flatten_grid(grid: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a grid without nesting: {"rl": {"lr": [1, 2]}} -> {"rl.lr": [1, 2]}."""
    flat: dict[str, Any] = {}
    for key, value in grid.items():
        flat |= flatten_grid(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _parse(text: str, ending: str, path: Path) -> Any:
    """YAML follows version 1.1, as in neural-interactive-proofs: `no` is false. JSON5 has numbers such as 1e-5."""
    if ending == ".json5":
        return parse_yaml(_JSON5_TOKEN.sub(_replace_json5_token, text), str(path)).data
    try:
        return load_json(text) if ending == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(Problem("--config-file", f"{path}: {error}")) from error


def _replace_json5_token(found: re.Match[str]) -> str:
    r"""Example: {a:'it\'s', // note -> {a: "it's"."""
    token = found[0]
    if token[0] == '"':
        return token
    if token[0] == "'":
        return '"' + token[1:-1].replace("\\'", "'").replace('"', '\\"') + '"'
    return {":": ": ", "\t": " "}.get(token, "\n" * token.count("\n"))  # the rest are comments


def _build_parser(description: str, wandb_project: str | None) -> ArgumentParser:
    parser = ArgumentParser(description=description, formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("-d", "--debug", action="store_true", help="Log level DEBUG")
    parser.add_argument("-q", "--quiet", action="store_true", help="Log level WARNING")
    parser.add_argument("--num-skip", type=int, default=0, help="Number of points to skip")
    parser.add_argument("--ignore-cache", action="store_true", help="Changes nothing: there is no cache")
    parser.add_argument("--use-wandb", action="store_true", help="Not supported by run_experiment")
    for name, default in (("--wandb-project", wandb_project or ""), ("--wandb-entity", ""), ("--tag", "")):
        parser.add_argument(name, default=default, help="Changes nothing without --use-wandb")
    return parser
