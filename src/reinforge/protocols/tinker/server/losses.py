"""Tinker's losses by name, as losses of the engine, and a client's data as training samples.

    model_input   1 2 3      position i of the input predicts target i
    target_tokens 2 3 9   =>   token_ids 1 2 3 9, targets - 2 3 9, loss_mask F T T T

Each loss is a sum over all positions of all data, with the client's numbers for each position. A position whose numbers
are 0 adds nothing, except to `dro`, whose penalty pulls each position to the log-prob that is given for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from reinforge.errors import did_you_mean
from reinforge.protocols.tinker.server.wire import TinkerDatum
from reinforge.types.sample import BoolArray, FloatArray, LossSpec, TrainingSample

TARGETS, MASK = "target_tokens", "sequence_ratio_mask"
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
"""Between which the ratio stays; the service's defaults of ppo."""
MIN_CONTEXT = 8  # least number of leading positions without a number that are computed once for several data


@dataclass(frozen=True, slots=True)
class TinkerLoss:
    build: Callable[[Mapping[str, float]], LossSpec]  # returns the engine's loss for the values of `settings`
    numbers: tuple[str, ...] = ("logprobs", "advantages")
    """The arrays that it reads besides the target tokens; the last one is the advantage or the weight."""
    settings: Mapping[str, float] = field(default_factory=dict)  # its settings in `loss_fn_config`, with their defaults
    needs_mask: bool = False  # it reads `sequence_ratio_mask`
    skips_zeros: bool = True  # a position whose numbers are all 0 adds nothing


def _clip(name: str) -> Callable[[Mapping[str, float]], LossSpec]:
    def build(config: Mapping[str, float]) -> LossSpec:
        low, high = config["clip_low_threshold"], config["clip_high_threshold"]
        if not 0 <= low <= 1 <= high:
            raise ValueError(
                f"loss_fn_config: clip_low_threshold is {low:g} and clip_high_threshold {high:g}; they bound the "
                "ratio of probabilities, so 0 <= low <= 1 <= high"
            )
        return LossSpec(name, {"clip_low": 1 - low, "clip_high": high - 1, "tis_cap": None})

    return build


LOSSES = {
    "cross_entropy": TinkerLoss(lambda _: LossSpec("weighted_cross_entropy"), ("weights",)),
    "importance_sampling": TinkerLoss(
        lambda _: LossSpec("clipped_pg", {"clip_low": 1.0, "clip_high": math.inf, "tis_cap": None})
    ),
    "ppo": TinkerLoss(_clip("clipped_pg"), settings=CLIP),
    "cispo": TinkerLoss(_clip("cispo"), settings=CLIP),
    "gspo": TinkerLoss(_clip("gspo"), settings=CLIP, needs_mask=True),
    "dro": TinkerLoss(
        lambda config: LossSpec("dro", {"beta": config["beta"]}), settings={"beta": 0.05}, skips_zeros=False
    ),
}


def find_loss(name: str, config: Mapping[str, float | str]) -> tuple[TinkerLoss, LossSpec]:
    if name not in LOSSES:
        listed = ", ".join(LOSSES)
        raise ValueError(f"loss_fn {name[:100]!r} is not supported{did_you_mean(name, LOSSES)}; use one of: {listed}")
    loss, values = LOSSES[name], {**LOSSES[name].settings}
    for key, value in config.items():
        if key not in loss.settings:
            allowed = ", ".join(loss.settings) or "none"
            raise ValueError(
                f"loss_fn_config: {name} has no setting {key[:100]!r}{did_you_mean(key, loss.settings)}; its settings "
                f"are: {allowed}"
            )
        if isinstance(value, str) or not math.isfinite(value):
            raise ValueError(f"loss_fn_config: {key} is {value!r}, expected a finite number")
        values[key] = value
    return loss, loss.build(values)


@dataclass(slots=True)
class TrainingBatch:
    """The samples of one request, and what else its answer needs."""

    samples: list[TrainingSample]
    contexts: list[TrainingSample]  # beginnings that several data share and no loss trains; scored once each
    shared: list[int]  # for each datum the index of its context; -1: none

    def read_logprobs(self, rows: Sequence[FloatArray], context_rows: Sequence[FloatArray]) -> list[FloatArray]:
        """Returns the log-probs of each datum's targets, `[N]`."""
        outputs = []
        for sample, row, context in zip(self.samples, rows, self.shared, strict=True):
            output = row[1:].copy()
            if context >= 0:
                given = context_rows[context][1:]
                output[: len(given)] = np.where(sample.loss_mask[1 : len(given) + 1], output[: len(given)], given)
            outputs.append(output)
        return outputs


