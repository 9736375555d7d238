"""Settings that cannot be are named."""

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
    ],
)
def test_impossible_setting_is_named(name, settings):
    with pytest.raises(StartupFailed, match=name):
        GatewayConfig(**settings).validate()
