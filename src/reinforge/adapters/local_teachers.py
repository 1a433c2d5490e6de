"""The teachers of a run's stages, and whether they have the policy's tokens."""

from __future__ import annotations

from reinforge.config.pipeline import list_stages
from reinforge.config.policy import PolicyConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.engine.model.vocabulary import FAMILY, find_token_difference, read_vocabulary
from reinforge.errors import Problem
from reinforge.interfaces import Algorithm, Teacher
from reinforge.rollout.models.local_llm import LocalLLM


def find_teachers(algorithm: Algorithm, run_config: FinetuneConfig) -> list[tuple[str, Teacher]]:
    """Returns the teacher of each stage that has one, with the path of the setting that names it."""
    stages = list_stages(run_config)
    places = {each.path if each.settings.algorithm is not None else "finetuning": each.first for each in stages}
    places = places or {"finetuning": 0}
    found = [(f"{path}.algorithm.teacher", algorithm.for_epoch(first)) for path, first in places.items()]
    return [(path, algorithm.teacher) for path, algorithm in found if algorithm.teacher is not None]


def check_teachers(algorithm: Algorithm, run_config: FinetuneConfig, policy: PolicyConfig) -> list[Problem]:
    """Returns the problem of each teacher in this process whose files show that it has other tokens."""
    problems = []
    for path, teacher in find_teachers(algorithm, run_config):
        if isinstance(teacher, LocalLLM):
            own, other = (read_vocabulary(each) for each in (policy, teacher.policy))
            difference = find_token_difference(own, other) if own is not None and other is not None else None
            if difference is not None:
                message = f"the teacher {teacher.model_name} has another tokenizer than the policy: {difference}"
                problems.append(Problem(path, message, FAMILY))
    return problems
