"""Replaces a large model: from the log of its calls to the rows and the configuration of an ordinary run.

    logs/requests-*.jsonl  --prepare-->  replace.jsonl, replace.yml  --reinforge finetune-->  not worse than the logs?

The trained model is compared with the recorded replies on prompts that were held out, by an evaluator of the user or by
agreement with these replies. A teacher that answers one prompt in several ways agrees with itself less than always; no
model that imitates it can agree with it more often than that.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from reinforge.config.document import escape
from reinforge.config.dump import dump_data
from reinforge.engine.learning_rate import count_parameters
from reinforge.engine.small_models import LORA, LORA_FROM
from reinforge.errors import ConfigError, Problem
from reinforge.evaluation.rows import RowProblems
from reinforge.files import read_lines, replace_file, to_json
from reinforge.routing.reply_evaluator import read_evaluator
from reinforge.routing.signals import AGREEMENT, simplify_reply
from reinforge.runs.journal.packing import unpack_episode
from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.summary import RunSummary
from reinforge.traces.calibration import BASE, RouterSignals, find_student, write_router
from reinforge.traces.importer import ImportOptions, import_traces
from reinforge.traces.newest import NewestRequests, keep_newest_apart
from reinforge.traces.records import list_files, read_records
from reinforge.traces.reply_quality import ReplyQuality, find_bad_replies, score_replies
from reinforge.traces.report import ImportReport
from reinforge.traces.system_prompts import find_shared_prompt, write_template
from reinforge.types.evaluation import EvalInputItem

QUALITY = "quality"  # name of the evaluator of a user; `AGREEMENT` is that with the recorded reply
KINDS = ("prompt", "completion")
MOST_TOKENS, MARGIN_TOKENS = 1024, 16
NEEDED_ROWS = 40  # below it the held-out rows can decide nothing
LEAST_CONFIRM, MOST_CONFIRM, DECIDING = 0.25, 0.5, 6.0
"""Shares of the rows for the verdict, and rows times margin with which one or two lost examples still pass."""
BATCH_SIZE, FULL_STEPS, LORA_STEPS = 16, 400, 60
"""Rows of an optimizer step, and steps of a run: small models whose weights are all trained need more of them."""
LEAST_EPOCHS, MOST_EPOCHS = 3, 20
TERMS = ("gpt-", "o1", "o3", "o4", "claude", "gemini", "grok", "command-")
"""How names of models begin whose providers limit what their replies may be used for."""


async def answer(item: EvalInputItem, llm: Any, context: Any) -> Any:
    """The agent: sends a recorded prompt, and returns the reply as the rows hold it."""
    row: Mapping[str, Any] = item.full_dataset_entry
    prompt = item.input_obj if isinstance(item.input_obj, list) else [{"role": "user", "content": item.input_obj}]
    tools = {"tools": row["tools"]} if row.get("tools") else {}
    completion = await llm.chat.completions.create(messages=prompt, max_tokens=row["max_tokens"], **tools)
    message = completion.choices[0].message
    if not message.tool_calls:
        return message.content or ""
    calls = [{name: call["function"][name] for name in ("name", "arguments")} for call in message.tool_calls]
    return [{"role": "assistant", "content": None, "tool_calls": [{"function": call} for call in calls]}]


def agrees(item: EvalInputItem) -> float:
    r"""Returns 1.0 if two replies mean the same: equal tool calls, equal JSON, or strings equal but for space and case.

    Example: '{"a": 1, "b": 2}' and '```json\n{"b": 2, "a": 1}\n```' agree; "Yes." and "yes." agree.
    """
    return float(simplify_reply(item.output_obj) == simplify_reply(item.expected_output_obj))


@dataclass(frozen=True, slots=True)
class TeacherCosts:
    """What the recorded calls took; per call, None where the logs do not say."""

    num_calls: int
    num_failed: int
    prompt_tokens: float | None
    completion_tokens: float | None
    price: float | None  # US dollars
    p50_s: float | None
    p99_s: float | None
    models: tuple[str, ...]

    def __str__(self) -> str:
        failed = f", {self.num_failed:,} failed" if self.num_failed else ""
        slow = "" if self.p50_s is None else f"; p50 {self.p50_s:.2f} s, p99 {self.p99_s:.2f} s"
        tokens = price = "unknown"
        if self.prompt_tokens is not None and self.completion_tokens is not None:
            tokens = f"{1000 * self.prompt_tokens:,.0f} + {1000 * self.completion_tokens:,.0f}"
        if self.price is not None:
            price = f"${1000 * self.price:.4g}"
        return f"{self.num_calls:,} requests{failed}{slow}; per 1,000 requests: {tokens} tokens, price {price}"


def measure_teacher(files: Sequence[Path]) -> TeacherCosts:
    """Returns what the calls of LiteLLM's logs took, which those of `reinforge serve --record` are."""
    numbers: dict[str, list[float]] = {}
    models, num_calls, num_failed = dict[str, None](), 0, 0
    for path in files:
        for row in read_records(path, RowProblems()):
            record = row.value
            if not isinstance(record, Mapping) or "call_type" not in record:
                continue
            num_calls += 1
            if record.get("status") not in (None, "success"):
                num_failed += 1
                continue
            models.setdefault(str(record.get("model") or ""))
            for name in ("prompt_tokens", "completion_tokens", "response_cost", "response_time"):
                if isinstance(value := record.get(name), int | float):
                    numbers.setdefault(name, []).append(float(value))
    means = {name: statistics.fmean(found) for name, found in numbers.items()}
    times = sorted(numbers.get("response_time", ()))
    p50, p99 = (times[int(share * (len(times) - 1))] if times else None for share in (0.5, 0.99))
    tokens = means.get("prompt_tokens"), means.get("completion_tokens")
    return TeacherCosts(
        num_calls, num_failed, *tokens, means.get("response_cost"), p50, p99, tuple(filter(None, models))
    )


