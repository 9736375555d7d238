import sys

import pytest

from medialane.cli import main


def test_ray_that_is_not_installed_is_one_clear_error(monkeypatch, tmp_path, capsys):
    monkeypatch.delitem(sys.modules, "medialane.cluster.ray.ray_cluster", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "config.json").write_text("{}")
    assert main(["serve", str(tmp_path), "--ray"]) == 2
    assert "--ray needs Ray: install medialane with the extra ray" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001"])
def test_client_of_a_remote_cluster_is_refused(address, tmp_path, capsys):
    pytest.importorskip("ray", reason="ray is not installed (the extra ray)")
    (tmp_path / "config.json").write_text("{}")
    assert main(["serve", str(tmp_path), "--ray", "--address", address]) == 2
    assert "gateways need a node of the cluster here: HOST:PORT" in capsys.readouterr().err


def test_relative_model_is_refused(tmp_path, monkeypatch, capsys):
    pytest.importorskip("ray", reason="ray is not installed (the extra ray)")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert main(["serve", ".", "--ray", "--address", "127.0.0.1:1"]) == 2
    assert f"--ray needs the model's absolute path, the same on all nodes: {tmp_path}" in capsys.readouterr().err


def test_cluster_that_is_not_there_is_one_clear_error(tmp_path, capsys):
    pytest.importorskip("ray", reason="ray is not installed (the extra ray)")
    (tmp_path / "config.json").write_text("{}")
    assert main(["serve", str(tmp_path), "--ray", "--address", "127.0.0.1:1"]) == 2
    assert "cannot connect to Ray at 127.0.0.1:1: Connection refused" in capsys.readouterr().err


def test_no_workers_need_an_address_to_join(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert main(["serve", str(tmp_path), "--workers", "0", "--port", "0"]) == 2
    assert "--workers 0: workers must be able to join: --join-listen HOST:PORT" in capsys.readouterr().err


def test_gateways_of_each_node_need_ray(tmp_path, capsys):
    assert main(["serve", str(tmp_path), "--gateway-nodes", "each"]) == 2
    assert "--gateway-nodes needs --ray" in capsys.readouterr().err
