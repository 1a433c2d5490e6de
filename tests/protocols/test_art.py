"""Models trained over ART's protocols: what was sampled is trained, and the trained model is the one that is served."""

import contextlib
import json

import httpx
import pytest

from reinforge.protocols.art.server.earlier_steps import ModelStep
from reinforge.protocols.art.server.model import read_settings
from reinforge.protocols.art.server.records import ModelFolder
from reinforge.protocols.art.server.trajectories import SampledReplies
from reinforge.serving.routes import ApiError
from reinforge.types.request import ModelRequest, ReplyPiece, TokenLogprobs
from tests.doubles import ScriptedPolicy
from tests.protocols.art_client import (
    DESCRIBED,
    MADE_UP,
    PROMPT,
    ARTServer,
    build_call,
    build_group,
    build_trajectory,
    collect,
    get_artifact,
    get_choice,
    score,
)


@pytest.mark.slow
async def test_a_loop_over_the_training_service_raises_the_reward(art, model):
    """Whether the client sends the ids of tokens or not."""
    name, rewards = get_artifact(model), []
    for step in range(7):
        sends_ids = step % 2 == 0
        answers = await collect(art, name, 100 * step, return_token_ids=sends_ids, max_tokens=1)
        assert {answer["model_version"] for answer in answers} == {step}
        rewards.append(sum(map(score, answers)) / len(answers))
        group = [build_trajectory(answer, score(answer), sends_ids) for answer in answers]
        events = await art.wait(await art.start_job(model, [{"trajectories": group}]))
        assert [event["type"] for event in events] == ["training_started", "gradient_step", "training_ended"]
        counts = {key: events[1]["data"][key] for key in ("num_replies", "num_derived", "num_left_out")}
        assert counts == {"num_replies": 24, "num_derived": 0, "num_left_out": 0}
    assert await art.list_steps(model) == [7, 6, 5, 4, 3, 2, 1, 0]
    assert rewards[-1] > rewards[0] + 0.3, rewards


async def test_every_name_of_a_step_serves_its_weights(art, model):
    name = get_artifact(model)
    before = await art.sample(name, 1)
    group = await build_group(art)
    for _ in range(2):
        await art.wait(await art.start_job(model, [{"trajectories": group}]))
    after = await art.sample(name, 1)
    assert after["choices"][0]["logprobs"] != before["choices"][0]["logprobs"]
    for newest in ("agent", "agent@2", f"{name}:step2"):
        assert (await art.sample(newest, 1))["choices"][0]["logprobs"] == after["choices"][0]["logprobs"]
    [earlier, other] = [await art.sample(each, 1) for each in (f"{name}:step1", "agent@1")]
    assert earlier["model_version"] == 1
    assert earlier["choices"] == other["choices"]
    assert earlier["choices"][0]["logprobs"] != after["choices"][0]["logprobs"]
    deleted = await art.call("DELETE", f"/v1/preview/models/{model['id']}/checkpoints", {"steps": [1, 2, 7]})
    assert deleted == {"deleted_count": 1, "not_found_steps": [2, 7]}
    assert await art.list_steps(model) == [2, 0]
    missing = await art.http.post("/v1/chat/completions", json={"model": "agent@1", "messages": PROMPT})
    assert missing.status_code == 404


class Racing(ScriptedPolicy):
    async def stream(self, request, markers=()):
        await self.publish(2)
        yield ReplyPiece("next", TokenLogprobs((1,), (2,), (-1.0,), policy_version=2))


class Spelling(ScriptedPolicy):
    async def stream(self, request, markers=()):
        reply = await self.sample(request)
        for letter in reply.message["content"]:
            yield ReplyPiece(letter, TokenLogprobs((1,), (2,), (-1.0,), policy_version=self.version))
        yield reply


@pytest.mark.parametrize(("newest", "version"), [(Spelling, 1), (Spelling, 2), (Racing, 1)])
async def test_a_step_sends_its_own_tokens_one_by_one(newest, version):
    """While it is the newest, once it is in memory as an earlier one, and if the next step comes before the reply."""
    served, loaded = newest(), Spelling()
    await served.publish(version)
    await loaded.publish(1)

    class Earlier:
        @contextlib.asynccontextmanager
        async def use(self, step):
            yield loaded

    step = ModelStep(1, served, Earlier(), None)
    *pieces, reply = [part async for part in step.stream(ModelRequest(PROMPT))]
    assert [piece.text for piece in pieces] == ["y", "e", "s"]
    assert {piece.tokens.policy_version for piece in pieces} == {reply.version} == {1}


