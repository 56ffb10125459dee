"""Made-up requests for any model."""

from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2
from tritonclient.utils import triton_to_np_dtype

from bench.errors import BenchError
from bench.messages import identity_request, synthetic_request


def _metadata(**inputs: tuple[str, list[int]]) -> Any:
    metadata = service_pb2.ModelMetadataResponse(name="model")
    for name, (datatype, shape) in inputs.items():
        metadata.inputs.add(name=name, datatype=datatype, shape=shape)
    return metadata


def _request(
    metadata: Any, *, batched: bool = False, batch_size: int = 1, shapes: dict[str, list[int]] | None = None
) -> Any:
    data = synthetic_request(metadata, batched=batched, batch_size=batch_size, shapes=shapes or {})
    return service_pb2.ModelInferRequest.FromString(data)


def test_the_identity_request_has_the_size_asked_for() -> None:
    """The table would tell of another size."""
    data, tensor = identity_request(100_000)
    request = service_pb2.ModelInferRequest.FromString(data)
    assert list(request.inputs[0].shape) == [100_000]
    assert request.raw_input_contents == [tensor]
    assert len(set(tensor)) == 256


_INTEGERS = [f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)]


@pytest.mark.parametrize("datatype", ["BOOL", *_INTEGERS, "FP16", "FP32", "FP64", "BF16"])
def test_every_dtype_has_values_of_its_size(datatype: str) -> None:
    """Triton refuses a tensor whose bytes do not fit its shape."""
    request = _request(_metadata(a=(datatype, [2, 3])))
    (tensor,) = request.raw_input_contents
    if datatype == "BF16":
        values = (np.frombuffer(tensor, "<u2").astype("<u4") << 16).view("<f4")
    else:
        values = np.frombuffer(tensor, triton_to_np_dtype(datatype))
    assert values.shape == (6,)
    assert ((values >= 0) & (values <= 1)).all()
    assert (len(set(values.tolist())) > 1) == ("F" in datatype)


def test_strings_are_length_and_text() -> None:
    """Triton answers a malformed string with INVALID_ARGUMENT."""
    (tensor,) = _request(_metadata(text=("BYTES", [2]))).raw_input_contents
    assert tensor == b"\x09\x00\x00\x00benchmark" * 2


def test_shapes_are_given_without_the_batch_dimension() -> None:
    """As in the model's configuration, and in perf_analyzer."""
    metadata = _metadata(image=("FP32", [-1, 3, -1, -1]), factor=("FP32", [-1, 1]))
    request = _request(metadata, batched=True, batch_size=4, shapes={"image": [3, 2, 5]})
    assert [list(tensor.shape) for tensor in request.inputs] == [[4, 3, 2, 5], [4, 1]]
    assert [len(tensor) for tensor in request.raw_input_contents] == [4 * 4 * 3 * 2 * 5, 4 * 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"the model's input image has the shape 3,-1,-1: give --shape image:D1,D2... for the -1"),
        ({"shapes": {"image": [3, 2]}}, r"--shape image:3,2: the model's input has the shape 3,-1,-1"),
        ({"shapes": {"image": [4, 2, 2]}}, r"--shape image:4,2,2: the model's input has the shape 3,-1,-1"),
        ({"shapes": {"picture": [3, 2, 2]}}, r"--shape picture: model model has the inputs image"),
        ({"shapes": {"image": [3, 2, 2]}, "batch_size": 2}, r"--batch-size 2: model model does not batch"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(arguments: dict[str, Any], message: str) -> None:
    """Triton would refuse each of the requests, in words that name no option."""
    with pytest.raises(BenchError, match=message):
        _request(_metadata(image=("FP32", [3, -1, -1])), **arguments)
