"""Shared-model groups over each backend, and dialogues for them to learn from."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from reinforge.multiagent import (
    Dialogue,
    EmbeddedSharedModelGroup,
    ExperimentSettings,
    HyperParameters,
    Message,
    NestedArrayDict,
    OpenAISharedModelGroup,
    Problem,
    Step,
    agents_of,
    protocol_of,
)
from reinforge.multiagent.nip.rollouts import rollouts_of_dialogues
from tests.openai_service import OpenAIService

AGENTS = {"prover": {"prompt": "P $question"}, "verifier": {"prompt": "V $question"}}


def experiment(model: str, **changes: Any) -> HyperParameters:
    """A prover and a verifier who speak four rounds and share one model, with a low-rank adapter where it is ours.

    Args:
        model: Of both.
        changes: Fields of the experiment; of `agents`, those of each agent.
    """
    given = changes.pop("agents", {})
    agents = {
        name: {"model_name": model, "shared_model_group": "both", **AGENTS[name], **given.get(name, {})}
        for name in AGENTS
    }
    fields: dict[str, Any] = {"nip_protocol": {"max_message_rounds": 4}, "agents": agents, **changes}
    return HyperParameters("test", "pure_text_ei", "none.jsonl", **fields)


def dialogue(number: int, *, claim: str = "it is", decision: str = "accept", truth: str | None = "accept") -> Dialogue:
    """Round 0 the verifier asks, round 1 the prover claims, round 2 the verifier decides."""
    said = [("verifier", f"is it {number}"), ("prover", f"{claim} {number}"), ("verifier", decision)]
    messages = tuple(Message(round_, agent, "main", text, text) for round_, (agent, text) in enumerate(said))
    rewards = {"prover": float(decision == "accept"), "verifier": 1.0 if decision == truth else -1.0}
    problem = Problem(f"q{number}", truth, {"question": f"q{number}"})  # type: ignore[arg-type]
    stances = {"prover": "accept"}
    return Dialogue(problem, stances, messages, 3, Step(True, decision, rewards=rewards), rewards)  # type: ignore[arg-type]


def rollouts(hyper_params: HyperParameters, count: int = 12, **fields: Any) -> NestedArrayDict:
    """`count` dialogues as the reference's arrays."""
    return rollouts_of_dialogues([dialogue(number, **fields) for number in range(count)], protocol_of(hyper_params))


def replies(hyper_params: HyperParameters, agent: str, texts: list[str]) -> NestedArrayDict:
    """Single timesteps, batch size (timestep,): each as it stands once the agent has said a text in round 1 or 0."""
    handler, steps = protocol_of(hyper_params), []
    for number, text in enumerate(texts):
        whole, round_ = dialogue(number), int(agent == "prover")
        last = replace(whole.messages[round_], text=text, shown=text)
        steps.append(
            replace(whole, messages=(*whole.messages[:round_], last), round=round_ + 1, step=Step(), rewards={})
        )
    arrays = rollouts_of_dialogues(steps, handler)
    rounds = [int(agent == "prover")] * len(texts)
    return arrays[list(range(len(texts))), rounds]


class Backend:
    """Makes groups over one backend.

    Args:
        folder: Of the groups.
        model: The tiny model's folder.
        service: The stand-in.
    """

    name: str

    def __init__(self, folder: Path, model: Path, service: OpenAIService | None = None):
        self.folder, self.model, self.service = folder, str(model), service
        self.made: list[Any] = []

    def group(self, hyper_params: HyperParameters | None = None, *, run_id: str = "r", name: str = "both") -> Any:
        """A group; one of the same run and name goes on with what is in its folder."""
        params = hyper_params or self.experiment()
        settings = ExperimentSettings(run_id, groups_dir=self.folder, num_api_connection_errors=4)
        agents = [agent for agent in agents_of(params).values() if agent.model_group == name]
        group = self.make(params, settings, protocol_of(params), agents, name)
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
    other_model = "bundled:tic_tac_toe"

    def make(self, *arguments: Any) -> EmbeddedSharedModelGroup:
        batch = {"batch_size": 8}
        return EmbeddedSharedModelGroup(*arguments, finetuning={"device": "cpu", "policy": {"batch": batch}})

    def num_jobs(self, group: Any) -> int:
        return len(list(group.files.jobs.glob("*/model/manifest.json")))


class Hosted(Backend):
    name = "openai"

    def __init__(self, folder: Path, model: Path, service: OpenAIService | None = None):
        super().__init__(folder, model, service)
        self.model = "gpt-test"

    def make(self, *arguments: Any) -> OpenAISharedModelGroup:
        assert self.service is not None
        quick = {"poll_interval_s": 0.01, "timeout_s": 5.0, "ready_s": 5.0}
        return OpenAISharedModelGroup(
            *arguments, service={"base_url": self.service.url, "api_key": self.service.key, **quick}
        )

    def num_jobs(self, group: Any) -> int:
        assert self.service is not None
        return len(self.service.jobs)
