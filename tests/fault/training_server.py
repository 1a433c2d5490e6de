"""A server that trains on its chats, over a scripted policy: FOLDER PORT, until it is killed."""

import asyncio
import sys
from pathlib import Path

from reinforge.learning import training
from reinforge.learning.api import LearningApi
from reinforge.learning.training import TrainingStarter
from reinforge.serving.app import ServeApp
from reinforge.serving.models import ServedModels
from reinforge.serving.recording import RecordConfig
from reinforge.serving.version_folder import VersionFolder
from tests.doubles import ScriptedPolicy


async def serve(folder: Path, port: int) -> None:
    training.CHECK_S = 0.1
    starter = TrainingStarter(folder / "learn.yml", folder / "data", VersionFolder(folder / "support"))
    models = ServedModels()
    models.add("m", ScriptedPolicy())
    learning = LearningApi(folder / "data", RecordConfig(), None, trainings=starter)
    async with ServeApp(models, [learning], keeper=learning.keeper, port=port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
