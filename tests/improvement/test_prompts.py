"""Searches for prompts: what they propose, what they keep of it, and that an interrupted one ends the same."""

import asyncio
import re
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest
import yaml

from reinforge.config.loader import build_config, load_config
from reinforge.errors import BackendUnavailable, ConfigError, ContextOverflow, EvaluationError
from reinforge.files import read_lines
from reinforge.improvement.prompts import (
    PromptTrials,
    append_demonstrations,
    choose_demonstrations,
    compute_similarity,
    search_demonstrations,
    search_with_gepa,
)
from reinforge.runs.progress import SilentProgress
from reinforge.trainer.evaluate import EvaluationOptions
from tests.doubles import RecordingAdapter, ScriptedPolicy, examples
from tests.episodes import make_evaluation, make_runner, run_items

ASK = "Write the number."
SEVERAL = "The better prompt."


async def agent(item, llm, context):
    system = {"role": "system", "content": context.text("system", ASK)}
    reply = await llm.chat.completions.create(messages=[system, {"role": "user", "content": item.input_obj}])
    return reply.choices[0].message.content


async def unmarked(item, llm, context):
    return "1"


def exact(output, expected):
    return float(output == expected)


class Notes(SilentProgress):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


class Search:
    """A search over 100 questions `7?` whose answer is `7`, of which 60 are for training, with a scripted policy."""

    def __init__(self, folder, script, workflow=agent, prompts=None):
        self.folder, self.policy, self.progress = folder, ScriptedPolicy(script), Notes()
        self.workflow, self.prompts = workflow, prompts or {}

    def load(self):
        rows = [{"id": str(number), "question": f"{number}?", "answer": str(number)} for number in range(100)]
        return build_config(
            {
                "llms": {"agent": {"_type": "policy"}},
                "workflow": {"_type": "python", "function": self.workflow},
                "prompts": self.prompts,
                "eval": {
                    "general": {"dataset": {"_type": "rows", "rows": rows}, "max_concurrency": 1},
                    "evaluators": {"exact": {"_type": "python", "function": exact}},
                },
                "finetuning": {"outcomes": {"retries": 0}},
            }
        )

    async def run(self, search, **arguments):
        options = EvaluationOptions(adapter=RecordingAdapter(self.policy), progress=self.progress)
        return await search(self.load(), self.folder, options=options, **{"budget": 100, **arguments})

    def episodes(self, candidate):
        rows = read_lines(self.folder / "episodes.jsonl")
        return {row["example_id"]: row["reward"] for row in rows if row["epoch"] == candidate}

    @property
    def written(self):
        return yaml.safe_load((self.folder / "prompts.yml").read_text())["prompts"]


def read(request):
    """Returns the system prompt and the number that is asked for."""
    system, user = (message["content"] for message in request.messages)
    return system, int(user.removesuffix("?"))


def learn_from_four(request):
    """Right about even numbers; with four demonstrations about all; eight exceed the context."""
    system, number = read(request)
    shown = system.count("User:")
    if shown == 8:
        return ContextOverflow("the prompt has 99 tokens, but the limit is 64")
    return str(number) if number % 2 == 0 or shown == 4 else "?"


async def test_demonstrations_are_the_agents_own_good_replies(tmp_path):
    search = Search(tmp_path, learn_from_four)
    found = await search.run(search_demonstrations)
    default = search.episodes(0)
    assert (found.num_examples, found.num_candidates, found.num_episodes) == (18, 3, 25 + 4 * 18)
    scored = search.episodes(2).keys()
    assert len(scored) == 18
    assert found.default_mean == pytest.approx(sum(default[id_] for id_ in scored) / 18)
    assert found.mean == 1.0  # all 18, by the candidate with four
    text = found.prompts["system"]
    assert text.startswith(f"{ASK}\n\nExamples:\n\nUser: ")
    shown = re.findall(r"User: (\d+)\?\nAssistant: (\d+)", text)
    assert len(shown) == 4
    assert all(asked == answered and int(asked) % 2 == 0 for asked, answered in shown)
    assert not scored & {asked for asked, _ in shown}
    assert search.written == found.prompts
    assert (tmp_path / "prompts.diff").read_text().splitlines()[:5] == [
        "--- system (the agent's own)",
        "+++ system (found)",
        "@@ -1 +1,15 @@",
        f" {ASK}",
        "+",
    ]


