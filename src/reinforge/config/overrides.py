"""`-o PATH VALUE`: sets a value from the command line, over the one in the file."""

from __future__ import annotations

from typing import Any

from reinforge.config.document import Document, KeyPath, parse_yaml
from reinforge.errors import ConfigError, Problem


def apply_override(document: Document, path_text: str, value_text: str) -> None:
    """Sets one value in the document; the schema check finds paths that do not exist.

    Args:
        document: The file.
        path_text: Keys joined by dots; list items by index: `finetuning.policy.optimizer.betas.0`.
        value_text: A YAML value: `5`, `true`, `text`, `[1, 2]`, `{_type: epoch}`.
    """
    mark = f"-o {path_text}"
    keys: list[str | int] = list(path_text.split("."))
    if not all(keys):
        fix = "join the keys with single dots, for example: -o finetuning.num_epochs 5"
        document.report_at(mark, Problem("", f'"{path_text}" is not a path', fix))
        return
    try:
        value = parse_yaml(value_text).data
    except ConfigError as error:
        for problem in error.problems:
            fix = "quote the value twice, for the shell and for YAML: -o PATH '\"text\"'"
            document.report_at(mark, Problem(path_text, problem.message, fix))
        return
    container: Any = document.data
    for depth, key in enumerate(keys):
        above: KeyPath = tuple(keys[:depth])
        if isinstance(container, list):
            if not str(key).isdigit() or int(key) >= len(container):
                allowed = f"0 to {len(container) - 1}" if container else "none, since the list is empty"
                document.report_at(
                    mark, Problem(path_text, f'"{key}" is not an index of this list; allowed: {allowed}')
                )
                return
            key = keys[depth] = int(key)
        elif not isinstance(container, dict):
            where = ".".join(map(str, above))
            document.report_at(mark, Problem(path_text, f"{where} is a single value and has no keys"))
            return
        if depth == len(keys) - 1:
            container[key] = value
            break
        if isinstance(container, dict) and container.get(str(key)) is None:
            container[key] = {}
            document.marks[*above, key] = mark
        container = container[key]
    _mark_value(document, tuple(keys), mark)


def _mark_value(document: Document, path: KeyPath, mark: str) -> None:
    for known in [known for known in document.marks if known[: len(path)] == path]:
        del document.marks[known]
    document.marks[path] = mark
