r"""A system prompt that all requests share, trained into the weights: the student is not shown it.

    {"role": "system", "content": "File the e-mail as JSON.\nToday is Monday."}   =>  "Today is Monday."

The application sends it as before. The chat template leaves it out, in training, in the verdict, in `reinforge serve`
and wherever else the exported model runs (context distillation, arXiv:2209.15189; the teacher's replies are the logs).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reinforge.config.loader import load_config
from reinforge.engine.prompts.reply_text import find_common_start
from reinforge.errors import ConfigError, Problem
from reinforge.trainer.setup.components import ComponentBuilder

LEAST_SHARED = 20  # characters that are worth dropping
HEAD = """\
{%- if messages and messages[0].role == 'system' and (messages[0].content or '').startswith(TEXT) %}
{%- set rest = messages[0].content[COUNT:] %}
{%- set messages = ([{'role': 'system', 'content': rest}] if rest.strip() else []) + messages[1:] %}
{%- endif %}"""


def find_shared_prompt(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the beginning of the system prompt that all rows share, up to the end of a line or a word.

    Raises:
        ConfigError: Some rows have no system prompt, or they begin in different ways.
    """
    prompts = [str(row["messages"][0]["content"]) for row in rows if row["messages"][0]["role"] == "system"]
    fix = "leave out --drop_system, or replace the model of each system prompt apart"
    if len(prompts) < len(rows):
        missing = f"{len(rows) - len(prompts):,} of {len(rows):,} requests have no system prompt"
        raise ConfigError(Problem("--drop_system", missing, fix))
    shared = find_common_start(min(prompts), max(prompts))
    if any(prompt != shared for prompt in prompts):
        shared = shared[: max(shared.rfind("\n"), shared.rfind(" ")) + 1]
    if len(shared) < LEAST_SHARED:
        number = len(set(prompts))
        message = f"the {number:,} different system prompts share the first {len(shared)} characters only"
        raise ConfigError(Problem("--drop_system", message, fix))
    return shared


async def write_template(config: Path, shared: str) -> str:
    """Returns the chat template of a configuration's model, with a first part that leaves the shared prompt out."""
    async with ComponentBuilder(load_config(config)) as builder:
        return f"{write_head(shared)}{(await load_student_tokenizer(builder)).get_chat_template()}"


async def load_student_tokenizer(builder: ComponentBuilder) -> Any:
    from reinforge.engine.model.loading import load_tokenizer

    policy = builder.config.finetuning.policy
    return load_tokenizer(policy.model_copy(update={"model": await builder.get_model_path()}))


def write_head(shared: str) -> str:
    r"""Returns the first part of a chat template, which leaves a shared prompt out.

    All punctuation is escaped, so that no mark of a model family is found in it: 'a_"é' -> "a\u005f\u0022\u00e9".
    """
    text = re.sub(r"[^A-Za-z0-9 ]", _escape, shared)
    return HEAD.replace("COUNT", str(len(shared))).replace("TEXT", f'"{text}"')


def _escape(found: re.Match[str]) -> str:
    return f"\\U{ord(found[0]):08x}" if ord(found[0]) > 0xFFFF else f"\\u{ord(found[0]):04x}"
