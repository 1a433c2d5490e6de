"""Trainings on the chats of a store: when one starts and when not, on which rows, and what becomes of its model."""

import asyncio
import contextlib
import json
import os
import re
import signal
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from reinforge.cli import main
from reinforge.config.loader import load_config
from reinforge.errors import ConfigError, StorageError
from reinforge.evaluation.datasets import FileDataset, JsonlDatasetConfig
from reinforge.evaluation.splits import FIXED, SPLITS, split_examples
from reinforge.evaluation.statistics import Improvement
from reinforge.learning import training
from reinforge.learning.export import count_new
from reinforge.learning.store import STORE, read_chats
from reinforge.learning.training import TrainingStarter, open_training, read_train_config
from reinforge.registry import load_named
from reinforge.runs.summary import RunSummary
from reinforge.serving.version_folder import VersionFolder
from reinforge.tasks import projects
from tests.learning.learning import chat, learn, rate
from tests.serving.serving import wait_for

RUN = (Path(projects.__file__).parent / "logs" / "run.yml.tmpl").read_text()


@pytest.fixture
def versions(tmp_path):
    """A folder with one version, of what looks like a model to what only copies it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    folder = VersionFolder(tmp_path / "support")
    folder.add(tmp_path / "model", {})
    return folder


@pytest.fixture
def config(tmp_path):
    (tmp_path / "run.yml").write_text(RUN)
    (tmp_path / "learn.yml").write_text("train:\n  config: run.yml\n  share: 0.3\n  when: {rated: 2}\n")
    return read_train_config(tmp_path / "learn.yml")


async def rate_chats(client, *thumbs, **more):
    for number, thumb in enumerate(thumbs):
        await rate(client, id=(await chat(client, f"question {number} {thumb}", **more))["id"], thumb=thumb)


def read_rows(found):
    return [json.loads(line) for line in found.rows.read_text().splitlines()]


async def test_only_new_ratings_that_the_algorithm_can_use_count(tmp_path, versions, config):
    starter = TrainingStarter(tmp_path / "learn.yml", tmp_path, versions)
    async with learn(tmp_path) as (client, learning):
        await rate_chats(client, "up")
        await chat(client, "not rated")
        await rate(client, id=(await chat(client, "said"))["id"], comment="hm")
        twice = (await chat(client, "contradicted"))["id"]
        for source, thumb in (("user", "up"), ("agent", "down")):
            await rate(client, id=twice, thumb=thumb, source=source)
        assert (count_new(tmp_path / STORE, "kto"), starter.is_due()) == (1, False)
        await chat(client, "in a session", metadata={"session_id": "s"})
        await rate(client, session_id="s", thumb="down")
        assert (count_new(tmp_path / STORE, "kto"), starter.is_due()) == (2, True)
        versions.add(tmp_path / "model", {})
        versions.try_candidate(2)
        assert not starter.is_due(), "the candidate has not been decided on"
        versions.stop_candidate()
        learning.store.record_training("by hand", [(each.key, each.id) for each in read_chats(tmp_path / STORE)])
        assert not starter.is_due()
        await rate(client, session_id="s", thumb="up")
        assert not starter.is_due(), "a chat counts once"


async def test_chats_from_before_since_are_not_trained_on_and_the_file_is_read_again(tmp_path, versions, config):
    """The file changes while the server runs: what users said before the product changed no longer counts."""
    starter = TrainingStarter(tmp_path / "learn.yml", tmp_path, versions)
    async with learn(tmp_path) as (client, _):
        await rate_chats(client, "up", "down")
        assert starter.is_due()
        now = datetime.now(UTC).replace(tzinfo=None)
        text = (tmp_path / "learn.yml").read_text()
        (tmp_path / "learn.yml").write_text(f"{text}  since: {now:%Y-%m-%d %H:%M:%S.%f}\n")
        assert not starter.is_due()
        await rate_chats(client, "down", "down")
        assert starter.is_due()
        (tmp_path / "learn.yml").write_text("train: {confg: run.yml}")
        with pytest.raises(ConfigError, match="confg"):
            starter.is_due()
        assert starter.is_due(), "what was read before holds"
        changed = config.model_copy(update={"since": now})
        with open_training(changed, tmp_path, versions) as training:
            assert [row["label"] for row in read_rows(training)] == [False, False]


async def test_chats_are_trained_once_and_replayed_as_far_as_the_file_says(tmp_path, versions, config):
    async with learn(tmp_path) as (client, _):
        for number in range(20):
            await rate_chats(client, "up", "down", user=f"user {number}")
        with open_training(config, tmp_path, versions) as first:
            assert (first.data, len(read_rows(first))) == ("40 rows of rated chats, 40 of them new", 40)
            assert len({row["conversation"] for row in read_rows(first)}) == 20, "a user is in one split"
            with (
                pytest.raises(StorageError, match="another training on the chats in"),
                open_training(config, tmp_path, versions),
            ):
                pass
        assert not first.rows.exists()
        await rate_chats(client, "up")
        half = config.model_copy(update={"replay": 0.5})
        with open_training(half, tmp_path, versions) as second:
            rows = read_rows(second)
        assert (second.data.split(", ")[1], rows[-1]["messages"][0]["content"]) == ("1 of them new", "question 0 up")
        assert 4 <= len(rows) - 1 <= 36, "of 20 users about half, whose keys are random: 1 in 25,000 runs is outside"
        assert (len(rows) - 1) % 2 == 0, "users are replayed whole"
        none = config.model_copy(update={"replay": 0.0})
        with pytest.raises(ConfigError, match="no chat"), open_training(none, tmp_path, versions):
            pass
        found = (await client.delete("/v1/learn/users/user 3")).json()
        assert first.run_name in found["versions"]


def split_users(training, config, overrides):
    """Returns split -> users, as a run splits them."""
    loaded = load_config(config.config, overrides=overrides).config.finetuning
    items = FileDataset(JsonlDatasetConfig(file_path=training.rows), training.rows.parent).load()
    divide = load_named(FIXED) if loaded.splits.fixed else split_examples
    splits = divide(items, loaded.splits, loaded.seed)
    return {name: {item.full_dataset_entry["conversation"] for item in found} for name, found in splits.items()}


@pytest.mark.slow
async def test_held_out_users_are_the_same_in_all_trainings(tmp_path, versions, config):
    """40 users chat; after the first training they chat again, and so do 40 others. Mutation check: no fixed splits."""
    (tmp_path / "run.yml").write_text(RUN.replace("near_duplicates: group", "near_duplicates: allow"))
    fixed, free = [], []
    async with learn(tmp_path) as (client, _):
        for num_users, number in [(40, 1), (80, 2)]:
            for user in range(num_users):
                answer = await chat(client, f"{user} asks {number}", user=f"user {user}")
                await rate(client, id=answer["id"], thumb="up")
            with open_training(config, tmp_path, versions) as training:
                fixed.append(split_users(training, config, training.overrides))
                free.append(split_users(training, config, []))
    first, second = fixed
    assert sum(map(len, first.values())) == 40
    assert sum(map(len, second.values())) == 80
    for name in SPLITS:
        assert first[name] < second[name]
    assert not first["train"] & (second["select"] | second["confirm"])
    assert free[0]["train"] & free[1]["confirm"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (None, r"train.regression.file: .*pinned.jsonl does not exist\n.*write rows like those"),
        (
            '{"messages": [{"role": "user", "content": "hi"}]}\n{"messages": ',
            r"pinned.jsonl:2:14: invalid JSON.*\n.*fix: correct the file",
        ),
        ("", "pinned.jsonl.*no rows|pinned.jsonl.*empty"),
    ],
)
def test_a_wrong_regression_set_is_refused_before_anything_else(tmp_path, versions, rows, words):
    (tmp_path / "run.yml").write_text(RUN)
    (tmp_path / "learn.yml").write_text("train: {config: run.yml, regression: {file: pinned.jsonl}}\n")
    if rows is not None:
        (tmp_path / "pinned.jsonl").write_text(rows)
    found = CliRunner().invoke(main, ["learn", "run", str(versions.folder), "--learn", str(tmp_path / "learn.yml")])
    assert found.exit_code == 2
    assert re.search(words, found.output), found.output


def test_the_regression_set_and_fixed_splits_reach_the_run(tmp_path, config):
    (tmp_path / "pinned.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    (tmp_path / "learn.yml").write_text("train: {config: run.yml, regression: {file: pinned.jsonl, margin: 0.1}}\n")
    found = read_train_config(tmp_path / "learn.yml")
    loaded = load_config(found.config, overrides=found.list_overrides()).config.finetuning
    assert (loaded.gate.regression, loaded.gate.regression_margin) == (tmp_path / "pinned.jsonl", 0.1)
    assert (loaded.splits.fixed, loaded.splits.group_key, loaded.splits.near_duplicates) == (
        True,
        "conversation",
        "group",
    )


@pytest.mark.slow
async def test_a_person_s_chats_are_taken_out_by_training_an_earlier_version_on_the_others(tmp_path, versions, config):
    """2 and 3 are promoted; 2 was trained on Ann's chats, and 3, which begins with 2, after these were deleted."""

    def promote(trained):
        number = versions.add(tmp_path / "model", {"run": str(tmp_path / "runs" / trained.run_name)})
        versions.promote(number)
        return number

    async with learn(tmp_path) as (client, learning):
        for user in ("ann", "ben", "cleo"):
            await rate_chats(client, "up", "down", user=user)
        await rate_chats(client, "up", user="ann", metadata={"session_id": "shared"})
        await rate_chats(client, "up", user="ben", metadata={"session_id": "shared"})
        with open_training(config, tmp_path, versions) as second:
            assert len(read_rows(second)) == 8
        assert promote(second) == 2
        assert (await client.delete("/v1/learn/users/ann")).json()["versions"] == [second.run_name]
        await rate_chats(client, "up", user="dan")
        with open_training(config, tmp_path, versions) as third:
            assert (third.base, len(read_rows(third))) == (2, 5)
        assert promote(third) == 3
        versions.add(tmp_path / "model", {})  # never promoted
        with open_training(config, tmp_path, versions, without="ann") as fourth:
            assert (fourth.base, fourth.model, len(read_rows(fourth))) == (1, versions.path(1), 5)
            assert fourth.data == "5 rows of rated chats, 0 of them new, without one user"
        with open_training(config, tmp_path, versions, without="dan") as fifth:  # was in the third alone, and now here
            assert (fifth.base, len(read_rows(fifth))) == (2, 4)
        with (
            pytest.raises(ConfigError, match="no request of the user .eve. is kept"),
            open_training(config, tmp_path, versions, without="eve"),
        ):
            pass
        learn_by_hand = [(each.key, each.id) for each in read_chats(tmp_path / STORE)]
        learning.store.record_training("support@1", learn_by_hand)
        with (
            pytest.raises(
                ConfigError, match=r"every version of support that was promoted is trained on .*\n.*--add MODEL"
            ),
            open_training(config, tmp_path, versions, without="ben"),
        ):
            pass


