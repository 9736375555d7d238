"""Invalid settings are named."""

import pytest

from medialane.core.errors import StartupFailed
from medialane.gateway import GatewayConfig


def test_defaults_are_valid():
    GatewayConfig().validate()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("max_requests", {"max_requests": 0}),
        ("reconnect_initial_s", {"reconnect_initial_s": 0}),
        ("reconnect_max_s", {"reconnect_initial_s": 3.0, "reconnect_max_s": 2.0}),
        ("admin_timeout_s", {"admin_timeout_s": 0}),
        ("drain_timeout_s", {"drain_timeout_s": -1}),
        ("max_text_bytes", {"max_text_bytes": 0}),
        ("max_bodies_bytes", {"max_bodies_bytes": 0}),
        ("max_connections", {"max_connections": 0}),
        ("max_header_bytes", {"max_header_bytes": 0}),
        ("header_timeout_s", {"header_timeout_s": 0}),
        ("min_body_rate_bytes_per_s", {"min_body_rate_bytes_per_s": -1}),
    ],
)
def test_invalid_setting_is_named(name, settings):
    with pytest.raises(StartupFailed, match=name):
        GatewayConfig(**settings).validate()
