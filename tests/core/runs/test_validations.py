"""The best of several validations."""

from reinforge.runs.rows import ValidationRow, choose_best_validation


def validation(epoch, reward, **metrics):
    return ValidationRow(epoch, reward, metrics=metrics, version=epoch + 1, checkpoint=f"step-{epoch}")


def test_best_has_the_highest_reward_and_the_earliest_of_equals():
    rows = [validation(-1, 0.4), validation(0, None), validation(2, 0.55), validation(1, 0.55), validation(3, 0.5)]
    assert choose_best_validation(rows).epoch == 1


def test_baseline_can_be_the_best():
    assert choose_best_validation([validation(-1, 0.6), validation(0, 0.5), validation(1, 0.6)]).epoch == -1


def test_unknown_scores_never_win():
    assert choose_best_validation([validation(0, None), validation(1, float("nan"))]) is None
    assert choose_best_validation([]) is None
    assert choose_best_validation([validation(0, None), validation(1, -5.0)]).epoch == 1


def test_the_gate_metric_decides_if_any_validation_has_it():
    rows = [
        validation(0, 0.9, legal=0.1),
        validation(1, 0.5, legal=None),
        validation(2, 0.1, legal=0.8),
        validation(3, 1.0),
    ]
    assert choose_best_validation(rows, "legal").epoch == 2
    assert choose_best_validation(rows, "unheard of").epoch == 3
    assert choose_best_validation(rows).epoch == 3
