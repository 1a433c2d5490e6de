"""What differs between two resolved configurations."""

from __future__ import annotations

from reinforge.config.dump import compare_configs


def differing(before: str, after: str) -> list[str]:
    return [str(change) for change in compare_configs(before, after)]


def test_values_that_differ_are_listed_with_their_paths() -> None:
    assert differing("finetuning: {seed: 1}", "finetuning: {seed: 2}") == ["finetuning.seed: 1 -> 2"]
    assert differing("llms: {a: {_type: policy}}", "llms: {}") == [
        'llms.a._type: "policy" -> nothing',
        "llms: nothing -> {}",
    ]


def test_a_key_that_is_new_counts_as_having_had_its_default() -> None:
    before = "finetuning: {algorithm: {_type: grpo}, policy: {model: m}}"
    assert differing(before, before.replace("_type: grpo", "_type: grpo, clip_low: 0.2")) == []
    assert differing(before, before.replace("_type: grpo", "_type: grpo, clip_low: 0.3")) == [
        "finetuning.algorithm.clip_low: 0.2 -> 0.3"
    ]


def test_a_block_that_is_switched_on_is_a_change() -> None:
    before = "finetuning: {policy: {model: m}}"
    after = "finetuning: {policy: {model: m, lora: {r: 16}}}"
    assert differing(before, after) == [
        "finetuning.policy.lora: null -> nothing",
        "finetuning.policy.lora.r: nothing -> 16",
    ]
