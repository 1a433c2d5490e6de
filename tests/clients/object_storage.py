"""A run whose machine is lost resumes from its copy in S3: a real client of S3 against a server of the package moto.

The server runs where both are installed; the run is killed, its folder removed, and fetched from the bucket.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import fsspec
from moto.server import ThreadedMotoServer

from reinforge.trackers.mirror import fetch_run
from tests.fault.kit import KILLED, Toy, differences
from tests.models import make_tiny_model

LOCATION = "s3://bucket/runs"


def main(folder: Path) -> None:
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    fsspec.filesystem("s3").mkdir("bucket")
    model = make_tiny_model(folder / "model")
    toy, whole = Toy(folder / "toy", model), Toy(folder / "whole", model)
    toy.set("finetuning.trackers", {"bucket": {"_type": "mirror", "location": LOCATION}})
    assert whole.start().wait() == 0
    assert toy.start(crash_at="publish.mid:3").wait() == KILLED
    shutil.rmtree(toy.run)
    fetch_run(f"{LOCATION}/r", toy.run.parent)
    child = toy.resume()
    assert child.wait() == 0, child.said
    assert differences(toy.run, whole.run) == []
    assert differences(fetch_run(f"{LOCATION}/r", folder / "again"), whole.run) == []
    server.stop()
    sys.stdout.write("  ok: a run that was killed resumes from its copy in S3, on an empty folder\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
