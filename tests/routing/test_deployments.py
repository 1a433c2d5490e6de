"""Simulated deployments: the promise is broken in at most 5 % of them, and a drift is noticed.

The student is right in 30 to 90 % of the requests, the teacher in 95 or 100 %; the confidence says much, little or
nothing; 500 to 2,000 requests calibrate the router. Whether the promise holds is the expected loss at the chosen
threshold, over 20,000 other requests.
"""

import numpy as np
import pytest

from reinforge.routing.drift import DriftCheck
from reinforge.routing.risk import calibrate
from reinforge.routing.router import Router
from reinforge.routing.signals import choose_thresholds
from reinforge.serving.running_check import RunningCheck

MARGIN = 0.02
GRID = (np.arange(2000) + 0.5) / 2000


class Deployment:
    """Requests of a difficulty u in [0, 1]: the student is right with a probability that falls with u."""

    def __init__(self, number):
        self.random = random = np.random.default_rng([41, number])
        self.accuracy, self.slope = random.uniform(0.3, 0.9), random.choice([0.0, 3.0, 12.0])
        self.teacher, self.count = random.choice([0.95, 1.0]), int(random.choice([500, 1000, 2000]))
        low, high = -30.0, 30.0
        for _ in range(40):
            middle = (low + high) / 2
            too_low = np.mean(1 / (1 + np.exp(self.slope * GRID - middle))) < self.accuracy
            low, high = (middle, high) if too_low else (low, middle)
        self.offset = low

    def draw(self, count, kept_share=1.0, hard=1.0):
        """Returns confidences, and how likely student and teacher are right.

        Args:
            kept_share: After a drift the student is right so many times as often.
            hard: After a drift of a part, it is never right from this difficulty on.
        """
        difficulty = self.random.random(count)
        right = kept_share / (1 + np.exp(self.slope * difficulty - self.offset)) * (difficulty < hard)
        return 1 - difficulty + self.random.normal(0, 0.05, count), right, np.full(count, self.teacher)

    def sample(self, count, kept_share=1.0, hard=1.0):
        confidences, *shares = self.draw(count, kept_share, hard)
        return confidences, *((self.random.random(count) < share).astype(float) for share in shares)

    def calibrate(self):
        thresholds = choose_thresholds(self.draw(300)[0])
        self.router = calibrate(*self.sample(self.count), MARGIN, thresholds=thresholds)
        return self.router

    def expected_loss(self, threshold, kept_share=1.0, hard=1.0):
        confidences, student, teacher = self.draw(20_000, kept_share, hard)
        return 0.0 if threshold is None else float(((teacher - student) * (confidences >= threshold)).mean())

    def draw_losses(self, count, kept_share=1.0):
        confidences, student, teacher = self.sample(count, kept_share)
        return ((teacher - student) * (confidences >= self.router.threshold)).tolist()

    def draw_disagreements(self, count, hard=1.0):
        """Returns the confidences of the replies with which the teacher disagrees; -inf: it agrees."""
        confidences, student, teacher = self.sample(count, hard=hard)
        return np.where(teacher > student, confidences, -np.inf).tolist()


def measure_promises(num_deployments):
    """Returns the share of broken promises, of the router and of a threshold chosen by the measured loss alone."""
    broken = naive = 0
    for number in range(num_deployments):
        deployment = Deployment(number)
        found = deployment.calibrate()
        broken += deployment.expected_loss(found.threshold) > MARGIN
        measured = [point.threshold for point in found.curve if point.difference >= -MARGIN]
        naive += deployment.expected_loss(min(measured, default=None)) > MARGIN
    return broken / num_deployments, naive / num_deployments


