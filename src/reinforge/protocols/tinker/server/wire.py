"""Tinker's protocol buffers: the bodies of forward_backward, and the results of training and sampling.

    request = parse_request(body)                  ForwardBackwardRequest, as a message
    data = read_data(request)                      token ids and numbers of each datum, as arrays
    write_output(logprobs, {"loss:sum": 1.5})      the bytes of a ForwardBackwardOutput

The messages are those of `tinker_public.proto` as the SDK 0.38 has it, by field numbers; images, audio and provenance
of tokens are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from reinforge.errors import ConfigError, Problem
from reinforge.serving.routes import ApiError
from reinforge.types.sample import FloatArray, IntArray

CONTENT_TYPE = "application/x-protobuf"
ARRAYS = "ArrayRecord"  # the SDK's name for outputs that are arrays
STOP_REASONS = {"stop": 0, "length": 1}
MISSING_LOGPROB = -99999.0  # stands where fewer tokens are named than were asked for
_SCHEMA = {
    "SampleResponse": "1 sequences SampledSequence*, 2 prompt_logprobs bytes, 3 topk_prompt_logprobs TopkLogprobs, "
    "4 prompt_cache_hit_tokens int32",
    "SampledSequence": "1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes, 4 topk_sampled_logprobs TopkLogprobs",
    "TopkLogprobs": "1 token_ids bytes, 2 logprobs bytes, 3 k uint32, 4 length uint32",
    "SparseCsr": "1 values bytes, 2 crow_indices bytes, 3 col_indices bytes",
    "Tensor": "1 dense bytes, 2 sparse_csr SparseCsr, 3 dtype int32, 4 shape int64*",
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape int64*",
    "NamedTensors": "1 key string, 2 value BatchedTensor",
    "ArrayRecord": "1 type_tag string, 2 fields NamedTensors*, 3 num_datums int64",
    "Metric": "1 key string, 2 value double",
    "ForwardBackwardOutput": "1 loss_fn_output_type string, 2 loss_fn_outputs ArrayRecord*, 3 metrics Metric*",
    "ConfigValue": "1 number double, 2 text string",
    "ConfigEntry": "1 key string, 2 value ConfigValue",
    "ForwardBackwardRequest": "1 model_id string, 2 seq_id int32, 3 data Datum*, 4 loss_fn string, "
    "5 loss_fn_config Metric*, 6 forward_only bool, 7 loss_fn_config_v2 ConfigEntry*",
    "LossInput": "1 key string, 2 value Tensor",
    "Datum": "1 model_input Chunk*, 2 loss_fn_inputs LossInput*",
    "Chunk": "1 encoded_text EncodedText, 2 image bytes, 3 dmel bytes",
    "EncodedText": "1 tokens bytes",
}
"""Field number, name and type of each message; `*`: repeated. A map is a repeated message of key and value."""
_FLOAT32, _INT64, _INT32 = 1, 2, 3
_DTYPES: dict[int, type[np.generic]] = {_FLOAT32: np.float32, _INT64: np.int64, _INT32: np.int32}


@dataclass(frozen=True, slots=True)
class TinkerDatum:
    token_ids: IntArray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class TinkerReply:
    """One sampled sequence."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    stop_reason: str
    top: Sequence[Sequence[tuple[int, float]]] = ()
    """The most likely tokens of each position and their log-probs; empty: not asked for."""


def parse_request(body: bytes) -> Any:
    from google.protobuf.message import DecodeError

    message = _find_messages()["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise ApiError(400, f"the body is not a ForwardBackwardRequest in {CONTENT_TYPE}: {error}") from None
    return message


def read_config(request: Any) -> dict[str, float | str]:
    config: dict[str, float | str] = {entry.key: entry.value for entry in request.loss_fn_config}
    for entry in request.loss_fn_config_v2:
        config[entry.key] = entry.value.text if entry.value.HasField("text") else entry.value.number
    return config


def read_data(request: Any) -> list[TinkerDatum]:
    return [
        TinkerDatum(
            _read_tokens(datum, f"data[{i}]"),
            {entry.key: _read_tensor(entry.value, f"data[{i}].loss_fn_inputs.{entry.key}")
             for entry in datum.loss_fn_inputs},
        )
        for i, datum in enumerate(request.data)
    ]  # fmt: skip


def _read_tokens(datum: Any, where: str) -> IntArray:
    parts = []
    for chunk in datum.model_input:
        for name in ("image", "dmel"):
            if chunk.HasField(name):
                raise ValueError(f"{where}.model_input has a chunk of {name}, but this model reads text only")
        parts.append(_read_array(chunk.encoded_text.tokens, np.int32, f"{where}.model_input"))
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)


