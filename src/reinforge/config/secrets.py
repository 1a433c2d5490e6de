"""Secrets in a configuration: what is written literally, what goes into a URL, and what messages must not repeat."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from reinforge.config.document import Document, KeyPath, format_path
from reinforge.config.dump import find_literal_secrets, is_literal_secret
from reinforge.config.environment import PLACEHOLDER
from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.values import iterate_values
from reinforge.safe_text import is_secret_variable, remember_secret

logger = logging.getLogger(__name__)


def report_secrets_in_urls(document: Document, placeholders: Mapping[KeyPath, str]) -> None:
    """Reports each URL that contains a secret variable: a URL ends up in logs, and in those of the server."""
    for path, raw in placeholders.items():
        value = document.get(path)
        for match in PLACEHOLDER.finditer(raw):
            if match["name"] and is_secret_variable(match["name"]) and isinstance(value, str) and "://" in value:
                message = f"the secret {match['name']} is part of a URL, which would end up in logs"
                document.report(path, message, f"use api_key: ${{{match['name']}}}, which is sent as a header")


def protect_secrets(loaded: LoadedConfig) -> None:
    """Keeps the secrets of a configuration out of messages and logs, and warns about those written in the file."""
    literals = find_literal_secrets(loaded)
    for path in literals:
        where = f"{loaded.locate(format_path(path))} {format_path(path)}".strip()
        logger.warning("%s is written in the configuration; use ${VAR} and set the variable", where)
    for path, value in iterate_values(loaded.config):
        text = value.get_secret_value() if hasattr(value, "get_secret_value") else value
        if hasattr(value, "get_secret_value") or path in literals or is_literal_secret(path, text):
            remember_secret(text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text))
