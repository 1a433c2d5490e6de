"""`reinforge preflight run.yml --cluster plan.yml`: seconds that can be added by hand, and plans that cannot work."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from reinforge.config.loader import build_config
from reinforge.errors import ConfigError
from reinforge.scale.planning.plan import ClusterPlan, forecast, read_lengths, read_plan
from reinforge.scale.planning.simulation import Spread
from reinforge.trainer.options import RunOptions
from reinforge.trainer.run import run_config
from tests.project import call

SHAPE = {"parameters": 7e9, "layers": 28, "kv_heads": 4, "head_dim": 128}
PLAN = {
    "sampling": {"gpu": "h100", "replicas": 1},
    "training": {"gpu": "h100", "gpus": 2},
    "model": SHAPE,
    "episodes": {"prompt": 1000, "reply": 500, "spread": 0},
    "price": 3.0,
}
RUN = {
    "llms": {"agent": {"_type": "policy"}},
    "workflow": {"_type": "chat"},
    "eval": {
        "general": {"max_concurrency": 64, "dataset": {"_type": "rows", "rows": [{"id": "1", "question": "2+3?"}]}},
        "evaluators": {"right": {"_type": "exact_match"}},
    },
    "trajectory_builders": {"b": {"_type": "group", "num_generations": 2, "examples_per_epoch": 1}},
    "trainer_adapters": {"a": {"_type": "local"}},
    "trainers": {"t": {"_type": "epoch"}},
    "finetuning": {
        "enabled": True,
        "trainer": "t",
        "trajectory_builder": "b",
        "trainer_adapter": "a",
        "num_epochs": 10,
        "reward_function": {"name": "right"},
        "policy": {"model": "some/model-7b"},
    },
}


def predict(plan=PLAN, **finetuning):
    run = {**RUN, "finetuning": {**RUN["finetuning"], **finetuning}}
    return forecast(build_config(run), ClusterPlan.model_validate(plan))


def test_an_epoch_takes_what_the_data_sheets_say():
    """Two siblings of one call each: the prompt once, 500 steps of both, a job of 2 x 8 FLOP a weight and token."""
    token_s = 2 * 7e9 / (989e12 * 0.5)
    bytes_per_s = 3.35e12 * 0.6
    context = 2 * (1000 + 250)
    step_s = 2e-3 + 2 * 7e9 / bytes_per_s + 2 * token_s + 4 * 28 * 4 * 128 / bytes_per_s * context
    job_s = 2 * 1500 * 8 * 7e9 / (2 * 989e12 * 0.35)
    publish_s = 2.0 + 2 * 14e9 / 5e9
    expected = 1000 * token_s + 500 * step_s + job_s + publish_s
    found = predict()
    assert found.epoch_s == pytest.approx(expected, abs=0.03), "and the driver"
    assert found.run_s == pytest.approx(10 * found.epoch_s, rel=1e-3)
    assert found.price == pytest.approx(3 * 3.0 * found.run_s / 3600)
    assert found.busy["trainers"] == pytest.approx(job_s / found.epoch_s, rel=0.01)
    assert found.staleness["max_staleness 0"] == pytest.approx(found.epoch_s)
    assert found.doubled["trainers"] == pytest.approx(found.epoch_s - job_s / 2, rel=1e-3)
    assert found.doubled["storage"] == pytest.approx(found.epoch_s - (publish_s - 2.0) / 2, rel=1e-3)


def test_replies_wait_for_memory():
    """An RTX 4090 holds 14 GB of weights, and the keys of (21.6 - 14) / 57,344 bytes = 132,000 tokens."""
    lora = {"model": "some/model-7b", "lora": {"r": 16}, "max_num_seqs": 64}
    small = {**PLAN, "sampling": {"gpu": "rtx4090", "replicas": 1}}
    run = {**RUN, "trajectory_builders": {"b": {"_type": "group", "num_generations": 64, "examples_per_epoch": 1}}}
    run["finetuning"] = {**RUN["finetuning"], "policy": lora}
    short, long = ({**small, "episodes": {**PLAN["episodes"], "prompt": tokens}} for tokens in (1000, 20_000))
    all_fit, six_fit = (forecast(build_config(run), ClusterPlan.model_validate(plan)) for plan in (short, long))
    assert all_fit.doubled["policy.max_num_seqs"] == pytest.approx(all_fit.epoch_s, rel=0.01)
    assert six_fit.epoch_s > 5 * all_fit.epoch_s, "in eleven turns instead of one"


def test_lora_publishes_adapters_and_trains_for_less():
    full, lora = predict(), predict(policy={"model": "some/model-7b", "lora": {"r": 16}})
    job_s = (1000 + 2 * 500) * 6 * 7e9 / (2 * 989e12 * 0.35)
    assert lora.busy["trainers"] * lora.epoch_s == pytest.approx(job_s, rel=0.01), (
        "the prompt once, no weight gradients"
    )
    assert full.epoch_s - lora.epoch_s > 5.0


def test_held_out_episodes_take_time():
    plan = {**PLAN, "episodes": {**PLAN["episodes"], "held_out": 600}}
    assert predict(plan).run_s - predict().run_s > 500 * 7e-3 * 600 / 64 / 2


def test_faults_are_counted():
    plan = {**PLAN, "faults": {"gpu_hours": 0.01, "restart_s": 1}}
    found = predict(plan, num_epochs=40)
    assert found.num_faults == pytest.approx(3 * found.run_s / 36, rel=0.5)
    assert any("in the run" in line for line in found.lines)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"sampling": {"gpu": "rtx4090", "replicas": 1}, "model": {**SHAPE, "parameters": 14e9}}, "at least 2 GPUs"),
        ({"training": {"gpu": "h100", "gpus": 1}}, "train on at least 2"),
        ({"model": {**SHAPE, "parameters": 70e9}, "training": {"gpu": "h100", "gpus": 16}}, "do not fit 16 h100"),
        ({"model": None}, "the shape of some/model-7b is unknown"),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(changes, problem):
    with pytest.raises(ConfigError, match=problem):
        predict({**PLAN, **changes})


def test_a_builder_without_a_size_is_refused():
    run = {**RUN, "trajectory_builders": {"b": {"_type": "group", "num_generations": 2}}}
    with pytest.raises(ConfigError, match="set examples_per_epoch"):
        forecast(build_config(run), ClusterPlan.model_validate(PLAN))


def test_the_plan_of_the_example_works():
    plan = read_plan(Path("examples/cluster/plan.yml"))
    found = forecast(build_config(RUN), plan)
    assert found.price == pytest.approx(64 * 2.5 * found.run_s / 3600)


def test_a_plan_with_mistakes_names_line_and_fix(tmp_path):
    path = tmp_path / "plan.yml"
    path.write_text("sampling: {gpu: h1000, replicas: 1}\ntraining: {gpus: 1}\nepisodes: {promt: 5}\n")
    with pytest.raises(ConfigError) as found:
        read_plan(path)
    text = str(found.value)
    assert "plan.yml:1" in text
    assert "h100" in text
    assert "plan.yml:3" in text
    assert "prompt" in text


def test_the_lengths_of_a_run_are_used(tmp_path, tiny_model_dir):
    """Episodes of two calls of 3 and 5 tokens, with a pause of 50 ms between them."""

    async def agent(item, llm, context):
        messages = [{"role": "user", "content": item.input_obj}]
        reply = await llm.chat.completions.create(messages=messages, max_tokens=3)
        messages += [{"role": "assistant", "content": reply.choices[0].message.content}]
        await asyncio.sleep(0.05)
        messages += [{"role": "user", "content": "sure?"}]
        return (await llm.chat.completions.create(messages=messages, max_tokens=5)).choices[0].message.content

    rows = [{"id": str(number), "question": f"{number} + 3?", "answer": "5"} for number in range(8)]
    run = {
        **RUN,
        "workflow": {"_type": "python", "function": agent},
        "eval": {**RUN["eval"], "general": {"dataset": {"_type": "rows", "rows": rows}}},
        "finetuning": {
            **RUN["finetuning"],
            "num_epochs": 1,
            "policy": {"model": str(tiny_model_dir)},
            "limits": {"allow_no_training": True},
            "gate": {"allow_no_verdict": True},
            "output_dir": str(tmp_path),
        },
    }
    folder = tmp_path / "r"
    run_config(build_config(run), RunOptions(run_name="r"))
    seen = read_lengths(folder)
    assert seen.turns.mean == 2
    assert set(seen.reply.seen) <= {1, 2, 3, 4, 5}
    assert 4 <= seen.prompt < 60
    assert 0 < seen.message < 40
    assert 0.04 < seen.tool_s.mean < 1.0
    plan = {**PLAN, "episodes": {"run": str(folder)}}
    assert predict(plan).epoch_s < predict().epoch_s, "short ones"
    with pytest.raises(ConfigError, match="no collected episodes"):
        read_lengths(tmp_path)


def test_the_command_prints_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yml").write_text(yaml.safe_dump(RUN))
    (tmp_path / "plan.yml").write_text(yaml.safe_dump(PLAN))
    shown = call("preflight", "run.yml", "--cluster", "plan.yml")
    assert shown.exit_code == 0, shown.output
    assert "assumed" in shown.output
    assert max(map(len, shown.output.splitlines())) <= 120
    data = json.loads(call("preflight", "run.yml", "--cluster", "plan.yml", "--json").output)
    assert data["epoch_s"] == pytest.approx(predict().epoch_s)
    wrong = call("preflight", "run.yml", "--cluster", "plan.yml", "-o", "finetuning.num_epochs", "0")
    assert wrong.exit_code == 2


def test_more_replies_at_a_time_help_where_they_are_the_limit():
    run = {**RUN, "trajectory_builders": {"b": {"_type": "group", "num_generations": 8, "examples_per_epoch": 16}}}
    run["eval"] = {**RUN["eval"], "general": {**RUN["eval"]["general"], "max_concurrency": 8}}
    found = forecast(build_config(run), ClusterPlan.model_validate(PLAN))
    assert found.doubled["max_concurrency"] < 0.8 * found.epoch_s
    assert any("max_concurrency: twice as much saves" in line for line in found.lines)
    assert replace(Spread(3.0), spread=0.5).mean == 3.0
