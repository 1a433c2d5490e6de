"""Measures and trains a tiny model in a package's games: `python -m tests.clients.games TYPE:NAME...`."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.models import make_tiny_model


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_tiny_model(Path(folder) / "model", max_position_embeddings=4096))
        for name in names:
            play(name, model, folder)


def play(name: str, model: str, folder: str) -> None:
    type_name, _, game = name.partition(":")
    sections = {
        "environment": {"_type": type_name, "name": game, "size": 20},
        "workflow": {"_type": "environment", "max_tokens": 8, "max_turns": 4},
        "trajectory_builders": {"builder": {"_type": "group", "examples_per_epoch": 2, "num_generations": 6}},
        "eval": {"evaluators": {"letter": {"_type": "regex", "pattern": "^[a-m]"}}},  # a random model never wins
        "finetuning": {"output_dir": folder, "policy": {"model": model}, "splits": {"select": 2, "confirm": 8}},
    }
    sections["finetuning"]["limits"] = {"allow_no_training": True}  # where a random model never names an action
    file = Path(folder) / "run.yml"
    file.write_text(json.dumps(sections))  # JSON is YAML
    evaluation = json.loads(run("eval", str(file), "--limit", "4", "--split", "all", "--json"))
    assert sum(evaluation["outcomes"].values()) == 4, evaluation
    run("finetune", str(file), "--json")
    sys.stdout.write(f"  ok: {name}: a tiny model was measured {evaluation['outcomes']} and a run went through\n")


def run(*command: str) -> str:
    program = [sys.executable, "-m", "reinforge", *command]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nfailed: {' '.join(program)}")
    return done.stdout


if __name__ == "__main__":
    main(sys.argv[1:])
