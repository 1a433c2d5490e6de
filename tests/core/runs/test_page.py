import asyncio
import json
import shutil
import sqlite3
from html.parser import HTMLParser
from urllib.parse import unquote

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel

from reinforge.config.dump import find_changed_settings
from reinforge.evaluation.statistics import Improvement
from reinforge.runs.journal.episode_json import dump_episode
from reinforge.runs.page import page as page_module
from reinforge.runs.page.chats import (
    ChatStyle,
    TokenTexts,
    TrainedTokens,
    build_chat,
)
from reinforge.runs.page.elements import (
    Line,
    Point,
    build,
    build_table,
    choose_ticks,
    draw_chart,
    draw_interval,
    find_bounds,
    to_html,
)
from reinforge.runs.page.page import POLICY, write_page
from reinforge.runs.rows import EpisodeRow
from reinforge.types.episode import EpisodeKey, EpisodeRecord, ModelCall
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.request import ModelReply, ModelRequest, TokenLogprobs
from reinforge.types.supports import Supports
from tests.core.e2e.test_reporting import LearningRun, Transcript, by_version
from tests.project import call, leave_out_plots_and_pages
from tests.scripted_run import ScriptedRun

pytestmark = pytest.mark.usefixtures("pages")
HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31m\u202e 5"


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = set(), [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0.17, 0.86, [0, 0.2, 0.4, 0.6, 0.8, 1]), (-1, 1, [-1, -0.5, 0, 0.5, 1]), (3, 3, [2.7, 2.85, 3, 3.15, 3.3])],
)
def test_ticks_are_round_and_enclose_the_values(low, high, ticks):
    found = choose_ticks(low, high)
    if low < high:
        assert found == pytest.approx(ticks)
    assert found[0] <= low
    assert found[-1] >= high
    assert found[0] < found[-1]


def test_an_unknown_value_is_a_gap_and_an_interval_a_band():
    points = [Point(0, 0.0, -0.1, 0.1), Point(1, 1.0, 0.9, 1.1), Point(2, None), Point(3, float("nan")), Point(4, 0.5)]
    figure = draw_chart("Reward", [Line("reward", "training", points, is_band=True)])
    assert [len(line.get("points").split()) for line in figure.iter("polyline")] == [2]
    assert [len(band.get("points").split()) for band in figure.iter("polygon")] == [4]
    titles = [title.text for title in figure.iter("title")]
    assert titles == ["reward, epoch 0: 0 [-0.1, 0.1]", "reward, epoch 1: 1 [0.9, 1.1]", "reward, epoch 4: 0.5"]


def test_a_chart_without_values_can_be_drawn():
    assert list(draw_chart("Reward", [Line("reward", "training", [Point(0, None)])]).iter("circle")) == []


def test_intervals_are_drawn_on_one_scale():
    """A scale from -0.2 to 0.6 over the 100 units between the margins of 6: 0 lies at 31, 0.2 at 56, 0.6 at 106."""
    changes = [Improvement(0.2, 0.0, 0.6, 0.01, 9, "t"), Improvement(-0.1, -0.2, None, 0.5, 9, "t"), None]
    bounds = find_bounds(changes)
    assert bounds == (-0.2, 0.6)
    drawn = draw_interval(changes[0], bounds, width=112)
    assert [(line.get("x1"), line.get("x2")) for line in drawn.iter("line")][1:] == [
        ("31.0", "31.0"),
        ("31.0", "106.0"),
    ]
    assert [circle.get("cx") for circle in drawn.iter("circle")] == ["56.0"]
    assert ["".join(drawn.itertext()), drawn.find("svg/g").get("class")] == ["+0.200 [+0.000, +0.600]", "mild"]
    assert len(list(draw_interval(changes[1], bounds).iter("line"))) == 2, "half an interval is none"
    assert draw_interval(Improvement(-0.1, -0.2, -0.1, 0.01, 9, "t"), bounds).find("svg/g").get("class") == "bad"
    assert draw_interval(None, bounds) is None
    assert find_bounds([None]) == (-1.0, 1.0)


def test_columns_of_numbers_are_right_aligned():
    rows = [
        ("a", "1,024", "0.480 [0.385, 0.577]", "3 min 20 s", "2 of 8", "0.1 → 0.4", "2026-01-01", "12 %", ""),
        ("2", "", build("b", "unknown"), "0.4 s", "? of 8", "? → 0.4", "x", None, ""),
    ]
    table = build_table([str(number) for number in range(9)], rows, "numbers")
    for cells in table.iter("tr"):
        assert [number for number, cell in enumerate(cells) if cell.get("class") == "num"] == [1, 2, 3, 4, 5, 7]


