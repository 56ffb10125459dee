"""What has to be asked of a Triton before it is measured."""

from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from bench.errors import BenchError

_WITHIN_S = 10


def server_version(address: str) -> str:
    """Return the version of the server."""
    return str(_ask(address, "ServerMetadata", service_pb2.ServerMetadataRequest()).version)


def model_metadata(address: str, model: str) -> Any:
    """Return the ModelMetadataResponse."""
    return _ask(address, "ModelMetadata", service_pb2.ModelMetadataRequest(name=model))


def model_config(address: str, model: str) -> Any:
    """Return the ModelConfig."""
    return _ask(address, "ModelConfig", service_pb2.ModelConfigRequest(name=model)).config


def _ask(address: str, rpc: str, request: Any) -> Any:
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.unary_unary(
            f"/inference.GRPCInferenceService/{rpc}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=getattr(service_pb2, f"{rpc}Response").FromString,
        )
        try:
            return call(request, timeout=_WITHIN_S)
        except grpc.RpcError as error:
            details = " ".join(error.details().split())
            raise BenchError(f"{rpc} at {address} failed: {error.code().name}: {details}") from None
