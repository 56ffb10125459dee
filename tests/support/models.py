"""Small Triton models, of the Python backend, for the tests of the endpoint."""

from collections.abc import Iterable
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


_EVERY_DTYPE = '''
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Answers with each input that is there, as the output OF_<input>."""

    def execute(self, requests):
        return [pb_utils.InferenceResponse([self._same(each) for each in request.inputs()]) for request in requests]

    def _same(self, given):
        name = f"OF_{given.name()}"
        if given.name() in {"BYTES", "BOOL"}:
            return pb_utils.Tensor(name, given.as_numpy())
        # numpy has no BF16.
        return pb_utils.Tensor.from_dlpack(name, given)
'''

_ECHO = '''
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Answers with what it was told beside its inputs."""

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        told = {
            "id": request.request_id(),
            "correlation_id": request.correlation_id(),
            "flags": request.flags(),
            "timeout": request.timeout(),
            "parameters": json.loads(request.parameters() or "{}"),
            "outputs": sorted(request.requested_output_names()),
        }
        text = json.dumps(told, sort_keys=True).encode()
        return pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", np.array([text], dtype=object))])
'''

_SCORES = '''
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Answers with its input as SCORES, which have labels, and with the ORDER of the scores."""

    def execute(self, requests):
        responses = []
        for request in requests:
            scores = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
            order = np.argsort(-scores, axis=1).astype(np.int32)
            responses.append(
                pb_utils.InferenceResponse([pb_utils.Tensor("SCORES", scores), pb_utils.Tensor("ORDER", order)])
            )
        return responses
'''

_SUM = '''
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Adds up its inputs."""

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("SUM", sum(each.as_numpy() for each in request.inputs()))])
            for request in requests
        ]
'''

_VERSION = '''
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Answers with INPUT plus its version."""

    def initialize(self, args):
        self._version = np.int32(args["model_version"])

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [
                    pb_utils.Tensor(
                        "OUTPUT", pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy() + self._version
                    )
                ]
            )
            for request in requests
        ]
'''

_TOTAL = '''
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Answers with the sum of the INPUTs of a sequence so far."""

    def initialize(self, args):
        self._totals = {}

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        def value(name):
            return pb_utils.get_input_tensor_by_name(request, name).as_numpy()

        sequence = request.correlation_id()
        if value("START")[0, 0]:
            self._totals[sequence] = np.zeros((1, 1), np.int32)
        self._totals[sequence] = self._totals[sequence] + value("INPUT")
        total = self._totals[sequence]
        if value("END")[0, 0]:
            del self._totals[sequence]
        return pb_utils.InferenceResponse([pb_utils.Tensor("TOTAL", total)])
'''

_FAILS = '''
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Fails with the words in WORDS: as an exception, or with the status that STATUS names."""

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        def text(name):
            return pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0].decode()

        if text("STATUS") == "exception":
            raise ValueError(text("WORDS"))
        error = pb_utils.TritonError(text("WORDS"), getattr(pb_utils.TritonError, text("STATUS")))
        return pb_utils.InferenceResponse(error=error)
'''

_HELD = '''
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Waits until `release` is in the folder that FOLDER names, or its caller has gone; says there how far it is."""

    def execute(self, requests):
        responses = []
        for request in requests:
            folder = Path(pb_utils.get_input_tensor_by_name(request, "FOLDER").as_numpy().flat[0].decode())
            (folder / "started").touch()
            # Without its folder its test has ended.
            while folder.is_dir() and not (folder / "release").exists():
                if request.is_cancelled():
                    (folder / "cancelled").touch()
                    break
                time.sleep(0.01)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("DONE", np.ones((1, 1), np.int32))]))
        return responses
'''

_SLOW_TO_LOAD = '''
import time
from pathlib import Path


class TritonPythonModel:
    """Is loaded once `go` is in its folder."""

    def initialize(self, args):
        folder = Path(args["model_repository"])
        # Without its folder its test has ended.
        while folder.is_dir() and not (folder / "go").exists():
            time.sleep(0.01)

    def execute(self, requests):
        raise ValueError("nobody asks this model")
'''

_BROKEN = '''
class TritonPythonModel:
    """Cannot be loaded."""

    def initialize(self, args):
        raise ValueError("this model is broken")

    def execute(self, requests):
        pass
'''

DTYPES = (
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "BF16", "BYTES"),
)


def _tensor(name: str, dtype: str, dims: str, more: str = "") -> str:
    return f'{{ name: "{name}" data_type: TYPE_{dtype.replace("BYTES", "STRING")} dims: {dims} {more} }}'


def _write(
    repository: Path,
    name: str,
    code: str,
    *,
    inputs: Iterable[str],
    outputs: Iterable[str],
    more: str = "",
    versions: Iterable[int] = (1,),
) -> None:
    for version in versions:
        folder = repository / name / str(version)
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(code)
    config = f'backend: "python"\ninput [ {", ".join(inputs)} ]\noutput [ {", ".join(outputs)} ]\n{more}\n'
    (repository / name / "config.pbtxt").write_text(f"{config}instance_group [ {{ kind: KIND_CPU }} ]\n")


