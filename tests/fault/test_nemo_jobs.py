"""Jobs at NeMo Customizer: wherever a run dies while it submits one, the service gets one job."""

import signal
import time

import pytest

from tests.fault.kit import KILLED, Toy
from tests.protocols.nemo import use_nemo_adapter
from tests.protocols.nemo_service import NeMoService
from tests.protocols.openai_service import after, no_response


@pytest.fixture
def nemo(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with NeMoService() as service:
        yield service


@pytest.fixture
def toy(tmp_path, tiny_model_dir, nemo, openai_service):
    made = Toy(tmp_path / "toy", tiny_model_dir)
    made.set("trainers.trainer", {})
    return use_nemo_adapter(made, nemo, openai_service, f"${{STANDIN_KEY:-{openai_service.key}}}")


@pytest.mark.parametrize("site", ["submit.after_intent", "submit.after_send", "submit.after_id"])
def test_a_run_killed_while_it_submits_has_one_job(toy, nemo, site):
    assert toy.start(crash_at=site).wait() == KILLED
    child = toy.resume_or_start()
    assert child.wait() == 0, child.said
    assert len(nemo.jobs) == 1, child.said


def test_a_run_killed_before_the_response_has_one_job(toy, nemo):
    nemo.faults["create"] = [after(no_response)]
    child = toy.start()
    deadline = time.monotonic() + 100
    while not nemo.jobs:
        assert child.process.is_alive(), child.said
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child.send(signal.SIGKILL)
    assert child.wait() == KILLED
    child = toy.resume()
    assert child.wait() == 0, child.said
    assert len(nemo.jobs) == 1
