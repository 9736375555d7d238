"""`medialane store`: help, and addresses that are rejected before anything starts."""

import pytest

from medialane.cli import store, store_command
from medialane.cli.main import main


def shown(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_shows_the_usual_settings_and_help_all_every_one(capsys):
    usual, every = shown(["store", "--help"], capsys), shown(["store", "--help-all"], capsys)
    for flag in ("--listen", "--preparers", "--arena-size"):
        assert flag in usual
    for flag in ("--store-max-uuids", "--store-uuid-ttl", "--store-max-connections", "--store-wait-timeout"):
        assert flag not in usual
        assert flag in every
    assert "medialane gateway ./model" in usual


@pytest.mark.parametrize("command", ["gateway", "worker"])
def test_clients_of_a_store_take_its_address(command, capsys):
    assert "--store ADDRESS" in shown([command, "--help"], capsys)


REMOTE = "tcp://10.0.0.2:7000"
START = {
    "store": ["store", "m", "--listen"],
    "gateway": ["gateway", "m", "--worker", "unix:/run/w.sock", "--store"],
    "worker": ["worker", "m", "--listen", "unix:/run/w.sock", "--store"],
    "simulated": ["worker", "m", "--engine", "simulated", "--listen", "unix:/tmp/w-{}.sock", "--store"],
}


@pytest.mark.parametrize("address", [REMOTE, "store.sock", "tcp://a..b:7000", ""])
@pytest.mark.parametrize("command", START)
def test_store_on_anything_but_a_unix_socket_fails_the_start(command, address, capsys):
    assert main([*START[command], address]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"medialane: error: {START[command][-1]}: ")
    assert len(error.splitlines()) == 1


def test_store_runs_with_its_settings_and_vllms_flags(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    calls = []
    monkeypatch.setattr(store_command, "enter_environ", lambda *args, **kwargs: None)
    monkeypatch.setattr(store_command, "configure", lambda config: None)
    monkeypatch.setattr(store, "run", lambda *args: calls.append(args) or 5)
    words = ["store", str(tmp_path), "--listen", "unix:/run/s.sock", "--store-max-uuids", "7"]
    assert main([*words, "--", "--max-model-len", "8"]) == 5
    ((config, model, vllm_args, address),) = calls
    assert (config.store.max_uuids, model, address) == (7, str(tmp_path), "unix:/run/s.sock")
    assert vllm_args == ["--max-model-len", "8"]


def test_model_that_does_not_exist_is_reported_before_anything_starts(capsys):
    assert main(["store", "/no/such/model", "--listen", "unix:/run/s.sock"]) == 2
    assert "/no/such/model" in capsys.readouterr().err
