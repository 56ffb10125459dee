"""Triton's messages as bytes, made before anything is measured; and the model repository that answers them."""

import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from bench.errors import BenchError

MODEL = "identity"
_TENSOR = "TENSOR"
_CONFIG = f"""
backend: "python"
max_batch_size: 0
input [ {{ name: "{_TENSOR}" data_type: TYPE_UINT8 dims: [ -1 ] }} ]
output [ {{ name: "{_TENSOR}" data_type: TYPE_UINT8 dims: [ -1 ] }} ]
instance_group [ {{ kind: KIND_CPU }} ]
"""

_DTYPES = {
    "BOOL": "bool",
    **{f"{sign}INT{bits}": f"{sign.lower()}int{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)},
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
}
_STRING = b"benchmark"


def write_identity_model(repository: Path) -> None:
    """Write the model repository of the benchmark."""
    version = repository / MODEL / "1"
    version.mkdir(parents=True)
    shutil.copyfile(Path(__file__).with_name("identity_model.py"), version / "model.py")
    (repository / MODEL / "config.pbtxt").write_text(_CONFIG)


def identity_request(size: int) -> tuple[bytes, bytes]:
    """Return a ModelInferRequest with a tensor of `size` bytes, and the bytes with which the answer to it ends.

    The tensor is the last field of the answer, so no message has to be parsed to know that it came back.
    """
    tensor = random.Random(size).randbytes(size)  # noqa: S311  no secret
    request = service_pb2.ModelInferRequest(model_name=MODEL)
    request.inputs.add(name=_TENSOR, datatype="UINT8", shape=[size])
    request.raw_input_contents.append(tensor)
    return request.SerializeToString(), tensor


def synthetic_request(metadata: Any, *, batched: bool, batch_size: int, shapes: Mapping[str, Sequence[int]]) -> bytes:
    """Return a ModelInferRequest that a model takes.

    Floating-point inputs are random from 0 to 1; integers are 1, which is a valid length, index and flag more often
    than a random number; strings are all the same.

    Args:
        metadata: the model's ModelMetadataResponse.
        batched: whether the model's shapes begin with the batch dimension.
        batch_size: the size of that dimension.
        shapes: without the batch dimension, of the inputs for which the model leaves some of them open.

    Raises:
        BenchError: a shape is missing, does not fit or belongs to no input.
    """
    names = [tensor.name for tensor in metadata.inputs]
    if unknown := shapes.keys() - set(names):
        raise BenchError(f"--shape {min(unknown)}: model {metadata.name} has the inputs {', '.join(names)}")
    if batch_size > 1 and not batched:
        raise BenchError(f"--batch-size {batch_size}: model {metadata.name} does not batch")
    request = service_pb2.ModelInferRequest(model_name=metadata.name)
    for tensor in metadata.inputs:
        dims = list(tensor.shape)[1:] if batched else list(tensor.shape)
        shape = _fill_in(tensor.name, dims, shapes.get(tensor.name))
        if batched:
            shape = [batch_size, *shape]
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
        request.raw_input_contents.append(_values(tensor.datatype, shape))
    message: bytes = request.SerializeToString()
    return message


def _fill_in(name: str, dims: list[int], given: Sequence[int] | None) -> list[int]:
    asked = ",".join(map(str, dims))
    if given is None:
        if -1 in dims:
            raise BenchError(f"the model's input {name} has the shape {asked}: give --shape {name}:D1,D2... for the -1")
        return dims
    if len(given) != len(dims) or any(dim not in {-1, value} for dim, value in zip(dims, given, strict=True)):
        raise BenchError(f"--shape {name}:{','.join(map(str, given))}: the model's input has the shape {asked}")
    return list(given)


def _values(datatype: str, shape: Sequence[int]) -> bytes:
    if datatype == "BYTES":
        return (len(_STRING).to_bytes(4, "little") + _STRING) * int(np.prod(shape))
    if datatype == "BF16":
        # The upper half of a float32.
        return (_random(shape).astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    dtype = np.dtype(_DTYPES[datatype])
    values = _random(shape).astype(dtype) if dtype.kind == "f" else np.ones(shape, dtype)
    return values.tobytes()


def _random(shape: Sequence[int]) -> "np.ndarray[Any, np.dtype[np.float64]]":
    return np.random.default_rng(0).random(shape)
