"""A checkpoint is loaded bit for bit or not at all; otherwise the previous one is used, and the run says so."""

import asyncio
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from reinforge import files
from reinforge.cli import main
from reinforge.config.policy import PolicyConfig
from reinforge.engine import Engine
from reinforge.errors import StorageError
from reinforge.files import find_damage, write_folder
from reinforge.runs.checkpoints import Checkpoints
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.rows import EpochSnapshot
from reinforge.trainer.resume import choose_snapshot
from reinforge.types.sample import LossSpec
from tests.doubles import RecordingAdapter
from tests.fault.kit import KILLED, Child
from tests.samples import random_samples

NEWEST, BEFORE = "checkpoints/step-000002", "checkpoints/step-000001"
FILES = 10


class EngineAdapter(RecordingAdapter):
    """Saves the weights of an engine."""

    def __init__(self, engine):
        super().__init__(engine.policy)
        self.engine = engine

    async def save(self, folder, version):
        self.engine.write(folder, version)
        return True

    async def restore(self, folder, version):
        return False


def state_of(epoch):
    return {"epoch": epoch, "version": epoch + 1, "adopt": True, "trainer": None, "counters": {}}


class Run:
    def __init__(self, folder, model):
        self.engine = Engine.load(PolicyConfig(model=str(model)), seed=0, device="cpu")
        self.journal, self.fingerprints = RunJournal(folder), {}
        self.checkpoints, adapter = Checkpoints(folder), EngineAdapter(self.engine)
        for epoch in (-1, 0, 1):
            if epoch >= 0:
                self.engine.begin_job()
                loss = LossSpec("clipped_pg", {"clip_low": 0.2, "clip_high": 0.2})
                self.engine.update(random_samples(6, epoch), loss, progress_start=0.0, progress_end=0.1)
                self.engine.end_job()
            name = asyncio.run(self.checkpoints.write(adapter, epoch + 1, state_of(epoch)))
            self.journal.record_snapshot(EpochSnapshot(epoch, epoch + 1, name, state_of(epoch)))
            self.fingerprints[name] = self.engine.fingerprint()
        self.files = sorted(path for path in (folder / NEWEST).rglob("*") if path.is_file())

    def choose(self):
        """Chooses a snapshot and loads it; returns its checkpoint, the weights' fingerprint and the notes."""
        snapshot, notes = choose_snapshot(self.journal, self.checkpoints)
        self.engine.load_weights(self.journal.folder / snapshot.checkpoint)
        return snapshot.checkpoint, self.engine.fingerprint(), " ".join(notes)


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_model_dir):
    made = Run(tmp_path_factory.mktemp("damaged") / "r", tiny_model_dir)
    assert len(made.files) == FILES
    yield made
    made.engine.close()
    made.journal.close()


def damaged(data, how, rng):
    """Returns the bytes of a damaged file; None: it is deleted."""
    if how == "delete":
        return None
    at = rng.randrange(len(data))
    return data[:at] if how == "cut" else bytes([*data[:at], data[at] ^ rng.randrange(1, 256), *data[at + 1 :]])


def damage_each(run, cuts, flips):
    """Damages every file of the newest checkpoint in many ways, one at a time, and chooses a snapshot each time."""
    rng, num_cases = random.Random(cuts), 0
    for path in run.files:
        whole = path.read_bytes()
        for how in ["delete"] + ["cut"] * cuts + ["flip"] * flips:
            left = damaged(whole, how, rng)
            path.unlink() if left is None else path.write_bytes(left)
            chosen, fingerprint, notes = run.choose()
            path.write_bytes(whole)
            assert (chosen, fingerprint) == (BEFORE, run.fingerprints[BEFORE]), f"{how} {path.name}"
            assert NEWEST in notes, notes
            assert path.name in notes, notes
            num_cases += 1
    return num_cases


def test_an_intact_checkpoint_is_chosen_without_a_note(run):
    assert run.choose() == (NEWEST, run.fingerprints[NEWEST], "")


def test_a_damaged_checkpoint_is_skipped_with_a_note(run):
    assert damage_each(run, cuts=1, flips=1) == 30


