"""The RPCs of Triton's GRPCInferenceService, and what the endpoint does with each.

Written by scripts/generate-rpc-table from Triton's generated servicer; change the script, not this file.
"""

from typing import Literal, NamedTuple

SERVICE = "inference.GRPCInferenceService"


class Rpc(NamedTuple):
    """One RPC of the service."""

    name: str
    kind: Literal["unary_unary", "unary_stream", "stream_stream"]
    scope: Literal["replica", "fleet"]
    """Whether the Triton beside one replica can answer, or all must be asked."""
    allowed_by: str | None = None
    """The forwarder setting without which it is refused; None: always answered."""


RPCS = (
    Rpc("ServerLive", "unary_unary", "replica"),
    Rpc("ServerReady", "unary_unary", "replica"),
    Rpc("ModelReady", "unary_unary", "fleet"),
    Rpc("ServerMetadata", "unary_unary", "replica"),
    Rpc("ModelMetadata", "unary_unary", "replica"),
    Rpc("ModelInfer", "unary_unary", "replica"),
    Rpc("ModelStreamInfer", "stream_stream", "replica"),
    Rpc("ModelConfig", "unary_unary", "replica"),
    Rpc("ModelStatistics", "unary_unary", "fleet"),
    Rpc("RepositoryIndex", "unary_unary", "fleet"),
    Rpc("RepositoryModelLoad", "unary_unary", "fleet", "allow_model_control"),
    Rpc("RepositoryModelUnload", "unary_unary", "fleet", "allow_model_control"),
    Rpc("SystemSharedMemoryStatus", "unary_unary", "replica", "allow_shared_memory"),
    Rpc("SystemSharedMemoryRegister", "unary_unary", "replica", "allow_shared_memory"),
    Rpc("SystemSharedMemoryUnregister", "unary_unary", "replica", "allow_shared_memory"),
    Rpc("CudaSharedMemoryStatus", "unary_unary", "replica", "allow_shared_memory"),
    Rpc("CudaSharedMemoryRegister", "unary_unary", "replica", "allow_shared_memory"),
    Rpc("CudaSharedMemoryUnregister", "unary_unary", "replica", "allow_shared_memory"),
    Rpc("TraceSetting", "unary_unary", "fleet", "allow_trace_and_log_settings"),
    Rpc("LogSettings", "unary_unary", "fleet", "allow_trace_and_log_settings"),
)
