"""Triton's GRPCInferenceService behind Ray Serve: every RPC is carried as bytes to the Triton beside the replica.

The Serve configuration names two things of this package: `triton_forwarder:build_app` (the application) and
`triton_forwarder:add_servicer_to_server` (the service on Serve's gRPC port).
"""

from triton_forwarder.app import build_app
from triton_forwarder.forwarder import add_servicer_to_server

__all__ = ["add_servicer_to_server", "build_app"]