async def test_a_training_that_the_server_starts_needs_what_the_server_has_seen(tmp_path, versions, config):
    async with learn(tmp_path) as (client, _):
        await rate_chats(client, "up", "down")
        with open_training(config, tmp_path, versions, rated=2):
            pass
        with (
            pytest.raises(ConfigError, match="--rated: 0 rated chats are new, fewer than 2"),
            open_training(config, tmp_path, versions, rated=2),
        ):
            pass


def summarize(tmp_path, **more):
    """Returns the summary of a run with a model."""
    folder = tmp_path / "runs" / "support-1"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text('{"better": 1}')
    (folder / "run.sqlite").touch()
    return RunSummary(run_id="support-1", status="completed", folder=folder, reason="above 0", **more)


async def test_a_promoted_model_becomes_the_candidate_unless_something_changed(tmp_path, versions, config):
    async with learn(tmp_path) as (client, _):
        await rate_chats(client, "up", "down")
        with open_training(config, tmp_path, versions) as found:
            assert found.model == versions.path(1)
            assert found.add_candidate(RunSummary("a", "completed", tmp_path, promoted=False)) == [
                "There is no new version of support, since the model was not promoted."
            ]
            summary = summarize(
                tmp_path, promoted=True, improvement=Improvement(0.2, 0.1, 0.3, 0.001, 80, "Student's t")
            )
            [said] = found.add_candidate(summary)
            assert said == "Version 2 of support is the candidate, for 30% of the conversations."
            state, event = versions.read(), versions.read_log()[-1]
            assert (state.promoted, state.candidate, state.share) == (1, 2, 0.3)
            assert (event.by, event.reason, event.evidence["run"]) == (training.BY, "above 0", str(summary.folder))
            assert event.evidence["improvement"]["ci_low"] == 0.1
            assert versions.read_version(2).data == "2 rows of rated chats, 2 of them new"
            [said] = found.add_candidate(summary)
            assert said.startswith("Version 3 of support is added, and gets no share")
        with (
            pytest.raises(ConfigError, match=r"version 2 of support is the candidate.*\n.*--stop_candidate"),
            open_training(config, tmp_path, versions),
        ):
            pass


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("record: {}\n", r"learn.yml has no `train:` block\n.*config: run.yml"),
        ("train: {config: other.yml}\n", r"train.config: .*other.yml does not exist\n.*--template logs"),
        ("train: {}\n", "train.config"),
        ("train: {config: run.yml, when: {rated: 0}}\n", "train.when.rated"),
        ("train: {config: run.yml, share: 0}\n", "train.share"),
        ("train: {config: run.yml, when: {rated: 9, every: 1 day}}\n", "train.when.every"),
        ("train: {config: run.yml, regression: {file: a.jsonl, margin: 0}}\n", "train.regression.margin"),
        (
            "train: {config: counts.yml}\n",
            r"counts.yml:\d+:\d+ finetuning.splits.confirm: 75 is a count\n.*from 0 to 1",
        ),
    ],
)
def test_a_wrong_train_block_is_refused(tmp_path, versions, text, words):
    (tmp_path / "run.yml").write_text(RUN)
    (tmp_path / "counts.yml").write_text(RUN.replace("  splits:\n", "  splits:\n    confirm: 75\n"))
    (tmp_path / "learn.yml").write_text(text)
    found = CliRunner().invoke(main, ["learn", "run", str(versions.folder), "--learn", str(tmp_path / "learn.yml")])
    assert found.exit_code == 2
    assert re.search(words, found.output), found.output


