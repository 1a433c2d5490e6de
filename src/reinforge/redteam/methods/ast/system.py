"""Adaptive stress testing on text: the conversation is one growing string, with the reward of ASTPrompter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from reinforge.redteam.core.scorer import Scorer
from reinforge.redteam.core.system import System, check_count
from reinforge.redteam.rewards import AttackWeights, compute_attack_reward


class ASTSystem(System[str, str]):
    """A system on text. Subclass it with your models; `advance` and `reward` are given.

    reward = combined_weight * score(probe + response) + defense_toxicity_weight * score(response)
             - ppl_weight * exp(-mean_t log p(probe_t))

    Example:
        class Mine(ASTSystem):
            def rollout_prompt_with_tester(self, x): ...
            def rollout_prompt_with_target(self, x): ...
            def get_tester_logprobs(self, context, continuation): ...
            def get_baseline_logprobs(self, context, continuation): ...
            def get_target_logprobs(self, context, continuation): ...
            def parameters(self): ...

        Mine(KeywordScorer("quibbern"), ppl_weight=0.01)

    Differs from the paper: p is the baseline's, not the target's, because many targets do not report log-probs; see
    `likelihood`. A probe without tokens has no perplexity: its reward lacks the last term, and no algorithm trains on
    it.

    Args:
        scorer: Scores texts.
        ppl_weight: Weight of the probe's perplexity, which is subtracted; 0: no log-probs are computed.
        combined_weight: Weight of the score of probe and response together.
        defense_toxicity_weight: Weight of the score of the response.
        likelihood: The model whose log-probs give the perplexity.
    """

    def __init__(
        self,
        scorer: Scorer[str, str],
        ppl_weight: float = 0.025,
        combined_weight: float = 0.1,
        defense_toxicity_weight: float = 0.1,
        *,
        likelihood: Literal["baseline", "target"] = "baseline",
    ):
        super().__init__(scorer)
        self.ppl_weight, self.combined_weight = ppl_weight, combined_weight
        self.defense_toxicity_weight, self.likelihood = defense_toxicity_weight, likelihood

    def advance(self, context: str, probe: str, response: str) -> str:
        return context + probe + response

    def reward(self, context: Sequence[str], probe: Sequence[str], response: Sequence[str]) -> list[float]:
        """Returns the reward of each turn; the scorer is called once with all texts."""
        if not probe:
            return []
        weights = AttackWeights(self.combined_weight, self.defense_toxicity_weight, self.ppl_weight)
        together = [p + r for p, r in zip(probe, response, strict=True)]
        texts = [*together, *response]
        scores = check_count(self.scorer.score(texts), len(texts), "scorer.score", "text")
        perplexities: Sequence[float | None] = (
            self.perplexities(context, probe) if self.ppl_weight else [None] * len(probe)
        )
        return [
            compute_attack_reward(weights, float(combined), float(alone), perplexity)
            for combined, alone, perplexity in zip(
                scores[: len(probe)], scores[len(probe) :], perplexities, strict=True
            )
        ]

    def perplexities(self, context: Sequence[str], probe: Sequence[str]) -> list[float | None]:
        """Returns exp(-mean log p) of each probe under the model that `likelihood` names; None if it has no tokens."""
        from reinforge.engine.training.reply_logprobs import perplexities

        of_target = self.likelihood == "target"
        get_logprobs = self._get_target_logprobs_and_validate if of_target else self._get_baseline_logprobs_and_validate
        logprobs = get_logprobs(context, probe)
        mask = self.token_mask(context, probe, logprobs)
        has_tokens = mask.any(dim=1).tolist()
        found = perplexities(logprobs, mask)
        return [value if known else None for value, known in zip(found, has_tokens, strict=True)]
