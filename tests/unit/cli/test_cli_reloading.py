"""A process reads keys, certificates and the level of its log again, all or nothing."""

import argparse
import logging
import os
import signal

import msgspec
import pytest

from medialane.cli.settings import Reloading, SettingsChange, reloaded_by_hangup
from medialane.config import load_config
from medialane.types.errors import InvalidRequest, StartupFailed
from waiting import eventually

SECTIONS = ("gateway", "logging")


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text("")
    return file


@pytest.fixture
def level():
    """That of our logger, which is as before afterwards."""
    logger = logging.getLogger("medialane")
    before = logger.level
    yield lambda: logger.level
    logger.setLevel(before)


@pytest.fixture
def reloading(file, level):
    return Reloading(load_config({}, file=str(file), environ={}), str(file))


class Keys:
    """Read from a file, which may be bad."""

    def __init__(self):
        self.bad = False
        self.used = 0

    def read(self):
        if self.bad:
            raise StartupFailed("--admin-key-file /x: no such file")

        def use():
            self.used += 1

        return use, ["--admin-key-file"]


async def test_level_of_the_log_changes_at_once_and_files_are_used(file, reloading, level):
    keys = Keys()
    reloading.files.append(keys.read)
    file.write_text('log-level = "error"\ngateway-max-tools = 1')
    change = SettingsChange(["--log-level"], ["--admin-key-file"])
    assert await reloading.reload() == change
    assert (level(), keys.used) == (logging.ERROR, 1)
    assert await reloading.reload() == msgspec.structs.replace(change, changed=[])
    assert reloading.config.gateway.max_tools == 256


async def test_bad_file_of_a_setting_changes_nothing(file, reloading, level):
    good, bad = Keys(), Keys()
    bad.bad = True
    reloading.files += [good.read, bad.read]
    before = level()
    file.write_text('log-level = "error"')
    with pytest.raises(StartupFailed, match="--admin-key-file"):
        await reloading.reload()
    assert (level(), good.used) == (before, 0)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('log-level = "error"\ngateway-max-tolls = 1', "did you mean gateway-max-tools"),
        ('log-level = "loud"', "log-level"),
        ("[", "is not TOML"),
    ],
)
async def test_bad_file_of_settings_changes_nothing(file, reloading, level, text, named):
    keys, before = Keys(), level()
    reloading.files.append(keys.read)
    file.write_text(text)
    with pytest.raises(StartupFailed, match=named):
        await reloading.reload()
    assert (level(), keys.used) == (before, 0)


async def test_level_of_a_file_with_several_models_is_the_one_at_its_top(file, reloading, level):
    file.write_text('log-level = "error"\n[models.a]\ngateway-max-tools = 1')
    assert (await reloading.reload()).changed == ["--log-level"]
    assert level() == logging.ERROR


async def test_all_gateways_reload_and_those_that_do_not_are_named(file, reloading):
    asked = []

    async def ask_others(path):
        asked.append(path)
        return {"1": b"true", "2": b"false", "3": None}

    file.write_text('log-level = "error"')
    answer = await reloading.reload_all(ask_others)
    assert msgspec.json.decode(answer, type=SettingsChange) == SettingsChange(
        ["--log-level"], gateways_missing=["2", "3"]
    )
    file.write_text('log-level = "loud"')
    with pytest.raises(InvalidRequest, match=r"no setting was changed: .*log-level 'loud': must be one of"):
        await reloading.reload_all(ask_others)
    assert len(asked) == 1
    assert await reloading.answer("reload") == b"false"
    file.write_text("")
    assert await reloading.answer("reload") == b"true"


async def test_hangup_reloads_and_an_error_is_logged(file, reloading, level, caplog):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as with nohup: then no terminal sends it
    async with reloaded_by_hangup(reloading.reload):
        file.write_text('log-level = "loud"')
        os.kill(os.getpid(), signal.SIGHUP)
        await eventually(lambda: "no setting was changed: " in caplog.text)
        file.write_text('log-level = "error"')
        os.kill(os.getpid(), signal.SIGHUP)
        await eventually(lambda: level() == logging.ERROR)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


async def test_process_that_serve_starts_again_has_the_current_level(file, reloading, monkeypatch):
    """Its environment is that of the start of `serve`."""
    _, path = reloading.flags
    file.write_text('log-level = "error"\ngateway-max-tools = 7')
    monkeypatch.setenv("MEDIALANE_LOG_LEVEL", "debug")
    args = argparse.Namespace(config=None, log_level_file=path)
    again = Reloading.of(args, SECTIONS)
    assert (again.config.logging.level, again.config.gateway.max_tools) == ("error", 256)
    file.write_text('log-level = "loud"')
    assert Reloading.of(args, SECTIONS).config.logging.level == "debug"


@pytest.mark.parametrize(
    ("flags", "environ"), [({"setting:log-level": "error"}, {}), ({}, {"MEDIALANE_LOG_LEVEL": "error"})]
)
async def test_flag_and_environment_win_over_the_file(file, level, monkeypatch, flags, environ):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    file.write_text('log-level = "debug"')
    reloading = Reloading.of(argparse.Namespace(config=str(file), **flags), SECTIONS)
    assert await reloading.reload() == SettingsChange()
    assert level() == logging.ERROR


async def test_file_may_be_named_in_the_environment(file, level, monkeypatch):
    monkeypatch.setenv("MEDIALANE_CONFIG", str(file))
    reloading = Reloading.of(argparse.Namespace(config=None), SECTIONS)
    file.write_text('log-level = "error"')
    assert (await reloading.reload()).changed == ["--log-level"]


async def test_without_a_file_nothing_changes(level):
    running = load_config({"log-level": "error"}, environ={})
    assert await Reloading(running).reload() == SettingsChange()
    assert level() == logging.ERROR


def test_change_is_shown():
    change = SettingsChange(["--log-level"], ["--keys"], ["1"])
    assert str(change).splitlines() == [
        "changed: --log-level",
        "files read again: --keys",
        "gateway 1 has not read its settings again: see its log",
    ]
    assert str(SettingsChange()) == "nothing that is read again has changed (other settings need a restart)"
