"""Tinker's protocol: each answer against the engine's own numbers, and what a client may do wrong."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from reinforge.protocols.tinker.server import futures as futures_module
from reinforge.protocols.tinker.server import sessions as sessions_module
from reinforge.protocols.tinker.server import training as training_module
from reinforge.protocols.tinker.server.losses import find_loss
from reinforge.protocols.tinker.server.slots import BASE
from reinforge.protocols.tinker.server.wire import parse_request, read_config, read_data
from tests.protocols.tinker import (
    Clock,
    TinkerClient,
    build_body,
    read_metrics,
    read_recorded,
    read_rows,
    read_sequence,
    serve_tinker,
    share_beginning,
)

TOKENS, TARGETS = [5, 6, 7, 8], [6, 7, 8, 9]
DATUM = (TOKENS, {"target_tokens": TARGETS, "weights": [0.0, 0.5, 1.0, 2.0]})


async def make_model(client, number=0, **settings):
    return (await client.create_model(number, **settings))["model_id"]


def score(engine, tokens=TOKENS, targets=TARGETS):
    [row] = engine._score_tokens([[*tokens, targets[-1]]], BASE)
    return row[1:]


async def test_what_the_sdk_asks_first(client, served):
    config = await client.post("client/config", sdk_version="0.38.0")
    assert config["proto_compress_fwdbwd"] is False
    assert config["pjwt_auth_enabled"] is False
    assert (await client.post("client/dynamic_config", sdk_version="0.38.0"))["sample_cancel_enabled"] is True
    assert (await client.http.get("healthz")).json() == {"status": "ok"}
    models = (await client.http.get("get_server_capabilities")).json()["supported_models"]
    assert models[0] == {"model_name": "tiny", "max_context_length": 256, "trainable": True, "sampleable": True}
    assert await client.post("telemetry", events=[], session_id="x") == {"status": "accepted"}
    assert (await client.post("session_heartbeat", session_id=client.session_id))["type"] == "session_heartbeat"


async def test_a_recorded_request_of_the_sdk(client, tuned):
    """The body that the SDK sends for weights 0, 0.5, 1, 2; only the model's name is another one."""
    model_id = await make_model(client)
    info = await client.post("get_info", model_id=model_id)
    assert (info["lora_rank"], info["model_data"]["model_name"]) == (4, "tiny")
    assert Path(info["model_data"]["tokenizer_id"]).is_dir()
    message = parse_request(read_recorded("sft"))
    message.model_id = model_id
    promise = (await client.send_data(message.SerializeToString())).json()
    output, expected = await client.result(promise), score(tuned)
    assert read_rows(output)[0] == pytest.approx(expected, abs=1e-5)
    assert read_metrics(output) == {"loss:sum": pytest.approx(-float(expected @ [0, 0.5, 1, 2]), rel=1e-5)}


def test_recorded_bodies_are_read_as_the_sdk_means_them():
    message = parse_request(read_recorded("ppo"))
    assert (message.model_id, message.seq_id, message.loss_fn) == ("S:train:0", 1, "ppo")
    assert message.forward_only is False
    [datum] = read_data(message)
    assert datum.token_ids.tolist() == TOKENS
    assert {name: values.tolist() for name, values in datum.inputs.items()} == {
        "target_tokens": TARGETS,
        "logprobs": [0.0, -1.0, -2.0, -3.0],
        "advantages": [0.0, 1.0, -1.0, 0.5],
    }
    spec = find_loss("ppo", read_config(message))[1]
    assert (spec.name, spec.params["clip_low"]) == ("clipped_pg", pytest.approx(0.1))
    assert spec.params["clip_high"] == pytest.approx(0.1)
    with pytest.raises(ValueError, match="clip_low_threshold is 'x', expected a finite number"):
        find_loss("ppo", read_config(parse_request(read_recorded("text"))))


