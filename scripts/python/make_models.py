"""Writes the ONNX files of the model repositories below files/models/.

The network looks at single pixels: it undoes the normalisation, takes the index of ``sample_colours`` and gives it as
two logits. Its second form is wrong within ``WRONG_BORDER_PX`` of its input's edge, to show what stitching is worth.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from sample_colours import CONTRAST, NIR_WEIGHT

__all__ = ["MEAN", "STD", "main", "model_files", "semseg_model"]

MODELS = Path(__file__).resolve().parents[2] / "files" / "models"

# Of NIR, green and blue on the 0-1 scale; the parameters of every config.pbtxt say the same.
MEAN = (0.55, 0.49, 0.40)
STD = (0.12, 0.13, 0.15)

# Difference of the logits in clear sunlight; shade halves it, which still leaves a probability above 0.97.
LOGIT_DIFFERENCE = 8.0
WRONG_BORDER_PX = 15

# Both are old enough for every onnxruntime since 1.14, so for any Triton since 23.03.
OPSET = 17
IR_VERSION = 8


def semseg_model(*, wrong_border_px: int = 0) -> onnx.ModelProto:
    """Builds the network: ``image`` float32 (n, 3, height, width) to ``sem_seg`` float32 (n, 2, height, width).

    Args:
        wrong_border_px: The foreground's and the background's logits change places this near to the input's edge.
    """
    index = np.array([-NIR_WEIGHT, 1.0, 1.0]) * 255 / CONTRAST
    foreground = np.outer([-0.5, 0.5], index) * LOGIT_DIFFERENCE
    weight = (foreground * STD).astype(np.float32).reshape(2, 3, 1, 1)
    bias = (foreground @ MEAN).astype(np.float32)
    constants: dict[str, npt.NDArray[Any]] = {"weight": weight, "bias": bias}
    logits = "logits" if wrong_border_px else "sem_seg"
    nodes = [helper.make_node("Conv", ["image", "weight", "bias"], [logits])]
    if wrong_border_px:
        constants |= {
            "zero": np.array(0, np.int64),
            "one": np.array(1, np.int64),
            "border": np.array(wrong_border_px, np.int64),
            "minus_one": np.array(-1, np.float32),
            "plus_one": np.array(1, np.float32),
            "column_axis": np.array([1], np.int64),
        }
        nodes += _near_edge("height", axis=2) + _near_edge("width", axis=3)
        nodes += [
            helper.make_node("Unsqueeze", ["height_near", "column_axis"], ["rows_near"]),
            helper.make_node("Or", ["rows_near", "width_near"], ["near"]),
            helper.make_node("Where", ["near", "minus_one", "plus_one"], ["sign"]),
            helper.make_node("Mul", ["logits", "sign"], ["sem_seg"]),
        ]
    graph = helper.make_graph(
        nodes,
        "semseg",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", 3, "height", "width"])],
        [helper.make_tensor_value_info("sem_seg", TensorProto.FLOAT, ["n", 2, "height", "width"])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opset = helper.make_opsetid("", OPSET)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION, producer_name="triton-on-ray")
    onnx.checker.check_model(model, full_check=True)
    return model


def _near_edge(name: str, *, axis: int) -> list[onnx.NodeProto]:
    """Builds a boolean vector along an axis of ``image``: true where the nearer edge is less than the border away."""
    return [
        helper.make_node("Shape", ["image"], [f"{name}_shape"], start=axis, end=axis + 1),
        helper.make_node("Squeeze", [f"{name}_shape"], [f"{name}_size"]),
        helper.make_node("Range", ["zero", f"{name}_size", "one"], [f"{name}_index"]),
        helper.make_node("Sub", [f"{name}_size", f"{name}_index"], [f"{name}_left"]),
        helper.make_node("Sub", [f"{name}_left", "one"], [f"{name}_mirrored"]),
        helper.make_node("Min", [f"{name}_index", f"{name}_mirrored"], [f"{name}_distance"]),
        helper.make_node("Less", [f"{name}_distance", "border"], [f"{name}_near"]),
    ]


def model_files() -> dict[str, bytes]:
    """Returns the ONNX files by their path below files/models/; a repository can be copied without the other."""
    right = semseg_model().SerializeToString(deterministic=True)
    wrong = semseg_model(wrong_border_px=WRONG_BORDER_PX).SerializeToString(deterministic=True)
    return {
        "gpu/batched_semseg_model/1/model.onnx": right,
        "cpu/batched_semseg_model/1/model.onnx": right,
        "cpu/border_wrong_semseg_model/1/model.onnx": wrong,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    parser = argparse.ArgumentParser(prog="make-models", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "models_dir", type=Path, nargs="?", default=MODELS, metavar="DIR", help="instead of files/models"
    )
    options = parser.parse_args(arguments)
    try:
        for name, content in model_files().items():
            path = options.models_dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            print(f"{path}: {len(content)} bytes")
    except OSError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
