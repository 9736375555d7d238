import pytest

from medialane.types.errors import StartupFailed
from medialane.wire import RpcConfig


def test_defaults_are_valid():
    RpcConfig().validate()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_frame_bytes", 0),
        ("max_frame_bytes", 1 << 32),
        ("max_write_buffer_bytes", 0),
        ("max_in_flight", 0),
        ("max_queued_bytes", 0),
        ("max_connections", 0),
        ("heartbeat_interval_s", 0.0),
        ("heartbeat_timeout_s", 1.5),
        ("tcp_heartbeat_interval_s", 0.0),
        ("tcp_heartbeat_timeout_s", 0.5),
        ("release_timeout_s", 30.0),
        ("release_timeout_s", 0.0),
    ],
)
def test_invalid_setting_is_rejected_by_name(setting, value):
    with pytest.raises(StartupFailed, match=setting):
        RpcConfig(**{setting: value}).validate()


def test_dead_peer_of_a_tcp_connection_is_detected_within_a_second_by_default():
    config = RpcConfig()
    beats = int(config.tcp_heartbeat_timeout_s / config.tcp_heartbeat_interval_s) + 1
    assert beats * config.tcp_heartbeat_interval_s < 1.0
