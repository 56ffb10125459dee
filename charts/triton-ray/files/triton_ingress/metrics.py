"""Counts each RPC in a table of HAProxy's, and shows the table to Prometheus.

HAProxy's own exporter knows frontends, backends and servers, and averages. The table has one row for each RPC, with
counters that HAProxy increments itself: no Lua, and no line of a log, stands in the way of a request.
"""

from pathlib import Path

PATH = "/metrics/rpcs"
SERVICE = "triton_rpcs"
TABLE = "triton-rpcs"

BOUNDS_MS = (1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 10000, 60000)
# Counters of a row: one for each status of gRPC (1 to 16; the place of 0 is free), one for each bound, all, and the sum
# in tenths of a millisecond.
_STATUSES = 16
_ALL = _STATUSES + 1 + len(BOUNDS_MS)
_SUM = _ALL + 1


def global_lines(lua: Path, socket_path: str) -> list[str]:
    """Return the lines of the section `global`: the program that writes the table as text."""
    return [f"lua-load {lua} {socket_path} {','.join(map(str, BOUNDS_MS))}"]


def exporter_lines() -> list[str]:
    """Return the lines of the frontend that Prometheus asks."""
    return [f"http-request use-service lua.{SERVICE} if {{ path {PATH} }}"]


def frontend_lines() -> list[str]:
    """Return the lines of the gRPC frontend, to stand before all that answers there.

    The status is in the headers when Triton or HAProxy refuses a request. Behind a message, and where the forwarder
    answers, it comes later, and HAProxy does not look there: those failures Ray counts, in the replica.
    """
    lines = [
        "acl triton_rpc path_beg /inference.GRPCInferenceService/ /grpc.health.v1.Health/",
        f"http-request track-sc0 path table {TABLE} if triton_rpc",
        "http-request set-var(txn.waited) date(0,us)",
        "acl refused res.hdr(grpc-status) -m found",
        "http-after-response set-var(txn.waited) date(0,us),sub(txn.waited)",
        f"http-after-response sc-inc-gpc({_ALL},0)",
        "http-after-response set-var(txn.tenths) var(txn.waited),div(100)",
        f"http-after-response sc-add-gpc({_SUM},0) var(txn.tenths)",
    ]
    lines += [
        f"http-after-response sc-inc-gpc({index},0) if {{ var(txn.waited) -m int le {int(bound * 1000)} }}"
        for index, bound in enumerate(BOUNDS_MS, start=_STATUSES + 1)
    ]
    lines += [
        f"http-after-response sc-inc-gpc({status},0) if refused {{ res.hdr(grpc-status) -m str {status} }}"
        for status in range(1, _STATUSES + 1)
    ]
    return lines


def table_lines() -> list[str]:
    """Return the lines of the backend that holds the table; a day without an RPC, and it is forgotten."""
    counters = f"http_req_cnt,conn_cur,bytes_in_cnt,bytes_out_cnt,gpc({_SUM + 1})"
    return [f"stick-table type string len 80 size 1k expire 24h store {counters}"]