async def test_training_lowers_the_loss_and_sampling_sees_the_saved_weights(client, tuned):
    model_id = await make_model(client)
    losses = []
    for step in range(3):
        gradient = await client.train(model_id, 2 * step + 1, [DATUM, DATUM])
        moved = await client.step(model_id, 2 * step + 2, learning_rate=0.003)
        losses.append(read_metrics(await client.result(gradient))["loss:sum"])
        assert (await client.result(moved))["metrics"]["unclipped_grad_l2:mean"] > 0
    assert losses[2] < losses[1] < losses[0]
    sampler = (await client.save_for_sampler(model_id, 7, sampling_session_seq_id=0))["sampling_session_id"]
    await client.result(await client.train(model_id, 8, [DATUM]))
    await client.result(await client.step(model_id, 9, learning_rate=0.5))  # the sampler's weights stay
    forward = await client.result(await client.train(model_id, 10, [DATUM], forward_only=True))
    promise = await client.sample(sampler, 0, [5, 6, 7, 8, 9], 2, seed=3, prompt_logprobs=True, topk_sample_logprobs=2)
    assert promise["sample_sequence_ids"] == [f"{sampler}:0:0", f"{sampler}:0:1"]
    answer = await client.result(promise)
    prompt = np.frombuffer(answer.prompt_logprobs, "<f4")
    assert np.isnan(prompt[0])
    assert -float(prompt[1:] @ [0, 0.5, 1, 2]) * 2 < losses[2]
    assert -float(prompt[1:] @ [0, 0.5, 1, 2]) != pytest.approx(read_metrics(forward)["loss:sum"])
    sequences = [read_sequence(each) for each in answer.sequences]
    assert sequences[0][0] != sequences[1][0]
    for number, (sequence, (tokens, logprobs)) in enumerate(zip(answer.sequences, sequences, strict=True)):
        whole = await client.sample(sampler, 10 + number, [5, 6, 7, 8, 9, *tokens], max_tokens=1, prompt_logprobs=True)
        scored = np.frombuffer((await client.result(whole)).prompt_logprobs, "<f4")
        assert scored[5:] == pytest.approx(logprobs, abs=1e-4)
        top = sequence.topk_sampled_logprobs
        assert (top.k, top.length) == (2, len(tokens))
        best = np.frombuffer(top.logprobs, "<f4").reshape(-1, 2)
        assert (best[:, 0] >= logprobs - 1e-5).all()


async def test_chunks_run_in_the_order_of_their_numbers(client):
    """The SDK sends the first chunk last, and the optimizer step may come before both."""
    model_id = await make_model(client)
    moved = await client.step(model_id, 3, learning_rate=0.01)
    second = await client.train(model_id, 2, [DATUM])
    waiting = await client.send("get_info", model_id=model_id)
    assert waiting.status_code == 200
    first = await client.train(model_id, 1, [DATUM])
    before = [read_metrics(await client.result(each))["loss:sum"] for each in (first, second)]
    assert before[0] == pytest.approx(before[1])
    assert "metrics" in await client.result(moved)


async def test_a_request_that_comes_twice_runs_once(client):
    model_id = await make_model(client)
    body = build_body(model_id, 1, [DATUM])
    sent = [(await client.send_data(body)).json() for _ in range(3)]
    assert sent[0] == sent[1] == sent[2]
    steps = [await client.step(model_id, 2, learning_rate=0.01) for _ in range(2)]
    first = await client.result(sent[0])
    norms = [
        (await client.result(each))["metrics"] for each in (*steps, await client.step(model_id, 2, learning_rate=0.01))
    ]
    assert norms[0] == norms[1] == norms[2]
    again = await client.result(await client.train(model_id, 3, [DATUM], forward_only=True))
    assert read_metrics(again)["loss:sum"] < read_metrics(first)["loss:sum"]
    first_try, second_try = [
        await client.post("save_weights_for_sampler", model_id=model_id, seq_id=4, sampling_session_seq_id=number)
        for number in range(2)  # as the SDK counts when it tries again
    ]
    assert first_try == second_try
    assert (await client.result(second_try))["sampling_session_id"].endswith(":sample:0")
    known = [await client.create_model(), await client.create_model()]
    assert known[0] == known[1] == {"model_id": model_id, "type": "create_model"}
    headers = {"x-idempotency-key": "k"}
    opened = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
    ids = {(await client.http.post("create_session", json=opened, headers=headers)).text for _ in range(2)}
    assert len(ids) == 1


