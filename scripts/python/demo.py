"""The demo: sample tiles, the endpoint on this machine, the centerlines job through it, and how right it was."""

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sample_data import aerial_photo_path

ROOT = Path(__file__).parents[2]
CENTERLINES = ROOT / ".venv/bin/centerlines"
LEAST_QUALITY = 0.98
ENDPOINT_LINE = "endpoint: "
# What a command gets to end by itself after Ctrl-C or SIGTERM.
STOP_S = 60


def _tell(text: str) -> None:
    print(f"\n== {text}", flush=True)


@contextmanager
def _started(*command: str | Path, stdout: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start a command that ends with this block, by SIGTERM if it has not ended by itself."""
    process = subprocess.Popen(list(map(str, command)), stdout=stdout, text=True)
    try:
        yield process
    except KeyboardInterrupt:
        # The terminal has sent Ctrl-C to the command too; it is ending.
        process.wait(STOP_S)
        raise
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(STOP_S)


def _run(*command: str | Path) -> int:
    with _started(*command) as process:
        return process.wait()


def _make_sample(folder: Path) -> int:
    if (folder / "truth.geojson").exists():
        print(f"{folder} is there from an earlier demo")
        return 0
    return _run(ROOT / "scripts/make-sample", folder, "--size", "2000", "--tiles", "2x2")


def _wait_for_address(endpoint: subprocess.Popen[str]) -> str:
    for line in endpoint.stdout or ():
        print(line, end="", flush=True)
        if line.startswith(ENDPOINT_LINE):
            return line.removeprefix(ENDPOINT_LINE).strip()
    sys.exit("demo: the endpoint did not start")


def _run_job(name: str, tiles: Path, endpoint: str, output: Path, *options: str) -> int:
    names = ("--endpoint", endpoint, "--model", "batched_semseg_model", "--job-id", name)
    return _run(CENTERLINES, "run", tiles, "--output", output, *names, *options)


def _show_stages(results: Path) -> None:
    record = json.loads((results / "run.json").read_text())
    print("\nseconds of work per stage (stages run side by side):")
    for stage, seconds in record["stage_seconds"].items():
        print(f"  {stage:8} {seconds:8.2f}")
    print(f"  run      {record['seconds']:8.2f}  from start to end")


def _demo(output: Path, ingress: str) -> int:
    sample, results = output / "sample", output / "results"
    _tell("sample: 4 adjoining tiles of 2000 px, and the true sidewalks")
    if code := _make_sample(sample):
        return code
    _tell("endpoint: Triton on CPU behind Ray Serve")
    local_endpoint = (ROOT / "scripts/local-endpoint", "--grpc-port", "0", "--ingress", ingress)
    with _started(*local_endpoint, stdout=subprocess.PIPE) as endpoint:
        address = _wait_for_address(endpoint)
        _tell("centerlines: the job through the endpoint")
        if code := _run_job("demo", sample, address, results):
            return code
        _tell("a real aerial photo of 3 bands; its red stands in for the near infrared")
        print("(the model knows the colours of the sample only: this shows that a real file goes through, no more)")
        photo = aerial_photo_path()
        if code := _run_job("photo", photo, address, output / "photo", "--bands", "R=1,G=2,B=3,NIR=1"):
            return code
    _tell("comparison with the truth")
    code = _run(
        *(CENTERLINES, "compare", sample, "--results", results, "--truth", sample / "truth.geojson"),
        *("--require-quality", str(LEAST_QUALITY), "--require-loops"),
    )
    _show_stages(results)
    print(f"\nreport: {results / 'report.html'}")
    return code


def _terminate(_signum: int, _frame: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def main() -> None:
    """Run the demo and exit with its code."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "output/demo", help="default: output/demo")
    parser.add_argument("--ingress", choices=("replica", "python"), default="replica", help="default: replica")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        sys.exit(_demo(given.output.absolute(), given.ingress))
    except KeyboardInterrupt:
        sys.exit("demo: interrupted")


if __name__ == "__main__":
    main()
