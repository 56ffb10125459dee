"""The command line: what it takes, what it refuses, and how."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import rasterio
from affine import Affine

from centerlines.cli import _parser, run

GOOD = ("--endpoint", "127.0.0.1:9", "--model", "m", "--output", "out")


@pytest.fixture
def tile(tmp_path: Path) -> Path:
    """A GeoTIFF."""
    path = tmp_path / "tiles/a.tif"
    path.parent.mkdir()
    place = Affine(1, 0, 500_000, 0, -1, 500_000)
    with rasterio.open(
        path, "w", driver="GTiff", width=40, height=40, count=1, dtype="uint8", crs="EPSG:3424", transform=place
    ) as dataset:
        dataset.write(np.ones((1, 40, 40), np.uint8))
    return path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Run the command, which must refuse; return its one line on stderr."""
    with pytest.raises(SystemExit) as caught:
        run([str(argument) for argument in arguments])
    assert caught.value.code == 2
    output = capsys.readouterr()
    assert output.err.startswith("centerlines: ")
    assert output.err.count("\n") == 1
    assert output.err.endswith("\n")
    return output.err


def test_defaults_are_the_documented_ones() -> None:
    """People leave options out because the help says what then happens."""
    given = vars(_parser().parse_args(["run", "t.tif", *GOOD]))
    given.pop("function")
    assert given == {
        "command": "run",
        "tiles": ["t.tif"],
        "endpoint": "127.0.0.1:9",
        "model": "m",
        "model_version": "",
        "output": "out",
        "job_id": "",
        "chip_size": 256,
        "chip_overlap": 32,
        "batch_size": 200,
        "threshold": 0.5,
        "bands": None,
        "loaders": 1,
        "postprocessors": 1,
        "wait_for_endpoint": 120.0,
        "ray_address": None,
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["run", "compare"]),
        (
            ["run"],
            [
                *("--endpoint", "--model", "--model-version", "--output", "--job-id", "--chip-size", "--chip-overlap"),
                *("--batch-size", "--threshold", "--bands", "--loaders", "--postprocessors", "--ray-address"),
                *("--wait-for-endpoint", "s3://", "0, no tile failed", "1, some did", "2, bad arguments"),
            ],
        ),
        (["compare"], ["--results", "--truth", "--buffer", "--require-quality", "--require-loops"]),
    ],
)
def test_help_tells_every_option(capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]) -> None:
    """Scripts are written from it, so the names stay."""
    with pytest.raises(SystemExit) as caught:
        run([*arguments, "--help"])
    assert caught.value.code == 0
    output = capsys.readouterr()
    assert output.err == ""
    text = " ".join(output.out.split())
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["command", "centerlines --help"]),
        (["fly"], ["'fly'"]),
        (["run"], ["TILE_OR_FOLDER_OR_S3_PREFIX", "centerlines run --help"]),
        (["run", "t.tif"], ["--endpoint", "--model", "--output"]),
        (["run", "t.tif", *GOOD, "--no-such-option"], ["--no-such-option"]),
        (["run", "t.tif", *GOOD, "--chip-size", "big"], ["--chip-size", "'big'"]),
        (["run", "t.tif", *GOOD, "--chip-size", "25.6"], ["--chip-size", "'25.6'"]),
        (["run", "t.tif", *GOOD, "--threshold", "half"], ["--threshold", "'half'"]),
        (["run", "t.tif", *GOOD, "--loaders"], ["--loaders"]),
        (["compare", "t.tif"], ["--results", "--truth"]),
        (["compare", "t.tif", "--results", "r", "--truth", "t", "--buffer", "wide"], ["--buffer", "'wide'"]),
    ],
)
def test_arguments_that_cannot_be_parsed_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    """A page of usage hides what is wrong."""
    message = refused(capsys, *arguments)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--model", "", "--model ''"),
        ("--bands", "R=0", "--bands 'R=0'"),
        ("--bands", "X=1", "'X=1' is not one of R, G, B, NIR"),
        ("--chip-size", "15", "chip size 15"),
        ("--chip-size", "-256", "chip size -256"),
        ("--chip-overlap", "129", "chip overlap 129"),
        ("--chip-overlap", "-1", "chip overlap -1"),
        ("--batch-size", "0", "batch size 0"),
        ("--loaders", "0", "loaders 0"),
        ("--postprocessors", "-1", "postprocessors -1"),
        ("--threshold", "0", "threshold 0"),
        ("--threshold", "1", "threshold 1"),
        ("--threshold", "nan", "threshold nan"),
        ("--wait-for-endpoint", "-1", "--wait-for-endpoint -1"),
        ("--wait-for-endpoint", "nan", "--wait-for-endpoint nan"),
        ("--wait-for-endpoint", "inf", "--wait-for-endpoint inf"),
        ("--job-id", "two\nlines", "job id 'two\\nlines'"),
    ],
)
def test_values_that_make_no_sense_are_named(
    capsys: pytest.CaptureFixture[str], tile: Path, option: str, value: str, words: str
) -> None:
    """Before anything is started, and with the value that was given."""
    assert words in refused(capsys, "run", tile, *GOOD, f"{option}={value}")


