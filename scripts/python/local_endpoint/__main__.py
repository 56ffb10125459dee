"""Command line of scripts/local-endpoint."""

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from local_endpoint.endpoint import LocalEndpoint, Options, PartFailedError

# Each has a Ray node, with some 400 MB of processes.
MAX_REPLICAS = 8
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
        "--http-port", metavar="PORT", type=int, default=0, help="the same for Triton's HTTP protocol (default: 0)"
    )
    parser.add_argument(
        "--ingress",
        choices=("direct", "replica", "python"),
        default="direct",
        help="direct: Serve's HAProxy sends inference straight to Triton (default); replica: all to the forwarder; "
        "python: Serve's Python proxy in HAProxy's place",
    )
    parser.add_argument(
        "--replicas",
        metavar="[MIN-]MAX",
        type=_replicas,
        default=(1, 1),
        help="Tritons, each with a forwarder replica; Serve scales from MIN to MAX, 0-1 included (default: 1)",
    )
    parser.add_argument(
        "--forwarders",
        metavar="N",
        type=int,
        choices=range(1, MAX_REPLICAS + 1),
        default=1,
        help="forwarder replicas for each Triton (default: 1)",
    )
    parser.add_argument(
        "--triton-arg",
        metavar="ARG",
        action="append",
        default=[],
        help="further argument of tritonserver, as in --triton-arg=--model-control-mode=explicit; may be repeated",
    )
    parser.add_argument(
        "--setting",
        metavar="NAME=VALUE",
        type=_setting,
        action="append",
        default=[],
        help="setting of the forwarder, VALUE in JSON, as in --setting allow_model_control=true; may be repeated",
    )
    given = parser.parse_args()
    models = tuple(folder.resolve() for folder in given.models or [MODELS])
    for folder in models:
        if not folder.is_dir():
            parser.error(f"--models {folder}: no such folder; name a Triton model repository")
        if not any(folder.glob("*/config.pbtxt")):
            parser.error(f"--models {folder}: no MODEL/config.pbtxt in it; name a Triton model repository")
    for name, port in (("grpc", given.grpc_port), ("http", given.http_port)):
        if not 0 <= port < 65536:
            parser.error(f"--{name}-port {port}: must be 0 (any free port) to 65535")
    settings = dict(given.setting)
    if settings:
        # Imports Ray, which takes a second.
        from triton_forwarder.settings import Settings

        try:
            Settings.from_args(settings)
        except ValueError as error:
            parser.error(f"--setting: {error}")
    return Options(
        models=models,
        ingress=given.ingress,
        grpc_port=given.grpc_port,
        http_port=given.http_port,
        min_replicas=given.replicas[0],
        replicas=given.replicas[1],
        forwarders=given.forwarders,
        triton_arguments=tuple(given.triton_arg),
        settings=settings,
    )


def _replicas(text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    numbers = (int(least), int(most or least)) if (least + most).isdecimal() and least else (0, 0)
    if not 0 <= numbers[0] <= numbers[1] <= MAX_REPLICAS or numbers[1] == 0:
        raise argparse.ArgumentTypeError(f"{text}: must be a number from 1 to {MAX_REPLICAS}, or two of them, as 0-2")
    return numbers


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        raise argparse.ArgumentTypeError(
            f"{text}: must be NAME=VALUE with VALUE in JSON, as in startup_timeout_s=60"
        ) from None


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
            for worker in endpoint.workers:
                models = ", ".join(map(str, options.models))
                print(f"triton:   {models} at {worker.host}:{endpoint.ports.triton_grpc}  (pid {worker.triton.pid})")
            print(f"ray:      Serve with ingress {options.ingress}  (pid {endpoint.ray.pid})")
            print(f"logs:     {endpoint.folder}", flush=True)
            endpoint.wait_until_ready()
            print(f"ready after {time.monotonic() - started:.1f} s")
            if options.ingress != "python":
                metrics = f"http://127.0.0.1:{endpoint.ports.haproxy_metrics}/metrics"
                print(f"metrics:  {metrics} and {metrics}/rpcs")
            print(f"http:     {endpoint.http_address}")
            print(f"endpoint: {endpoint.address}", flush=True)
            while True:
                endpoint.check()
                time.sleep(0.5)
    except (PartFailedError, FileNotFoundError) as error:
        print(f"local-endpoint: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
