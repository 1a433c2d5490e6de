"""Agents with the real `openai` client: each call is recorded like the handle's, and no client outlives its episode."""

import asyncio
import contextvars
import gc
import json
import threading
from functools import partial

import openai
import pytest

import reinforge
from reinforge.errors import BackendUnavailable, ConfigError, ContextOverflow, MessagesRejected
from reinforge.rollout.capture import Capture
from reinforge.rollout.episode import build_episode_items
from reinforge.rollout.http import clients, endpoint
from reinforge.rollout.workflow import bind_workflow
from reinforge.types.trajectory import Outcome
from tests.calculator import ANSWER_IDS, CALL_IDS, TOOLS, CalculatorPolicy, async_solve, solve
from tests.doubles import PolicyModel, ScriptedPolicy, examples
from tests.episodes import collect, make_evaluation, make_runner

QUESTION = [{"role": "user", "content": "2 + 3?"}]


async def run(workflow, policy=None, *, count=1, timeout=20.0, others=None, retries=0):
    llms = {"agent": PolicyModel(policy or CalculatorPolicy()), **(others or {})}
    runner = make_runner(bind_workflow(workflow, "agent"), llms=llms, timeout_s=timeout, retries=retries)
    return await collect(make_evaluation(runner, examples(count)))


def check_episode(record):
    """Two calls, whose tokens are the sampled ones, in one conversation of which the replies alone are trained."""
    assert (record.outcome, record.item.output_obj) == (Outcome.OK, "The sum is 5."), record.reason
    assert [call.reply.tokens.token_ids for call in record.calls] == [CALL_IDS, ANSWER_IDS]
    items = build_episode_items(record, [True, True])
    assert [item.role.value for item in items] == ["user", "assistant", "tool", "assistant"]
    assert [item.logprobs.token_ids if item.logprobs else None for item in items] == [None, CALL_IDS, None, ANSWER_IDS]


def plain(item, llm, context):
    return solve(context.openai(), item.input_obj)


def plain_stream(item, llm, context):
    return solve(context.openai(), item.input_obj, stream=True)


async def coroutine(item, llm, context):
    return await async_solve(context.async_openai(), item.input_obj)


async def coroutine_stream(item, llm, context):
    return await async_solve(context.async_openai(), item.input_obj, stream=True)


def loop_in_a_thread(item, llm, context):
    return asyncio.run(async_solve(context.async_openai(), item.input_obj))


async def thread_in_a_coroutine(item, llm, context):
    return await asyncio.to_thread(solve, context.openai(), item.input_obj)


CURRENT, ASYNC_CURRENT = reinforge.current_openai(), reinforge.current_async_openai()
"""As an agent's module builds them, before any episode."""


def current(item, llm, context):
    return solve(CURRENT, item.input_obj)


async def async_current(item, llm, context):
    return await asyncio.create_task(async_solve(ASYNC_CURRENT, item.input_obj))


def async_current_in_a_thread(item, llm, context):
    return asyncio.run(async_solve(ASYNC_CURRENT, item.input_obj))


AGENTS = [plain, plain_stream, coroutine, coroutine_stream, loop_in_a_thread, thread_in_a_coroutine, current,
          async_current, async_current_in_a_thread]  # fmt: skip


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
async def test_an_agent_with_the_openai_client_is_recorded_token_by_token(agent):
    for record in await run(agent, count=3):
        check_episode(record)


async def test_siblings_that_share_a_client_are_recorded_each_in_its_own_episode():
    policy = ScriptedPolicy(lambda request: request.messages[0]["content"].upper())

    async def agent(item, llm, context):
        replies = []
        for _ in range(3):
            reply = await ASYNC_CURRENT.chat.completions.create(
                model="agent", messages=[{"role": "user", "content": item.input_obj}]
            )
            replies.append(reply.choices[0].message.content)
            await asyncio.sleep(0)
        return replies

    records = await run(agent, policy, count=8)
    for record in records:
        assert record.item.output_obj == [record.item.input_obj.upper()] * 3
        assert [call.request.messages[0]["content"] for call in record.calls] == [record.item.input_obj] * 3


