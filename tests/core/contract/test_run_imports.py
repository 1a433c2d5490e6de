"""A local run imports the core that it passes through: what stands around it is imported when it is named."""

import subprocess
import sys

import pytest

from tests.core.contract.test_layering import AROUND, home

MAX_MODULES = 280
MAX_LINES = 40_000
RUN = """
import sys, reinforge
from pathlib import Path

sys.modules["matplotlib"] = None  # a plot takes a second

async def agent(item, llm, context):
    reply = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}], max_tokens=2)
    return reply.choices[0].message.content

def variety(output, expected):
    return len(set(output)) / 10

if __name__ == "__main__":
    rows = [{"id": str(number), "question": f"What is {number} + 1?", "answer": "a"} for number in range(30)]
    settings = {"device": "cpu", "curriculum_learning": {"min_reward_diff": 0.0}}
    summary = reinforge.finetune(agent, rows, variety, sys.argv[1], epochs=1, examples_per_epoch=4, settings=settings)
    assert (summary.status, summary.num_jobs) == ("completed", 1), summary
    files = {name: module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "reinforge"}
    for name, file in sorted(files.items()):
        print("imported", name, len(Path(file).read_text(encoding="utf-8").splitlines()))
"""


def list_imports(folder, model):
    """Returns the modules of the package that a run with a model imports in a fresh interpreter, with their lines."""
    (folder / "run.py").write_text(RUN)
    command = [sys.executable, "run.py", str(model)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    words = [line.split() for line in done.stdout.splitlines() if line.startswith("imported ")]
    return {name: int(count) for _, name, count in words}


def check_imports(found):
    assert [name for name in found if name != "reinforge" and home(name) in AROUND | {"multiagent.nip"}] == []
    assert len(found) <= MAX_MODULES
    assert sum(found.values()) <= MAX_LINES


@pytest.mark.slow
def test_a_run_imports_the_core_alone(tmp_path, tiny_model_dir):
    check_imports(list_imports(tmp_path, tiny_model_dir))


@pytest.mark.slow
def test_a_run_of_the_bundled_model_imports_the_core_alone(tmp_path):
    list_imports(tmp_path, "bundled:tic_tac_toe")  # may build the model first, which imports more
    check_imports(list_imports(tmp_path, "bundled:tic_tac_toe"))


@pytest.mark.slow
def test_importing_every_component_would_be_found(tmp_path, tiny_model_dir, monkeypatch):
    """Mutation check: as it was when the registry imported every component."""
    monkeypatch.setitem(globals(), "RUN", RUN.replace("import sys, reinforge", IMPORT_ALL))
    found = list_imports(tmp_path, tiny_model_dir)
    with pytest.raises(AssertionError):
        check_imports(found)


IMPORT_ALL = "import sys, reinforge\nfrom reinforge.registry import REGISTRY\nREGISTRY.components()"
