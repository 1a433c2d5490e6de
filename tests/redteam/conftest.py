"""A tiny random tester and target."""

from contextlib import ExitStack

import pytest

from reinforge.redteam import ASTProblem, KeywordScorer
from tests.models import make_tiny_model


@pytest.fixture(scope="session")
def tiny_target_dir(tmp_path_factory, tiny_model_dir):
    """Another model with the tester's tokenizer; training a second tokenizer might break ties differently."""
    from transformers import AutoTokenizer

    folder = make_tiny_model(tmp_path_factory.mktemp("target") / "tiny", seed=1)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(folder)
    return folder


@pytest.fixture
def make_problem(tiny_model_dir, tiny_target_dir):
    with ExitStack() as problems:

        def make(attacker=None, target=None, scorer=None, **settings):
            settings = {"max_tokens": 4, "target_max_tokens": 4, "device": "cpu", **settings}
            models = attacker or tiny_model_dir, target or tiny_target_dir
            return problems.enter_context(ASTProblem(*models, scorer or KeywordScorer(["a", "e"]), **settings))

        yield make