async def test_the_answer_is_what_openais_client_expects():
    seen = {}

    def agent(item, llm, context):
        client = context.openai()
        seen["whole"] = client.chat.completions.create(
            model="agent", messages=QUESTION, tools=TOOLS, logprobs=True, extra_body={"return_token_ids": True}
        )
        seen["models"] = [each.id for each in client.models.list()]
        seen["raw"] = client.chat.completions.with_raw_response.create(model="agent", messages=QUESTION)
        return "done"

    [record] = await run(agent)
    assert record.outcome is Outcome.OK, record.reason
    whole = seen["whole"]
    assert type(whole).__module__.startswith("openai.types")
    assert (whole.object, whole.choices[0].finish_reason, whole.choices[0].message.role) == (
        "chat.completion", "tool_calls", "assistant",
    )  # fmt: skip
    assert whole.choices[0].message.tool_calls[0].function.name == "add"
    assert "".join(each.token for each in whole.choices[0].logprobs.content) == '<call>{"a": 2, "b": 3}</call>'
    assert {each.logprob for each in whole.choices[0].logprobs.content} == {-0.5}
    assert whole.usage.completion_tokens == len(CALL_IDS)
    assert tuple(whole.choices[0].token_ids) == CALL_IDS
    assert tuple(whole.prompt_token_ids) == record.calls[0].reply.tokens.prompt_token_ids
    assert seen["models"] == ["agent", "scripted"]
    assert seen["raw"].headers["content-type"] == "application/json"
    assert "logprobs" not in json.loads(seen["raw"].text)["choices"][0]["message"]
    assert json.loads(seen["raw"].text)["choices"][0]["logprobs"] is None


async def test_a_clients_own_time_limit_ends_no_call_and_the_runs_limit_ends_the_episode():
    def patient(item, llm, context):
        client = context.openai(timeout=0.001)
        return client.chat.completions.create(model="agent", messages=QUESTION).choices[0].message.content

    [record] = await run(patient, ScriptedPolicy(lambda request: 0.05))
    assert record.item.output_obj == "late"
    released = asyncio.Event()

    class Holding(ScriptedPolicy):
        async def sample(self, request):
            await released.wait()
            return await super().sample(request)

    [record] = await run(coroutine, Holding(), timeout=0.1)
    assert record.outcome is Outcome.TIMEOUT
    released.set()


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_client_that_outlives_its_episode_is_told_that_it_has_ended(is_async):
    kept = []

    def agent(item, llm, context):
        kept.append(context.async_openai() if is_async else context.openai())
        return "done"

    await run(agent)
    create = (
        kept[0].chat.completions.create if is_async else partial(asyncio.to_thread, kept[0].chat.completions.create)
    )
    with pytest.raises(openai.APIStatusError, match="the episode has ended") as failure:
        await create(model="agent", messages=QUESTION)
    assert (failure.value.status_code, failure.value.code) == (410, "episode_ended")


async def test_without_the_end_a_client_that_was_kept_still_samples(monkeypatch):
    """Mutation check."""
    kept, policy = [], ScriptedPolicy(lambda request: "yes")
    monkeypatch.setattr(Capture, "_check_open", lambda self: None)
    monkeypatch.setattr(endpoint.EpisodeEndpoint, "is_closed", property(lambda self: False))
    await run(lambda item, llm, context: kept.append(context.async_openai()), policy)
    await kept[0].chat.completions.create(model="agent", messages=QUESTION)
    assert len(policy.requests) == 1


def test_a_client_of_a_run_that_is_over_is_told_so_too():
    kept = []

    def agent(item, llm, context):
        kept.append(context.openai())
        kept.append(context.async_openai())
        return [client.base_url for client in kept] and "done"

    def use(item, llm, context):
        agent(item, llm, context)
        return kept[0].chat.completions.create(model="agent", messages=QUESTION).choices[0].message.content

    asyncio.run(run(use, ScriptedPolicy()))
    with pytest.raises(openai.APIStatusError, match="the episode has ended"):
        kept[0].chat.completions.create(model="agent", messages=QUESTION)
    with pytest.raises(openai.APIStatusError, match="the episode has ended"):
        asyncio.run(kept[1].chat.completions.create(model="agent", messages=QUESTION))


async def test_a_blocking_client_in_a_coroutine_says_what_to_use_instead():
    async def agent(item, llm, context):
        return context.openai().chat.completions.create(model="agent", messages=QUESTION)

    [record] = await run(agent)
    assert record.outcome is Outcome.TOOL_ERROR
    assert "context.async_openai()" in record.reason


async def test_a_thread_of_the_agent_needs_a_copy_of_the_context():
    seen = {}

    def ask(name):
        try:
            reply = CURRENT.chat.completions.create(model="agent", messages=QUESTION)
            seen[name] = reply.choices[0].message.content
        except openai.OpenAIError as error:
            seen[name] = str(error)

    def agent(item, llm, context):
        own = threading.Thread(target=ask, args=("own",))
        copied = threading.Thread(target=contextvars.copy_context().run, args=(ask, "copied"))
        for thread in (own, copied):
            thread.start()
            thread.join()
        return "done"

    [record] = await run(agent, ScriptedPolicy())
    assert seen["copied"] == "yes"
    assert "contextvars.copy_context()" in seen["own"]
    assert len(record.calls) == 1


