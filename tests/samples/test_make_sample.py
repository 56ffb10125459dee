"""Sample scenes: what the demo, the tests and every accuracy figure take for the truth."""

import json
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import pyproj
import pytest
import rasterio
import rasterio.features
import rasterio.warp
import shapely
from onnx.reference import ReferenceEvaluator
from shapely.geometry import shape

from make_sample import Scene, main, write_scene
from sample_colours import BACKGROUND, CONTRAST, NIR_WEIGHT, SIDEWALK
from sample_data import street_lines_path
from sample_render import Renderer
from sample_town import Town, build_town, read_streets

ROOT = Path(__file__).parents[2]
METRES_PER_FOOT = 1200 / 3937
TILE_2000_M = (-305.0, -305.0, 305.0, 305.0)


@dataclass(frozen=True)
class Files:
    """A scene that was written."""

    folder: Path
    """Where it lies."""

    def pixels(self, name: str) -> npt.NDArray[np.uint8]:
        """Returns a tile's (4, height, width) pixels."""
        with rasterio.open(self.folder / f"{name}.tif") as dataset:
            return np.asarray(dataset.read())

    def truth(self, name: str = "truth") -> list[dict[str, Any]]:
        """Returns the features of a truth file."""
        return list(json.loads((self.folder / f"{name}.geojson").read_text())["features"])


