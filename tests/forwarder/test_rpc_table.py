"""The committed table of RPCs against the servicer of the installed tritonclient."""

import pytest
from tritonclient.grpc import service_pb2

import generate_rpc_table
from triton_forwarder.channel import SERVICES
from triton_forwarder.forwarder import EXTENSIONS, Forwarder
from triton_forwarder.rpc_table import RPCS, SERVICE
from triton_forwarder.settings import Settings


def test_the_committed_table_is_what_the_generator_writes() -> None:
    """Otherwise an RPC of a new Triton would be UNIMPLEMENTED at the endpoint, and nobody would know."""
    assert generate_rpc_table.TABLE.read_text() == generate_rpc_table.render(), "run scripts/generate-rpc-table"


def test_the_table_has_every_rpc_of_the_protocol_with_its_streaming_kind() -> None:
    """A client may call any of the 20; the generated messages' own description is the independent answer."""
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    side = {False: "unary", True: "stream"}
    expected = {
        method.name: f"{side[method.client_streaming]}_{side[method.server_streaming]}" for method in service.methods
    }
    assert service.full_name == SERVICE
    assert {rpc.name: rpc.kind for rpc in RPCS} == expected
    assert len(RPCS) == 20


def test_every_rpc_has_a_method_and_every_refusal_a_setting_that_lifts_it() -> None:
    """A refusal that names a setting which does not exist leaves the operator without a way out."""
    settings = set(Settings.__dataclass_fields__)
    for rpc in (rpc for rpcs in SERVICES.values() for rpc in rpcs):
        assert hasattr(Forwarder, rpc.name)
        assert rpc.allowed_by is None or rpc.allowed_by in settings
    assert set(EXTENSIONS.values()) == {rpc.allowed_by for rpc in RPCS if rpc.allowed_by}


def test_what_is_about_all_replicas_is_not_answered_by_one() -> None:
    """A model loaded on one of three replicas would be found by every third request only."""
    about_all = {"ModelReady", "ModelStatistics", "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"}
    assert {rpc.name for rpc in RPCS if rpc.scope == "fleet"} == about_all | {"TraceSetting", "LogSettings"}
    assert all(rpc.kind == "unary_unary" for rpc in RPCS if rpc.scope == "fleet")


@pytest.mark.parametrize("decisions", ["without ModelInfer", "with NoSuchRpc"])
def test_the_generator_stops_at_an_rpc_without_decision(decisions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A control RPC that a new Triton brings must not be forwarded, or refused, by chance."""
    if decisions == "without ModelInfer":
        monkeypatch.delitem(generate_rpc_table.DECISIONS, "ModelInfer")
    else:
        monkeypatch.setitem(generate_rpc_table.DECISIONS, "NoSuchRpc", None)
    with pytest.raises(SystemExit, match=rf"^{decisions.split()[1]}: "):
        generate_rpc_table.render()
