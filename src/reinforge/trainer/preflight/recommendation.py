"""What to do with a task, from what a sample of it showed; the first rule that applies decides.

    the environment fails                      fix the environment    there is nothing to measure
    the same answer gets different scores      fix the reward         noise would be trained
    rows with a better and a worse reply       DPO                    nothing needs to be sampled
    rows with thumbs                           KTO                    likewise
    most replies are unusable or cut off       fix the prompt         cheaper than training, and it helps training
    every reply has the top score              harder examples        nothing is left to learn
    groups have rewards that differ            GRPO                   with the smallest group size that suffices
      ... and the reward is rather noisy       DPO                    pairs whose rewards differ by more than the noise
    a few replies are good                     expert iteration       imitate them
    no reply is good                           SFT first              there is nothing to reinforce

The thresholds are rules of thumb. Each is a constant here, and the reason names the figure that decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from reinforge.trainer.guards import MAX_CUT, SOME_SIGNAL

GROUP_SIZES = (4, 8, 16, 32)  # group sizes to choose from
ENOUGH_SIGNAL = 0.5  # a group size suffices if this share of its groups has signal
MAX_NOISE, SOME_NOISE = 0.5, 0.2
"""Share of the spread within groups that is noise of the evaluator: too much; enough to compare only clear pairs."""
MAX_FAILURES = 0.5
"""Share of episodes that the policy fails above which the prompt comes first; `MAX_CUT` is that of cut replies."""
ALREADY = "The file already asks for that"
TOP = 0.95  # a mean of scores from 0 to 1 above which there is little left to improve


class Advice(StrEnum):
    FIX_ENVIRONMENT = "fix the environment"
    FIX_REWARD = "fix the reward"
    FIX_PROMPT = "fix the prompt"
    HARDER_EXAMPLES = "harder examples"
    SFT_FIRST = "SFT first"
    EXPERT_ITERATION = "expert iteration"
    DPO_ON_PAIRS = "DPO"
    KTO_ON_LABELS = "KTO"
    GRPO_TRAINING = "GRPO"


@dataclass(frozen=True, slots=True)
class Findings:
    """What a sample showed; shares are from 0 to 1."""

    num_examples: int  # examples with at least one reward
    num_samples: int
    missing_share: float  # episodes that the environment failed
    missing_reason: str
    failed_share: float  # episodes that the policy failed: unusable answers, too long, out of context or of time
    failure_reason: str
    cut_share: float
    mean_score: float  # mean over examples of the metric of the verdict
    is_binary: bool
    solved_share: float  # examples with a reply above its lowest score
    signal_share: float | None
    signal_by_size: Mapping[int, float] = field(default_factory=dict)
    group_size: int = 0  # the configured one; 0: the agent does not run in training
    algorithm: str = "grpo"
    noise_share: float | None = None
    """Variance of the evaluator over the variance of rewards within groups; None: unknown."""
    noise: float | None = None  # standard deviation of the score of one answer; None: unknown
    cuts_hurt: bool = False  # episodes with such a reply have lower rewards, or nothing else is known about them
    max_missing: float = 0.5
    has_pairs: bool = False
    has_labels: bool = False
    has_answers: bool = False


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to do, and why."""

    advice: Advice
    group_size: int | None  # replies per example, for GRPO; None: not about groups
    reason: str
    how: str

    def __str__(self) -> str:
        head = f"{self.advice} with groups of {self.group_size}" if self.group_size is not None else str(self.advice)
        return f"{head}: {self.reason}. {self.how}"


def recommend(found: Findings) -> Recommendation:
    for rule in (_check_environment, _check_reward, _check_rows, _check_replies, _check_room, _check_signal):
        if (advice := rule(found)) is not None:
            return advice
    return _recommend_imitation(found)


def _check_environment(found: Findings) -> Recommendation | None:
    if found.missing_share <= found.max_missing and found.num_examples:
        return None
    reason = f"{found.missing_share:.0%} of the episodes have no reward, mostly because of {found.missing_reason}"
    how = "Fix that first: a run stops if more than finetuning.outcomes.max_missing of the episodes are missing"
    return Recommendation(Advice.FIX_ENVIRONMENT, None, reason, how)


def _check_reward(found: Findings) -> Recommendation | None:
    if found.noise_share is None or found.noise_share <= MAX_NOISE:
        return None
    reason = (
        f"the same answer scored twice differs by a standard deviation of {found.noise:.2f}, which is "
        f"{min(1.0, found.noise_share):.0%} of the variance within groups, so training would mostly follow noise"
    )
    how = (
        "Use temperature 0 and a stricter rubric for a judge, average several of its scores, or check answers with code"
    )
    return Recommendation(Advice.FIX_REWARD, None, reason, how)


