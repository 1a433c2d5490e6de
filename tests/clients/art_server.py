"""A server that trains a tiny model for ART's clients; its first line is its URL.

python -m tests.clients.art_server PORT
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from reinforge.config.policy import BatchConfig, LoRAConfig, PolicyConfig
from reinforge.protocols.art.server.api import ARTApi
from reinforge.serving.app import ServeApp
from reinforge.serving.loading import BaseModels
from reinforge.serving.models import ServedModels
from tests.models import make_tiny_model


async def serve(folder):
    make_tiny_model(folder / "base")
    policy = PolicyConfig(model=str(folder / "base"), lora=LoRAConfig(r=4), batch=BatchConfig(batch_size=8))
    models = ServedModels()
    feature = ARTApi(models, BaseModels({"tiny": policy}), folder / "trained", device="cpu")
    async with ServeApp(models, [feature], port=int(sys.argv[1])) as app:
        sys.stdout.write(f"{app.address}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


with tempfile.TemporaryDirectory() as name:
    Path(name, "base").mkdir()
    asyncio.run(serve(Path(name)))
