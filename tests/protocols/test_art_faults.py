"""ART's models where something goes wrong: a full disk, a deleted model, a server that stops, equal log-probs."""

import asyncio
import threading

import httpx
import pytest

from reinforge.errors import EngineError, StorageError
from reinforge.protocols.art.server import earlier_steps as earlier_module
from reinforge.protocols.art.server import model as model_module
from reinforge.protocols.art.server import records as records_module
from reinforge.protocols.art.server.earlier_steps import MAX_LOADED, EarlierSteps
from reinforge.protocols.art.server.model import ARTModel
from reinforge.protocols.art.server.records import ModelFolder
from reinforge.protocols.art.server.trajectories import SampledReplies
from reinforge.serving import app as app_module
from reinforge.types.request import TokenLogprobs
from tests.protocols.art_client import DESCRIBED, PROMPT, ARTServer, build_call, build_group, get_choice
from tests.serving.serving import wait_for


async def test_weights_that_cannot_be_saved_are_never_served(art, model, monkeypatch):
    """A request waits while the job trains; it must not be answered from weights that the next process has not got."""
    group = await build_group(art)
    before = await art.sample("agent", 1)
    asked = []

    def fill_disk(target, fill, **facts):
        wait = asyncio.run_coroutine_threadsafe(ask(), art.loop)
        wait.result(60)
        raise StorageError("no space left")

    async def ask():
        asked.append(asyncio.ensure_future(art.sample("agent", 1)))
        await asyncio.sleep(0.3)

    art.loop = asyncio.get_running_loop()
    with monkeypatch.context() as patch:
        patch.setattr(model_module, "write_folder", fill_disk)
        events = await art.wait(await art.start_job(model, [{"trajectories": group}]))
    assert "no space left" in events[-1]["data"]["error_message"]
    for answer in [await asked[0], await art.sample("agent", 1)]:
        assert answer["model_version"] == 0
        assert get_choice(answer) == get_choice(before)
    await art.wait(await art.start_job(model, [{"trajectories": group}]))
    assert await art.list_steps(model) == [1, 0]


@pytest.mark.slow
async def test_the_newest_step_cannot_be_deleted_while_it_is_being_saved(art, model, tmp_path, monkeypatch):
    group = await build_group(art)
    loop, write = asyncio.get_running_loop(), model_module.write_folder

    def write_and_delete(target, fill, **facts):
        write(target, fill, **facts)
        path = f"/v1/preview/models/{model['id']}/checkpoints"
        deletion = art.call("DELETE", path, {"steps": [1, 1]})
        assert asyncio.run_coroutine_threadsafe(deletion, loop).result(60)["deleted_count"] == 0
        body = {"model": DESCRIBED, "steps_to_keep": [0]}
        asyncio.run_coroutine_threadsafe(art.call("POST", "/_delete_checkpoint_files", body), loop).result(60)

    monkeypatch.setattr(model_module, "write_folder", write_and_delete)
    events = await art.wait(await art.start_job(model, [{"trajectories": group}]))
    assert events[-1]["data"] == {"step": 1}
    assert ModelFolder(tmp_path / model["id"]).list_steps() == [1]


@pytest.mark.slow
async def test_checkpoints_are_hashed_when_they_are_loaded_and_not_when_they_are_listed(
    tiny_model_dir, tmp_path, monkeypatch
):
    """A listing that reads every checkpoint would stop all replies for seconds."""
    hashed, find_damage = [], records_module.find_damage
    monkeypatch.setattr(records_module, "find_damage", lambda path: hashed.append(path.name) or find_damage(path))
    async with ARTServer(tiny_model_dir, tmp_path) as server:
        model = await server.create()
        group = await build_group(server)
        for step in (1, 2):
            await server.wait(await server.start_job(model, [{"trajectories": group}]))
            assert (await server.list_steps(model))[0] == step
        assert hashed == []
    newest = ModelFolder(tmp_path / model["id"]).get_checkpoint(2)
    (newest / "adapter_config.json").write_text("{")
    async with ARTServer(tiny_model_dir, tmp_path) as server:
        assert hashed == ["step-000002", "step-000001"]
        assert await server.list_steps(model) == [1, 0], "a damaged step is not used"
        await server.wait(await server.start_job(model, [{"trajectories": await build_group(server)}]))
        assert await server.list_steps(model) == [2, 1, 0]


