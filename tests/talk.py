"""Runs protocols through the real episode runner, with scripted models for the agents."""

from reinforge.multiagent.agents import PureTextWholeAgent
from reinforge.multiagent.builder import AgentsTrajectoryBuilder, AgentsTrajectoryBuilderConfig
from reinforge.multiagent.episode import ProtocolWorkflow
from reinforge.multiagent.protocol import AgentParameters
from reinforge.rollout.workflow import bind_workflow
from reinforge.types.evaluation import EvalInputItem
from tests.doubles import PolicyModel, ScriptedPolicy
from tests.episodes import make_runner, run_items


class Lines:
    """A script that replies with the next of its lines."""

    def __init__(self, *lines):
        self.lines = list(lines)

    def __call__(self, request):
        return self.lines.pop(0)


def example(answer="accept", **columns):
    row = {"id": "1", "question": "Is cell 3 red?", **columns}
    return EvalInputItem(id="1", input_obj=row["question"], expected_output_obj=answer, full_dataset_entry=row)


class Talk:
    """A protocol whose agents each have a scripted model.

    Args:
        handler: The protocol.
        scripts: Each agent's replies: lines, or a function of the request; a single function: all share one model.
        parameters: Of each agent; the role prompt is "I am <name>." unless given.
        penalty: Reward of an agent without a valid reply.
        workflow: Further arguments of the workflow.
    """

    def __init__(self, handler, scripts, parameters=None, penalty=-0.5, **workflow):
        self.handler, parameters = handler, parameters or {}
        shared = callable(scripts)
        scripts = {"shared": scripts} if shared else scripts
        given = {name: Lines(*script) if isinstance(script, list) else script for name, script in scripts.items()}
        self.models = {name: PolicyModel(ScriptedPolicy(script)) for name, script in given.items()}
        self.agents = {
            name: PureTextWholeAgent(
                name,
                AgentParameters(
                    **{"prompt": f"I am {name}.", "num_invalid_generation_retries": 2, **parameters.get(name, {})}
                ),
                llm="shared" if shared else name,
            )
            for name in handler.agent_names
        }
        self.workflow = ProtocolWorkflow(handler, self.agents, penalty, **workflow)

    async def run(self, phase="validate", item=None, seed=0, generations=1, epoch=0):
        """Returns the records of the episodes of one example."""
        workflow = bind_workflow(self.workflow, next(iter(self.models)))
        runner = make_runner(workflow, llms=self.models, seed=seed, concurrency=4)
        return await run_items(runner, [item or example()], phase, epoch, generations, reward=0.0)

    async def output(self, **arguments):
        """Returns the output of one episode; an episode without an output fails the test."""
        (record,) = await self.run(**arguments)
        assert record.item.output_obj is not None, record.reason
        return record.item.output_obj

    def prompts_of(self, name):
        """Returns the prompt of each request to an agent's model."""
        return [request.messages for request in self.models[name].policy.requests]


def format_messages(output):
    return [f"{m['agent']}@{m['channel']}: {m['text']}" for m in output["messages"]]


def user(*lines):
    return {"role": "user", "content": "\n".join(lines)}


def assistant(text):
    return {"role": "assistant", "content": text}


def build_groups(records):
    """Returns the groups that the trajectory builder `agents` makes of finished episodes."""
    builder = AgentsTrajectoryBuilder(AgentsTrajectoryBuilderConfig(), [])
    builder.policies = {call.llm for record in records for call in record.calls}
    builder.run_config = TARGETS
    return builder._group_scored([(record, 0.0) for record in records])


class _Targets:
    target_model, target_functions = None, ["<workflow>"]


TARGETS = _Targets()


def rewards(output):
    (branch,) = output["branches"]
    return branch["rewards"]
