"""`trainer_adapters._type: openpipe_art_trainer_adapter` trains on `reinforge serve`, with nothing changed."""

import json
from types import SimpleNamespace

import pytest

from reinforge.config.policy import BatchConfig, LoRAConfig, PolicyConfig
from reinforge.protocols.art.server.api import ARTApi
from reinforge.serving.app import ServeApp
from reinforge.serving.loading import BaseModels
from reinforge.serving.models import ServedModels
from tests.loop_thread import LoopThread
from tests.protocols.art import use_art_adapter


@pytest.fixture
def server(tiny_model_dir, tmp_path):
    """A server in a thread of its own, described as the stand-in is."""
    policy = PolicyConfig(
        model=str(tiny_model_dir), lora=LoRAConfig(r=4), batch=BatchConfig(batch_size=16, num_iterations=2)
    )
    models = ServedModels()
    api = ARTApi(models, BaseModels({"tiny/base": policy}), tmp_path / "trained", device="cpu")
    app = ServeApp(models, [api])
    with LoopThread() as thread:
        thread.call(app.__aenter__())
        try:
            url, folder = f"{app.address}/v1", tmp_path / "trained"
            yield SimpleNamespace(ip="127.0.0.1", port=app.port, base_url=url, key="any", folder=folder)
        finally:
            thread.call(app.__aexit__(None, None, None))


@pytest.mark.parametrize("protocol", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_trains_on_the_server_and_gets_better(project, server, protocol, monkeypatch):
    monkeypatch.setenv("ART_KEY", server.key)
    use_art_adapter(project, server, protocol, training={"learning_rate": 0.02})
    project.set("finetuning.num_epochs", 5).set("trajectory_builders.builder.num_generations", 8)
    result = project.finetune()
    assert result.exit_code == 0, result.output
    summary = project.summary
    # ART sends no seed: 16 runs improved by 0.14 to 0.30, one by 0.10
    assert summary["confirm_tuned"]["mean"] > summary["confirm_base"]["mean"], summary
    [model] = server.folder.iterdir()
    results = [json.loads(path.read_text()) for path in model.glob("jobs/*/result.json")]
    assert sorted(each["step"] for each in results) == [1, 2, 3, 4, 5]
    assert [each["metrics"]["num_left_out"] for each in results] == [0] * 5
