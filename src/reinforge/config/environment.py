"""`${VAR}` and `${VAR:-default}` in text; `$${` stands for a literal `${`.

Variables are expanded after the YAML is parsed, and only inside text values. The contents of a variable therefore
cannot become a key or change a type: `seed: ${SEED}` is text until the schema asks for a number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from reinforge.config.document import Document, KeyPath
from reinforge.errors import did_you_mean

PLACEHOLDER = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>(?:(?!\$\{)[^}])*))?\}|\$\{")


def expand(document: Document, environ: Mapping[str, str]) -> dict[KeyPath, str]:
    """Expands the variables in a document; returns the original text of each value that had one, by path.

    Example: `{"key": "${KEY:-none}"}` without KEY becomes `{"key": "none"}` and returns
    `{("key",): "${KEY:-none}"}`. A variable that is unset and has no default is reported as a problem.
    """
    raw: dict[KeyPath, str] = {}
    document.data = _expand(document.data, (), document, environ, raw)
    return raw


def escape(text: str) -> str:
    """Returns text that `expand` turns back into `text`: `${x}` -> `$${x}`."""
    return text.replace("${", "$${")


def _expand(value: Any, path: KeyPath, document: Document, environ: Mapping[str, str], raw: dict[KeyPath, str]) -> Any:
    if isinstance(value, dict):
        return {key: _expand(item, (*path, key), document, environ, raw) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, (*path, index), document, environ, raw) for index, item in enumerate(value)]
    if not isinstance(value, str) or "${" not in value:
        return value

    def replace(match: re.Match[str]) -> str:
        name = match["name"]
        if match[0] == "$${":
            return "${"
        raw[path] = value
        if name is None:
            excerpt = value[match.start() : match.start() + 20]
            document.report(
                path, f'"{excerpt}" is not a variable', "write ${NAME} or ${NAME:-default}; $${ is a literal ${"
            )
        elif match["default"] is not None:
            return environ.get(name) or match["default"]
        elif name in environ:
            return environ[name]
        else:
            message = f"the environment variable {name} is not set{did_you_mean(name, environ)}"
            document.report(path, message, f"export {name}=..., or write ${{{name}:-default}}")
        return ""

    return PLACEHOLDER.sub(replace, value)
