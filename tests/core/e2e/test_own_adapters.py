"""A user's own trainer adapter for a remote model, with and without log-probs, through whole runs.

One around the engine is in `test_user_components.py`.
"""

import json
import re
from pathlib import Path

import aiohttp
import pytest
import yaml

from reinforge.config.loader import build_config
from reinforge.finetuning import (
    TrainerAdapter,
    TrainerAdapterConfig,
    TrainingJobRef,
    TrainingJobStatus,
    register_trainer_adapter,
)
from reinforge.trainer.builders.group import find_remote_entries
from tests.core.e2e.test_user_components import EngineAdapter  # noqa: F401  registers test_engine_adapter
from tests.guide import register  # noqa: F401  registers the guide's components
from tests.journal_rows import read_rows
from tests.project import call
from tests.protocols.remote_service import WORDS, RemoteService


class RemoteAdapterConfig(TrainerAdapterConfig, name="test_remote_adapter"):
    endpoint: str
    needs_logprobs: bool = False


class RemoteAdapter(TrainerAdapter):
    """Sends rows of messages with an advantage, and the log-probs if the server wants them; it serves no policy."""

    async def call(self, method, path, **body):
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, self.adapter_config.endpoint + path, **body) as response,
        ):
            response.raise_for_status()
            return await response.json()

    async def is_healthy(self):
        return (await self.call("GET", "/health"))["ok"]

    async def submit(self, trajectories):
        rows = [self.row(each, siblings) for siblings in trajectories.trajectories for each in siblings]
        job = await self.call("POST", "/jobs", json={"rows": rows})
        return TrainingJobRef(run_id=trajectories.run_id, backend="remote", metadata=job)

    def row(self, trajectory, siblings):
        mean = sum(each.reward for each in siblings) / len(siblings)
        messages = [{"role": item.role.value, "content": item.content} for item in trajectory.episode]
        row = {"messages": messages, "advantage": trajectory.reward - mean}
        if self.adapter_config.needs_logprobs:
            [turn] = trajectory.turns
            row["logprobs"] = turn.logprobs.model_dump() if hasattr(turn.logprobs, "model_dump") else turn.logprobs
            row["old"] = [each.logprob for each in turn.logprobs.content]
        return row

    async def status(self, ref):
        await self.call("GET", f"/jobs/{ref.metadata['id']}")
        return TrainingJobStatus(run_id=ref.run_id, backend="remote", status="completed")

    async def wait_until_complete(self, ref, poll_interval=10.0):
        return await self.status(ref)


@register_trainer_adapter(config_type=RemoteAdapterConfig)
async def remote_adapter(config, builder):
    yield RemoteAdapter(config)


@pytest.fixture
def remote():
    with RemoteService() as service:
        yield service


def use_remote(project, service, needs_logprobs=False, **llm):
    """Configures a project as the published examples are: an `openai` entry, an adapter of the user's own."""
    endpoint = {"_type": "openai", "model_name": "my-model", "base_url": service.chat_url, **llm}
    project.settings["llms"] = {"my_model": endpoint}
    adapter = {"_type": "test_remote_adapter", "endpoint": service.url, "needs_logprobs": needs_logprobs}
    project.set("trainer_adapters.adapter", adapter)
    kept = ("enabled", "trainer", "trajectory_builder", "trainer_adapter", "reward_function", "output_dir")
    project.settings["finetuning"] = {key: project.settings["finetuning"][key] for key in kept}
    project.set("finetuning.num_epochs", 2).set("finetuning.curriculum_learning", {"min_reward_diff": 0.01})
    project.set("trajectory_builders.builder", {"_type": "openpipe_art_traj_builder", "num_generations": 4})
    return project.set("trainers.trainer", {"_type": "openpipe_art_trainer"})


