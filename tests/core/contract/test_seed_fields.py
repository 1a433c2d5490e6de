"""Every data model of the seeds has the fields, types and defaults of tests/data/seed_fields.yml."""

import types
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import pytest
import yaml
from pydantic import ValidationError
from pydantic_core import PydanticUndefined

import reinforge.finetuning as harness
import reinforge.multiagent as multiagent

TABLE = yaml.safe_load((Path(__file__).parents[2] / "data" / "seed_fields.yml").read_text())


def spelled(annotation):
    if annotation is type(None):
        return "None"
    if get_origin(annotation) in (Union, types.UnionType):
        return " | ".join(map(spelled, get_args(annotation)))
    if get_origin(annotation) is not None:
        inside = ", ".join("..." if arg is Ellipsis else spelled(arg) for arg in get_args(annotation))
        return f"{get_origin(annotation).__name__}[{inside}]"
    if get_origin(annotation) is None and isinstance(annotation, str):
        return f"'{annotation}'"
    return "Any" if annotation is Any else annotation.__name__


def default_of(field):
    if field.default_factory is not None:
        if field.default_factory.__name__ in ("time", "<lambda>") and not isinstance(field.default_factory(), list):
            return "made"
        made = field.default_factory()
        is_block = hasattr(made, "model_fields_set") or is_dataclass(made)
        return f"{type(made).__name__}()" if is_block else made
    default = field.default
    if default is PydanticUndefined:
        return "required"
    return str(default) if isinstance(default, Path) else list(default) if isinstance(default, tuple) else default


@pytest.mark.parametrize("name", TABLE)
def test_fields_types_and_defaults(name):
    model = getattr(harness if hasattr(harness, name) else multiagent, name)
    fields = dict(getattr(model, "model_fields", None) or model.__pydantic_fields__)
    rows = dict(TABLE[name])
    ours = rows.pop("ours", [])
    assert set(fields) - set(ours) == set(rows)
    for field_name in ours:
        assert not fields[field_name].is_required(), f"{name}.{field_name} is ours, so it must be optional"
    for field_name, (annotation, default, *bounds) in rows.items():
        field = fields[field_name]
        found = spelled(field.annotation)
        assert found == annotation or (annotation == "list" and found.startswith("list[")), field_name
        assert default_of(field) == default, field_name
        for key, bound in (bounds[0] if bounds else {}).items():
            assert any(getattr(constraint, key, None) == bound for constraint in field.metadata), (field_name, key)


ENUMS = {
    "TrainingStatusEnum": "pending running completed failed canceled",
    "EpisodeItemRole": "user assistant system function tool environment other",
    "IntermediateStepType": (
        "LLM_START LLM_END LLM_NEW_TOKEN TOOL_START TOOL_END WORKFLOW_START WORKFLOW_END TASK_START TASK_END "
        "FUNCTION_START FUNCTION_END CUSTOM_START CUSTOM_END SPAN_START SPAN_CHUNK SPAN_END TTC_START TTC_END"
    ),
}


@pytest.mark.parametrize("name", ENUMS)
def test_words(name):
    words = getattr(harness, name)
    assert issubclass(words, Enum)
    assert [word.value for word in words] == ENUMS[name].split()


def test_the_steps_shortcuts():
    step = harness.IntermediateStep(
        parent_id="root",
        function_ancestry={"function_id": "f", "function_name": "f"},
        payload={"event_type": "LLM_END", "name": "m", "tags": ["t"], "data": {"output": "x", "more": 1}},
    )
    assert (step.event_type, step.name, step.tags) == ("LLM_END", "m", ["t"])
    assert step.metadata is step.usage_info is None
    assert (step.data.output, step.data.more) == ("x", 1), "extra fields are kept"
    assert step.UUID == step.payload.UUID
    assert step.event_timestamp == step.payload.event_timestamp


def test_copy_with_updates():
    item = harness.EvalInputItem(id="1", input_obj="q", expected_output_obj="a", full_dataset_entry={})
    assert item.copy_with_updates(output_obj="b").output_obj == "b"
    assert item.output_obj is None


def test_enabled_needs_all_three_parts_and_the_reward():
    """NAT core 9: their check forgets the reward function, which fails after the whole rollout was paid."""
    with pytest.raises(ValidationError, match="trainer, trajectory_builder, trainer_adapter, reward_function"):
        harness.FinetuneConfig(enabled=True)


def test_run_config_ignores_what_it_does_not_know():
    assert harness.FinetuneRunConfig(config_file="x.yml", unknown=1).config_file == Path("x.yml")


def test_base_classes_take_the_keyword_name():
    class Mine(harness.TrainerConfig, name="mine"):
        pass

    assert Mine.static_type == "mine"
    assert Mine().reward is None


def test_every_public_name_is_there_and_sorted():
    assert sorted(harness.__all__) == sorted(set(harness.__all__))
    assert all(hasattr(harness, name) for name in harness.__all__)
