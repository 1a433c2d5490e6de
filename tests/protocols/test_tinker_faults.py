"""Tinker's part where something goes wrong: cancelled requests, sessions that end meanwhile, disks that fail."""

import asyncio
import json

import pytest

from reinforge.errors import EngineError
from reinforge.protocols.tinker.server import api as api_module
from reinforge.protocols.tinker.server import sessions
from reinforge.protocols.tinker.server.requests import Sample
from reinforge.protocols.tinker.server.slots import AdapterSlots, Snapshot
from reinforge.protocols.tinker.server.training import TinkerTraining
from reinforge.serving.routes import ApiError, ServerLimits
from tests.protocols.tinker import build_body, read_metrics, read_sequence, serve_tinker, share_beginning
from tests.serving.serving import wait_for


async def test_a_model_whose_creation_is_cancelled_has_a_result(client, monkeypatch):
    async def wait(self):
        await asyncio.Event().wait()

    monkeypatch.setattr(TinkerTraining, "_wait_for_slot", wait)
    lora = {"rank": 4, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True}
    body = {"session_id": client.session_id, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
    promise = await client.post("create_model", **body)
    await client.post("cancel_future", request_id=promise["request_id"])
    assert (await asyncio.wait_for(client.result(promise), 60))["error"] == "the request was cancelled"


async def test_a_slot_is_given_back_once_if_its_session_ends_while_a_checkpoint_is_loaded(client, served, monkeypatch):
    api = served[1]
    model_id = (await client.create_model())["model_id"]
    saved = await client.result(await client.post("save_weights", model_id=model_id, seq_id=1, path="a"))

    async def end_and_fail(self, slot, folder, rank, *, with_training):
        await api.sessions.end(client.session_id)
        raise EngineError("damaged")

    monkeypatch.setattr(AdapterSlots, "load", end_and_fail)
    body = {"session_id": client.session_id, "model_seq_id": 1, "path": saved["path"], "optimizer": True}
    assert (await client.result(await client.post("load_weights", **body)))["error"] == "damaged"
    assert sorted(api._slots._free) == ["trained000", "trained001"]


@pytest.mark.parametrize("loss", ["dro", "importance_sampling"])
async def test_the_loss_of_data_with_one_beginning_is_the_sum_of_their_losses(client, loss):
    """`dro` has a penalty at every position, so none of them may be left out because several data share it."""
    data = share_beginning([40, 41], [50, 51, 52])
    model_id = (await client.create_model())["model_id"]
    losses = []
    for seq_id, part in enumerate((data, data[:1], data[1:]), 1):
        output = await client.result(await client.train(model_id, seq_id, part, loss, forward_only=True))
        losses.append(read_metrics(output)["loss:sum"])
    assert losses[0] == pytest.approx(losses[1] + losses[2], rel=1e-4)


async def test_a_checkpoint_that_is_being_written_is_not_listed(client, tmp_path):
    model_id = (await client.create_model())["model_id"]
    await client.result(await client.post("save_weights", model_id=model_id, seq_id=1, path="done"))
    [folder] = tmp_path.glob("tinker/*/weights/done")
    staged = folder.with_name(".tmp-1-1")
    staged.mkdir()
    (staged / "tinker.json").write_text((folder / "tinker.json").read_text())
    listed = json.loads((await client.http.get("checkpoints")).text)["checkpoints"]
    assert [each["checkpoint_id"] for each in listed] == ["weights/done"]


async def test_a_request_that_is_cancelled_twice_leaves_its_slot(served, tuned):
    slots = served[1]._slots
    snapshot = Snapshot("a", lambda: tuned.make_adapter(rank=4, seed=1))

    async def use():
        async with slots.use(snapshot):
            await asyncio.Event().wait()

    task = asyncio.ensure_future(use())
    await wait_for(lambda: snapshot.slot is not None)
    async with slots._changed:
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.01)
    await asyncio.gather(task, return_exceptions=True)
    assert snapshot.slot.num_users == 0


