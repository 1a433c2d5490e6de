"""Measures and trains a tiny model in an environment with its real package: `python -m tests.clients.games TYPE:NAME`."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.models import make_tiny_model


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_tiny_model(Path(folder) / "model"))
        for name in names:
            play(name, model, folder)


def play(name: str, model: str, folder: str) -> None:
    settings = {"environment.size": "40", "workflow.max_tokens": "8", "workflow.max_turns": "4"}
    training = {
        "finetuning.output_dir": folder,
        "trajectory_builders.builder.examples_per_epoch": "2",
        "trajectory_builders.builder.num_generations": "2",
        "eval.general.dataset.num_select": "2",
        "eval.general.dataset.num_confirm": "4",
    }
    evaluation = json.loads(
        run("eval", "--environment", name, "--model", model, "--limit", "4", "--json", settings=settings)
    )
    assert sum(evaluation["outcomes"].values()) == 4, evaluation
    run("finetune", "--environment", name, "--model", model, "--json", settings=settings | training)
    sys.stdout.write(f"  ok: {name}: a tiny model was measured {evaluation['outcomes']} and trained\n")


def run(*command: str, settings: dict[str, str]) -> str:
    options = [part for path, value in settings.items() for part in ("-o", path, value)]
    program = [sys.executable, "-m", "reinforge", *command, *options]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nfailed: {' '.join(program)}")
    return done.stdout


if __name__ == "__main__":
    main(sys.argv[1:])