@pytest.mark.parametrize(
    "endpoint",
    [
        *("", "host", ":8001", "host:", "host:0", "host:65536", "host:eight", "host:-1", "host:١٢"),
        *("http://host:80", "grpc://host:80", "host:80/path", "a b:80", "::1:8001", "[host]:80", "host:8001\n"),
    ],
)
def test_an_endpoint_is_a_host_and_a_port(capsys: pytest.CaptureFixture[str], tile: Path, endpoint: str) -> None:
    """A URL pasted from a browser is told at once, not after the patience for an unreachable server."""
    arguments = ["run", str(tile), f"--endpoint={endpoint}", "--model", "m", "--output", "out"]
    assert f"--endpoint {endpoint!r}: write HOST:PORT" in refused(capsys, *arguments)


@pytest.mark.parametrize("endpoint", ["host:1", "host:65535", "serve-svc.ns.svc:8001", "10.0.0.1:80", "[::1]:8001"])
def test_endpoints_of_every_kind_get_past_the_parser(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, endpoint: str
) -> None:
    """The next check is then what refuses: the tiles."""
    arguments = ["run", str(tmp_path / "none"), "--endpoint", endpoint, "--model", "m", "--output", "out"]
    assert f"{tmp_path}/none: no such file or folder" in refused(capsys, *arguments)


def test_missing_tiles_are_named(capsys: pytest.CaptureFixture[str], tile: Path, tmp_path: Path) -> None:
    """Nothing runs if one of the arguments is wrong."""
    (tmp_path / "empty").mkdir()
    assert "no such file or folder" in refused(capsys, "run", tile, tmp_path / "none", *GOOD)
    assert f"{tmp_path}/empty: no GeoTIFF" in refused(capsys, "run", tmp_path / "empty", *GOOD)
    assert f"tile {tile} is given twice" in refused(capsys, "run", tile, tile.parent, *GOOD)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--buffer", "0", "--buffer 0"),
        ("--buffer", "nan", "--buffer nan"),
        ("--buffer", "inf", "--buffer inf"),
        ("--require-quality", "98", "--require-quality 98"),
        ("--require-quality", "nan", "--require-quality nan"),
    ],
)
def test_a_comparison_that_could_not_fail_or_pass_is_refused(
    capsys: pytest.CaptureFixture[str], tile: Path, option: str, value: str, words: str
) -> None:
    """A gate in a script that nothing can fail is worse than none."""
    arguments: list[str | Path] = ["compare", tile, "--results", "r", "--truth", "t", f"{option}={value}"]
    assert words in refused(capsys, *arguments)


def test_the_installed_command_refuses_in_the_same_way(tmp_path: Path) -> None:
    """What scripts see: nothing on stdout, one line on stderr, exit code 2."""
    command = Path(sys.executable).with_name("centerlines")
    done = subprocess.run(
        [command, "run", tmp_path / "none", *GOOD], capture_output=True, text=True, env=os.environ, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"centerlines: {tmp_path}/none: no such file or folder\n"