def read_shown(folder):
    """Returns system prompt, question and answer of each row that is there to be imitated."""
    rows = [row["messages"] for row in read_lines(folder / "rows.jsonl")]
    assert all([message["role"] for message in row] == ["system", "user", "assistant"] for row in rows)
    return [tuple(message["content"] for message in row) for row in rows]


async def test_good_replies_with_the_found_prompt_are_rows_below_the_agents_own(tmp_path):
    await Search(tmp_path, learn_from_four).run(search_demonstrations)
    shown = read_shown(tmp_path)
    assert len(shown) == 18
    assert any(int(answer) % 2 for _, _, answer in shown)  # which only the found prompt gets right
    assert all((system, asked) == (ASK, f"{answer}?") for system, asked, answer in shown)


async def test_rows_have_the_configured_prompt_and_no_reply_that_is_worse_than_the_mean(tmp_path):
    search = Search(
        tmp_path, lambda request: "?" if read(request)[1] % 2 else obey(request), prompts={"system": 'A "b"'}
    )
    found = await search.run(search_demonstrations)
    shown = read_shown(tmp_path)
    assert len(shown) == round(found.mean * found.num_examples)
    assert all(system == 'A "b"' and int(answer) % 2 == 0 for system, _, answer in shown)


async def test_a_prompt_that_exceeds_the_context_is_refused_even_if_its_episodes_score(tmp_path):
    async def swallowing(item, llm, context):
        try:
            return await agent(item, llm, context)
        except ContextOverflow:
            return item.expected_output_obj

    def only_even(request):
        system, number = read(request)
        if "User:" in system:
            return ContextOverflow("too long")
        return str(number) if number % 2 == 0 else "?"

    search = Search(tmp_path, only_even, swallowing)
    found = await search.run(search_demonstrations)
    assert all(reward == 1.0 for candidate in (1, 2, 3) for reward in search.episodes(candidate).values())
    assert (found.prompts, found.mean) == ({}, found.default_mean)
    assert search.written == {}
    assert (tmp_path / "prompts.diff").read_text() == ""


@pytest.mark.parametrize("reply", ["?", None])
async def test_rewards_that_do_not_differ_leave_nothing_to_show(tmp_path, reply):
    search = Search(tmp_path, lambda request: reply or str(read(request)[1]))
    found = await search.run(search_demonstrations)
    assert (found.prompts, found.num_candidates) == ({}, 0)
    assert found.mean == found.default_mean == (0.0 if reply else 1.0)


async def test_configured_prompts_are_the_start_of_a_search(tmp_path):
    search = Search(tmp_path, learn_from_four, prompts={"system": "Cost: ${X}."})
    found = await search.run(search_demonstrations)
    assert found.prompts["system"].startswith("Cost: ${X}.\n\nExamples:")
    loaded = load_config(tmp_path / "prompts.yml")  # where ${X} would be a variable
    assert loaded.config.prompts == found.prompts


async def test_an_agent_without_a_text_and_a_budget_too_small_are_refused(tmp_path):
    search = Search(tmp_path, learn_from_four, unmarked)
    with pytest.raises(ConfigError, match=r'(?s)asks for no text .*context\.text\("system"'):
        await search.run(search_demonstrations)
    assert len(search.episodes(0)) == 1
    search = Search(tmp_path / "b", learn_from_four)
    for kind in (search_demonstrations, search_with_gepa):
        with pytest.raises(ConfigError, match="too few to compare prompts on some of the 60 train examples"):
            await search.run(kind, budget=12, **({"optimize": print} if kind is search_with_gepa else {}))


async def test_a_search_without_any_score_fails(tmp_path):
    search = Search(tmp_path, lambda request: BackendUnavailable("down"))
    with pytest.raises(EvaluationError, match="no example could be scored"):
        await search.run(search_demonstrations)


async def interrupt(search, after, kind, **arguments):
    """Runs a search until its policy has been asked a number of times."""
    script, task = search.policy.script, asyncio.ensure_future(search.run(kind, **arguments))

    def count(request):
        if len(search.policy.requests) == after:
            task.cancel()
        return script(request)

    search.policy.script = count
    with suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()


