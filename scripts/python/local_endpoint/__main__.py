"""Command line of scripts/local-endpoint."""

import argparse
import signal
import sys
import time
from pathlib import Path

from local_endpoint.endpoint import LocalEndpoint, Options, PartFailedError

MODELS = Path(__file__).parents[3] / "files/models/cpu"


def _arguments() -> Options:
    parser = argparse.ArgumentParser(
        prog="local-endpoint",
        description="Real Triton on CPU, Ray Serve and the chart's forwarder on 127.0.0.1, until Ctrl-C. "
        "Ray Serve opens ports of its own on all interfaces, and with --ingress python the clients' port too.",
    )
    parser.add_argument(
        "--models",
        metavar="DIR",
        type=Path,
        action="append",
        help="Triton model repository; may be given several times (default: files/models/cpu)",
    )
    parser.add_argument(
        "--grpc-port", metavar="PORT", type=int, default=9000, help="port for clients, 0 for a free one (default: 9000)"
    )
    parser.add_argument(
        "--ingress",
        choices=("replica", "python"),
        default="replica",
        help="replica: Serve's HAProxy calls the forwarder (default); python: Serve's Python proxy does",
    )
    given = parser.parse_args()
    models = tuple(folder.resolve() for folder in given.models or [MODELS])
    for folder in models:
        if not folder.is_dir():
            parser.error(f"--models {folder}: no such folder; name a Triton model repository")
        if not any(folder.glob("*/config.pbtxt")):
            parser.error(f"--models {folder}: no MODEL/config.pbtxt in it; name a Triton model repository")
    if not 0 <= given.grpc_port < 65536:
        parser.error(f"--grpc-port {given.grpc_port}: must be 0 (any free port) to 65535")
    return Options(models=models, ingress=given.ingress, grpc_port=given.grpc_port)


def _leave(signum: int, _frame: object) -> None:
    # A second signal must not break off the clean-up.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    print(f"stopping ({signal.Signals(signum).name})", flush=True)
    raise SystemExit(0)


def main() -> None:
    """Run the endpoint until a signal or until a part of it ends."""
    options = _arguments()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _leave)
    started = time.monotonic()
    try:
        with LocalEndpoint(options) as endpoint:
            print(f"triton:   {', '.join(map(str, options.models))}  (pid {endpoint.triton.pid})")
            print(f"ray:      Serve with ingress {options.ingress}  (pid {endpoint.ray.pid})")
            print(f"logs:     {endpoint.folder}", flush=True)
            endpoint.wait_until_ready()
            print(f"ready after {time.monotonic() - started:.1f} s")
            print(f"endpoint: {endpoint.address}", flush=True)
            while True:
                endpoint.check()
                time.sleep(0.5)
    except (PartFailedError, FileNotFoundError) as error:
        print(f"local-endpoint: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
