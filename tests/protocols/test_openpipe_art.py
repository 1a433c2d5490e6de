"""What is sent to an ART backend, key by key, beside what its published clients send."""

import asyncio

import pytest
from aiohttp import web
from pydantic import ValidationError

from reinforge.algorithms.grpo import GRPO
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import BackendError
from reinforge.protocols.art import local_server as openpipe_art_server
from reinforge.protocols.art.adapter import ARTTrainerAdapter
from reinforge.protocols.art.client import average_metrics
from reinforge.protocols.art.config import (
    ARTBackendConfig,
    ARTTrainerAdapterConfig,
    build_training_settings,
    find_art_problems,
    parse_step,
    split_settings,
)
from reinforge.protocols.art.groups import build_groups
from reinforge.protocols.art.local_server import ARTServer
from reinforge.rollout.models.openai_client import OpenAILLMConfig
from reinforge.safe_text import redact_secrets
from reinforge.types.job import TrainingStatusEnum
from reinforge.types.request import ChatPrompt, ModelRequest
from reinforge.types.trajectory import EpisodeItem, Trajectory, TrajectoryCollection, TrajectoryGroup
from tests.openai_server import fails, page
from tests.protocols.art import FAST, describe_backend
from tests.protocols.art_service import ARTService
from tests.protocols.stand_in import ApiError, after, lost_response

CALL = {"id": "call-7", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
TOOLS = ({"type": "function", "function": {"name": "look", "parameters": {}}},)
Q = {"role": "user", "content": "q"}


def logprobs_of(text, **fields):
    content = [{"token": f"token_id:{ord(each)}", "logprob": -0.5, "bytes": None, "top_logprobs": []} for each in text]
    return {"content": content, **fields}


def make_turn(prompt, text, tools=None, finish_reason="stop", logprobs=None, **metadata):
    item = EpisodeItem(role="assistant", content=text, metadata=metadata or None)
    item.logprobs = logprobs_of(text) if logprobs is None else logprobs
    item.attach(ChatPrompt(tuple(prompt), tools, 0, finish_reason))
    return item


def make_group(*episodes, rewards=(1.0, 0.0)):
    trajectories = [Trajectory(episode=list(each), reward=r) for each, r in zip(episodes, rewards, strict=False)]
    return TrajectoryGroup(group_id="g", trajectories=trajectories)


def make_collection(run_id="r", job_key="r/0"):
    groups = [
        [Trajectory(episode=[make_turn([Q], text)], reward=reward) for text, reward in (("good", 1.0), ("bad", 0.0))]
        for _ in range(2)
    ]
    return TrajectoryCollection(trajectories=groups, run_id=run_id, job_key=job_key)


def test_a_trained_reply_is_sent_as_the_choice_that_was_sampled():
    turn = make_turn([Q], "hi", logprobs=logprobs_of("hi", token_ids=[104, 105], prompt_token_ids=[1, 2]))
    (group,) = build_groups([make_group([turn])], "job-hash").groups
    (trajectory,) = group.pop("trajectories")
    assert group == {
        "exceptions": [], "metrics": {}, "logs": [], "metadata": {"reinforge_job": "job-hash", "group_id": "g"}
    }  # fmt: skip
    user, choice = trajectory.pop("messages_and_choices")
    assert user == Q
    assert choice == {
        "finish_reason": "stop",
        "index": 0,
        "logprobs": {"content": logprobs_of("hi")["content"], "refusal": None},
        "message": {
            "content": "hi", "refusal": None, "role": "assistant", "annotations": None, "audio": None,
            "function_call": None, "tool_calls": None,
        },
        "token_ids": [104, 105],
        "prompt_token_ids": [1, 2],
    }  # fmt: skip
    assert trajectory == {
        "tools": None, "additional_histories": [], "reward": 1.0, "initial_policy_version": None,
        "final_policy_version": None, "metrics": {}, "metadata": {}, "logs": [],
    }  # fmt: skip


def test_tools_calls_and_ids_are_kept_and_the_finish_reason_is_the_models():
    first = make_turn([Q], "", TOOLS, "tool_calls", logprobs_of("x"), tool_calls=[CALL])
    asked = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "content": "42", "tool_call_id": "call-7"}
    second = make_turn([Q, asked, result], "done", TOOLS)
    (group,) = build_groups([make_group([first, second])], "j").groups
    (trajectory,) = group["trajectories"]
    user, call, sent_result, last = trajectory["messages_and_choices"]
    assert (user, sent_result) == (Q, result)
    assert call["message"]["tool_calls"] == [CALL]
    assert call["finish_reason"] == "tool_calls"
    assert last["message"]["content"] == "done"
    assert trajectory["tools"] == list(TOOLS)
    assert trajectory["additional_histories"] == []


