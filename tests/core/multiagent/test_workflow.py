"""A protocol from a file: the workflow that is built, and everything that its validation rejects."""

import json

import pytest
import yaml
from click.testing import CliRunner

from reinforge.cli import main
from reinforge.config.loader import load_config
from reinforge.errors import ConfigError
from reinforge.multiagent.protocol import ProtocolConfig, ProtocolHandler
from reinforge.multiagent.registration import register_protocol
from reinforge.registry import REGISTRY
from reinforge.trainer.setup.components import ComponentBuilder
from tests.project import settings as project_settings
from tests.talk import Talk, example

NIP = {"_type": "nip", "agents": {"prover": {"prompt": "Argue $stance: $question"}, "verifier": {}}}


def merged(settings, change):
    for key, value in change.items():
        if isinstance(value, dict) and isinstance(settings.get(key), dict) and "_type" not in value:
            merged(settings[key], value)
        else:
            settings[key] = value
    return settings


def write(folder, change=None, rows=None):
    settings = project_settings("nowhere")
    settings["workflow"] = json.loads(json.dumps(NIP))
    settings["eval"]["evaluators"] = {"accuracy": {"_type": "verifier_accuracy"}}
    settings["trajectory_builders"]["builder"] = {"_type": "agents"}
    settings["finetuning"]["reward_function"]["name"] = "accuracy"
    rows = rows or [
        {"id": str(i), "question": f"Is {i} even?", "answer": ("accept", "reject")[i % 2]} for i in range(40)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = folder / "run.yml"
    file.write_text(yaml.safe_dump(merged(settings, change or {}), sort_keys=False))
    return file


async def bound(folder, change=None, registry=REGISTRY):
    async with ComponentBuilder(load_config(write(folder, change), registry=registry), registry) as builder:
        return (await builder.get_workflow()).function


async def refused(folder, change):
    with pytest.raises(ConfigError) as caught:
        await bound(folder, change)
    return caught.value.problems


async def test_agents_have_their_configured_settings(tmp_path):
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "verifier.txt").write_text("Décide: $question")
    workflow = await bound(tmp_path, {
        "llms": {"frozen": {"_type": "policy"}},
        "workflow": {"agents": {
            "prover": {"llm": "agent", "max_tokens_per_message": 7},
            "verifier": {"llm": "frozen", "freeze_agent": True, "prompt_file": "prompts/verifier.txt"},
        }},
    })  # fmt: skip
    assert workflow.__qualname__ == "NIP: prover, verifier (frozen)"
    prover, verifier = workflow.agents.values()
    assert (prover.name, prover.llm, prover.is_trainable) == ("prover", "agent", True)
    assert prover.sampling_arguments() == {"max_tokens": 7}
    assert (verifier.llm, verifier.is_trainable, verifier.parameters.prompt) == ("frozen", False, "Décide: $question")


async def test_all_problems_of_the_agents_are_reported_at_once(tmp_path):
    problems = await refused(tmp_path, {
        "llms": {"second": {"_type": "policy"}},
        "workflow": {
            "agents": {"prover": {"llm": "agnt"}, "verifier": {"prompt_file": "no.txt", "llm": "agent"}, "judge": {}},
        },
    })  # fmt: skip
    found = {problem.path: problem.message for problem in problems}
    assert found["workflow.agents.judge"] == "the protocol nip has no agent judge"
    assert found["workflow.agents.prover.llm"] == "'agnt' is not an entry of llms"
    assert found["workflow.agents.judge.llm"] == "the agent names no entry of llms"
    assert found["workflow.agents.verifier.prompt_file"].startswith("file not found: ")
    assert all(problem.location.startswith("run.yml") or "run.yml:" in problem.location for problem in problems)


async def test_an_agent_that_is_missing(tmp_path):
    settings = {"_type": "debate", "agents": {"verifier": {}}}
    (problem,) = await refused(tmp_path, {"workflow": settings})
    assert problem.message == "the protocol debate needs the agents prover_accept, prover_reject"


@pytest.mark.parametrize(
    ("settings", "path", "message"),
    [
        ({"max_message_rounds": 1}, "workflow.max_message_rounds", "prover never speaks in 1 round"),
        ({"max_message_rounds": 2, "min_message_rounds": 2}, "workflow.min_message_rounds",
         "verifier has no turn in rounds 2 to 2, so it can never decide"),
        ({"max_message_rounds": 1, "verifier_first": False}, "workflow.max_message_rounds",
         "verifier never speaks in 1 round"),
    ],
)  # fmt: skip
async def test_agents_that_never_speak_or_decide_are_refused(tmp_path, settings, path, message):
    (problem,) = await refused(tmp_path, {"workflow": settings})
    assert (problem.path, problem.message) == (path, message)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_message_rounds": 9}, "min_message_rounds is 9 but max_message_rounds is 8"),
        ({"decision_words": {"yes": "accept"}}, "decision_words has no word for reject"),
        ({"decision_words": {"Yes": "accept", "no": "reject"}}, "'Yes' must be a lower-case word"),
        ({"agents": {"prover": {"promt": "x"}}}, "promt"),
        ({"agents": {"prover": {"prompt": "x", "prompt_file": "y"}}}, "remove one of them"),
    ],
)
def test_contradictory_settings_are_refused(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, {"workflow": settings}))


