"""The toolkit's example and its extension guide run with their import lines changed, and with compat unchanged."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.nat_sources import copy_package, with_our_imports, with_their_imports

TESTS = Path(__file__).parents[1]
EXAMPLE = Path(__file__).with_name("nat_example")

TRAIN = """
import asyncio, json, sys
from pathlib import Path

if sys.argv[1] == "theirs":
    from reinforge.compat import nat
    assert nat.install()

import components.register
from tests.scripted_run import ScriptedRun

def reply(request):
    cell = request.sampling.seed % 9
    return f"<move><row>{cell // 3 + 1}</row><col>{cell % 3 + 1}</col></move>"

run = ScriptedRun(Path(sys.argv[2]) / "runs", script=reply, count=12)
run.settings["workflow"] = {"_type": "tic_tac_toe_player", "player_model": "agent", "max_parser_retries": 3}
run.settings["trajectory_builders"] = {"builder": {"_type": "openpipe_art_traj_builder", "num_generations": 4}}
run.settings["eval"]["evaluators"] = {"rl_accuracy": {"_type": "rl_accuracy"}}
run.settings["eval"]["general"]["dataset"]["rows"] = [
    {"id": str(i), "question": "XO"[i % 2], "answer": "Win!"} for i in range(12)
]
run.settings["finetuning"]["splits"] = {"key": "id"}
run.settings["finetuning"]["reward_function"] = {"name": "rl_accuracy"}
asyncio.run(run.run())
print(json.dumps({"jobs": len(run.adapter.jobs), "nat": sorted(name for name in sys.modules if name == "nat")}))
print(json.dumps([t.reward for job in run.adapter.jobs for group in job.trajectories for t in group]))
"""

GUIDE = """
import asyncio, sys

if sys.argv[1] == "theirs":
    from reinforge.compat import nat
    assert nat.install()

import components.register
from components.my_trainer import MyTrainer
from components.my_trainer_adapter import MyTrainerAdapter
from components.my_trajectory_builder import MyTrajectoryBuilder
import reinforge.finetuning as ours
from reinforge.config.loader import load_config
from reinforge.rollout.episode import build_steps
from reinforge.trainer.setup.components import ComponentBuilder
from reinforge.types.episode import EpisodeKey, EpisodeRecord, ModelCall
from reinforge.types.request import ModelReply, ModelRequest, TokenLogprobs

async def main():
    loaded = load_config(sys.argv[3], environ={"TRAINING_API_KEY": "sk-1"})
    async with ComponentBuilder(loaded) as builder:
        assert isinstance(await builder.get_trajectory_builder("my_builder"), MyTrajectoryBuilder)
        assert isinstance(await builder.get_trainer_adapter("my_adapter"), MyTrainerAdapter)
        assert isinstance(await builder.get_trainer("my_trainer"), MyTrainer)
        assert (await builder.get_workflow()).llm == "my_model"
        assert await builder.get_evaluator("my_reward")
        trainer, adapter = await builder.get_trainer("my_trainer"), await builder.get_trainer_adapter("my_adapter")
        await train(trainer, await builder.get_trajectory_builder("my_builder"), adapter, loaded.config.finetuning)

async def train(trainer, builder, adapter, config):
    builder.trajectory_builder_config.num_generations = 2
    builder.trajectory_builder_config.min_episode_length = 2
    scores = iter([0.5, 1.0, 0.0])  # a validation, then the two generations of an epoch
    async def run_eval():
        return output(next(scores))
    builder.run_eval = run_eval
    await trainer.bind_components(builder, adapter)
    await trainer.initialize(config)
    [status] = await trainer.run(1)
    assert status.status == "completed"
    assert trainer.history == [{"epoch": 0, "reward": 0.5}]
    [job] = adapter.client.jobs.values()
    assert [row["reward"] for row in job["rows"]] == [1.0, 0.0]

def output(score):
    tokens = TokenLogprobs((1,), (2,), (-0.1,))
    reply = ModelReply({"role": "assistant", "content": "a"}, "stop", tokens, 1, 1)
    call = ModelCall("c", "m", "m", ModelRequest([{"role": "user", "content": "q"}]), reply, (), 0.0, 1.0)
    item = ours.EvalInputItem(id="1", input_obj="q", expected_output_obj="a", full_dataset_entry={})
    item.trajectory = build_steps(EpisodeRecord(EpisodeKey("collect", 0, "1"), item, calls=[call]))
    scored = ours.EvalOutput(
        average_score=score, eval_output_items=[ours.EvalOutputItem(id="1", score=score, reasoning="")]
    )
    return ours.EvaluationRunOutput(
        workflow_output_file=None, evaluator_output_files=[], workflow_interrupted=False,
        eval_input=ours.EvalInput(eval_input_items=[item]), evaluation_results=[("my_reward", scored)],
    )

asyncio.run(main())
print("done")
"""


def run(program, *arguments, cwd):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    paths = [str(cwd), str(TESTS.parent)]
    path = f"import sys; sys.path[:0] = {paths!r}\n"
    command[2] = path + program
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


@pytest.mark.parametrize("imports", ["theirs", "ours"])
def test_the_example_trains(tmp_path, imports):
    change = with_our_imports if imports == "ours" else (lambda text: text)
    copy_package(EXAMPLE, tmp_path / "components", change)
    done = run(TRAIN, imports, tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    facts, rewards = map(json.loads, done.stdout.splitlines()[-2:])
    assert facts == {"jobs": 2, "nat": ["nat"] if imports == "theirs" else []}
    assert set(rewards) <= {0.0, 0.5, 1.0}
    assert len(set(rewards)) > 1, "games end differently, so there is something to learn"


@pytest.mark.parametrize("imports", ["theirs", "ours"])
def test_the_guides_components_run(tmp_path, imports):
    change = with_their_imports if imports == "theirs" else (lambda text: text)
    copy_package(TESTS / "guide", tmp_path / "components", change)
    text = (tmp_path / "components" / "my_trainer_adapter.py").read_text()
    assert ("from nat." in text) == (imports == "theirs")
    done = run(GUIDE, imports, tmp_path, TESTS / "data" / "002-complete.yml", cwd=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr[-2000:]


def test_without_compat_the_imports_fail(tmp_path):
    copy_package(EXAMPLE, tmp_path / "components")
    done = run(TRAIN, "ours", tmp_path, cwd=tmp_path)
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'nat'" in done.stderr