@pytest.mark.slow
async def test_a_training_waits_for_time_and_ratings_and_a_clock_set_back_blocks_none(
    tmp_path, versions, config, monkeypatch
):
    now = time.time()
    (tmp_path / "learn.yml").write_text("train: {config: run.yml, when: {rated: 2, every: 24h}}\n")
    starter = TrainingStarter(tmp_path / "learn.yml", tmp_path, versions)

    def is_due_after(hours):
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda: now + hours * 3600)
            return starter.is_due()

    async with learn(tmp_path) as (client, _):
        await rate_chats(client, "up", "down")
        assert starter.is_due(), "there was no training"
        with open_training(config, tmp_path, versions):
            pass
        assert [is_due_after(hours) for hours in (1, 25, 1e6, -1e4)] == [False] * 4, "nothing is new"
        await rate_chats(client, "up")
        assert not is_due_after(25), "one rating"
        await rate_chats(client, "up")
        assert [is_due_after(hours) for hours in (0.1, 23.9, 24.1, 1e6)] == [False, False, True, True]
        assert is_due_after(-1e4), "begun in the future"
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda: now - 1e8)
            with open_training(config, tmp_path, versions):
                pass
        await rate_chats(client, "down", "down")
        assert is_due_after(0), "the newest training counts, not the one with the latest time"


