"""Adaptive stress testing on the engine: the tester is the policy, the baseline what it began as."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from reinforge.config.schema import OptimizerConfig, PolicyConfig, ScheduleConfig
from reinforge.errors import ConfigError, EngineError, Problem
from reinforge.interfaces import ContextOverflow
from reinforge.redteam.core.scorer import Scorer
from reinforge.redteam.core.system import T, ValueFunctionSystem
from reinforge.redteam.dialogue import attacker_messages, target_messages
from reinforge.redteam.methods.ast.system import ASTSystem
from reinforge.redteam.methods.ast.targets import Target, as_chat_model, ask_all, is_local, model_folder
from reinforge.redteam.methods.ast.texts import Dialogue, Said
from reinforge.redteam.scorers.texts import KeywordScorer
from reinforge.rollout.threads import LoopThread
from reinforge.types.request import Message, ModelRequest, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn import Parameter

    from reinforge.engine import Engine
    from reinforge.engine.training.optimizer_step import Mover
    from reinforge.engine.training.reply_logprobs import Replies

logger = logging.getLogger(__name__)

MARKER = "quibbern"
"""The made-up word that the bundled target must not say."""


class ASTProblem(ASTSystem, ValueFunctionSystem[str, str]):
    """A tester in this process against a target here, behind a URL, or in a function.

    Conversations are `Dialogue`, what the tester says is `Said`: text that carries its exact tokens, so that a log-prob
    is asked for the tokens that were drawn. The tester sees the opening and the target's answers as a user's messages
    and its own probes as the assistant's; the target sees the other side (`redteam/dialogue.py`).

    Example:
        problem = ASTProblem()  # the bundled visitor against the bundled front desk
        problem = ASTProblem("path/to/tester", "path/to/target", RegexScorer("zorp"), policy={"lora": {"rank": 8}})
        problem = ASTProblem("path/to/tester", lambda messages: my_agent(messages[-1]["content"]))

    Args:
        attacker: The tester: folder, hub id or `bundled:NAME`.
        target: The same, frozen; anything with `async sample(request)`, such as `openai_target(...)`; or
            `function(messages)`.
        scorer: Says what is looked for; None: the bundled target's marker word.
        ppl_weight: See `ASTSystem`.
        combined_weight: See `ASTSystem`.
        defense_toxicity_weight: See `ASTSystem`.
        likelihood: See `ASTSystem`.
        baseline: Folder or id of the reference; None: the tester as it is loaded, or without its adapters.
        policy: Further settings of the tester, those of `finetuning.policy`: `lora`, `precision`, `max_context`, ...;
            `max_batch` is that of all models.
        temperature: How the tester draws.
        max_tokens: Longest probe.
        target_temperature: How the target draws.
        target_max_tokens: Longest response.
        value_head: Give the tester a critic, which PPO needs.
        device: `auto`, `cpu`, `cuda` or `mps`.
        seed: Of draws that bring no seed.
        deterministic: The same bits whatever is drawn at the same time; slower.

    Attributes:
        engine: The tester's engine.
    """

    def __init__(
        self,
        attacker: str | Path = "bundled:front_desk_visitor",
        target: Target = "bundled:front_desk",
        scorer: Scorer[str, str] | None = None,
        ppl_weight: float = 0.025,
        combined_weight: float = 0.1,
        defense_toxicity_weight: float = 0.1,
        *,
        likelihood: Literal["baseline", "target"] = "baseline",
        baseline: str | Path | None = None,
        policy: Mapping[str, Any] | None = None,
        temperature: float = 1.0,
        max_tokens: int = 48,
        target_temperature: float = 1.0,
        target_max_tokens: int = 48,
        value_head: bool = True,
        device: str = "auto",
        seed: int = 0,
        deterministic: bool = False,
    ):
        super().__init__(
            scorer or KeywordScorer(MARKER),
            ppl_weight,
            combined_weight,
            defense_toxicity_weight,
            likelihood=likelihood,
        )
        if temperature <= 0:
            message = f"{temperature:g}: equal probes teach nothing, and log-probs of greedy draws are not the policy's"
            raise ConfigError(Problem("temperature", message, "write a number above 0"))
        self._probing = SamplingParams(temperature=temperature, max_tokens=max_tokens)
        self._answering = SamplingParams(temperature=target_temperature, max_tokens=target_max_tokens)
        self._loop = LoopThread(f"reinforge-redteam-{id(self):x}")
        self._engines: list[Engine] = []

        def load(named: str | Path, settings: Mapping[str, Any], **kwargs: Any) -> Engine:
            from reinforge.engine import Engine

            folder = self._loop.run(model_folder(named))
            config = PolicyConfig(**{**self._defaults_of(folder), **settings, "model": folder})
            engine = Engine.load(config, seed=seed, device=device, deterministic=deterministic, **kwargs)
            self._engines.append(engine)
            return engine

        try:
            self.engine = load(attacker, policy or {}, keep_reference=baseline is None, critic=value_head)
            shared = {name: value for name, value in (policy or {}).items() if name == "max_batch"}
            self._baseline = None if baseline is None else load(baseline, shared)
            self._refuse_other_words()
            self._target_engine = load(target, shared) if is_local(target) else None  # type: ignore[arg-type]
        except BaseException:
            self.close()
            raise
        self._target = as_chat_model(target) if self._target_engine is None else self._target_engine.policy

    def _defaults_of(self, model: str) -> dict[str, Any]:
        """Returns settings of `finetuning.policy` that a model needs, unless others are given."""
        return {}

    def _refuse_other_words(self) -> None:
        if self._baseline is None:
            return
        ours, theirs = (engine.tokenizer.get_vocab() for engine in (self.engine, self._baseline))
        if ours != theirs:
            message = "its tokenizer has other tokens than the tester's, so their log-probs cannot be compared"
            raise ConfigError(Problem("baseline", message, "leave it out: the tester as it began is the baseline"))

    # What is said.

    def rollout_prompt_with_tester(self, x: Sequence[str]) -> list[str]:
        """Returns a probe after each conversation, with its tokens.

        Raises:
            ContextOverflow: A conversation leaves no room.
        """
        return _all_there(self._probes(x, [None] * len(x)))

    def rollout_prompt_with_target(self, x: Sequence[str]) -> list[str]:
        """Returns the target's answer to each conversation that ends with a probe.

        Raises:
            BackendError: The target does not answer.
        """
        return _all_there(self._responses(x, [None] * len(x)))

    def draw_probes(self, context: Sequence[str], seeds: Sequence[int]) -> list[str | None]:
        """Returns a probe after each conversation by its own seed; None where the context is full."""
        return [_unless_full(probe) for probe in self._probes(context, seeds)]

    def draw_responses(self, x: Sequence[str], seeds: Sequence[int]) -> list[str | None]:
        """Returns an answer to each by its own seed; None where the target's context is full."""
        return [_unless_full(response) for response in self._responses(x, seeds)]

    def _probes(self, x: Sequence[str], seeds: Sequence[int | None]) -> list[str | BaseException]:
        requests = [
            ModelRequest(_tester_view(text), _seeded(self._probing, s)) for text, s in zip(x, seeds, strict=True)
        ]
        replies = self._loop.run(ask_all(self.engine.policy, requests))
        return [r if isinstance(r, BaseException) else Said(_text(r.message), r.tokens) for r in replies]

    def _responses(self, x: Sequence[str], seeds: Sequence[int | None]) -> list[str | BaseException]:
        requests = [
            ModelRequest(_target_view(text), _seeded(self._answering, s)) for text, s in zip(x, seeds, strict=True)
        ]
        replies = self._loop.run(ask_all(self._target, requests))
        return [r if isinstance(r, BaseException) else Said(_text(r.message), message=r.message) for r in replies]

    # What it is worth.

    def get_tester_logprobs(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        """Returns the tester's log-probs, `[B, T]`, with gradient; equal conversations are computed once."""
        return self.engine.replies(self._tokens(self.engine, context, continuation)).logprobs

    def get_baseline_logprobs(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        """Returns the baseline's log-probs, `[B, T]`, without gradient."""
        said = self._tokens(self.engine, context, continuation)
        if self._baseline is None:
            return self.engine.replies(said, reference=True).logprobs
        return _frozen(self._baseline, said).logprobs.to(self.engine.model.device)

    def get_target_logprobs(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        """Returns the target's log-probs, `[B, T]`, without gradient, as if it had the tester's seat.

        Raises:
            ConfigError: The target is not a model in this process.
        """
        if self._target_engine is None:
            message = f"{self._target.model_name} does not tell log-probs of given text; only a target that is loaded "
            raise ConfigError(
                Problem("target", f"{message}here, from a folder or a hub id, does", 'keep likelihood="baseline"')
            )
        plain = [str(text) for text in continuation]
        said = self._tokens(self._target_engine, context, plain)
        return _frozen(self._target_engine, said).logprobs.to(self.engine.model.device)

    def get_sampling_logprobs(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        """Returns the sampler's own log-probs where the probes bring them, `[B, T]`."""
        import torch

        tokens = [getattr(probe, "tokens", None) for probe in continuation]
        if any(each is None for each in tokens):
            return super().get_sampling_logprobs(context, continuation)
        rows = [torch.tensor(each.logprobs, device=self.engine.model.device) for each in tokens if each is not None]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def token_mask(self, context: Sequence[str], continuation: Sequence[str], logprobs: Tensor) -> Tensor:
        """Returns where the continuations have tokens, `[B, T]`, by their true lengths where they bring tokens."""
        import torch

        tokens = [getattr(probe, "tokens", None) for probe in continuation]
        if any(each is None for each in tokens):
            return super().token_mask(context, continuation, logprobs)
        counts_B = torch.tensor([len(each.token_ids) for each in tokens if each is not None], device=logprobs.device)
        return torch.arange(logprobs.shape[1], device=logprobs.device) < counts_B[:, None]

    def value(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        """Returns the critic's values before each token, `[B, T]`."""
        return self.logprobs_and_values(context, continuation)[1]

    def logprobs_and_values(self, context: Sequence[str], continuation: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Returns the tester's log-probs and the critic's values by one forward."""
        if self.engine.critic is None:
            raise ConfigError(Problem("value_head", "the tester has no critic", "write value_head=True"))
        found = self.engine.replies(self._tokens(self.engine, context, continuation), values=True)
        assert found.values is not None
        return found.logprobs, found.values

    def _tokens(self, engine: Engine, context: Sequence[str], continuation: Sequence[str]) -> list[TokenLogprobs]:
        """Returns what is said after each conversation as tokens: those that were drawn, or the template's."""
        return [self._tokens_of(engine, text, said) for text, said in zip(context, continuation, strict=True)]

    def _tokens_of(self, engine: Engine, context: str, said: str) -> TokenLogprobs:
        request = ModelRequest(_tester_view(context))
        drawn = getattr(said, "tokens", None)
        if drawn is None:
            return self._loop.run(engine.policy.encode(request, {"role": "assistant", "content": str(said)}))
        prompt = engine.policy.renderer.render(request)
        return TokenLogprobs(prompt, drawn.token_ids, drawn.logprobs, temperature=drawn.temperature)

    # What is trained.

    def parameters(self) -> Iterator[Parameter]:
        """Yields the tester's weights, or its adapters', and the critic's."""
        yield from self.engine.learner.parameters.values()

    def compute(self, work: Callable[[], T]) -> T:
        """Returns what `work` returns, computed in the engine's thread, while nothing is drawn."""
        return self.engine.policy.sampler.call(work)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Waits for replies in flight; behind it, replies are drawn from the weights as they are then."""
        self.engine.begin_job()
        try:
            yield
        finally:
            self.engine.end_job()
            self._publish(self.engine.policy.version + 1)

    def _publish(self, version: int) -> None:
        self._loop.run(self.engine.policy.publish(version))

    def make_mover(self, settings: OptimizerConfig, schedule: ScheduleConfig) -> Mover:
        """Returns the engine's learner with these settings, so that its checkpoints hold the optimizer."""
        self.engine.config.optimizer, self.engine.config.schedule = settings, schedule
        self.engine.learner.configure(settings, schedule, self.engine.config.critic)
        return self.engine.learner

    def write(self, folder: Path, mover: Mover) -> None:
        """Writes the tester in Hugging Face's layout (PEFT's, with adapters), and what its training needs beside it."""
        self.engine.write(folder, self.engine.policy.version)

    def read(self, folder: Path, mover: Mover, num_steps: int) -> None:
        """Puts a tester back as `write` wrote it."""
        self.engine.load_weights(folder)
        self._publish(self.engine.policy.version + 1)
        if self.engine.learner.num_steps != num_steps:
            steps = self.engine.learner.num_steps
            raise EngineError(f"{folder} holds a tester after {steps} optimizer steps, expected {num_steps}")

    def save(self, folder: str | Path) -> None:
        """Writes the tester as it is, for `from_pretrained` or a later run."""
        self.engine.save(folder, self.engine.policy.version)

    def close(self) -> None:
        """Gives the models back."""
        for engine in self._engines:
            engine.close()
        self._engines = []
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _frozen(engine: Engine, said: Sequence[TokenLogprobs]) -> Replies:
    import torch

    with torch.no_grad():
        return engine.replies(said)


def _tester_view(context: str) -> list[Message]:
    dialogue = Dialogue(context)
    return attacker_messages(str(dialogue.turns[0]), [(str(p), str(r)) for p, r in dialogue.exchanges])


def _target_view(conversation: str) -> list[Message]:
    dialogue = Dialogue(conversation)
    if dialogue.open_probe is None:  # a text of the user's own: nobody knows who said what
        return [{"role": "user", "content": str(conversation)}]
    turns = [(str(p), str(r)) for p, r in dialogue.exchanges]
    return target_messages(str(dialogue.turns[0]), turns, str(dialogue.open_probe))


def _seeded(params: SamplingParams, seed: int | None) -> SamplingParams:
    return SamplingParams(temperature=params.temperature, max_tokens=params.max_tokens, seed=seed)


def _text(message: Message) -> str:
    return str(message.get("content") or "")


def _all_there(found: Sequence[str | BaseException]) -> list[str]:
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return [each for each in found if isinstance(each, str)]


def _unless_full(found: str | BaseException) -> str | None:
    if isinstance(found, ContextOverflow):
        return None
    if isinstance(found, BaseException):
        raise found
    return found
