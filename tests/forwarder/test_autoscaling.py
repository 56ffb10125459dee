"""Triton's load, from a real Triton's metrics and from texts of its format, and what follows from it."""

import asyncio
import contextlib
import http.server
import re
import threading
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.config import AutoscalingConfig, AutoscalingContext
from tritonclient.grpc import InferenceServerClient, InferInput

from local_endpoint.processes import free_port
from tests.support.local_endpoint import running_triton
from tests.support.models import write_protocol_models
from triton_forwarder.autoscaling import LOAD, TritonLoad, policy, sum_metrics

# As a Triton 2.51 writes it.
METRICS = """\
# HELP nv_inference_request_success Number of successful inference requests, all batch sizes
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="patient",version="1"} 3
# HELP nv_inference_request_duration_us Cumulative inference request duration in microseconds (includes cached requests)
# TYPE nv_inference_request_duration_us counter
nv_inference_request_duration_us{model="patient",version="1"} %(patient)s
nv_inference_request_duration_us{model="a {strange} \\"name\\"",version="1"} 1000000
# HELP nv_inference_pending_request_count Instantaneous number of pending requests awaiting execution per-model.
# TYPE nv_inference_pending_request_count gauge
nv_inference_pending_request_count{model="patient",version="1"} %(pending)s
nv_cpu_utilization 0.1818
"""


@contextlib.contextmanager
def metrics_server(answers: Iterator[tuple[int, str]]) -> Iterator[str]:
    """Answer with one status and text after the other; yield the address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answer."""
            status, text = next(answers)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_args: Any) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_metrics_are_summed_over_their_labels() -> None:
    """A model's name may have any character in it; a line that is read wrongly is a load out of nothing."""
    text = METRICS % {"patient": "2.5e+06", "pending": "4"}
    names = ("nv_inference_request_duration_us", "nv_inference_pending_request_count", "nv_absent")
    assert sum_metrics(text, names) == dict(zip(names, (3.5e6, 4.0, 0.0), strict=True))


def test_the_load_is_the_mean_of_the_requests_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests at a time are a load of two, whether each takes a millisecond or a minute."""
    now = [100.0]
    monkeypatch.setattr("triton_forwarder.autoscaling.time.monotonic", lambda: now[0])
    readings = [
        # Seconds later, time that all requests took together, pending, expected.
        (0, "5000000", "0", 0.0),
        (10, "25000000", "0", 2.0),
        (10, "25000000", "0", 0.0),
        # They have not ended, and are not in the counter.
        (10, "25000000", "7", 7.0),
        (0, "35000000", "1", 1.0),
        # Triton was started again.
        (10, "0", "0", 0.0),
        (5, "5000000", "0", 1.0),
    ]
    texts = iter([(200, METRICS % {"patient": busy, "pending": pending}) for _, busy, pending, _ in readings])

    async def scenario() -> None:
        with metrics_server(texts) as address:
            load = TritonLoad(address, timeout_s=5)
            for seconds, _, _, expected in readings:
                now[0] += seconds
                assert await load.read() == pytest.approx(expected)

    asyncio.run(scenario())


def test_a_triton_without_answer_has_no_load() -> None:
    """Serve leaves it out then. A load of 0 would scale the others down while one of them is away."""

    async def scenario() -> None:
        with pytest.raises(OSError, match="refused"):
            await TritonLoad(f"127.0.0.1:{free_port()}", timeout_s=5).read()
        with metrics_server(iter([(503, "starting")])) as address, pytest.raises(urllib.error.HTTPError):
            await TritonLoad(address, timeout_s=5).read()

    asyncio.run(scenario())


def test_the_load_of_a_real_triton(tmp_path: Path) -> None:
    """Its metrics have these names, and count what is under way."""
    write_protocol_models(tmp_path)

    def wait(client: InferenceServerClient, seconds: float) -> None:
        given = InferInput("INPUT", [1], "FP32")
        given.set_data_from_numpy(np.full(1, seconds, np.float32))
        client.infer("patient", [given])

    async def scenario() -> None:
        with running_triton(tmp_path) as triton, InferenceServerClient(triton.address) as client:
            load = TritonLoad(triton.metrics_address, timeout_s=5)
            assert await load.read() == 0
            # One runs, the others wait for it.
            calls = [asyncio.create_task(asyncio.to_thread(wait, client, 0.5)) for _ in range(4)]
            loads = []
            while not all(call.done() for call in calls):
                await asyncio.sleep(0.1)
                loads.append(await load.read())
            assert max(loads) >= 2
            await asyncio.sleep(2)
            await load.read()
            assert await load.read() == 0

    asyncio.run(scenario())


def context(*, loads: list[float] | None, waiting: float, running: int, target: float = 2.0) -> AutoscalingContext:
    """Return what Serve gives to a policy."""
    deployment = DeploymentID(name="Forwarder", app_name="triton")
    replicas = [ReplicaID(str(number), deployment) for number in range(running)]
    reports = None if loads is None else {LOAD: dict(zip(replicas, loads, strict=False))}
    return AutoscalingContext(
        deployment_id=deployment,
        deployment_name="Forwarder",
        app_name="triton",
        current_num_replicas=running,
        target_num_replicas=running,
        running_replicas=replicas,
        total_num_requests=lambda: waiting,
        total_queued_requests=lambda: waiting,
        aggregated_metrics=lambda: reports,  # type: ignore[arg-type, return-value]  # None is what its property allows
        raw_metrics=None,
        capacity_adjusted_min_replicas=0,
        capacity_adjusted_max_replicas=10,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=0.0,
        config=AutoscalingConfig(min_replicas=0, max_replicas=10, target_ongoing_requests=target),
    )


@pytest.mark.parametrize(
    ("given", "replicas"),
    [
        ({"loads": None, "waiting": 1, "running": 0}, 1),
        ({"loads": [], "waiting": 1, "running": 0}, 1),
        ({"loads": [], "waiting": 0, "running": 0}, 0),
        ({"loads": [5], "waiting": 0, "running": 1}, 3),
        ({"loads": [2, 2], "waiting": 0, "running": 2}, 2),
        ({"loads": [2, 2.1], "waiting": 0, "running": 2}, 3),
        ({"loads": [0, 0], "waiting": 0, "running": 2}, 0),
        # A stream through the forwarder, between two of its messages.
        ({"loads": [0, 0], "waiting": 3, "running": 2}, 2),
        # No report has come yet.
        ({"loads": [], "waiting": 5, "running": 1}, 3),
        # Requests through the forwarder are Triton's too, and count once.
        ({"loads": [4], "waiting": 4, "running": 1}, 2),
        ({"loads": [1], "waiting": 0, "running": 1, "target": 0.25}, 4),
    ],
)
def test_replicas_follow_from_the_load(given: dict[str, Any], replicas: int) -> None:
    """A GPU too many costs money, one too few makes clients wait, and a first one must start by a request."""
    assert policy(context(**given)) == (replicas, {})


def test_serve_finds_the_policy_by_its_name() -> None:
    """A name that does not exist shows up only when the application starts."""
    from triton_forwarder import app

    (name,) = re.findall(r'"policy_function": "([^"]+)"', Path(app.__file__).read_text())
    module, _, function = name.partition(":")
    assert getattr(__import__(module, fromlist=[function]), function) is policy