def write(folder: Path, size: int, columns: int = 1, rows: int = 1, seed: int = 1) -> Files:
    list(write_scene(Scene(size, columns, rows, seed), folder, street_lines_path()))
    return Files(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write(tmp_path_factory.mktemp("whole"), 602)


@pytest.fixture(scope="module")
def quarters(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write(tmp_path_factory.mktemp("quarters"), 301, columns=2, rows=2)


@pytest.fixture(scope="module")
def town() -> Town:
    return build_town(read_streets(street_lines_path()), TILE_2000_M, seed=1)


def test_adjoining_tiles_are_one_picture_without_a_seam(whole: Files, quarters: Files) -> None:
    """A step in colour or geometry at a tile's edge would cut lines there and be blamed on the pipeline."""
    rows = [np.concatenate([quarters.pixels(f"tile_r{r}_c{c}") for c in (0, 1)], axis=2) for r in (0, 1)]
    np.testing.assert_array_equal(np.concatenate(rows, axis=1), whole.pixels("tile_r0_c0"))
    assert quarters.truth() == whole.truth()


def test_the_same_arguments_give_the_same_files_and_another_seed_does_not(whole: Files, tmp_path: Path) -> None:
    """Figures of two runs could not be compared if the scene were another one."""
    again, other = write(tmp_path / "again", 602), write(tmp_path / "other", 602, seed=2)
    np.testing.assert_array_equal(again.pixels("tile_r0_c0"), whole.pixels("tile_r0_c0"))
    assert again.truth() == whole.truth()
    assert (other.pixels("tile_r0_c0") != whole.pixels("tile_r0_c0")).mean() > 0.5
    assert other.truth() != whole.truth()


def test_a_tile_is_a_cloud_optimized_geotiff_in_feet_whose_fourth_band_is_not_alpha(quarters: Files) -> None:
    """GDAL would hide pixels by an alpha band, and lengths would be wrong by the unit's factor."""
    with rasterio.open(quarters.folder / "tile_r1_c0.tif") as dataset:
        assert dataset.crs.to_epsg() == 3424
        assert dataset.crs.linear_units_factor[1] == pytest.approx(METRES_PER_FOOT)
        assert (dataset.count, dataset.dtypes[0], dataset.nodata) == (4, "uint8", None)
        assert dataset.descriptions == ("red", "green", "blue", "nir")
        assert [interpretation.name for interpretation in dataset.colorinterp] == ["red", "green", "blue", "undefined"]
        assert dataset.tags(ns="IMAGE_STRUCTURE")["LAYOUT"] == "COG"
        assert dataset.compression.name == "deflate"
        assert dataset.dataset_mask().all()


def test_tiles_lie_side_by_side_in_new_jersey(quarters: Files) -> None:
    """Tiles that overlap or leave a gap would count streets twice or not at all."""
    bounds = {}
    for row, column in np.ndindex(2, 2):
        with rasterio.open(quarters.folder / f"tile_r{row}_c{column}.tif") as dataset:
            bounds[row, column] = dataset.bounds
    assert bounds[0, 0].right == bounds[0, 1].left
    assert bounds[0, 0].bottom == bounds[1, 0].top
    assert bounds[1, 1].left == bounds[0, 0].left + 301
    west, south, east, north = rasterio.warp.transform_bounds("EPSG:3424", "EPSG:4326", *bounds[0, 0])
    assert -75.6 < west < east < -73.9
    assert 38.9 < south < north < 41.4


def mask_and_truth(files: Files, name: str) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Returns the committed model's mask of a tile, and its truth drawn by GDAL from the GeoJSON."""
    network: Any = ReferenceEvaluator(str(ROOT / "files/models/gpu/batched_semseg_model/1/model.onnx"))
    image = files.pixels(name)[[3, 1, 2]].astype(np.float32) / 255
    mean, std = (np.array(values, np.float32)[:, None, None] for values in ((0.55, 0.49, 0.40), (0.12, 0.13, 0.15)))
    (logits,) = network.run(None, {"image": ((image - mean) / std)[None]})
    with rasterio.open(files.folder / f"{name}.tif") as dataset:
        shapes = []
        for feature in files.truth(f"{name}.truth"):
            line = shape(rasterio.warp.transform_geom("OGC:CRS84", dataset.crs, feature["geometry"]))
            radius = feature["properties"]["width_m"] / 2 / METRES_PER_FOOT
            shapes.append(line.buffer(radius, cap_style="flat"))
        truth = rasterio.features.rasterize(shapes, out_shape=dataset.shape, transform=dataset.transform)
    return np.asarray(logits[0, 1] > logits[0, 0]), np.asarray(truth > 0)


@pytest.mark.parametrize("name", ["tile_r0_c0", "tile_r1_c1"])
def test_the_model_finds_the_truth_and_nothing_else(quarters: Files, name: str) -> None:
    """Were the truth not in the picture, or something else of its colour, no pipeline could reach its figures."""
    mask, truth = mask_and_truth(quarters, name)
    assert truth.sum() > 2000
    # A tile's edge cuts lines off square, but their buffers aslant.
    inner = np.s_[4:-4, 4:-4]
    kernel = np.ones((3, 3), np.uint8)
    near, deep = (operation(truth.astype(np.uint8), kernel) > 0 for operation in (cv2.dilate, cv2.erode))
    assert (mask & truth)[inner].sum() / (mask | truth)[inner].sum() > 0.97
    assert not (mask & ~near)[inner].any()
    assert not (deep & ~mask)[inner].any()


def test_every_line_states_its_true_length_and_width(whole: Files) -> None:
    """Totals in metres are compared with these; a projected length could be stretched."""
    ellipsoid = pyproj.Geod(ellps="GRS80")
    features = whole.truth()
    for feature in features:
        properties = feature["properties"]
        length = ellipsoid.geometry_length(shape(feature["geometry"]))
        # The State Plane grid is 1/10000 small here.
        assert length == pytest.approx(properties["length_m"], rel=2e-4, abs=0.002)
        assert 1.3 <= properties["width_m"] <= 2.0
    assert {"sidewalk", "crossing"} <= {feature["properties"]["kind"] for feature in features}


def test_streets_keep_the_length_they_have_on_the_ground() -> None:
    """The source's Web Mercator stretches by 15 % here: sidewalks beside them would be too wide apart."""
    path = street_lines_path()
    streets = read_streets(path)
    total = sum(street.line.length for street in streets)
    table = pq.read_table(path)
    kinds = np.array([str(kind) for kind in table["highway"].to_pylist()])
    lines = shapely.from_wkb(table["geometry"].to_numpy())
    used = lines[~np.isin(kinds, ["footway", "path", "pedestrian", "track"])]
    to_degrees = pyproj.Transformer.from_crs("EPSG:3857", "OGC:CRS84", always_xy=True)
    ellipsoid = pyproj.Geod(ellps="WGS84")
    expected = sum(ellipsoid.line_length(*to_degrees.transform(*shapely.get_coordinates(line).T)) for line in used)
    assert total == pytest.approx(expected, rel=1e-4)


def network_counts(town: Town) -> tuple[int, int, int]:
    """Counts components, loops and dead ends by the lines' shared end points alone."""
    ends = [(line.coords[0], line.coords[-1]) for line in (sidewalk.line for sidewalk in town.sidewalks)]
    degree = Counter(end for pair in ends for end in pair)
    parent = {node: node for node in degree}

    def root(node: Any) -> Any:
        while parent[node] != node:
            node = parent[node]
        return node

    for first, last in ends:
        parent[root(first)] = root(last)
    components = sum(parent[node] == node for node in parent)
    return components, len(ends) - len(degree) + components, sum(count == 1 for count in degree.values())


def test_the_lines_form_a_network_with_loops_and_dead_ends(town: Town) -> None:
    """Loops kept and dead ends are figures of the demo: the sample has to have some of each."""
    _, loops, dead_ends = network_counts(town)
    assert loops > 40
    assert dead_ends > 20
    inside = shapely.box(*TILE_2000_M).buffer(-5)
    blocks = shapely.get_parts(shapely.polygonize([sidewalk.line for sidewalk in town.sidewalks]))
    assert sum(inside.contains(block) and block.area > 2000 for block in blocks) >= 10


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("closed_by_m", [0.0, 0.75])
def test_the_surface_of_the_sidewalks_has_the_loops_of_their_lines(seed: int, closed_by_m: float) -> None:
    """Sidewalks that touch where their lines do not would give the mask loops that the truth lacks."""
    town = build_town(read_streets(street_lines_path()), TILE_2000_M, seed)
    components, loops, _ = network_counts(town)
    flat = [sidewalk.line.buffer(sidewalk.width_m / 2, cap_style="flat") for sidewalk in town.sidewalks]
    # Lines of a ring may meet at an angle; the flat ends then leave a notch of millimetres.
    surface = shapely.union_all(flat).buffer(0.01 + closed_by_m).buffer(-closed_by_m)
    parts = shapely.get_parts(surface)
    assert len(parts) == components
    assert sum(len(part.interiors) for part in parts) == loops


def test_lines_meet_only_in_their_end_points(town: Town) -> None:
    """A truth that is not split at its junctions would have fewer nodes than any result compared with it."""
    lines = [sidewalk.line for sidewalk in town.sidewalks]
    first, second = shapely.STRtree(lines).query(lines, predicate="intersects")
    for one, other in zip(first, second, strict=True):
        if one < other:
            met = shapely.get_coordinates(lines[one].intersection(lines[other])).tolist()
            ends = [list(line.coords[place]) for line in (lines[one], lines[other]) for place in (0, -1)]
            assert all(point in ends for point in met)


def test_no_other_colour_comes_near_a_sidewalks() -> None:
    """A roof or a car of the sidewalk's colour would be a false line that no pipeline could avoid."""

    def index(colour: tuple[int, int, int, int]) -> float:
        _, green, blue, nir = colour
        return green + blue - NIR_WEIGHT * nir

    assert index(SIDEWALK) == pytest.approx(CONTRAST, abs=1.3)
    assert all(index(colour) == pytest.approx(-CONTRAST, abs=1.3) for colour in BACKGROUND)


def test_scenes_beyond_the_town_are_filled_with_its_mirror_image() -> None:
    """Tiles without a single sidewalk would make a large run look faster than it is."""
    far_east = (1900.0, -300.0, 2500.0, 300.0)
    town = build_town(read_streets(street_lines_path()), far_east, seed=1)
    assert sum(sidewalk.line.length for sidewalk in town.sidewalks) > 5000
    picture = Renderer(town, seed=1).draw(column=7000, row=0, width=40, height=30)
    assert picture.shape == (4, 30, 40)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--size", "299"], "'299' is not a whole number from 300 to 5000"),
        (["--size", "5001"], "'5001' is not a whole number from 300 to 5000"),
        (["--size", "x"], "'x' is not"),
        (["--tiles", "2"], "'2' is not COLUMNSxROWS"),
        (["--tiles", "0x2"], "'0x2' is not COLUMNSxROWS"),
        (["--tiles", "2x21"], "'2x21' is not COLUMNSxROWS"),
        (["--seed", "-1"], "'-1' is not"),
        (["--street-data", "nowhere.parquet"], "nowhere.parquet"),
        (["--street-data", __file__], "cannot be read as GeoParquet"),
    ],
)
def test_a_bad_argument_is_one_line_and_exit_code_2(
    arguments: list[str], fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A traceback or a page of usage would hide which value was wrong."""
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path / "scene"), *arguments])
    message = capsys.readouterr().err
    assert stopped.value.code == 2
    assert message.count("\n") == 1
    assert fault in message
    assert not list(tmp_path.rglob("*.*"))


def test_missing_sample_data_names_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever skips scripts/setup has to learn what to run."""
    monkeypatch.setenv("TRITON_ON_RAY_CACHE", str(tmp_path / "empty"))
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path / "scene")])
    assert stopped.value.code == 1
    assert "run scripts/setup" in capsys.readouterr().err


def test_a_folder_with_tiles_of_another_scene_is_refused(quarters: Files, capsys: pytest.CaptureFixture[str]) -> None:
    """A run over the folder would take tiles of two scenes for neighbours."""
    with pytest.raises(SystemExit) as stopped:
        main([str(quarters.folder), "--size", "300", "--tiles", "2x1"])
    assert stopped.value.code == 2
    assert "tile_r1_c0.tif of another scene" in capsys.readouterr().err


def test_an_output_folder_that_cannot_be_made_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A full disk or a wrong path is the user's to mend, and no fault of the program."""
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path / "file" / "scene"), "--size", "300", "--tiles", "1x1"])
    assert stopped.value.code == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_the_script_writes_below_the_callers_folder_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    """A path is relative to where the user stands, not to the repository."""
    command = [str(ROOT / "scripts/make-sample"), "scene", "--size", "300", "--tiles", "1x2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "scene").iterdir()) == [
        "tile_r0_c0.tif",
        "tile_r0_c0.truth.geojson",
        "tile_r1_c0.tif",
        "tile_r1_c0.truth.geojson",
        "truth.geojson",
    ]
    assert "tile_r1_c0.tif" in done.stdout
