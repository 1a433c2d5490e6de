"""The same configuration, seed and threads give the same metrics, and a run resumes only unchanged."""

import pytest

from tests.fault import mutations
from tests.fault.kit import KILLED, differences

CUT = {"finetuning.sampling.top_p": 0.9, "finetuning.sampling.min_p": 0.001}
CHANGES = [
    ("finetuning.seed", "0", "1"),
    ("finetuning.num_epochs", "4", "3"),
    ("finetuning.policy.optimizer.learning_rate", "0.01", "0.02"),
    ("finetuning.policy.batch.steps_per_job", "2", "3"),
    ("finetuning.sampling.temperature", "1.0", "0.5"),
    ("finetuning.algorithm.clip_low", "0.2", "0.3"),
    ("finetuning.gate.margin", "-1.0", "0.5"),
    ("finetuning.splits.confirm", "0.25", "0.2"),
    ("finetuning.outcomes.overlong", "0.0", "-1.0"),
    ("trajectory_builders.builder.num_generations", "4", "5"),
    ("trainers.trainer.save_every", "1", "2"),
]


@pytest.fixture
def stopped(toy):
    """A project whose run was killed in its second epoch."""
    assert toy.start(crash_at="batch.sealed:2").wait() == KILLED
    return toy


@pytest.mark.fault
def test_samples_that_do_not_depend_on_the_seed_make_a_difference(toy, whole):
    """Mutation check."""
    assert toy.start(mutation=mutations.draw_without_the_seed).wait() == 0
    assert "metrics" in differences(toy.run, whole.run)


def test_changes_are_refused(stopped, whole):
    """Exit code 2, with path, old and new value of each setting; the run is unchanged, and as one with its seed is."""
    for some in (CHANGES[:6], CHANGES[6:]):  # the message lists nine
        child = stopped.resume(*(part for path, _, new in some for part in ("-o", path, new)))
        assert child.wait() == 2, child.said
        for path, old, new in some:
            assert f"{path}: {old} -> {new}" in child.said
    for question, code in (("something else", 2), ("say 0", 0)):
        stopped.rows[0]["question"] = question
        stopped.write_files()
        child = stopped.resume()
        assert (child.wait(), "the examples of the dataset" in child.said) == (code, code == 2), child.said
    assert differences(stopped.run, whole.run) == []


@pytest.mark.fault
def test_changed_code_that_is_not_compared_makes_a_difference(stopped, whole):
    """Mutation check: the second half of the run is another agent's, without a word."""
    code = (stopped.folder / "task.py").read_text()
    (stopped.folder / "task.py").write_text(code.replace("max_tokens=4", "max_tokens=3"))
    child = stopped.resume(mutation=mutations.compare_no_code)
    assert (child.wait(), "has changed since" in child.said) == (0, False), child.said
    assert "metrics" in differences(stopped.run, whole.run)


@pytest.mark.fault
def test_changed_code_can_be_allowed(stopped):
    with open(stopped.folder / "task.py", "a") as file:
        file.write("# a comment\n")
    child = stopped.resume("--allow_config_change")
    assert child.wait() == 0, child.said
    (data,) = stopped.rows_of("SELECT data FROM stages WHERE stage = 'CONFIG'")
    assert "task.py changed" in data[0]


@pytest.mark.slow
def test_a_change_can_be_allowed(stopped, whole):
    """Episodes of the old temperature are not reused, though all 24 of the second epoch are in the journal."""
    child = stopped.resume("-o", "finetuning.sampling.temperature", "0.9", "--allow_config_change")
    assert child.wait() == 0, child.said
    assert stopped.num_run == whole.num_run + 24
    assert sum(stopped.summary["episodes"].values()) == whole.num_run
    (data,) = stopped.rows_of("SELECT data FROM stages WHERE stage = 'CONFIG'")
    assert "finetuning.sampling.temperature: 1.0 -> 0.9" in data[0]


@pytest.mark.slow
def test_tokens_of_a_restricted_support_are_trained_the_same_after_a_kill(make_toy, finished):
    """The tokens that they were sampled from are in the journal, so none of its 24 episodes runs again."""
    whole = finished(CUT)
    toy = make_toy(CUT).end_after("batch.sealed:2")
    assert toy.num_run == whole.num_run
    assert differences(toy.run, whole.run) == []


@pytest.mark.fault
def test_forgotten_supports_make_a_difference(make_toy, finished):
    """Mutation check: without them the second epoch has nothing to train."""
    toy = make_toy(CUT)
    assert toy.start(crash_at="batch.sealed:2").wait() == KILLED
    child = toy.resume(mutation=mutations.forget_supports)
    assert (child.wait(), "kept more than 1024 tokens" in " ".join(child.said.split())) == (3, True), child.said


@pytest.mark.fault
def test_a_change_that_is_not_refused_makes_a_difference(stopped):
    """Mutation check."""
    path, _, new = CHANGES[2]
    assert stopped.resume("-o", path, new, mutation=mutations.allow_every_change).wait() == 0
