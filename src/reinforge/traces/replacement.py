"""Replaces a large model: from the log of its calls to the rows and the configuration of an ordinary run.

    logs/requests-*.jsonl  --prepare-->  replace.jsonl, replace.yml  --reinforge finetune-->  not worse than the logs?

The trained model is compared with the recorded replies on prompts that were held out, by an evaluator of the user or by
agreement with these replies. Two replies of a teacher to a prompt agree with the probability sum p_i^2 over what it
may reply. A model that always gives its likeliest reply agrees with max p_i, which is at most the root of that sum.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforge.config.document import escape, parse_yaml
from reinforge.config.dump import dump_data
from reinforge.config.loader import load_config
from reinforge.engine.learning_rate import count_parameters
from reinforge.engine.small_models import LORA, LORA_FROM
from reinforge.errors import ConfigError, Problem
from reinforge.files import read_lines, replace_file, to_json
from reinforge.routing.reply_evaluator import read_evaluator
from reinforge.routing.signals import AGREEMENT, simplify_reply
from reinforge.runs.journal.packing import unpack_episode
from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.summary import RunSummary
from reinforge.traces.calibration import BASE, RouterSignals, find_student, write_router
from reinforge.traces.importer import ImportOptions, import_traces
from reinforge.traces.newest import NewestRequests, keep_newest_apart
from reinforge.traces.records import ANSWERS, VOTED, list_files
from reinforge.traces.reply_quality import ReplyQuality, choose_replies
from reinforge.traces.report import ImportReport
from reinforge.traces.system_prompts import find_shared_prompt, load_student_tokenizer, write_template
from reinforge.traces.teacher import (
    AskedTeacher,
    Row,
    TeacherCosts,
    TeacherOptions,
    group_by_prompt,
    measure_self_agreement,
    measure_teacher,
    open_teacher,
    tidy_reply,
)
from reinforge.trainer.evaluate import load_examples
from reinforge.trainer.setup.components import ComponentBuilder
from reinforge.types.evaluation import EvalInputItem

QUALITY = "quality"  # name of the evaluator of a user; `AGREEMENT` is that with the recorded reply
KINDS = ("prompt", "completion")
MOST_TOKENS, MARGIN_TOKENS = 1024, 16
NEEDED_ROWS = 40  # below it the held-out rows can decide nothing
LEAST_CONFIRM, MOST_CONFIRM, DECIDING = 0.25, 0.5, 6.0
"""Shares of the rows for the verdict, and rows times margin with which one or two lost examples still pass."""
BATCH_SIZE, FULL_STEPS, LORA_STEPS = 16, 400, 60
"""Rows of an optimizer step, and steps of a run: small models whose weights are all trained need more of them."""
LEAST_EPOCHS, MOST_EPOCHS, DISTILLATION_EPOCHS = 3, 20, 2
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
    asked: AskedTeacher | None = None  # None: the large model is not asked again
    num_changed: int = 0  # prompts for which another reply than the recorded one is imitated

    def format_lines(self) -> list[str]:
        lines = [*self.report.format_lines(), f"  teacher   {self.costs}"]
        lines.append(f"  newest    {self.newest.text}")
        if self.quality is not None:
            lines.append(f"  quality   {self.quality}")
        if self.asked is not None:
            failed = f"; {self.asked.describe_failures()}" if self.asked.failures else ""
            lines.append(f"  vote      {self.num_changed:,} prompts get another reply than the recorded one{failed}")
        if self.dropped:
            lines.append(
                f"  system    the student is not shown {len(self.dropped):,} characters that all requests share"
            )
        if self.num_tool_sets > 1:
            lines.append(f"  tools     {self.num_tool_sets:,} different lists of tools")
        if self.self_agreement is not None:
            lines.append(
                f"  ceiling   the teacher agrees with itself in {self.self_agreement:.1%} of pairs of replies to one "
                f"prompt ({self.num_repeated:,} prompts); no student agrees with it in more than "
                f"{math.sqrt(self.self_agreement):.1%}"
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
    teacher: TeacherOptions | None = None,
) -> Replacement:
    """Writes the rows and the configuration of a run that replaces the model whose calls the logs hold.

    Args:
        output: The files' name without suffix: `replace` -> `replace.jsonl` and `replace.yml`.
        evaluator: As `read_evaluator` reads it, its functions beside the files; None: agreement with the logs.
        margin: The largest loss to accept.
        drop_system: The student is not shown the system prompt that all requests share.
        teacher: How the model is asked again; None: only its recorded replies are used.

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
    rows = [{**row, "max_tokens": min(MOST_TOKENS, longest // 2 + MARGIN_TOKENS)} for row in rows]
    _write_rows(rows_file, rows)
    config = output.with_suffix(".yml")
    settings = _build_config(rows_file.name, len(rows) - newest.num_rows, model, evaluator, margin)
    replace_file(config, HEAD + dump_data(settings))
    shared = find_shared_prompt(rows) if drop_system else ""
    if shared:
        settings["finetuning"]["policy"]["chat_template"] = escape(asyncio.run(write_template(config, shared)))
    costs = measure_teacher(list_files(list(sources), rows_file))
    groups: list[list[Row]] = [[row] for row in rows]
    asked: AskedTeacher | None = None
    quality: ReplyQuality | None = None
    num_changed = 0
    if teacher is not None:
        rows_file = output.with_suffix(VOTED)
        stage = {"num_epochs": settings["finetuning"].pop("num_epochs"), "dataset": rows_file.name}
        settings["finetuning"]["pipeline"] = {"imitate": stage}
        replace_file(config, HEAD + dump_data(settings))
        groups, asked = asyncio.run(_ask_again(config, rows, costs, teacher, probes=not shared))
        if asked.can_score:
            _add_distillation(settings, teacher.file)
    if evaluator is not None or teacher is not None:
        metric = settings["finetuning"]["reward_function"]["name"]
        chosen, quality = asyncio.run(choose_replies(config, QUALITY if evaluator else None, groups, NEEDED_ROWS))
        _write_rows(rows_file, chosen)
        pairs = zip(chosen, groups, strict=True)
        num_changed = sum(
            simplify_reply(row["messages"]) != simplify_reply(old["messages"]) for row, (old, *_) in pairs
        )
        if quality.floor is not None:
            settings["trajectory_builders"]["logs"]["reward_key"] = metric
            settings["finetuning"]["algorithm"]["min_reward"] = quality.floor
    replace_file(config, HEAD + dump_data(settings))
    agreement, num_repeated = measure_self_agreement([row for group in groups for row in group])
    tool_sets = {to_json(row.get("tools")) for row in rows if row.get("tools")}
    found = (len(tool_sets), agreement, num_repeated, newest, shared)
    return Replacement(config, report, costs, *found, quality, asked, num_changed)


def _write_rows(file: Path, rows: Sequence[Row]) -> None:
    replace_file(file, "".join(f"{to_json(row)}\n" for row in rows))


def _tidy(row: dict[str, Any]) -> dict[str, Any]:
    *prompt, last = row["messages"]
    return {**row, "messages": [*prompt, tidy_reply(last)]}


async def _ask_again(
    config: Path, rows: Sequence[Row], costs: TeacherCosts, options: TeacherOptions, *, probes: bool
) -> tuple[list[list[Row]], AskedTeacher]:
    """Returns the rows of each prompt that is trained on: the recorded ones, then one for each further reply."""
    settings = load_config(config, overrides=options.overrides)
    async with ComponentBuilder(settings) as student, ComponentBuilder(load_config(options.file)) as builder:
        asked = await open_teacher(builder, config.with_suffix(ANSWERS), costs, options)
        ids = {str(item.id) for item in await load_examples(student, "train", None)}
        groups = group_by_prompt([row for row in rows if str(row["id"]) in ids])
        if probes:
            await asked.probe_scores(await load_student_tokenizer(student))
        await asked.ask(list(groups), rows[0]["max_tokens"], builder.get_max_concurrency())
    for prompt, group in groups.items():
        shared = group[0]["messages"][:-1]
        group += [{**group[0], "messages": [*shared, reply]} for reply in asked.get_replies(prompt)]
    return list(groups.values()), asked


def _add_distillation(settings: dict[str, Any], file: Path) -> None:
    """Adds a stage in which the teacher scores the student's own replies."""
    (entry,) = parse_yaml(file.read_bytes()).data["llms"].values()
    settings["llms"]["teacher"], settings["workflow"]["llm"] = entry, "student"
    settings["trajectory_builders"]["own"] = {"_type": "group", "num_generations": 1}
    settings["finetuning"]["pipeline"]["distill"] = {
        "num_epochs": DISTILLATION_EPOCHS,
        "algorithm": {"_type": "distill", "teacher": "teacher"},
        "trajectory_builder": "own",
        "sampling": {"temperature": 1.0},
    }


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


def plan_epochs(num_rows: int, train: float, steps: int) -> int:
    """Returns the epochs that make so many steps. Example: 1000 rows, of which 0.6 train, and 400 steps -> 11."""
    return min(MOST_EPOCHS, max(LEAST_EPOCHS, round(steps * BATCH_SIZE / (train * num_rows))))


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
            "num_epochs": plan_epochs(num_rows, splits["train"], steps),
            "policy": policy,
            "algorithm": {"_type": "sft"},
            "sampling": {"temperature": 0.0},
            "splits": {**splits, "near_duplicates": "group"},
            "gate": {"reference": "logs", "margin": margin},
            "run_configuration": {"validation_interval": 1},
        },
    }
