"""Transcripts to the letter."""

import json

import pytest
import yaml

from reinforge.config.finetuning_blocks import TranscriptsConfig
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.transcripts import format_transcripts, read_transcripts, write_transcripts
from reinforge.types.trajectory import Outcome
from tests.dialogues import make_branch, make_episode, make_message
from tests.project import call

FLAT = """\
phase: collect
epoch: 0
num_episodes: 1
num_shown: 1
transcripts:
- episode: collect/0/0/x/0
  protocol: nip
  outcome: ok
  reward: 1.0
  question: question x
  truth: accept
  stances: {prover: accept}
  dialogue:
  - round: 0
    channel: main
    agent: verifier
    text: |-
      Is it red?
      Look at cell 3.
  - round: 1
    channel: main
    agent: prover
    text: 'cell 3: red'
    shown: 'cell 3: red (checked)'
    num_retries: 2
  - round: 2
    channel: main
    agent: verifier
    text: accept
  decision: accept
  rewards: {verifier: 1.0, prover: 1.0}
"""

TREE = """\
- episode: collect/0/0/x/0
  protocol: nip
  outcome: ok
  reward: 0.5
  question: question x
  truth: accept
  stances: {prover: accept}
  branches:
  - said:
    - round: 0
      channel: main
      agent: verifier
      text: why
      worth: 0.5
    branches:
    - said:
      - round: 1
        channel: main
        agent: prover
        text: since
        worth: 1.0
      decision: accept
      rewards: {verifier: 1.0, prover: 1.0}
    - said:
      - round: 1
        channel: main
        agent: prover
        text: so
        worth: 0.0
      decision: reject
      rewards: {verifier: 0.0, prover: 0.0}
  - said:
    - round: 0
      channel: main
      agent: verifier
      text: accept
      worth: -1.0
    decision: null
    failed: 'verifier: an empty message'
    rewards: {verifier: -1.0}
"""


def flat(**more):
    messages = [
        make_message("verifier", "Is it red?\nLook at cell 3.", round_=0),
        {**make_message("prover", "cell 3: red", round_=1), "shown": "cell 3: red (checked)", "num_retries": 2},
        make_message("verifier", "accept", round_=2),
    ]
    return make_episode(messages, [make_branch({"verifier": 1.0, "prover": 1.0})], **more)


def tree():
    messages = [
        make_message("verifier", "why", [0]),
        make_message("verifier", "accept", [1]),
        make_message("prover", "since", [0, 0]),
        make_message("prover", "so", [0, 1]),
    ]
    branches = [
        make_branch({"verifier": 1.0, "prover": 1.0}, [0, 0]),
        make_branch({"verifier": 0.0, "prover": 0.0}, [0, 1], decision="reject"),
        make_branch({"verifier": -1.0}, [1], decision=None, failed=["verifier", "an empty message"]),
    ]
    return make_episode(messages, branches, score=0.5, worth=[0.5, -1.0, 1.0, 0.0])


@pytest.fixture
def journal(tmp_path):
    made = RunJournal(tmp_path / "runs" / "r")
    yield made
    made.close()


def held(journal, *records):
    for record in records:
        journal.record_episode(record)
    journal.flush()
    return journal.folder


def test_a_dialogue_to_the_letter(journal):
    path = write_transcripts(held(journal, flat()), "COLLECT", 0, TranscriptsConfig())
    assert path == journal.folder / "transcripts" / "epoch-0000.yml"
    assert path.read_text() == FLAT


def test_a_tree_to_the_letter(journal):
    path = write_transcripts(held(journal, tree()), "COLLECT", 0, TranscriptsConfig())
    assert path.read_text().split("transcripts:\n")[1] == TREE