def build_batch(data: Sequence[TinkerDatum], loss: TinkerLoss, vocab_size: int, max_tokens: int) -> TrainingBatch:
    if not data:
        raise ValueError("data is empty; a request needs at least one datum")
    checked = [_check_datum(datum, loss, f"data[{i}]", vocab_size, max_tokens) for i, datum in enumerate(data)]
    finds_contexts = loss.skips_zeros and not loss.needs_mask
    keys = [_find_context(datum, loss) if finds_contexts else (0, b"") for datum in checked]
    counts: dict[bytes, int] = {}
    for _, key in keys:
        counts[key] = counts.get(key, 0) + 1
    batch, places = TrainingBatch([], [], []), dict[bytes, int]()
    for datum, (length, key) in zip(checked, keys, strict=True):
        trained = np.ones(len(datum.token_ids), np.bool_)
        if loss.needs_mask:
            trained = datum.inputs[MASK] != 0
            length, key = (0, b"") if trained.all() else (len(trained), str(len(batch.samples)).encode())
        elif length and counts[key] > 1:
            trained[:length] = False
        else:
            length = 0
        if length and key not in places:
            places[key] = len(batch.contexts)
            batch.contexts.append(_build_context(datum, length))
        batch.shared.append(places[key] if length else -1)
        batch.samples.append(_build_sample(datum, loss, trained))
    return batch


def _check_datum(datum: TinkerDatum, loss: TinkerLoss, where: str, vocab_size: int, max_tokens: int) -> TinkerDatum:
    length, expected = len(datum.token_ids), (TARGETS, *loss.numbers, *((MASK,) if loss.needs_mask else ()))
    if not 1 <= length <= max_tokens:
        raise ValueError(f"{where}.model_input has {length} tokens, expected 1 to {max_tokens} (max_model_len)")
    if unknown := [name for name in datum.inputs if name not in expected]:
        raise ValueError(
            f"{where}.loss_fn_inputs has {unknown[0][:100]!r}, which this loss does not read; it reads: "
            f"{', '.join(expected)}"
        )
    inputs = dict(datum.inputs)
    if loss.numbers == ("weights",):
        inputs.setdefault("weights", np.ones(length, np.float32))
    for name in expected:
        if name not in inputs:
            raise ValueError(f"{where}.loss_fn_inputs has no {name}")
        values = inputs[name]
        if values.shape != (length,):
            raise ValueError(
                f"{where}.loss_fn_inputs.{name} has the shape {list(values.shape)}, expected [{length}]: one for each "
                "token of model_input"
            )
        if name != TARGETS and not np.isfinite(values).all():
            raise ValueError(f"{where}.loss_fn_inputs.{name} has numbers that are not finite")
    for name, tokens in (("model_input", datum.token_ids), (f"loss_fn_inputs.{TARGETS}", inputs[TARGETS])):
        if tokens.dtype.kind != "i" or not ((tokens >= 0) & (tokens < vocab_size)).all():
            raise ValueError(f"{where}.{name} has values other than token ids from 0 to {vocab_size - 1}")
    _check_mask(inputs, loss, where)
    return TinkerDatum(datum.token_ids, inputs)


def _check_mask(inputs: Mapping[str, np.ndarray], loss: TinkerLoss, where: str) -> None:
    if not loss.needs_mask:
        return
    is_in = inputs[MASK] != 0
    if not is_in.any():
        raise ValueError(f"{where}.loss_fn_inputs.{MASK} marks no token")
    if (inputs["advantages"][~is_in] != 0).any():
        raise ValueError(f"{where}: a token outside of {MASK} has an advantage; this server trains the marked tokens")


def _find_context(datum: TinkerDatum, loss: TinkerLoss) -> tuple[int, bytes]:
    """Returns how many leading positions have no number, and what identifies their tokens; 0: too few."""
    numbers = np.stack([datum.inputs[name] for name in loss.numbers])
    silent = ~numbers.any(axis=0)
    length = int(silent.argmin())  # 0 where none is silent, or all are
    if length < MIN_CONTEXT:
        return 0, b""
    targets = datum.inputs[TARGETS][:length].astype(np.int64)
    return length, datum.token_ids[: length + 1].tobytes() + b"|" + targets.tobytes()


def _build_context(datum: TinkerDatum, length: int) -> TrainingSample:
    targets = datum.inputs[TARGETS][:length].astype(np.int64)
    return _fill_sample(np.append(datum.token_ids[:length], targets[-1]), targets, np.ones(length, np.bool_))


def _build_sample(datum: TinkerDatum, loss: TinkerLoss, trained: BoolArray) -> TrainingSample:
    targets = datum.inputs[TARGETS].astype(np.int64)
    sample = _fill_sample(np.append(datum.token_ids, targets[-1]), targets, trained)
    sample.advantages = _shift(datum.inputs[loss.numbers[-1]])
    if "logprobs" in loss.numbers:
        sample.sampling_logprobs = _shift(datum.inputs["logprobs"])
    return sample


def _fill_sample(token_ids: np.ndarray, targets: np.ndarray, trained: BoolArray) -> TrainingSample:
    count = len(token_ids)
    return TrainingSample(
        token_ids=token_ids.astype(np.int64),
        loss_mask=np.append(False, trained),
        sampling_logprobs=np.zeros(count, np.float32),
        temperatures=np.ones(count, np.float32),
        policy_versions=np.full(count, -1, np.int64),
        turn_ids=np.full(count, -1, np.int64),
        targets=np.append(token_ids[0], targets).astype(np.int64),
    )


def _shift(values: np.ndarray) -> FloatArray:
    """Returns the numbers in the places of the tokens that they belong to: after the first, which nothing predicts."""
    return np.append(np.float32(0), values).astype(np.float32)
