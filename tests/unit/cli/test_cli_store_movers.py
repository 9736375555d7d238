import importlib.util
import logging

import pytest

from medialane.cli.store import movers, published_images
from medialane.config import Config
from medialane.core.errors import StartupFailed
from medialane.media import MediaConfig
from medialane.store import PublishedImages
from medialane.store.config import StoreConfig
from medialane.wire.config import RpcConfig

TLS = RpcConfig(tls_cert="cert.pem", tls_key="key.pem", tls_ca="ca.pem")


@pytest.mark.parametrize(
    ("setting", "rpc", "has_rdma", "expected"),
    [
        ("auto", RpcConfig(), True, ["nixl"]),
        ("auto", RpcConfig(), False, []),
        ("auto", TLS, True, []),
        ("on", TLS, False, ["nixl"]),
        ("off", RpcConfig(), True, []),
    ],
)
def test_nixl_is_used_over_rdma_where_entries_need_not_be_encrypted_or_where_it_is_set(
    setting, rpc, has_rdma, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr("medialane.cli.store.RDMA_DEVICES", tmp_path)
    if has_rdma:
        (tmp_path / "mlx5_0").mkdir()
    config = Config(store=StoreConfig(nixl=setting), rpc=rpc)
    assert [mover.name for mover in movers(config, "0" * 32)] == expected


def test_missing_nixl_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO):
        assert movers(Config(store=StoreConfig(nixl="on")), "0" * 32) == []
    assert len(caplog.records) == 1


def test_published_images_need_nixl():
    config = Config(media=MediaConfig(allow_rdma=True), store=StoreConfig(nixl="on"))
    found = movers(config, "0" * 32)
    assert isinstance(published_images(config.media, None, None, found), PublishedImages)
    assert published_images(MediaConfig(), None, None, found) is None
    with pytest.raises(StartupFailed, match="--peer-nixl on"):
        published_images(config.media, None, None, [])
