"""A key in the wrong place: the error names the setting that was meant, in the words of the place it came from."""

import pytest

import reinforge
from reinforge.config.loader import build_config, load_config
from reinforge.errors import ConfigError

LEARNING_RATE = "finetuning.policy.optimizer.learning_rate"
FILE = """\
trajectory_builders:
  groups:
    _type: group
finetuning:
  num_epochs: 3
"""


def refuse(tmp_path, text=FILE, override=None):
    file = tmp_path / "run.yml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides=[override] if override else [])
    (problem,) = caught.value.problems
    return f"{problem.message}\nfix: {problem.fix}"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("limits.max_minutes", "finetuning.limits.max_minutes"),
        ("max_minutes", "finetuning.limits.max_minutes"),
        ("learning_rate", LEARNING_RATE),
        ("finetuning.learning_rate", LEARNING_RATE),
        ("finetuning.policy.learning_rate", LEARNING_RATE),
        ("finetuning.policy.critic.optimizer.learning_rate", LEARNING_RATE),
        ("trajectory_builders.groups.learning_rate", LEARNING_RATE),
        ("optimizer.learning_rate", LEARNING_RATE),
        ("lerning_rate", LEARNING_RATE),
        ("finetuning.policy.lr", LEARNING_RATE),
        ("optimizer.lr", LEARNING_RATE),
        ("seed", "finetuning.seed"),
        ("output_dir", "finetuning.output_dir"),
        ("eval.output_dir", "eval.general.output_dir"),
        ("finetuning.num_generations", "trajectory_builders.groups.num_generations"),
    ],
)
def test_an_override_names_the_setting_that_was_meant(tmp_path, path, meant):
    text = refuse(tmp_path, override=(path, "5"))
    assert f'did you mean "{meant}"?' in text
    assert text.endswith(f"fix: -o {meant} VALUE")


def test_a_key_of_a_file_is_to_be_moved(tmp_path):
    text = refuse(tmp_path, f"{FILE}  learning_rate: 0.1\n")
    assert f'unknown key "learning_rate", did you mean "{LEARNING_RATE}"? allowed: ' in text
    assert text.endswith(f"fix: move it to {LEARNING_RATE}")


def test_settings_from_python_are_written_as_python():
    with pytest.raises(ConfigError) as caught:
        build_config({"finetuning": {"learning_rate": 0.1}})
    fix = 'pass settings={"policy": {"optimizer": {"learning_rate": ...}}}'
    assert [problem.fix for problem in caught.value.problems] == [fix]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("learning_rate", '; pass settings={"policy": {"optimizer": {"learning_rate": ...}}}'),
        ("lr", '; pass settings={"policy": {"optimizer": {"learning_rate": ...}}}'),
        ("seed", '; pass settings={"seed": ...}'),
        ("epoch", ', did you mean "epochs"?'),
        ("verbose", ""),
    ],
)
def test_an_unknown_argument_of_finetune_names_the_argument_or_setting(given, expected):
    with pytest.raises(TypeError) as caught:
        reinforge.finetune(None, [], "exact_match", "model", **{given: 1})
    assert str(caught.value) == f"finetune() has no argument '{given}'{expected}"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (("finetuning.num_epcohs", "5"), 'did you mean "num_epochs"?'),  # spelled nearly like a key of the same place
        (("finetuning.name", "x"), 'unknown key "name"; allowed: '),  # too many places have it
        (("finetuning.nonsense", "x"), 'unknown key "nonsense"; allowed: '),
    ],
)
def test_what_no_other_place_explains_is_told_as_before(tmp_path, override, expected):
    assert expected in refuse(tmp_path, override=override)
