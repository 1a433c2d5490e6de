"""The task's configuration measures what its figures claim, and its names are registered."""

from reinforge.config.loader import load_config
from reinforge.registry import REGISTRY
from reinforge.tasks.tickets import TICKETS


def test_it_is_judged_on_all_fields_right_on_emails_enough():
    config = load_config(TICKETS).config
    dataset, run = config.eval.general.dataset, config.finetuning
    assert run.gate.metric == "exact"
    assert config.eval.evaluators["exact"].static_type == "tickets_exact"
    assert run.gate.guard_metrics.keys() == {"schema"}
    assert run.splits.key == "split"
    assert dataset.num_confirm >= 300
    assert dataset.num_train >= run.num_epochs * config.trajectory_builders["groups"].examples_per_epoch


def test_a_run_by_path_finds_the_names():
    assert REGISTRY.get("model", "tickets").origin == "reinforge.tasks.tickets.starter"
    assert {"tickets", "tic_tac_toe"} <= {*REGISTRY.names("workflow")} & {*REGISTRY.names("dataset")}
    assert {"tickets_exact", "tickets_fields", "tickets_schema", "tickets_reward"} <= {*REGISTRY.names("evaluator")}
