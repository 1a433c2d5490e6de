"""Shared-model groups over each backend, and dialogues to train them on."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from reinforge.multiagent import (
    Dialogue,
    DialogueProblem,
    EmbeddedSharedModelGroup,
    ExperimentSettings,
    HyperParameters,
    Message,
    NestedArrayDict,
    OpenAISharedModelGroup,
    Step,
    build_agents,
    build_protocol,
)
from reinforge.multiagent.nip.rollouts import encode_dialogues
from tests.protocols.openai_service import OpenAIService

AGENTS = {"prover": {"prompt": "P $question"}, "verifier": {"prompt": "V $question"}}


def experiment(model: str, **changes: Any) -> HyperParameters:
    """A prover and a verifier that share one model and speak for four rounds.

    Args:
        model: The model of both.
        changes: Fields of the experiment; under `agents`, fields of each agent.
    """
    given = changes.pop("agents", {})
    agents = {
        name: {"model_name": model, "shared_model_group": "both", **AGENTS[name], **given.get(name, {})}
        for name in AGENTS
    }
    fields: dict[str, Any] = {"nip_protocol": {"max_message_rounds": 4}, "agents": agents, **changes}
    return HyperParameters("test", "pure_text_ei", "none.jsonl", **fields)


def dialogue(number: int, *, claim: str = "it is", decision: str = "accept", truth: str | None = "accept") -> Dialogue:
    """The verifier asks in round 0, the prover claims in round 1, the verifier decides in round 2."""
    lines = [("verifier", f"is it {number}"), ("prover", f"{claim} {number}"), ("verifier", decision)]
    messages = tuple(Message(round_, agent, "main", text, text) for round_, (agent, text) in enumerate(lines))
    rewards = {"prover": float(decision == "accept"), "verifier": 1.0 if decision == truth else -1.0}
    problem = DialogueProblem(f"q{number}", truth, {"question": f"q{number}"})  # type: ignore[arg-type]
    stances = {"prover": "accept"}
    return Dialogue(problem, stances, messages, 3, Step(True, decision, rewards=rewards), rewards)  # type: ignore[arg-type]


def rollouts(hyper_params: HyperParameters, count: int = 12, **fields: Any) -> NestedArrayDict:
    """`count` dialogues as nested arrays."""
    return encode_dialogues([dialogue(number, **fields) for number in range(count)], build_protocol(hyper_params))


def replies(hyper_params: HyperParameters, agent: str, texts: list[str]) -> NestedArrayDict:
    """Single timesteps, batch size (timestep,): the state after the agent's message in round 0 or 1."""
    handler, steps = build_protocol(hyper_params), []
    for number, text in enumerate(texts):
        whole, round_ = dialogue(number), int(agent == "prover")
        last = replace(whole.messages[round_], text=text, shown=text)
        steps.append(
            replace(whole, messages=(*whole.messages[:round_], last), round=round_ + 1, step=Step(), rewards={})
        )
    arrays = encode_dialogues(steps, handler)
    rounds = [int(agent == "prover")] * len(texts)
    return arrays[list(range(len(texts))), rounds]


class Backend:
    """Makes groups over one backend.

    Args:
        folder: Folder of the groups.
        model: Folder of the tiny model.
        service: The stand-in for OpenAI's service.
    """

    name: str
    changed_settings: ClassVar[dict[str, Any]]
    same_settings: ClassVar[dict[str, Any]]

    def __init__(self, folder: Path, model: Path, service: OpenAIService | None = None):
        self.folder, self.model, self.service = folder, str(model), service
        self.made: list[Any] = []
        self.settings: dict[str, Any] = {}

    def group(self, hyper_params: HyperParameters | None = None, *, run_id: str = "r", name: str = "both") -> Any:
        """A group; a second one with the same run and name resumes from the folder."""
        params = hyper_params or self.experiment()
        settings = ExperimentSettings(run_id, groups_dir=self.folder, num_api_connection_errors=4)
        agents = [agent for agent in build_agents(params).values() if agent.model_group == name]
        group = self.make(params, settings, build_protocol(params), agents, name)
        self.made.append(group)
        return group

    def experiment(self, **changes: Any) -> HyperParameters:
        return experiment(self.model, **changes)

    def make(self, *arguments: Any) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        for group in self.made:
            asyncio.run(group.close())


class Embedded(Backend):
    name = "embedded"
    changed_settings: ClassVar[dict[str, Any]] = {"policy": {"batch": {"batch_size": 4}}}
    same_settings: ClassVar[dict[str, Any]] = {"device": "auto"}
    other_model = "bundled:tic_tac_toe"

    def make(self, *arguments: Any) -> EmbeddedSharedModelGroup:
        batch = {"batch_size": 8}
        settings = {"device": "cpu", "policy": {"batch": batch}, **self.settings}
        return EmbeddedSharedModelGroup(*arguments, finetuning=settings)

    def num_jobs(self, group: Any) -> int:
        return len(list(group.files.jobs.glob("*/model/manifest.json")))


class Hosted(Backend):
    name = "openai"
    changed_settings: ClassVar[dict[str, Any]] = {"learning_rate_multiplier": 2.0}
    same_settings: ClassVar[dict[str, Any]] = {"timeout_s": 6.0}

    def __init__(self, folder: Path, model: Path, service: OpenAIService | None = None):
        super().__init__(folder, model, service)
        self.model = "gpt-test"

    def make(self, *arguments: Any) -> OpenAISharedModelGroup:
        assert self.service is not None
        quick = {"poll_interval_s": 0.01, "timeout_s": 5.0, "ready_s": 5.0}
        return OpenAISharedModelGroup(
            *arguments, service={"base_url": self.service.url, "api_key": self.service.key, **quick, **self.settings}
        )

    def num_jobs(self, group: Any) -> int:
        assert self.service is not None
        return len(self.service.jobs)