def _check_replies(found: Findings) -> Recommendation | None:
    if found.cut_share > MAX_CUT and found.cuts_hurt:
        reason = f"{found.cut_share:.0%} of the replies are cut off at their maximum length, and earn less"
        how = "Ask for shorter answers, or raise max_tokens in the agent (policy.max_model_len if the context is full)"
        return Recommendation(Advice.FIX_PROMPT, None, reason, how)
    if found.failed_share > MAX_FAILURES:
        reason = f"{found.failed_share:.0%} of the episodes end with an unusable answer, mostly: {found.failure_reason}"
        how = (
            "State the form of the answer with an example, or enforce it with response_format; if it still fails, "
            "imitate good answers first (SFT)"
        )
        return Recommendation(Advice.FIX_PROMPT, None, reason, how)
    return None


def _check_rows(found: Findings) -> Recommendation | None:
    nothing = "so nothing needs to be sampled or scored"
    if found.has_pairs:
        reason = f"the rows already hold a better and a worse reply to each prompt, {nothing}"
        how = _describe_algorithm(found, "dpo")
        return Recommendation(Advice.DPO_ON_PAIRS, None, reason, how)
    if found.has_labels:
        reason = f"the rows already hold replies with thumbs up or down, {nothing}"
        how = _describe_algorithm(found, "kto")
        return Recommendation(Advice.KTO_ON_LABELS, None, reason, how)
    return None


def _describe_algorithm(found: Findings, name: str) -> str:
    if found.algorithm == name and not found.group_size:
        return ALREADY
    return f"Use trajectory_builders `_type: dataset` and algorithm `_type: {name}`"


def _check_room(found: Findings) -> Recommendation | None:
    if not (found.is_binary and found.mean_score >= TOP):
        return None
    reason = f"the model already gets {found.mean_score:.0%} of the answers right"
    how = "Train on examples that it fails, or with a reward that asks for more"
    return Recommendation(Advice.HARDER_EXAMPLES, None, reason, how)


def _check_signal(found: Findings) -> Recommendation | None:
    size = _choose_group_size(found)
    if size is None:
        return None
    share = found.signal_by_size[size]
    reason = f"about {share:.0%} of groups of {size} have rewards that differ, which is what GRPO learns from"
    if found.noise_share is not None and found.noise_share > SOME_NOISE:
        reason = (
            f"rewards differ within groups, but {found.noise_share:.0%} of that variance is noise of the evaluator, "
            "and a pair can be required to differ by more"
        )
        how = (
            f"Use algorithm `_type: dpo` with min_margin {2 * (found.noise or 0):.2g}, on pairs of the best and the "
            "worst reply to each example"
        )
        return Recommendation(Advice.DPO_ON_PAIRS, None, reason, how)
    if size == found.group_size:
        how = ALREADY
    elif found.group_size:
        configured = found.signal_by_size.get(found.group_size)
        now = "" if configured is None else f" (of its groups about {configured:.0%} have signal)"
        how = f"Set num_generations of the trajectory builder to {size}; the file has {found.group_size}{now}"
    else:
        how = f"Use trajectory_builders `_type: group` with num_generations {size}"
    return Recommendation(Advice.GRPO_TRAINING, size, reason, how)


def _choose_group_size(found: Findings) -> int | None:
    """Returns the configured size if enough of its groups have signal, else the smallest that suffices; None: none."""
    shares = found.signal_by_size
    for enough in (ENOUGH_SIGNAL, SOME_SIGNAL):
        if shares.get(found.group_size, 0.0) >= enough:
            return found.group_size
        sufficient = [size for size in sorted(shares) if shares[size] >= enough]
        if sufficient:
            return sufficient[0]
    return None


def _recommend_imitation(found: Findings) -> Recommendation:
    """Returns what to do where even the largest groups mostly have equal rewards."""
    largest = max(found.signal_by_size, default=0)
    share = found.signal_by_size.get(largest, 0.0)
    if 0 < found.solved_share < 1 and found.signal_share:
        reason = (
            f"good replies are rare: only {found.solved_share:.0%} of the examples have one in {found.num_samples}, "
            f"and of groups of {largest} about {share:.0%} would have signal"
        )
        how = "Keep the good replies and imitate them: algorithm `_type: expert_iteration`, then GRPO"
        return Recommendation(Advice.EXPERT_ITERATION, None, reason, how)
    everything = f"all {found.num_examples * found.num_samples} replies of the sample have the score"
    reason = f"{everything} {found.mean_score:.3g}, so no group has signal"
    if 0 < found.solved_share < 1:
        reason = f"each example is either always or never solved in {found.num_samples} replies, so no group has signal"
    if found.has_answers:
        how = "Imitate the expected answers: trajectory builder `_type: answers`, algorithm `_type: sft`; then GRPO"
        return Recommendation(Advice.SFT_FIRST, None, reason, how)
    how = (
        "Try a prompt that says how to solve the task, or a reward that counts partial success; if the model cannot do "
        "it, imitate answers of a stronger one first (SFT)"
    )
    return Recommendation(Advice.FIX_PROMPT, None, reason, how)