def _read_tensor(tensor: Any, where: str) -> np.ndarray:
    if tensor.HasField("sparse_csr"):
        raise ValueError(f"{where} is a sparse matrix of several tokens a position; this server trains one token each")
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ValueError(f"{where} has the dtype {tensor.dtype}, expected float32 (1), int64 (2) or int32 (3)")
    array, shape = _read_array(tensor.dense, dtype, where), list(tensor.shape)
    if shape and int(np.prod(shape)) != array.size:
        raise ValueError(f"{where} has {array.size} numbers, but its shape is {shape}")
    return array.reshape(shape) if shape else array


def _read_array(data: bytes, dtype: type[np.generic], where: str) -> np.ndarray:
    if len(data) % np.dtype(dtype).itemsize:
        raise ValueError(f"{where} has {len(data)} bytes, which are not a whole number of {np.dtype(dtype).name}")
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))


def write_output(logprobs: Sequence[FloatArray], metrics: Mapping[str, float]) -> bytes:
    output = _find_messages()["ForwardBackwardOutput"](loss_fn_output_type=ARRAYS)
    record = output.loss_fn_outputs.add(type_tag=ARRAYS, num_datums=len(logprobs))
    ends = np.cumsum([0, *(len(row) for row in logprobs)], dtype="<i8") * 4
    field = record.fields.add(key="logprobs")
    field.value.data = b"".join(np.asarray(row, "<f4").tobytes() for row in logprobs)
    field.value.offsets, field.value.dtype = ends.astype("<i8").tobytes(), _FLOAT32
    for name, value in metrics.items():
        output.metrics.add(key=name, value=value)
    return bytes(output.SerializeToString())


def write_sample(replies: Sequence[TinkerReply], prompt_logprobs: FloatArray | None, num_top: int = 0) -> bytes:
    """Returns the result of a sampling request; `prompt_logprobs` is `[P]`, NaN where a token has none."""
    response = _find_messages()["SampleResponse"]()
    for reply in replies:
        sequence = response.sequences.add(stop_reason=STOP_REASONS[reply.stop_reason])
        sequence.tokens = np.asarray(reply.token_ids, "<i4").tobytes()
        sequence.logprobs = np.asarray(reply.logprobs, "<f4").tobytes()
        if num_top:
            _write_top(sequence.topk_sampled_logprobs, reply.top, num_top)
    if prompt_logprobs is not None:
        response.prompt_logprobs = np.asarray(prompt_logprobs, "<f4").tobytes()
    return bytes(response.SerializeToString())


def _write_top(message: Any, top: Sequence[Sequence[tuple[int, float]]], count: int) -> None:
    rows = [[*named, *[(0, MISSING_LOGPROB)] * (count - len(named))] for named in top]
    message.token_ids = np.asarray([[token for token, _ in row] for row in rows], "<i4").tobytes()
    message.logprobs = np.asarray([[logprob for _, logprob in row] for row in rows], "<f4").tobytes()
    message.k, message.length = count, len(rows)


def require_protobuf() -> None:
    try:
        import google.protobuf.message  # noqa: F401
    except ModuleNotFoundError:
        fix = 'pip install "reinforge[tinker]"'
        raise ConfigError(Problem("--tinker", "Tinker's protocol needs the package protobuf", fix)) from None


@cache
def _find_messages() -> dict[str, Any]:
    """Returns the class of each message; in a pool of its own, so that the SDK's own may be in the process too."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="reinforge_tinker.proto", package="tinker", syntax="proto2")
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for number, field, kind in (each.split() for each in fields.split(", ")):
            label = kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL
            added = message.field.add(name=field, number=int(number), label=label)
            if (kind := kind.rstrip("*")) in _SCHEMA:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".tinker.{kind}"
            else:
                added.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tinker.{name}")) for name in _SCHEMA}