async def test_a_training_is_started_by_a_request_unless_one_runs_or_a_candidate_is_compared(
    tmp_path, versions, config, caplog
):
    (tmp_path / "learn.yml").write_text("train: {config: run.yml}\n")
    starter = TrainingStarter(tmp_path / "learn.yml", tmp_path, versions)
    async with learn(tmp_path, token="secret", trainings=starter) as (client, _):

        async def start(**headers):
            found = await client.post("/v1/learn/run", headers=headers)
            return found.status_code, found.json()

        await rate_chats(client, "up")
        assert not starter.is_due(), "only people start trainings"
        assert (await start(authorization="Bearer other"))[0] == 401
        with open_training(config, tmp_path, versions):  # by hand
            status, said = await start()
            assert (status, said["error"]["code"]) == (409, "training_not_started")
        versions.add(tmp_path / "model", {})
        versions.try_candidate(2)
        status, said = await start()
        assert (status, said["error"]["message"].partition(",")[0]) == (409, "version 2 of support is the candidate")
        versions.stop_candidate()
        answers = await asyncio.gather(start(), start())
        [(_, begun)] = [each for each in answers if each[0] == 202]
        [(_, refused)] = [each for each in answers if each[0] == 409]
        assert begun == {
            "object": "learn.run",
            "model": "support",
            "process": begun["process"],
            "log": str(tmp_path / training.LOG),
        }
        assert "a training of support runs already, see" in refused["error"]["message"]
        os.kill(begun["process"], 0)
    with pytest.raises(ProcessLookupError):  # the server ends it
        os.kill(begun["process"], 0)
    async with learn(tmp_path) as (client, _):
        assert (await client.post("/v1/learn/run")).status_code == 404


