"""An episode as a chat whose sampled tokens are colored by log-prob, by relative reward, or by what models say of them.

Colors are classes of the style sheet, chosen by the reader with radio buttons; nothing on the page is a script.
"""

from __future__ import annotations

import importlib.util
import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from reinforge.rollout.episode import is_trained_call
from reinforge.runs.episodes import describe_versions, format_content
from reinforge.runs.journal.episode_json import parse_call
from reinforge.runs.page.elements import Content, build, build_details
from reinforge.runs.rows import EpisodeRow

MAX_TEXT = 4000  # longer strings are cut; `reinforge runs show RUN --episode KEY` prints them whole
MAX_TOKENS = 1500  # tokens of one reply that are colored; the rest is plain text
LOGPROB_STEPS = (-0.1, -0.5, -1.0, -2.0, -4.0)  # borders of the colors: p above 0.90, 0.61, 0.37, 0.14, 0.02, and below
RELATIVE_STEPS = (0.05, 0.25)
ENTROPY_STEPS = (0.1, 0.5, 1.0, 1.5, 2.5)
CHANGE_STEPS = (0.25, 1.0)  # nats; the second is a token that became 2.7 times as likely, or as unlikely
TOKENIZER = "tokenizer.json"
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer writes for a part of a character
logger = logging.getLogger(__name__)


class TokenTexts:
    """Splits the text of a reply into its tokens by a `tokenizers.Tokenizer`; None: nothing is split."""

    def __init__(self, tokenizer: Any = None):
        self._tokenizer = tokenizer

    @classmethod
    def find(cls, folder: Path, config: Mapping[str, Any]) -> TokenTexts:
        """Returns the tokenizer of the model of a run, of a checkpoint, or else of the model it began with."""
        if importlib.util.find_spec("tokenizers") is None:
            return cls()
        policy = (config.get("finetuning") or {}).get("policy") or {}
        given = [Path(name) for name in (policy.get("tokenizer"), policy.get("model")) if isinstance(name, str)]
        places = [folder / "model", *sorted((folder / "checkpoints").glob("*")), *given]
        for file in (place / TOKENIZER for place in places):
            if file.is_file():
                from tokenizers import Tokenizer

                try:
                    return cls(Tokenizer.from_file(str(file)))
                except Exception as error:  # noqa: BLE001  the library raises bare exceptions for a damaged file
                    logger.warning("%s cannot be read, so the page shows no tokens: %s", file, error)
        return cls()

    def split(self, token_ids: Sequence[int]) -> list[tuple[str, int]] | None:
        """Returns the text of each token and the number of tokens that it stands for; None: not known.

        Tokens that hold parts of one character are one piece. Special tokens are among them.

        Example: the ids of "a", the two halves of "é", and "<eos>" -> [("a", 1), ("é", 2), ("<eos>", 1)].
        """
        if self._tokenizer is None:
            return None
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        if any(not 0 <= token < size for token in token_ids):
            return None
        from tokenizers.decoders import DecodeStream

        stream, pieces, count = DecodeStream(skip_special_tokens=False), [], 0
        for token in token_ids:
            count += 1
            text = stream.step(self._tokenizer, token)
            if text is not None:
                pieces.append((text, count))
                count = 0
        return [*pieces, (UNFINISHED, count)] if count else pieces


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """Tells trained tokens from others: replies of the trained model in the functions that are trained."""

    target_model: str | None = None
    target_functions: tuple[str, ...] = ("<workflow>",)
    policies: frozenset[str] = frozenset()  # entries of `llms` of `_type: policy`; empty: all with known tokens

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> TrainedTokens:
        finetuning, llms = config.get("finetuning") or {}, config.get("llms") or {}
        known = {name: llm for name, llm in llms.items() if isinstance(llm, Mapping) and llm.get("train") is not False}
        policies = (name for name, llm in known.items() if llm.get("_type") == "policy")
        functions = finetuning.get("target_functions") or cls().target_functions
        return cls(finetuning.get("target_model"), tuple(functions), frozenset(policies))

    def mark(self, call: dict[str, Any]) -> list[bool] | None:
        """Returns, for each sampled token of a call, whether training uses it; None: its tokens are not known.

        A token from a restricted distribution is used if the tokens that it was chosen from were recorded.
        """
        parsed = parse_call(call)
        tokens = parsed.reply.tokens
        if tokens is None:
            return None
        if not is_trained_call(parsed, self.target_model, self.target_functions, self.policies or {parsed.llm}):
            return [False] * len(tokens.token_ids)
        if not tokens.restricted or tokens.supports is None:
            return [not tokens.restricted] * len(tokens.token_ids)
        return [bool(count) for count in tokens.supports.counts]


@dataclass(frozen=True, slots=True)
class ModelScores:
    """What the models from before and after training say of the tokens of one reply, in nats at temperature 1."""

    entropies: Sequence[float]  # of the distributions of the model after training
    changes: Sequence[float]  # log p after training minus log p before it


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """How the replies of an episode are split and colored."""

    texts: TokenTexts = field(default_factory=TokenTexts)
    trained: TrainedTokens = field(default_factory=TrainedTokens)
    baseline: float | None = None  # mean reward of the group, for a training episode; None: not one
    scores: Mapping[str, ModelScores] = field(default_factory=dict)  # by call id; empty: the models were not asked