def test_a_rewritten_history_is_another_one():
    other = {"role": "user", "content": "summary"}
    episode = [make_turn([Q], "a"), make_turn([other], "b")]
    (group,) = build_groups([make_group(episode)], "j").groups
    (trajectory,) = group["trajectories"]
    assert [each.get("content", "choice") for each in trajectory["messages_and_choices"]] == ["q", "choice"]
    (history,) = trajectory["additional_histories"]
    assert history["messages_and_choices"][0] == other
    assert history["tools"] is None


def test_replies_without_log_probs_are_context_and_counted():
    bare = make_turn([Q], "a", logprobs={})
    after = make_turn([Q, {"role": "assistant", "content": "a"}, Q], "b")
    built = build_groups([make_group([bare, after])], "j")
    kinds = ["choice" if "index" in each else each["role"] for each in _entries(built)]
    assert kinds == ["user", "assistant", "user", "choice"]
    assert (built.num_trained, built.num_without_logprobs) == (1, 1)
    assert build_groups([make_group([bare])], "j").groups == []
    assert build_groups([make_group([bare])], "j", allow_without_logprobs=True).num_trained == 1


def test_a_message_of_another_model_is_never_a_choice():
    other = make_turn([Q], "x")
    other.trained = False
    built = build_groups([make_group([other, make_turn([Q, {"role": "assistant", "content": "x"}, Q], "b")])], "j")
    assert ["index" in each for each in _entries(built)] == [False, False, False, True]


def _entries(built):
    return built.groups[0]["trajectories"][0]["messages_and_choices"]


def test_numbers_and_names():
    assert average_metrics([{"loss": 0.5, "note": "x"}, {"loss": 0.25}]) == {"num_updates": 2, "loss": 0.375}
    assert parse_step("run@3") == 3
    assert parse_step("wandb-artifact:///team/project/run:step12") == 12
    assert parse_step("run") is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs the address of a server, ip and port, or of the training service, base_url"),
        ({"ip": "h"}, "needs the address"),
        ({"ip": "h", "port": 1, "base_url": "http://h/v1"}, "remove one of the two"),
        ({"ip": "169.254.169.254", "port": 1}, "metadata service"),
        ({"ip": "h", "port": 1, "entity": "team"}, "entity is a team at the training service"),
    ],
)
def test_addresses_that_cannot_be_used_are_refused(given, message):
    with pytest.raises(ValidationError, match=message):
        ARTBackendConfig(**given)


def test_a_server_that_calls_itself_localhost_is_reached_at_its_address():
    backend = ARTBackendConfig(ip="10.0.0.5", port=7999)
    server = ARTServer.__new__(ARTServer)
    server.backend = backend
    assert server._reach("http://0.0.0.0:8000/v1") == "http://10.0.0.5:8000/v1"
    assert server._reach("http://localhost:8000/v1") == "http://10.0.0.5:8000/v1"
    assert server._reach("https://infer.example/v1") == "https://infer.example/v1"


def describe(training, protocol=2, **backend):
    where = {"base_url": "http://a.example/v1"} if protocol == 2 else {"ip": "10.0.0.5", "port": 1}
    return ARTTrainerAdapterConfig(backend={**where, **backend}, training=training)


@pytest.mark.parametrize(
    ("training", "sent"),
    [
        ({"loss_fn": "ppo"}, {"loss_fn": "ppo", "ppo": True}),
        ({"loss_fn": "cispo"}, {"loss_fn": "cispo", "ppo": False}),
        ({"ppo": True}, {"loss_fn": "ppo", "ppo": True}),
        ({"ppo": False, "loss_fn": "cispo"}, {"loss_fn": "cispo", "ppo": False}),
        ({"scale_rewards": False}, {"scale_rewards": False, "normalize_advantages": False}),
        ({"kl_penalty_reference_step": 3, "packed_sequence_length": 64}, None),
        ({}, {}),
    ],
)
def test_each_setting_is_sent_under_every_name_that_the_clients_send(training, sent):
    settings = build_training_settings(describe(training))
    assert settings == (training if sent is None else sent)
    config, dev_config = split_settings(settings)
    assert config == {}
    assert not {"loss_fn", "normalize_advantages"} & set(dev_config), "a server of protocol 1 knows neither"


