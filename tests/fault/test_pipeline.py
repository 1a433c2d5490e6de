"""The borders of a pipeline's stages: a run that is killed there ends as if undisturbed, and the checks see it.

`test_kill_methods.py` kills a pipeline at every crash point.
"""

import json

import pytest

from tests.fault import mutations
from tests.fault.conftest import METHODS
from tests.fault.kit import KILLED, differences

PIPELINE = METHODS["pipeline"]
STAGES = PIPELINE["finetuning.pipeline"]
RUINING = {**STAGES["sft"], "num_epochs": 1, "policy": {"optimizer": {"learning_rate": 3.0}}}
FROM_THE_BEST = {
    **PIPELINE,
    "finetuning.pipeline": {"sft": STAGES["sft"], "ruin": RUINING, "grpo": {**STAGES["grpo"], "start_from": "best"}},
    "finetuning.num_epochs": 5,
}
"""The last stage begins with the model of epoch 1, and measures its KL from that."""
AT_THE_RETURN = "ckpt.after_manifest:5"  # after the base and three epochs
IN_THE_SECOND_STAGE = "batch.sealed:4"
"""Its second epoch is collected and its first is trained: the optimizer comes from a checkpoint of this stage."""


@pytest.mark.slow
def test_both_stages_train_with_their_own_optimizer(finished):
    """Stage sft: two jobs of two steps with AdamW; stage grpo begins anew, with RMSprop."""
    run = finished(PIPELINE).run
    states = [json.loads(path.read_text()) for path in sorted(run.glob("checkpoints/*/training/state.json"))]
    assert [(state["stage"], state["num_steps"]) for state in (states[0], states[-1])] == [(None, 0), ("grpo", 4)]
    rows = [json.loads(line) for line in (run / "training_metrics.jsonl").read_text().splitlines()]
    assert [(row["stage"], row["lr"]) for row in rows] == [("sft", 0.01)] * 2 + [("grpo", 0.001)] * 2


@pytest.mark.slow
def test_a_kill_at_the_border_of_two_stages(make_toy, finished):
    """The first stage's last weights are on disk, and the journal does not know it; then within the second stage, which
    does not go on with a changed bit in the model that it began with: the KL is measured from it."""
    toy = make_toy(PIPELINE)
    assert toy.start(crash_at="ckpt.after_rename:3").wait() == KILLED
    assert toy.resume(crash_at="batch.sealed:2").wait() == KILLED
    weights = toy.run / "checkpoints/step-000002/model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    child = toy.resume()
    assert child.wait() != 0
    assert "the reference of the stage grpo is missing: the checkpoint of version 2" in child.said
    weights.write_bytes(content)
    child = toy.resume()
    assert child.wait() == 0, child.said
    assert differences(toy.run, finished(PIPELINE).run) == []


@pytest.mark.fault
@pytest.mark.parametrize("site", ["publish.before:2", "batch.sealed:3", "step.after_optim:5"])
def test_a_kill_near_the_border_of_two_stages(make_toy, finished, site):
    toy = make_toy(PIPELINE).end_after(site)
    assert differences(toy.run, finished(PIPELINE).run) == []


@pytest.mark.slow
def test_kills_around_a_return_to_the_best_weights(make_toy, finished):
    """Before its checkpoint is complete, after it, and within the stage, whose reference that checkpoint is."""
    toy = make_toy(FROM_THE_BEST).end_after(AT_THE_RETURN, "ckpt.after_rename:1", "batch.sealed:2")
    assert "the weights after epoch 1, which are the best so far" in (toy.run / "run.log").read_text()
    assert differences(toy.run, finished(FROM_THE_BEST).run) == []


@pytest.mark.fault
def test_a_stage_that_forgets_to_return_makes_a_difference(make_toy, finished):
    toy = make_toy(FROM_THE_BEST).end_after(AT_THE_RETURN, mutation=mutations.stay_with_the_last_weights)
    assert "model.safetensors" in differences(toy.run, finished(FROM_THE_BEST).run)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("site", "mutation"),
    [
        (IN_THE_SECOND_STAGE, mutations.forget_the_stage),
        (IN_THE_SECOND_STAGE, mutations.forget_the_reference),
        ("batch.sealed:3", mutations.keep_the_optimizer_between_stages),
    ],
)
def test_what_is_not_restored_makes_a_difference(make_toy, finished, site, mutation):
    """Mutation check: a checkpoint that does not say its stage, a resume without the stage's reference for the KL, a
    stage that goes on with the optimizer of the one before."""
    toy = make_toy(PIPELINE).end_after(site, mutation=mutation)
    found = differences(toy.run, finished(PIPELINE).run)
    assert "model.safetensors" in found
    assert "optimizer.safetensors" in found


@pytest.mark.parametrize(
    ("mutation", "can_resume"),
    [
        pytest.param(None, True, marks=pytest.mark.slow),
        pytest.param(mutations.forget_where_stages_begin, False, marks=pytest.mark.fault),
    ],
)
def test_the_model_that_a_stage_began_with_is_kept(make_toy, mutation, can_resume):
    """It is neither the best (the demonstrations teach no vowels) nor the newest, but the reference of the KL."""
    toy = make_toy(PIPELINE)
    told = ({"prompt": f"tell {number}", "completion": "xyz"} for number in range(12))
    toy.write("told.jsonl", "".join(json.dumps(row) + "\n" for row in told))
    assert toy.start(crash_at=IN_THE_SECOND_STAGE, mutation=mutation).wait() == KILLED
    assert (toy.run / "checkpoints/step-000002").is_dir() == can_resume
    child = toy.resume()
    assert (child.wait() == 0) == can_resume, child.said
    assert ("the reference of the stage grpo is missing" in child.said) != can_resume