async def test_a_sweep_that_fails_is_not_the_last_one(tuned, tmp_path, monkeypatch, caplog):
    sweeps = []

    async def sweep(self):
        sweeps.append(1)
        raise OSError("the disk is away")

    monkeypatch.setattr(api_module, "SWEEP_S", 0.01)
    monkeypatch.setattr(api_module.TinkerApi, "sweep", sweep)
    async with serve_tinker(tuned, tmp_path):
        await wait_for(lambda: len(sweeps) > 2)
    assert "the disk is away" in caplog.text


async def test_a_checkpoint_that_answers_chats_is_hashed_once(client, served, monkeypatch):
    """Hashing takes as long as reading the whole checkpoint, and every other request waits for it."""
    api, reads = served[1], []
    model_id = (await client.create_model())["model_id"]
    saved = await client.save_for_sampler(model_id, 1, path="a")
    read = api._checkpoints.read
    monkeypatch.setattr(api._checkpoints, "read", lambda path: reads.append(path) or read(path))
    first, again = (api._models.find(saved["path"]).policy for _ in range(2))
    assert first._snapshot is again._snapshot
    assert len(reads) == 1
    await client.save_for_sampler(model_id, 2, path="a")
    assert api._models.find(saved["path"]).policy._snapshot is not first._snapshot
    assert len(reads) == 2
    api._checkpoints.delete(reads[0])
    with pytest.raises(ApiError, match="there is no checkpoint"):
        api._models.find(saved["path"])


async def test_the_servers_limit_of_tokens_holds_for_samples_too(client, served):
    sampling, sampler = served[1].sampling, await client.open_sampler(base_model="tiny")
    body = {"sampling_session_id": sampler, "prompt": {"chunks": [{"tokens": [5, 6]}]}, "sampling_params": {"stop": []}}
    promise = json.loads(sampling.submit(Sample(**body, seq_id=0), ServerLimits(max_tokens=3)).body)
    assert len(read_sequence((await client.result(promise)).sequences[0])[0]) == 3
    asked = Sample(**{**body, "seq_id": 1, "sampling_params": {"max_tokens": 4}})
    with pytest.raises(ApiError, match="max_tokens is 4; this server samples at most 3"):
        sampling.submit(asked, ServerLimits(max_tokens=3))


async def test_a_checkpoint_with_an_impossible_time_leaves_the_others_listed(client, served, tmp_path):
    model_id = (await client.create_model())["model_id"]
    times = {"fine": None, "late": 10**12, "never": 1e308, "over": -(10**12), "odd": "soon"}
    for seq_id, (name, expires_s) in enumerate(times.items(), 1):
        await client.result(await client.post("save_weights", model_id=model_id, seq_id=seq_id, path=name))
        [note] = tmp_path.glob(f"tinker/*/weights/{name}/tinker.json")
        if expires_s is not None:
            note.write_text(json.dumps({**json.loads(note.read_text()), "expires_s": expires_s}))
    await served[1].sweep()
    assert (await client.http.get("training_runs")).status_code == 200
    found = (await client.http.get("checkpoints")).json()["checkpoints"]
    assert {each["checkpoint_id"] for each in found} == {f"weights/{name}" for name in ("fine", "late", "never")}


async def test_requests_ahead_of_their_turn_are_held_up_to_a_number_and_a_size(client, monkeypatch):
    model_id = (await client.create_model())["model_id"]
    data = share_beginning([40, 41])
    size = len(build_body(model_id, 1, data, "importance_sampling", forward_only=True))
    monkeypatch.setattr(sessions, "MAX_WAITING_BYTES", 3 * size + 200)
    monkeypatch.setattr(sessions, "MAX_WAITING", 4)

    async def send(seq_id):
        return await client.send_data(build_body(model_id, seq_id, data, "importance_sampling", forward_only=True))

    async def step(seq_id):
        return await client.send("optim_step", model_id=model_id, seq_id=seq_id, adam_params={})

    assert [(await send(seq_id)).status_code for seq_id in (2, 3, 4)] == [200] * 3
    refused = await send(5)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert "wait for the request 1" in refused.text
    assert [(await step(seq_id)).status_code for seq_id in (5, 6)] == [200, 429]
    first = (await send(1)).json()
    await client.result(first)
    await client.result({"request_id": f"{model_id}:4"})
    again = await step(6)
    assert "metrics" in await client.result(again.json())
