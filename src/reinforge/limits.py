"""How large and how deep what comes from outside may be: REINFORGE_MAX_ROW_DEPTH=150 sets `get_limits().row_depth`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache

from reinforge.errors import ConfigError, Problem, did_you_mean

PREFIX = "REINFORGE_MAX_"
DEEPEST = 300  # Python's own functions fail on values that are a little deeper, whatever their limit is


def _limit(default: int, meaning: str) -> int:
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True, slots=True)
class Limits:
    json_depth: int = _limit(250, "levels of JSON from outside; an output or a message has at most 50 less")
    file_bytes: int = _limit(1 << 28, "bytes of a JSON or YAML file of a run, a model or an export")
    request_bytes: int = _limit(1 << 23, "bytes of a request to the gateway or to `reinforge serve`")
    waiting_bytes: int = _limit(1 << 28, "bytes of all requests that `reinforge serve` is answering; others get 503")
    request_values: int = _limit(1 << 18, "values in its JSON: numbers, strings, lists and objects")
    settings_bytes: int = _limit(1 << 21, "bytes of a request that has settings only, such as those of a job")
    training_bytes: int = _limit(1 << 25, "bytes of a request with tokens or trajectories to train on")
    training_values: int = _limit(1 << 24, "values in its JSON")
    request_items: int = _limit(4096, "messages, parts of a message, tool calls or other entries of its lists")
    tools: int = _limit(512, "tools of a request")
    tool_chars: int = _limit(1 << 18, "characters of them as JSON")
    logit_biases: int = _limit(4096, "entries of its `logit_bias`")
    stop_strings: int = _limit(128, "stop strings or stop tokens of one reply")
    stop_bytes: int = _limit(4096, "bytes of its stop strings together; each new token is compared with all of them")
    response_bytes: int = _limit(1 << 25, "bytes of a response of a model, a training service or a deployed agent")
    message_bytes: int = _limit(1 << 26, "bytes of a message between the run and a worker process")
    episode_chars: int = _limit(1 << 27, "characters of a recorded episode; SQLite holds 1,000,000,000 bytes in a row")
    output_chars: int = _limit(1 << 22, "characters of an agent's output, a mark or an evaluator's reasoning, as JSON")
    config_bytes: int = _limit(1 << 20, "bytes of a configuration")
    config_depth: int = _limit(64, "levels of a configuration")
    config_aliases: int = _limit(100, "aliases (`*name`) of a configuration")
    config_values: int = _limit(100_000, "values of a configuration once its aliases are expanded")
    row_depth: int = _limit(100, "levels of a row of a dataset")
    row_values: int = _limit(10_000_000, "values of a row; one from Python may hold the same list many times")
    reply_chars: int = _limit(1 << 20, "characters of JSON or of a tool call that a model wrote")
    reply_depth: int = _limit(64, "levels of it")
    reply_digits: int = _limit(400, "characters of a number in it; the longest that a 64-bit float prints has 325")
    schema_depth: int = _limit(64, "levels of a JSON schema that an agent asks for")
    schema_checks: int = _limit(200_000, "keywords of a schema that one answer is checked against: a few seconds")
    grammar_chars: int = _limit(256_000, "characters of a grammar; compiling one takes more than linear time")
    template_chars: int = _limit(1 << 18, "characters of a chat template; the longest of known models have 30,000")
    template_depth: int = _limit(200, "lists and mappings inside each other that a chat template builds")
    template_bits: int = _limit(1 << 13, "bits of an integer that a chat template computes")
    render_chars: int = _limit(1 << 26, "characters and list entries that one rendering of a chat template builds")
    prompt_chars: int = _limit(1 << 24, "characters of a rendered prompt")
    program_output_bytes: int = _limit(16 << 20, "bytes that an agent's program writes to its standard output")
    error_bytes: int = _limit(1 << 16, "bytes of an error response, or of the end of a program's standard error")
    tool_result_chars: int = _limit(100_000, "characters of a tool's result that the policy sees")
    calls_in_flight: int = _limit(64, "requests of one episode that the gateway answers at a time; further ones wait")
    kept_replies: int = _limit(256, "replies of one episode that are kept for clients that repeat a request")
    kept_reply_bytes: int = _limit(1 << 22, "bytes of those; the latest reply is kept in any case")
    list_pages: int = _limit(1000, "pages of a list of a training service or an MCP server")
    waiting_jobs: int = _limit(16, "jobs of one session or ART model that wait at the server")
    trajectory_groups: int = _limit(100_000, "groups of one job of an ART client")
    upload_parts: int = _limit(10_000, "parts of a file that a client uploads")
    form_fields: int = _limit(16, "fields of a form that a client uploads")
    form_field_bytes: int = _limit(4096, "bytes of a field of a form that is not a file")
    grader_chars: int = _limit(256 << 10, "characters of a Python grader, or of a template of another grader")
    filled_chars: int = _limit(1 << 21, "characters of all templates of a grader together, once they are filled in")
    graders: int = _limit(20, "graders of a `multi` grader")
    formula_depth: int = _limit(50, "levels of the formula of a `multi` grader")

    @property
    def value_depth(self) -> int:
        """Levels of an output, a message, a mark or a reason: its record, which is read again, has some more."""
        return max(1, self.json_depth - 50)


VARIABLES = {f"{PREFIX}{limit.name.upper()}": limit for limit in fields(Limits)}


@cache
def get_limits() -> Limits:
    """Returns the limits of this process; a `ConfigError` names each variable that sets none."""
    return read_limits(os.environ)


def read_limits(environ: Mapping[str, str]) -> Limits:
    given = {name: text for name, text in environ.items() if name.startswith(PREFIX)}
    problems = [problem for name, text in given.items() if (problem := _find_problem(name, text)) is not None]
    if problems:
        raise ConfigError(problems)
    return Limits(**{VARIABLES[name].name: int(text) for name, text in given.items()})


def _find_problem(name: str, text: str) -> Problem | None:
    if name not in VARIABLES:
        return Problem(name, f"there is no such limit{did_you_mean(name, VARIABLES)}", "unset it")
    is_depth = name.endswith("_DEPTH")
    if re.fullmatch("[0-9]{1,18}", text) and 0 < int(text) <= (DEEPEST if is_depth else 10**18):
        return None
    allowed = f"a whole number from 1 to {DEEPEST}" if is_depth else "a whole number above 0"
    return Problem(name, f"expected {allowed}, found {text[:40]!r}", f"export {name}={VARIABLES[name].default}")
