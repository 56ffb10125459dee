"""The model of the benchmark, in Triton's Python backend: it answers with its input."""

from typing import Any

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Gives back the very tensors that came.

    They lie in the memory that the backend shares with Triton and are not copied; this saves a third of Triton's time
    for 12.6 MB. The output has the input's name for it.
    """

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request."""
        return [pb_utils.InferenceResponse(request.inputs()) for request in requests]