@pytest.mark.slow
async def test_a_model_is_found_again_and_goes_on_after_a_restart(tiny_model_dir, tmp_path):
    async with ARTServer(tiny_model_dir, tmp_path) as server:
        model = await server.create()
        assert await server.create() == model
        group = await build_group(server)
        await server.wait(await server.start_job(model, [{"trajectories": group}]))
        replies = await collect(server, get_artifact(model), 50, 8, return_token_ids=True)
    async with ARTServer(tiny_model_dir, tmp_path) as server:
        assert await server.create() == model
        again = await collect(server, get_artifact(model), 50, 8, return_token_ids=True)
        assert list(map(get_choice, again)) == list(map(get_choice, replies))
        assert {each["model_version"] for each in again} == {1}


@pytest.mark.slow
async def test_replies_that_are_not_remembered_are_trained_if_their_logprobs_are_those_of_the_model(
    tiny_model_dir, tmp_path
):
    async with ARTServer(tiny_model_dir, tmp_path) as server:
        model = await server.create()
        answers = await collect(server, get_artifact(model), 0, 8, return_token_ids=True, max_tokens=1)
    async with ARTServer(tiny_model_dir, tmp_path) as server:  # which remembers nothing
        false = json.loads(json.dumps(answers[0]))
        false["choices"][0]["logprobs"]["content"][0]["logprob"] -= 0.5
        for sends_ids in (True, False):
            groups = [build_trajectory(each, n % 2, sends_ids) for n, each in enumerate([false, *answers[1:]])]
            job = await server.start_job(model, [{"trajectories": groups}], learning_rate=1e-9)
            events = await server.wait(job)
            assert events[-1]["type"] == "training_ended", events
            found = events[1]["data"]
            assert found["num_left_out"] >= 1
            if sends_ids:
                assert (found["num_replies"], found["num_derived"], found["num_left_out"]) == (7, 7, 1)
            else:  # a reply whose text is tokenized in another way than it was sampled is left out as well
                assert found["num_derived"] == found["num_replies"] == 8 - found["num_left_out"]


@pytest.mark.slow
async def test_equal_rewards_make_a_step_of_the_same_weights(art, model):
    before = await collect(art, get_artifact(model), 0, 4)
    group = [build_trajectory(answer, 1.0) for answer in before]
    events = await art.wait(await art.start_job(model, [{"trajectories": group}]))
    assert [event["type"] for event in events] == ["training_started", "training_ended"]
    assert await art.list_steps(model) == [1, 0]
    after = await collect(art, get_artifact(model), 0, 4)
    texts = [[each["choices"][0]["message"]["content"] for each in answers] for answers in (before, after)]
    assert texts[0] == texts[1]


@pytest.mark.slow
async def test_a_job_without_known_tokens_fails_and_says_why(art, model):
    for role in (["user"], {}, None):
        strange = [{**each, "messages_and_choices": [{"role": role, "content": "a"}]} for each in MADE_UP]
        events = await art.wait(await art.start_job(model, [{"trajectories": strange}]))
        assert "nothing to train" in events[-1]["data"]["error_message"]
    events = await art.wait(await art.start_job(model, [{"trajectories": MADE_UP}]))
    assert events[-1]["type"] == "training_failed"
    assert "no turn has trainable token ids" in events[-1]["data"]["error_message"]
    assert "2 replies have no known tokens" in events[-1]["data"]["error_message"]
    with pytest.raises(httpx.RemoteProtocolError):  # protocol 1 has no other way to say it
        await art.http.post("/_train_model", json=build_call(MADE_UP))
    assert await art.list_steps(model) == [0]


@pytest.mark.slow
async def test_a_job_that_was_interrupted_runs_once(tiny_model_dir, tmp_path, monkeypatch):
    """And twice, as a mutation check shows, if its checkpoint is not looked for."""
    async with ARTServer(tiny_model_dir, tmp_path) as server:
        model = await server.create()
        group = await build_group(server)
        job = await server.start_job(model, [{"trajectories": group}], learning_rate=1e-9)
        await server.wait(job)
    folder = ModelFolder(tmp_path / model["id"])
    for has_saved, finds_step, steps in ((True, True, [1, 0]), (False, True, [1, 0]), (True, False, [2, 1, 0])):
        (folder.path / "jobs" / job / "result.json").unlink()
        if not has_saved:
            folder.remove_step(1)
        if not finds_step:
            monkeypatch.setattr(ModelFolder, "find_step_of", lambda self, job: None)
        async with ARTServer(tiny_model_dir, tmp_path) as server:
            assert (await server.wait(job))[-1]["data"] == {"step": steps[0]}
            assert await server.list_steps(model) == steps


