"""Toy projects, and undisturbed runs of them to compare with."""

import pytest

from tests.fault.killed_servers import KilledServers
from tests.fault.kit import Toy

DATASET, BUILDER, ALGORITHM = "eval.general.dataset.file_path", "trajectory_builders.builder", "finetuning.algorithm"
ROWS = {"_type": "dataset", "examples_per_epoch": 6}
METHODS = {
    "lora": {"finetuning.policy.lora": {"r": 4, "lora_alpha": 8}},
    "sft": {ALGORITHM: {"_type": "sft", "min_reward": 0.2}},
    "sft of a file": {ALGORITHM: {"_type": "sft"}, BUILDER: ROWS, DATASET: "shown.jsonl"},
    "answers of a file": {ALGORITHM: {"_type": "sft"}, BUILDER: {"_type": "answers", "examples_per_epoch": 6}},
    "dpo of a file": {ALGORITHM: {"_type": "dpo"}, BUILDER: ROWS, DATASET: "pairs.jsonl"},
    "two adapters": {
        "finetuning.policy.lora": {"r": 4, "lora_alpha": 8},
        "llms": {"agent": {"_type": "policy", "adapter": "a"}, "worker": {"_type": "policy", "adapter": "b"}},
        "workflow": {"_type": "python", "function": "task:team", "llm": "agent"},
    },
    "ppo": {ALGORITHM: {"_type": "ppo"}, "finetuning.policy.batch.num_iterations": 2},
    "pipeline": {
        "trajectory_builders.rows": ROWS,
        "finetuning.pipeline": {
            "sft": {
                "num_epochs": 2,
                "algorithm": {"_type": "sft"},
                "trajectory_builder": "rows",
                "dataset": "told.jsonl",
            },
            "grpo": {
                "num_epochs": 2,
                "algorithm": {"_type": "dithered", "kl_coef": 0.5},
                "policy": {"optimizer": {"name": "rmsprop", "learning_rate": 0.001}},
            },
        },
    },
}
"""Changes that give a toy project another method; without any it trains all weights with GRPO."""


@pytest.fixture(scope="session")
def finished(tiny_model_dir, tmp_path_factory):
    """Returns an undisturbed run, made once per set of changes: `finished({"finetuning.seed": 1})`."""
    known = {}

    def finish(changes):
        key = repr(sorted(changes.items()))
        if key not in known:
            toy = Toy(tmp_path_factory.mktemp("finished"), tiny_model_dir)
            for path, value in changes.items():
                toy.set(path, value)
            child = toy.start()
            assert child.wait() == 0, child.said
            known[key] = toy
        return known[key]

    return finish


@pytest.fixture
def make_toy(tiny_model_dir, tmp_path):
    """Returns a new project with these changes, in its own folder."""
    count = iter(range(1_000_000))

    def make(changes=None):
        toy = Toy(tmp_path / f"toy-{next(count)}", tiny_model_dir)
        for path, value in (changes or {}).items():
            toy.set(path, value)
        return toy

    return make


@pytest.fixture
def servers(tmp_path, serve):
    """A server that can be killed; a module's `serve` is what it does."""
    servers = KilledServers(serve, tmp_path / "data")
    yield servers
    servers.close()


@pytest.fixture
def toy(make_toy):
    return make_toy()


@pytest.fixture
def whole(finished):
    """The same run as `toy`'s, undisturbed."""
    return finished({})
