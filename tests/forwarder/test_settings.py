"""What the Serve configuration may set under `args`."""

from typing import Any

import pytest

from triton_forwarder import Settings

REFUSED: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"triton_adress": "a:1"}, "unknown forwarder setting 'triton_adress'; known are triton_address", {}),
    ({"triton_address": "a"}, "triton_address is 'a', but must be host:port", {"triton_address": "a:1"}),
    ({"triton_address": ":8001"}, "triton_address is ':8001'", {"triton_address": "h:8001"}),
    ({"triton_address": "h:"}, "triton_address is 'h:'", {"triton_address": "h:8001"}),
    ({"triton_address": "h:0"}, "triton_address is 'h:0'", {"triton_address": "h:1"}),
    ({"triton_address": "h:65536"}, "triton_address is 'h:65536'", {"triton_address": "h:65535"}),
    ({"triton_address": "h:8001x"}, "triton_address is 'h:8001x'", {"triton_address": "[::1]:8001"}),
    ({"triton_address": 8001}, "triton_address is 8001, but must be a str", {"triton_address": "h:8001"}),
    ({"startup_timeout_s": 0}, "startup_timeout_s is 0, but must be a number", {"startup_timeout_s": 0.1}),
    ({"startup_timeout_s": -1}, "startup_timeout_s is -1", {"startup_timeout_s": 1}),
    ({"startup_timeout_s": True}, "startup_timeout_s is True, but must be a float", {"startup_timeout_s": 1}),
    ({"startup_timeout_s": "600"}, "startup_timeout_s is '600'", {"startup_timeout_s": 600}),
    ({"health_timeout_s": float("inf")}, "health_timeout_s is inf", {"health_timeout_s": 1e9}),
    ({"health_timeout_s": float("nan")}, "health_timeout_s is nan", {"health_timeout_s": 5.0}),
    ({"health_timeout_s": None}, "health_timeout_s is None", {"health_timeout_s": 5}),
    ({"allow_model_control": "false"}, "allow_model_control is 'false'", {"allow_model_control": False}),
    ({"allow_model_control": 1}, "allow_model_control is 1, but must be a bool", {"allow_model_control": True}),
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
