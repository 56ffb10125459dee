"""Runs the model.onnx beside this file on the CPU: a stand-in for Triton's ONNX backend where there is none."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The class that Triton's Python backend looks for."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the network."""
        options = onnxruntime.SessionOptions()
        # One thread that sleeps when idle: Ray, the client and this server share the machine's cores.
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        network = Path(args["model_repository"]) / args["model_version"] / "model.onnx"
        self._session = onnxruntime.InferenceSession(str(network), options, providers=["CPUExecutionProvider"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answers the requests of one batch in their order; those of one image size run together."""
        images = [pb_utils.get_input_tensor_by_name(request, "image").as_numpy() for request in requests]
        same_size: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, image in enumerate(images):
            same_size[image.shape[1:]].append(number)
        answers: dict[int, Any] = {}
        for numbers in same_size.values():
            answers.update(zip(numbers, self._infer([images[number] for number in numbers]), strict=True))
        return [answers[number] for number in range(len(requests))]

    def _infer(self, images: list[Any]) -> list[Any]:
        """Runs images (n, 3, height, width) of one size in one go and returns a response for each of them."""
        try:
            batch = images[0] if len(images) == 1 else np.concatenate(images)
            (logits,) = self._session.run(["sem_seg"], {"image": batch})
        except Exception as error:  # onnxruntime's errors have no common base but this
            failure = pb_utils.TritonError(f"inference failed: {error}")
            return [pb_utils.InferenceResponse(error=failure) for _ in images]
        parts = np.split(logits, np.cumsum([len(image) for image in images])[:-1])
        return [pb_utils.InferenceResponse([pb_utils.Tensor("sem_seg", part)]) for part in parts]