BAD = {
    "loss": (([DATUM], "stable_reinforce"), "loss_fn 'stable_reinforce' is not supported; use one of: cross_entropy"),
    "misspelt loss": (([DATUM], "cross_entrop"), 'did you mean "cross_entropy"?'),
    "setting": (([DATUM], "cross_entropy", {"beta": 1.0}), "cross_entropy has no setting 'beta'"),
    "thresholds": (([DATUM], "ppo", {"clip_low_threshold": 1.5}), "0 <= low <= 1 <= high"),
    "no data": (([],), "data is empty"),
    "no tokens": (([([], {"target_tokens": []})],), "model_input has 0 tokens, expected 1 to 256"),
    "too long": (([([5] * 257, {"target_tokens": [5] * 257})],), "has 257 tokens, expected 1 to 256"),
    "shape": (([(TOKENS, {"target_tokens": TARGETS[:3]})],), r"has the shape [3], expected [4]"),
    "matrix": (([(TOKENS, {"target_tokens": [TARGETS, TARGETS]})],), "has the shape [2, 4]"),
    "token": (([([5, 999], {"target_tokens": [6, 7]})],), "data[0].model_input has values other than token ids"),
    "target": (([([5, 6], {"target_tokens": [6, -1]})],), "target_tokens has values other than token ids"),
    "missing": (([DATUM], "ppo"), "'weights', which this loss does not read; it reads: target_tokens, logprobs"),
    "nan": (([(TOKENS, {"target_tokens": TARGETS, "weights": [np.nan] * 4})],), "numbers that are not finite"),
}


@pytest.mark.slow
async def test_bad_data_is_refused_by_name_and_no_step_is_made(client):
    model_id, other = await make_model(client), await make_model(client, 1)
    before = read_metrics(await client.result(await client.train(other, 1, [DATUM])))
    for number, (name, (arguments, message)) in enumerate(BAD.items()):
        first = 3 * number + 1
        unchanged = await client.result(await client.train(model_id, first, [DATUM]))
        assert read_metrics(unchanged) == before, name
        failed = await client.result(await client.train(model_id, first + 1, *arguments))
        assert message in failed["error"]
        assert failed["category"] == "user"
        step = await client.result(await client.step(model_id, first + 2, learning_rate=1.0))
        assert f"no step is made: the request {model_id}:{first + 1} before it failed" in step["error"]
    last = 3 * len(BAD) + 1
    assert read_metrics(await client.result(await client.train(model_id, last, [DATUM]))) == before
    stepped = await client.result(await client.step(model_id, last + 1, learning_rate=0.01))
    assert await client.result(await client.step(other, 2, learning_rate=0.01)) == stepped, "of one gradient alone"


async def test_without_the_record_of_failures_a_step_has_a_part_of_the_gradient(client, monkeypatch):
    """The safety of the tests above, switched off: the step is made with the first request's gradient alone."""
    monkeypatch.setattr(sessions_module.TinkerModel, "failed_seq", property(lambda _: None, lambda *_: None))
    model_id = await make_model(client)
    before = await client.result(await client.train(model_id, 1, [DATUM]))
    await client.result(await client.train(model_id, 2, [DATUM], "stable_reinforce"))
    assert "metrics" in await client.result(await client.step(model_id, 3, learning_rate=0.01))
    after = await client.result(await client.train(model_id, 4, [DATUM]))
    assert read_metrics(after) != read_metrics(before)


async def test_gradients_that_are_not_finite_change_nothing(client):
    model_id = await make_model(client)
    huge = (TOKENS, {"target_tokens": TARGETS, "weights": [3e38] * 4})
    failed = await client.result(await client.train(model_id, 1, [huge, huge]))
    assert "not finite" in failed["error"]
    await client.result(await client.step(model_id, 2))
    before = await client.result(await client.train(model_id, 3, [DATUM]))
    blown = await client.result(await client.step(model_id, 4, learning_rate=1e38))
    assert "tensors are not finite" in blown["error"]
    after = await client.result(await client.train(model_id, 5, [DATUM], forward_only=True))
    assert read_metrics(after) == read_metrics(before)