async def test_a_run_without_a_trained_agent_is_refused(tmp_path):
    frozen = {"freeze_agent": True}
    (problem,) = await refused(tmp_path, {"workflow": {"agents": {"prover": frozen, "verifier": frozen}}})
    assert "no agent can be trained" in problem.message


async def test_a_builder_for_single_agents_is_refused(tmp_path):
    (problem,) = await refused(tmp_path, {"trajectory_builders": {"builder": {"_type": "group"}}})
    assert problem.path == "trajectory_builders.builder._type"
    assert "use `agents`" in problem.fix


MERLIN = {"_type": "merlin_arthur", "agents": {"merlin": {}, "morgana": {}, "verifier": {}}}


@pytest.mark.parametrize(
    ("workflow", "answers", "message"),
    [
        ({"agents": {"prover": {"prompt": "$qestion"}}}, {}, "workflow.agents.prover.prompt: the prompt uses $qestion, "
         "but example 1 has no such column, did you mean \"question\"?"),
        ({"agents": {"prover": {"prompt": "it costs $ 5"}}}, {}, "write $$ for a dollar sign"),
        ({}, {7: "42"}, "the expected output of 7 is '42'; write accept or reject"),
        (MERLIN, dict.fromkeys(range(40)), "has no right decision, which this protocol needs"),
    ],
)  # fmt: skip
def test_prompts_and_rows_that_do_not_fit_are_refused(tmp_path, workflow, answers, message):
    rows = [{"id": str(i), "question": f"q{i}", "answer": answers.get(i, "accept")} for i in range(40)]
    result = CliRunner().invoke(main, ["check", str(write(tmp_path, {"workflow": workflow}, rows))])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


class LoudConfig(ProtocolConfig, name="loud"):
    """A protocol that is wrong in every way."""


class Loud(ProtocolHandler):
    provers = ("prover",)
    verifiers = ("verifier",)

    def channels(self):
        return {"main": ["verifier", "ghost"]}

    def turns(self):
        return [[("prover", "main"), ("ghost", "main")], [("verifier", "aside")]]


async def test_a_protocol_that_contradicts_itself(tmp_path):
    registry = REGISTRY.child()

    async def loud(config, builder):
        from reinforge.multiagent.registration import build_protocol_workflow

        yield await build_protocol_workflow(Loud(config), builder)

    registry.add("workflow", LoudConfig, loud)
    settings = {"workflow": {"_type": "loud", "agents": {"prover": {}, "verifier": {}}}}
    with pytest.raises(ConfigError) as caught:
        await bound(tmp_path, settings, registry)
    assert [problem.message for problem in caught.value.problems] == [
        "the channel main lists ghost, which is not an agent of the protocol",
        "prover speaks in the channel main but does not see it",
        "ghost has a turn but is not an agent of the protocol",
        "verifier speaks in the unknown channel aside; the channels are main",
    ]


def test_a_protocol_that_cannot_read_a_row():
    class Columns(Loud):
        def parse_problem(self, item):
            return item.full_dataset_entry["color"]

    talk = Talk(Columns(LoudConfig(agents={})), {})
    problems = talk.workflow.example_problems([example(), example()])
    assert [problem.path for problem in problems] == ["eval.general.dataset"]
    assert problems[0].message.startswith("example 1: KeyError: 'color' (test_workflow.py:")


def test_protocols_are_listed_as_such():
    told = CliRunner().invoke(main, ["components", "workflow"])
    names = {line.split()[0] for line in told.output.splitlines() if line.endswith("(a protocol)")}
    assert names >= {
        "nip", "adp", "debate", "mnip", "solo_verifier", "merlin_arthur", "multi_channel", "roles", "cell_debate"
    }  # fmt: skip
    assert "python" not in names
    assert "agents.NAME.prompt = $question" in CliRunner().invoke(main, ["components", "nip"]).output
    listed = json.loads(CliRunner().invoke(main, ["components", "workflow", "--json"]).output)["components"]
    assert {c["name"] for c in listed if c["is_protocol"]} == names


def test_a_name_is_registered_once():
    class AgainConfig(ProtocolConfig, name="nip"):
        """Another protocol of that name."""

    with pytest.raises(ConfigError, match='workflow "nip" is already registered by reinforge.multiagent.protocols.nip'):

        @register_protocol(AgainConfig)
        class Again(Loud):
            pass
