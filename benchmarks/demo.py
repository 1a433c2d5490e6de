"""The demo on a fresh machine: win rates, wall time, CPU-seconds, and CPU time relative to a matmul.

python benchmarks/demo.py            three seeds; the first run also trains the starter, as on a fresh machine
python benchmarks/demo.py --long     the longer configuration, one seed
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import describe, matmul_gflops, refuse_if_busy


def run_demo(folder: Path, seed: int, long_run: bool) -> tuple[dict, float, float]:
    """Runs the demo in its own process and returns its summary, wall time in seconds and CPU-seconds."""
    command = [sys.executable, "-m", "reinforge", "demo", "--json", "--seed", str(seed), "--run_name", f"seed-{seed}"]
    command += ["-o", "finetuning.output_dir", str(folder / "runs")] + (["--long"] if long_run else [])
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "REINFORGE_HOME": str(folder / "home")}
    out = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(out.stdout), wall, cpu


def format_mean(summary: dict | None) -> str:
    """Returns a mean with its confidence interval."""
    return f"{summary['mean']:.3f} [{summary['ci_low']:.3f}, {summary['ci_high']:.3f}]" if summary else "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--seeds", type=int, default=None)
    parser.add_argument("--force", action="store_true", help="run even if the machine is busy")
    args = parser.parse_args()
    refuse_if_busy()
    print(describe())
    speed = matmul_gflops()
    with tempfile.TemporaryDirectory() as name:
        for seed in range(args.seeds or (1 if args.long else 3)):
            summary, wall, cpu = run_demo(Path(name), seed, args.long)
            base, tuned, change = summary["confirm_base"], summary["confirm_tuned"], summary["improvement"]
            print(
                f"seed {seed}: win rate {format_mean(base)} -> {format_mean(tuned)}, "
                f"+{change['mean_difference']:.3f} [{change['ci_low']:.3f}, {change['ci_high']:.3f}]; "
                f"{wall:.0f} s wall, {cpu:.0f} CPU-s, {cpu * speed / 1000:.1f} TFLOP at the matmul's speed"
                f"{' (including the starter)' if seed == 0 else ''}",
                flush=True,
            )


if __name__ == "__main__":
    main()