@dataclass(frozen=True, slots=True)
class Replacement:
    """What is needed for a run that replaces a model, and what the logs say of the model."""

    config: Path
    report: ImportReport
    costs: TeacherCosts
    num_tool_sets: int
    self_agreement: float | None  # of pairs of replies to one prompt; None: no prompt was answered twice
    num_repeated: int  # prompts that were answered twice or more
    newest: NewestRequests
    dropped: str = ""  # the shared system prompt that the student is not shown
    quality: ReplyQuality | None = None  # None: there is no evaluator but agreement

    def format_lines(self) -> list[str]:
        lines = [*self.report.format_lines(), f"  teacher   {self.costs}"]
        lines.append(f"  newest    {self.newest.text}")
        if self.quality is not None:
            lines.append(f"  quality   {self.quality}")
        if self.dropped:
            lines.append(
                f"  system    the student is not shown {len(self.dropped):,} characters that all requests share"
            )
        if self.num_tool_sets > 1:
            lines.append(f"  tools     {self.num_tool_sets:,} different lists of tools")
        if self.self_agreement is not None:
            lines.append(
                f"  ceiling   the teacher agrees with itself in {self.self_agreement:.1%} of pairs of replies to one "
                f"prompt ({self.num_repeated:,} prompts); imitation cannot agree more often"
            )
        if named := [name for name in self.costs.models if name.rpartition("/")[2].startswith(TERMS)]:
            lines.append(f"  license   {', '.join(named)}: check whether the provider lets you train on its replies")
        return lines

    def describe_end(self, summary: RunSummary, machine_price: float | None, router: RouterSignals) -> list[str]:
        """Returns the prices of both models and the requests after which the training has paid for itself.

        Args:
            machine_price: US dollars for an hour of the machine; None: unknown.
            router: What it may decide by.
        """
        rows, file = (self.config.with_suffix(suffix) for suffix in (".jsonl", ".router.json"))
        lines = [f"teacher        {self.costs}", *write_router(summary, rows, file, router)]
        phase, epoch = find_student(summary)
        episodes = JournalReader(summary.folder).packed_episodes(phase, epoch).values()
        calls = [call for packed in episodes for call in unpack_episode(packed)["calls"]]
        if not calls:
            return lines
        each_s = summary.wall_time_s.get(phase.upper(), 0.0) / len(episodes)
        sent, sampled = (1000 * sum(call[f"num_{kind}_tokens"] for call in calls) / len(episodes) for kind in KINDS)
        price = None if machine_price is None else each_s * machine_price / 3600
        cost = "--machine_price gives the price" if price is None else f"price ${1000 * price:.4g}"
        tokens = f"{sent:,.0f} + {sampled:,.0f} tokens"
        which = "the untouched base model, " if phase == BASE else ""
        seconds = f"{1000 * each_s:,.0f} s of this machine"
        lines.append(f"student        {which}per 1,000 requests: {tokens}, {seconds}, {cost}")
        if price is not None and machine_price is not None and self.costs.price is not None:
            training = sum(summary.wall_time_s.values()) * machine_price / 3600
            saved = self.costs.price - price
            after = f"after {training / saved:,.0f} requests" if saved > 0 else "never: the student costs more"
            lines.append(f"break-even     {after} (the run cost ${training:.4g})")
        return lines


