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