def test_two_names_of_one_setting_that_differ_are_refused():
    config = describe({"ppo": True, "loss_fn": "cispo"})
    (problem,) = find_art_problems(config, FinetuneConfig(trainer_adapter="a"), GRPO())
    assert (problem.path, problem.message) == ("trainer_adapters.a.training.ppo", "is True, but loss_fn is cispo")


# Over HTTP.


@pytest.fixture
def art():
    with ARTService() as service:
        yield service


async def connect_to(service, protocol, **settings):
    backend = describe_backend(service, protocol, service.key)
    adapter = ARTTrainerAdapter(ARTTrainerAdapterConfig(backend=backend, **{**FAST, **settings}), GRPO())
    await adapter.initialize(FinetuneConfig())
    return adapter


@pytest.fixture
async def connect(art):
    made = []

    async def make(protocol, **settings):
        made.append(await connect_to(art, protocol, **settings))
        return made[-1]

    yield make
    for adapter in made:
        await adapter.cleanup()


async def test_protocol_1_calls_as_the_published_client(art, connect):
    adapter = await connect(1, training={"learning_rate": 5e-5, "beta": 0.1, "epsilon": 0.2})
    (model,) = art.registered
    assert model == {
        "name": "agent-1", "project": "games", "entity": None, "id": None, "run_id": None, "config": None,
        "trainable": True, "inference_api_key": None, "inference_base_url": None, "inference_model_name": None,
        "base_path": ".art", "report_metrics": None, "base_model": "tiny/base",
        "_internal_config": {"init_args": None, "engine_args": None, "trainer_args": None},
    }  # fmt: skip
    status = await adapter.wait_until_complete(await adapter.submit(make_collection()))
    assert status.status is TrainingStatusEnum.COMPLETED
    assert (status.num_updates, status.metadata["loss"]) == (2, 0.45)
    assert art.jobs[0].config == {"learning_rate": 5e-5, "kl_penalty_coef": 0.1, "epsilon": 0.2}


@pytest.mark.parametrize("protocol", [1, 2])
async def test_a_job_key_is_one_job(art, connect, protocol):
    adapter = await connect(protocol)
    first = await adapter.submit(make_collection())
    assert await adapter.submit(make_collection()) == first
    assert len(art.jobs) <= 1
    status = await adapter.wait_until_complete(first)
    assert status.status is TrainingStatusEnum.COMPLETED
    assert len(art.jobs) == 1


@pytest.mark.parametrize("protocol", [1, 2])
async def test_a_model_that_something_else_trains_is_not_trained_on(art, connect, protocol):
    adapter = await connect(protocol)
    model = art.models["agent-1"]
    model.step, model.learnt[3] = 3, []
    with pytest.raises(BackendError, match="agent-1 is at step 3, but this run left it at step 0"):
        await adapter.submit(make_collection())
    assert art.jobs == []


async def test_health_is_asked_at_the_configured_port(art, connect):
    adapter = await connect(1)
    assert await adapter.is_healthy()
    assert art.calls["health"] == 1


def refuse(status, text="no"):
    """A server that answers a call with a status."""

    def answer(request, context):
        raise ApiError(status, text)

    return answer


async def test_a_server_that_does_not_take_a_job_now_is_asked_again(art, connect):
    adapter = await connect(1)
    art.faults = {"train": [refuse(429), refuse(429)]}
    status = await adapter.wait_until_complete(await adapter.submit(make_collection()))
    assert status.status is TrainingStatusEnum.COMPLETED
    assert (len(art.jobs), art.calls["train"]) == (1, 3)


async def test_a_server_that_never_takes_a_job_fails_it_at_once(art, connect):
    adapter = await connect(1, max_retries=0, settle_s=600.0)
    art.faults = {"train": [refuse(429)]}
    async with asyncio.timeout(30):
        status = await adapter.wait_until_complete(await adapter.submit(make_collection()))
    assert status.status is TrainingStatusEnum.FAILED
    assert "the server did not take the job" in status.message
    assert art.jobs == []