@pytest.mark.parametrize("after", [1, 30, 90])
async def test_an_interrupted_search_ends_as_an_undisturbed_one(tmp_path, after):
    undisturbed = Search(tmp_path / "a", learn_from_four)
    expected = await undisturbed.run(search_demonstrations)
    search = Search(tmp_path / "b", learn_from_four)
    await interrupt(search, after, search_demonstrations)
    resumed = Search(tmp_path / "b", learn_from_four)
    assert await resumed.run(search_demonstrations) == expected
    assert len(resumed.policy.requests) == len(undisturbed.policy.requests) - after + 1  # the one in flight again
    for name in ("prompts.yml", "prompts.diff", "candidates.jsonl"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "a" / name).read_bytes()


@pytest.mark.parametrize("seed", range(5))
def test_divided_examples_share_no_cluster(tmp_path, seed):
    evaluation = make_evaluation(make_runner(agent), examples(8))
    evaluation.clusters = {"0": "a", "1": "a", "2": "a"}
    trials = PromptTrials(evaluation, tmp_path, {}, print)
    sources, scored = trials.divide(seed, 2, 4)
    assert (len(sources), len(scored)) == (2, 4)
    assert not set(sources) & set(scored)
    assert not (set(sources) & set("012") and set(scored) & set("012"))
    assert trials.divide(seed, 2, 4) == (sources, scored)


async def test_the_best_and_shortest_come_first_then_the_least_similar():
    replies = {"0": "red green", "1": "red green blue", "2": "yellow black white", "3": "no", "4": "so so"}
    rewards = {"0": 1.0, "1": 1.0, "2": 0.9, "3": 0.0, "4": 0.7}  # above 0.86, between the mean 0.72 and 1
    runner = make_runner(agent, ScriptedPolicy(lambda request: replies[request.messages[1]["content"].split()[1]]))
    records = await run_items(runner, examples(5))
    for record in records:
        record.reward = rewards[record.key.example_id]
    shown = [text.partition("Assistant: ")[2] for text in choose_demonstrations(records, "agent")]
    assert shown == ["red green", "yellow black white", "red green blue"]
    for record in records:
        record.reward = 1.0
    assert choose_demonstrations(records, "agent") == []


def test_similarity_and_the_place_of_demonstrations():
    assert compute_similarity("a b c", "b c d") == 0.5
    assert append_demonstrations("", ["x"]) == "Examples:\n\nx"
    assert append_demonstrations("Do.", ["x", "y"]) == "Do.\n\nExamples:\n\nx\n\ny"


def obey(request):
    """Right about even numbers, and about all with the better prompt, which it proposes when it reflects."""
    if len(request.messages) == 1:
        return f"```\n{SEVERAL}\n```"
    system, number = read(request)
    return str(number) if number % 2 == 0 or system == SEVERAL else "?"


def propose_once(**settings):
    """Stands in for `gepa.optimize`: one proposal from the first two training examples."""
    propose_once.settings = settings
    adapter, seed = settings["adapter"], settings["seed_candidate"]
    first = adapter.evaluate(settings["valset"], seed)
    assert len(first.scores) == len(first.outputs) == len(settings["valset"])
    failed = adapter.evaluate(settings["trainset"], seed, capture_traces=True)
    data = adapter.make_reflective_dataset(seed, failed, ["system"])
    reply = settings["reflection_lm"](str(data["system"][:2]))
    candidate = {"system": reply.strip("`\n")}
    adapter.evaluate(settings["valset"], candidate)
    propose_once.data, propose_once.batch = data["system"], failed
    return SimpleNamespace(candidates=[seed, candidate])


async def test_an_optimizer_gets_scores_and_why_they_are_what_they_are(tmp_path):
    search = Search(tmp_path, obey)
    found = await search.run(search_with_gepa, optimize=propose_once)
    settings = propose_once.settings
    assert settings["seed_candidate"] == {"system": ASK}
    assert not set(settings["trainset"]) & set(settings["valset"])
    assert (len(settings["trainset"]), len(settings["valset"])) == (40, 20)
    number = next(id_ for id_ in settings["trainset"] if int(id_) % 2)
    place = settings["trainset"].index(number)
    assert propose_once.batch.scores[place] == 0.0
    assert propose_once.batch.num_metric_calls == 40
    assert propose_once.data[place] == {
        "Inputs": f"{number}?",
        "Generated Outputs": "Assistant: ?",
        "Feedback": f"Score: 0\nExpected: {number}",
    }
    assert (found.prompts, found.mean, found.num_episodes) == ({"system": SEVERAL}, 1.0, 80)
    assert search.written == {"system": SEVERAL}
    assert search.progress.notes == [
        "warning: the policy (agent) reflects on its own prompts; a small model has few ideas"
    ]