async def test_a_training_call_that_is_sent_again_starts_no_second_job(art, model):
    """The official client, from which ART's is made, sends a request again if it gets no response."""
    group = await build_group(art)
    first = await art.start_job(model, [{"trajectories": group}])
    art.http.headers["x-stainless-retry-count"] = "1"
    assert await art.start_job(model, [{"trajectories": group}]) == first
    other = await art.start_job(model, [{"trajectories": group}], learning_rate=0.001)
    names = {"entity": None, "project": "games", "name": "agent", "base_model": "tiny"}
    again = await art.call("POST", "/v1/preview/models", {**names, "return_existing": False})
    assert again == model, "the creation whose response was lost"
    del art.http.headers["x-stainless-retry-count"]
    refused = await art.http.post("/v1/preview/models", json=names)
    assert (refused.status_code, refused.headers["x-should-retry"]) == (409, "false")
    later = await art.start_job(model, [{"trajectories": group}])
    for job in (first, other, later):
        await art.wait(job)
    assert await art.list_steps(model) == [3, 2, 1, 0]


@pytest.fixture
def held(monkeypatch):
    """Jobs that train for ever; the event says that one has begun."""
    begun = asyncio.Event()

    async def train(self, job, groups, settings):
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(ARTModel, "_train", train)
    return begun


@pytest.mark.slow
async def test_the_jobs_of_a_model_end_when_it_is_deleted(art, model, held):
    group = await build_group(art, count=2)
    training = asyncio.ensure_future(art.http.post("/_train_model", json=build_call(group)))
    await held.wait()
    assert (await art.http.delete(f"/v1/preview/models/{model['id']}")).status_code == 204
    with pytest.raises(httpx.RemoteProtocolError):
        await asyncio.wait_for(training, 60)
    assert await art.create() != model


@pytest.mark.slow
async def test_a_step_that_is_made_while_its_model_is_deleted_is_not_served_by_the_next_model(art):
    for _ in range(2):
        model = await art.create()
        group = await build_group(art)
        call = asyncio.ensure_future(art.sample("agent", 5, max_tokens=200))  # so that the deletion waits
        job = await art.start_job(model, [{"trajectories": group}])
        assert (await art.http.delete(f"/v1/preview/models/{model['id']}")).status_code == 204
        await call
        assert (await art.http.get(f"/v1/preview/training-jobs/{job}/events")).status_code == 404
        assert art.app.models.names == ()


async def test_a_server_stops_at_once_while_a_client_waits_for_a_job(art, model, tmp_path, held, monkeypatch):
    monkeypatch.setattr(app_module, "SHUTDOWN_S", 0.1)
    group = await build_group(art, count=2)
    training = asyncio.ensure_future(art.http.post("/_train_model", json=build_call(group)))
    await held.wait()
    await asyncio.wait_for(art.app.__aexit__(), 60)
    with pytest.raises(httpx.HTTPError):
        await training
    [job] = ModelFolder(tmp_path / model["id"]).list_jobs()
    assert ModelFolder(tmp_path / model["id"]).read_result(job) is None, "it runs again after a restart"


@pytest.mark.slow
async def test_a_job_whose_end_cannot_be_recorded_ends_all_the_same(art, model, monkeypatch):
    def fill_disk(self, id_, result):
        raise StorageError("no space left")

    monkeypatch.setattr(ModelFolder, "record_result", fill_disk)
    job = await art.start_job(model, [{"trajectories": await build_group(art)}])
    events = await asyncio.wait_for(art.wait(job), 60)
    assert events[-1]["data"] == {"step": 1}