@pytest.mark.slow
def test_no_byte_of_a_manifest_can_be_changed_unnoticed(run):
    path = run.journal.folder / NEWEST / "manifest.json"
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(bytes([*whole[:at], whole[at] ^ 1, *whole[at + 1 :]]))
        assert "manifest.json" in (run.checkpoints.find_damage(NEWEST) or ""), f"byte {at}"
    path.write_bytes(whole)
    assert run.checkpoints.find_damage(NEWEST) is None


def test_a_bit_far_into_a_large_file_is_not_overlooked(tmp_path):
    content = bytearray(3 * 2**20)
    write_folder(tmp_path / "c", lambda staged: (staged.mkdir(), (staged / "weights").write_bytes(content)))
    content[-1] ^= 1
    (tmp_path / "c" / "weights").write_bytes(content)
    assert find_damage(tmp_path / "c") == "weights was changed: its SHA-256 differs"


@pytest.mark.fault
def test_500_damaged_checkpoints_are_skipped_with_a_note(run):
    assert damage_each(run, cuts=19, flips=30) == 500


@pytest.fixture
def orphaned(run):
    """The newest checkpoint was committed, and the process died before it was recorded in the journal."""
    snapshot = run.journal.snapshots()[0]
    run.journal.rewind(0, forget_jobs=False)
    yield run
    run.journal.record_snapshot(snapshot)


@pytest.mark.slow
def test_a_damaged_checkpoint_that_is_not_in_the_journal_is_not_adopted(orphaned):
    assert damage_each(orphaned, cuts=0, flips=1) == 20
    assert orphaned.choose() == (NEWEST, orphaned.fingerprints[NEWEST], "")


def test_a_damaged_checkpoint_is_never_returned(run):
    path = run.files[-1]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(StorageError, match=f"step-000002 is damaged: .*{path.name}"):
        run.checkpoints.verify(NEWEST)
    path.write_bytes(whole)
    assert run.checkpoints.verify(NEWEST) == run.journal.folder / NEWEST


def test_damage_that_is_not_looked_for_is_loaded(run, monkeypatch):
    """Mutation check."""
    monkeypatch.setattr(Checkpoints, "find_damage", lambda checkpoints, name: None)
    path = run.journal.folder / NEWEST / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(bytes([*whole[:-3], whole[-3] ^ 64, *whole[-2:]]))
    chosen, fingerprint, notes = run.choose()
    path.write_bytes(whole)
    assert (chosen, notes) == (NEWEST, "")
    assert fingerprint not in run.fingerprints.values(), "other weights than were saved"


def test_a_manifest_without_its_own_hash_hides_its_damage(run, monkeypatch):
    """Mutation check."""
    path = run.journal.folder / NEWEST / "manifest.json"
    whole = path.read_text()
    changed = whole.replace('"version": 2', '"version": 3')
    assert changed != whole
    path.write_text(changed)
    assert run.checkpoints.find_damage(NEWEST) == "manifest.json was changed"
    monkeypatch.setattr(files, "format_manifest", lambda manifest: changed)
    assert run.checkpoints.find_damage(NEWEST) is None
    path.write_text(whole)


@pytest.mark.fault
@pytest.mark.parametrize(("lost", "resumed"), [(1, "resuming after epoch 0"), (3, "restarting from the beginning")])
def test_a_killed_run_resumes_from_the_newest_intact_checkpoint(project, lost, resumed):
    """Its last checkpoints lost a byte: they are named and skipped, and what is lost is trained again."""
    project.set("finetuning.num_epochs", 2).set("trajectory_builders.builder.examples_per_epoch", 4)
    project.rows = project.rows[:24]
    project.finetune("--dataset", "nowhere.jsonl")  # fails, but writes the files
    assert Child(project.folder, ["run.yml", "--run_name", "r"], "publish.before:2").wait() == KILLED
    newest = sorted((project.run / "checkpoints").glob("step-*"))
    assert len(newest) == 3
    for folder in newest[-lost:]:
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])
    done = CliRunner().invoke(main, ["finetune", "run.yml", "--resume", "r"])
    assert done.exit_code == 0, done.output
    notes = Path(project.run / "run.log").read_text()
    for folder in newest[-lost:]:
        assert f"skipping checkpoints/{folder.name}: model.safetensors" in notes
    assert resumed in notes
    assert [row["version"] for row in project.summary["policy_versions"]] == [0, 1, 2]
    checkpoints = Checkpoints(project.run)
    assert [checkpoints.find_damage(name) for name in checkpoints.names()] == [None] * len(checkpoints.names())
