"""Write the forwarder's RPC table from Triton's generated servicer.

Which RPCs exist, and whether they stream, is read from the installed `tritonclient`; what the endpoint does with each
is decided here. An RPC without a decision stops the script: a new Triton is looked at before it is served.
"""

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tritonclient.grpc import service_pb2_grpc

TABLE = Path(__file__).parents[2] / "charts/triton-ray/files/triton_forwarder/rpc_table.py"

MODEL_CONTROL = "allow_model_control"
TRACE_AND_LOG = "allow_trace_and_log_settings"
SHARED_MEMORY = "allow_shared_memory"

ONE, ALL = "replica", "fleet"

# RPC -> whether one Triton can answer, and the forwarder setting that allows it; None: always.
DECISIONS: dict[str, tuple[str, str | None]] = {
    "ServerLive": (ONE, None),
    "ServerReady": (ONE, None),
    "ModelReady": (ALL, None),
    "ServerMetadata": (ONE, None),
    "ModelMetadata": (ONE, None),
    "ModelInfer": (ONE, None),
    "ModelStreamInfer": (ONE, None),
    "ModelConfig": (ONE, None),
    "ModelStatistics": (ALL, None),
    "RepositoryIndex": (ALL, None),
    "RepositoryModelLoad": (ALL, MODEL_CONTROL),
    "RepositoryModelUnload": (ALL, MODEL_CONTROL),
    "SystemSharedMemoryStatus": (ONE, SHARED_MEMORY),
    "SystemSharedMemoryRegister": (ONE, SHARED_MEMORY),
    "SystemSharedMemoryUnregister": (ONE, SHARED_MEMORY),
    "CudaSharedMemoryStatus": (ONE, SHARED_MEMORY),
    "CudaSharedMemoryRegister": (ONE, SHARED_MEMORY),
    "CudaSharedMemoryUnregister": (ONE, SHARED_MEMORY),
    "TraceSetting": (ALL, TRACE_AND_LOG),
    "LogSettings": (ALL, TRACE_AND_LOG),
}

HEADER = '''"""The RPCs of Triton's GRPCInferenceService, and what the endpoint does with each.

Written by scripts/generate-rpc-table from Triton's generated servicer; change the script, not this file.
"""

from typing import Literal, NamedTuple

SERVICE = "{service}"


class Rpc(NamedTuple):
    """One RPC of the service."""

    name: str
    kind: Literal["unary_unary", "unary_stream", "stream_stream"]
    scope: Literal["replica", "fleet"]
    """Whether the Triton beside one replica can answer, or all must be asked."""
    allowed_by: str | None = None
    """The forwarder setting without which it is refused; None: always answered."""


RPCS = (
'''


class _HandlerRecorder:
    """Stands where a grpc.Server would: keeps the handlers that the generated code registers."""

    def __init__(self) -> None:
        self.handlers: list[Any] = []

    def add_generic_rpc_handlers(self, handlers: tuple[Any, ...]) -> None:
        self.handlers.extend(handlers)

    def add_registered_method_handlers(self, _service: str, _handlers: dict[str, Any]) -> None:
        """Newer generated code registers the same handlers a second time, by this call."""


def servicer_rpcs() -> tuple[str, dict[str, str]]:
    """Return the service's full name and {RPC: streaming kind}, in the order of Triton's servicer."""
    recorder = _HandlerRecorder()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(
        service_pb2_grpc.GRPCInferenceServiceServicer(), recorder
    )
    (service_handler,) = recorder.handlers
    service = service_handler.service_name()
    side = {False: "unary", True: "stream"}
    kinds = {}
    for name in vars(service_pb2_grpc.GRPCInferenceServiceServicer):
        if name.startswith("_"):
            continue
        details = SimpleNamespace(method=f"/{service}/{name}", invocation_metadata=())
        handler = service_handler.service(details)
        kinds[name] = f"{side[handler.request_streaming]}_{side[handler.response_streaming]}"
    return service, kinds


def render() -> str:
    """Return the text of rpc_table.py.

    Raises:
        SystemExit: an RPC without a decision, or a decision about an RPC that Triton does not have.
    """
    service, kinds = servicer_rpcs()
    if undecided := kinds.keys() ^ DECISIONS.keys():
        sys.exit(
            f"{', '.join(sorted(undecided))}: in Triton's servicer or in DECISIONS, not in both; "
            f"decide in {Path(__file__).name} what the endpoint does with it"
        )
    lines = []
    for name, kind in kinds.items():
        scope, allowed_by = DECISIONS[name]
        allowed = f', "{allowed_by}"' if allowed_by else ""
        lines.append(f'    Rpc("{name}", "{kind}", "{scope}"{allowed}),\n')
    return HEADER.format(service=service) + "".join(lines) + ")\n"


def main() -> None:
    """Write the table, or with --print show it."""
    parser = argparse.ArgumentParser(prog="generate-rpc-table", description=__doc__)
    parser.add_argument("--print", action="store_true", help="print the table instead of writing it")
    if parser.parse_args().print:
        sys.stdout.write(render())
    else:
        TABLE.write_text(render())
        print(f"wrote {TABLE.relative_to(Path(__file__).parents[2])}: {len(DECISIONS)} RPCs")


if __name__ == "__main__":
    main()
