"""The router's file, its rule, and the running check."""

import json
from dataclasses import asdict

import pytest

from reinforge.errors import ConfigError
from reinforge.routing.drift import DriftCheck, choose_num_kept
from reinforge.routing.risk import calibrate
from reinforge.routing.router import Router
from tests.routing.test_risk import MARGIN, requests

THRESHOLDS = [0.9, 0.6, 0.4, 0.1]


@pytest.fixture
def router():
    return Router.from_calibration("mean_logprob", calibrate(*requests(), MARGIN, thresholds=THRESHOLDS))


def test_a_reply_stays_from_the_threshold_on(router):
    assert router.threshold == 0.4
    assert [router.keeps(value) for value in (0.5, 0.4, 0.39, None, float("nan"))] == [True, True, False, False, False]


def test_the_file_holds_everything(router, tmp_path):
    path = tmp_path / "router.json"
    router.save(path)
    assert Router.load(path) == router
    values = json.loads(path.read_text())
    assert (values["version"], values["signal"], values["kept"]) == (1, "mean_logprob", [0.9, 0.6, 0.4])
    assert values["curve"][-1] == {"threshold": 0.1, "share": 0.9, "difference": pytest.approx(-0.15)}
    assert (values["margin"], values["confidence"], values["num_requests"]) == (0.02, 0.95, 1000)


def test_the_file_says_what_its_signal_takes(tmp_path):
    how, found = {"num_samples": 4, "temperature": 0.5}, calibrate(*requests(), MARGIN, thresholds=THRESHOLDS)
    Router.from_calibration("agreement", found, metric="m", **how).save(tmp_path / "router.json")
    again = Router.load(tmp_path / "router.json").tighten(1)
    assert again.describe_signal() == "agreement of 4 further samples at temperature 0.5"
    again = Router.from_calibration("evaluator", found, evaluator={"_type": "python", "function": "a:b"})
    assert (again.describe_signal(), again.metric) == ("the evaluator a:b", None)


def test_a_stricter_threshold_still_keeps_the_promise(router):
    tighter = router.tighten(2)
    assert (tighter.threshold, tighter.kept, tighter.share) == (0.6, (0.9, 0.6), 0.4)
    last = router.tighten(0)
    assert (last.threshold, last.kept, last.share) == (None, (), 0.0)
    assert not last.keeps(1e9)
    assert router.tighten(3) == router


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "version: Input should be 1"),
        ({"signal": "mood"}, "signal: Input should be "),
        ({"extra": 1}, "extra: Extra inputs are not permitted"),
        ({"share": 1.5}, "share: Input should be less than or equal to 1"),
        ({"threshold": 0.1}, "threshold must be the last and smallest of kept"),
        ({"kept": [0.4, 0.9]}, "threshold must be the last and smallest of kept"),
        ({"margin": None}, "margin: Input should be a valid number"),
        ({"num_samples": 4}, "num_samples must be 1 or more for the signal agreement, and 0 for any other"),
        ({"signal": "agreement"}, "num_samples must be 1 or more for the signal agreement"),
        ({"signal": "evaluator"}, "evaluator must hold settings for the signal evaluator"),
        ({"temperature": 0}, "temperature: Input should be greater than 0"),
    ],
)
def test_a_file_that_was_edited_wrongly_is_refused(router, tmp_path, change, said):
    path = tmp_path / "router.json"
    router.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=said):
        Router.load(path)


def test_no_router_is_refused(tmp_path):
    (tmp_path / "damaged.json").write_text("{")
    for name in ("damaged.json", "absent.json"):
        with pytest.raises(ConfigError, match=f"{name} is not a router"):
            Router.load(tmp_path / name)
    with pytest.raises(ValueError, match="expected a signal of mean_logprob, "):
        Router.from_calibration("mood", calibrate(*requests(), MARGIN, thresholds=THRESHOLDS))


def test_the_running_check_raises_then_stops_for_good():
    check = DriftCheck(0.02)
    states = [check.add(0.0) for _ in range(20)] + [check.add(1.0) for _ in range(12)]
    assert states[:20] == ["ok"] * 20
    assert states[20:29] == [*["ok"] * 5, *["raise"] * 3, "stop"]
    assert [check.add(-1.0) for _ in range(50)][-1] == "stop"
    with pytest.raises(ValueError, match="expected a loss from -1 to 1, found nan"):
        check.add(float("nan"))


def with_capital(capital):
    """Returns a check, after one more request without a loss at a margin of almost 0."""
    check = DriftCheck(1e-9, num_checked=10**9, sums=[capital] * 5)
    check.add(0.0)
    return check


@pytest.mark.parametrize(
    ("capitals", "num_kept"),
    [
        ([0.1, 0.8, 3.0, 4.9], 4),  # the check of the last one says nothing
        ([0.1, 0.8, 3.0, 5.1], 2),  # of the second one nothing speaks against the promise
        ([0.1, 0.8, 3.0, 25.0], 2),
        ([1.1, 3.0, 25.0], 1),  # not even of the strictest, which is left once its own check says `stop`
        ([19.0, 25.0], 1),
        ([21.0, 25.0], 0),
        ([5.1], 1),
        ([], 0),
    ],
)
def test_the_lowest_threshold_that_nothing_speaks_against_is_next(capitals, num_kept):
    assert choose_num_kept([with_capital(each) for each in capitals]) == num_kept


def test_the_capital_by_hand():
    """One loss of 1: each bet b gains 1 + b * 0.98 / 1.02, and the first gambler has 1 / (2 log(2)^2 2.11)."""
    check = DriftCheck(0.02)
    check.add(1.0)
    mean_bet = (0.05 + 0.1 + 0.2 + 0.4 + 0.8) / 5
    assert check.capital == pytest.approx((1 + mean_bet * 0.98 / 1.02) / (2 * 0.480453 * 2.11))


def test_the_check_survives_a_restart():
    one, other = DriftCheck(0.02), DriftCheck(0.02)
    for n in range(60):
        if n == 30:
            other = DriftCheck(**json.loads(json.dumps(asdict(other))))
        assert one.add(float(n % 4 == 0)) == other.add(float(n % 4 == 0))
    assert one == other
