"""Settings that are loaded again: what needs a restart, and what a bad file does."""

import pytest

from medialane.config import SettingsChange, SettingsSource, TableRules, load_config, load_models, settings
from medialane.types.errors import StartupFailed

SECTIONS = ("gateway", "media", "logging", "arena")


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text("")
    return file


def source_of(file, flags=None, environ=None):
    """As of a process that starts now."""
    config = load_config(flags or {}, file=str(file), environ=environ or {})
    return SettingsSource.of(config, sections=SECTIONS, flags=flags or {}, file=str(file), environ=environ or {})


def test_changed_settings_of_a_process_need_a_restart_but_for_the_level_of_its_log(file):
    source = source_of(file)
    file.write_text('gateway-max-tools = 3\narena-size = "64MiB"\nlog-level = "debug"\nport = 9')
    assert source.needs_restart(source.load()) == ["--gateway-max-tools", "--arena-size"]
    file.write_text("gateway-max-tools = 256")
    assert source.needs_restart(source.load()) == []


def test_settings_need_a_restart_until_they_are_as_at_the_start_again(file):
    file.write_text("gateway-max-tools = 3")
    source = source_of(file)
    file.write_text("")
    for _ in range(2):
        assert source.needs_restart(source.load()) == ["--gateway-max-tools"]
    file.write_text("gateway-max-tools = 3")
    assert source.needs_restart(source.load()) == []


def test_flags_and_environment_win_over_the_new_file_too(file):
    source = source_of(file, {"gateway-max-tools": "5"}, {"MEDIALANE_GATEWAY_MAX_PROMPTS": "6"})
    file.write_text("gateway-max-tools = 3\ngateway-max-prompts = 3")
    assert source.needs_restart(source.load()) == []


def test_file_may_be_named_in_the_environment(file):
    environ = {"MEDIALANE_CONFIG": str(file), "HOME": "/"}
    config = load_config({}, environ=environ)
    source = SettingsSource.of(config, sections=SECTIONS, flags={}, file=None, environ=environ)
    file.write_text("gateway-max-tools = 4")
    assert source.load().gateway.max_tools == 4


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
        source.load()


def test_source_has_no_secrets_which_are_no_changes(file, tmp_path):
    secrets = {s.variable: '["s3cret"]' if s.name == "api-keys" else "s3cret" for s in settings() if s.is_secret}
    source = source_of(file, {"port": "9"}, secrets)
    assert source.needs_restart(source.load()) == []
    source.write(tmp_path / "source.json")
    assert b"s3cret" not in (tmp_path / "source.json").read_bytes()
    assert SettingsSource.read(str(tmp_path / "source.json")) == source


RULES = TableRules(own=("model",), shared=("port",))
SEVERAL = """
gateway-max-requests = {all}
[models.a]
model = "/models/a"
[models.b]
gateway-max-requests = {b}
"""


def source_of_b(file):
    config, (_, b) = load_models({}, file=str(file), environ={}, sections=("gateway",), rules=RULES)
    of_all = SettingsSource.of(config, sections=("gateway",), flags={}, file=str(file), environ={}, rules=RULES)
    return of_all, of_all.of_model("b", b.config)


def test_model_of_several_has_the_settings_of_its_table(file, tmp_path):
    file.write_text(SEVERAL.format(all=10, b=20))
    of_all, of_b = source_of_b(file)
    of_b.write(tmp_path / "source.json")
    of_b = SettingsSource.read(str(tmp_path / "source.json"))
    assert [source.load().gateway.max_requests for source in (of_all, of_b)] == [10, 20]
    file.write_text(SEVERAL.format(all=11, b=20))
    assert [source.needs_restart(source.load()) for source in (of_all, of_b)] == [["--gateway-max-requests"], []]
    file.write_text(SEVERAL.format(all=10, b=21))
    assert [source.needs_restart(source.load()) for source in (of_all, of_b)] == [[], ["--gateway-max-requests"]]


def test_model_whose_table_is_gone_keeps_its_settings(file):
    file.write_text(SEVERAL.format(all=10, b=20))
    _, of_b = source_of_b(file)
    file.write_text("[models.a]")
    with pytest.raises(StartupFailed, match=r"models\.b is gone"):
        of_b.load()
    file.write_text("[models.b]\nport = 1")
    with pytest.raises(StartupFailed, match="port is the same for all models"):
        of_b.load()


def test_change_is_shown_with_what_needs_a_restart():
    change = SettingsChange(["--log-level"], ["--port"], ["--keys"], ["1"])
    assert str(change).splitlines() == [
        "changed: --log-level",
        "files read again: --keys",
        "needs a restart: --port",
        "gateway 1 has not read its settings again: see its log",
    ]
    assert str(SettingsChange()) == "no setting has changed"
