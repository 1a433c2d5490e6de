"""Training data of a group's jobs, from rollouts."""

from dataclasses import replace

import pytest

from reinforge.errors import TrajectoryError
from reinforge.multiagent import build_agents, build_protocol
from reinforge.multiagent.nip.rollouts import encode_dialogues
from reinforge.multiagent.nip.training_data import PreferenceArguments, TrainingData
from tests.groups import dialogue, experiment

PARAMS = experiment("m")
HANDLER, AGENTS = build_protocol(PARAMS), build_agents(PARAMS)
DATA = TrainingData("both", HANDLER, AGENTS, AGENTS, dict.fromkeys(AGENTS, 1.0))


def test_a_dialogue_whose_verifier_said_nothing_costs_that_dialogue():
    whole = dialogue(1, decision="reject")
    silent = replace(whole, messages=tuple(m for m in whole.messages if m.agent == "prover"))
    rollouts = encode_dialogues([silent, whole], HANDLER)
    [[trajectory]] = DATA.build_supervised({}, {"verifier": rollouts})
    assert trajectory.episode_id == "verifier/truth/1"
    assert [turn.content for turn in trajectory.turns] == ["is it 1", "accept"]
    assert len(DATA.build_supervised({"verifier": rollouts}, {})) == 1
    unknown = encode_dialogues([dialogue(1, truth=None)], HANDLER)
    with pytest.raises(TrajectoryError, match="verifier/0: y is unknown"):
        DATA.build_supervised({}, {"verifier": unknown})


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (("p", "n", (), None, None), ("p", "n", None, None)),
        (("p", "n", ("x",), None, None), ("p", "n", "x", None)),
        (("p", "n", (), "x", "t"), ("p", "n", "x", "t")),
        (("t", "p", ({},), "x", None), ("p", {}, "x", "t")),
        (("t", "p", ({}, "x"), None, None), ("p", {}, "x", "t")),
    ],
)
def test_the_orders_in_which_preferences_are_passed(call, expected):
    given = PreferenceArguments.from_call(*call)
    assert (given.preferred, given.rejected, given.job_name, given.timesteps) == expected