@pytest.mark.slow
async def test_the_server_of_art_run_trains_too(art):
    described = {**DESCRIBED, "trainable": True}
    await art.call("POST", "/register", described)
    url, key = await art.call("POST", "/_prepare_backend_for_training", {"model": described, "config": None})
    assert url == f"{art.app.address}/v1"
    assert key
    rewards = []
    for step in range(6):
        assert await art.call("POST", "/_get_step", described) == step
        answers = await collect(art, "agent", 100 * step, max_tokens=1)
        rewards.append(sum(map(score, answers)) / len(answers))
        group = [build_trajectory(answer, score(answer), keep_ids=False) for answer in answers]
        body = build_call(group, described, config={"learning_rate": 0.03, "kl_penalty_coef": 0.0})
        response = await art.http.post("/_train_model", json=body)
        [line] = response.text.splitlines()
        assert json.loads(line)["num_replies"] == 24
    assert rewards[-1] > rewards[0] + 0.3, rewards
    await art.call("POST", "/_delete_checkpoint_files", {"model": described, "steps_to_keep": [3]})
    assert await art.call("POST", "/_get_step", described) == 6
    [model] = art.api._trained.values()
    assert model.list_steps() == [0, 3, 6]


@pytest.mark.slow
async def test_settings_of_the_model_win_over_those_of_a_job(art):
    """The NeMo Agent Toolkit sends 5e-5 with each job, whatever its user has set."""
    internal = {"init_args": None, "engine_args": None, "trainer_args": {"learning_rate": 0.004, "beta": 0.1}}
    described = {"name": "agent", "project": "games", "base_model": "tiny", "_internal_config": internal}
    await art.call("POST", "/register", described)
    answers = await collect(art, "agent", 0, 8)
    group = [build_trajectory(answer, n % 2, keep_ids=False) for n, answer in enumerate(answers)]
    body = build_call(group, described, config={"learning_rate": 5e-5, "kl_penalty_coef": 0.0})
    metrics = json.loads((await art.http.post("/_train_model", json=body)).text)
    assert metrics["lr"] == metrics["learning_rate"] == 0.004
    assert "kl_ref" in metrics


async def test_wrong_models_are_refused_and_a_deleted_one_is_no_longer_served(art, model, tmp_path):
    for fields, status, says in (
        ({"base_model": "Qwen/Qwen3-0.6B"}, 404, "no model to train is named 'Qwen/Qwen3-0.6B'; this server has: tiny"),
        ({"base_model": "/etc"}, 404, "no model to train is named '/etc'"),
        ({"name": "../../x"}, 422, "name: expected 1 to 200 letters"),
        ({"name": None}, 422, "name: expected"),
        ({"return_existing": False}, 409, "the model agent of games exists"),
    ):
        body = {"project": "games", "name": "agent", "base_model": "tiny", "return_existing": True, **fields}
        refused = await art.call("POST", "/v1/preview/models", body, status)
        assert says in refused["error"]["message"]
    response = await art.http.delete(f"/v1/preview/models/{model['id']}")
    assert response.status_code == 204
    answer = await art.http.post("/v1/chat/completions", json={"model": "agent", "messages": PROMPT})
    assert answer.status_code == 404
    assert list(tmp_path.iterdir()) == []


async def test_wrong_jobs_are_refused_before_anything_is_recorded(art, model, tmp_path):
    headers = {"content-type": "application/json"}
    for groups, settings, says in (
        ({}, {}, "trajectory_groups: expected a list"),
        ([{"trajectories": [{"reward": "much"}]}], {}, "trajectory_groups: trajectories.0.reward"),
        ([{"trajectories": [{"reward": float("1e999")}]}], {}, None),
        ([], {}, "trajectory_groups holds no trajectory"),
        ([{"trajectories": [{}]}], {"mask_prob_ratio": True}, "mask_prob_ratio is True"),
        ([{"trajectories": [{"additional_histories": [{"messages_and_choices": ["x"]}]}]}], {}, "additional_histories"),
        ([{"trajectories": [{"messages_and_choices": [7]}]}], {}, "messages_and_choices"),
    ):
        body = {"model_id": model["id"], "trajectory_groups": groups, "experimental_config": settings}
        response = await art.http.post("/v1/preview/training-jobs", content=json.dumps(body), headers=headers)
        assert response.status_code in (400, 422), response.text
        assert says is None or says in response.json()["error"]["message"]
    own = {**DESCRIBED, "_internal_config": {"trainer_args": ["x"]}}
    for body, field in ((build_call([{}], config=["x"]), "config"), (build_call([{}], own), "trainer_args")):
        refused = await art.call("POST", "/_train_model", body, 422)
        assert f"{field}: expected an object, found list" in refused["error"]["message"]
    named = await art.call("POST", "/register", {**DESCRIBED, "name": "agent@3"}, 422)
    assert "is the name of a step" in named["error"]["message"]
    path = f"/v1/preview/models/{model['id']}/checkpoints"
    for limit in ("0", "-1", "x", "²", "9" * 4400):
        assert (await art.http.get(path, params={"limit": limit})).status_code == 400
    for steps in (["1"], [True], [None], "1"):
        await art.call("DELETE", path, {"steps": steps}, 422)
        await art.call("POST", "/_delete_checkpoint_files", {"model": DESCRIBED, "steps_to_keep": steps}, 422)
    assert ModelFolder(tmp_path / model["id"]).list_jobs() == []