async def test_shared_beginnings_are_computed_once_and_reported_all_the_same(client, tuned):
    data = share_beginning([40, 41], [50, 51, 52], [60])
    model_id = await make_model(client)
    rows = read_rows(await client.result(await client.train(model_id, 1, data, "importance_sampling")))
    for (tokens, inputs), row in zip(data, rows, strict=True):
        [expected] = tuned._score_tokens([[*tokens, inputs["target_tokens"][-1]]], BASE)
        assert row == pytest.approx(expected[1:], abs=1e-4)


async def test_checkpoints_outlive_the_server(tuned, tmp_path):
    async with serve_tinker(tuned, tmp_path) as (app, _), TinkerClient(app) as client:
        model_id = await make_model(client, rank=2)
        for step in range(2):
            await client.result(await client.train(model_id, 2 * step + 1, [DATUM]))
            await client.result(await client.step(model_id, 2 * step + 2, learning_rate=0.05))
        saved = await client.result(await client.post("save_weights", model_id=model_id, seq_id=5, path="a.1"))
        assert saved["path"] == f"tinker://{model_id}/weights/a.1"
        again = await client.result(await client.post("save_weights", model_id=model_id, seq_id=6, path="a.1"))
        assert "there is a checkpoint" in again["error"]
        sampler = await client.save_for_sampler(model_id, 7, path="b", user_metadata={"k": "v"})
        bad = await client.result(await client.post("save_weights", model_id=model_id, seq_id=8, path="../../x"))
        assert "of a checkpoint must be up to 128 letters" in bad["error"]
        await client.result(await client.train(model_id, 9, [DATUM]))
        after = await client.result(await client.step(model_id, 10, learning_rate=0.05))
        assert "metrics" in after
        final = read_metrics(await client.result(await client.train(model_id, 11, [DATUM], forward_only=True)))
    async with serve_tinker(tuned, tmp_path) as (app, _), TinkerClient(app) as client:
        gone = await client.send("get_info", model_id=model_id)
        assert gone.status_code == 410
        assert "may have been restarted" in gone.text
        body = {"session_id": client.session_id, "model_seq_id": 0, "path": saved["path"], "optimizer": True}
        loaded = await client.result(await client.post("load_weights", **body))
        assert loaded["model_id"] == f"{client.session_id}:train:0"
        await client.result(await client.train(loaded["model_id"], 1, [DATUM]))
        await client.result(await client.step(loaded["model_id"], 2, learning_rate=0.05))
        same = await client.result(await client.train(loaded["model_id"], 3, [DATUM], forward_only=True))
        assert read_metrics(same)["loss:sum"] == pytest.approx(final["loss:sum"], rel=1e-5), "with Adam's moments"
        plain = {**body, "model_seq_id": 1, "optimizer": False}
        other = (await client.result(await client.post("load_weights", **plain)))["model_id"]
        await client.result(await client.train(other, 1, [DATUM]))
        await client.result(await client.step(other, 2, learning_rate=0.05))
        differs = await client.result(await client.train(other, 3, [DATUM], forward_only=True))
        assert abs(read_metrics(differs)["loss:sum"] - final["loss:sum"]) > 1e-4, "without them"
        assert (await client.post("weights_info", tinker_path=saved["path"]))["lora_rank"] == 2
        sampling = await client.open_sampler(model_path=sampler["path"])
        described = (await client.http.get(f"samplers/{sampling}")).json()
        assert described == {"sampler_id": sampling, "base_model": "tiny", "model_path": sampler["path"]}
        listed = (await client.http.get(f"training_runs/{model_id}/checkpoints")).json()["checkpoints"]
        assert [each["checkpoint_id"] for each in listed] == ["weights/a.1", "sampler_weights/b"]
        assert listed[1]["user_metadata"] == {"k": "v"}
        run = (await client.http.get(f"training_runs/{model_id}")).json()
        assert (run["lora_rank"], run["last_checkpoint"]["tinker_path"]) == (2, saved["path"])
        assert (await client.http.delete(f"training_runs/{model_id}/checkpoints/weights/a.1")).status_code == 200
        assert (await client.post("weights_info", tinker_path=sampler["path"]))["is_lora"] is True
        assert (await client.send("weights_info", tinker_path=saved["path"])).status_code == 404