def test_outside_of_episodes_the_current_clients_say_so():
    with pytest.raises(openai.BadRequestError, match="work inside an episode only") as failure:
        CURRENT.chat.completions.create(model="agent", messages=QUESTION)
    assert failure.value.code == "no_episode"
    with pytest.raises(openai.BadRequestError, match="work inside an episode only"):
        asyncio.run(ASYNC_CURRENT.chat.completions.create(model="agent", messages=QUESTION))
    assert reinforge.current_http_client().get("https://anywhere.example/v1/models").status_code == 400

    async def ask():
        async with reinforge.current_async_http_client() as client:
            return await client.get("https://anywhere.example/v1/models")

    assert asyncio.run(ask()).json()["error"]["code"] == "no_episode"


@pytest.mark.parametrize(
    ("error", "status", "outcome"),
    [
        (ContextOverflow("the prompt has 900 tokens"), 400, Outcome.CONTEXT_OVERFLOW),
        (MessagesRejected("two of the user in a row"), 400, Outcome.TOOL_ERROR),
        (BackendUnavailable("no answer"), 503, Outcome.BACKEND_ERROR),
    ],
)
async def test_a_failed_call_has_openais_error_and_the_outcome_that_the_handles_error_has(error, status, outcome):
    seen = []

    def agent(item, llm, context):
        try:
            context.openai(max_retries=2).chat.completions.create(model="agent", messages=QUESTION)
        except openai.APIStatusError as raised:
            seen.append(raised)
            raise

    policy = ScriptedPolicy(lambda request: error)
    [record] = await run(agent, policy)
    assert seen[0].status_code == status
    assert str(error) in seen[0].body["message"]
    assert record.outcome is outcome
    assert str(error) in record.reason
    assert len(policy.requests) == 1  # the run, not the client, tries again


async def test_an_agent_that_recovers_from_a_failed_call_fails_by_itself_later():
    replies = iter([BackendUnavailable("no answer"), "yes"])

    def agent(item, llm, context):
        client = context.openai()
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="agent", messages=QUESTION)
        client.chat.completions.create(model="agent", messages=QUESTION)
        raise RuntimeError("a bug")

    [record] = await run(agent, ScriptedPolicy(lambda request: next(replies)))
    assert record.outcome is Outcome.TOOL_ERROR


async def test_any_base_url_and_any_host_reach_the_episode():
    def agent(item, llm, context):
        own = openai.OpenAI(
            base_url="https://api.example.com/some/path/v9", api_key="sk-of-the-user", http_client=context.http_client()
        )
        first = own.chat.completions.create(model="agent", messages=QUESTION).choices[0].message.content
        azure = openai.AzureOpenAI(
            azure_endpoint="https://a.example.com", api_version="1", api_key="k", http_client=context.http_client()
        )
        return first + azure.chat.completions.create(model="agent", messages=QUESTION).choices[0].message.content

    [record] = await run(agent, ScriptedPolicy())
    assert record.item.output_obj == "yesyes"
    assert "sk-of-the-user" not in repr(record)


async def test_a_client_reaches_every_entry_by_its_name_or_its_models():
    class Judge(PolicyModel):
        is_policy = False
        model_name = "gpt-judge"

    def agent(item, llm, context):
        client = context.openai()
        names = ("agent", "scripted", "judge", "gpt-judge")
        said = [client.chat.completions.create(model=name, messages=QUESTION).choices[0].message for name in names]
        with pytest.raises(openai.NotFoundError, match="llms has: agent, judge, scripted, gpt-judge") as failure:
            client.chat.completions.create(model="judgee", messages=QUESTION)
        assert failure.value.code == "model_not_found"
        return [each.content for each in said]

    judge = Judge(ScriptedPolicy(lambda request: "fine"))
    [record] = await run(agent, ScriptedPolicy(), others={"judge": judge})
    assert record.item.output_obj == ["yes", "yes", "fine", "fine"], record.reason


async def test_with_one_entry_any_model_name_is_answered_with_one_warning_a_run(caplog):
    def agent(item, llm, context):
        client = context.openai()
        replies = [client.chat.completions.create(model="gpt-4o", messages=QUESTION) for _ in range(2)]
        return replies[0].model

    records = await run(agent, ScriptedPolicy(), count=3)
    assert {record.item.output_obj for record in records} == {"gpt-4o"}, "clients compare it with what they asked for"
    [warning] = [each.getMessage() for each in caplog.records if "gpt-4o" in each.getMessage()]
    assert "agent (scripted)" in warning


