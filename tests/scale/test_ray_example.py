"""examples/cluster: the demo's task on a cluster of two nodes, by one changed block."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from reinforge.engine.packages import is_installed
from reinforge.tasks.tic_tac_toe import DEMO

EXAMPLE = Path(__file__).parents[2] / "examples" / "cluster"
SHORT = {
    "finetuning.num_epochs": 4,
    "finetuning.run_configuration.validation_interval": 4,
    "eval.general.dataset.num_select": 60,
    "eval.general.dataset.num_confirm": 100,
    "trajectory_builders.groups.examples_per_epoch": 32,
}


def test_the_file_differs_from_the_demo_by_one_block():
    demo, cluster = (yaml.safe_load(Path(file).read_text()) for file in (DEMO, EXAMPLE / "cluster.yml"))
    block = cluster.pop("trainer_adapters")
    assert demo.pop("trainer_adapters") == {"here": {"_type": "local"}}
    assert block["here"]["_type"] == "ray"
    assert cluster == demo


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not is_installed("ray"), reason="needs the extra `ray`")
def test_the_demo_trains_on_two_nodes(tmp_path):
    overrides = [part for path, value in SHORT.items() for part in ("-o", path, str(value))]
    command = [sys.executable, "-m", "reinforge", "finetune", EXAMPLE / "cluster.yml", *overrides, "--run_name", "r"]
    done = subprocess.run(
        [sys.executable, EXAMPLE / "two_nodes.py", *command],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode in (0, 3), done.stdout + done.stderr  # 3: so short a run may not be promoted
    run = next(tmp_path.rglob("summary.json")).parent
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "completed"
    rows = [json.loads(line) for line in (run / "training_metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3]
    assert summary["confirm_tuned"]["mean"] > 0.2, "it plays: at random it would win 0.4"
    assert " of 2 workers" not in (run / "run.log").read_text(), "both nodes took part, to the end"
