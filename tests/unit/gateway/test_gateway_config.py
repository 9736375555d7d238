"""Invalid settings are named."""

import pytest

from medialane.gateway import GatewayConfig
from medialane.types.errors import StartupFailed


def test_defaults_are_valid():
    GatewayConfig().validate()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("max_requests", {"max_requests": 0}),
        ("reconnect_initial_s", {"reconnect_initial_s": 0}),
        ("reconnect_max_s", {"reconnect_initial_s": 3.0, "reconnect_max_s": 2.0}),
        ("admin_timeout_s", {"admin_timeout_s": 0}),
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


def test_gateways_of_one_port_share_the_limits_of_the_host():
    config = GatewayConfig(max_requests=10, max_bodies_bytes=1000, token_cache_bytes=1000, max_connections=50)
    assert config.share(1, max_body_bytes=64) == config
    share = config.share(4, max_body_bytes=64)
    assert (share.max_requests, share.max_bodies_bytes, share.token_cache_bytes) == (3, 250, 250)
    assert share.max_connections == 50, "limited by the open files of each process"
    share.validate()


def test_largest_body_is_accepted_however_many_gateways_share_the_memory():
    assert GatewayConfig(max_bodies_bytes=1000).share(8, max_body_bytes=400).max_bodies_bytes == 400
    assert GatewayConfig(max_bodies_bytes=300).share(8, max_body_bytes=400).max_bodies_bytes == 300


def test_server_that_only_renders_sends_no_tensors_unless_it_is_told_to():
    assert GatewayConfig().default_payload == "tensors"
    assert GatewayConfig(render_only=True).default_payload == "none"
    assert GatewayConfig(render_only=True, render_payload="tensors").default_payload == "tensors"
