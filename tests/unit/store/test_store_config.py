"""Invalid settings are named."""

import pytest

from medialane.config import load_config
from medialane.store import StoreConfig
from medialane.types.errors import StartupFailed


def test_defaults_are_valid():
    StoreConfig().validate()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("max_uuids", {"max_uuids": -1}),
        ("uuid_ttl_s", {"uuid_ttl_s": 0}),
        ("max_connections", {"max_connections": 0}),
        ("wait_timeout_s", {"wait_timeout_s": 0}),
    ],
)
def test_invalid_setting_is_named(name, settings):
    with pytest.raises(StartupFailed, match=name):
        StoreConfig(**settings).validate()


def test_uuids_can_be_disabled():
    StoreConfig(max_uuids=0).validate()


def test_settings_are_read_by_name():
    given = {"store-max-uuids": "7", "store-uuid-ttl": "60", "store-max-connections": "3", "store-wait-timeout": "1.5"}
    assert load_config(given, environ={}).store == StoreConfig(
        max_uuids=7, uuid_ttl_s=60, max_connections=3, wait_timeout_s=1.5
    )
