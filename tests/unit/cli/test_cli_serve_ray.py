import sys

import pytest

from medialane.cli.main import main


def test_ray_that_is_not_installed_is_one_clear_error(monkeypatch, tmp_path, capsys):
    for name in ("medialane.cli.serve_ray", "medialane.cluster.ray"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "config.json").write_text("{}")
    assert main(["serve", str(tmp_path), "--ray"]) == 2
    assert "--ray needs Ray: pip install 'medialane[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001"])
def test_client_of_a_remote_cluster_is_refused(address, tmp_path, capsys):
    pytest.importorskip("ray", reason="ray is not installed: pip install 'medialane[ray]'")
    (tmp_path / "config.json").write_text("{}")
    assert main(["serve", str(tmp_path), "--ray", "--address", address]) == 2
    assert "gateways need a node of the cluster here: HOST:PORT" in capsys.readouterr().err
