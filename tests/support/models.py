"""Small Triton models, of the Python backend, for the tests of the endpoint."""

from pathlib import Path

_CONFIG = """
backend: "python"
max_batch_size: 0
input [ {{ name: "INPUT" data_type: TYPE_{dtype} dims: {dims} }} ]
output [ {{ name: "OUTPUT" data_type: TYPE_{dtype} dims: {dims} }} ]
model_transaction_policy {{ decoupled: {decoupled} }}
instance_group [ {{ kind: KIND_CPU }} ]
"""

_IDENTITY = '''
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Answers with its input."""

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUTPUT", pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy())]
            )
            for request in requests
        ]
'''

_COUNTDOWN = '''
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Decoupled: answers INPUT times, with INPUT, INPUT - 1 ... 1; below 0, the same and then an error."""

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            start = int(pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()[0])
            for left in range(abs(start), 0, -1):
                output = pb_utils.Tensor("OUTPUT", np.array([left], dtype=np.int32))
                sender.send(pb_utils.InferenceResponse([output]))
            if start < 0:
                error = pb_utils.TritonError("the countdown went below 0")
                sender.send(pb_utils.InferenceResponse(error=error))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''

_PATIENT = '''
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Waits INPUT seconds, or until its caller has gone, then answers with INPUT."""

    def execute(self, requests):
        responses = []
        for request in requests:
            seconds = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
            end = time.monotonic() + float(seconds[0])
            print("patient: waits", flush=True)
            while time.monotonic() < end:
                if request.is_cancelled():
                    print("patient: the caller has gone", flush=True)
                    break
                time.sleep(0.02)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", seconds)]))
        return responses
'''

_RAISES = '''
class TritonPythonModel:
    """Fails on every request."""

    def execute(self, requests):
        raise ValueError("this model always fails")
'''


def write_model(repository: Path, name: str, code: str, *, dtype: str, dims: str, decoupled: bool = False) -> None:
    """Write one model with an INPUT and an OUTPUT into a model repository."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(code)
    config = _CONFIG.format(dtype=dtype, dims=dims, decoupled=str(decoupled).lower())
    (repository / name / "config.pbtxt").write_text(config)


def write_protocol_models(repository: Path) -> None:
    """Write the models that the tests of the protocol call."""
    for dtype in ("FP32", "FP16", "STRING"):
        write_model(repository, f"identity_{dtype.lower()}", _IDENTITY, dtype=dtype, dims="[ -1 ]")
    write_model(repository, "countdown", _COUNTDOWN, dtype="INT32", dims="[ 1 ]", decoupled=True)
    write_model(repository, "patient", _PATIENT, dtype="FP32", dims="[ 1 ]")
    write_model(repository, "raises", _RAISES, dtype="FP32", dims="[ 1 ]")