async def test_function_scopes_and_marks_work_around_the_clients_calls():
    def agent(item, llm, context):
        with context.function("plan"):
            reply = context.openai().chat.completions.create(model="agent", messages=QUESTION)
        context.mark(step_reward=0.5, call_id=reply.id)
        return "done"

    [record] = await run(agent, ScriptedPolicy())
    assert record.calls[0].functions == ("plan",)
    assert (record.marks[0].step_reward, record.marks[0].call_id) == (0.5, record.calls[0].call_id)


async def test_a_cancelled_call_of_another_loop_is_cancelled_in_the_run():
    started, cancelled = threading.Event(), threading.Event()

    class Hanging(ScriptedPolicy):
        async def sample(self, request):
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

    def agent(item, llm, context):
        async def ask():
            asked = context.async_openai().chat.completions.create(model="agent", messages=QUESTION)
            call = asyncio.ensure_future(asked)
            assert await asyncio.to_thread(started.wait, 60)
            call.cancel()
            await call

        with pytest.raises(asyncio.CancelledError):
            asyncio.run(ask())
        assert cancelled.wait(10)
        return "done"

    [record] = await run(agent, Hanging())
    assert record.item.output_obj == "done", record.reason


def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(clients.importlib.util, "find_spec", lambda name: None)
    for build in (reinforge.current_openai, reinforge.current_async_openai):
        with pytest.raises(ConfigError, match="pip install openai"):
            build()
    with pytest.raises(ConfigError, match="pip install httpx2"):
        reinforge.current_http_client("httpx2")
    with pytest.raises(ConfigError, match="use httpx2 or httpx"):
        reinforge.current_async_http_client("requests")


async def test_clients_of_an_episode_hold_no_socket_and_leave_no_warning(recwarn):
    for _ in range(3):
        await run(plain)
    gc.collect()
    await asyncio.sleep(0)
    assert [str(each.message) for each in recwarn if issubclass(each.category, ResourceWarning)] == []


async def test_both_http_libraries_reach_the_episode():
    httpx = pytest.importorskip("httpx")
    httpx2 = pytest.importorskip("httpx2")

    def agent(item, llm, context):
        body = {"model": "agent", "messages": QUESTION}
        said = []
        for library, kind in (("httpx", httpx.Client), ("httpx2", httpx2.Client)):
            client = context.http_client(library)
            assert isinstance(client, kind)
            answer = client.post("http://any/v1/chat/completions", json=body)
            said.append(answer.json()["choices"][0]["message"]["content"])
        return said

    [record] = await run(agent, ScriptedPolicy())
    assert record.item.output_obj == ["yes", "yes"], record.reason


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]


async def swallow(item, llm, context):
    """Continues without the model's answer, as programs do whose first request is refused."""
    client = context.async_openai()
    try:
        await client.chat.completions.create(model="agent", messages=IMAGE)
    except openai.BadRequestError:
        reply = await client.chat.completions.create(model="agent", messages=QUESTION)
    return "no image", reply.choices[0].finish_reason


@pytest.mark.parametrize(
    ("outcomes", "outcome", "num_calls"),
    [
        ({}, Outcome.TOOL_ERROR, 1),
        ({"refused_calls": "ignore"}, Outcome.OK, 1),
    ],
)
async def test_an_episode_with_a_refused_call_is_no_success(outcomes, outcome, num_calls):
    runner = make_runner(bind_workflow(swallow, "agent"), ScriptedPolicy(), **outcomes)
    (record,) = await collect(make_evaluation(runner, examples(1)))
    assert (record.outcome, len(record.calls)) == (outcome, num_calls)
    if not outcomes:
        assert record.reason.startswith("a model call was refused: /v1/chat/completions 400: ")
        assert "messages[0].content[0] is a block of the type" in record.reason


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
async def test_clients_that_a_framework_closes_after_each_call_answer_the_next_one(library):
    body = {"model": "agent", "messages": QUESTION}

    async def agent(item, llm, context):
        client, said = context.async_http_client(library), []
        for _ in range(2):
            async with client:
                said.append((await client.post("http://any/v1/chat/completions", json=body)).status_code)
            await client.aclose()
        with context.http_client(library) as blocking:
            blocking.close()
            said.append((await asyncio.to_thread(blocking.post, "http://any/chat/completions", json=body)).status_code)
        return said

    [record] = await run(agent, ScriptedPolicy())
    assert record.item.output_obj == [200, 200, 200]