async def test_a_failed_episode_says_why(tmp_path):
    search = Search(tmp_path, lambda request: ContextOverflow("too long") if read(request)[1] == 7 else obey(request))

    def look(**settings):
        batch = settings["adapter"].evaluate(["7"], {"system": ASK}, capture_traces=True)
        look.feedback = batch.trajectories[0]["Feedback"]
        return SimpleNamespace(candidates=[])

    await search.run(search_with_gepa, optimize=look)
    assert look.feedback.splitlines()[:3] == ["Failed: context_overflow: too long", "Score: 0", "Expected: 7"]


async def test_an_unknown_reflecting_model_is_refused_before_any_episode(tmp_path):
    search = Search(tmp_path, obey)
    with pytest.raises(ConfigError, match="(?s)llms has no entry teacher.*name one of: agent"):
        await search.run(search_with_gepa, reflect="teacher", optimize=propose_once)
    assert search.policy.requests == []


async def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gepa", None)
    with pytest.raises(ConfigError, match=r"pip install 'reinforge\[prompt\]'"):
        await Search(tmp_path, obey).run(search_with_gepa)


async def test_gepa_finds_the_better_prompt_within_the_budget(tmp_path):
    pytest.importorskip("gepa")
    search = Search(tmp_path, obey)
    found = await search.run(search_with_gepa, seed=1)
    assert (found.prompts, found.mean) == ({"system": SEVERAL}, 1.0)
    assert found.default_mean < 1.0
    assert len(search.policy.requests) <= 100
    [reflection, *_] = read_lines(tmp_path / "reflections.jsonl")
    assert ASK in reflection["prompt"]
    assert "Expected: " in reflection["prompt"]
    assert not (tmp_path / "gepa_state.bin").exists()


@pytest.mark.slow
@pytest.mark.parametrize("after", [15, 40])
async def test_gepa_ends_the_same_after_an_interruption(tmp_path, after):
    pytest.importorskip("gepa")
    undisturbed = Search(tmp_path / "a", obey)
    expected = await undisturbed.run(search_with_gepa)
    search = Search(tmp_path / "b", obey)
    await interrupt(search, after, search_with_gepa)
    resumed = Search(tmp_path / "b", obey)
    assert await resumed.run(search_with_gepa) == expected
    assert len(resumed.policy.requests) == len(undisturbed.policy.requests) - after + 1
    for name in ("prompts.yml", "candidates.jsonl", "reflections.jsonl"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "a" / name).read_bytes()


async def test_a_reflecting_model_that_fails_costs_its_proposals_alone(tmp_path):
    pytest.importorskip("gepa")

    def fail(request):
        return BackendUnavailable("down") if len(request.messages) == 1 else obey(request)

    search = Search(tmp_path, fail)
    found = await search.run(search_with_gepa)
    assert (found.prompts, found.mean) == ({}, found.default_mean)
    assert "warning: agent proposes nothing: down" in search.progress.notes
    assert len(search.policy.requests) <= 100


async def test_a_text_that_a_candidate_led_to_is_not_searched_after_an_interruption_either(tmp_path):
    """An agent with a second text in the episodes of the better prompt alone."""

    async def branching(item, llm, context):
        reply = await agent(item, llm, context)
        return reply + context.text("end", "") if context.text("system", ASK) == SEVERAL else reply

    def keep(**settings):
        keep.seeds.append(settings["seed_candidate"])
        return propose_once(**settings)

    keep.seeds = []
    for _ in range(2):
        await Search(tmp_path, obey, branching).run(search_with_gepa, optimize=keep)
    assert keep.seeds == [{"system": ASK}] * 2
    rows = read_lines(tmp_path / "episodes.jsonl")
    assert [row["texts"] for row in rows if "texts" in row] == [{"system": ASK}, {"system": ASK, "end": ""}]