async def test_a_model_that_cannot_be_loaded_leaves_nothing_behind(art, tmp_path, monkeypatch):
    async def fail(self):
        raise EngineError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(ARTModel, "load", fail)
        body = {"project": "games", "name": "agent", "base_model": "tiny", "return_existing": True}
        assert (await art.http.post("/v1/preview/models", json=body)).status_code == 500
    assert list(tmp_path.iterdir()) == []
    await art.create()


@pytest.mark.slow
async def test_what_a_killed_server_left_is_removed(tiny_model_dir, tmp_path):
    """A model that was being deleted does not come back, and half a step is no step."""
    async with ARTServer(tiny_model_dir, tmp_path) as server:
        deleted, model = await server.create("deleted"), await server.create()
    (tmp_path / deleted["id"]).rename(tmp_path / f".trash-{deleted['id']}-1-1")
    checkpoints = tmp_path / model["id"] / "checkpoints"
    (checkpoints / ".tmp-1-1").mkdir()
    (checkpoints / ".tmp-1-1" / "adapter_model.safetensors").write_bytes(b"half")
    async with ARTServer(tiny_model_dir, tmp_path) as server:
        assert ("agent" in server.app.models.names, "deleted" in server.app.models.names) == (True, False)
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [model["id"]]
        assert list(checkpoints.iterdir()) == []


@pytest.mark.slow
async def test_a_model_that_is_being_deleted_is_not_found_again(art, model, tmp_path, monkeypatch):
    deleting, go, close = asyncio.Event(), asyncio.Event(), ARTModel.close

    async def close_later(self):
        deleting.set()
        await go.wait()
        await close(self)

    with monkeypatch.context() as patch:
        patch.setattr(ARTModel, "close", close_later)
        deletion = asyncio.ensure_future(art.http.delete(f"/v1/preview/models/{model['id']}"))
        await deleting.wait()
        made = await art.create()
        go.set()
        assert (await deletion).status_code == 204
    assert made["id"] != model["id"]
    assert ModelFolder(tmp_path / made["id"]).read() is not None


@pytest.mark.slow
async def test_a_model_for_which_there_was_no_room_is_found_again(tiny_model_dir, tmp_path, caplog):
    async with ARTServer(tiny_model_dir, tmp_path) as server:
        first, second = await server.create("one"), await server.create("two")
    async with ARTServer(tiny_model_dir, tmp_path, max_models=1) as server:
        assert "the model two of games is not loaded: 1 models are loaded already" in caplog.text
        body = {"project": "games", "name": "two", "base_model": "tiny", "return_existing": True}
        refused = await server.call("POST", "/v1/preview/models", body, 409)
        assert "--max_models" in refused["error"]["message"]
        await server.http.delete(f"/v1/preview/models/{first['id']}")
        assert await server.create("two") == second


@pytest.mark.slow
async def test_replies_that_do_not_fit_the_model_are_left_out(art, model):
    """Tokens, prompts and numbers of a client's own invention reach neither the model nor its memory."""
    good = await build_group(art, max_tokens=1)
    choice = {"finish_reason": "stop", "message": {"content": "x"}, "logprobs": {"content": [{"logprob": -1.0}]}}
    wrong = [
        {"token_ids": [10**9], "prompt_token_ids": [1]},
        {"token_ids": [1], "prompt_token_ids": [1] * 100_000},
        {"token_ids": [1, 2], "prompt_token_ids": [1]},
        {"logprobs": {"content": [{"logprob": -(10**400)}]}},
        {"logprobs": {"content": [{}]}},
    ]
    made_up = [{"messages_and_choices": [*PROMPT, choice | each], "reward": 1.0} for each in wrong]
    events = await art.wait(await art.start_job(model, [{"trajectories": [*good, *made_up]}]))
    assert events[-1]["data"] == {"step": 1}, events
    assert (events[1]["data"]["num_replies"], events[1]["data"]["num_left_out"]) == (8, 5)


