"""Whole runs under torchrun, without Ray: several processes of this machine sample and train one model."""

import json
import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from tests.scale.jobs import measure_distance
from tests.scale.processes import MARK, finish, list_marked, torchrun, wait_for_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def read_rows(project):
    return [json.loads(line) for line in (project.run / "training_metrics.jsonl").read_text().splitlines()]


def load_checkpoints(project):
    return [load_file(each / "model.safetensors") for each in sorted((project.run / "checkpoints").glob("step-*"))]


@pytest.mark.parametrize("sharding", [pytest.param("replicate", marks=pytest.mark.fault), "full"])
def test_a_run_of_two_processes_needs_no_other_file(project, sharding):
    project.set("finetuning.num_epochs", 2)
    project.write_files()
    override = ["-o", "trainer_adapters.adapter.sharding", sharding]
    output = finish(torchrun(project, "finetune", "run.yml", "--run_name", "r", *override))
    assert "Traceback" not in output
    assert [row["epoch"] for row in read_rows(project)] == [0, 1]
    first, *_, last = load_checkpoints(project)
    assert measure_distance(first, last) > 1e-4
    assert list_marked(project.folder) == []


def test_a_command_that_trains_nothing_ends_in_every_process(project):
    project.write_files()
    output = finish(torchrun(project, "finetune", "run.yml", "--dry_run"))
    assert output.count("is valid") == 1, "the first process alone speaks"
    assert list_marked(project.folder) == []


@pytest.mark.fault
def test_when_a_process_dies_all_end_and_one_process_resumes_the_divided_run(project):
    project.set("finetuning.num_epochs", 3)
    project.set("trainer_adapters.adapter.sharding", "full")
    project.write_files()
    process = torchrun(project, "finetune", "run.yml", "--run_name", "r")
    wait_for_metrics(project, process)
    others = [each for each in list_marked(project.folder) if each.environ().get("RANK") == "1"]
    others[0].kill()
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0, output
    assert list_marked(project.folder) == []
    command = [sys.executable, "-m", "reinforge", "finetune", "run.yml", "--resume", "r"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(read_rows(project)) == 3


ALGORITHM = """
from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.engine import LossOutput, register_loss
from reinforge.registry import register_algorithm
from reinforge.types.sample import LossSpec

@register_loss("own_pg")
def own_pg(batch, logprobs_BT):
    return LossOutput(-batch.advantages * logprobs_BT)

class OwnConfig(GRPOConfig, name="own"):
    pass

class Own(GRPO):
    loss = LossSpec("own_pg", {})

@register_algorithm(config_type=OwnConfig)
async def own(config, builder):
    yield Own(config)
"""
SCRIPT = """
import own_algorithm, reinforge

async def agent(item, llm, context):
    reply = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}], max_tokens=4)
    return reply.choices[0].message.content

def vowels(output, expected):
    return sum(letter in "aeiou" for letter in output) / max(1, len(output))

if __name__ == "__main__":
    rows = [{"id": str(i), "question": f"say {i}", "answer": "a"} for i in range(64)]
    summary = reinforge.finetune(
        agent, rows, vowels, "MODEL", 1, algorithm="own", settings={"device": "cpu"}, run_name="r", output_dir="runs"
    )
    print("trained", summary.status)
"""


def test_a_script_with_a_loss_of_its_own_trains_in_every_process(project):
    project.write("own_algorithm.py", ALGORITHM)
    project.write("script.py", SCRIPT.replace("MODEL", str(project.model)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "script.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", MARK: str(project.folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("trained completed") == 1, done.stdout + done.stderr
    assert list_marked(project.folder) == []
