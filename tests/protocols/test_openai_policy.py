"""The hosted model as the policy: which model is served, and how its name is stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reinforge.adapters.hosted_model import HOSTED_MODEL, HostedModel
from reinforge.algorithms.sft import SFT, SFTConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import BackendError, BackendUnavailable, ContextOverflow, StorageError
from reinforge.protocols.openai.adapter import OpenAIAdapter, OpenAIAdapterConfig
from reinforge.trainer.versions import probe
from reinforge.types.request import ChatPrompt, ModelRequest, SamplingParams
from tests.openai_server import fails
from tests.protocols.hosted import connect_adapter, make_collection
from tests.protocols.openai_service import OpenAIService

HELLO = [{"role": "user", "content": "hello?"}]


async def test_the_base_is_served_until_a_job_is_published(openai_service: OpenAIService) -> None:
    openai_service.deploys_after, openai_service.words = 2, ("good of old",)
    async with connect_adapter(openai_service, SFT(SFTConfig(min_reward=0.5))) as adapter:
        policy = adapter.policy()
        before = await policy.fingerprint()
        reply = await policy.sample(ModelRequest(HELLO, SamplingParams(seed=1, temperature=0.5, max_tokens=9)))
        assert (reply.tokens, reply.policy_version, policy.version) == (None, 0, 0)
        assert openai_service.chats[-1] == {
            "model": "gpt-test", "messages": HELLO, "seed": 1, "temperature": 0.5, "max_tokens": 9
        }  # fmt: skip
        await adapter.wait_until_complete(await adapter.submit(make_collection()))
        assert policy.served_model == "gpt-test"
        await policy.publish(1)
        reply = await policy.sample(ModelRequest(HELLO, SamplingParams(seed=1)))
        (job,) = openai_service.jobs.values()
        assert policy.served_model == openai_service.chats[-1]["model"] == job["fine_tuned_model"]
        assert (reply.policy_version, policy.version, policy.model_name) == (1, 1, "gpt-test")
        assert str(reply.message["content"]).startswith("good")
        assert await policy.fingerprint() != before
        report = await probe(policy, 1, {"": [HELLO]}, before)
        assert (report.max_difference, report.k3, report.num_tokens) == (None, None, 0), "unknown, not 0"


@pytest.mark.parametrize("scratch", [False, True])
async def test_the_next_job_starts_from_the_last_model_or_from_scratch(
    openai_service: OpenAIService, scratch: bool
) -> None:
    async with connect_adapter(openai_service, fine_tune_from_scratch=scratch) as adapter:
        policy = adapter.policy()
        for number in range(2):
            await adapter.wait_until_complete(await adapter.submit(make_collection(job_key=str(number))))
            await policy.publish(number + 1)
    first, second = openai_service.jobs.values()
    assert second["model"] == ("gpt-test" if scratch else first["fine_tuned_model"])


async def test_a_reply_of_another_model_is_an_error(openai_service: OpenAIService) -> None:
    async with connect_adapter(openai_service) as adapter:
        policy = adapter.policy()
        status = await adapter.wait_until_complete(await adapter.submit(make_collection()))
        made = status.metadata["fine_tuned_model"]
        openai_service.serves[made] = "gpt-test"
        with pytest.raises(BackendError, match=f"requested the model '{made}', but 'gpt-test-2026-01-01' replied"):
            await policy.publish(1)
        assert policy.version == 0
        openai_service.serves["gpt-test"] = "gpt-test-mini"
        with pytest.raises(BackendError, match="requested the model 'gpt-test', but 'gpt-test-mini"):
            await policy.sample(ModelRequest(HELLO))


async def test_a_model_that_never_becomes_available(openai_service: OpenAIService) -> None:
    openai_service.deploys_after = 1_000
    async with connect_adapter(openai_service, ready_s=0.3) as adapter:
        policy = adapter.policy()
        await adapter.wait_until_complete(await adapter.submit(make_collection()))
        with pytest.raises(
            BackendUnavailable, match=r"not available 0\.3 s after its job ended \(ready_s\): .*model_not_found"
        ):
            await policy.publish(1)


async def test_checkpoints_store_the_models_name(openai_service: OpenAIService, tmp_path: Any) -> None:
    async with connect_adapter(openai_service) as adapter:
        policy = adapter.policy()
        assert await adapter.save(tmp_path / "0", 0)
        status = await adapter.wait_until_complete(await adapter.submit(make_collection()))
        assert await adapter.save(tmp_path / "1", 1), "saved before it is published"
        made = status.metadata["fine_tuned_model"]
    assert json.loads((tmp_path / "1" / "openai_model.json").read_text()) == {
        "model": made,
        "base_model": "gpt-test",
        "service": openai_service.url,
    }
    async with connect_adapter(openai_service) as adapter:
        policy = adapter.policy()
        assert await adapter.restore(tmp_path / "1", 1)
        assert (policy.served_model, policy.version) == (made, 1)
        assert await adapter.restore(tmp_path / "0", 0)
        assert (policy.served_model, policy.version) == ("gpt-test", 0)
    config = OpenAIAdapterConfig(base_url=openai_service.url, api_key=openai_service.key)
    later = OpenAIAdapter(config, SFT(), openai_service.url, config.api_key)
    await later.initialize(FinetuneConfig.model_validate({"policy": {"model": str(tmp_path / "1")}}))
    policy: Any = later.policy()
    assert (policy.served_model, policy.model_name) == (made, "gpt-test")
    await later.cleanup()


async def test_a_hosted_policy_without_tokens(openai_service: OpenAIService) -> None:
    async with connect_adapter(openai_service) as adapter:
        policy = adapter.policy()
        with pytest.raises(BackendError, match="cannot score token ids"):
            await policy.score([[1, 2]])
        weighted = [{**HELLO[0], "weight": 0}]
        encoded = await policy.encode(ModelRequest(weighted), {"role": "assistant", "content": "x"})
        assert encoded == ChatPrompt(tuple(HELLO), None, -1)
        openai_service.faults["chat"] = [
            fails(400, '{"error": {"code": "context_length_exceeded", "message": "long"}}')
        ]
        with pytest.raises(ContextOverflow):
            await policy.sample(ModelRequest(HELLO))


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"model": "m"}', '{"model": 5, "base_model": "b", "service": "s"}', "[" * 100_000, "\x00"]
)
def test_an_unreadable_name_of_a_hosted_model_is_a_storage_error(tmp_path: Path, content: str) -> None:
    (tmp_path / HOSTED_MODEL).write_text(content)
    with pytest.raises(StorageError, match=r"cannot read .*openai_model\.json"):
        HostedModel.read(tmp_path)
