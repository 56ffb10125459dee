"""The Triton client: what the model wants, and its answers to batches of chips."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tritonclient.grpc.aio as triton_grpc
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from centerlines.backoff import Backoff
from centerlines.errors import EndpointError, RequestRefusedError, UsageError

__all__ = ["Model", "ModelClient", "connect"]

CHANNEL_OPTIONS = [
    # Arguments of our own replace all of tritonclient's; without these, gRPC's limit of 4 MiB would be back.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Between tries gRPC would wait for up to two minutes, as long as the patience of a whole run.
    ("grpc.max_reconnect_backoff_ms", 5000),
]

CHANNELS = 3
# However short the patience: a large batch may wait in the queue of a busy endpoint.
LEAST_REQUEST_TIMEOUT_S = 60.0
LOOK_UP_TIMEOUT_S = 30.0
# What passes by itself: a server that starts, drains, restarts, or has a full queue.
TEMPORARY = {"StatusCode.UNAVAILABLE", "StatusCode.RESOURCE_EXHAUSTED"}


@dataclass(frozen=True)
class Model:
    """What the pipeline must know of a segmentation model, read from its configuration in Triton."""

    name: str
    """Name in the model repository."""
    version: str
    """Version number; empty for the latest."""
    input_name: str
    """The input, FP32 (batch, 3, rows, columns)."""
    output_name: str
    """The output, FP32 logits (batch, 2, rows, columns); channel 1 is the foreground."""
    size: tuple[int, int]
    """Rows and columns of the input; -1 for any."""
    max_batch_size: int
    """Most chips in one request."""
    mean: tuple[float, ...]
    """What to subtract from each input channel, on the 0-1 scale."""
    std: tuple[float, ...]
    """What to divide each input channel by, on the 0-1 scale."""

    def check_chip_size(self, chip_size: int) -> None:
        """Raise UsageError if the model does not take chips of this many rows and columns."""
        if not all(wanted in (-1, chip_size) for wanted in self.size):
            rows, columns = self.size
            raise UsageError(f"--chip-size {chip_size}: model {self.name} takes {rows} x {columns} pixels only")


class ModelClient:
    """One model at one endpoint."""

    def __init__(self, client: triton_grpc.InferenceServerClient, model: Model, *, patience_s: float) -> None:
        self._client = client
        self.model = model
        self._backoff = Backoff(patience_s)
        self._timeout_s = max(patience_s, LEAST_REQUEST_TIMEOUT_S)

    async def infer(self, chips: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the logits (n, 2, rows, columns) of normalised chips (n, 3, rows, columns).

        UNAVAILABLE and RESOURCE_EXHAUSTED are tried again for as long as the patience lasts.

        Raises:
            EndpointError: the endpoint stayed unavailable, or the model's answer is of another shape.
            RequestRefusedError: Triton refused the request; waiting would not help.
        """
        tensor = triton_grpc.InferInput(self.model.input_name, list(chips.shape), "FP32")
        tensor.set_data_from_numpy(chips)
        output = triton_grpc.InferRequestedOutput(self.model.output_name)
        waits = self._backoff.waits(clock=time.monotonic)
        while True:
            try:
                result = await self._client.infer(
                    self.model.name,
                    [tensor],
                    model_version=self.model.version,
                    outputs=[output],
                    client_timeout=self._timeout_s,
                )
                break
            except InferenceServerException as error:
                if error.status() == "StatusCode.DEADLINE_EXCEEDED":
                    raise EndpointError(
                        f"the endpoint did not answer a request within {self._timeout_s:g} s"
                    ) from error
                if error.status() not in TEMPORARY:
                    raise RequestRefusedError(f"the endpoint refused a batch of chips: {describe(error)}") from error
                wait = next(waits, None)
                if wait is None:
                    raise EndpointError(
                        f"the endpoint was unavailable for {self._backoff.patience_s:g} s: {describe(error)}"
                    ) from error
            await asyncio.sleep(wait)
        return self._logits(result, expected=(len(chips), 2, *chips.shape[2:]))

    def _logits(self, result: triton_grpc.InferResult, *, expected: tuple[int, ...]) -> NDArray[np.float32]:
        name = self.model.output_name
        answered = f"model {self.model.name} answered with {{}} of {name}, not FP32 {list(expected)}"
        output = result.get_output(name)
        if output is None:
            raise EndpointError(answered.format("nothing"))
        if (output.datatype, tuple(output.shape)) != ("FP32", expected):
            raise EndpointError(answered.format(f"{output.datatype} {list(output.shape)}"))
        try:
            logits: NDArray[np.float32] | None = result.as_numpy(name)
        except ValueError:  # as many bytes as its shape does not need
            logits = None
        if logits is None:
            raise EndpointError(answered.format("other bytes than its shape needs"))
        return logits