def test_a_chart_holds_its_values_for_the_page_that_redraws_them():
    points = [Point(-1, 0.5, 0.4, 0.6), Point(0, float("nan")), Point(1, 0.75)]
    figure = draw_chart("Reward", [Line("a", "training", points), Line("b", "kept", [Point(0, None)])])
    values = [[-1, 0.5, 0.4, 0.6], [0, None], [1, 0.75]]
    assert json.loads(figure.get("data-chart")) == [
        {"name": "a", "style": "training", "isBand": False, "points": values}
    ]
    assert draw_chart("Cost", [Line("a", "training", points)], axis="minutes").get("data-chart") is None


def test_text_is_never_markup():
    html = to_html(build("p", "a < b & ", build("b", "</b><script>"), "\x1b[31m", title='"><script>'))
    assert Page(html).tags == {"p", "b"}
    assert html.endswith(
        '<p title="&quot;&gt;<script&gt;">a &lt; b &amp; <b>&lt;/b&gt;&lt;script&gt;</b>\\x1b[31m</p>\n'
    )


def byte_level_tokenizer():
    letters = {"a": 0, "Ã": 1, "©": 2, "<eos>": 3}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


def test_a_character_of_two_tokens_is_one_piece():
    texts = TokenTexts(byte_level_tokenizer())
    assert texts.split([0, 1, 2, 3]) == [("a", 1), ("é", 2), ("<eos>", 1)]
    assert texts.split([0, 1]) == [("a", 1), ("\N{REPLACEMENT CHARACTER}", 1)], "a reply that was cut in a character"
    assert texts.split([0, 99]) is None, "ids of another tokenizer"
    assert TokenTexts().split([0]) is None


def test_the_tokenizer_of_the_trained_model_is_found(tmp_path):
    (tmp_path / "model").mkdir()
    byte_level_tokenizer().save(str(tmp_path / "model" / "tokenizer.json"))
    assert TokenTexts.find(tmp_path, {}).split([0]) == [("a", 1)]
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    assert TokenTexts.find(tmp_path, {}).split([0]) is None


def test_a_reply_that_was_given_and_not_sampled_is_plain_text():
    reply = {"role": "assistant", "content": "aé"}
    call = {"messages": [], "reply": reply, "token_ids": [0, 1, 2], "logprobs": [None] * 3, "llm": "policy"}
    call |= {"num_completion_tokens": 3, "finish_reason": "stop", "policy_version": None}
    data = {"outcome": "ok", "reason": None, "reward": 1.0, "scores": {}, "output": None, "calls": [call]}
    chat = build_chat(EpisodeRow("k", data), ChatStyle(TokenTexts(byte_level_tokenizer())))
    assert "aé" in [pre.text for pre in chat.iter("pre")]


def dump_call(llm="policy", functions=("answer",), **sampled):
    tokens = TokenLogprobs((7,), (0, 3), (-0.5, -1.0), policy_version=1, **sampled)
    reply = ModelReply({"role": "assistant", "content": "a"}, "stop", tokens, 1, 2)
    call = ModelCall("c", llm, "m", ModelRequest([{"role": "user", "content": "?"}]), reply, functions, 0.0, 1.0)
    record = EpisodeRecord(
        EpisodeKey("collect", 0, "x", 0),
        EvalInputItem(id="x", input_obj="?", expected_output_obj=None, full_dataset_entry={}),
        calls=[call],
    )
    return dump_episode(record)["calls"][0]


CONFIG = {
    "llms": {"policy": {"_type": "policy"}, "opponent": {"_type": "openai"}},
    "finetuning": {"target_functions": ["answer"], "target_model": "policy"},
}
RECORDED = Supports.from_sets([np.array([0, 1], np.int32), np.array([], np.int32)])
"""The tokens that the first token was chosen from; of the second they are too many."""


@pytest.mark.parametrize(
    ("call", "marks"),
    [
        (dump_call(), [True, True]),
        (dump_call(llm="opponent"), [False, False]),
        (dump_call(functions=("plan",)), [False, False]),
        (dump_call(restricted=True), [False, False]),
        (dump_call(restricted=True, supports=RECORDED, processed_logprobs=(-0.5, -1.0)), [True, False]),
    ],
)
def test_the_tokens_that_training_uses(call, marks):
    trained = TrainedTokens.read(CONFIG)
    assert trained.mark(call) == marks
    row = EpisodeRow(
        "k", {"outcome": "ok", "reason": None, "reward": 1.0, "scores": {}, "output": None, "calls": [call]}
    )
    style = ChatStyle(TokenTexts(byte_level_tokenizer()), trained, baseline=0.25)
    spans = [span for span in build_chat(row, style).iter("span") if "p" in span.get("class")]
    assert ["m" in span.get("class").split() for span in spans] == marks
    assert [span.get("title").endswith("relative reward +0.750") for span in spans] == marks


