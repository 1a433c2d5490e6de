"""Trains a tiny model behind a framework's agent, and checks token by token what was trained.

Each example is one way to the model: the episode's client in this process or the gateway, streamed or not. The model's
weights are random, so a grammar decides when it calls a tool; which of several words it writes is up to the weights.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from reinforge.algorithms.sft import SFT, SFTConfig
from reinforge.config.loader import build_config
from reinforge.dialects.tool_calls import parse_reply, prepare_request
from reinforge.registry import REGISTRY
from reinforge.rollout.models.policy_llm import PolicyLLM, PolicyLLMConfig
from reinforge.runs.progress import SilentProgress
from reinforge.tasks.shop.starter import CHAT_TEMPLATE
from reinforge.trainer.options import RunOptions
from reinforge.trainer.run import run_async
from reinforge.types.request import Grammar, TokenLogprobs
from tests.clients.connection import Connection
from tests.clients.tools import RESULT
from tests.journal_rows import read_rows
from tests.models import make_tiny_model

ARTICLE, ANSWER = "(lamp|chair|table)", "(yes|no|maybe)"
WAYS = ("in process", "in process, streamed", "gateway", "gateway, streamed")
NUM_GENERATIONS = 2


class SteeredLLMConfig(PolicyLLMConfig, name="policy"):
    """The policy under a grammar."""


class WatchedSFTConfig(SFTConfig, name="watched_sft"):
    """SFT whose samples the test keeps."""


class SteeredLLM(PolicyLLM):
    """Samples from the policy under a grammar, and keeps what was sampled."""

    def __init__(self, find: Any, choose: Callable[[Any], str], sampled: list[TokenLogprobs]):
        super().__init__(find)
        self.choose, self.sampled = choose, sampled

    async def sample(self, request: Any) -> Any:
        server = self.server
        grammar = Grammar("regex", self.choose(request))
        request = replace(prepare_request(request, server.chat_template), grammar=grammar)
        reply = await server.sample(request)
        self.sampled.append(reply.tokens)
        return parse_reply(reply, request, server.chat_template)


def choose_pattern(request: Any) -> str:
    """Returns what the model writes: a call of the first tool in the first turn, and an answer after that.

    A tool that the request names is called in any turn.
    """
    functions = {tool["function"]["name"]: tool["function"] for tool in request.tools or ()}
    is_first = not any(message["role"] == "assistant" for message in request.messages)
    named = [name for name in functions if name == request.tool_choice]
    name = next((name for name in named or functions if named or (name == "final_answer") != is_first), None)
    if name is None or not (named or is_first or name == "final_answer"):
        return ANSWER
    (parameter,) = functions[name]["parameters"]["properties"]
    value = ARTICLE if parameter == "item" else ANSWER
    return rf'<tool_call>\{{"name": "{name}", "arguments": \{{"{parameter}": "{value}"\}}\}}</tool_call>'


class WatchedSFT(SFT):
    """SFT that keeps its samples, by episode."""

    def __init__(self, config: WatchedSFTConfig, trained: dict[str, list[Any]]):
        super().__init__(config)
        self.trained = trained

    def build_samples(self, groups: Any) -> list[Any]:
        samples = super().build_samples(groups)
        episodes = [trajectory.episode_id for group in groups for trajectory in group.trajectories]
        for sample in samples:
            self.trained.setdefault(episodes[sample.trajectory_index], []).append(sample)
        return samples


@dataclass
class Training:
    """A run of two epochs over an agent, and what was sampled and trained in it.

    Attributes:
        folder: Where its model and its run are written.
        workflow: The settings of the agent.
        ways: Ids of the examples.
        choose: Returns the pattern of the reply to a request.
        max_model_len: Tokens of its longest sequence.
        num_samples: Samples that each episode makes if earlier replies keep the tokens that were sampled; None: not
            checked.
        sampled: Every reply of the model.
        trained: The samples of the algorithm, by episode.
    """

    folder: Path
    workflow: dict[str, Any]
    ways: tuple[str, ...] = WAYS
    choose: Callable[[Any], str] = choose_pattern
    max_model_len: int = 16384
    num_samples: int | None = None
    sampled: list[TokenLogprobs] = field(default_factory=list)
    trained: dict[str, list[Any]] = field(default_factory=dict)

    def run(self) -> None:
        """Runs and checks it."""
        model = make_tiny_model(self.folder / "model", max_position_embeddings=self.max_model_len)
        (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        registry, settings = self._build_registry(), self._build_settings(model)
        loaded, options = build_config(settings, registry=registry), RunOptions(run_name="r", progress=SilentProgress())
        summary = asyncio.run(run_async(loaded, options, registry))
        updates = [version.num_updates for version in summary.policy_versions]
        assert updates == [0] + [1] * settings["finetuning"]["num_epochs"], "an update follows each epoch"
        self.check()

    def _build_registry(self) -> Any:
        registry = REGISTRY.child()

        async def steered(config: Any, builder: Any) -> Any:
            yield SteeredLLM(builder.policy, self.choose, self.sampled)

        async def watched(config: Any, builder: Any) -> Any:
            yield WatchedSFT(config, self.trained)

        registry.add("llm", SteeredLLMConfig, steered)
        registry.add("algorithm", WatchedSFTConfig, watched)
        return registry

    def _build_settings(self, model: Path) -> dict[str, Any]:
        history = "template" if self.num_samples is None else "splice"
        rows = [{"id": way, "question": "How much is it?", "answer": "", "split": "train"} for way in self.ways]
        others = [{**rows[0], "id": split, "question": f"{split}?", "split": split} for split in ("select", "confirm")]
        return {
            "llms": {"agent": {"_type": "policy"}},
            "workflow": self.workflow,
            "eval": {
                "general": {"max_concurrency": 4, "dataset": {"_type": "rows", "rows": rows + others}},
                "evaluators": {"reward": {"_type": "python", "function": lambda output, expected: 1.0}},
            },
            "trajectory_builders": {"builder": {"_type": "group", "num_generations": NUM_GENERATIONS}},
            "trainer_adapters": {"adapter": {"_type": "local"}},
            "trainers": {"trainer": {"_type": "epoch"}},
            "finetuning": {
                "enabled": True,
                "trainer": "trainer",
                "trajectory_builder": "builder",
                "trainer_adapter": "adapter",
                "reward_function": {"name": "reward"},
                "num_epochs": 2,
                "output_dir": str(self.folder / "runs"),
                "outcomes": {"retries": 0},
                "splits": {"key": "split"},
                "gate": {"allow_no_verdict": True},
                "algorithm": {"_type": "watched_sft"},
                "policy": {"model": str(model), "history": history, "optimizer": {"learning_rate": 1e-3}},
            },
        }

    def check(self) -> None:
        """Checks that no episode had a refused call, and the tokens of every collected one.

        Raises:
            AssertionError: Something else was trained than what was sampled.
        """
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.folder / "model")
        rows = read_rows(self.folder / "runs" / "r", "SELECT key, epoch, example_id, data FROM episodes")
        episodes = [(key, epoch, way, json.loads(data)) for key, epoch, way, data in rows]
        for _, _, way, episode in episodes:  # one refused request is enough for another outcome
            assert episode["outcome"] == "ok", f"{way}: {episode['outcome']}: {episode['reason']}"
        collected = [each for each in episodes if each[-1]["phase"] == "collect"]
        assert len(collected) == 2 * NUM_GENERATIONS * len(self.ways)
        for key, epoch, way, episode in collected:
            calls = episode["calls"]
            assert {call["policy_version"] for call in calls} == {epoch}, "the new version serves the next episodes"
            assert self.count_tool_turns(calls) >= 1, f"{way}: no turn with a tool: {calls}"
            self.check_tokens(key, calls, tokenizer)

    @staticmethod
    def count_tool_turns(calls: list[Any]) -> int:
        """Returns how many turns called a tool whose result is in a later prompt."""
        called = [index for index, call in enumerate(calls) if "lookup" in str(call["reply"]).lower()]
        return sum(any(RESULT in str(later["messages"]) for later in calls[index + 1 :]) for index in called)

    def check_tokens(self, key: str, calls: list[Any], tokenizer: Any) -> None:
        """Checks that the episode's samples train each sampled token once, and nothing else."""
        sampled = [(tokens.prompt_token_ids, tokens.token_ids, tokens.policy_version) for tokens in self.sampled]
        samples = self.trained[key]
        assert len(samples) == (self.num_samples or len(samples)), f"{len(samples)} samples of {len(calls)} calls"
        turns = sorted({int(turn) for sample in samples for turn in sample.turn_ids} - {-1})
        assert len(turns) == len(calls), "each call is one turn"
        trained = 0
        for turn, call in zip(turns, calls, strict=True):
            prompt, ids = tuple(call["prompt_token_ids"]), tuple(call["token_ids"])
            assert (prompt, ids, call["policy_version"]) in sampled, "the journal has what was sampled"
            (sample,) = [sample for sample in samples if (sample.turn_ids == turn).any()]
            places = np.flatnonzero(sample.turn_ids == turn)
            assert places.tolist() == [*range(len(prompt), len(prompt) + len(ids))]
            assert tuple(sample.token_ids[: places[0]].tolist()) == prompt
            assert tuple(sample.token_ids[places].tolist()) == ids
            assert sample.loss_mask[places].all(), "each sampled token is trained"
            assert set(sample.policy_versions[places]) == {call["policy_version"]}
            trained += len(ids)
        assert sum(sample.num_trained for sample in samples) == trained, "nothing else is trained"
        for sample in samples:
            said = tokenizer.decode(sample.token_ids[sample.loss_mask])
            assert not re.search(r"coins|How much", said), f"words of others are trained: {said}"
        assert any(RESULT in tokenizer.decode(sample.token_ids) for sample in samples), "they are context"


def build_workflow(answer: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the workflow of `answer(question, connection, stream=...)`; the example's id chooses the way."""
    if inspect.iscoroutinefunction(answer):

        async def run_async_agent(item: Any, llm: Any, context: Any) -> Any:
            stream = item.id.endswith("streamed")
            if not item.id.startswith("gateway"):
                return await answer(item.input_obj, Connection.in_process(context), stream=stream)
            async with context.gateway() as access:
                return await answer(item.input_obj, Connection(access.base_url, access.api_key), stream=stream)

        return run_async_agent

    def run_agent(item: Any, llm: Any, context: Any) -> Any:
        stream = item.id.endswith("streamed")
        with connect(item, context) as connection:
            return answer(item.input_obj, connection, stream=stream)

    return run_agent


@contextmanager
def connect(item: Any, context: Any) -> Iterator[Connection]:
    """Yields the way to the model that an example names."""
    if not item.id.startswith("gateway"):
        yield Connection.in_process(context)
        return
    with context.gateway() as access:
        yield Connection(access.base_url, access.api_key)