async def test_the_status_of_a_job_whose_response_broke_off_is_read_without_waiting(art, connect):
    adapter = await connect(1, settle_s=600.0)
    art.ends = ["failed"]
    ref = await adapter.submit(make_collection())
    async with asyncio.timeout(30):
        while art.jobs == [] or not art.jobs[0].is_over:
            await asyncio.sleep(0.01)
        for _ in range(3):
            assert (await adapter.status(ref)).status is TrainingStatusEnum.RUNNING, "it may still make its step"
            await asyncio.sleep(0.05)


async def test_a_job_that_ends_without_a_checkpoint_fails_after_a_while(art, connect):
    adapter = await connect(2, settle_s=0.1)
    ref = await adapter.submit(make_collection())
    empty = {"object": "list", "data": [], "has_more": False}
    art.faults = {"checkpoints": [lambda request, context: web.json_response(empty)] * 1000}
    async with asyncio.timeout(30):
        status = await adapter.wait_until_complete(ref)
    assert status.status is TrainingStatusEnum.FAILED
    assert "the job has ended, and no new step came within 0.1 s (settle_s)" in status.message


LOST = {"lost": lost_response, "503": after(fails(503)), "html": after(page(502))}


@pytest.mark.parametrize("fault", LOST)
async def test_a_lost_answer_to_a_submission_starts_no_second_job(art, connect, fault, caplog):
    adapter = await connect(2)
    art.faults = {"create": [LOST[fault]]}
    ref = await adapter.submit(make_collection())
    assert ref.metadata["job_id"] == "after-step-0"
    assert (await adapter.wait_until_complete(ref)).status is TrainingStatusEnum.COMPLETED
    assert len(art.jobs) == 1
    assert "no answer to a submission" in caplog.text


async def test_a_response_that_breaks_off_is_found_by_its_step(art, connect):
    adapter = await connect(1)
    art.faults = {"train": [lost_response]}
    status = await adapter.wait_until_complete(await adapter.submit(make_collection()))
    assert status.status is TrainingStatusEnum.COMPLETED
    assert (status.metadata["art_step"], len(art.jobs)) == (1, 1)


@pytest.mark.parametrize(
    ("protocol", "reason"),
    [(1, "and no new step came within 0.2 s (settle_s)"), (2, "CUDA out of memory")],
)
async def test_a_failed_job_has_a_reason(art, connect, protocol, reason):
    adapter = await connect(protocol, settle_s=0.2)
    art.ends = ["failed"]
    status = await adapter.wait_until_complete(await adapter.submit(make_collection()))
    assert status.status is TrainingStatusEnum.FAILED
    assert reason in status.message


async def find_message_with_key(key):
    """Returns the message of an error that repeats the request, as it would be shown."""
    service = ARTService()
    service.inference_key = key
    with service:
        adapter = await connect_to(service, 1)
        service.faults = {"step": [refuse(422, f"input: {key}")]}
        with pytest.raises(BackendError) as caught:
            await adapter.submit(make_collection())
        await adapter.cleanup()
    return redact_secrets(str(caught.value))


async def test_the_inference_key_of_the_server_never_reaches_a_message():
    assert "inference-canary-1" not in await find_message_with_key("inference-canary-1")


async def test_a_key_that_is_not_remembered_reaches_a_message(monkeypatch):
    """Mutation check."""
    monkeypatch.setattr(openpipe_art_server, "remember_secret", lambda key: None)
    assert "inference-canary-2" in await find_message_with_key("inference-canary-2")


async def test_an_entry_without_a_key_gets_the_one_that_the_server_tells(art):
    entry = OpenAILLMConfig(model_name="agent-1", base_url=f"http://{art.ip}:{art.port}/v1")
    config = ARTTrainerAdapterConfig(backend=describe_backend(art, 1, art.key), **FAST)
    adapter = ARTTrainerAdapter(config, GRPO(), {"agent": entry})
    await adapter.initialize(FinetuneConfig())
    reply = await adapter.policy().sample(ModelRequest((Q,)))
    assert reply.message["content"]
    await adapter.cleanup()


async def test_an_endpoint_without_a_list_of_models_is_used_as_it_is(art, connect):
    art.faults = {"names": [refuse(404)]}
    adapter = await connect(1)
    assert adapter.policy().served_model == "agent-1@0"
