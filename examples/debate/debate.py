"""A verifier alone, and the same one with two debaters: both trained, then compared on the same held-out problems.

python examples/debate/debate.py [SEED]      the problems and the run by this seed

It takes a minute and a half on two cores, and on first use three more for the starter.
"""

import sys
from pathlib import Path

from reinforge.config.loader import load_config
from reinforge.evaluation.statistics import mean_interval, paired_difference
from reinforge.runs.journal import read_outputs
from reinforge.runs.progress import default_progress
from reinforge.trainer.run import RunOptions, run_config

HERE = Path(__file__).parent


def train(name: str, seed: str) -> dict[str, dict[str, float]]:
    """Runs one of the files and returns whether its verifier was right on each problem, before and after."""
    overrides = (("finetuning.seed", seed), ("eval.general.dataset.seed", seed))
    loaded = load_config(HERE / f"{name}.yml", overrides=overrides)
    summary = run_config(loaded, RunOptions(progress=default_progress()))
    right = {}
    for phase in ("confirm_base", "confirm_tuned"):
        outputs = read_outputs(summary.folder, phase)
        right[phase] = {id_: float(o["branches"][0]["decision"] == o["truth"]) for id_, o in outputs.items()}
    return right


if __name__ == "__main__":
    seed = sys.argv[1] if len(sys.argv) > 1 else "0"
    found = {name: train(name, seed) for name in ("solo", "debate")}
    print(f"\nright decisions on {len(found['solo']['confirm_tuned'])} problems that nobody trained on, seed {seed}")
    for name, arms in found.items():
        for phase, when in (("confirm_base", "before"), ("confirm_tuned", "after")):
            mean, low, high = mean_interval(list(arms[phase].values()))
            print(f"  {name:<6} {when:<6} {mean:.3f} [{low:.3f}, {high:.3f}]")
    better = paired_difference(found["solo"]["confirm_tuned"], found["debate"]["confirm_tuned"])
    print(f"debate against the solo verifier, both trained: {better}")
