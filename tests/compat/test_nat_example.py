"""The toolkit's example and its extension guide run with their import lines changed, and with compat unchanged."""

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.nat_sources import copy_package, install_plugin, with_our_imports, with_their_imports
from tests.protocols.art_service import ARTModel, ARTService

TESTS = Path(__file__).parents[1]
EXAMPLE = Path(__file__).with_name("nat_example")
OUTPUT = ".tmp/nat/finetuning/tic_tac_toe"
BASE_URL = "llms.small_llm.base_url"
IMPORTS = ["theirs", pytest.param("ours", marks=pytest.mark.slow)]

MODEL = "Qwen/Qwen2.5-3B-Instruct"
MOVES = tuple(f"<move><row>{row}</row><col>{col}</col></move>" for row in (1, 2, 3) for col in (1, 2, 3))

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


@pytest.fixture
def art():
    """A server that answers with any move and takes the key of the example's file."""
    with ARTService() as service:
        service.words, service.inference_key = MOVES, "default"
        yield service


@pytest.fixture(params=IMPORTS)
def example(request, tmp_path):
    """The example's project, installed as a plugin of the toolkit, or of ours with its import lines changed."""
    group = "nat.components" if request.param == "theirs" else "reinforge.components"
    copy_package(EXAMPLE, tmp_path / "rl_example", with_our_imports if request.param == "ours" else (lambda text: text))
    install_plugin(tmp_path, "rl-example", f"[{group}]\nrl = rl_example.register\n")
    rows = [{"id": number, "question": "XO"[number % 2], "answer": "Win!"} for number in range(1, 25)]
    (tmp_path / "data").mkdir()
    for name in ("data", "eval_data"):
        (tmp_path / "data" / f"{name}.json").write_text(json.dumps(rows))
    for path in EXAMPLE.glob("*.yml"):
        shutil.copy(path, tmp_path)
    return functools.partial(call_command, tmp_path, ["--compat", "nat"] if request.param == "theirs" else [])


def call_command(folder, options, *arguments, **overrides):
    settings = [part for path, value in overrides.items() for part in ("-o", path, value)]
    command = [sys.executable, "-m", "reinforge", *arguments, *options, *settings]
    environment = {"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return folder


@pytest.mark.slow
def test_the_example_trains_on_its_step_rewards(example, art):
    """With its own file, but for the addresses, the epochs and the setting that makes a game of each row."""
    backend = "trainer_adapters.openpipe_trainer_adapter.backend"
    own = {f"{backend}.ip": art.ip, f"{backend}.port": str(art.port), "llms.openpipe_llm.base_url": art.base_url}
    further = {"finetuning.splits.key": "id", "finetuning.num_epochs": "1", "finetuning.gate.num_samples": "1"}
    folder = example("finetune", "config.yml", "--run_name", "r", **own, **further)
    [[group]] = [job.groups for job in art.jobs]
    rewards = [trajectory["reward"] for trajectory in group["trajectories"]]
    assert (art.jobs[0].config["learning_rate"], len(rewards)) == (1e-6, 14), "one generation: one group of all"
    assert any(reward > 1 for reward in rewards), "some positions are won"
    assert len(set(rewards)) > 5, "every move counts, not only the end"
    assert {body["temperature"] for body in art.chats if "max_tokens" not in body} == {0.4}, "all but probes"
    [row] = map(json.loads, (folder / OUTPUT / "r" / "training_metrics.jsonl").read_text().splitlines())
    assert (row["run_id"], row["num_trajectories"], row["filtered_trajectories"]) == ("r", 14, 14)
    assert (row["min_reward"], row["max_reward"]) == (min(rewards), max(rewards))
    assert (folder / OUTPUT / "r" / "reward_plot.png").exists()


@pytest.mark.slow
def test_the_example_is_evaluated_before_training(example, art):
    """`nat eval --config_file FILE --reps N`, with its result files."""
    art.models[MODEL] = ARTModel("m", MODEL, "p", "own-team", MODEL)
    art.names_steps, art.inference_key = False, ""
    folder = example("eval", "--config_file", "config_pre_train.yml", "--reps", "2", **{BASE_URL: art.base_url})
    assert {body["temperature"] for body in art.chats} == {0.1}
    results = folder / ".tmp/nat/examples/rl_openpipe/eval/pre_train"
    outputs = json.loads((results / "workflow_output.json").read_text())
    scores = json.loads((results / "percent_games_won_output.json").read_text())
    assert [row["id"] for row in outputs] == [str(number) for number in range(1, 25) for _ in range(2)]
    expected = {"Win!": 1.0, "Draw!": 0.5, "Lose!": 0.0, "Aborted!": 0.0}
    assert [item["score"] for item in scores["eval_output_items"]] == [expected[row["output"]] for row in outputs]


@pytest.mark.parametrize("imports", IMPORTS)
def test_the_guides_components_run(tmp_path, imports):
    change = with_their_imports if imports == "theirs" else (lambda text: text)
    copy_package(TESTS / "guide", tmp_path / "components", change)
    text = (tmp_path / "components" / "my_trainer_adapter.py").read_text()
    assert ("from nat." in text) == (imports == "theirs")
    done = run(GUIDE, imports, tmp_path, TESTS / "data" / "002-complete.yml", cwd=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr[-2000:]
