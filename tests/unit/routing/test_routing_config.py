import pytest

from medialane.routing import RoutingConfig
from medialane.types.errors import StartupFailed


def test_defaults_are_valid():
    RoutingConfig().validate()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefill_ms_per_token", -0.1),
        ("temperature_ms", -1.0),
        ("max_in_flight", -1),
        ("session_ttl_s", 0.0),
        ("kv_pressure_threshold", 1.0),
        ("over_capacity_ms", float("nan")),
    ],
)
def test_invalid_setting_is_named(name, value):
    with pytest.raises(StartupFailed, match=name):
        RoutingConfig(**{name: value}).validate()
