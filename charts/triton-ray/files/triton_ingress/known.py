"""The lines that Ray Serve writes into the sections that are changed here; others are not known.

They follow ray/serve/_private/haproxy_templates.py of Ray 2.60.
"""

from triton_ingress.sections import one_of

_NAME = r"[A-Za-z0-9._-]+"
_TEXT = r'"(?:[^"\\]|\\.)*"'
_GRPC_ANSWER = (
    rf"http-request return status 200 content-type application/grpc hdr grpc-status \d+( hdr grpc-message {_TEXT})?"
)
_UP = rf"acl backend_{_NAME}_server_up nbsrv\({_NAME}\) ge 1"
GRPC_FRONTEND = one_of(
    [
        r"bind \S+:\d+ proto h2",
        r"mode http",
        r"log global",
        r"acl is_healthz path /ray\.serve\.RayServeAPIService/Healthz",
        r"http-request set-log-level silent if is_healthz",
        _UP,
        rf"{_GRPC_ANSWER} if is_healthz( backend_{_NAME}_server_up)?",
        r"acl is_list_applications path /ray\.serve\.RayServeAPIService/ListApplications",
        rf"{_GRPC_ANSWER} if is_list_applications",
        r"use_backend grpc_fallback_backend if is_list_applications",
        rf"acl is_{_NAME} req\.hdr\(application\) -m str .*",
        rf"use_backend {_NAME} if is_{_NAME}",
        rf"default_backend {_NAME}",
    ]
)
_METRIC = r"http-request set-var-fmt\(txn\.serve_(app|route|deployment)\)"
_HTTP_ANSWER = rf"http-request return status \d+ content-type \S+ string {_TEXT}"
HTTP_FRONTEND = one_of(
    [
        r"bind \S+:\d+",
        r"log global",
        r"log \S+ len \d+ format rfc5424 local1 debug",
        r"log-format-sd .+",
        r"acl healthcheck path -i \S+",
        r"http-request set-log-level debug if (healthcheck|routes)",
        rf"{_METRIC} {_TEXT} if (healthcheck|routes)",
        _UP,
        rf"{_HTTP_ANSWER} if healthcheck( backend_{_NAME}_server_up)?",
        r"acl routes path -i /-/routes",
        rf"{_HTTP_ANSWER} if routes",
        rf"acl is_{_NAME} path(_beg)? \S+",
        rf"{_METRIC} {_TEXT} if is_{_NAME} !{{ var\(txn\.serve_(app|route|deployment)\) -m found }}",
        rf"use_backend {_NAME} if is_{_NAME}",
        r"default_backend default_backend",
    ]
)
DEFAULT_GRPC_BACKEND = one_of(
    [
        r"mode http",
        r"log global",
        r"acl has_application_header req\.hdr\(application\) -m found",
        r"http-request return status 200 content-type application/grpc hdr grpc-status 5 hdr grpc-message .+",
    ]
)
DEFAULT_BACKEND = one_of([r"http-request return status 404 content-type text/plain lf-string .+"])
_HEALTH = (
    r"option tcp-check",
    r"tcp-check connect",
    r"tcp-check send-binary [0-9a-f]+",
    r"tcp-check expect binary [0-9a-f]+",
    r"option httpchk GET \S+",
    r"http-check expect status 200",
    r"default-server( (fastinter|downinter|fall|rise|inter) \w+)* check",
)
BACKEND = one_of([r"mode http", r"log global", r"http-reuse always", r"timeout [a-z-]+ \d+s", *_HEALTH])
HEALTH_CHECK = one_of(_HEALTH)
