"""A gRPC server in this process that answers as a Triton would that starts, hangs or misbehaves."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from triton_forwarder.rpc_table import RPCS, SERVICE


@asynccontextmanager
async def stand_in_triton(*, port: int = 0, **answers: Any) -> AsyncIterator[str]:
    """Run the server and yield its address.

    Args:
        port: to listen on; 0 for a free one.
        answers: a gRPC handler for each RPC that it knows, of bytes; every other is UNIMPLEMENTED.
    """
    server = grpc.aio.server()
    kinds = {rpc.name: rpc.kind for rpc in RPCS}
    handlers = {name: getattr(grpc, f"{kinds[name]}_rpc_method_handler")(answer) for name, answer in answers.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        await server.stop(grace=None)