@asynccontextmanager
async def connect(
    endpoint: str, *, model_name: str, model_version: str, patience_s: float
) -> AsyncIterator[ModelClient]:
    """Connect to an endpoint and look the model up.

    Args:
        endpoint: host:port of Triton's gRPC protocol.
        model_name: name in the model repository.
        model_version: version number; empty for the latest.
        patience_s: how long requests are tried again while the endpoint is unavailable, this look-up included.

    Raises:
        UsageError: the endpoint does not answer, or the model is unknown or of another kind.
    """
    client = triton_grpc.InferenceServerClient(endpoint, channel_args=CHANNEL_OPTIONS)
    try:
        model = await _look_up(client, endpoint, model_name, model_version, patience_s)
        yield ModelClient(client, model, patience_s=patience_s)
    finally:
        await client.close()


async def _look_up(
    client: triton_grpc.InferenceServerClient, endpoint: str, name: str, version: str, patience_s: float
) -> Model:
    waits = Backoff(patience_s).waits(clock=time.monotonic)
    while True:
        try:
            response = await client.get_model_config(name, version, client_timeout=LOOK_UP_TIMEOUT_S)
            return _parse_config(response.config, name=name, version=version)
        except InferenceServerException as error:
            wait = next(waits, None) if error.status() in TEMPORARY else None
            if wait is None:
                raise UsageError(_look_up_failed(error, endpoint, name)) from error
        await asyncio.sleep(wait)


def _look_up_failed(error: InferenceServerException, endpoint: str, name: str) -> str:
    if error.status() in TEMPORARY | {"StatusCode.DEADLINE_EXCEEDED"}:
        return f"--endpoint {endpoint}: nothing answers there as Triton ({describe(error)}); check host and port"
    if error.status() == "StatusCode.NOT_FOUND":
        return f"--model {name}: the endpoint {endpoint} does not have it ({describe(error)})"
    return f"--endpoint {endpoint}: cannot describe model {name} ({describe(error)})"


def describe(error: InferenceServerException) -> str:
    """Return the error's status and message on one line."""
    status = str(error.status()).removeprefix("StatusCode.")
    return f"{status}: {' '.join(str(error.message()).split())}"


def _parse_config(config: Any, *, name: str, version: str) -> Model:
    """Check a ModelConfig message (model_config.proto of Triton's common repository)."""
    wanted = f"--model {name}: the pipeline needs a model with"
    dims = [list(tensor.dims) for tensor in config.input]
    one_image = len(dims) == 1 and len(dims[0]) == 3 and dims[0][0] == CHANNELS
    if not one_image or _type(config.input[0]) != "FP32" or config.max_batch_size < 1:
        raise UsageError(
            f"{wanted} one FP32 input of [3, rows, columns] in batches, this one takes "
            f"{_tensors(config.input)} with max_batch_size {config.max_batch_size}"
        )
    outputs = [tensor for tensor in config.output if len(tensor.dims) == 3 and tensor.dims[0] == 2]
    if len(outputs) != 1 or _type(outputs[0]) != "FP32":
        raise UsageError(f"{wanted} one FP32 output of [2, rows, columns], this one gives {_tensors(config.output)}")
    return Model(
        name=name,
        version=version,
        input_name=config.input[0].name,
        output_name=outputs[0].name,
        size=(dims[0][1], dims[0][2]),
        max_batch_size=config.max_batch_size,
        mean=_per_channel(config, "mean", default=0.0, model=name),
        std=_per_channel(config, "std", default=1.0, model=name),
    )


def _per_channel(config: Any, parameter: str, *, default: float, model: str) -> tuple[float, ...]:
    if parameter not in config.parameters:
        return (default,) * CHANNELS
    text = config.parameters[parameter].string_value
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if len(values) != CHANNELS or not np.isfinite(values).all() or (parameter == "std" and min(values) <= 0):
        raise UsageError(
            f"--model {model}: its configuration has {parameter} {text!r}, "
            f"but it must be {CHANNELS} comma-separated numbers{' above 0' if parameter == 'std' else ''}"
        )
    return values


def _type(tensor: Any) -> str:
    names = tensor.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
    return str(names[tensor.data_type].name).removeprefix("TYPE_")


def _tensors(tensors: Any) -> str:
    return ", ".join(f"{t.name} {_type(t)} {list(t.dims)}" for t in tensors) or "none"
