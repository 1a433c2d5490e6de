"""The record of fine-tuning jobs: which state may follow which, what survives a restart, and requests sent twice."""

import threading
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from reinforge.errors import StorageError
from reinforge.protocols.openai.server import file_store
from reinforge.protocols.openai.server import store as store_module
from reinforge.protocols.openai.server.file_store import UnknownObject
from reinforge.protocols.openai.server.records import (
    TRANSITIONS,
    FileRecord,
    FineTuningJob,
    JobCheckpoint,
    JobError,
    JobState,
    TunedModel,
)
from reinforge.protocols.openai.server.store import IllegalTransition, JobStore, make_event
from reinforge.serving.routes import make_id
from tests.fault.sizes import scaled

NUM_SEQUENCES = scaled(2000)
METHOD = {"type": "supervised", "supervised": {}}


def make_job(**fields):
    return FineTuningJob(make_id("ftjob"), 1, "base", "file-1", METHOD, seed=1, **fields)


@pytest.fixture
def store(tmp_path):
    store = JobStore(tmp_path / "jobs.sqlite")
    yield store
    store.close()


def reopen(store):
    store.close()
    return JobStore(store.path)


def test_a_job_is_read_back_whole_after_a_restart(store):
    job = make_job(suffix="s", metadata={"a": "b"}, validation_file="file-2")
    store.create_job(job, "d")
    store.transition(job.id, JobState.QUEUED, "queued", hyperparameters={"n_epochs": 3})
    store.transition(job.id, JobState.FAILED, "it failed", error=JobError("c", "m", "p"))
    found = reopen(store).find_job(job.id)
    assert (found.state, found.error, found.hyperparameters) == (
        JobState.FAILED, JobError("c", "m", "p"), {"n_epochs": 3},
    )  # fmt: skip
    assert found.finished_at is not None
    changed = {"state": job.state, "error": None, "hyperparameters": {}, "finished_at": None}
    assert replace(found, **changed) == job


