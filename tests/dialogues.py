"""Hand-written episodes of a protocol, and a trajectory builder that collects them."""

from reinforge.config.schema import FinetuneConfig
from reinforge.interfaces import EvaluationRunner
from reinforge.multiagent.builder import AgentsTrajectoryBuilder, AgentsTrajectoryBuilderConfig
from reinforge.types.episode import EpisodeKey, EpisodeRecord, Mark, ModelCall
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem, EvaluationReport, EvaluationRunOutput
from reinforge.types.request import ModelReply, ModelRequest, TokenLogprobs
from tests.doubles import ids_of

AGENTS = ("verifier", "prover")


def make_message(agent, text, path=(), round_=None):
    """One message; its round is the length of its path in a tree."""
    return {"agent": agent, "text": text, "path": list(path), "round": round_ if round_ is not None else len(path) - 1}


def make_branch(rewards, path=(), decision="accept", failed=None):
    """The result of one dialogue."""
    return {"path": list(path), "decision": decision, "terminated": False, "rewards": rewards, "failed": failed}


def make_episode(messages, branches, *, example="x", generation=0, epoch=0, truth="accept", score=1.0, worth=None):
    """A finished episode; an agent's prompt is its name, its earlier messages, and "Go on." after each.

    Args:
        worth: For a tree, the value of each message, in order; None: unknown.
    """
    calls, told = [], []
    for number, message in enumerate(messages):
        agent, path = message["agent"], message["path"]
        above = [m for m in told if m["agent"] == agent and m["path"] == path[: len(m["path"])]]
        asked = [{"role": "user", "content": f"{agent}!"}]
        for each in above:
            asked += [{"role": "assistant", "content": each["text"]}, {"role": "user", "content": "Go on."}]
        prompt = tuple(sum((ids_of(m["content"]) for m in asked), ()))
        ids = ids_of(message["text"])
        tokens = TokenLogprobs(prompt, ids, (-0.5,) * len(ids), epoch)
        reply = ModelReply({"role": "assistant", "content": message["text"]}, "stop", tokens, len(prompt), len(ids))
        call_id = f"{epoch}-{example}-{generation}-{number}"
        calls.append(ModelCall(call_id, "agent", "m", ModelRequest(asked), reply, (), 0.0, 1.0))
        told.append({"channel": "main", "shown": message["text"], "num_retries": 0, **message, "call_id": call_id})
    output = {
        "protocol": "nip",
        "question": f"question {example}",
        "truth": truth,
        "stances": {"prover": "accept"},
        "agents": {name: {"llm": "agent", "trained": True, "model_group": None} for name in AGENTS},
        "messages": told,
        "branches": branches,
        "num_invalid": 0,
    }
    item = EvalInputItem(
        id=example,
        input_obj=f"question {example}",
        expected_output_obj=truth,
        output_obj=output,
        full_dataset_entry={"id": example},
    )
    marks = [
        Mark(0, value, None, (), 0.0, call.call_id)
        for call, value in zip(calls, worth or [], strict=bool(worth))
        if value is not None
    ]
    return EpisodeRecord(
        EpisodeKey("collect", epoch, example, generation),
        item,
        calls=calls,
        marks=marks,
        scores={"reward": EvalOutputItem(id=example, score=score, reasoning=None)},
        reward=score,
    )


class RecordedEpisodes(EvaluationRunner):
    """A run with recorded episodes."""

    def __init__(self, records, earlier=None):
        self.records, self.earlier = records, earlier or {}

    async def run_eval(self) -> EvaluationRunOutput:
        raise NotImplementedError

    async def collect(self, keys):
        return self.records

    async def validate(self, split, epoch, phase="validate") -> EvaluationReport:
        raise NotImplementedError

    def example_ids(self, split):
        return list(dict.fromkeys(record.key.example_id for record in self.records))

    def journalled_episodes(self, epoch):
        return self.earlier[epoch]


async def collect_groups(
    records, *, epoch=0, earlier=None, workflow=None, policy=lambda: None, seed=0, algorithm=None, **config
):
    """Returns the trajectory builder and the collection that it makes of these episodes."""
    settings = AgentsTrajectoryBuilderConfig(**config)
    builder = AgentsTrajectoryBuilder(settings, ["agent"], workflow, policy)
    builder.evaluation = RecordedEpisodes(records, earlier)
    await builder.initialize(FinetuneConfig(reward_function={"name": "reward"}, seed=seed, algorithm=algorithm))
    await builder.start_run("r", {"epoch": epoch})
    return builder, await builder.finalize("r", {"epoch": epoch})