def test_a_server_without_a_folder_of_versions_cannot_train(tmp_path, config, tiny_model_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(main, ["serve", str(tiny_model_dir), "--learn", "learn.yml", "--port", "0"])
    assert found.exit_code == 2
    assert "train.when: needs one folder of versions as the MODEL" in found.output


def test_without_a_store_or_with_a_wrong_run_nothing_is_trained(tmp_path, versions, config):
    with pytest.raises(ConfigError, match=f"has no {STORE}"), open_training(config, tmp_path, versions):
        pass
    (tmp_path / "run.yml").write_text("finetuning: {enabled: true}\n")
    with pytest.raises(ConfigError, match="finetuning.trainer"), open_training(config, tmp_path, versions):
        pass


@contextlib.asynccontextmanager
async def follow(starter, monkeypatch):
    """Lets a starter look at the store all the time."""
    monkeypatch.setattr(training, "CHECK_S", 0.01)
    task = asyncio.create_task(starter.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.slow
async def test_a_training_that_fails_or_is_killed_is_not_repeated_before_there_are_more_ratings(
    tmp_path, versions, config, monkeypatch, caplog
):
    """The run is refused, since run.yml names functions that do not exist."""
    async with learn(tmp_path) as (client, _):
        await rate_chats(client, "up")
        starter = TrainingStarter(tmp_path / "learn.yml", tmp_path, versions)
        async with follow(starter, monkeypatch):
            monkeypatch.setattr(time, "time", lambda: 1e10)  # clocks that jump start nothing
            await asyncio.sleep(0.3)
            monkeypatch.undo()
            monkeypatch.setattr(training, "CHECK_S", 0.01)
            assert not (tmp_path / training.LOG).exists()
            await rate_chats(client, "down")
            await asyncio.to_thread(wait_until, lambda: "exited with code" in caplog.text)
            assert "the next one starts after 2 more ratings" in caplog.text
            await asyncio.sleep(0.3)
            assert caplog.text.count("is trained on its chats") == 1
            await rate_chats(client, "up", "up")
            await asyncio.to_thread(wait_until, lambda: caplog.text.count("is trained on its chats") == 2)
            pid = int(caplog.text.rpartition("process ")[2].partition(",")[0])
            os.kill(pid, signal.SIGKILL)
            await wait_for(lambda: "was killed by SIGKILL" in caplog.text)
            await asyncio.sleep(0.3)
            assert caplog.text.count("is trained on its chats") == 2
            assert (await chat(client, "hi"))["choices"][0]["message"]["content"] == "yes"
    assert versions.read().candidate is None


async def test_a_training_that_fails_while_chats_are_counted_is_not_repeated(
    tmp_path, versions, config, monkeypatch, caplog
):
    async with learn(tmp_path) as (client, _):
        await rate_chats(client, "up", "down")
        starter = TrainingStarter(tmp_path / "learn.yml", tmp_path, versions)
        pid, count = await starter.start(), training.TrainConfig.count_new

        def count_while_it_fails(self, database):
            num_rated = count(self, database)
            if threading.current_thread() is looking:
                os.kill(pid, signal.SIGKILL)
                wait_until(lambda: "was killed by SIGKILL" in caplog.text)
            return num_rated

        monkeypatch.setattr(training.TrainConfig, "count_new", count_while_it_fails)
        found = []
        looking = threading.Thread(target=lambda: found.append(starter.is_due()))
        looking.start()
        await asyncio.to_thread(looking.join)
        assert found == [False]
        os.kill(pid, signal.SIGKILL)
        await wait_for(lambda: "was killed by SIGKILL" in caplog.text)
        assert not starter.is_due(), "two ratings, with which a training has failed"


def wait_until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
