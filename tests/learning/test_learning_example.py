"""examples/learning_server: users of a help desk who rate its replies, and the server that learns from them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "learning_server"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_quick_version_trains_and_judges(tmp_path):
    command = [sys.executable, EXAMPLE / "run.py", "--quick", "--output", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert 0 < result["num_chats"] <= 600
    assert result["num_trainings"] >= 1, "a training is due after 120 thumbs"
    assert result["log"][0]["action"] == "add"
    actions = [event["action"] for event in result["log"]]
    assert actions.count("promote") == result["num_promotions"] == len(result["promoted"])
    judged = result["held_out"]["before"]
    assert set(judged["scores"]) == {"1", *map(str, result["promoted"])}
    assert 0.1 < judged["scores"]["1"]["mean"] < 0.5, "the careless desk suits three users in ten"
    assert judged["num_harmful"] == 0
    last = str(result["promoted"][-1]) if result["promoted"] else "1"
    gain = judged["scores"][last]["mean"] - judged["scores"]["1"]["mean"]
    assert judged["improvement"]["mean_difference"] == pytest.approx(gain)
    assert "held-out chats" in done.stdout
