"""The trajectory builder `_type: answers`: the agent's own prompts, with the expected answers as replies.

    the agent asks "Spell 'sun' backward. Answer: <answer>"; nus is expected
        => with `form: "Answer: {answer}"` the reply "Answer: nus" to that prompt, if the evaluators score it well

The agent runs as in any episode, but no reply is sampled: each of its calls gets the expected answer. So the rows have
the prompts that the policy will see, and a reply that the evaluators do not accept is never imitated. This is
supervised fine-tuning without written demonstrations, and a start for reinforcement learning where the policy
solves so little that no reward differs.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

from pydantic import Field, field_validator

from reinforge.config.schema import Config, TrajectoryBuilderConfig
from reinforge.dialects.tool_calls import prepare_request
from reinforge.errors import ConfigError, ContextOverflow, EvaluationError, Problem
from reinforge.evaluation.demonstrations import RowFormat
from reinforge.evaluation.run import DatasetEvaluation
from reinforge.evaluation.shapes import MESSAGES
from reinforge.interfaces import Algorithm, Builder, PolicyServer
from reinforge.registry import register_trajectory_builder
from reinforge.rollout.episode import build_episode_item, extract_text, is_trained_call
from reinforge.rollout.models.policy_llm import find_adapters
from reinforge.runs.rows import BASELINE
from reinforge.trainer.builders.dataset import DatasetTrajectoryBuilder
from reinforge.trainer.builders.group import find_policy_entries, reward_of_episode, select_epoch_examples
from reinforge.trainer.builders.offline import refuse_algorithm
from reinforge.types.episode import EpisodeKey, EpisodeRecord, ModelCall
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.request import ModelReply, ModelRequest, TokenLogprobs
from reinforge.types.trajectory import Trajectory

PLACE, FIRST = "{answer}", "{first}"  # the second is the first of a list of right answers
FORMS = (PLACE, f"Answer: {PLACE}", f"#### {PLACE}", f"\\boxed{{{PLACE}}}", f"<answer>{PLACE}</answer>")
"""How a reply may show its answer; those that the agent's own good replies have are tried before."""
NUM_OWN_FORMS = 2
NUM_TRIED = 8  # examples on which forms are compared
PHASE = "answers"


NO_ANSWERS = Problem(
    "",
    "none of the training examples has an expected answer to imitate",
    "name their column (`answer_key` or `structure`), or let the agent run: `_type: group`",
)


@dataclass(frozen=True, slots=True)
class GivenReply:
    """A model that has one reply to every request; calls of tools that are offered, and nothing else, are made."""

    text: str
    is_policy: ClassVar[bool] = False
    model_name: ClassVar[str] = "expected answer"

    async def sample(self, request: ModelRequest) -> ModelReply:
        if request.tools:
            from reinforge.dialects.families.family import ParsedReply  # for agents with tools alone
            from reinforge.dialects.text_tools import read_calls, write_calls

            if (uses := read_calls(self.text, request.tools)) and write_calls(uses) == self.text:
                calls = ParsedReply("", [(use.name, use.arguments) for use in uses])
                return ModelReply(calls.build_message("expected"), "tool_calls", None)
        return ModelReply({"role": "assistant", "content": self.text}, "stop", None)


class NotImitatedError(Exception):
    """Why an expected answer is not imitated."""


class AnswersTrajectoryBuilderConfig(TrajectoryBuilderConfig, name="answers"):
    """Trains on the expected answers, as replies to the agent's own prompts, where the evaluators accept them."""

    examples_per_epoch: int | None = Field(
        default=None, ge=1, description="Training examples per epoch, shuffled on each pass; null: all."
    )
    form: str | None = Field(
        default=None,
        description="The reply, with {answer} where the expected answer belongs, such as `#### {answer}`, or {first} "
        "for the first of a list of right answers; null: of the answer alone, usual forms, and those of the agent's "
        "own best replies, the one that scores best.",
    )
    required: bool = Field(
        default=True,
        description="False: where no expected answer can be imitated, the stage is passed over with a note; true: the "
        "run stops.",
    )

    @field_validator("form")
    @classmethod
    def _check_form(cls, form: str | None) -> str | None:
        if form is not None and PLACE not in form and FIRST not in form:
            raise ValueError(f"{form!r} has no {PLACE}, where the expected answer belongs")
        return form