def test_turns_that_are_not_trained_do_not_branch(journal):
    """The first round is said once, and so is what follows each branch: a branch may say several things."""
    messages = [
        make_message("prover", "open", round_=0),
        make_message("verifier", "a", [0], 1),
        make_message("verifier", "b", [1], 1),
        make_message("prover", "to a", [0], 2),
        make_message("prover", "to b", [1], 2),
    ]
    team = {**make_branch({"verifier": 1.0}, [0], decision=None), "answer": "42"}
    record = make_episode(messages, [team, make_branch({"verifier": 0.0}, [1])], worth=[None, 1.0, 0.0, None, None])
    path = write_transcripts(held(journal, record), "COLLECT", 0, TranscriptsConfig())
    [found] = yaml.safe_load(path.read_text())["transcripts"]
    assert [message["text"] for message in found["said"]] == ["open"]
    assert [[message["text"] for message in branch["said"]] for branch in found["branches"]] == [
        ["a", "to a"],
        ["b", "to b"],
    ]
    assert [branch.get("answer", branch.get("decision")) for branch in found["branches"]] == ["42", "accept"]


def test_json_holds_the_same(journal):
    folder = held(journal, flat())
    as_json = write_transcripts(folder, "COLLECT", 0, TranscriptsConfig(format="json"))
    assert as_json.name == "epoch-0000.json"
    assert json.loads(as_json.read_text()) == yaml.safe_load(FLAT)


def test_a_file_holds_at_most_max_episodes(journal):
    folder = held(journal, *(flat(generation=n) for n in range(5)))
    found = yaml.safe_load(write_transcripts(folder, "COLLECT", 0, TranscriptsConfig(max_episodes=2)).read_text())
    assert (found["num_episodes"], found["num_shown"]) == (5, 2)
    assert [each["episode"] for each in found["transcripts"]] == ["collect/0/0/x/0", "collect/0/0/x/1"]


def test_each_stage_has_its_own_file(journal):
    records = [flat() for _ in range(3)]
    for record, phase, epoch in zip(records, ("validate", "validate", "confirm_tuned"), (-1, 4, 3), strict=True):
        record.key = type(record.key)(phase, epoch, "x")
    folder, config = held(journal, *records), TranscriptsConfig()
    assert write_transcripts(folder, "BASELINE", None, config).name == "baseline.yml"
    assert write_transcripts(folder, "VALIDATE", 4, config).name == "validation-0004.yml"
    assert write_transcripts(folder, "CONFIRM_TUNED", None, config).name == "confirm_tuned.yml"
    assert write_transcripts(folder, "CONFIRM_BASE", None, config) is None, "there is no such episode"


def test_episodes_of_other_agents_have_none(journal):
    other, silent = flat(), flat(generation=1)
    other.item = other.item.copy_with_updates(output_obj={"branches": ["oak", "elm"]})
    silent.item, silent.outcome = silent.item.copy_with_updates(output_obj=None), Outcome.CONTEXT_OVERFLOW
    folder = held(journal, other, silent)
    assert write_transcripts(folder, "COLLECT", 0, TranscriptsConfig()) is None
    assert not (folder / "transcripts").exists()
    found = read_transcripts(held(journal, flat(generation=2)), "collect")
    assert (found["num_episodes"], found["num_shown"]) == (3, 1)


def test_the_command_prints_what_the_journal_holds(journal):
    folder = held(journal, flat(), flat(epoch=1))
    printed = call("runs", "transcripts", str(folder), "--epoch", "0")
    assert (printed.exit_code, printed.output) == (0, FLAT)
    as_json = call("runs", "transcripts", str(folder), "--limit", "1", "--format", "json")
    assert json.loads(as_json.output)["num_episodes"] == 2
    nothing = call("runs", "transcripts", str(folder), "--phase", "confirm_base", code=2)
    assert "has 0 episodes of phase confirm_base, but none is a dialogue" in nothing.output


@pytest.mark.parametrize("format_", ["yaml", "json"])
def test_a_transcript_controls_no_terminal_and_reads_back_as_it_was_said(format_):
    said = "\x1b]0;t\x07\x9b2J \u202eback\nsecond line é 日本"
    text = format_transcripts({"transcripts": [{"text": said, "\x1b[0m": 1}]}, format_)
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(text)
    (found,) = yaml.safe_load(text)["transcripts"]
    assert found == {"text": said, "\x1b[0m": 1}
