"""What the Serve configuration may set under `args`."""

from typing import Any

import pytest

from triton_forwarder.settings import Settings

REFUSED: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"triton_adress": "a:1"}, "unknown forwarder setting 'triton_adress'; known are triton_grpc_port", {}),
    (
        {"triton_grpc_port": "8001"},
        "triton_grpc_port is '8001', but must be a whole number",
        {"triton_grpc_port": 8001},
    ),
    (
        {"triton_grpc_port": 8001.0},
        "triton_grpc_port is 8001.0, but must be a whole number",
        {"triton_grpc_port": 8001},
    ),
    ({"triton_grpc_port": True}, "triton_grpc_port is True, but must be a whole number", {"triton_grpc_port": 1}),
    ({"triton_grpc_port": 0}, "triton_grpc_port is 0, but must be a port, 1 to 65535", {"triton_grpc_port": 1}),
    ({"triton_http_port": -1}, "triton_http_port is -1, but must be a port", {"triton_http_port": 8100}),
    ({"triton_metrics_port": 65536}, "triton_metrics_port is 65536", {"triton_metrics_port": 65535}),
    ({"min_replicas": -1}, "min_replicas and max_replicas are -1 and 1", {"min_replicas": 0}),
    ({"min_replicas": 2}, "min_replicas and max_replicas are 2 and 1", {"min_replicas": 1}),
    ({"min_replicas": 3, "max_replicas": 2}, "are 3 and 2", {"min_replicas": 2, "max_replicas": 2}),
    ({"min_replicas": 0, "max_replicas": 0}, "max_replicas at least 1", {"min_replicas": 0, "max_replicas": 1}),
    ({"max_replicas": 1.5}, "max_replicas is 1.5, but must be a whole number", {"max_replicas": 2}),
    ({"target_ongoing_requests": 0}, "target_ongoing_requests is 0", {"target_ongoing_requests": 0.5}),
    ({"target_ongoing_requests": -2.0}, "but must be a finite number above 0", {"target_ongoing_requests": 2}),
    ({"upscale_delay_s": "30"}, "upscale_delay_s is '30'", {"upscale_delay_s": 30}),
    ({"downscale_delay_s": float("inf")}, "downscale_delay_s is inf", {"downscale_delay_s": 86400}),
    ({"max_ongoing_requests": 0}, "max_ongoing_requests is 0, but must be at least 1", {"max_ongoing_requests": 1}),
    (
        {"max_ongoing_requests": 10.0},
        "max_ongoing_requests is 10.0, but must be a whole number",
        {"max_ongoing_requests": 10},
    ),
    ({"startup_timeout_s": 0}, "startup_timeout_s is 0, but must be a finite number above 0", {"startup_timeout_s": 1}),
    ({"startup_timeout_s": -1}, "startup_timeout_s is -1", {"startup_timeout_s": 0.1}),
    ({"startup_timeout_s": True}, "startup_timeout_s is True, but must be a number", {"startup_timeout_s": 1}),
    ({"startup_timeout_s": "600"}, "startup_timeout_s is '600'", {"startup_timeout_s": 600}),
    ({"health_timeout_s": float("inf")}, "health_timeout_s is inf", {"health_timeout_s": 1e9}),
    ({"health_timeout_s": float("nan")}, "health_timeout_s is nan", {"health_timeout_s": 5.0}),
    ({"health_timeout_s": None}, "health_timeout_s is None", {"health_timeout_s": 5}),
    ({"drain_timeout_s": 0.0}, "drain_timeout_s is 0.0", {"drain_timeout_s": 0.1}),
    ({"allow_model_control": "false"}, "allow_model_control is 'false'", {"allow_model_control": False}),
    ({"allow_model_control": 1}, "allow_model_control is 1, but must be true or false", {"allow_model_control": True}),
    ({"allow_shared_memory": None}, "allow_shared_memory is None", {"allow_shared_memory": True}),
    ({"allow_trace_and_log_settings": 0}, "settings is 0", {"allow_trace_and_log_settings": False}),
]


@pytest.mark.parametrize(("refused", "message", "accepted"), REFUSED)
def test_a_wrong_setting_is_refused_by_name_and_its_neighbour_accepted(
    refused: dict[str, Any], message: str, accepted: dict[str, Any]
) -> None:
    """A typing error in the values would otherwise show up as an endpoint that behaves oddly."""
    with pytest.raises(ValueError) as error:  # noqa: PT011  the message is compared below, as text
        Settings.from_args(refused)
    assert message in str(error.value)
    settings = Settings.from_args(accepted)
    assert {name: getattr(settings, name) for name in accepted} == accepted


def test_nothing_is_allowed_by_default() -> None:
    """Whoever reaches the endpoint could otherwise unload models or attach to Triton's memory."""
    settings = Settings.from_args({})
    assert not any(getattr(settings, name) for name in Settings.__dataclass_fields__ if name.startswith("allow_"))
