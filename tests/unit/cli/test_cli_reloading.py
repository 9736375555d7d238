"""A process reads its settings again on SIGHUP, all or nothing."""

import argparse
import logging
import os
import signal

import pytest

from medialane.cli.reloading import Reloading, reloaded_by_hangup
from medialane.config import SettingsSource, load_config
from medialane.core.errors import StartupFailed
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
    source = SettingsSource.of(SECTIONS, {}, str(file), {})
    return Reloading("gateway", source.load(load_config({}, environ={})), source)


async def test_level_of_the_log_changes_at_once(file, reloading, level):
    file.write_text('log-level = "error"')
    change = await reloading.reload()
    assert (change.changed, level()) == (["--log-level"], logging.ERROR)
    assert reloading.config.logging.level == "error"
    assert (await reloading.reload()).changed == []


async def test_bad_file_of_a_setting_changes_nothing(file, reloading, level):
    async def fails(_loaded):
        raise StartupFailed("--admin-key-file /x: no such file")

    reloading.prepare = fails
    before = level()
    file.write_text('log-level = "error"\ngateway-max-tools = 1')
    with pytest.raises(StartupFailed, match="--admin-key-file"):
        await reloading.reload()
    assert (level(), reloading.config.gateway.max_tools) == (before, 256)


async def test_hangup_reloads_and_an_error_is_logged(file, reloading, monkeypatch, caplog):
    monkeypatch.setattr("medialane.cli.reloading.hangup_means_reload", lambda: True)
    async with reloaded_by_hangup(reloading.reload):
        file.write_text("gateway-max-tools = 0")
        os.kill(os.getpid(), signal.SIGHUP)
        await eventually(lambda: "no setting was changed: --gateway-max-tools" in caplog.text)
        file.write_text("gateway-max-tools = 7")
        os.kill(os.getpid(), signal.SIGHUP)
        await eventually(lambda: reloading.config.gateway.max_tools == 7)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


async def test_process_of_serve_has_what_was_read_again_before_it_started(file, reloading, tmp_path, monkeypatch):
    """Its environment is that of the start of `serve`."""
    reloading.source.write(tmp_path / "source.json")
    file.write_text("gateway-max-tools = 7\nmigration-limit = 9")
    monkeypatch.setenv("MEDIALANE_GATEWAY_MAX_TOOLS", "5")
    args = argparse.Namespace(config=None, settings_source=str(tmp_path / "source.json"))
    assert Reloading.of("gateway", args, SECTIONS).config.gateway.max_tools == 7
    file.write_text("gateway-max-tools = 0")
    again = Reloading.of("gateway", args, SECTIONS)
    assert again.config.gateway.max_tools == 5
    file.write_text("gateway-max-tools = 8")
    await again.reload()
    assert again.config.gateway.max_tools == 8


async def test_without_a_source_nothing_changes():
    running = load_config({}, environ={})
    change = await Reloading("store", running).reload()
    assert (change.changed, change.needs_restart) == ([], [])
