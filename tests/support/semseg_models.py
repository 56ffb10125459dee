"""The segmentation model of this repository in the variants that tests of the pipeline need."""

import shutil
from pathlib import Path

MODELS = Path(__file__).parents[2] / "files/models/cpu"
_ORIGINAL = "batched_semseg_model"

_SLOW = '''

class _Fast(TritonPythonModel):
    pass


class TritonPythonModel(_Fast):
    """The same, after a wait for each request."""

    def initialize(self, args: dict[str, str]) -> None:
        """Reads the wait."""
        import json

        super().initialize(args)
        self._delay_s = float(json.loads(args["model_config"])["parameters"]["delay_s"]["string_value"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Waits, then answers."""
        import time

        time.sleep(self._delay_s * len(requests))
        return super().execute(requests)
'''

_PARTICULAR = '''

class _Tolerant(TritonPythonModel):
    pass


class TritonPythonModel(_Tolerant):
    """The same, but a request with a wholly white chip is refused, or that chip is answered with NaN."""

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answers, except to white chips."""
        responses = []
        for request, response in zip(requests, super().execute(requests), strict=True):
            image = pb_utils.get_input_tensor_by_name(request, "image").as_numpy()
            white = image.min(axis=(1, 2, 3)) > 2
            if white.any() and REFUSES:
                response = pb_utils.InferenceResponse(error=pb_utils.TritonError("white is too bright"))
            elif white.any():
                logits = response.output_tensors()[0].as_numpy().copy()
                logits[white] = np.nan
                response = pb_utils.InferenceResponse([pb_utils.Tensor("sem_seg", logits)])
            responses.append(response)
        return responses
'''


def write_particular_model(repository: Path, *, refuses: bool) -> str:
    """Write a model that refuses requests with a wholly white chip, or answers NaN to that chip; return its name."""
    name = "refusing_semseg_model" if refuses else "nan_semseg_model"
    with (_copy(repository, name) / "1/model.py").open("a") as code:
        code.write(f"\nREFUSES = {refuses}\n{_PARTICULAR}")
    return name


def write_slow_model(repository: Path, *, delay_s: float) -> str:
    """Write a model that waits before it answers, one request after the other; return its name."""
    name = "slow_semseg_model"
    folder = _copy(repository, name)
    config = (folder / "config.pbtxt").read_text().replace("parameters [", f"parameters [\n  {_parameter(delay_s)},")
    before, _, rest = config.partition("dynamic_batching {")
    (folder / "config.pbtxt").write_text(before + rest.partition("\n}\n")[2])
    with (folder / "1/model.py").open("a") as code:
        code.write(_SLOW)
    return name


def write_small_batch_model(repository: Path, *, max_batch_size: int) -> str:
    """Write a model that takes fewer chips at once than a loader puts together; return its name."""
    name = "small_batch_semseg_model"
    folder = _copy(repository, name)
    config = (folder / "config.pbtxt").read_text()
    before, _, rest = config.partition("dynamic_batching {")
    config = before.replace("max_batch_size: 200", f"max_batch_size: {max_batch_size}") + rest.partition("\n}\n")[2]
    (folder / "config.pbtxt").write_text(config)
    return name


def _copy(repository: Path, name: str) -> Path:
    folder = repository / name
    shutil.copytree(MODELS / _ORIGINAL, folder, ignore=shutil.ignore_patterns("__pycache__"))
    config = folder / "config.pbtxt"
    config.write_text(config.read_text().replace(_ORIGINAL, name))
    return folder


def _parameter(delay_s: float) -> str:
    return f'{{ key: "delay_s" value: {{ string_value: "{delay_s}" }} }}'
