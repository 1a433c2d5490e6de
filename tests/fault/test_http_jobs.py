"""A run that trains at another server and is killed: resumed, it has the weights of a run that was never killed."""

import pytest

from tests.fault.kit import Toy, killed_at
from tests.protocols.sessions import serve_sessions, use_http_adapter

pytestmark = pytest.mark.timeout(300)
STAGES = (
    "rollout.after_journal:30",
    "submit.after_intent:2",
    "submit.after_send:2",
    "ckpt.after_rename:2",
    "publish.mid",
)
SLOW = {"submit.after_send:2"}


def make_toy(folder, model):
    """Returns a project whose numbers do not depend on what else runs: its episodes are sampled one by one."""
    toy = Toy(folder, model).set("finetuning.deterministic", False).set("finetuning.algorithm", {"_type": "grpo"})
    return toy.set("eval.general.max_concurrency", 1)


def versions_of(toy):
    return toy.rows_of("SELECT version, fingerprint FROM policy_versions ORDER BY version")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, tiny_model_dir):
    """The versions of a run in one process."""
    toy = make_toy(tmp_path_factory.mktemp("here") / "toy", tiny_model_dir)
    child = toy.start()
    assert child.wait() == 0, child.said
    return versions_of(toy)


@pytest.mark.parametrize(
    "site", [pytest.param(site, marks=pytest.mark.slow if site in SLOW else pytest.mark.fault) for site in STAGES]
)
def test_a_killed_run_goes_on_and_ends_with_the_same_weights(tmp_path, tiny_model_dir, uninterrupted, site):
    with serve_sessions(tiny_model_dir, tmp_path / "kept") as app:
        toy = use_http_adapter(make_toy(tmp_path / "toy", tiny_model_dir), app)
        killed_at(toy, site)
    assert toy.summary["status"] == "completed"
    assert versions_of(toy) == uninterrupted