def prepare(
    sources: Sequence[Path],
    output: Path,
    model: str,
    *,
    evaluator: str | None = None,
    margin: float = 0.02,
    drop_system: bool = False,
) -> Replacement:
    """Writes the rows and the configuration of a run that replaces the model whose calls the logs hold.

    Args:
        output: The files' name without suffix: `replace` -> `replace.jsonl` and `replace.yml`.
        evaluator: As `read_evaluator` reads it, its functions beside the files; None: agreement with the logs.
        margin: The largest loss to accept.
        drop_system: The student is not shown the system prompt that all requests share.

    Raises:
        ConfigError: The logs cannot be read, hold too few replies, or share no system prompt that is to be dropped.
    """
    rows_file = output.with_suffix(".jsonl")
    report = import_traces(sources, rows_file, ImportOptions(with_times=True))
    rows = [_tidy(row) for row in read_lines(rows_file) if "messages" in row]
    if len(rows) < NEEDED_ROWS:
        message = f"the logs hold {len(rows)} conversations with a reply, and at least {NEEDED_ROWS} are needed"
        raise ConfigError(Problem("", message, "record more requests: reinforge serve --upstream URL --record logs"))
    rows, newest = keep_newest_apart(rows)
    replies = [row["messages"][-1] for row in rows]
    longest = max(len(to_json([each.get("content"), each.get("tool_calls")])) for each in replies)
    limit = min(MOST_TOKENS, longest // 2 + MARGIN_TOKENS)

    def write_rows(rows: Sequence[Mapping[str, Any]]) -> None:
        replace_file(rows_file, "".join(f"{to_json({**row, 'max_tokens': limit})}\n" for row in rows))

    write_rows(rows)
    config = output.with_suffix(".yml")
    settings = _build_config(rows_file.name, len(rows) - newest.num_rows, model, evaluator, margin)
    replace_file(config, HEAD + dump_data(settings))
    shared = find_shared_prompt(rows) if drop_system else ""
    if shared:
        settings["finetuning"]["policy"]["chat_template"] = escape(asyncio.run(write_template(config, shared)))
    quality = None
    if evaluator is not None:
        quality = find_bad_replies(asyncio.run(score_replies(config, QUALITY)), NEEDED_ROWS)
        if quality.floor is not None:
            best = max(each for each in quality.scores.values() if each is not None)
            scored = {id_: best if score is None else score for id_, score in quality.scores.items()}
            write_rows([{**row, QUALITY: scored[str(row["id"])]} for row in rows])
            settings["trajectory_builders"]["logs"]["reward_key"] = QUALITY
            settings["finetuning"]["algorithm"]["min_reward"] = quality.floor
    replace_file(config, HEAD + dump_data(settings))
    agreement, num_repeated = measure_self_agreement(rows)
    costs = measure_teacher(list_files(list(sources), rows_file))
    tool_sets = {to_json(row.get("tools")) for row in rows if row.get("tools")}
    return Replacement(config, report, costs, len(tool_sets), agreement, num_repeated, newest, shared, quality)


def _tidy(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row whose last reply is either text or tool calls, so that it can be compared."""
    *prompt, last = row["messages"]
    last = {**last, "content": None} if last.get("tool_calls") else last
    return {**row, "messages": [*prompt, last]}


def measure_self_agreement(rows: Sequence[Mapping[str, Any]]) -> tuple[float | None, int]:
    """Returns how often two replies to one prompt agree, over the prompts with several, and how many these are."""
    replies: dict[str, list[Any]] = {}
    for row in rows:
        *prompt, last = row["messages"]
        asked = [{key: value for key, value in each.items() if key != "weight"} for each in prompt]
        replies.setdefault(to_json([asked, row.get("tools")]), []).append(simplify_reply([last]))
    repeated = [found for found in replies.values() if len(found) > 1]
    if not repeated:
        return None, 0
    shares = [statistics.fmean(a == b for a, b in combinations(found[:50], 2)) for found in repeated]
    return statistics.fmean(shares), len(repeated)


HEAD = """\
# Replaces the model whose calls were recorded. Run it again with: reinforge finetune THIS_FILE
# `reinforge config show THIS_FILE` prints every setting.
"""


def plan_splits(num_rows: int, margin: float) -> dict[str, float]:
    """Returns shares of the splits: a quarter for `confirm`, more where fewer than 6 / margin rows would decide little.

    Example: 700 rows and a margin of 0.02 need 300, so 0.43; then 0.46 for `train` and 0.11 for `select`.
    """
    confirm = min(MOST_CONFIRM, max(LEAST_CONFIRM, DECIDING / margin / num_rows))
    train, select = (round(share * (1 - confirm), 3) for share in (0.8, 0.2))
    return {"train": train, "select": select, "confirm": round(1 - train - select, 3)}


def _build_config(rows: str, num_rows: int, model: str, evaluator: str | None, margin: float) -> dict[str, Any]:
    evaluators: dict[str, Any] = {AGREEMENT: {"_type": "python", "function": f"{__name__}:agrees"}}
    if evaluator is not None:
        evaluators[QUALITY] = read_evaluator(evaluator)
    count = 0 if model.startswith("bundled:") else count_parameters(model)
    policy: dict[str, Any] = {"model": model, "batch": {"batch_size": BATCH_SIZE}}
    policy["schedule"] = {"name": "linear", "warmup_steps": 4}
    steps = FULL_STEPS
    if count is None or count >= LORA_FROM:
        policy |= LORA
        steps = LORA_STEPS
    splits = plan_splits(num_rows, margin)
    num_epochs = min(MOST_EPOCHS, max(LEAST_EPOCHS, round(steps * BATCH_SIZE / (splits["train"] * num_rows))))
    return {
        "llms": {"student": {"_type": "policy"}},
        "workflow": {"_type": "python", "function": f"{__name__}:answer"},
        "eval": {
            "general": {"max_concurrency": 64, "dataset": {"_type": "jsonl", "file_path": rows}},
            "evaluators": evaluators,
        },
        "trajectory_builders": {"logs": {"_type": "dataset", "train_on": "all"}},
        "trainer_adapters": {"here": {"_type": "local"}},
        "trainers": {"epochs": {"_type": "epoch"}},
        "finetuning": {
            "enabled": True,
            "trainer": "epochs",
            "trajectory_builder": "logs",
            "trainer_adapter": "here",
            "reward_function": {"name": QUALITY if evaluator is not None else AGREEMENT},
            "num_epochs": num_epochs,
            "policy": policy,
            "algorithm": {"_type": "sft"},
            "sampling": {"temperature": 0.0},
            "splits": {**splits, "near_duplicates": "group"},
            "gate": {"reference": "logs", "margin": margin},
            "run_configuration": {"validation_interval": 1},
        },
    }
