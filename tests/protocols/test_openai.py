"""The OpenAI adapter: files and jobs, waiting, cancelling, errors."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from reinforge.algorithms.dpo import DPO, DPOConfig
from reinforge.algorithms.rejection_sampling import RejectionSampling
from reinforge.algorithms.sft import SFT, SFTConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import BackendError, ConfigError
from reinforge.protocols.openai.adapter import OpenAIAdapter, OpenAIAdapterConfig
from reinforge.types.job import TrainingJobRef, TrainingStatusEnum
from tests.openai_server import fails
from tests.protocols.hosted import FAST_SETTINGS, connect_adapter, make_collection
from tests.protocols.openai_service import OpenAIService


async def test_a_supervised_job(openai_service: OpenAIService) -> None:
    settings = {"n_epochs": 2, "learning_rate_multiplier": 0.5, "suffix": "mine"}
    async with connect_adapter(openai_service, SFT(SFTConfig(min_reward=0.5)), **settings) as adapter:
        ref = await adapter.submit(make_collection(run_id="run-1", epoch=0, model_group="provers", job_key="run-1/0"))
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
    async with connect_adapter(openai_service, DPO(DPOConfig(beta=0.2))) as adapter:
        status = await adapter.wait_until_complete(await adapter.submit(make_collection()))
    assert status.produced_model
    (job,) = openai_service.jobs.values()
    assert (job["method"]["type"], job["method"]["dpo"]["hyperparameters"]["beta"]) == ("dpo", 0.2)
    row = openai_service.get_job_rows(job["id"])[0]
    assert row == {
        "input": {"messages": [{"role": "user", "content": "q0"}]},
        "preferred_output": [{"role": "assistant", "content": "good 0"}],
        "non_preferred_output": [{"role": "assistant", "content": "bad 0"}],
    }


async def test_rejection_sampling_sends_the_best_of_each_group(openai_service: OpenAIService) -> None:
    async with connect_adapter(openai_service, RejectionSampling()) as adapter:
        ref = await adapter.submit(make_collection())
    texts = [row["messages"][-1]["content"] for row in openai_service.get_job_rows(ref.metadata["job_id"])]
    assert texts == [f"good {i}" for i in range(12)]


async def test_the_same_job_key_is_the_same_job(openai_service: OpenAIService) -> None:
    async with connect_adapter(openai_service) as adapter:
        refs = await asyncio.gather(*(adapter.submit(make_collection(job_key="k")) for _ in range(5)))
        assert len({ref.model_dump_json() for ref in refs}) == 1
        await adapter.submit(make_collection(job_key="other"))
    assert (len(openai_service.jobs), len(openai_service.files)) == (2, 1), "equal content is uploaded once"


@pytest.mark.parametrize(
    "other",
    [
        {"run_id": "another"},
        {"job_key": "k/1"},
        {"count": 13},
    ],
)
async def test_a_different_job_is_created(openai_service: OpenAIService, other: dict[str, Any]) -> None:
    async with connect_adapter(openai_service) as adapter:
        await adapter.submit(make_collection(job_key="k"))
    async with connect_adapter(openai_service) as adapter:
        await adapter.submit(make_collection(**{"job_key": "k", **other}))
    assert len(openai_service.jobs) == 2


@pytest.mark.parametrize(
    ("end", "status", "message"),
    [
        ("failed", TrainingStatusEnum.FAILED, "server_error: The job failed due to an internal error"),
        ("cancelled", TrainingStatusEnum.CANCELED, ": cancelled"),
    ],
)
async def test_a_failed_or_cancelled_job_ends_the_wait_and_is_created_again(
    openai_service: OpenAIService, end: str, status: TrainingStatusEnum, message: str
) -> None:
    openai_service.ends = [end]
    ends = []
    for _ in range(2):
        async with connect_adapter(openai_service) as adapter:
            ends.append(await adapter.wait_until_complete(await adapter.submit(make_collection(job_key="k"))))
    assert [each.status for each in ends] == [status, TrainingStatusEnum.COMPLETED]
    assert [each.produced_model for each in ends] == [False, True]
    assert message in str(ends[0].message)


async def test_a_job_is_found_among_others_page_by_page(openai_service: OpenAIService) -> None:
    """Also at a service that ignores the metadata filter."""
    openai_service.page, openai_service.filters = 1, False
    async with connect_adapter(openai_service) as adapter:
        refs = [await adapter.submit(make_collection(job_key=key)) for key in ("k", "l", "m")]
    async with connect_adapter(openai_service) as adapter:
        assert await adapter.submit(make_collection(job_key="k")) == refs[0]
    assert len(openai_service.jobs) == 3


async def test_too_few_rows_fail_the_job_with_the_reason(openai_service: OpenAIService) -> None:
    async with connect_adapter(openai_service, SFT(SFTConfig(min_reward=0.5))) as adapter:
        ref = await adapter.submit(make_collection(9))
        status = await adapter.wait_until_complete(ref)
        assert status == await adapter.status(ref)
    assert status.status is TrainingStatusEnum.FAILED
    assert "found 9 rows, but a job needs at least 10 (min_examples)" in str(status.message)
    assert openai_service.files == openai_service.jobs == {}, "nothing was sent"


async def test_the_services_error_is_in_the_status(openai_service: OpenAIService) -> None:
    async with connect_adapter(openai_service, min_examples=1) as adapter:
        status = await adapter.wait_until_complete(await adapter.submit(make_collection(3)))
    assert status.status is TrainingStatusEnum.FAILED
    assert "invalid_training_file: Training file has 6 example(s)" in str(status.message)


@pytest.mark.parametrize("end", ["queued", "paused"])
async def test_a_job_that_exceeds_max_wait_s_is_cancelled(openai_service: OpenAIService, end: str) -> None:
    openai_service.ends = [end]
    async with connect_adapter(openai_service, max_wait_s=0.2) as adapter:
        ref = await adapter.submit(make_collection())
        assert (await adapter.status(ref)).status is TrainingStatusEnum.PENDING
        started = time.monotonic()
        ended = await adapter.wait_until_complete(ref)
        assert time.monotonic() - started < 30
        assert await adapter.status(ref) == ended
    assert ended.status is TrainingStatusEnum.CANCELED
    id_ = ref.metadata["job_id"]
    assert f"job {id_} was still {end} after max_wait_s (0.2 s) and has been cancelled" in str(ended.message)
    assert openai_service.get_status(id_) == "cancelled"


async def test_a_job_that_succeeded_unnoticed_counts_after_max_wait_s(openai_service: OpenAIService) -> None:
    openai_service.seconds = 30

    def too_late(request: Any, body: Any) -> Any:
        openai_service.faults["retrieve"].clear()
        return fails(400)(request, body)

    async with connect_adapter(openai_service, max_wait_s=0.05) as adapter:
        openai_service.faults = {"retrieve": [fails(503)] * 100, "cancel": [too_late]}  # no poll sees the success
        ref = await adapter.submit(make_collection())
        openai_service.advance(60)
        ended = await adapter.wait_until_complete(ref)
    assert ended.produced_model
    assert openai_service.calls["cancel"] == 1


async def test_a_failed_cancel_warns_about_cost(openai_service: OpenAIService) -> None:
    openai_service.ends = ["queued"]
    async with connect_adapter(openai_service, max_wait_s=0.05, max_retries=1) as adapter:
        openai_service.faults["cancel"] = [fails(500)] * 2
        ended = await adapter.wait_until_complete(await adapter.submit(make_collection()))
    assert ended.status is TrainingStatusEnum.FAILED
    assert "cancelling it failed, so it may keep running and cost money" in str(ended.message)


async def test_an_unknown_status_is_an_error(openai_service: OpenAIService) -> None:
    async with connect_adapter(openai_service) as adapter:
        openai_service.ends = ["pondering"]
        ref = await adapter.submit(make_collection())
        openai_service.advance(1)
        for ask in (adapter.status, adapter.wait_until_complete):
            with pytest.raises(BackendError, match='unknown job status "pondering"'):
                await ask(ref)


@pytest.mark.parametrize(
    ("kind", "status", "fix"),
    [
        ("jobs", 404, "this service may have no fine-tuning API"),
        ("files", 404, "this service may have no fine-tuning API"),
        ("files", 403, "check the trainer adapter's api_key"),
        ("create", 400, "check the trainer adapter's base_model, suffix and hyperparameters"),
        ("upload", 400, None),
    ],
)
async def test_a_rejected_request_names_the_fix(
    openai_service: OpenAIService, kind: str, status: int, fix: str | None
) -> None:
    async with connect_adapter(openai_service) as adapter:
        openai_service.faults[kind] = [fails(status)]
        ending = f"; .*{fix}" if fix else "$"
        with pytest.raises(BackendError, match=rf"{openai_service.url}/\S+: {status} broken {status}{ending}"):
            await adapter.submit(make_collection())


async def test_an_unknown_job_is_an_error(openai_service: OpenAIService) -> None:
    async with connect_adapter(openai_service) as adapter:
        ref = TrainingJobRef(run_id="r", backend="openai", metadata={"job_id": "ftjob/../x"})
        with pytest.raises(BackendError, match=r"404 fine_tune_not_found: Could not find .*; the job may have been"):
            await adapter.status(ref)
        with pytest.raises(BackendError, match=r"has no metadata\.job_id"):
            await adapter.status(TrainingJobRef(run_id="r", backend="openai"))


async def test_an_unfinished_job_keeps_running_unless_cancel_on_stop(
    openai_service: OpenAIService, caplog: pytest.LogCaptureFixture
) -> None:
    openai_service.seconds = 30
    for cancels, word in ((False, "validating_files"), (True, "cancelled")):
        async with connect_adapter(openai_service, cancel_on_stop=cancels) as adapter:
            ref = await adapter.submit(make_collection(job_key=str(cancels)))
        assert openai_service.get_status(ref.metadata["job_id"]) == word
    assert "keeps running at the service; --resume will use it" in caplog.text
    assert ": cancelled (cancel_on_stop: true)" in caplog.text


async def test_a_rejected_key_fails_early_and_is_never_printed(
    openai_service: OpenAIService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    config = OpenAIAdapterConfig(base_url=openai_service.url, api_key="sk-canary-wrong", **FAST_SETTINGS)
    adapter = OpenAIAdapter(config, SFT(), openai_service.url, config.api_key)
    expected = r"401 invalid_api_key: Incorrect API key provided: \*\*\*; check the trainer adapter's api_key"
    with pytest.raises(BackendError, match=expected) as caught:
        await adapter.initialize(FinetuneConfig())
    assert "sk-canary" not in f"{caught.value!r}{caplog.text}{adapter.adapter_config!r}"
    assert not await adapter.is_healthy()
    with pytest.raises(BackendError, match="not connected"):
        await adapter.submit(make_collection())


async def test_is_healthy_if_the_service_answers(openai_service: OpenAIService) -> None:
    async with connect_adapter(openai_service, max_retries=0) as adapter:
        assert await adapter.is_healthy()
        openai_service.faults["jobs"] = [fails(503)]
        assert not await adapter.is_healthy()


async def test_unsupported_settings_fail_before_any_call(openai_service: OpenAIService) -> None:
    config = OpenAIAdapterConfig(base_url=openai_service.url, **FAST_SETTINGS)
    adapter = OpenAIAdapter(config, SFT(), openai_service.url)
    with pytest.raises(ConfigError, match=r"finetuning\.policy\.dtype"):
        await adapter.initialize(FinetuneConfig.model_validate({"policy": {"dtype": "bfloat16"}}))
    assert not openai_service.calls
    assert adapter.policy() is None
