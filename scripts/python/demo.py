"""The demo: sample tiles, the endpoint on this machine, the centerlines job through it, and how right it was."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from sample_data import aerial_photo_path

ROOT = Path(__file__).parents[2]
CENTERLINES = ROOT / ".venv/bin/centerlines"
LEAST_QUALITY = 0.98
ENDPOINT_LINE = "endpoint: "


def _tell(text: str) -> None:
    print(f"\n== {text}", flush=True)


def _make_sample(folder: Path) -> None:
    if (folder / "truth.geojson").exists():
        print(f"{folder} is there from an earlier demo")
        return
    subprocess.run([ROOT / "scripts/make-sample", folder, "--size", "2000", "--tiles", "2x2"], check=True)


def _start_endpoint(ingress: str) -> tuple[subprocess.Popen[str], str]:
    """Start the endpoint; return it and its address."""
    process = subprocess.Popen(
        [ROOT / "scripts/local-endpoint", "--grpc-port", "0", "--ingress", ingress], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None  # noqa: S101  as asked for above
    for line in process.stdout:
        print(line, end="", flush=True)
        if line.startswith(ENDPOINT_LINE):
            return process, line.removeprefix(ENDPOINT_LINE).strip()
    sys.exit("demo: the endpoint did not start")


def _run_centerlines(tiles: Path, endpoint: str, output: Path, *options: str) -> int:
    return subprocess.run(
        [
            *(str(CENTERLINES), "run", str(tiles), "--endpoint", endpoint, "--model", "batched_semseg_model"),
            *("--output", str(output), "--job-id", "demo", *options),
        ]
    ).returncode


def _show_stages(results: Path) -> None:
    record = json.loads((results / "run.json").read_text())
    print("\nseconds of work per stage (stages run side by side):")
    for stage, seconds in record["stage_seconds"].items():
        print(f"  {stage:8} {seconds:8.2f}")
    print(f"  run      {record['seconds']:8.2f}  from start to end")


def main() -> int:
    """Run the demo; return its exit code."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "output/demo", help="default: output/demo")
    parser.add_argument("--ingress", choices=("replica", "python"), default="replica", help="default: replica")
    given = parser.parse_args()
    sample, results = given.output / "sample", given.output / "results"

    _tell("sample: 4 adjoining tiles of 2000 px, and the true sidewalks")
    _make_sample(sample)
    _tell("endpoint: Triton on CPU behind Ray Serve")
    endpoint, address = _start_endpoint(given.ingress)
    try:
        _tell("centerlines: the job through the endpoint")
        run = _run_centerlines(sample, address, results)
        _tell("a real aerial photo: 3 bands, its red stands in for the near infrared")
        # No truth here, and a model that knows the colours of the sample only: it shows that real files go through.
        photo = _run_centerlines(aerial_photo_path(), address, given.output / "photo", "--bands", "R=1,G=2,B=3,NIR=1")
    finally:
        endpoint.terminate()
        endpoint.wait()
    if run or photo:
        return run or photo
    _tell("comparison with the truth")
    compared = subprocess.run(
        [
            *(CENTERLINES, "compare", sample, "--results", results, "--truth", sample / "truth.geojson"),
            *("--require-quality", str(LEAST_QUALITY), "--require-loops"),
        ]
    )
    _show_stages(results)
    print(f"\nreport: {results / 'report.html'}")
    return compared.returncode


if __name__ == "__main__":
    sys.exit(main())
