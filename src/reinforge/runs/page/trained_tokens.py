"""Which tokens of an episode training uses: replies of the trained model in the functions that are trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reinforge.rollout.episode import is_trained_call
from reinforge.runs.journal.episode_json import parse_call


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """Tells trained tokens from others by the settings of a run.

    Attributes:
        target_model: `finetuning.target_model`.
        target_functions: `finetuning.target_functions`.
        policies: Entries of `llms` of `_type: policy`; empty: every model whose exact tokens are known.
    """

    target_model: str | None = None
    target_functions: tuple[str, ...] = ("<workflow>",)
    policies: frozenset[str] = frozenset()

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> TrainedTokens:
        """Returns the settings of a run."""
        finetuning, llms = config.get("finetuning") or {}, config.get("llms") or {}
        policies = (name for name, llm in llms.items() if isinstance(llm, Mapping) and llm.get("_type") == "policy")
        functions = finetuning.get("target_functions") or cls().target_functions
        return cls(finetuning.get("target_model"), tuple(functions), frozenset(policies))

    def mark(self, call: dict[str, Any]) -> list[bool] | None:
        """Returns, for each sampled token of a call, whether training uses it; None: its tokens are not known.

        A token from a restricted distribution is used if the tokens that it was chosen from were recorded.

        Args:
            call: The call, as an episode in the journal holds it.
        """
        parsed = parse_call(call)
        tokens = parsed.reply.tokens
        if tokens is None:
            return None
        if not is_trained_call(parsed, self.target_model, self.target_functions, self.policies or {parsed.llm}):
            return [False] * len(tokens.token_ids)
        if not tokens.restricted:
            return [True] * len(tokens.token_ids)
        if tokens.supports is None:
            return [False] * len(tokens.token_ids)
        return [bool(count) for count in tokens.supports.counts]
