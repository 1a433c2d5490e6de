"""How long `reinforge preflight` says that a run takes, against how long the run takes.

    python benchmarks/preflight_time.py [--force] [--probe_seconds 60] [demo] [tickets] [shop]

Short runs of the three bundled agents, each predicted and then run, in processes of their own. A run counts from its
command to its end, with imports; a preflight predicts from the point where it begins to load packages. With --cpu, both
are CPU seconds, which other programs on the machine disturb less.
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
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))

ROOT = Path(__file__).parent.parent
TASKS = {
    "demo": (ROOT / "src/reinforge/tasks/tic_tac_toe/demo.yml", 12, 6),
    "tickets": (ROOT / "src/reinforge/tasks/tickets/tickets.yml", 8, 4),
    "shop": (ROOT / "examples/tool_agent/tool_agent.yml", 6, 6),
}
"""File, epochs, and epochs between validations."""


def predict(file: str, overrides: list[list[str]], probe_s: float, *, cpu: bool) -> None:
    """Prints the prediction as JSON, in this process."""
    import asyncio

    from reinforge.config.loader import load_config
    from reinforge.trainer import context
    from reinforge.trainer.preflight import analysis, durations, probe

    if cpu:
        clock = SimpleNamespace(monotonic=time.process_time)
        for module in (analysis, context, probe):
            vars(module)["time"] = clock
        durations.StageClock.__init__.__defaults__ = (time.process_time,)
    loaded = load_config(file, overrides=[(path, value) for path, value in overrides])
    report = asyncio.run(analysis.preflight(loaded, probe.PreflightOptions(max_probe_s=probe_s)))
    print(json.dumps(report.time.as_dict()))


def measure_children() -> float:
    """Returns the CPU seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def compare(name: str, probe_s: float, folder: Path, *, cpu: bool) -> None:
    """Predicts and runs one task, and prints both."""
    file, epochs, interval = TASKS[name]
    settings = {
        "finetuning.num_epochs": epochs,
        "finetuning.run_configuration.validation_interval": interval,
        "finetuning.output_dir": folder / name,
    }
    overrides = [[path, str(value)] for path, value in settings.items()]
    command = [sys.executable, __file__, "--predict", str(file), json.dumps(overrides), "--probe_seconds", str(probe_s)]
    started = time.monotonic()
    told = subprocess.run(
        [*command, *(["--cpu"] if cpu else [])], cwd=file.parent, capture_output=True, text=True, check=True
    )
    probe_took = time.monotonic() - started
    predicted = json.loads(told.stdout.splitlines()[-1])["known_s"]
    before, started = measure_children(), time.monotonic()
    flags = [part for path, value in overrides for part in ("-o", path, value)]
    run = [sys.executable, "-m", "reinforge", "finetune", str(file), "--json", *flags]
    subprocess.run(run, cwd=file.parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    took = measure_children() - before if cpu else time.monotonic() - started
    unit = "CPU s" if cpu else "s"
    ratio = f"predicted / real {predicted / took:.2f}"
    print(
        f"{name:<8} predicted {predicted:6.1f} {unit}, took {took:6.1f} {unit}, {ratio}; preflight: {probe_took:.0f} s"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", help="any of demo, tickets, shop; default: all")
    parser.add_argument("--probe_seconds", type=float, default=60.0, help="as for `reinforge preflight`")
    parser.add_argument("--cpu", action="store_true", help="compare CPU seconds")
    parser.add_argument("--force", action="store_true", help="run even if the machine is busy")
    parser.add_argument("--predict", nargs=2, metavar=("FILE", "OVERRIDES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.predict is not None:
        predict(options.predict[0], json.loads(options.predict[1]), options.probe_seconds, cpu=options.cpu)
        sys.exit()
    from benchmarks.machine import describe, refuse_if_busy  # imports torch, which a prediction must not do first

    refuse_if_busy()  # --force runs anyway
    print(describe())
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tempfile.TemporaryDirectory() as place:
        for task in options.tasks or TASKS:
            compare(task, options.probe_seconds, Path(place), cpu=options.cpu)
