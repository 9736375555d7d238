"""Settings that are read again: what changes, what needs a restart, and what a bad file does."""

import msgspec
import pytest

from medialane.config import (
    LIVE,
    SettingsChange,
    SettingsSource,
    TableRules,
    change_of,
    load_config,
    settings,
    take_over,
)
from medialane.core.errors import StartupFailed

SECTIONS = ("gateway", "media", "logging", "arena")
#: Of a process without secrets.
STARTED = load_config({}, environ={})


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text("")
    return file


def source_of(file, flags=None, environ=None):
    return SettingsSource.of(SECTIONS, flags or {}, str(file), environ or {})


def change(running, source):
    return change_of(running, source.load(STARTED), LIVE["gateway"], SECTIONS)


def test_changed_settings_are_told_from_those_that_need_a_restart(file):
    source = source_of(file)
    running = source.load(STARTED)
    file.write_text('gateway-max-tools = 3\narena-size = "64MiB"\nlog-level = "debug"\nmedia-max-items = 2')
    found = change(running, source)
    assert sorted(found.changed) == ["--gateway-max-tools", "--log-level", "--media-max-items"]
    assert found.needs_restart == ["--arena-size"]
    assert str(found).endswith("needs a restart: --arena-size")


def test_setting_that_only_gateways_use_needs_no_restart_of_a_store(file):
    source = source_of(file)
    running = source.load(STARTED)
    file.write_text('gateway-max-tools = 3\narena-size = "64MiB"\nlog-level = "debug"')
    found = change_of(running, source.load(STARTED), LIVE["store"], SECTIONS)
    assert (found.changed, found.needs_restart) == (["--log-level"], ["--arena-size"])


def test_values_are_taken_over_by_all_who_have_the_section(file):
    source = source_of(file)
    running = source.load(STARTED)
    user = running.gateway
    file.write_text("gateway-max-tools = 3\nmigration-limit = 0")
    take_over(running, source.load(STARTED), ["--gateway-max-tools"])
    assert (user.max_tools, user.migration_limit) == (3, 3)
    assert change(running, source).changed == ["--migration-limit"]


def test_flags_and_environment_win_over_the_new_file_too(file):
    source = source_of(file, {"gateway-max-tools": "5"}, {"MEDIALANE_GATEWAY_MAX_PROMPTS": "6", "HOME": "/"})
    running = source.load(STARTED)
    file.write_text("gateway-max-tools = 3\ngateway-max-prompts = 3")
    assert change(running, source) == SettingsChange()


def test_file_may_be_named_in_the_environment(file):
    file.write_text("gateway-max-tools = 3")
    source = SettingsSource.of(SECTIONS, {}, None, {"MEDIALANE_CONFIG": str(file)})
    file.write_text("gateway-max-tools = 4")
    assert source.load(STARTED).gateway.max_tools == 4


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("gateway-max-tools = -1", "--gateway-max-tools"),
        ("gateway-max-tolls = 1", "did you mean gateway-max-tools"),
        ('log-level = "loud"', "log-level"),
        ("[", "is not TOML"),
    ],
)
def test_bad_file_is_refused_with_the_settings_name(file, text, named):
    source = source_of(file)
    file.write_text(text)
    with pytest.raises(StartupFailed, match=named):
        source.load(STARTED)


@pytest.mark.parametrize(("before", "after"), [(0, 5), (5, 0)])
def test_queue_is_not_turned_on_or_off(file, before, after):
    source = source_of(file)
    file.write_text(f"gateway-queue-requests = {before}")
    running = source.load(STARTED)
    file.write_text(f"gateway-queue-requests = {after}")
    assert change(running, source).needs_restart == ["--gateway-queue-requests"]


def test_source_of_other_processes_has_no_secrets(file, tmp_path):
    secrets = {setting.variable: "s3cret" for setting in settings() if setting.is_secret}
    source = source_of(file, {"port": "9"}, secrets)
    source.write(tmp_path / "source.json")
    assert b"s3cret" not in (tmp_path / "source.json").read_bytes()
    assert SettingsSource.read(str(tmp_path / "source.json")) == source


def test_secrets_stay_those_of_the_process(file):
    secrets = {"MEDIALANE_ADMIN_KEY": "admin", "MEDIALANE_API_KEYS": '["a,b", "c"]'}
    source = source_of(file, environ=secrets)
    running = load_config({}, environ=secrets)
    file.write_text("gateway-max-tools = 3")
    loaded = source.load(running)
    assert (loaded.gateway.admin_key, loaded.gateway.api_keys) == ("admin", ("a,b", "c"))
    assert change_of(running, loaded, LIVE["gateway"], SECTIONS).changed == ["--gateway-max-tools"]


def test_names_of_settings_that_may_change_exist():
    names = {setting.name for setting in settings()}
    assert not [name for names_of_role in LIVE.values() for name in names_of_role if name not in names]


def test_configuration_that_others_have_is_not_changed(file):
    """Default sections are shared by all configurations that are made without loading."""
    running, other = load_config({}, environ={}), load_config({}, environ={})
    file.write_text("gateway-max-tools = 3")
    take_over(running, source_of(file).load(STARTED), ["--gateway-max-tools"])
    assert other.gateway == msgspec.structs.replace(running.gateway, max_tools=other.gateway.max_tools)
    assert other.gateway.max_tools != 3


RULES = TableRules(own=("model",), shared=("port",))
SEVERAL = """
gateway-max-requests = {all}
[models.a]
model = "/models/a"
[models.b]
gateway-max-requests = {b}
"""


def test_model_of_several_has_the_settings_of_its_table(file, tmp_path):
    file.write_text(SEVERAL.format(all=10, b=20))
    source = SettingsSource.of(("gateway",), {}, str(file), {}, rules=RULES)
    written = tmp_path / "source.json"
    source.of_model("b").write(written)
    of_b = SettingsSource.read(str(written))
    running = of_b.load(STARTED)
    assert (source.load(STARTED).gateway.max_requests, running.gateway.max_requests) == (10, 20)
    file.write_text(SEVERAL.format(all=11, b=21))
    loaded = of_b.load(running)
    assert loaded.gateway.max_requests == 21
    assert change_of(running, loaded, LIVE["gateway"], of_b.sections).changed == ["--gateway-max-requests"]


def test_model_whose_table_is_gone_keeps_its_settings(file):
    file.write_text(SEVERAL.format(all=10, b=20))
    of_b = SettingsSource.of(("gateway",), {}, str(file), {}, rules=RULES).of_model("b")
    file.write_text("[models.a]")
    with pytest.raises(StartupFailed, match=r"models\.b is gone"):
        of_b.load(STARTED)
    file.write_text("[models.b]\nport = 1")
    with pytest.raises(StartupFailed, match="port is the same for all models"):
        of_b.load(STARTED)
