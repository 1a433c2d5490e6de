import importlib
import sys

from pydantic import BaseModel
from verifiers import v1 as vf


class TasksetConfig(BaseModel):
    id: str
    turns: int = 1
    task: None = None


class EnvConfig(BaseModel):
    taskset: TasksetConfig
    agent: vf.AgentConfig = vf.AgentConfig()
    user: vf.AgentConfig | None = None


class Env(vf.Env):
    def load_harness(self, name):
        module = sys.modules[name]
        (harness,) = module.__all__
        return getattr(module, harness)()


def resolve_env_config(settings):
    return EnvConfig.model_validate(settings)


def default_harness_id(name):
    return "bash"


def load_environment(config):
    module = importlib.import_module(config.taskset.id)
    return Env(config, getattr(module, *module.__all__)(config.taskset))
