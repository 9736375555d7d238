import argparse

import pytest

from medialane.cli import gateway_command, serve, store, worker_command
from medialane.cli.settings import Reloading, add_settings, given_settings
from medialane.config import load_config, settings
from medialane.types.errors import StartupFailed


def parser(argv=(), *, common=("workers",)):
    made = argparse.ArgumentParser(allow_abbrev=False)
    made.set_defaults(argv=list(argv))
    add_settings(made, serve.SECTIONS, common=common)
    return made


def test_every_setting_is_a_flag_of_serve_or_simulated_workers():
    flags = parser().format_help() + parser(["--help-all"]).format_help()
    assert {s.section for s in settings() if s.flag not in flags and not s.is_secret} <= {"simulated"}
    assert {"worker", "simulated"} <= set(worker_command.SECTIONS)


@pytest.mark.parametrize("command", [gateway_command, worker_command])
def test_processes_beside_a_store_need_no_room_for_another_arena(command):
    args = parser().parse_args(["--arena-size=900TiB"])
    args.config = None
    assert Reloading.of(args, command.SECTIONS)
    with pytest.raises(StartupFailed, match="--shm-size"):
        Reloading.of(args, store.SECTIONS)


def test_help_shows_common_settings_and_all_on_request():
    assert "--workers" in parser().format_help()
    assert "--rpc-heartbeat-interval" not in parser().format_help()
    assert "--rpc-heartbeat-interval" in parser(["--help-all"]).format_help()


def test_help_shows_defaults_with_units():
    text = " ".join(parser(["--help-all"]).format_help().split())
    assert "(default 2 GiB)" in text
    assert "(default 1800 s)" in text
    assert "--arena-size SIZE" in text


def test_only_given_flags_are_passed_on():
    args = parser().parse_args(["--workers", "3", "--single-gpu", "--arena-size=64MiB"])
    assert given_settings(args) == {"workers": "3", "single-gpu": True, "arena-size": "64MiB"}
    config = load_config(given_settings(args), environ={})
    assert config.cluster.num_workers == 3
    assert config.cluster.single_gpu is True
    assert config.arena.size_bytes == 64 << 20


def test_invalid_choice_is_rejected(capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["--stage", "pixels"])
    assert "choose from" in capsys.readouterr().err


def test_keys_of_clients_are_refused_without_a_file_that_does_not_exist():
    given = given_settings(parser().parse_args(["--api-keys", "a,b"]))
    with pytest.raises(StartupFailed, match=r"set MEDIALANE_API_KEYS in the environment$"):
        load_config(given, environ={})


@pytest.mark.parametrize("name", ["admin-key", "metrics-key", "rpc-secret"])
def test_secret_on_the_command_line_is_refused_with_its_other_places(name):
    given = given_settings(parser().parse_args([f"--{name}", "0123456789abcdef"]))
    variable = "MEDIALANE_" + name.upper().replace("-", "_")
    with pytest.raises(StartupFailed, match=f"set {variable} in the environment, or --{name}-file") as failed:
        load_config(given, environ={})
    assert "0123456789abcdef" not in failed.value.message
    assert f"--{name} " not in parser(["--help-all"]).format_help()


def test_no_name_of_a_setting_is_a_negation():
    """argparse would read `--no-page` of a setting `no-page` as its opposite."""
    assert not [setting.name for setting in settings() if setting.name.startswith("no-")]