def test_the_first_of_two_that_race_wins(store):
    """A job is cancelled while its model is being published, or the other way round."""
    job = make_job()
    store.create_job(job, "d")
    for state in (JobState.QUEUED, JobState.RUNNING):
        store.transition(job.id, state, "")
    barrier, ended = threading.Barrier(2), []

    def change(state):
        barrier.wait()
        try:
            ended.append(store.transition(job.id, state, "", only_from=None).state)
        except IllegalTransition as error:
            ended.append((state, error.job.state))

    threads = [threading.Thread(target=change, args=(each,)) for each in (JobState.CANCELLED, JobState.SUCCEEDED)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [won] = [each for each in ended if isinstance(each, JobState)]
    [(lost, seen)] = [each for each in ended if isinstance(each, tuple)]
    assert {won, lost} == {JobState.CANCELLED, JobState.SUCCEEDED}
    assert seen is won
    assert store.find_job(job.id).state is won


def test_a_state_and_its_models_are_recorded_together_or_not_at_all(store):
    job = make_job()
    store.create_job(job, "d")
    for state in (JobState.QUEUED, JobState.RUNNING, JobState.CANCELLED):
        store.transition(job.id, state, "")
    results = FileRecord("file-9", 1, 1, "r.csv", "fine-tune-results", "0")
    made = {
        "models": [TunedModel("ft:x", "base", "f")],
        "checkpoints": [JobCheckpoint("c-1", 1, 3, "ft:x:ckpt-step-3", {})],
        "results": results,
    }
    with pytest.raises(IllegalTransition):
        store.transition(job.id, JobState.SUCCEEDED, "", **made)
    assert store.list_models() == []
    assert store.list_checkpoints(job.id, None, 10) == ([], False)
    with pytest.raises(UnknownObject):
        store.find_file("file-9")


def test_a_retry_after_ten_minutes_is_a_job_of_its_own(store, monkeypatch):
    first = store.create_job(make_job(), "body")
    now = file_store.time.time()
    monkeypatch.setattr(file_store.time, "time", lambda: now + file_store.RETRY_S + 1)
    assert store.create_job(make_job(), "body", is_retry=True).id != first.id


def test_an_event_with_the_same_id_is_recorded_once(store):
    job = store.create_job(make_job(), "d")
    for _ in range(2):
        store.add_events(job.id, [make_event(job.id, "step-0", "Step 1", data={"step": 1})])
    assert [event.message for event in store.list_events(job.id, None, 10)[0]] == [
        "Step 1", f"Created fine-tuning job: {job.id}",
    ]  # fmt: skip


def test_a_newer_format_is_refused(store):
    store._database.execute("PRAGMA user_version = 99")
    with pytest.raises(StorageError, match="has format 99"):
        reopen(store)


class Jobs(RuleBasedStateMachine):
    """Any sequence of what clients, the runner and restarts do, each also delivered twice, against a model."""

    jobs = Bundle("jobs")

    @initialize()
    def open_store(self):
        import tempfile
        from pathlib import Path

        self.folder = tempfile.TemporaryDirectory()
        self.store = JobStore(Path(self.folder.name) / "jobs.sqlite")
        self.known: dict[str, JobState] = {}
        self.published: set[str] = set()
        self.by_key: dict[str, str] = {}

    @rule(target=jobs, key=st.sampled_from(["a", "b", "c"]))
    def create(self, key):
        job = self.store.create_job(make_job(), f"body-{key}", [f"header:{key}"])
        assert self.by_key.setdefault(key, job.id) == job.id
        self.known.setdefault(job.id, JobState.VALIDATING)
        return job.id

    @rule(
        id_=jobs,
        state=st.sampled_from(list(JobState)),
        only_from=st.one_of(st.none(), st.sampled_from(list(JobState))),
        again=st.booleans(),
    )
    def change(self, id_, state, only_from, again):
        for _ in range(2 if again else 1):
            before = self.known[id_]
            allowed = state in TRANSITIONS[before] and only_from in (None, before)
            models = [TunedModel(f"ft:{id_}", "base", id_)] if state is JobState.SUCCEEDED else []
            refused = None
            try:
                self.store.transition(id_, state, "", only_from=only_from, models=models)
            except IllegalTransition as error:
                refused = error.job.state
            assert refused == (None if allowed else before)
            if refused is None:
                self.known[id_] = state
                self.published |= {model.folder for model in models}

    @rule()
    def restart(self):
        self.store = reopen(self.store)
        for job in self.store.list_unfinished():
            if job.state is JobState.RUNNING:
                self.store.transition(job.id, JobState.QUEUED, "", only_from=JobState.RUNNING)
                self.known[job.id] = JobState.QUEUED

    @invariant()
    def the_record_is_the_model(self):
        if not hasattr(self, "known"):
            return
        for id_, state in self.known.items():
            job = self.store.find_job(id_)
            assert job.state is state
            assert (job.finished_at is not None) == state.is_final
        assert {job.id for job in self.store.list_unfinished()} == {
            id_ for id_, state in self.known.items() if not state.is_final
        }
        assert {model.folder for model in self.store.list_models()} == self.published
        assert all(self.known[id_] is JobState.SUCCEEDED for id_ in self.published), "succeeded is final"

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()
            self.folder.cleanup()


def run_sequences(count):
    chosen = settings(
        max_examples=count,
        stateful_step_count=25,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Jobs, settings=chosen)


@pytest.mark.parametrize(
    "num_sequences",
    [6, pytest.param(NUM_SEQUENCES, marks=[pytest.mark.fault, pytest.mark.timeout(3600)], id="many sequences")],
)
def test_any_sequence_of_requests_and_restarts_leaves_the_state_that_was_recorded(num_sequences):
    run_sequences(num_sequences)


def test_the_state_machine_notices_a_table_without_the_rule_that_an_end_is_final(monkeypatch):
    """With the check of transitions off, a cancelled job can still succeed, and the machine above fails."""
    monkeypatch.setattr(store_module, "TRANSITIONS", dict.fromkeys(JobState, frozenset(JobState)))
    machine = Jobs()
    machine.open_store()
    id_ = machine.create("a")
    machine.store.transition(id_, JobState.CANCELLED, "")
    machine.known[id_] = JobState.CANCELLED
    with pytest.raises(AssertionError):
        machine.change(id_, JobState.SUCCEEDED, None, again=False)
    machine.teardown()