def build_chat(row: EpisodeRow, style: ChatStyle) -> Element:
    """Returns an episode: how it ended, its scores, its messages and tool calls, and the agent's output."""
    data = row.data
    relative = None
    if style.baseline is not None and data["reward"] is not None:
        relative = data["reward"] - style.baseline
    chat = build("div", _build_facts(row, relative), class_="chat")
    shown: list[dict[str, Any]] = []
    for call in data["calls"]:
        messages = call["messages"]
        continues = messages[: len(shown)] == shown
        if not continues:
            chat.append(build("p", "The agent starts another conversation.", class_="note"))
        for message in messages[len(shown) if continues else 0 :]:
            chat.append(_build_message(message))
        chat.append(_build_reply(call, style, relative))
        shown = [*messages, call["reply"]]
    chat.append(build_details("output of the agent", build("pre", _shorten(_format(data["output"])))))
    return chat


def _build_facts(row: EpisodeRow, relative: float | None) -> Element:
    data = row.data
    parts: list[Content] = [
        build("code", row.key),
        f"outcome {data['outcome']}" + (f": {data['reason']}" if data["reason"] else ""),
    ]
    if data.get("expected") is not None:
        parts.append(f"expected {_shorten(_format(data['expected']), 300)}")
    parts.append("no reward" if data["reward"] is None else f"reward {data['reward']:.4g}")
    if relative is not None:
        parts.append(f"relative reward {relative:+.4g}")
    for name, score in data["scores"].items():
        why = "; ".join(str(score[key]) for key in ("reasoning", "error") if score.get(key) is not None)
        value = f"{score['score']:.4g}" if isinstance(score["score"], int | float) else "no score"
        parts.append(f"{name} {value}" + (f" ({_shorten(why, 300)})" if why else ""))
    return build("ul", (build("li", part) for part in parts), class_="facts")


def _build_message(message: dict[str, Any]) -> Element:
    role = str(message.get("role", "?"))
    name = message.get("name") or message.get("tool_call_id")
    text = _format(message.get("content"))
    body: list[Element] = [build("pre", _shorten(text))] if text else []
    if role == "tool":
        body = [build_details(f"result of {name or 'a tool'}, {len(text):,} characters", *body)]
    return build(
        "section",
        build("p", f"{role}{f' {name}' if name and role != 'tool' else ''}", class_="role"),
        *body,
        *_build_tool_calls(message),
        class_=f"message {role if role in ('system', 'user', 'assistant', 'tool') else 'other'}",
    )


def _build_tool_calls(message: dict[str, Any]) -> list[Element]:
    found = []
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        arguments = _format(function.get("arguments", ""))
        found.append(build_details(f"calls {function.get('name', '?')}", build("pre", _shorten(arguments))))
    return found


def _build_reply(call: dict[str, Any], style: ChatStyle, relative: float | None) -> Element:
    reply, ids, logprobs = call["reply"], call["token_ids"], call["logprobs"]
    facts = [str(call["llm"]), f"{call['num_completion_tokens']} tokens", str(call["finish_reason"])]
    if call["policy_version"] is not None:
        facts.append(describe_versions(call))
    if call.get("worker"):
        facts.append(call["worker"])
    if logprobs and None in logprobs:  # tokens that were given, not sampled
        logprobs = None
    if logprobs:
        facts.append(f"mean log-prob {statistics.fmean(logprobs):.2f}")
    pieces = style.texts.split(ids[:MAX_TOKENS]) if ids and logprobs else None
    section = build(
        "section", build("p", "reply ", build("small", ", ".join(facts)), class_="role"), class_="message reply"
    )
    if pieces is None:
        text = _format(reply.get("content"))
        section.append(build("pre", _shorten(text) if text else "(no text)"))
    else:
        marks = style.trained.mark(call) if relative is not None else None
        scores = style.scores.get(call["call_id"])
        section.append(build("pre", _build_tokens(pieces, logprobs, marks or [False] * len(ids), relative, scores)))
        if len(ids) > MAX_TOKENS:
            section.append(build("p", f"{len(ids) - MAX_TOKENS:,} more tokens are not shown.", class_="note"))
    section.extend(_build_tool_calls(reply))
    return section


def _build_tokens(
    pieces: Sequence[tuple[str, int]],
    logprobs: Sequence[float],
    marks: Sequence[bool],
    relative: float | None,
    scores: ModelScores | None,
) -> list[Element]:
    """Returns a span per token with the classes of its figures; the relative reward is one if training uses it."""
    spans, place = [], 0
    for text, count in pieces:
        part = slice(place, place + count)
        logprob, is_trained = sum(logprobs[part]), any(marks[part])
        place += count
        names, tip = [choose_logprob_class(logprob)], f"log-prob {logprob:.3f}"
        if is_trained and relative is not None:
            names, tip = [*names, "m", choose_class(relative)], f"{tip}, relative reward {relative:+.3f}"
        if scores is not None:
            entropy, change = max(scores.entropies[part]), sum(scores.changes[part])
            names += [f"e{sum(entropy > border for border in ENTROPY_STEPS)}", f"c{choose_class(change, CHANGE_STEPS)}"]
            tip = f"{tip}, entropy {entropy:.3f}, change {change:+.3f}"
        spans.append(build("span", text, class_=" ".join(names), title=tip))
    return spans


def choose_logprob_class(logprob: float) -> str:
    return f"p{sum(logprob < border for border in LOGPROB_STEPS)}"


def choose_class(value: float, steps: Sequence[float] = RELATIVE_STEPS) -> str:
    """Returns the class of a value that may be above or below 0: `a0` near it, `g1`, `g2` above, `n1`, `n2` below."""
    size = sum(abs(value) > border for border in steps)
    return "a0" if size == 0 else f"{'g' if value > 0 else 'n'}{size}"


def _format(content: Any) -> str:
    return "" if content is None else format_content(content)


def _shorten(text: str, most: int = MAX_TEXT) -> str:
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} more characters)"
