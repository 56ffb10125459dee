"""The RPCs of Triton's GRPCInferenceService, and what the endpoint does with each.

Written by scripts/generate-rpc-table from Triton's generated servicer; change the script, not this file.
"""

from typing import Literal, NamedTuple

SERVICE = "inference.GRPCInferenceService"


class Rpc(NamedTuple):
    """One RPC of the service."""

    name: str
    kind: Literal["unary_unary", "stream_stream"]
    policy: Literal["forward", "refuse"]
    allowed_by: str | None = None
    """The forwarder setting that turns `refuse` into `forward`."""


RPCS = (
    Rpc("ServerLive", "unary_unary", "forward"),
    Rpc("ServerReady", "unary_unary", "forward"),
    Rpc("ModelReady", "unary_unary", "forward"),
    Rpc("ServerMetadata", "unary_unary", "forward"),
    Rpc("ModelMetadata", "unary_unary", "forward"),
    Rpc("ModelInfer", "unary_unary", "forward"),
    Rpc("ModelStreamInfer", "stream_stream", "forward"),
    Rpc("ModelConfig", "unary_unary", "forward"),
    Rpc("ModelStatistics", "unary_unary", "forward"),
    Rpc("RepositoryIndex", "unary_unary", "forward"),
    Rpc("RepositoryModelLoad", "unary_unary", "refuse", "allow_model_control"),
    Rpc("RepositoryModelUnload", "unary_unary", "refuse", "allow_model_control"),
    Rpc("SystemSharedMemoryStatus", "unary_unary", "refuse", "allow_shared_memory"),
    Rpc("SystemSharedMemoryRegister", "unary_unary", "refuse", "allow_shared_memory"),
    Rpc("SystemSharedMemoryUnregister", "unary_unary", "refuse", "allow_shared_memory"),
    Rpc("CudaSharedMemoryStatus", "unary_unary", "refuse", "allow_shared_memory"),
    Rpc("CudaSharedMemoryRegister", "unary_unary", "refuse", "allow_shared_memory"),
    Rpc("CudaSharedMemoryUnregister", "unary_unary", "refuse", "allow_shared_memory"),
    Rpc("TraceSetting", "unary_unary", "refuse", "allow_trace_and_log_settings"),
    Rpc("LogSettings", "unary_unary", "refuse", "allow_trace_and_log_settings"),
)
