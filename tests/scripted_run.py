"""A whole run without torch: everything of ours around a policy that answers at once.

Its project is its folder: with the working directory, the source of this package, each run would hash all of it.
"""

from dataclasses import replace

from reinforge.config.loader import build_config
from reinforge.config.schema import TrainerAdapterConfig
from reinforge.registry import REGISTRY
from reinforge.trainer.options import RunOptions
from reinforge.trainer.run import run_async
from tests.doubles import RecordingAdapter, ScriptedPolicy


class ScriptedAdapterConfig(TrainerAdapterConfig, name="scripted"):
    """An adapter that takes every job and serves a policy that answers at once."""


def seeded(request):
    return f"answer {request.sampling.seed % 7}"


async def ask(item, llm, context):
    reply = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}])
    return reply.choices[0].message.content


def by_answer(output, expected):
    return float(output[-1])


class ScriptedRun:
    """Settings that may be changed, then `await run()`."""

    def __init__(self, folder, *, workflow=ask, reward=by_answer, script=seeded, count=20):
        self.folder, self.adapter, self.events = folder, RecordingAdapter(ScriptedPolicy(script)), []
        self.settings = {
            "llms": {"agent": {"_type": "policy"}},
            "workflow": {"_type": "python", "function": workflow},
            "eval": {
                "general": {
                    "dataset": {"_type": "rows", "rows": [{"id": i, "question": f"q{i}"} for i in range(count)]}
                },
                "evaluators": {"reward": {"_type": "python", "function": reward}},
            },
            "trajectory_builders": {"builder": {"_type": "group", "num_generations": 4}},
            "trainer_adapters": {"adapter": {"_type": "scripted"}},
            "trainers": {"trainer": {"_type": "openpipe_art_trainer"}},
            "finetuning": {
                "enabled": True,
                "trainer": "trainer",
                "trajectory_builder": "builder",
                "trainer_adapter": "adapter",
                "reward_function": {"name": "reward"},
                "num_epochs": 2,
                "output_dir": str(folder),
                "outcomes": {"retries": 0},
            },
        }

    def registry(self):
        """The components that there are, and its adapter."""
        registry = REGISTRY.child()

        async def scripted_adapter(config, builder):
            self.events.append("open")
            yield self.adapter
            self.events.append("closed")

        registry.add("trainer_adapter", ScriptedAdapterConfig, scripted_adapter)
        return registry

    async def run(self, **options):
        registry = self.registry()
        loaded = replace(build_config(self.settings, registry=registry), project_root=self.folder)
        return await run_async(loaded, RunOptions(run_name="r", **options), registry)
