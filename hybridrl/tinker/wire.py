"""Bodies in protobuf: requests for forward and backward passes, their answers, and samples.

The messages are those of the package `tinker`. Everything else of the API is JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridrl.errors import UserError

Array = NDArray[Any]


class RequestError(UserError):
    """A request that cannot be served as it is; the message names the field."""


@dataclass(frozen=True)
class Datum:
    """A sequence with what a loss reads.

    Attributes:
        tokens: `[N]` int64.
        inputs: the tensors of the loss by name; `target_tokens` are integers.
    """

    tokens: Array
    inputs: Mapping[str, Array]


@dataclass(frozen=True)
class PassRequest:
    """A request for a forward pass, and a backward pass unless `forward_only`.

    Attributes:
        model_id, seq_id: the training run, and the place among its requests.
        loss: the name of the loss.
        config: its numbers.
        datums: as they came; `datums_of` reads them.
    """

    model_id: str
    seq_id: int
    loss: str
    config: Mapping[str, float | str]
    forward_only: bool
    datums: Sequence[Any]


@dataclass(frozen=True)
class SampledTokens:
    """A generated sequence: its tokens, their log-probabilities, and whether it ended by itself."""

    tokens: Sequence[int]
    log_probs: Sequence[float]
    ended: bool


def read_pass_request(body: bytes) -> PassRequest:
    """Read the body of `forward_backward`.

    Raises:
        RequestError: it is no such message.
    """
    from google.protobuf.message import DecodeError
    from tinker.proto import tinker_public_pb2 as messages

    message = messages.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise RequestError(f"the body is no ForwardBackwardRequest: {error}") from None
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return PassRequest(
        message.model_id, message.seq_id, message.loss_fn, config, message.forward_only, list(message.data)
    )


def datums_of(request: PassRequest) -> list[Datum]:
    """Read the datums of a request.

    Raises:
        RequestError: one has something besides tokens, or a tensor that cannot be read.
    """
    return [_datum(message, f"data[{number}]") for number, message in enumerate(request.datums)]


def _datum(message: Any, where: str) -> Datum:
    parts = []
    for chunk in message.model_input:
        kind = next((descriptor.name for descriptor, _ in chunk.ListFields()), "nothing")
        if kind != "encoded_text":
            raise RequestError(f"{where}.model_input has a chunk of {kind}; only encoded_text (tokens) is served")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, dtype=np.int32).astype(np.int64))
    tokens = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    inputs = {
        name: _array(tensor, f"{where}.loss_fn_inputs[{name}]") for name, tensor in message.loss_fn_inputs.items()
    }
    return Datum(tokens, inputs)


def _array(tensor: Any, where: str) -> Array:
    """A tensor as a dense array; what a sparse one does not list is 0."""
    dtypes: dict[int, Any] = {1: np.float32, 2: np.int64, 3: np.int32}
    if tensor.dtype not in dtypes:
        raise RequestError(f"{where} has dtype {tensor.dtype}; float32 and int64 are served")
    dtype, shape = dtypes[tensor.dtype], list(tensor.shape)
    try:
        if tensor.WhichOneof("encoding") != "sparse_csr":
            values = np.frombuffer(tensor.dense, dtype=dtype)
            return values.reshape(shape) if shape else values
        csr = tensor.sparse_csr
        rows, columns = (np.frombuffer(part, dtype=np.int64) for part in (csr.crow_indices, csr.col_indices))
        dense = np.zeros(shape, dtype=dtype)
        dense[np.repeat(np.arange(len(rows) - 1), np.diff(rows)), columns] = np.frombuffer(csr.values, dtype=dtype)
        return dense
    except (ValueError, IndexError) as error:
        raise RequestError(f"{where} does not fit its shape {shape}: {error}") from None


def pass_answer(log_probs: Sequence[Array], loss: float) -> bytes:
    """Write the answer to `forward_backward`.

    Args:
        log_probs: of each datum, `[N]` or `[N, K]`.
        loss: summed over all datums.
    """
    from tinker.proto import tinker_public_pb2 as messages

    answer = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    answer.metrics["loss:sum"] = loss
    start = 0
    while start < len(log_probs):  # a record for datums of the same K
        trailing, end = log_probs[start].shape[1:], start
        while end < len(log_probs) and log_probs[end].shape[1:] == trailing:
            end += 1
        parts = [np.ascontiguousarray(part, dtype=np.float32) for part in log_probs[start:end]]
        offsets = np.cumsum([0, *(part.nbytes for part in parts)], dtype=np.int64)
        record = answer.loss_fn_outputs.add(num_datums=end - start)
        field = record.fields["logprobs"]
        field.data, field.offsets = b"".join(part.tobytes() for part in parts), offsets.tobytes()
        field.dtype = messages.DTYPE_FLOAT32
        field.trailing_shape.extend(trailing)
        start = end
    return bytes(answer.SerializeToString())


def sample_answer(samples: Sequence[SampledTokens], prompt_log_probs: Array | None) -> bytes:
    """Write the answer to `asample`.

    Args:
        prompt_log_probs: `[P]`, NaN where there is none; None: they were not asked for.
    """
    from tinker.proto import tinker_public_pb2 as messages

    answer = messages.SampleResponse()
    for sample in samples:
        answer.sequences.add(
            stop_reason=messages.STOP_REASON_STOP if sample.ended else messages.STOP_REASON_LENGTH,
            tokens=np.asarray(sample.tokens, dtype=np.int32).tobytes(),
            logprobs=np.asarray(sample.log_probs, dtype=np.float32).tobytes(),
        )
    if prompt_log_probs is not None:
        answer.prompt_logprobs = np.asarray(prompt_log_probs, dtype=np.float32).tobytes()
    return bytes(answer.SerializeToString())
