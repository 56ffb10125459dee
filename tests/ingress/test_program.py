"""The program that Ray starts in HAProxy's place, with the real HAProxy behind it."""

import json
import os
import re
import shutil
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ingress.certificates import Signer
from tests.ingress.rendered import Application, Shape, render, replicas
from tests.ingress.running import (
    INFER,
    METADATA,
    PROGRAM,
    STREAM,
    call,
    channel,
    ingress_environment,
    request,
    running_ingress,
    shape_of,
)
from triton_ingress.program import LEFT_ALONE

RESTRICTIONS: list[dict[str, Any]] = [
    {"max_unary_request_bytes": 1},
    {"requests_per_second_per_client": 1},
    {"connections_per_client": 1},
    {"token_file": "TOKENS"},
    {"tls_certificate": "ANY"},
    {"jwt_public_key": "KEY", "jwt_algorithm": "RS256"},
]


def check(
    folder: Path, text: str, program: Path = PROGRAM, **settings: Any
) -> tuple["subprocess.CompletedProcess[str]", Path]:
    """Let the program change a configuration, and HAProxy check it."""
    file = folder / "haproxy.cfg"
    file.write_text(text)
    done = subprocess.run(
        [program, "-c", "-f", file],
        env=ingress_environment(settings),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done, file


def unknown(text: str) -> str:
    """Return a configuration with a line that a future Ray might write."""
    return text.replace(
        "    default_backend grpc-triton\n", "    # new\n    option something\n    default_backend grpc-triton\n"
    )


def refused(text: str) -> str:
    """Return one that looks as Ray would write it, but that HAProxy does not take."""
    return text.replace("    http-reuse always\n", "    http-reuse always\n    timeout nothing 5s\n")


def test_inference_goes_to_triton_and_the_rest_to_the_replica(tmp_path: Path) -> None:
    """The whole point of it."""
    with running_ingress(tmp_path) as ingress, channel(ingress.grpc) as connection:
        assert call(connection, INFER) == "triton 127.0.0.1"
        assert list(connection.stream_stream(STREAM)(iter([b"1", b"2"]), timeout=30)) == [b"triton 127.0.0.1"] * 2
        assert call(connection, METADATA) == "replica 127.0.0.1"
        assert call(connection, "/grpc.health.v1.Health/Check") == "replica 127.0.0.1"
        for path in ("infer", "versions/1/infer", "generate", "generate_stream"):
            assert request(f"{ingress.http}/v2/models/m/{path}", b"{}").body == "triton 127.0.0.1"
        for path in ("m", "m/config", "m%2Finfer", "m/../x/infer", "m//infer", "m/load"):
            assert request(f"{ingress.http}/v2/models/{path}").body == "replica 127.0.0.1"
        assert request(f"{ingress.http}/v2/models/m/infer").body == "replica 127.0.0.1", "GET is not inference"
        assert LEFT_ALONE not in ingress.metrics()


def test_without_the_straight_path_the_replica_answers_all(tmp_path: Path) -> None:
    """`ingress: replica`."""
    with running_ingress(tmp_path, straight=False) as ingress, channel(ingress.grpc) as connection:
        assert call(connection, INFER) == call(connection, METADATA) == "replica 127.0.0.1"
        assert request(f"{ingress.http}/v2/models/m/infer", b"{}").body == "replica 127.0.0.1"


def test_metadata_named_application_does_not_choose_another_one(tmp_path: Path) -> None:
    """Serve answers NOT_FOUND to a client that sends metadata of that name to its model."""
    with running_ingress(tmp_path) as ingress, channel(ingress.grpc) as connection:
        assert call(connection, INFER, metadata=[("application", "x")]) == "triton 127.0.0.1"


def test_without_a_replica_callers_are_told_to_try_again(tmp_path: Path) -> None:
    """NOT_FOUND, Serve's own answer, would tell them that their model does not exist."""
    with running_ingress(tmp_path) as ingress, channel(ingress.grpc) as connection:
        starting = "the endpoint is starting, it knows of no Triton yet"
        ingress.reload(Shape([], fallback=False, options=ingress.shape.options))
        assert call(connection, INFER) == (14, starting)
        response = request(f"{ingress.http}/v2/models/m/infer", b"{}")
        assert (response.status, json.loads(response.body)) == (503, {"error": starting})

        ingress.reload(shape_of(ingress.ports, []))
        unreachable = "Triton is not reachable, it may be restarting"
        for path in (INFER, METADATA):
            assert call(connection, path) == (14, unreachable)
        response = request(f"{ingress.http}/v2/models/m/infer", b"{}")
        assert (response.status, json.loads(response.body)) == (503, {"error": unreachable})


@pytest.mark.parametrize("pods", [1, 2])
def test_requests_above_what_the_tritons_may_have_are_refused_at_once(pods: int, tmp_path: Path) -> None:
    """In a queue that only grows, each caller would wait for others until all have given up."""
    words = "each Triton of this endpoint has 3 requests in flight, try again later"
    with (
        running_ingress(tmp_path, pods=pods, max_ongoing_requests=3) as ingress,
        channel(ingress.grpc) as connection,
    ):
        waiting = [connection.unary_unary(INFER).future(b"wait", timeout=60) for _ in range(3 * pods)]
        deadline = time.monotonic() + 30
        while len(ingress.seen) < 3 * pods:
            assert time.monotonic() < deadline, "not all that are allowed have arrived"
            time.sleep(0.01)

        assert call(connection, INFER) == (8, words)
        assert call(connection, METADATA).startswith("replica "), "others are not held up"

        ingress.released.set()
        assert all(future.result().startswith(b"triton ") for future in waiting)
        assert call(connection, INFER).startswith("triton ")


def test_it_listens_where_it_is_told(certificate: Path, tmp_path: Path) -> None:
    """Ray opens its statistics and metrics on all addresses."""
    with running_ingress(tmp_path, bind_host="127.0.0.9", tls_certificate=str(certificate)) as ingress:
        ports = {ingress.ports.grpc, ingress.ports.http, ingress.ports.metrics, ingress.ports.statistics}
        pid = ingress.process.pid if ingress.process else 0
        listening = {
            (each.laddr.ip, each.laddr.port)
            for each in psutil.Process(pid).net_connections("inet")
            if each.status == psutil.CONN_LISTEN
        }
    assert listening == {("127.0.0.9", port) for port in ports}


@pytest.mark.parametrize("name", ["tls_certificate", "client_ca", "jwt_public_key"])
def test_a_file_that_is_not_what_it_should_be_is_named_in_one_line(
    name: str, certificate: Path, tmp_path: Path
) -> None:
    """The line is what Ray shows when its HAProxy does not start."""
    broken = tmp_path / "broken.pem"
    broken.write_text("nothing\n")
    needed = {"client_ca": {"tls_certificate": str(certificate)}, "jwt_public_key": {"jwt_algorithm": "RS256"}}
    settings: dict[str, Any] = {name: str(broken), **needed.get(name, {})}

    done, _ = check(tmp_path, render(Shape(), tmp_path).read_text(), **settings)

    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert str(broken) in done.stderr


def test_refusals_have_the_content_type_of_grpc(tmp_path: Path) -> None:
    """Clients such as gRPC's for Go take an answer without one for a broken proxy, and show UNKNOWN."""
    (tmp_path / "tokens").write_text("secret\n")
    with running_ingress(tmp_path, token_file=str(tmp_path / "tokens")) as ingress:
        command = ["curl", "--silent", "--noproxy", "*", "--http2-prior-knowledge", "--include"]
        done = subprocess.run([*command, f"http://{ingress.grpc}{INFER}"], capture_output=True, text=True, check=True)

    status, *headers = done.stdout.strip().splitlines()
    assert status.strip() == "HTTP/2 200"
    assert sorted(headers) == [
        "content-length: 0",
        "content-type: application/grpc",
        "grpc-message: this endpoint needs a token, sent as authorization: Bearer TOKEN",
        "grpc-status: 16",
    ]


def test_an_endpoint_whose_configuration_is_left_alone_goes_on_and_shows_it(tmp_path: Path) -> None:
    """A new Ray shall cost speed, not the service; and the operator shall see it without reading logs."""
    with running_ingress(tmp_path) as ingress, channel(ingress.grpc) as connection:
        assert call(connection, INFER) == "triton 127.0.0.1"

        # A configuration that Ray may write, and that is not known: with a header of its tests.
        ingress.reload(shape_of(ingress.ports, ["127.0.0.1"], inject_process_id_header=True, reload_id="7"))

        assert call(connection, INFER) == "replica 127.0.0.1"
        metrics = ingress.metrics()
        assert re.search(rf'haproxy_backend_status{{proxy="{LEFT_ALONE}",state="UP"}} 1', metrics)
        said = [line for line in ingress.output().splitlines() if line.startswith("triton-ingress: ")]
        assert len(said) == 1
        assert "is not known: frontend http_frontend: 'http-request set-header x-haproxy-reload-id 7'" in said[0]


@pytest.mark.parametrize("change", [unknown, refused])
def test_what_is_not_known_is_left_to_the_byte(change: Any, tmp_path: Path) -> None:
    """Nothing that Ray wants may be lost in a configuration that is not understood."""
    text = change(render(Shape(), tmp_path).read_text())

    done, file = check(tmp_path, text)

    assert file.read_text() == f"{text}\nbackend {LEFT_ALONE}\n"
    said = [line for line in done.stderr.splitlines() if line.startswith("triton-ingress: ")]
    assert len(said) == 1
    assert "all requests go by way of the forwarder" in said[0]


@pytest.mark.parametrize("change", [unknown, refused])
@pytest.mark.parametrize("settings", RESTRICTIONS, ids=[next(iter(each)) for each in RESTRICTIONS])
def test_what_is_not_known_is_not_served_without_the_restrictions_asked_for(
    change: Any, settings: dict[str, Any], certificate: Path, tmp_path: Path
) -> None:
    """An endpoint that is open because Ray was upgraded is worse than one that does not start."""
    (tmp_path / "tokens").write_text("secret\n")
    key = Signer("RS256").write_public_key(tmp_path / "key.pem")
    files = {"ANY": str(certificate), "TOKENS": str(tmp_path / "tokens"), "KEY": str(key)}
    text = change(render(Shape(), tmp_path).read_text())

    done, file = check(tmp_path, text, **{name: files.get(value, value) for name, value in settings.items()})

    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("triton-ingress: this configuration of Ray Serve is not known: ")
    assert done.stderr.endswith("; without it, what TRITON_INGRESS asks for cannot hold\n")
    assert file.read_text() == text


def test_a_second_start_on_a_changed_file_changes_nothing_twice(tmp_path: Path) -> None:
    """Should Ray repeat a start, the requests must not be sent through two layers of rules."""
    text = render(Shape(), tmp_path).read_text()
    _, file = check(tmp_path, text)
    once = file.read_text()

    done, file = check(tmp_path, once)

    assert done.returncode == 0
    assert file.read_text() == once != text
    # With what is set now, not with what was set then.
    done, file = check(tmp_path, once, straight=False)
    assert done.returncode == 0
    assert "forwarders" in once
    assert "forwarders" not in file.read_text()


def test_a_second_start_on_a_file_left_alone_is_no_other_than_the_first(tmp_path: Path) -> None:
    """HAProxy does not take two backends of one name."""
    text = unknown(render(Shape(), tmp_path).read_text())
    _, file = check(tmp_path, text)
    once = file.read_text()

    _, file = check(tmp_path, once)

    assert file.read_text() == once


def test_it_runs_from_a_config_map(tmp_path: Path) -> None:
    """Kubernetes mounts one as a folder of links into a folder of another name."""
    mounted = tmp_path / "app/triton_ingress"
    data = mounted / "..2026_11_30"
    data.mkdir(parents=True)
    for file in PROGRAM.parent.iterdir():
        if file.is_file():
            shutil.copy(file, data)
            (mounted / file.name).symlink_to(f"..data/{file.name}")
    (mounted / "..data").symlink_to(data.name)
    text = render(Shape([Application(replicas(2))]), tmp_path).read_text()

    done, file = check(tmp_path, text, program=mounted / "haproxy")

    assert done.returncode == 0, done.stderr
    assert f"lua-load-per-thread {mounted}/sequence.lua" in file.read_text()


def test_the_files_fit_into_a_config_map() -> None:
    """Kubernetes takes 1 MiB in all, and no folders."""
    files = [file for file in PROGRAM.parent.iterdir() if file.name != "__pycache__"]
    assert all(file.is_file() for file in files)
    assert sum(file.stat().st_size for file in files) < 200_000
    assert os.access(PROGRAM, os.X_OK)


def test_it_imports_the_standard_library_only() -> None:
    """It starts with each change of the replicas, with whatever Python the image has."""
    code = "import sys, triton_ingress.program; print(sys.modules.keys() & {'ray', 'grpc', 'yaml', 'jinja2'})"
    done = subprocess.run(
        [shutil.which("python3") or "python3", "-c", code],
        env={"PYTHONPATH": str(PROGRAM.parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"straigth": True}, "unknown setting 'straigth'"),
        ({"token_file": "/no/such/file"}, "token_file is '/no/such/file', but there is no such file"),
    ],
)
def test_a_wrong_setting_ends_it_with_one_line(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    """The line is what Ray shows when its HAProxy does not start."""
    text = render(Shape(), tmp_path).read_text()

    done, file = check(tmp_path, text, **settings)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("triton-ingress: TRITON_INGRESS: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert file.read_text() == text


def test_what_it_writes_is_for_nobody_else_to_read(tmp_path: Path) -> None:
    """Hashes of tokens can be tried out."""
    (tmp_path / "tokens").write_text("secret\n")
    check(tmp_path, render(Shape(), tmp_path).read_text(), token_file=str(tmp_path / "tokens"))

    assert stat.S_IMODE((tmp_path / "token-hashes").stat().st_mode) == 0o600
    written = [file.read_text() for file in tmp_path.iterdir() if file.name not in ("tokens",) and file.is_file()]
    assert not [text for text in written if "secret" in text]
