"""A search whose process is killed at any time and resumed ends with the same record and the same model.

With a budget in tokens and `deterministic` nothing depends on the clock, so the whole of `search.json` is compared.
"""

import hashlib
import json
import random
import shutil
import signal
import time

import pytest

from tests.fault import mutations
from tests.fault.kit import KILLED, Child, Toy
from tests.fault.sizes import scaled

START = ("--run_name", "s", "--budget_tokens", "2500", "--seeds", "2")


class SearchToy(Toy):
    """A search of two rungs and two seeds."""

    @property
    def record(self):
        return self.folder / "runs" / "s"

    def search(self, **options):
        """Does what a user does after a kill: resumes, or starts if there is no search yet."""
        self.write_files()
        has_begun = (self.record / "search.json").exists()
        if not has_begun:
            shutil.rmtree(self.record, ignore_errors=True)
        return Child(
            self.folder, ["run.yml", *(("--resume", "s") if has_begun else START)], command="improve", **options
        )

    def end(self, **options):
        child = self.search(**options)
        assert child.wait() == 0, child.said
        return self

    def facts(self):
        record = json.loads((self.record / "search.json").read_text())
        weights = sorted((self.record / "model").glob("*.safetensors"))
        return {**record, "weights": [hashlib.sha256(path.read_bytes()).hexdigest() for path in weights]}


def find_differences(toy, whole):
    left, right = toy.facts(), whole.facts()
    return [name for name in right if left[name] != right[name]]


@pytest.fixture(scope="module")
def whole(tiny_model_dir, tmp_path_factory):
    """An undisturbed search."""
    toy = SearchToy(tmp_path_factory.mktemp("whole"), tiny_model_dir)
    child = toy.search()
    child.wait_for(toy.record / "search.json")
    started = time.monotonic()
    assert child.wait() == 0, child.said
    toy.life_s = time.monotonic() - started
    facts = toy.facts()
    assert len(facts["sizes"]) == 2
    assert [trial["finished"] for trial in facts["repeats"]] == [0]
    assert len(facts["weights"]) == 1
    return toy


@pytest.mark.fault
@pytest.mark.parametrize("number", range(scaled(30)))
def test_a_search_killed_at_a_random_time_ends_as_if_undisturbed(tmp_path, tiny_model_dir, whole, number):
    toy, rng, kills = SearchToy(tmp_path / "toy", tiny_model_dir), random.Random(number), 0
    while kills < 3:
        child = toy.search()
        child.send(signal.SIGKILL, rng.uniform(0.1, 0.4) * whole.life_s)
        if child.wait() == 0:
            break
        kills += 1
    assert kills > 1
    assert find_differences(toy.end(), whole) == []


@pytest.mark.fault
def test_a_search_killed_before_a_trial_has_a_journal_ends_as_if_undisturbed(tmp_path, tiny_model_dir, whole):
    toy = SearchToy(tmp_path / "toy", tiny_model_dir)
    assert toy.search(crash_at="db.before_commit").wait() == KILLED
    for path in (toy.record / "trials" / "01-as-configured").glob("run.sqlite*"):
        path.unlink()
    assert find_differences(toy.end(), whole) == []


@pytest.mark.fault
@pytest.mark.parametrize(
    ("before", "after"), [(mutations.write_the_search_once, None), (None, mutations.forget_the_share_of_a_rung)]
)
def test_a_search_that_forgets_makes_a_difference(tmp_path, tiny_model_dir, whole, before, after):
    """Mutation check of the process that is killed in its second rung, or of the one that resumes.

    One that plans again gives a trial that has begun a shorter stage of answers, which that trial refuses.
    """
    toy = SearchToy(tmp_path / "toy", tiny_model_dir)
    child = toy.search(crash_at="step.after_optim:15", mutation=before)
    assert child.wait() == KILLED, child.said
    child = toy.search(mutation=after)
    if child.wait() == 2:
        assert "02-learn-the-answers has changed since it started" in child.said
    else:
        assert "trials" in find_differences(toy, whole)
