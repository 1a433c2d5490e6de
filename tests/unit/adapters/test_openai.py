"""The adapter of the fine-tuning service: what is sent, and what comes of it."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from reinforge.adapters.openai import OpenAIAdapter
from reinforge.adapters.openai_config import OpenAIAdapterConfig
from reinforge.algorithms.dpo import DPO, DPOConfig
from reinforge.algorithms.rejection_sampling import RejectionSampling
from reinforge.algorithms.sft import SFT, SFTConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import BackendError, ConfigError
from reinforge.types.job import TrainingJobRef, TrainingStatusEnum
from tests.hosted import QUICK, collected, hosted
from tests.openai_server import fails
from tests.openai_service import OpenAIService, lost


async def test_a_supervised_job(openai_service: OpenAIService) -> None:
    settings = {"n_epochs": 2, "learning_rate_multiplier": 0.5, "suffix": "mine"}
    async with hosted(openai_service, SFT(SFTConfig(min_reward=0.5)), **settings) as adapter:
        ref = await adapter.submit(collected(run_id="run-1", epoch=0, model_group="provers", job_key="run-1/0"))
        status = await adapter.wait_until_complete(ref)
    (job,) = openai_service.jobs.values()
    assert (job["model"], job["user_provided_suffix"]) == ("gpt-test", "mine")
    hyperparameters = {"n_epochs": 2, "batch_size": "auto", "learning_rate_multiplier": 0.5}
    assert job["method"] == {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
    assert {k: v for k, v in job["metadata"].items() if k != "reinforge_job"} == {
        "reinforge_run": "run-1",
        "reinforge_model_group": "provers",
    }
    rows = openai_service.rows(job["training_file"])
    assert [row["messages"][-1] for row in rows] == [
        {"role": "assistant", "content": f"good {i}", "weight": 1} for i in range(12)
    ]
    assert status.status is TrainingStatusEnum.COMPLETED
    assert status.produced_model
    assert status.metadata == {
        "job_id": job["id"],
        "service_status": "succeeded",
        "num_rows": 12,
        "fine_tuned_model": job["fine_tuned_model"],
        "num_tokens": job["trained_tokens"],
    }
    assert job["fine_tuned_model"].startswith("ft:gpt-test:org-standin:mine:")


async def test_a_preference_job(openai_service: OpenAIService) -> None:
    async with hosted(openai_service, DPO(DPOConfig(beta=0.2))) as adapter:
        status = await adapter.wait_until_complete(await adapter.submit(collected()))
    assert status.produced_model
    (job,) = openai_service.jobs.values()
    assert (job["method"]["type"], job["method"]["dpo"]["hyperparameters"]["beta"]) == ("dpo", 0.2)
    row = openai_service.rows_of(job["id"])[0]
    assert row == {
        "input": {"messages": [{"role": "user", "content": "q0"}]},
        "preferred_output": [{"role": "assistant", "content": "good 0"}],
        "non_preferred_output": [{"role": "assistant", "content": "bad 0"}],
    }


async def test_the_best_of_each_group_is_imitated(openai_service: OpenAIService) -> None:
    async with hosted(openai_service, RejectionSampling()) as adapter:
        ref = await adapter.submit(collected())
    texts = [row["messages"][-1]["content"] for row in openai_service.rows_of(ref.metadata["job_id"])]
    assert texts == [f"good {i}" for i in range(12)]


async def test_the_same_job_key_is_the_same_job(openai_service: OpenAIService) -> None:
    async with hosted(openai_service) as adapter:
        refs = await asyncio.gather(*(adapter.submit(collected(job_key="k")) for _ in range(5)))
        assert len({ref.model_dump_json() for ref in refs}) == 1
        await adapter.submit(collected(job_key="other"))
    assert (len(openai_service.jobs), len(openai_service.files)) == (2, 1), "equal content is sent once"


async def test_another_process_finds_the_job(openai_service: OpenAIService) -> None:
    first, again = [], []
    for found in (first, again):
        async with hosted(openai_service) as adapter:
            found.append(await adapter.submit(collected(job_key="k")))
    assert first == again
    assert (len(openai_service.jobs), len(openai_service.files)) == (1, 1)


@pytest.mark.parametrize(
    "other",
    [
        {"run_id": "another"},
        {"job_key": "k/1"},
        {"count": 13},
    ],
)
async def test_another_job_is_another_job(openai_service: OpenAIService, other: dict[str, Any]) -> None:
    async with hosted(openai_service) as adapter:
        await adapter.submit(collected(job_key="k"))
    async with hosted(openai_service) as adapter:
        await adapter.submit(collected(**{"job_key": "k", **other}))
    assert len(openai_service.jobs) == 2


@pytest.mark.parametrize("end", ["failed", "cancelled"])
async def test_a_job_of_which_nothing_came_is_made_again(openai_service: OpenAIService, end: str) -> None:
    openai_service.ends = [end]
    ends = []
    for _ in range(2):
        async with hosted(openai_service) as adapter:
            ends.append((await adapter.wait_until_complete(await adapter.submit(collected(job_key="k")))).status)
    assert ends[1] is TrainingStatusEnum.COMPLETED
    assert ends[0] in (TrainingStatusEnum.FAILED, TrainingStatusEnum.CANCELED)


async def test_a_job_is_found_among_others_page_by_page(openai_service: OpenAIService) -> None:
    """Also at a service that does not look at what it is asked to filter by."""
    openai_service.page, openai_service.filters = 1, False
    async with hosted(openai_service) as adapter:
        refs = [await adapter.submit(collected(job_key=key)) for key in ("k", "l", "m")]
    async with hosted(openai_service) as adapter:
        assert await adapter.submit(collected(job_key="k")) == refs[0]
    assert len(openai_service.jobs) == 3


async def test_too_few_rows_are_a_failed_job_with_the_reason(openai_service: OpenAIService) -> None:
    async with hosted(openai_service, SFT(SFTConfig(min_reward=0.5))) as adapter:
        ref = await adapter.submit(collected(9))
        status = await adapter.wait_until_complete(ref)
        assert status == await adapter.status(ref)
    assert status.status is TrainingStatusEnum.FAILED
    assert "9 rows of the 10 that a job takes at least" in str(status.message)
    assert openai_service.files == openai_service.jobs == {}, "nothing was sent"


async def test_what_the_service_finds_wrong_fails_the_job_with_its_words(openai_service: OpenAIService) -> None:
    async with hosted(openai_service, min_examples=1) as adapter:
        status = await adapter.wait_until_complete(await adapter.submit(collected(3)))
    assert status.status is TrainingStatusEnum.FAILED
    assert "invalid_training_file: Training file has 6 example(s)" in str(status.message)


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("failed", TrainingStatusEnum.FAILED, "server_error: The job failed due to an internal error"),
        ("cancelled", TrainingStatusEnum.CANCELED, ": cancelled"),
    ],
)
async def test_every_end_ends_the_wait(
    openai_service: OpenAIService, end: str, status: TrainingStatusEnum, said: str
) -> None:
    openai_service.ends = [end]
    async with hosted(openai_service) as adapter:
        ended = await adapter.wait_until_complete(await adapter.submit(collected()))
    assert (ended.status, ended.produced_model) == (status, False)
    assert said in str(ended.message)


@pytest.mark.parametrize("end", ["queued", "paused"])
async def test_a_job_that_never_ends_is_cancelled_when_its_time_is_over(
    openai_service: OpenAIService, end: str
) -> None:
    openai_service.ends = [end]
    async with hosted(openai_service, max_wait_s=0.2) as adapter:
        ref = await adapter.submit(collected())
        assert (await adapter.status(ref)).status is TrainingStatusEnum.PENDING
        started = time.monotonic()
        ended = await adapter.wait_until_complete(ref)
        assert time.monotonic() - started < 3
        assert await adapter.status(ref) == ended
    assert ended.status is TrainingStatusEnum.CANCELED
    assert f"not done within max_wait_s (0.2 s), when it was {end}; it is cancelled at the service" in str(
        ended.message
    )
    assert openai_service.status_of(ref.metadata["job_id"]) == "cancelled"


async def test_a_job_that_is_done_when_its_time_is_over_is_done(openai_service: OpenAIService) -> None:
    openai_service.seconds = 30

    def too_late(request: Any, body: Any) -> Any:
        openai_service.faults["look"].clear()
        return fails(400)(request, body)

    async with hosted(openai_service, max_wait_s=0.05) as adapter:
        openai_service.faults = {"look": [fails(503)] * 100, "cancel": [too_late]}  # nobody hears that it is done
        ref = await adapter.submit(collected())
        openai_service.advance(60)
        ended = await adapter.wait_until_complete(ref)
    assert ended.produced_model
    assert openai_service.calls["cancel"] == 1


async def test_a_job_that_cannot_be_cancelled_says_that_it_may_cost(openai_service: OpenAIService) -> None:
    openai_service.ends = ["queued"]
    async with hosted(openai_service, max_wait_s=0.05, max_retries=1) as adapter:
        openai_service.faults["cancel"] = [fails(500)] * 2
        ended = await adapter.wait_until_complete(await adapter.submit(collected()))
    assert ended.status is TrainingStatusEnum.FAILED
    assert "could not be cancelled, so it may go on and cost" in str(ended.message)


async def test_a_word_that_nobody_knows_is_an_error(openai_service: OpenAIService) -> None:
    async with hosted(openai_service) as adapter:
        openai_service.ends = ["pondering"]
        ref = await adapter.submit(collected())
        openai_service.advance(1)
        for ask in (adapter.status, adapter.wait_until_complete):
            with pytest.raises(BackendError, match='unknown job status "pondering"'):
                await ask(ref)


async def test_a_job_that_the_service_does_not_know(openai_service: OpenAIService) -> None:
    async with hosted(openai_service) as adapter:
        ref = TrainingJobRef(run_id="r", backend="openai", metadata={"job_id": "ftjob/../x"})
        with pytest.raises(BackendError, match="404 fine_tune_not_found: Could not find fine tune"):
            await adapter.status(ref)
        with pytest.raises(BackendError, match="names no job of the service"):
            await adapter.status(TrainingJobRef(run_id="r", backend="openai"))


async def test_what_is_left_in_flight_goes_on_unless_asked(
    openai_service: OpenAIService, caplog: pytest.LogCaptureFixture
) -> None:
    openai_service.seconds = 30
    for cancels, word in ((False, "validating_files"), (True, "cancelled")):
        async with hosted(openai_service, cancel_on_stop=cancels) as adapter:
            ref = await adapter.submit(collected(job_key=str(cancels)))
        assert openai_service.status_of(ref.metadata["job_id"]) == word
    assert "goes on at the service; --resume takes it up" in caplog.text
    assert ": cancelled (cancel_on_stop: true)" in caplog.text


async def test_a_key_that_is_refused_is_said_before_any_work_and_never_repeated(
    openai_service: OpenAIService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    config = OpenAIAdapterConfig(base_url=openai_service.url, api_key="sk-canary-wrong", **QUICK)
    adapter = OpenAIAdapter(config, SFT(), openai_service.url, config.api_key)
    with pytest.raises(BackendError, match=r"401 invalid_api_key: Incorrect API key provided: \*\*\*") as caught:
        await adapter.initialize(FinetuneConfig())
    assert "sk-canary" not in f"{caught.value!r}{caplog.text}{adapter.adapter_config!r}"
    assert not await adapter.is_healthy()
    with pytest.raises(BackendError, match="not initialised"):
        await adapter.submit(collected())


async def test_health_is_that_the_service_answers(openai_service: OpenAIService) -> None:
    async with hosted(openai_service, max_retries=0) as adapter:
        assert await adapter.is_healthy()
        openai_service.faults["jobs"] = [fails(503)]
        assert not await adapter.is_healthy()


async def test_what_cannot_be_honoured_is_refused_before_a_call(openai_service: OpenAIService) -> None:
    config = OpenAIAdapterConfig(base_url=openai_service.url, **QUICK)
    adapter = OpenAIAdapter(config, SFT(), openai_service.url)
    with pytest.raises(ConfigError, match=r"finetuning\.policy\.precision"):
        await adapter.initialize(FinetuneConfig.model_validate({"policy": {"precision": "bfloat16"}}))
    assert not openai_service.calls
    assert adapter.policy() is None


async def test_a_file_whose_answer_is_lost_is_sent_once(openai_service: OpenAIService) -> None:
    openai_service.faults = {"upload": [fails(500), lost]}
    async with hosted(openai_service) as adapter:
        status = await adapter.wait_until_complete(await adapter.submit(collected()))
    assert status.produced_model
    assert len(openai_service.files) == 1


async def test_jobs_side_by_side_take_as_long_as_the_slowest(openai_service: OpenAIService) -> None:
    """Figure: k jobs of a service run side by side take at most 1.2 times the slowest."""
    async with hosted(openai_service) as adapter:

        async def one(number: int) -> float:
            started = time.monotonic()
            ref = await adapter.submit(collected(job_key=f"{number}", model_group=f"g{number}"))
            assert (await adapter.wait_until_complete(ref)).produced_model
            return time.monotonic() - started

        openai_service.seconds = 2.0
        slowest = await one(0)
        started = time.monotonic()
        tasks = []
        for number, seconds in enumerate((2.0, 1.0, 1.5, 0.5, 2.0, 1.8, 1.2, 0.9), 1):
            openai_service.seconds = seconds
            tasks.append(asyncio.create_task(one(number)))
            while len(openai_service.jobs) <= number:
                await asyncio.sleep(0.001)
        await asyncio.gather(*tasks)
        together = time.monotonic() - started
    assert together <= 1.2 * slowest
    groups = [(job["metadata"] or {})["reinforge_model_group"] for job in openai_service.jobs.values()]
    assert sorted(groups) == [f"g{number}" for number in range(9)]
