"""The pages of a run with figures: rewards, stability, data and checkpoints."""

import pytest

from reinforge.files import append_line
from reinforge.runs.journal.served import SERVED
from reinforge.runs.rows import BASELINE, GUARD, EpochMetrics, GuardEvent
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.trajectory import Outcome
from reinforge.view.data_page import classify
from reinforge.view.reward_page import choose_bins
from tests.doubles import examples
from tests.view.view_browser import Browser, begin_run

CONFIG = """
eval:
  evaluators:
    judge: {_type: python}
    form: {_type: python}
    total: {_type: weighted, weights: {judge: 0.8, form: 0.2}}
finetuning: {num_epochs: 2, reward_function: {name: total}}
"""


def record(journal, example, generation, reward, epoch=0, phase="collect", **fields):
    key = EpisodeKey(phase, epoch, example, generation)
    journal.record_episode(EpisodeRecord(key, examples(1)[0], reward=reward, **fields))


@pytest.fixture
def run(tmp_path):
    """`easy` is solved by 2 of 2, `hard` by 0 of 2 and then 1 of 2; one episode fails; a guard warns."""
    journal = begin_run(tmp_path)
    (tmp_path / "r" / "config.yml").write_text(CONFIG)
    for epoch, rewards in enumerate(((0.0, 0.0), (0.0, 1.0))):
        for generation, reward in enumerate(rewards):
            record(journal, "easy", generation, 1.0, epoch)
            record(journal, "hard", generation, reward, epoch)
        job = {"approx_kl": 0.01 * epoch, "canary_k3": 0.001}
        journal.record_metrics(EpochMetrics(epoch, 0.5, scores={"judge": 0.25 + epoch / 2, "form": 1.0}, job=job))
    record(journal, "easy", 2, None, 1, outcome=Outcome.TIMEOUT, reason="no reply in 60 s")
    record(journal, "easy", 0, 1.0, BASELINE, "validate")
    journal.record_stage(BASELINE, GUARD, GuardEvent(BASELINE, "contamination", "warn", "2 examples repeat").as_dict())
    journal.flush()
    yield journal
    journal.close()


async def test_rewards_are_counted_by_epoch_and_lead_to_their_episodes(run, tmp_path):
    async with Browser(tmp_path) as browser:
        page = await browser.page("/runs/r/rewards")
        assert "train0450%50%" in page.text
        assert "train1425%75%" in page.text
        assert "selectbaseline1100%" in page.text
        assert ("judge, weight 0.8" in page.text, "form, weight 0.2" in page.text) == (True, True)
        assert "timeoutdroppedno reply in 60 s1" in page.text
        links = [value for name, value in page.attributes if name == "href" and "epoch=1" in value]
        assert len(links) == 2
        assert "3 of 10 episodes." in (await browser.page(links[1])).text


async def test_stability_has_a_chart_of_each_metric_that_is_known(run, tmp_path):
    async with Browser(tmp_path) as browser:
        page = await browser.page("/runs/r/stability")
        assert "KL divergence of a job, nats a token" in page.text
        assert "Canary: sampler against learner after a job" in page.text
        assert "Entropy" not in page.text
        assert "baselinecontaminationwarned2 examples repeat" in page.text


async def test_data_tells_how_difficult_the_examples_are(run, tmp_path):
    async with Browser(tmp_path) as browser:
        page = await browser.page("/runs/r/data")
        assert "train292" in page.text, "2 examples, 9 episodes, 2 epochs"
        assert "with a reward above 0.5, halfway" in page.text
        assert "01012" in page.text, "epoch 0: 1 always, 0 sometimes, 1 never, of 2"
        assert "11102" in page.text
        assert "hard" in page.text
        assert "0 of 21 of 21 of 4" in page.text
        assert "2 examples repeat." in page.text


async def test_a_page_without_data_says_so(tmp_path):
    begin_run(tmp_path).close()
    async with Browser(tmp_path) as browser:
        assert "No episode has a reward yet." in (await browser.page("/runs/r/rewards")).text
        assert "At least two epochs" in (await browser.page("/runs/r/stability")).text
        assert "has not warned" in (await browser.page("/runs/r/data")).text
        assert "has answered no request of this run" in (await browser.page("/runs/r/serving")).text
        assert "no checkpoint yet" in (await browser.page("/runs/r/checkpoints")).text


async def test_what_was_served_with_a_fallback(run, tmp_path):
    """60 of 100 requests stayed local, of which 5 were checked; the threshold rose in the second hour."""
    measured = {"calls": 40, "tokens": 4000, "priced": 40, "dollars": 0.8}
    lines = [
        {"threshold": -0.5, "routes": {}},
        {"threshold": -0.5, "routes": {"local sure": 40, "upstream unsure": 10}, "checks": {"agreed": 4}},
        {"threshold": -0.1, "routes": {"local sure": 20, "upstream unsure": 30}, "measured": measured},
        {"threshold": None, "routes": {}, "checks": {"disagreed": 1, "not_kept": 5}},
    ]
    for hour, line in enumerate(lines):
        append_line(
            tmp_path / "r" / SERVED, {"at_s": 3600.0 * hour, "margin": 0.02, "checks": {}, "measured": {}} | line
        )
    async with Browser(tmp_path) as browser:
        text = (await browser.page("/runs/r/serving")).text
        assert "60.0% [50.2%, 69.1%] of 100 requests stayed local since 1970-01-01" in text
        assert "localsure6060.0%upstreamunsure4040.0%" in text
        assert "90.0% [59.6%, 98.2%] of 10 checked requests got the fallback's answer or one that agrees" in text
        assert "the router promises a loss of at most 0.02" in text
        assert "About $1.10, at $0.02 a request, the mean of 40." in text  # 60 - 5 requests
        assert "-0.5-0.1" in text
        assert "-0.1none: nothing stays local" in text
        (tmp_path / "r" / SERVED).write_text("{}\n")
        assert "cannot read" in await browser.ask("/runs/r/serving", 500)


@pytest.mark.slow
async def test_checkpoints_have_a_score_a_size_and_commands(made):
    async with Browser(made) as browser:
        page = await browser.page("/runs/plain/checkpoints")
        assert "promoted" in page.text
        assert f"reinforge chat {made / 'plain' / 'checkpoints'}/step-0" in page.text
        assert f"reinforge export {made / 'plain'}" in page.text
        assert any("phase=validate&epoch=" in (value or "") for _, value in page.attributes)


@pytest.mark.parametrize(
    ("values", "bins"),
    [
        ([0.0, 1.0, 1.0], [(0.0, 0.0), (1.0, 1.0)]),
        ([n / 20 for n in range(21)], [(n / 10, (n + 1) / 10) for n in range(10)]),
    ],
)
def test_bins_hold_all_values(values, bins):
    assert [pytest.approx(each) for each in choose_bins(values)] == bins


def test_examples_are_solved_never_sometimes_or_always():
    assert [classify(*each) for each in ((0, 4), (1, 4), (4, 4))] == ["never", "sometimes", "always solved"]
