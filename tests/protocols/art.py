"""ART adapters connected to the stand-in, and projects that train through it."""

from __future__ import annotations

from typing import Any

from tests.project import Project
from tests.protocols.art_service import ARTService
from tests.protocols.hosted import set_finetuning

FAST = {"poll_interval_s": 0.02, "timeout_s": 5.0, "ready_s": 5.0, "settle_s": 2.0, "max_retries": 4}


def describe_backend(service: ARTService, protocol: int, key: str = "${ART_KEY}") -> dict[str, Any]:
    """Returns the `backend` block that reaches the stand-in over one of the protocols."""
    model = {"name": "agent-1", "project": "games", "base_model": "tiny/base"}
    if protocol == 1:
        return {"ip": service.ip, "port": service.port, **model}
    return {"base_url": service.base_url, "api_key": key, **model}


def use_art_adapter(project: Project, service: ARTService, protocol: int, **settings: Any) -> Project:
    """Configures a project to train through ART, on answers that are mostly vowels."""
    adapter = {"_type": "openpipe_art_trainer_adapter", "backend": describe_backend(service, protocol), **FAST}
    project.settings["trainer_adapters"] = {"adapter": {**adapter, **settings}}
    project.settings["trajectory_builders"] = {
        "builder": {"_type": "openpipe_art_traj_builder", "num_generations": 4, "examples_per_epoch": 16}
    }
    project.settings["trainers"] = {"trainer": {"_type": "openpipe_art_trainer"}}
    set_finetuning(project, num_epochs=1, gate={"num_samples": 2})
    return project
