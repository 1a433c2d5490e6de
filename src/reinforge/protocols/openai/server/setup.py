"""Makes the fine-tuning part of a server from the command line's options."""

from __future__ import annotations

from dataclasses import replace

from reinforge.protocols.openai.server.api import FineTuningApi, FineTuningSettings
from reinforge.protocols.openai.server.runner import JobSettings
from reinforge.serving.base_models import TrainingHost, find_bases

FOLDER = "fine_tuning"
"""The folder of the API's data, in the server's."""


async def make_fine_tuning(host: TrainingHost) -> FineTuningApi:
    """Returns the part of the server that fine-tunes the models on its command line.

    Raises:
        ConfigError: A model cannot be trained.
        StorageError: Another server works on the folder.
    """
    options = host.options
    bases = await find_bases(options)
    jobs = JobSettings(max_running=options.max_jobs, device=options.device, allow_python=options.allow_python)
    if options.max_tokens is not None:
        jobs = replace(jobs, max_reply_tokens=options.max_tokens)
    folder = options.data_dir.absolute() / FOLDER
    return FineTuningApi(host.models, bases, host.loader, FineTuningSettings(folder, jobs))