_SEQUENCES = """
max_batch_size: 4
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  oldest { max_candidate_sequences: 4 }
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
    { name: "END" control [ { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } ] }
  ]
}
"""

_SHORT_QUEUE = """
max_batch_size: 1
dynamic_batching {
  priority_levels: 2
  default_priority_level: 2
  default_queue_policy { max_queue_size: 2 default_timeout_microseconds: 60000000 allow_timeout_override: true }
}
"""

# Four times RIGHT and LEFT, by way of the model `sum`.
_ENSEMBLE = """
platform: "ensemble"
input [ { name: "LEFT" data_type: TYPE_INT32 dims: [ 4 ] }, { name: "RIGHT" data_type: TYPE_INT32 dims: [ 4 ] } ]
output [ { name: "RESULT" data_type: TYPE_INT32 dims: [ 4 ] } ]
ensemble_scheduling {
  step [
    {
      model_name: "sum"
      model_version: -1
      input_map [ { key: "A" value: "LEFT" }, { key: "B" value: "RIGHT" } ]
      output_map { key: "SUM" value: "MIDDLE" }
    },
    {
      model_name: "sum"
      model_version: -1
      input_map [ { key: "A" value: "MIDDLE" }, { key: "B" value: "RIGHT" } ]
      output_map { key: "SUM" value: "RESULT" }
    }
  ]
}
"""

COUNTED = "counted"
"""The name of the model whose statistics are compared: one test alone may ask it."""

ENSEMBLE = "ensemble of Straße 100%"
"""The name of the ensemble: such names are allowed, and go through many hands."""


def write_differential_models(first: Path, second: Path) -> None:
    """Write the models whose answers are compared with those of a lone Triton into two model repositories."""
    _write(
        first,
        "every_dtype",
        _EVERY_DTYPE,
        inputs=(_tensor(dtype, dtype, "[ -1 ]", "optional: true") for dtype in DTYPES),
        outputs=(_tensor(f"OF_{dtype}", dtype, "[ -1 ]") for dtype in DTYPES),
    )
    _write(
        first,
        "echo",
        _ECHO,
        inputs=[_tensor("INPUT", "FP32", "[ 1 ]")],
        outputs=[_tensor("TOLD", "BYTES", "[ 1 ]")],
        more='parameters [ { key: "a" value { string_value: "1" } }, { key: "b" value { string_value: "2" } } ]',
    )
    _write(
        first,
        "scores",
        _SCORES,
        inputs=[_tensor("INPUT", "FP32", "[ 3 ]")],
        outputs=[
            _tensor("SCORES", "FP32", "[ 3 ]", 'label_filename: "labels.txt"'),
            _tensor("ORDER", "INT32", "[ 3 ]"),
        ],
        more="max_batch_size: 4",
    )
    (first / "scores/labels.txt").write_text("left\nmiddle\nright\n")
    for name, count in {"sum": 2, "wide_sum": 100, COUNTED: 1}.items():
        names = "AB" if count == 2 else [f"INPUT_{index}" for index in range(count)]
        _write(
            first,
            name,
            _SUM,
            inputs=[_tensor(each, "INT32", "[ 4 ]") for each in names],
            outputs=[_tensor("SUM", "INT32", "[ 4 ]")],
        )
    _write(
        first,
        "versions",
        _VERSION,
        inputs=[_tensor("INPUT", "INT32", "[ 1 ]")],
        outputs=[_tensor("OUTPUT", "INT32", "[ 1 ]")],
        more="version_policy { all {} }",
        versions=(1, 3),
    )
    _write(
        first,
        "total",
        _TOTAL,
        inputs=[_tensor("INPUT", "INT32", "[ 1 ]")],
        outputs=[_tensor("TOTAL", "INT32", "[ 1 ]")],
        more=_SEQUENCES,
    )
    _write(
        first,
        "fails",
        _FAILS,
        inputs=[_tensor("WORDS", "BYTES", "[ 1 ]"), _tensor("STATUS", "BYTES", "[ 1 ]")],
        outputs=[_tensor("NOTHING", "INT32", "[ 1 ]")],
    )
    _write(
        first,
        "held",
        _HELD,
        inputs=[_tensor("FOLDER", "BYTES", "[ 1 ]")],
        outputs=[_tensor("DONE", "INT32", "[ 1 ]")],
        more=_SHORT_QUEUE,
    )
    (first / ENSEMBLE / "1").mkdir(parents=True)
    (first / ENSEMBLE / "config.pbtxt").write_text(_ENSEMBLE)
    write_model(second, "countdown", _COUNTDOWN, dtype="INT32", dims="[ 1 ]", decoupled=True)


def write_explicit_models(repository: Path) -> None:
    """Write models for a Triton that loads them when it is told to."""
    write_model(repository, "unloaded", _IDENTITY, dtype="FP32", dims="[ 1 ]")
    write_model(repository, "slow_to_load", _SLOW_TO_LOAD, dtype="FP32", dims="[ 1 ]")
    write_model(repository, "broken", _BROKEN, dtype="FP32", dims="[ 1 ]")
    _write(
        repository,
        "echo",
        _ECHO,
        inputs=[_tensor("INPUT", "FP32", "[ 1 ]")],
        outputs=[_tensor("TOLD", "BYTES", "[ 1 ]")],
    )
