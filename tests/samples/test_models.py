"""The model repositories: the contract that the pipeline reads, and what the networks compute."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from google.protobuf import text_format  # type: ignore[import-untyped]
from onnx.reference import ReferenceEvaluator
from tritonclient.grpc import model_config_pb2

from make_models import MEAN, STD, main, model_files

MODELS = Path(__file__).parents[2] / "files" / "models"
RIGHT = "cpu/batched_semseg_model"
WRONG = "cpu/border_wrong_semseg_model"
GPU = "gpu/batched_semseg_model"


def run(model: str, image: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    network: Any = ReferenceEvaluator(str(MODELS / model / "1" / "model.onnx"))
    return np.asarray(network.run(None, {"image": image})[0])


def normalised(*, red_free_pixel: tuple[int, int, int]) -> npt.NDArray[np.float32]:
    """Returns one pixel given as 8-bit NIR, green, blue, as the network wants it: (1, 3, 1, 1)."""
    value = (np.array(red_free_pixel) / 255 - MEAN) / STD
    return value.astype(np.float32).reshape(1, 3, 1, 1)


def config(model: str) -> Any:
    return text_format.Parse((MODELS / model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())


def test_the_committed_networks_are_what_the_script_writes(tmp_path: Path) -> None:
    """Someone who changes the script and forgets to run it would serve another network than the one described."""
    assert main([str(tmp_path)]) == 0
    names = sorted(path.relative_to(MODELS).as_posix() for path in MODELS.rglob("*.onnx"))
    assert names == sorted(model_files())
    for name in names:
        assert (MODELS / name).read_bytes() == (tmp_path / name).read_bytes(), name


def test_gpu_and_cpu_serve_the_same_network_and_both_cpu_models_the_same_program() -> None:
    """A difference would be taken for one of Triton's backends, or of the stitching."""
    assert (MODELS / GPU / "1/model.onnx").read_bytes() == (MODELS / RIGHT / "1/model.onnx").read_bytes()
    assert (MODELS / RIGHT / "1/model.py").read_text() == (MODELS / WRONG / "1/model.py").read_text()


@pytest.mark.parametrize("model", [GPU, RIGHT, WRONG])
def test_every_configuration_keeps_the_contract(model: str) -> None:
    """The pipeline checks names and shapes, normalises by the parameters and sends up to 200 chips."""
    found = config(model)
    assert found.name == Path(model).name
    assert found.max_batch_size == 200
    assert [(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in found.input] == [
        ("image", model_config_pb2.TYPE_FP32, [3, -1, -1])
    ]
    assert [(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in found.output] == [
        ("sem_seg", model_config_pb2.TYPE_FP32, [2, -1, -1])
    ]
    assert {min(found.dynamic_batching.preferred_batch_size), max(found.dynamic_batching.preferred_batch_size)} == {
        16,
        200,
    }
    assert found.dynamic_batching.preserve_ordering
    assert [group.count for group in found.instance_group] == [1]
    for key, expected in (("mean", MEAN), ("std", STD)):
        assert tuple(map(float, found.parameters[key].string_value.split(","))) == expected


def test_only_the_gpu_waits_for_full_batches() -> None:
    """On a CPU the wait would only be added to every request."""
    gpu, cpu = config(GPU), config(RIGHT)
    assert (gpu.platform, gpu.dynamic_batching.max_queue_delay_microseconds) == ("onnxruntime_onnx", 100_000)
    assert (cpu.backend, cpu.dynamic_batching.max_queue_delay_microseconds) == ("python", 5_000)
    assert gpu.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_GPU
    assert cpu.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_CPU


@pytest.mark.parametrize(
    ("nir", "green", "blue", "is_sidewalk"),
    [
        (88, 203, 194, True),
        (44, 102, 97, True),
        (158, 108, 110, False),
        (149, 120, 76, False),
        (75, 60, 38, False),
        (247, 224, 218, False),
    ],
    ids=["sidewalk", "sidewalk in the shade", "asphalt", "grass", "grass in the shade", "white roof"],
)
def test_a_clear_colour_has_a_clear_probability(nir: int, green: int, blue: int, is_sidewalk: bool) -> None:
    """Blending and confidence need probabilities that are sure, yet not 0 and 1 exactly."""
    background, foreground = run(GPU, normalised(red_free_pixel=(nir, green, blue))).ravel()
    probability = 1 / (1 + np.exp(background - foreground))
    assert 0.97 < (probability if is_sidewalk else 1 - probability) < 0.9999


def test_half_a_sidewalk_pixel_is_undecided() -> None:
    """The threshold of 0.5 then lies on the true edge, whatever is beside it."""
    background, foreground = run(GPU, normalised(red_free_pixel=((88 + 158) // 2, 155, 152))).ravel()
    assert abs(foreground - background) < 0.3


@pytest.mark.parametrize(("height", "width"), [(1, 1), (15, 40), (30, 30), (31, 33), (64, 50)])
def test_the_wrong_model_is_the_right_one_turned_round_within_15_pixels_of_the_edge(height: int, width: int) -> None:
    """It shows that stitching mends chip borders: so it must be wrong there, everywhere there, and nowhere else."""
    image = np.random.default_rng(0).standard_normal((2, 3, height, width)).astype(np.float32)
    right, wrong = run(RIGHT, image), run(WRONG, image)
    assert right.shape == (2, 2, height, width)
    inside = np.zeros((height, width), bool)
    inside[15 : max(height - 15, 0), 15 : max(width - 15, 0)] = True
    np.testing.assert_allclose(wrong, np.where(inside, right, -right), rtol=1e-6)
