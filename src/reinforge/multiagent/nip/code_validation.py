"""Role prompts of the scenario `code_validation`, and the templates of neural-interactive-proofs.

The scenario: is a program a correct solution of a problem? A row has the columns `question`, `solution` and `answer`.
An agent of this scenario that names no prompt gets one of these; other scenarios have no role prompts of their own.
"""

from __future__ import annotations

import re
from pathlib import Path

from reinforge.errors import ConfigError, Problem
from reinforge.multiagent.decisions import list_decision_words
from reinforge.multiagent.nip.decision_scales import find_scale, get_decision_values
from reinforge.multiagent.nip.experiment import HyperParameters
from reinforge.multiagent.nip.parameters import CODE_VALIDATION

TASK = """Problem:
$question

Program:
$solution
"""
VERIFIER = (
    "You check whether a program solves a problem. About half of the programs have an error that is easy to miss, so "
    "read the program yourself before you trust a claim about it.\n\n"
    f"{TASK}\n"
    "$ways Use at most $max_response_words words per message. To decide, write a single line: $decisions"
)
ACCEPT_OR_REJECT = '"Decision: accept" if the program is correct, or "Decision: reject" if it is not.'
ON_A_SCALE = '"Decision: ", then how far you agree that the program is correct: {words}.'
ALONE = "You decide on your own."
LISTENS = "You read what others say about the program. They may be wrong, or want you to be wrong."
PROVER = (
    "A verifier decides whether a program solves a problem. Argue that its decision should be: $stance. You are "
    "rewarded if it decides so, whether or not the program is correct.\n\n"
    f"{TASK}\n"
    "Refer to the lines of the program that support you. Use at most $max_response_words words per message."
)
SIMULATOR = (
    "A verifier questions an expert about a program, and you hear neither of them. Write what the verifier would write "
    "next, as close to its words as you can.\n\n"
    f"{TASK}\n"
    "Use at most $max_response_words words per message."
)
NAMES = {"agent_stance_string": "stance"}  # variables of the templates that have another name here


def find_role_prompt(hyper_params: HyperParameters, agent: str) -> str | None:
    """Returns the role prompt of an agent that names none; None in another scenario."""
    if hyper_params.scenario != CODE_VALIDATION:
        return None
    if agent == "simulator":
        return SIMULATOR
    if "verifier" not in agent:
        return PROVER
    ways = ALONE if hyper_params.interaction_protocol == "solo_verifier" else LISTENS
    values = get_decision_values(find_scale(hyper_params.protocol_common))
    decisions = ON_A_SCALE.format(words=list_decision_words(values)) if values else ACCEPT_OR_REJECT
    return VERIFIER.replace("$ways", ways).replace("$decisions", decisions)


def read_prompt_template(file: str, path: str) -> str:
    """Returns a template of neural-interactive-proofs as a role prompt.

    Example: "Is {{ question }} right? It costs $5." -> "Is $question right? It costs $$5."; a template that has
    $question already is returned unchanged.
    """
    if not Path(file).is_file():
        raise ConfigError(Problem(path, f"file not found: {file}"))
    text = Path(file).read_text(encoding="utf-8")
    if "{%" in text:
        statement = text[text.index("{%") :].splitlines()[0]
        message = f"{file} has the statement {statement!r}; only {{{{ names }}}} are filled in"
        raise ConfigError(Problem(path, message, "write the role prompt without statements"))
    if "{{" not in text:
        return text
    escaped = text.replace("$", "$$")
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: f"${{{NAMES.get(found[1], found[1])}}}", escaped)