def test_the_oldest_replies_are_forgotten_first():
    replies = SampledReplies(max_tokens=12)
    for number in range(4):
        replies._add("tiny", TokenLogprobs((1, 2), (3, 4), (-0.5, -float(number))))
    assert [replies.find("tiny", (-0.5, -float(n))) is None for n in range(4)] == [True, False, False, False]
    assert replies.find("tiny", (-0.5, -3.0), (3, 5)) is None
    assert replies.find("tiny", (-0.5, -3.0), (3, 4), (1, 2)) is not None


SENT_BY_CLIENT = {
    "advantage_balance": 0.0, "allow_training_without_logprobs": False, "epsilon": None, "epsilon_high": None,
    "importance_sampling_level": "token", "kimi_k2_tau": None, "kl_penalty_coef": 0.0,
    "kl_penalty_reference_step": None, "kl_penalty_source": "current_learner", "kl_penalty_step_lag": None,
    "kl_ref_adapter_path": None, "learning_rate": 5e-06, "logprob_calculation_chunk_size": 1024, "loss_fn": "cispo",
    "mask_prob_ratio": False, "max_negative_advantage_importance_sampling_weight": None, "normalize_advantages": True,
    "num_trajectories_learning_rate_multiplier_power": 0.0, "packed_sequence_length": None, "plot_tensors": False,
    "ppo": False, "precalculate_logprobs": False, "scale_learning_rate_by_reward_std_dev": False,
    "scale_rewards": True, "truncated_importance_sampling": None,
}  # fmt: skip
"""What the client sends if its user sets nothing."""


def loss_of(**settings):
    return read_settings(settings).algorithm.loss


def test_what_the_client_sends_by_default_trains_by_cispo():
    training = read_settings(SENT_BY_CLIENT)
    assert training.algorithm.loss.name == "cispo"
    assert training.algorithm.loss.params["clip_high"] == 4.0
    assert training.algorithm.config.scale_rewards is True
    assert training.learning_rate == 5e-6


def test_epsilons_are_the_ends_of_the_clip():
    assert loss_of(loss_fn="ppo").params["clip_high"] == 0.2
    loss = loss_of(ppo=True, epsilon=0.1, epsilon_high=0.3)
    assert (loss.name, loss.params["clip_low"], loss.params["clip_high"]) == ("clipped_pg", 0.1, 0.3)
    assert loss_of(ppo=True, epsilon=0.1).params["clip_high"] == 0.1
    assert loss_of(epsilon=1.0, epsilon_high=3.0).params == {**loss_of().params, "clip_low": None, "clip_high": 3.0}
    assert loss_of(epsilon=0.5).params["clip_low"] == 0.5


def test_other_settings_reach_the_algorithm():
    loss = loss_of(kl_penalty_coef=0.1, truncated_importance_sampling=3.0)
    assert (loss.params["kl_coef"], loss.params["tis_cap"]) == (0.1, 3.0)
    assert read_settings({"scale_rewards": False}).algorithm.config.scale_rewards is False
    assert read_settings({"normalize_advantages": False}).algorithm.config.scale_rewards is False
    assert loss_of(loss_fn="ppo", importance_sampling_level="sequence").name == "gspo"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"advantage_balance": 0.5}, "advantage_balance is 0.5, which this server does not support; leave it out"),
        ({"allow_training_without_logprobs": True}, "allow_training_without_logprobs is True"),
        ({"kl_penalty_step_lag": 2}, "kl_penalty_step_lag is 2"),
        ({"kl_penalty_source": "sample", "kl_penalty_coef": 0.1}, "kl_penalty_source is 'sample'"),
        ({"learning_rat": 1e-5}, "learning_rat: Extra inputs are not permitted"),
        ({"learning_rate": -1}, "learning_rate: Input should be greater than 0"),
        ({"loss_fn": "ppo", "ppo": False}, "loss_fn is ppo, but ppo is False"),
        ({"loss_fn": "ppo", "epsilon": 2.0}, "epsilon: Input should be less than 1"),
        (
            {"importance_sampling_level": "average"},
            "importance_sampling_level average does not exist for loss_fn cispo",
        ),
    ],
)
def test_what_this_server_does_not_do_is_refused_by_name(settings, says):
    with pytest.raises(ApiError) as caught:
        read_settings(settings)
    assert caught.value.status == 422
    assert says in str(caught.value)
