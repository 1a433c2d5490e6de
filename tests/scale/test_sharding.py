"""Processes that divide one model among them make the steps of one process (FSDP2 over gloo, real processes)."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from reinforge.errors import EngineError
from tests.fault.kit import SERVER, start_server
from tests.scale.jobs import load_moments, measure_distance
from tests.scale.sharded_process import load, work

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
OPTIMIZER = {"learning_rate": 3e-3, "eps": 1e-4}  # a smaller eps makes whole steps of rounding errors


def run(folder, size, job, *, may_fail=False):
    """Runs a job in `size` processes; returns what each found, and the trained weights; None if one failed and may."""
    folder.mkdir(parents=True)
    start_server()
    port, say_port = SERVER.Pipe(duplex=False)

    def start(rank, port=0):
        process = SERVER.Process(target=work, args=(rank, size, port, say_port, folder, job), daemon=True)
        process.start()
        return process

    first = start(0)
    number = port.recv() if size > 1 else 0
    processes = [first, *(start(rank, number) for rank in range(1, size))]
    for process in processes:
        process.join(240)
    if may_fail and any(process.exitcode for process in processes):
        return None, None
    outputs = [(folder / f"output-{rank}.txt").read_text()[-3000:] for rank in range(size)]
    assert [process.exitcode for process in processes] == [0] * size, "\n".join(outputs)
    found = [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(size)]
    return found, load_file(next((folder / "checkpoint").glob("*model.safetensors")))


def make_job(model, loss="clipped_pg", policy=None, **job):
    batch = {"steps_per_job": 2, "micro_batch_tokens": 64}
    settings = {"model": str(model), "optimizer": OPTIMIZER, "batch": batch, "schedule": {"warmup_steps": 0}}
    return {"policy": {**settings, **(policy or {})}, "loss": loss, **job}


@pytest.mark.parametrize(
    ("size", "policy"),
    [
        (2, {"activation_checkpointing": True}),
        (4, {}),
        (2, {"lora": {"rank": 4}}),
        pytest.param(4, {"lora": {"rank": 3}}, marks=pytest.mark.fault),
    ],
    ids=["full-2", "full-4", "lora-2", "lora-4"],
)
def test_shards_train_as_the_whole_model(tiny_model_dir, tmp_path, size, policy):
    job = make_job(tiny_model_dir, policy=policy, rollback=True)
    [alone], expected = run(tmp_path / "one", 1, job)
    found, weights = run(tmp_path / "shards", size, job)
    assert {each["held"] for each in found} == {"full"}
    assert measure_distance(expected, weights) < 1e-5
    assert len({each["fingerprint"] for each in found}) == 1
    assert found[0]["metrics"] == pytest.approx(alone["metrics"], rel=1e-3, abs=1e-5)
    assert all(each["bytes"] < 1.2 * alone["bytes"] / size for each in found)
    assert found[0]["logprobs"] == [pytest.approx(row, abs=1e-4) for row in alone["logprobs"]]


ELSEWHERE = {"samples_elsewhere": True}


@pytest.mark.parametrize("divides", [False, True], ids=["loaded", "mapped"])
@pytest.mark.parametrize(
    ("size", "policy", "job"),
    [
        (2, {}, {}),
        (4, {}, {"reference": True, "loss": "clipped_pg", "params": {"kl_coef": 0.1}}),
        (2, {"lora": {"rank": 4}}, {"reference": True, "params": {"kl_coef": 0.1}}),
        (2, {}, {"critic": True, "loss": "ppo"}),
        (2, {"lora": {"rank": 4}}, {"loss": "kto", "reference": True}),
    ],
    ids=["full-2", "full-4", "lora-2", "critic", "kto"],
)
def test_where_another_program_samples_no_process_has_the_whole_model(
    tiny_model_dir, tmp_path, size, policy, job, divides
):
    settings = ELSEWHERE | {"keep_reference": "reference" in job, "critic": "critic" in job}
    job = make_job(tiny_model_dir, policy=policy, rollback=not job, settings=settings, base="lora" in policy, **job)
    [alone], expected = run(tmp_path / "one", 1, job)
    found, weights = run(tmp_path / "shards", size, {**job, "settings": {**settings, "divides": divides}})
    assert {each["whole"] for each in found} == {0}
    if job["base"]:
        base, loaded = (
            load_file(place / "model.safetensors") for place in (tmp_path / "shards" / "base", tiny_model_dir)
        )
        assert measure_distance(loaded, base) == 0
    assert alone["whole"] > 0
    assert measure_distance(expected, weights) < 1e-5
    assert len({each["fingerprint"] for each in found}) == 1
    assert found[0]["metrics"] == pytest.approx(alone["metrics"], rel=1e-3, abs=1e-5)
    assert found[0]["logprobs"] == [pytest.approx(row, abs=1e-4) for row in alone["logprobs"]]


def test_low_precision_has_its_float32_copies_divided(tiny_model_dir, tmp_path):
    job = make_job(tiny_model_dir, policy={"dtype": "bfloat16"})
    [alone], expected = run(tmp_path / "one", 1, job)
    found, weights = run(tmp_path / "shards", 2, job)
    moved = measure_norm(expected, load_file(tiny_model_dir / "model.safetensors"))
    assert measure_norm(expected, weights) < 0.15 * moved, "gradients are rounded to 8 bits before they are added"
    assert len({each["fingerprint"] for each in found}) == 1
    assert all(each["bytes"] < 0.6 * alone["bytes"] for each in found)


@pytest.mark.parametrize("settings", [{}, ELSEWHERE], ids=["here", "elsewhere"])
@pytest.mark.parametrize("policy", [{}, {"lora": {"rank": 3}}], ids=["full", "lora"])
def test_any_number_of_processes_resumes_what_another_number_has_saved(tiny_model_dir, tmp_path, policy, settings):
    job = make_job(tiny_model_dir, policy=policy, settings=settings)
    run(tmp_path / "first", 1, {**job, "jobs": 1})
    _, expected = run(tmp_path / "one", 1, {**job, "jobs": 4})
    folder = tmp_path / "first"
    for number, size in enumerate((2, 4, 1), 1):
        after = {**job, "resume": str(folder / "checkpoint"), "jobs": 1, "first": number}
        folder = tmp_path / f"then-{size}"
        _, weights = run(folder, size, after)
        files = sorted((folder / "checkpoint" / "training").glob("optimizer*"))
        parts = [f"optimizer-{number:05d}-of-{size:05d}.safetensors" for number in range(1, size + 1)]
        assert [file.name for file in files] == (parts if size > 1 else ["optimizer.safetensors"])
    assert measure_distance(expected, weights) < 1e-5
    assert measure_distance(*(load_moments(tmp_path / name / "checkpoint") for name in ("one", "then-1"))) < 1e-5


def test_parts_of_an_optimizers_state_that_are_missing_are_named(tiny_model_dir, tmp_path):
    job = make_job(tiny_model_dir, jobs=1)
    run(tmp_path / "shards", 2, job)
    checkpoint = tmp_path / "shards" / "checkpoint"
    (checkpoint / "training" / "optimizer-00001-of-00002.safetensors").unlink()
    with (
        load({**job}) as engine,
        pytest.raises(EngineError, match="1 parts of the optimizer's state are here, and the last is"),
    ):
        engine.load_weights(checkpoint)


def measure_norm(a, b):
    assert a.keys() == b.keys()
    return sum(float((a[name].detach().float() - b[name].detach().float()).square().sum()) for name in a) ** 0.5


@pytest.mark.fault
@pytest.mark.parametrize("safety", ["norm of all shards", "sum of gradients"])
def test_without_one_of_its_sums_the_step_is_another(tiny_model_dir, tmp_path, safety):
    optimizer = {**OPTIMIZER, "max_grad_norm": 0.01}
    job = make_job(tiny_model_dir, policy={"optimizer": optimizer}, jobs=1)
    _, expected = run(tmp_path / "one", 1, job)
    _, right = run(tmp_path / "right", 2, job)
    assert measure_distance(expected, right) < 1e-5
    _, weights = run(tmp_path / "wrong", 2, {**job, "without": safety}, may_fail=safety != "norm of all shards")
    assert weights is None or measure_distance(expected, weights) > 1e-4


@pytest.mark.fault
def test_without_passes_for_the_others_they_wait_until_the_time_is_up(tiny_model_dir, tmp_path):
    job = make_job(tiny_model_dir, jobs=1, num_samples=3, timeout_s=5, without="passes of the others")
    found, _ = run(tmp_path / "wrong", 2, job, may_fail=True)
    assert found is None


def test_several_processes_without_enough_memory_divide_the_model(tiny_model_dir, tmp_path):
    job = make_job(tiny_model_dir, jobs=1, sharding="auto")
    found, _ = run(tmp_path / "enough", 2, job)
    assert {each["held"] for each in found} == {"replicate"}
    found, _ = run(tmp_path / "scarce", 2, {**job, "memory": 1})
    assert {each["held"] for each in found} == {"full"}


def test_a_loss_that_fails_in_one_process_fails_the_job_in_all_and_the_next_one_works(tiny_model_dir, tmp_path):
    job = make_job(tiny_model_dir, jobs=1)
    _, expected = run(tmp_path / "one", 1, job)
    found, weights = run(tmp_path / "shards", 2, {**job, "fails": True})
    assert [each["failure"] for each in found] == ["PeerFailed: process 1 of 2 failed in this step", "ValueError: bad"]
    assert measure_distance(expected, weights) < 1e-5


@pytest.mark.parametrize("size", [1, 2])
def test_weights_stay_in_their_file_until_they_are_divided(tiny_model_dir, tmp_path, size):
    """Also those that training needs in another data type; one process alone takes all of them."""
    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.bfloat16).save_pretrained(half)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(half)
    job = make_job(half, settings=ELSEWHERE | {"keep_initial": True})
    [alone], expected = run(tmp_path / "one", 1, job)
    found, weights = run(tmp_path / "shards", size, {**job, "settings": {**job["settings"], "divides": True}})
    num_weights = len(list(AutoModelForCausalLM.from_pretrained(half).parameters()))
    assert {each["mapped"] for each in found} == {num_weights}
    assert alone["mapped"] == 0, "bfloat16 became float32"
    assert {each["held"] for each in found} == {"full" if size > 1 else "replicate"}
    assert {each.dtype for each in weights.values()} == {torch.float32}
    assert measure_distance(expected, weights) < 1e-5


@pytest.mark.parametrize("divides", [False, True], ids=["loaded", "mapped"])
@pytest.mark.parametrize("policy", [{}, {"lora": {"rank": 4}}], ids=["full", "lora"])
def test_the_reference_of_a_stage_is_divided_too(tiny_model_dir, tmp_path, policy, divides):
    settings = ELSEWHERE | {"keep_reference": True}
    job = make_job(tiny_model_dir, policy=policy, settings=settings, stages=["first", "second"], jobs=0)
    [alone], _ = run(tmp_path / "one", 1, job)
    found, _ = run(tmp_path / "shards", 2, {**job, "settings": {**settings, "divides": divides}})
    began, first, second = found[0]["references"]
    assert began == second
    assert first != [pytest.approx(row, abs=1e-3) for row in began]
    assert found[0]["references"] == [[pytest.approx(row, abs=1e-5) for row in each] for each in alone["references"]]
    assert {each["whole"] for each in found} == {0}
