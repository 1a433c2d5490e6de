"""SkyPilot's own reader takes the task of `examples/cluster`, and refuses it without the bucket that it needs."""

import sys
from pathlib import Path

import sky
import yaml

TASK = yaml.safe_load((Path(__file__).parents[2] / "examples" / "cluster" / "skypilot.yml").read_text())

task = sky.Task.from_yaml_config({**TASK, "workdir": None}, env_overrides=[("LOCATION", "s3://bucket/runs")])
assert {next(iter(each.accelerators)) for each in task.resources} == {"L4", "A10G"}
assert all(each.use_spot for each in task.resources)
assert task.envs == {"LOCATION": "s3://bucket/runs", "FILE": "run.yml", "NAME": "first"}
refused = ""
try:
    sky.Task.from_yaml_config({**TASK, "workdir": None})
except ValueError as error:
    refused = str(error)
assert "LOCATION" in refused, "it needs a bucket"
sys.stdout.write("  ok: SkyPilot reads the task of examples/cluster\n")