def test_replies_of_equal_logprobs_are_told_apart_by_their_tokens():
    """A model that is certain of one token gives it the log-prob 0.0, after any prompt."""
    replies = SampledReplies()
    for prompt, ids in (((1, 2), (7,)), ((1, 3), (7,)), ((1, 3), (8,))):
        replies._add("tiny", TokenLogprobs(prompt, ids, (0.0,)))
    assert replies.find("tiny", (0.0,)) is None, "any of three"
    assert replies.find("tiny", (0.0,), (7,)) is None, "either of two"
    assert replies.find("tiny", (0.0,), (7,), (1, 2)).prompt_token_ids == (1, 2)
    assert replies.find("tiny", (0.0,), (8,)).prompt_token_ids == (1, 3)
    replies._add("tiny", TokenLogprobs((1, 3), (8,), (0.0,), policy_version=4))
    assert replies.find("tiny", (0.0,), (8,)).policy_version == 4


def test_replies_of_a_model_with_other_tokens_are_not_found():
    replies = SampledReplies()
    replies._add("other", TokenLogprobs((1, 2), (7,), (-0.5,)))
    assert replies.find("tiny", (-0.5,)) is None


async def test_what_is_remembered_of_a_reply_is_what_training_needs(art, model):
    await art.sample("agent", 1, top_logprobs=20)
    [kept] = art.api._replies._replies.values()
    assert (kept.texts, kept.top_logprobs) == ((), ())


class Engines:
    def __init__(self):
        self.now = self.most = 0
        self.go = threading.Event()

    def load(self, config, **settings):
        self.now += 1
        self.most = max(self.most, self.now)
        assert self.go.wait(10)
        return self

    @property
    def policy(self):
        return self

    async def publish(self, version):
        pass

    def close(self):
        self.now -= 1


@pytest.fixture
async def engines(monkeypatch):
    """The engines of earlier steps: `go` lets them load; all are closed in the end."""
    engines = Engines()
    monkeypatch.setattr(earlier_module, "import_engine", lambda: engines)
    engines.earlier = EarlierSteps("cpu")
    yield engines
    await engines.earlier.close()
    assert engines.now == 0


class Step:
    """A step that can be loaded."""

    step, policy_config = 1, None


async def use(earlier, step, seconds=0.01):
    async with earlier.use(step):
        await asyncio.sleep(seconds)


async def hang_up(call):
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


async def test_no_more_earlier_steps_are_loaded_than_there_is_memory_for(engines):
    engines.go.set()
    steps = [Step() for _ in range(6)]
    await asyncio.wait_for(asyncio.gather(*(use(engines.earlier, step) for _ in range(3) for step in steps)), 20)
    assert engines.most == MAX_LOADED


async def test_a_step_whose_client_hangs_up_while_it_loads_is_loaded_once_and_freed(engines):
    step = Step()
    call = asyncio.ensure_future(use(engines.earlier, step))
    await wait_for(lambda: engines.now)
    await hang_up(call)
    engines.go.set()
    await use(engines.earlier, step)
    assert engines.most == 1


async def test_a_step_that_loads_for_nobody_is_freed_if_the_client_that_needs_its_room_hangs_up(engines):
    steps = [Step() for _ in range(MAX_LOADED + 2)]
    for count, step in enumerate(steps[: MAX_LOADED + 1], 1):  # the last one waits until the first one is freed
        call = asyncio.ensure_future(use(engines.earlier, step))
        await wait_for(lambda: engines.now == min(count, MAX_LOADED))  # noqa: B023
        await asyncio.sleep(0)
        await hang_up(call)
    engines.go.set()
    await use(engines.earlier, steps[-1])
    assert engines.most == MAX_LOADED


async def test_a_step_that_cannot_be_loaded_is_tried_again(engines):
    engines.go.set()
    step, failures, load = Step(), [EngineError("damaged")], engines.load
    engines.load = lambda *args, **settings: (_ for _ in ()).throw(failures.pop()) if failures else load(*args)
    with pytest.raises(EngineError, match="damaged"):
        await use(engines.earlier, step)
    await use(engines.earlier, step)