class AnswersTrajectoryBuilder(DatasetTrajectoryBuilder):
    """Makes a group of each training example: the agent's calls, with the expected answer as their reply."""

    trajectory_builder_config: AnswersTrajectoryBuilderConfig  # type: ignore[assignment]  # settings of its own

    def __init__(
        self,
        trajectory_builder_config: AnswersTrajectoryBuilderConfig,
        policy: Callable[[], PolicyServer | None] = lambda: None,
        policies: Collection[str] = (),
    ):
        super().__init__(trajectory_builder_config, policy)  # type: ignore[arg-type]  # it reads what both have
        self.policies = policies
        self._form: str | None = None
        self._least = 0.0  # the reward that a reply must reach to be imitated
        self._has_told = False
        self._records = dict[str, EpisodeRecord]()  # with the expected answer, by example: it is scored once

    def validate(
        self, config: Config, algorithm: Algorithm, examples: Sequence[EvalInputItem], row_locations: Mapping[str, str]
    ) -> list[Problem]:
        problems = refuse_algorithm(algorithm, RowFormat(MESSAGES))
        if len(names := list(dict.fromkeys(find_adapters(config.llms).values()))) > 1:
            message = f"expected answers do not say which adapter to train: {', '.join(names)}"
            problems.append(Problem("", message, "train one adapter per run"))
        required = self.trajectory_builder_config.required
        if required and examples and all(item.expected_output_obj is None for item in examples):
            problems.append(NO_ANSWERS)
        return problems

    async def _build_groups(self, epoch: int) -> list[list[Trajectory]]:
        if self.may_train_nothing:  # it is passed over
            return []
        try:
            return await self._imitate(epoch)
        except ConfigError as error:
            if self.trajectory_builder_config.required:
                raise
            self.may_train_nothing = True
            self._notes.append(f"no expected answer is imitated: {error.problems[0].message}")
            return []

    async def _imitate(self, epoch: int) -> list[list[Trajectory]]:
        answers = {
            str(item.id): item.expected_output_obj
            for item in (self.evaluation or self._find_evaluation()).examples("train")
            if item.expected_output_obj is not None
        }
        if not answers:
            raise ConfigError(NO_ANSWERS)
        if self._form is None:
            self._form = await self._choose_form(answers)
        count, seed = self.trajectory_builder_config.examples_per_epoch, self.run_config.seed
        ids = select_epoch_examples(list(answers), count, seed, epoch - self.first_epoch)
        new = {id_: answers[id_] for id_ in ids if id_ not in self._records}
        self._records |= {record.key.example_id: record for record in await self._run(self._form, new)}
        groups, reasons = list[list[Trajectory]](), Counter[str]()
        for record in (self._records[id_] for id_ in ids if id_ in self._records):
            try:
                groups.append(await self._build_replies(record))
            except (ContextOverflow, NotImitatedError) as error:
                reasons[str(error)] += 1
        why = "; ".join(f"{count} × {reason}" for reason, count in reasons.most_common(2) if count)
        if not groups:
            message = f"none of the {len(ids)} expected answers can be imitated: {why}"
            raise ConfigError(Problem("", message, "use another form, or let the agent run: `_type: group`"))
        if why and not self._has_told:
            self._has_told = True
            self._notes.append(f"{len(ids) - len(groups)} of {len(ids)} expected answers are not imitated: {why}")
        return groups

    async def _run(self, form: str, answers: Mapping[str, Any]) -> list[EpisodeRecord]:
        place = (*FORMS, form).index(form)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._run_one(EpisodeKey(PHASE, BASELINE, id_, place), write_reply(form, expected)))
                for id_, expected in answers.items()
            ]
        return [record for task in running for record in task.result()]

    async def _run_one(self, key: EpisodeKey, text: str) -> list[EpisodeRecord]:
        """Runs and scores an episode in which the policy says this in reply to every request; it is not recorded."""
        evaluation, reply = copy(self._find_evaluation()), GivenReply(text)
        runner = evaluation.runner = copy(evaluation.runner)
        runner.llms = {name: reply if llm.is_policy else llm for name, llm in runner.llms.items()}
        evaluation.listener, evaluation.recall = lambda record: None, lambda key, item: None
        return await evaluation.collect([key])

    async def _choose_form(self, answers: Mapping[str, Any]) -> str:
        """Returns the form whose replies score best, and sets the reward from which a reply is imitated.

        Example: untouched 0.2 on average, "nus" 0.01, "Answer: nus" 1 => "Answer: {answer}", replies from 0.6.
        """
        tried = dict(list(answers.items())[:NUM_TRIED])
        own = [record for record in self._find_own_episodes() if record.reward is not None]
        mean = fmean(record.reward for record in own) if own else 0.0  # type: ignore[misc]  # none is None
        highest = max((record.reward for record in own if record.reward is not None), default=None)
        given = self.trajectory_builder_config.form
        usual = (PLACE, *((FIRST,) if any(isinstance(each, list) for each in tried.values()) else ()))
        forms = (given,) if given is not None else dict.fromkeys((*usual, *self._find_own_forms(own), *FORMS))
        found, failures = dict[str, float](), Counter[str]()
        for form in forms:
            records = await self._run(form, tried)
            rewards = [reward for record in records if (reward := reward_of_episode(record)) is not None]
            failures.update(record.reason for record in records if record.reason)
            found[form] = fmean(rewards) if rewards else mean
            if highest is not None and found[form] > mean and found[form] >= highest:
                break
        best = max(found, key=lambda form: found[form])
        if found[best] <= mean:
            why = f"; {failures.most_common(1)[0][0]}" if failures else ""
            message = (
                f"the evaluators do not accept the expected answers as replies: {found[best]:.3g} on {len(tried)} "
                f"examples, {mean:.3g} for the agent's own replies{why}"
            )
            fix = f"set `form` to how a reply shows its answer, such as `#### {PLACE}`, or let the agent run"
            raise ConfigError(Problem("form", message, fix))
        self._least = (mean + found[best]) / 2
        self._notes.append(
            f"imitating the expected answers in the form {best!r}, which scores {found[best]:.3g} on {len(tried)} "
            f"training examples ({mean:.3g} for the agent's own replies)"
        )
        return best

    def _find_own_episodes(self) -> list[EpisodeRecord]:
        """Returns the untouched agent's episodes on the `select` examples."""
        evaluation = self._find_evaluation()
        items = {str(item.id): item for item in evaluation.examples("select")}
        return evaluation.load_episodes(BASELINE, items, "validate")

    def _find_evaluation(self) -> DatasetEvaluation:
        evaluation = getattr(self.evaluation, "inner", self.evaluation)  # a stage of a pipeline wraps that of the run
        if not isinstance(evaluation, DatasetEvaluation):
            raise EvaluationError("builder.evaluation is not that of a run, which runs and scores the expected answers")
        return evaluation

    def _find_own_forms(self, own: Sequence[EpisodeRecord]) -> list[str]:
        """Returns how the agent's best replies write the expected answer: the line that has it, most frequent first."""
        best = max((record.reward for record in own if record.reward is not None), default=0.0)
        counts = Counter[str]()
        for record in own:
            if record.reward == best and record.calls and record.item.expected_output_obj is not None:
                answer = write_answer(record.item.expected_output_obj)
                lines = extract_text(record.calls[-1].reply.message.get("content")).splitlines()
                counts.update([line.strip().replace(answer, PLACE) for line in lines if answer and answer in line][-1:])
        return [form for form, _ in counts.most_common(NUM_OWN_FORMS)]

    async def _build_replies(self, record: EpisodeRecord) -> list[Trajectory]:
        """Returns a trajectory for each call of the policy that is trained.

        Raises:
            NotImitatedError: The reply has no score or a low one; the agent offers tools and the answer calls none, so
                that one that answers at once would learn to guess; its prompt has no chat template; or its `max_tokens`
                are too few.
        """
        if (reward := reward_of_episode(record)) is None:
            raise NotImitatedError(f"no score ({record.outcome})")
        if reward < self._least:
            raise NotImitatedError(f"a score below {self._least:.3g} as a reply")
        config, found = self.run_config, list[Trajectory]()
        for call in record.calls:
            if call.request.tools and not call.reply.message.get("tool_calls"):
                raise NotImitatedError("the agent offers tools")
            if call.request.prompt is not None:
                raise NotImitatedError("the agent writes its prompts without a chat template")
            if is_trained_call(call, config.target_model, config.target_functions, self.policies):
                found.append(await self._build_reply(call, record.key.example_id, len(found)))
        if not found:
            raise NotImitatedError("no trained call of the agent")
        return found

    async def _build_reply(self, call: ModelCall, example: str, number: int) -> Trajectory:
        policy = self.policy()
        if policy is None:
            why = "the backend serves no policy, so expected answers cannot be tokenized"
            raise ConfigError(Problem("finetuning.trainer_adapter", why, "use `_type: local`"))
        request, reply = prepare_request(call.request, policy.chat_template), call.reply.message
        tokens, limit = await policy.encode(request, reply), call.request.sampling.max_tokens
        if limit is not None and isinstance(tokens, TokenLogprobs) and len(tokens.token_ids) > limit:
            raise NotImitatedError("longer than the agent's max_tokens")
        return Trajectory(
            episode=[
                *(build_episode_item(message, trained=False) for message in request.messages),
                build_episode_item(reply, logprobs=tokens),
            ],
            reward=1.0,
            metadata={"generation": number},
            group_id=example,
            episode_id=f"{PHASE}/{example}/{number}",
        )


def write_answer(expected: Any) -> str:
    """Returns an expected answer as a model writes it: a string as it is, anything else as JSON."""
    return expected if isinstance(expected, str) else json.dumps(expected, ensure_ascii=False, default=str)


def write_reply(form: str, expected: Any) -> str:
    """Returns a reply that shows an expected answer: "So {first}" and ["a", "b"] -> "So a"."""
    first = expected[0] if isinstance(expected, list) and expected else expected
    parts = re.split(f"({re.escape(PLACE)}|{re.escape(FIRST)})", form)
    return "".join({PLACE: write_answer(expected), FIRST: write_answer(first)}.get(part, part) for part in parts)


@register_trajectory_builder(config_type=AnswersTrajectoryBuilderConfig)
async def answers_builder(
    config: AnswersTrajectoryBuilderConfig, builder: Builder
) -> AsyncIterator[AnswersTrajectoryBuilder]:
    yield AnswersTrajectoryBuilder(config, builder.policy, find_policy_entries(builder))
