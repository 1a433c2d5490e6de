"""Trains a verifier alone and a verifier with two debaters, and compares them on the same held-out problems.

python examples/debate/debate.py [SEED]      the seed of the problems and the runs

Takes a minute and a half on two cores, and three more minutes on first use for the starter.
"""

import sys
from pathlib import Path

from reinforge.config.loader import load_config
from reinforge.evaluation.statistics import compute_mean_interval, compute_paired_difference
from reinforge.runs.episodes import read_outputs
from reinforge.runs.progress import default_progress
from reinforge.trainer.options import RunOptions
from reinforge.trainer.run import run_config

HERE = Path(__file__).parent


def train(name: str, seed: str) -> dict[str, dict[str, float]]:
    """Runs one of the files and returns whether its verifier was right on each problem, before and after training."""
    overrides = (("finetuning.seed", seed), ("eval.general.dataset.seed", seed))
    loaded = load_config(HERE / f"{name}.yml", overrides=overrides)
    summary = run_config(loaded, RunOptions(progress=default_progress()))
    is_right = {}
    for phase in ("confirm_base", "confirm_tuned"):
        outputs = read_outputs(summary.folder, phase)
        is_right[phase] = {id_: float(o["branches"][0]["decision"] == o["truth"]) for id_, o in outputs.items()}
    return is_right


if __name__ == "__main__":
    seed = sys.argv[1] if len(sys.argv) > 1 else "0"
    results = {name: train(name, seed) for name in ("solo", "debate")}
    print(f"\nright decisions on {len(results['solo']['confirm_tuned'])} held-out problems, seed {seed}")
    for name, phases in results.items():
        for phase, when in (("confirm_base", "before"), ("confirm_tuned", "after")):
            mean, low, high = compute_mean_interval(list(phases[phase].values()))
            print(f"  {name:<6} {when:<6} {mean:.3f} [{low:.3f}, {high:.3f}]")
    difference = compute_paired_difference(results["solo"]["confirm_tuned"], results["debate"]["confirm_tuned"])
    print(f"debate minus solo verifier, both trained: {difference}")
