"""Ray Serve's HAProxy configuration, taken apart and put together with Triton's servers in it.

Ray writes the configuration from a template of its own (ray/serve/_private/haproxy_templates.py). That template's
output is what this package knows: a section that it does not know, or in one that routes requests a line, is an
`UnknownConfigurationError`, never a guess.

For the application NAME Ray has the backends grpc-NAME and http-NAME, with its ready replicas as servers. Both keep
their names and become those of inference, so that Ray's own accounting (draining, statistics, server state) covers the
requests that last. Made here from the same servers are grpc-NAME-forwarders and http-NAME-forwarders for everything
else, and with several replicas grpc-NAME-sequences and http-NAME-sequences.

With several applications none is known to be Triton's: each is served by its replicas, as Ray would.
"""

import re
from pathlib import Path

from triton_ingress import access, known, metrics, sequences
from triton_ingress.answers import STARTING, Answer, Files, Protocol
from triton_ingress.backends import Backend
from triton_ingress.sections import Section, UnknownConfigurationError, parse
from triton_ingress.settings import Settings

INFER_RPCS = "/inference.GRPCInferenceService/ModelInfer /inference.GRPCInferenceService/ModelStreamInfer"
# Only what cannot be another path in disguise: no percent sign, no empty segment.
INFER_PATHS = r"^/v2/models/[A-Za-z0-9._+-]+(/versions/[0-9]+)?/(infer|generate|generate_stream)$"

# In place of what Ray sets in `global`. Buffers and frames of Ray's 16 KiB, and windows of 64 KiB, make a large tensor
# take five times as long.
TUNING = {
    "tune.bufsize": 128 * 1024,
    "tune.h2.max-frame-size": 128 * 1024,
    "tune.h2.fe.initial-window-size": 1024 * 1024,
    "tune.h2.be.initial-window-size": 1024 * 1024,
    # By default the 101st stream of a client's channel waits for another to end.
    "tune.h2.fe.max-concurrent-streams": 10_000,
    # No two requests on one connection to a server. Else HAProxy 2.8 can stop for good: an upload that fills its buffer
    # stops the reading of the client, whose window another answer waits for; that answer fills its own, and stops the
    # reading of the server, whose window the upload waits for.
    "tune.h2.be.max-concurrent-streams": 1,
}

_OTHERS = {"global", "defaults", "frontend prometheus", "listen stats"}
_BIND_ADDRESS = re.compile(r"^bind \S*:(?=\d)")
_CLIENT_KEEPALIVE = ["option clitcpka", "clitcpka-idle 10s", "clitcpka-intvl 5s", "clitcpka-cnt 3"]


def rewrite(text: str, settings: Settings, files: Files) -> str:
    """Return Ray's configuration with inference on its way to Triton.

    Args:
        text: what Ray wrote.
        settings: what the operator wants.
        files: where to put what the result names.

    Raises:
        UnknownConfigurationError: Ray wrote something that is not known here.
    """
    sections = {section.title: section for section in parse(text)}
    grpc, http = _backends(sections, Protocol.GRPC), _backends(sections, Protocol.HTTP)
    alone = len(grpc) == 1 and len(http) <= 1
    result = []
    for title, section in sections.items():
        if title == "frontend grpc_frontend":
            _change_grpc_frontend(section, grpc, settings, files, alone=alone)
        elif title == "frontend http_frontend":
            _change_http_frontend(section, http, settings, files, alone=alone)
        elif title == "frontend prometheus":
            section.lines += metrics.exporter_lines()
        elif title == "global":
            _change_global(section)
            if alone and any(backend.has_several for backend in [*grpc, *http]):
                section.lines.append(f"lua-load-per-thread {sequences.LUA}")
        elif title == "backend default_grpc_backend":
            section.check(known.DEFAULT_GRPC_BACKEND)
            if not grpc:
                # NOT_FOUND would tell a client that its model does not exist.
                section.lines = ["mode http", files.answer(STARTING, Protocol.GRPC)]
        elif title == "backend default_backend":
            section.check(known.DEFAULT_BACKEND)
            if not http:
                section.lines = [files.answer(STARTING, Protocol.HTTP)]
        elif title == "backend grpc_fallback_backend":
            Backend.parse(section, Protocol.GRPC)
            section.lines += files.errors(Protocol.GRPC)
        elif found := [each for each in [*grpc, *http] if title == f"backend {each.name}"]:
            result += found[0].sections(settings, files.errors(found[0].protocol), alone=alone)
            continue
        elif title not in _OTHERS:
            raise UnknownConfigurationError(f"the section {title!r}")
        result.append(section)
    result += [Section("backend", metrics.TABLE, metrics.table_lines()), *access.sections(settings)]
    if settings.bind_host:
        for section in result:
            section.lines = [_BIND_ADDRESS.sub(f"bind {settings.bind_host}:", line) for line in section.lines]
    return "".join(map(str, result))