def test_every_model_with_known_tokens_counts_where_none_is_declared_as_the_policy():
    config = {"llms": {"mine": {"_type": "openai"}}, "finetuning": {}}
    assert TrainedTokens.read(config).mark(dump_call(llm="mine")) == [True, True]


def test_settings_that_differ_from_their_default():
    changes = find_changed_settings("finetuning:\n  num_epochs: 7\n  seed: 0\n  policy: {dtype: float32}\n")
    assert [str(change) for change in changes] == ["finetuning.num_epochs: 1 -> 7"]


async def test_every_run_writes_its_page(tmp_path):
    run = LearningRun(tmp_path, reward=by_version)
    summary = await run.run()
    page = Page((tmp_path / "r" / "report.html").read_text())
    change = summary.improvement
    means = f"from {summary.confirm_base.mean:.3f} to {summary.confirm_tuned.mean:.3f}"
    assert f"r improved the agent: reward {means}, {change} on 10 confirm examples." in page.text
    pairs = page.text.partition("changes of reward, up and down.")[2].partition("Every evaluator before")[0]
    assert (pairs.count("Example "), pairs.count("before 0"), pairs.count("form 0"), pairs.count("form 2")) == (
        3,
        3,
        3,
        3,
    )
    assert '10 score higher in "reward" than with the base model, 0 the same and 0 lower.' in page.text
    links = [value for name, value in page.attributes if name == "href"]
    names = ("verdict", "reward", "pairs", "scores", "examples", "groups", "episodes", "outcomes", "facts", "settings")
    assert links[: len(names)] == [f"#{name}" for name in names]
    assert {"ins", "del"} <= page.tags, "words that differ are marked"
    ids = {value for name, value in page.attributes if name == "id"}
    assert {unquote(link[1:]) for link in links} <= ids, "every row of an episode leads to its conversation"
    assert f"report      {tmp_path / 'r' / 'report.html'}, " in "\n".join(summary.closing_lines(color=False))
    assert "reinforge.finetune(...) with the same agent, dataset and reward" in page.text


async def test_text_of_the_model_is_shown_and_neither_run_nor_loaded(tmp_path):
    await ScriptedRun(tmp_path, script=lambda request: HOSTILE + str(request.sampling.seed % 7)).run()
    text = (tmp_path / "r" / "report.html").read_text()
    page = Page(text)
    assert "<script>alert(1)</script><img src=x onerror=alert(1)>\\x1b[31m\\u202e 5" in page.text
    assert not page.tags & {"script", "img", "iframe", "object", "embed", "link", "form"}
    assert next(value for name, value in page.attributes if name == "content") == POLICY
    for name, value in page.attributes:
        assert not name.startswith("on"), name
        assert name not in ("src", "style", "action"), name
        assert name != "href" or value.startswith("#"), value


async def test_a_page_that_cannot_be_written_costs_no_run(tmp_path, monkeypatch):
    progress = Transcript()

    def fail(*args):
        raise RuntimeError("boom")

    monkeypatch.setattr(page_module, "write_page", fail)
    summary = await ScriptedRun(tmp_path).run(progress=progress)
    assert summary.status == "completed"
    told = next(note for note in progress.notes if note.startswith("no report.html: RuntimeError: boom"))
    assert told.endswith(f"`reinforge report {tmp_path / 'r'}` regenerates it")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ran")
    with pytest.MonkeyPatch.context() as patch:
        leave_out_plots_and_pages(patch)
        asyncio.run(ScriptedRun(folder).run())
    return folder / "r"


@pytest.mark.slow
def test_the_command_writes_the_page_again(ran, tmp_path):
    shutil.copytree(ran, tmp_path / "r")
    (tmp_path / "r" / "report.html").unlink()
    done = call("report", "last", "--output_dir", str(tmp_path))
    assert (done.exit_code, done.output) == (0, f"{tmp_path / 'r' / 'report.html'}\n")
    call("report", str(tmp_path / "r"), "--output", str(tmp_path / "p.html"), code=0)
    assert (tmp_path / "p.html").read_text() == (tmp_path / "r" / "report.html").read_text()
    missing = call("report", "nothing", "--output_dir", str(tmp_path), code=2)
    assert "nothing" in missing.output


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["collect", "validate"])
def test_a_damaged_episode_is_named_not_shown(ran, tmp_path, phase):
    shutil.copytree(ran, tmp_path / "r")
    with sqlite3.connect(tmp_path / "r" / "run.sqlite") as database:
        database.execute("UPDATE episodes SET data = replace(data, 'answer', 'ANSWER') WHERE phase = ?", (phase,))
    path = write_page(tmp_path / "r", path=tmp_path / "p.html")
    assert "This episode cannot be read; `reinforge runs verify` shows why." in Page(path.read_text()).text
