"""Jobs at NeMo Customizer: wherever a run dies while it submits one, the service gets one job."""

import pytest

from tests.fault.kit import Toy, killed_at, killed_while
from tests.protocols.nemo import use_nemo_adapter
from tests.protocols.nemo_service import NeMoService
from tests.protocols.stand_in import after, no_response

pytestmark = pytest.mark.slow


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
    killed_at(toy, site)
    assert len(nemo.jobs) == 1


def test_a_run_killed_before_the_response_has_one_job(toy, nemo):
    nemo.faults["create"] = [after(no_response)]
    killed_while(toy, lambda: nemo.jobs)
    assert len(nemo.jobs) == 1
