"""A custom loop over shared-model groups: collected rollouts are trained on and change the next ones."""

import numpy as np
import pytest

import tests.babble  # noqa: F401  registers its protocol
from reinforge.errors import ConfigError, EvaluationError
from reinforge.multiagent import (
    EmbeddedSharedModelGroup,
    ExperimentSettings,
    HyperParameters,
    build_agents,
    build_protocol,
    collect_rollouts,
)

ROWS = [{"id": str(number), "question": f"say {number}", "answer": "accept"} for number in range(16)]


def make_group(model, folder, agents=("prover", "verifier"), *, kind=EmbeddedSharedModelGroup, prover=None, **fields):
    params = {
        "model_name": str(model),
        "shared_model_group": "both",
        "max_tokens_per_message": 4,
        "lora_rank": 4,
        "fine_tune_from_scratch": False,
    }
    given = {name: {**params, "prompt": f"{name}: $question"} for name in ("prover", "verifier")}
    given["prover"] |= prover or {}
    hyper_params = HyperParameters(
        "vowels", "pure_text_ei", "unused", "babble", agents=given, rl={"lr": 0.01}, text_rl={"num_epochs": 8}, **fields
    )
    wholes = [agent for agent in build_agents(hyper_params).values() if agent.name in agents]
    settings = ExperimentSettings("r", groups_dir=folder)
    finetuning = {"device": "cpu", "policy": {"batch": {"batch_size": 8}, "schedule": {"warmup_steps": 0}}}
    return kind(hyper_params, settings, build_protocol(hyper_params), wholes, "both", finetuning=finetuning)


def earned(rollouts):
    return rollouts["next", "agents", "reward"].sum(1)


class Recorded(EmbeddedSharedModelGroup):
    async def sample(self, request):
        self.seen.add(
            (request.messages[0]["content"].split(":")[0], request.sampling.temperature, request.sampling.top_p)
        )
        return await super().sample(request)


async def test_each_agent_samples_with_its_own_settings(tmp_path, tiny_model_dir):
    """Of trained agents too, which in a run have the run's settings; without one, the default is 1."""
    group = make_group(tiny_model_dir, tmp_path, kind=Recorded, prover={"temperature": 0.25, "top_p": 0.5})
    group.seen = set()
    await collect_rollouts([group], ROWS[:2])
    assert group.seen == {("prover", 0.25, 0.5), ("verifier", 1.0, 1.0)}
    await group.close()


@pytest.mark.slow
async def test_a_verifier_trained_on_the_truth_decides_rightly(tmp_path, tiny_model_dir):
    group = make_group(tiny_model_dir, tmp_path)
    place = group.protocol_handler.agent_names.index("verifier")
    shares = []
    for iteration in range(3):
        rollouts = await collect_rollouts([group], ROWS, iteration=iteration, num_dialogues=2)
        assert rollouts.batch_size == (32, 2)
        right = earned(rollouts)[:, place] == 1
        shares.append(right.mean())
        if right.mean() > 0.9:
            break
        await group.create_supervised_fine_tune_job({}, {"verifier": rollouts[~right]})
        assert await group.wait_for_fine_tune_job(60) == "succeeded"
        await group.switch_to_next_model()
    assert shares[-1] > shares[0] + 0.2, shares
    await group.close()


async def test_equal_arguments_give_equal_dialogues(tmp_path, tiny_model_dir):
    group = make_group(tiny_model_dir, tmp_path)
    first, again = [await collect_rollouts([group], ROWS[:4]) for _ in range(2)]
    other = await collect_rollouts([group], ROWS[:4], iteration=1)
    assert first == again
    assert not np.array_equal(first["next", "raw_message_history"], other["next", "raw_message_history"])
    await group.close()


async def test_groups_must_cover_all_agents(tmp_path, tiny_model_dir):
    group = make_group(tiny_model_dir, tmp_path, agents=("prover",))
    with pytest.raises(ConfigError, match="agents of the protocol are missing: verifier"):
        await collect_rollouts([group], ROWS)
    await group.close()


async def test_no_finished_dialogue_is_an_error(tmp_path, tiny_model_dir):
    group = make_group(tiny_model_dir, tmp_path)
    with pytest.raises(EvaluationError, match="none of 2 dialogues finished: the prompt has"):
        await collect_rollouts([group], [{"id": str(n), "question": "a b " * 400, "answer": "accept"} for n in (1, 2)])
    await group.close()