def measure_checks(num_deployments, loss_after=0.1):
    """Returns how often the check stops while the promise holds, and within 500 requests after it is broken."""
    false, found, drifted = 0, 0, 0
    for number in range(num_deployments):
        deployment = Deployment(number)
        deployment.calibrate()
        if deployment.router.threshold is None or deployment.expected_loss(deployment.router.threshold) > MARGIN:
            continue
        shares = [
            share
            for share in (0.9, 0.7, 0.5, 0.2)
            if deployment.expected_loss(deployment.router.threshold, share) >= loss_after
        ]
        if not shares:  # too little stays local for a loss of this size
            continue
        drifted += 1
        check = DriftCheck(MARGIN)
        before = deployment.draw_losses(int(deployment.random.integers(0, 1000)))
        if "stop" in [check.add(loss) for loss in before]:
            false += 1
            continue
        found += any(check.add(loss) == "stop" for loss in deployment.draw_losses(500, shares[0]))
    return false / drifted, found / (drifted - false), drifted


def measure_steps(num_deployments):
    """Returns what becomes of drifts after which the student fails at the harder half of what it keeps.

    How often the threshold rises before; and after 500 checked requests, how often nothing stays local, how often the
    mixture still loses more than three times the margin, and the mean share that stays local, in parts of the best.
    """
    raised, stopped, worse, shares = 0, 0, 0, []
    for number in range(num_deployments):
        deployment = Deployment(number)
        found = deployment.calibrate()
        if found.threshold is None or deployment.expected_loss(found.threshold) > MARGIN:
            continue
        hard = (1 - found.threshold) / 2
        if deployment.expected_loss(found.threshold, hard=hard) < 0.1:
            continue
        check = RunningCheck(Router.from_calibration("mean_logprob", found))
        for lost_at in deployment.draw_disagreements(int(deployment.random.integers(0, 1000))):
            check.add("checked", lost_at)
        raised += check.router.threshold != found.threshold
        for lost_at in deployment.draw_disagreements(500, hard):
            check.add("checked", lost_at)
        stopped += check.is_stopped
        worse += deployment.expected_loss(check.router.threshold, hard=hard) > 3 * MARGIN
        best = min(each for each in found.kept if deployment.expected_loss(each, hard=hard) <= MARGIN)
        confidences = deployment.draw(20_000)[0]
        shares.append((confidences >= (check.router.threshold or 9.0)).mean() / (confidences >= best).mean())
    count = len(shares)
    return raised / count, stopped / count, worse / count, float(np.mean(shares)), count


def test_the_promise_of_a_few_deployments():
    broken, naive = measure_promises(60)
    assert broken <= 0.05
    assert naive > 0.2, "mutation check: without the test, the promise is often broken"


def test_the_drift_of_a_few_deployments():
    false, found, drifted = measure_checks(40)
    assert false <= 0.05
    assert found >= 0.95
    assert drifted >= 8


def test_a_drift_of_a_part_raises_the_threshold_of_a_few_deployments_and_stops_none():
    raised, stopped, worse, share, drifted = measure_steps(8)
    assert raised <= 0.2
    assert max(stopped, worse) <= 0.05
    assert 0.8 <= share <= 1.5
    assert drifted >= 2


LONG = pytest.mark.parametrize(
    "count", [pytest.param(400, marks=pytest.mark.slow), pytest.param(2000, marks=pytest.mark.fault)]
)


@LONG
def test_a_drift_of_a_part_raises_the_threshold_of_many_deployments_and_stops_few(count):
    raised, stopped, worse, share, drifted = measure_steps(count // 3)
    assert raised <= 0.2
    assert max(stopped, worse) <= 0.05
    assert 0.8 <= share <= 1.5
    assert drifted >= count // 10


@LONG
def test_the_promise_is_broken_in_at_most_5_percent_of_many_deployments(count):
    broken, naive = measure_promises(count)
    assert broken <= 0.05
    assert naive > 0.2


@LONG
def test_a_drift_stops_local_answers_within_500_requests_in_95_percent_of_many_deployments(count):
    false, found, drifted = measure_checks(count)
    assert false <= 0.05
    assert found >= 0.95
    assert drifted >= count // 4
