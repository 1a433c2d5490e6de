"""docs/coming-from-nip.md: every block runs as it is printed."""

import json
import re

import pytest

from reinforge.multiagent import HyperParameters, collect_rollouts
from reinforge.multiagent.nip.parameters import get_changed_fields
from reinforge.rollout.isolation.threads import LoopThread
from tests.generated import DOCS
from tests.nip.test_group_loop import make_group

PAGE = (DOCS / "coming-from-nip.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
RUN = {"experiment.py", "own_model.py", "ei_step.py", "malt_step.py", "await_step.py", "zero_knowledge.py"}


def test_every_block_is_run():
    assert set(BLOCKS) == RUN
    assert PAGE.count("```") == 2 * len(RUN), "a block has no name"


def execute(name, names=None, **replaced):
    code = BLOCKS[name]
    for old, new in replaced.items():
        assert old.replace("_", "/") in code
        code = code.replace(old.replace("_", "/"), new)
    names = {} if names is None else names
    exec(compile(code, f"docs/coming-from-nip.md {name}", "exec"), names)  # the page is ours
    return names


@pytest.fixture
def programs(tmp_path, monkeypatch, openai_service):
    openai_service.words, openai_service.seconds = ("Decision: accept", "Decision: reject", "Decision: reject."), 0.0
    monkeypatch.setenv("OPENAI_BASE_URL", openai_service.url)
    monkeypatch.setenv("OPENAI_API_KEY", openai_service.key)
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"Add {n}.", "solution": f"x + {n + n % 2}", "answer": 1 - n % 2} for n in range(100)]
    (tmp_path / "programs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
def test_the_experiment(programs, capsys, openai_service):
    execute("experiment.py")
    assert capsys.readouterr().out.splitlines()[0] == "2"
    assert [job["method"]["type"] for job in openai_service.jobs.values()] == ["dpo"] * 2


def test_a_model_in_this_process(programs, tiny_model_dir):
    names = execute("own_model.py", path_to_model=str(tiny_model_dir))
    assert names["hyper_params"].agents["prover"].model_provider == "SelfHosted"


def test_the_variant(programs, capsys):
    execute("zero_knowledge.py")
    assert capsys.readouterr().out.splitlines() == [
        "('prover', 'verifier', 'adversarial_verifier', 'simulator')",
        "('main_standard', 'main_adversarial', 'main_simulator')",
    ]


@pytest.mark.slow
def test_the_steps_of_a_loop(tmp_path, tiny_model_dir):
    """A job that imitates, its end, a job that prefers, its end; in that order, with one group."""
    group = make_group(tiny_model_dir, tmp_path)
    rows = [{"id": str(n), "question": f"say {n}", "answer": "accept"} for n in range(12)]
    loop = LoopThread("collect")
    rollouts = loop.run(collect_rollouts([group], rows, num_dialogues=4))
    loop.close()
    models = [group.model_name]
    for step in ("ei_step.py", "malt_step.py"):
        execute(step, {"group": group, "rollouts": rollouts})
        execute("await_step.py", {"group": group})
        models.append(group.model_name)
    group.sync.close()
    assert len(set(models)) == 3, "each job makes a model, which is served"


def test_the_fields_that_the_page_calls_refused_are():
    for name in ("repetition_penalty", "use_dummy_api"):
        assert (
            name in HyperParameters("s", "pure_text_ei", "d", agents={"a": {"model_name": "m"}}).agents["a"].UNSUPPORTED
        )
    params = HyperParameters("s", "pure_text_ei", "d")
    assert {"prover_invalid_response_penalty", "force_guess"} <= set(params.protocol_common.UNSUPPORTED)
    assert "apps_difficulty" in params.code_validation.UNSUPPORTED
    assert get_changed_fields(params.rl) == {}
