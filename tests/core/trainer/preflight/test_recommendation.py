"""Which advice follows from which findings."""

from dataclasses import replace

import pytest

from reinforge.trainer.preflight.recommendation import Advice, Findings, recommend

GOOD = Findings(
    num_examples=20, num_samples=4, missing_share=0.0, missing_reason="", failed_share=0.0, failure_reason="",
    cut_share=0.0, mean_score=0.4, is_binary=True, solved_share=0.7, signal_share=0.5,
    signal_by_size={4: 0.5, 8: 0.7, 16: 0.8, 32: 0.9}, group_size=8, noise_share=0.0, noise=0.0,
)  # fmt: skip
NO_SIGNAL = replace(GOOD, mean_score=0.0, solved_share=0.0, signal_share=0.0, signal_by_size={4: 0.0, 8: 0.0, 32: 0.0})
RARE = replace(NO_SIGNAL, solved_share=0.1, signal_share=0.1, signal_by_size={4: 0.05, 8: 0.1, 32: 0.2})


@pytest.mark.parametrize(
    ("found", "advice", "reason"),
    [
        (GOOD, Advice.GRPO_TRAINING, "about 70% of groups of 8 have rewards that differ"),
        (replace(GOOD, missing_share=0.6, missing_reason="timeout"), Advice.FIX_ENVIRONMENT, "60% of the episodes"),
        (replace(GOOD, noise_share=0.8, noise=0.3), Advice.FIX_REWARD, "standard deviation of 0.30"),
        (replace(GOOD, cut_share=0.4, cuts_hurt=True), Advice.FIX_PROMPT, "40% of the replies are cut off"),
        (replace(GOOD, cut_share=0.4), Advice.GRPO_TRAINING, "about 70%"),
        (replace(GOOD, failed_share=0.6, failure_reason="no JSON"), Advice.FIX_PROMPT, "mostly: no JSON"),
        (replace(GOOD, has_pairs=True), Advice.DPO_ON_PAIRS, "a better and a worse reply"),
        (replace(GOOD, has_labels=True), Advice.KTO_ON_LABELS, "thumbs up or down"),
        (replace(GOOD, mean_score=0.97), Advice.HARDER_EXAMPLES, "97% of the answers right"),
        (replace(GOOD, noise_share=0.3, noise=0.1), Advice.DPO_ON_PAIRS, "30% of that variance is noise"),
        (RARE, Advice.EXPERT_ITERATION, "only 10% of the examples have one in 4"),
        (replace(NO_SIGNAL, has_answers=True), Advice.SFT_FIRST, "all 80 replies of the sample have the score 0"),
        (NO_SIGNAL, Advice.FIX_PROMPT, "all 80 replies of the sample have the score 0"),
        (replace(NO_SIGNAL, solved_share=0.5), Advice.FIX_PROMPT, "always or never solved in 4 replies"),
    ],
)
def test_the_first_rule_that_applies_decides(found, advice, reason):
    advised = recommend(found)
    assert advised.advice is advice
    assert reason in advised.reason
    assert advised.how
    assert str(advised).startswith(str(advice))


@pytest.mark.parametrize(
    ("shares", "configured", "expected", "how"),
    [
        ({4: 0.5, 8: 0.7, 16: 0.8}, 8, 8, "The file already asks for that"),
        ({4: 0.2, 8: 0.4, 16: 0.6, 32: 0.7}, 8, 16, "the file has 8 (of its groups about 40% have signal)"),
        ({4: 0.05, 8: 0.1, 16: 0.2, 32: 0.3}, 8, 32, "to 32"),
        ({4: 0.6, 8: 0.8}, 0, 4, "with num_generations 4"),
    ],
)
def test_the_smallest_group_size_that_suffices_is_chosen(shares, configured, expected, how):
    advised = recommend(replace(GOOD, signal_by_size=shares, group_size=configured))
    assert advised.group_size == expected
    assert how in advised.how
    assert str(advised).startswith(f"GRPO with groups of {expected}: ")


def test_what_the_file_asks_for_is_not_asked_for_again():
    labels = replace(GOOD, has_labels=True)
    assert "`_type: kto`" in recommend(labels).how
    assert recommend(replace(labels, algorithm="kto", group_size=0)).how == "The file already asks for that"


def test_a_margin_for_pairs_is_twice_the_noise():
    advised = recommend(replace(GOOD, noise_share=0.3, noise=0.1))
    assert "min_margin 0.2" in advised.how
