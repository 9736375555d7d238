import importlib.util
import logging

import pytest

from medialane.cli.store import movers
from medialane.config import Config
from medialane.rpc import RpcConfig
from medialane.store.config import StoreConfig

TLS = RpcConfig(tls_cert="cert.pem", tls_key="key.pem", tls_ca="ca.pem")


@pytest.mark.parametrize(
    ("setting", "rpc", "expected"),
    [
        ("auto", RpcConfig(), ["nixl"]),
        ("auto", TLS, []),
        ("on", TLS, ["nixl"]),
        ("off", RpcConfig(), []),
    ],
)
def test_nixl_is_not_used_where_entries_must_be_encrypted_unless_it_is_set(setting, rpc, expected):
    config = Config(store=StoreConfig(nixl=setting), rpc=rpc)
    assert [mover.name for mover in movers(config, "0" * 32)] == expected


def test_missing_nixl_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO):
        assert movers(Config(), "0" * 32) == []
    assert len(caplog.records) == 1