def _backends(sections: dict[str, Section], protocol: Protocol) -> list[Backend]:
    start = f"backend {protocol.name.lower()}-"
    for title in (f"frontend {protocol.name.lower()}_frontend", *_OTHERS):
        if title not in sections:
            raise UnknownConfigurationError(f"there is no section {title!r}")
    return [Backend.parse(section, protocol) for title, section in sections.items() if title.startswith(start)]


def _change_global(section: Section) -> None:
    socket = section.only(r"stats socket (\S+) .*")[1]
    names = [line.partition(" ")[0] for line in section.lines]
    section.lines = [
        f"{name} {TUNING[name]}" if name in TUNING else line for name, line in zip(names, section.lines, strict=True)
    ]
    section.lines += metrics.global_lines(Path(__file__).with_name("metrics.lua"), socket)


def _change_grpc_frontend(
    section: Section, backends: list[Backend], settings: Settings, files: Files, *, alone: bool
) -> None:
    section.check(known.GRPC_FRONTEND)
    default = section.only(r"default_backend (\S+)")[1]
    if default != (backends[0].name if len(backends) == 1 else "default_grpc_backend"):
        raise UnknownConfigurationError(f"{section.title}: default_backend {default}")
    bind = section.only(r"bind .+")[0]
    rules, routes = [], []
    for line in section.lines:
        if line.startswith("use_backend "):
            routes.append(line)
        elif line.startswith(("acl ", "http-request ")):
            rules.append(line)
    own = [
        # Two would watch the same deadline, the client and Triton. When Triton's reset came first, the client saw
        # UNAVAILABLE; its own comes through in any case, and ends the request.
        "http-request del-header grpc-timeout"
    ]
    if alone:
        # A client may send metadata of that name to Triton.
        rules = [line for line in rules if "req.hdr(application)" not in line]
        routes = [line for line in routes if line != f"use_backend {default} if is_{default}"]
        own += [f"acl infer path {INFER_RPCS}", _refuse_overload(backends[0], settings, files)]
        if settings.straight:
            routes.append(f"use_backend {default}-forwarders unless infer")
        if backends[0].has_several:
            own += sequences.rules(Protocol.GRPC)
            routes += sequences.routes(default, f"{default}-forwarders" if settings.straight else default)
    section.lines = [
        *access.binds(bind, settings, Protocol.GRPC),
        "mode http",
        # A line for each request, to a port of syslog that nobody listens on: a sixth of HAProxy's time.
        "no log",
        *metrics.frontend_lines(),
        *_CLIENT_KEEPALIVE,
        *files.errors(Protocol.GRPC),
        *access.rules(settings, Protocol.GRPC, files),
        *rules,
        *own,
        *routes,
        f"default_backend {default}",
    ]


def _refuse_overload(backend: Backend, settings: Settings, files: Files) -> str:
    words = f"each Triton of this endpoint has {settings.max_ongoing_requests} requests in flight, try again later"
    answer = files.answer(Answer("overload", 8, 429, words), backend.protocol)
    # Below 0 when several were let in at once; without a server there is no room either, but other words.
    return f"{answer} if infer {{ be_conn_free({backend.name}) le 0 }} {{ nbsrv({backend.name}) gt 0 }}"


def _change_http_frontend(
    section: Section, backends: list[Backend], settings: Settings, files: Files, *, alone: bool
) -> None:
    section.check(known.HTTP_FRONTEND)
    bind = section.only(r"bind .+")[0]
    at_start = [line for line in section.lines if line.startswith("log")]
    rules = [line for line in section.lines if line.startswith(("acl ", "http-request "))]
    routes = [line for line in section.lines if line.startswith("use_backend ")]
    for route, backend in zip(routes, backends, strict=False):
        if route != f"use_backend {backend.name} if is_{backend.name}":
            raise UnknownConfigurationError(f"{section.title}: {route!r}")
    if len(routes) != len(backends):
        raise UnknownConfigurationError(f"{section.title} has {len(routes)} routes to {len(backends)} applications")
    own = []
    if alone and backends:
        name = backends[0].name
        before = []
        own = [
            f"acl infer path_reg {INFER_PATHS}",
            f"{_refuse_overload(backends[0], settings, files)} METH_POST",
        ]
        if settings.straight:
            before.append(f"use_backend {name}-forwarders if is_{name} !METH_POST || is_{name} !infer")
        if backends[0].has_several:
            own += sequences.rules(Protocol.HTTP)
            before += sequences.routes(name, f"{name}-forwarders" if settings.straight else name, f"is_{name} ")
        routes = before + routes
    section.lines = [
        *access.binds(bind, settings, Protocol.HTTP),
        *at_start,
        *access.rules(settings, Protocol.HTTP, files),
        *rules,
        *own,
        *routes,
        "default_backend default_backend",
    ]