def test_a_remote_model_without_logprobs_trains(project, remote):
    result = use_remote(project, remote).finetune(code=0)
    summary = project.summary
    assert summary["final"]["mean"] > summary["baseline"]["mean"] + 0.2
    assert len(remote.submitted) == 2
    assert summary["policy_versions"] == [], "no policy server, so no version is known"
    assert all("logprobs" not in body for body in remote.chats)
    settings = result.output
    assert "optimizer" not in settings
    assert "my_model (my-model), trained by RemoteAdapter" in settings


@pytest.mark.slow
@pytest.mark.parametrize("returns_ids", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_remote_model_with_logprobs_trains_on_what_its_endpoint_returned(project, remote, returns_ids):
    remote.returns_ids = returns_ids
    project = use_remote(project, remote, needs_logprobs=True, logprobs=True, top_logprobs=2)
    project.finetune(code=0)
    assert project.summary["final"]["mean"] > project.summary["baseline"]["mean"] + 0.2
    assert all((body["logprobs"], body["top_logprobs"]) == (True, 2) for body in remote.chats)
    for row in (row for rows in remote.submitted.values() for row in rows):
        word = row["messages"][-1]["content"]
        [token] = row["logprobs"]["content"]
        assert (token["token"], token["logprob"]) == (word, row["old"][0])
        assert len(token["top_logprobs"]) == 2
        assert row["logprobs"].get("token_ids") == ([WORDS.index(word)] if returns_ids else None)
    [[data]] = read_rows(project.run, "SELECT data FROM episodes WHERE phase = 'collect' LIMIT 1")
    assert json.loads(data)["calls"][0]["endpoint_logprobs"]["content"][0]["token"] in WORDS, "the journal keeps them"
    call("runs", "verify", "runs/r", code=0)


@pytest.mark.parametrize("logprobs", [pytest.param(None, marks=pytest.mark.slow), True])
def test_the_guides_builder_trains_a_remote_model(project, remote, logprobs):
    """The builder knows nothing of ours: it copies log-probs, or has none to copy."""
    use_remote(project, remote, **({"logprobs": True} if logprobs else {}))
    project.set("trajectory_builders.builder", {"_type": "my_traj_builder", "num_generations": 4})
    project.finetune(code=0)
    assert project.summary["final"]["mean"] > project.summary["baseline"]["mean"] + 0.2


@pytest.mark.slow
def test_an_adapter_with_a_policy_that_the_agent_never_calls_is_refused_before_collecting(project, remote):
    use_remote(project, remote).set("trainer_adapters.adapter", {"_type": "test_engine_adapter"})
    project.set("finetuning.policy", {"model": str(project.model)})
    result = project.finetune(code=2)
    assert "no entry is `_type: policy`, so the agent never calls the model that is trained" in result.output
    assert remote.chats == []


def check(project):
    project.write_files()
    return call("check", "run.yml")


def test_check_names_what_a_remote_model_would_ignore(project, remote):
    use_remote(project, remote).set("finetuning.sampling", {"temperature": 0.7, "top_k": 5})
    result = check(project)
    assert result.exit_code == 2, result.output
    for name in ("temperature", "top_k"):
        assert f"finetuning.sampling.{name}: has no effect on a model that the trainer adapter does not serve" in (
            result.output
        )
    assert "finetuning.sampling.top_p" not in result.output


def test_check_refuses_a_policy_that_the_adapter_does_not_serve(project, remote):
    use_remote(project, remote).settings["llms"] = {"my_model": {"_type": "policy"}}
    result = check(project)
    assert result.exit_code == 2, result.output
    assert "llms.my_model._type: the trainer adapter RemoteAdapter serves no policy" in result.output


def test_check_refuses_a_target_model_that_is_not_trained(project):
    project.settings["llms"]["judge"] = {"_type": "openai", "model_name": "j", "base_url": "http://127.0.0.1:9/v1"}
    project.set("finetuning.target_model", "judge").set("workflow.llm", "agent")
    result = check(project)
    assert result.exit_code == 2, result.output
    assert 'finetuning.target_model: "judge" is not trained' in result.output


@pytest.mark.parametrize(
    ("finetuning", "workflow", "trained"),
    [
        ({}, {"llm": "planner"}, ["planner", "critic"]),
        ({"target_model": "judge"}, {"llm": "planner"}, ["judge"]),
        ({"target_model": "big"}, {"llm": "planner"}, ["planner", "critic"]),
        ({}, {}, []),
    ],
)
def test_which_remote_entries_are_trained(finetuning, workflow, trained):
    models = {"planner": "big", "critic": "big", "judge": "small"}
    llms = {
        name: {"_type": "openai", "model_name": m, "base_url": "http://127.0.0.1:9/v1"} for name, m in models.items()
    }
    agent = {"_type": "python", "function": "task:agent", **workflow}
    config = build_config({"llms": llms, "workflow": agent, "finetuning": finetuning}).config
    assert find_remote_entries(config) == trained


@pytest.mark.slow
def test_siblings_that_are_equal_are_blamed_on_what_decides_it(project, remote):
    remote.is_greedy = True
    result = use_remote(project, remote).finetune(code=3)
    assert "100% of the groups have identical siblings" in result.output
    assert "finetuning.sampling has no effect on a remote model" in result.output


@pytest.mark.slow
def test_groups_of_one_are_accepted_where_the_backend_groups(project, remote):
    use_remote(project, remote).set("trajectory_builders.builder.num_generations", 1)
    project.set("finetuning.num_epochs", 1)
    project.finetune(code=0)
    [rows] = remote.submitted.values()
    assert len(rows) == 38, "no group is dropped for want of siblings"


@pytest.mark.slow
def test_the_pages_settings_for_a_training_server_of_your_own(project, remote):
    """The YAML block of that section of docs/remote.md, with the stand-in's URL."""
    page = (Path(__file__).parents[3] / "docs" / "remote.md").read_text(encoding="utf-8")
    section = page.split("## Your own training server\n")[1]
    written = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", section, re.S)[0])
    use_remote(project, remote, needs_logprobs=True).settings["llms"] = written["llms"]
    project.set("llms.agent.base_url", remote.chat_url).set("finetuning.num_epochs", 1)
    project.settings["finetuning"] |= written["finetuning"]
    project.finetune(code=0)
    assert len(remote.submitted) == 1


@pytest.mark.slow
def test_a_run_of_a_remote_model_resumes_without_training_twice(project, remote):
    use_remote(project, remote).set("finetuning.limits", {"max_tokens": 50})
    project.shrink(3).finetune(code=5)
    assert len(remote.submitted) == 2
    unlimited = ("-o", "finetuning.limits.max_tokens", "100000")
    result = call("finetune", "--resume", "runs/r", *unlimited, code=0)
    assert len(remote.submitted) == 3, "an epoch was left"
    assert "resuming after epoch 1 from the weights on the backend" in result.output
    again = next(line for line in result.output.splitlines() if line.startswith("epoch 1 "))
    assert " groups kept" in again
    assert not again.endswith((" s", "min")), "nobody timed an epoch that began before"


def test_a_smoke_test_says_what_it_did(project, remote):
    result = use_remote(project, remote).finetune("--smoke", code=0)
    assert "trained, validated" in result.output, "nothing is known to be published"


def test_groups_of_one_are_refused_where_the_backend_compares_siblings(project):
    """An ART server trains nothing on them, and the embedded engine neither."""
    project.set("trajectory_builders.builder.num_generations", 1)
    assert "num_generations: with 1, each group has one episode" in check(project).output
    backend = {"ip": "127.0.0.1", "port": 9, "name": "my-model"}
    project.set("trainer_adapters.adapter", {"_type": "openpipe_art_trainer_adapter", "backend": backend})
    project.settings["llms"] = {"m": {"_type": "openai", "model_name": "my-model", "base_url": "http://127.0.0.1:9/v1"}}
    (project.folder / "run.yml").unlink()
    assert "num_generations: with 1, each group has one episode" in check(project).output
