"""The configurations that the installed Ray Serve writes, by its own code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray.serve._private.common import RequestProtocol
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, HAProxyManager, ServerConfig
from ray.serve.config import HTTPOptions, gRPCOptions

__all__ = ["Application", "Replica", "Shape", "render", "safe_name"]

SERVICER = "triton_forwarder:add_servicer_to_server"


def safe_name(name: str) -> str:
    """Return what Ray makes of the name of an application or an actor."""
    actor: Any = HAProxyManager
    return str(actor.__ray_metadata__.modified_class.get_safe_name(name))


@dataclass(frozen=True)
class Replica:
    """One server of an application, with its ports for the two protocols."""

    host: str = "127.0.0.1"
    grpc_port: int = 40000
    http_port: int = 30000
    name: str = "SERVE_REPLICA::triton#Forwarder#abc"


def replicas(number: int) -> tuple[Replica, ...]:
    """Return as many replicas, each on a host of its own."""
    return tuple(
        Replica(f"10.0.0.{index}", name=f"SERVE_REPLICA::triton#Forwarder#{index}") for index in range(1, number + 1)
    )


@dataclass(frozen=True)
class Application:
    """One Serve application."""

    replicas: Sequence[Replica] = field(default_factory=lambda: replicas(1))
    name: str = "triton"
    prefix: str = "/"
    deployment: str = "Forwarder"
    backend: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of Ray's BackendConfig."""


@dataclass(frozen=True)
class Shape:
    """What Ray knows when it writes a configuration."""

    applications: Sequence[Application] = (Application(),)
    fallback: bool = True
    """The proxy on the head is known."""
    healthy: bool = True
    """False while the node is drained."""
    received: bool = True
    """Routes and servers have arrived from the controller."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of Ray's HAProxyConfig."""


def render(shape: Shape, folder: Path, *, grpc_port: int = 9000, http_port: int = 8000) -> Path:
    """Let Ray write a configuration into the folder; return the file."""
    config = HAProxyConfig(
        **{
            "http_options": HTTPOptions(host="127.0.0.1", port=http_port),
            "grpc_options": gRPCOptions(port=grpc_port, grpc_servicer_functions=[SERVICER]),
            "is_head": True,
            "socket_path": str(folder / "admin.sock"),
            "metrics_socket_path": str(folder / "metrics.sock"),
            "server_state_base": str(folder),
            "server_state_file": str(folder / "server-state"),
            **shape.options,
        },
        pass_health_checks=shape.healthy,
        has_received_routes=shape.received,
        has_received_servers=shape.received,
    )
    fallback = ServerConfig(safe_name("SERVE_PROXY_ACTOR-head"), "127.0.0.1", 19000) if shape.fallback else None
    backends = {}
    for application in shape.applications:
        for protocol in (RequestProtocol.HTTP, RequestProtocol.GRPC):
            name = safe_name(f"{protocol.value.lower()}-{application.name}")
            backends[name] = BackendConfig(
                name=name,
                path_prefix=application.prefix,
                servers=[
                    ServerConfig(
                        safe_name(each.name),
                        each.host,
                        each.grpc_port if protocol == RequestProtocol.GRPC else each.http_port,
                    )
                    for each in application.replicas
                ],
                app_name=application.name,
                ingress_deployment_name=application.deployment,
                fallback_server=fallback,
                protocol=protocol,
                **application.backend,
            )
    file = folder / "haproxy.cfg"
    api = HAProxyApi(config, backends, config_file_path=str(file))
    api.set_grpc_fallback_server(fallback)
    api._generate_config_file_internal()
    return file