async def test_a_checkpoint_answers_chats_under_its_path(served, client, tmp_path):
    model_id = await make_model(client)
    saved = await client.save_for_sampler(model_id, 1, path="chat")
    body = {"model": saved["path"], "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    chat = await client.http.post(f"{served[0].address}/v1/chat/completions", json=body)
    assert chat.status_code == 200, chat.text
    assert chat.json()["model"] == saved["path"]
    missing = await client.http.post(
        f"{served[0].address}/v1/chat/completions", json={**body, "model": f"tinker://{model_id}/sampler_weights/no"}
    )
    assert missing.status_code == 404


async def test_a_damaged_checkpoint_is_not_loaded(client, tmp_path):
    model_id = await make_model(client)
    saved = await client.result(await client.post("save_weights", model_id=model_id, seq_id=1, path="a"))
    [weights] = tmp_path.glob("tinker/*/weights/a/adapter_model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-8])
    body = {"session_id": client.session_id, "model_seq_id": 1, "path": saved["path"], "optimizer": True}
    failed = await client.result(await client.post("load_weights", **body))
    assert "is damaged" in failed["error"]
    assert (await client.create_model(2))["type"] == "create_model"  # its slot is free again


@pytest.mark.slow
async def test_stops(client, tuned):
    sampler = await client.open_sampler(base_model="tiny")
    end = tuned.tokenizer.eos_token_id
    free = read_sequence(
        (await client.result(await client.sample(sampler, 0, [5, 6], seed=1, max_tokens=30))).sequences[0]
    )
    tokens = free[0]
    stopped = await client.result(await client.sample(sampler, 1, [5, 6], seed=1, max_tokens=30, stop=[tokens[2]]))
    first = tokens.index(tokens[2])
    assert read_sequence(stopped.sequences[0])[0] == tokens[: first + 1]
    assert stopped.sequences[0].stop_reason == 0
    text = tuned.tokenizer.decode(tokens[:4])
    by_text = await client.result(await client.sample(sampler, 2, [5, 6], seed=1, max_tokens=30, stop=text))
    assert text in tuned.tokenizer.decode(read_sequence(by_text.sequences[0])[0])
    assert len(read_sequence(by_text.sequences[0])[0]) <= 4
    long = await client.result(await client.sample(sampler, 3, [5, 6], 16, seed=1, max_tokens=60, stop=[]))
    ends = [end in read_sequence(each)[0][:-1] for each in long.sequences]
    assert any(ends), "with no stops, not even the end token ends a sequence"
    assert {each.stop_reason for each in long.sequences} == {1}


async def test_what_sampling_refuses(client, tuned):
    sampler = await client.open_sampler(base_model="tiny")
    for number, (params, message) in enumerate(
        [
            ({"topk_prompt_logprobs": 3}, "topk_prompt_logprobs is not supported"),
            ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k is not supported"),
            ({"temperature": -1}, "temperature is -1"),
            ({"stop": [5000]}, "stop has token 5000"),
        ]
    ):
        failed = await client.result(await client.sample(sampler, number, [5, 6], **params))
        assert message in failed["error"]
        assert failed["category"] == "user"
    long = await client.result(await client.sample(sampler, 20, [5] * 256))
    assert "256" in long["error"]
    assert long["category"] == "user", "the SDK sends what is the server's fault again"
    body = {"sampling_session_id": sampler, "prompt": {"chunks": []}, "sampling_params": {}}
    many = await client.send("asample", seq_id=21, num_samples=10**12, **body)
    assert (many.status_code, "at most 128" in many.text) == (400, True)
    wrong = await client.send("asample", sampling_session_id=sampler, seq_id=30, prompt={"chunks": []}, new_field=1)
    assert wrong.status_code == 422
    assert "new_field" in wrong.text
    assert (await client.send("asample", sampling_session_id="x:sample:0", seq_id=0)).status_code in (410, 422)
    other = await client.send("create_sampling_session", session_id=client.session_id, sampling_session_seq_id=9,
                              base_model="gpt-5")  # fmt: skip
    assert other.status_code == 400
    assert "this server has no base_model 'gpt-5'" in other.text


async def test_models_beyond_the_servers_means_are_refused(client):
    refused = {
        "base": ({"base_model": "Qwen/Qwen3-8B"}, "this server has no base_model 'Qwen/Qwen3-8B'"),
        "rank": ({"rank": 5}, "the rank 5 is above 4"),
        "part": ({"train_mlp": False}, "train_attn and train_mlp must be true"),
    }
    for number, (settings, message) in enumerate(refused.values()):
        failed = await client.create_model(number, **settings)
        assert message in failed["error"]
        assert failed["category"] == "user"
    assert "model_id" in await client.create_model(10)
    assert "model_id" in await client.create_model(11)
    full = await client.create_model(12)
    assert "trains at most 2 models at a time" in full["error"]
    await client.post(f"sessions/{client.session_id}/finish", reason={"type": "success"})
    ended = await client.send("session_heartbeat", session_id=client.session_id)
    assert ended.status_code == 410
    assert "has ended" in ended.text


@pytest.mark.slow
async def test_more_snapshots_than_slots_take_turns(client):
    """Three models' worth of weights in two slots, and each sampler keeps its own."""
    model_id = await make_model(client)
    samplers, losses = [], []
    for step in range(3):
        number = 3 * step
        losses.append(read_metrics(await client.result(await client.train(model_id, number + 1, [DATUM])))["loss:sum"])
        saved = await client.save_for_sampler(model_id, number + 2, sampling_session_seq_id=step)
        samplers.append(saved["sampling_session_id"])
        await client.result(await client.step(model_id, number + 3, learning_rate=0.05))

    for number in range(2):
        found = await asyncio.gather(*(client.measure(sampler, number) for sampler in samplers))
        assert [-float(row @ [0, 0.5, 1, 2]) for row in found] == pytest.approx(losses, rel=1e-4)


async def test_inflight_samplers_follow_the_newest_weights(client):
    model_id = await make_model(client)

    async def save(seq_id, number):
        saved = await client.save_for_sampler(model_id, seq_id, sampling_session_seq_id=number, kind="inflight")
        return saved["sampling_session_id"]

    first = await save(1, 0)
    before = (await client.measure(first, 0)).sum()
    await client.result(await client.train(model_id, 2, [DATUM]))
    await client.result(await client.step(model_id, 3, learning_rate=0.05))
    second = await save(4, 1)
    assert second != first
    found = [(await client.measure(sampler, number)).sum() for sampler, number in ((first, 1), (second, 0))]
    assert found[0] == pytest.approx(found[1]) != pytest.approx(before)


async def test_old_snapshots_are_dropped(client, monkeypatch):
    monkeypatch.setattr(sessions_module, "KEPT_SNAPSHOTS", 2)
    model_id = await make_model(client)
    samplers = []
    for number in range(3):
        saved = await client.save_for_sampler(model_id, number + 1, sampling_session_seq_id=number)
        samplers.append(saved["sampling_session_id"])
    gone = await client.send("asample", sampling_session_id=samplers[0], seq_id=0, prompt={"chunks": []},
                             sampling_params={})  # fmt: skip
    assert gone.status_code == 404
    assert "newest snapshots" in gone.text
    assert (await client.result(await client.sample(samplers[2], 0, [5]))).sequences


async def test_sessions_end_without_a_heartbeat(tuned, tmp_path):
    clock = Clock()
    async with (
        serve_tinker(tuned, tmp_path, clock, session_timeout_s=60) as (app, api),
        TinkerClient(app) as one,
        TinkerClient(app) as other,
    ):
        for number, client in enumerate((one, other)):
            assert "model_id" in await client.create_model(number)
        clock.seconds = 50
        await other.post("session_heartbeat", session_id=other.session_id)
        clock.seconds = 70
        await api.sweep()
        assert (await one.send("session_heartbeat", session_id=one.session_id)).status_code == 410
        assert "model_id" in await other.create_model(5), "the slot of the other program is free"


async def test_a_new_program_takes_the_place_of_one_that_has_ended_without_a_word(tuned, tmp_path):
    """The cookbook's recipes close no session; their heartbeat just stops."""
    clock = Clock()
    async with (
        serve_tinker(tuned, tmp_path, clock) as (app, _),
        TinkerClient(app) as gone,
        TinkerClient(app) as alive,
        TinkerClient(app) as new,
    ):
        assert "model_id" in await gone.create_model()
        assert "model_id" in await alive.create_model()
        assert "trains at most 2 models" in (await new.create_model())["error"], "both may be alive"
        clock.seconds = training_module.SILENCE_S + 1
        for client in (alive, new):
            await client.post("session_heartbeat", session_id=client.session_id)
        assert "model_id" in await new.create_model(1)
        assert (await gone.send("session_heartbeat", session_id=gone.session_id)).status_code == 410
        assert (await alive.send("session_heartbeat", session_id=alive.session_id)).status_code == 200


async def test_results_are_kept_for_a_while(tuned, tmp_path):
    clock = Clock()
    async with serve_tinker(tuned, tmp_path, clock) as (app, api), TinkerClient(app) as client:
        sampler = await client.open_sampler(base_model="tiny")
        promise = await client.sample(sampler, 0, [5, 6])
        first = await client.result(promise)
        assert await client.result(promise) == first
        clock.seconds = futures_module.KEEP_S + 1
        api.futures.sweep()
        expired = await client.send("retrieve_future", request_id=promise["request_id"])
        assert expired.status_code == 410  # the SDK samples again
        unknown = await client.send("retrieve_future", request_id="x:sample:0:0")
        assert unknown.status_code == 410


async def test_a_cancelled_request_ends(client, served, monkeypatch):
    sampler = await client.open_sampler(base_model="tiny")
    promise = await client.sample(sampler, 0, [5, 6], 128, max_tokens=200, stop=[])  # a second of work
    assert (await client.send("cancel_future", request_id=promise["request_id"])).status_code == 200
    result = await client.result(promise)
    assert isinstance(result, dict)
    assert result["error"] == "the request was cancelled"


async def test_other_bodies_are_refused(client):
    model_id = await make_model(client)
    assert (await client.send("forward_backward", model_id=model_id)).status_code == 415
    assert (await client.send_data(b"\xff\xff\xff")).status_code == 400
    assert (await client.send_data(build_body(model_id, 0, [DATUM]))).status_code == 400
    far = await client.send_data(build_body(model_id, 99_999, [DATUM]))
    assert far.status_code == 400
    assert "the next request" in far.text
    assert (await client.send("optim_step", model_id=model_id, seq_id=1, adam_params={"lr": 1})).status_code == 422
    late = await client.send("save_weights", model_id=model_id, seq_id=1, path="late", ttl_seconds=10**12)
    assert late.status_code == 422
    many = await client.send("create_model", session_id=client.session_id, model_seq_id=10**9, base_model="tiny")
    assert many.status_code == 422, "paths of checkpoints have nine digits"
    assert (await client.http.post("optim_step", content=b"[]")).status_code == 400
    assert (await client.send("get_info", model_id=f"{client.session_id}:train:7")).status_code == 404
    dimuon = {"type": "dimuon", "learning_rate": 0.1}
    failed = await client.result(
        await client.post("optim_step", model_id=model_id, seq_id=1, optimizer_params=dimuon, type="optim_step")
    )
    assert "the family dimuon" in failed["error"]
    path = {"session_id": client.session_id, "model_seq_id": 3, "optimizer": True}
    for wrong in ("tinker://x/weights/../../etc", "file:///etc/passwd", f"tinker://{model_id}/weights/..", "tinker://"):
        failed = await client.result(await client.post("load_weights", **path, path=wrong))
        assert "is not the path of a checkpoint" in failed["error"]
        path["model_seq_id"] += 1
    assert json.loads((await client.http.get("training_runs?limit=x")).text)["error"]["code"] is None
