"""`serve --compare`: the base model of a run beside its model, and questions of its data, behind the server's guard."""

import json
import shutil

import pytest

from reinforge.runs.journal.journal import RunJournal
from reinforge.serving.comparison import RunQuestions, read_questions
from reinforge.serving.loading import LoadSettings, ModelLoader
from reinforge.serving.models import ServedModels
from reinforge.types.episode import EpisodeKey, EpisodeRecord, ModelCall
from reinforge.types.request import ModelReply, ModelRequest
from tests.doubles import ScriptedPolicy, examples
from tests.serving.serving import http, says, serve
from tests.serving.test_loading import ASK, save_adapter

SYSTEM = {"role": "system", "content": "Answer briefly."}


def record_episode(journal, example, messages, *, phase="validate", epoch=-1, tools=None):
    reply = ModelReply({"role": "assistant", "content": "x"}, "stop", None, 1, 1)
    call = ModelCall("c", "agent", "m", ModelRequest(messages, tools=tools), reply, (), 0.0, 1.0)
    calls = [] if messages is None else [call]
    journal.record_episode(EpisodeRecord(EpisodeKey(phase, epoch, example), examples(1)[0], calls=calls, reward=0.5))


def write_journal(folder):
    journal = RunJournal(folder)
    record_episode(journal, "1", [SYSTEM, *says("2 + 3?")])
    record_episode(journal, "2", [SYSTEM, *says("look it up")], tools=[{"type": "function", "function": {"name": "f"}}])
    record_episode(journal, "3", [{"role": "user", "content": [{"type": "text", "text": "parts"}]}])
    record_episode(journal, "4", None)
    record_episode(journal, "5", says("a training question"), phase="collect", epoch=0)
    journal.close()


def test_questions_are_those_of_validation_that_the_page_can_ask(tmp_path):
    write_journal(tmp_path / "r")
    assert read_questions(tmp_path / "r") == [{"messages": [SYSTEM, *says("2 + 3?")]}]


@pytest.fixture(scope="module")
def run(tiny_model_dir, tmp_path_factory):
    """A run that trained an adapter: its model, and the checkpoint that it began with."""
    folder = tmp_path_factory.mktemp("runs") / "support-1"
    write_journal(folder)
    save_adapter(tiny_model_dir, folder / "model", seed=1)
    base = folder / "checkpoints" / "step-000000"
    save_adapter(tiny_model_dir, base, seed=2, scale=0.0)
    state = base / "training" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "version": 0}))
    return folder


async def open_run(run, **settings):
    models = ServedModels()
    loader = ModelLoader(models, LoadSettings(output_dir=run.parent, device="cpu", **settings))
    return models, loader, await loader.open("support-1")


async def test_the_base_model_of_a_run_is_served_beside_it_from_one_engine(run):
    models, loader, names = await open_run(run, compares=True)
    assert names == ["support-1", "support-1@0"]
    tuned, base = [(await model.policy.sample(ASK)) for model in models]
    assert (base.version, base.tokens.token_ids == tuned.tokens.token_ids) == (0, False)
    assert len({id(model.policy.sampler) for model in models}) == 1
    assert set(loader.questions.by_model) == {"support-1", "support-1@0"}
    await models.close()


@pytest.mark.slow
async def test_without_the_option_there_are_neither_and_without_the_first_checkpoint_questions_alone(run, tmp_path):
    models, loader, names = await open_run(run)
    assert (names, loader.questions.by_model) == (["support-1"], {})
    await models.close()
    shutil.copytree(run, tmp_path / "support-1", ignore=shutil.ignore_patterns("checkpoints"))
    models, loader, names = await open_run(tmp_path / "support-1", compares=True)
    assert (names, list(loader.questions.by_model)) == (["support-1"], ["support-1"])
    await models.close()


async def test_questions_are_behind_the_guard_of_the_server():
    questions, key = RunQuestions(), "k" * 32
    questions.by_model["m"] = [{"messages": says("2 + 3?")}]
    async with serve({"m": ScriptedPolicy()}, [questions], token=key) as app, http(app) as client:
        assert (await client.get("/chat/examples?model=m")).status_code == 401
        client.headers["authorization"] = f"Bearer {key}"
        assert (await client.get("/chat/examples?model=m")).json() == {"data": [{"messages": says("2 + 3?")}]}
        assert (await client.get("/chat/examples?model=../other")).json() == {"data": []}
        foreign = await client.get("/chat/examples?model=m", headers={"origin": "https://evil.example"})
        assert foreign.status_code == 403
    async with serve({"m": ScriptedPolicy()}) as app, http(app) as client:
        assert (await client.get("/chat/examples?model=m")).status_code == 404
