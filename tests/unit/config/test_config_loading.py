import pytest

from medialane.config import Config, load_config, parse_size
from medialane.types.errors import StartupFailed
from medialane.types.setting import format_bytes

MIB, GIB = 1 << 20, 1 << 30


def load(flags=None, *, environ=None, file=None):
    return load_config(flags, file=file, environ=environ or {})


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "medialane.toml"
        path.write_text(text)
        return str(path)

    return write


def test_defaults_apply_without_settings():
    assert load() == Config()


def test_flag_wins_over_environment_over_file_over_default(file):
    path = file("workers = 2\npreparers = 2\nport = 2\n")
    config = load({"workers": "4"}, environ={"MEDIALANE_WORKERS": "3", "MEDIALANE_PREPARERS": "3"}, file=path)
    assert config.cluster.num_workers == 4
    assert config.prepare.num_preparers == 3
    assert config.server.port == 2
    assert config.server.host == Config().server.host


def test_sizes_are_parsed_with_units():
    assert load({"arena-size": "3GiB"}).arena.size_bytes == 3 * GIB
    assert load(environ={"MEDIALANE_ARENA_SIZE": "64MiB"}).arena.size_bytes == 64 * MIB


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("2GiB", 2 * GIB),
        ("2g", 2 * GIB),
        ("2 GB", 2 * 10**9),
        ("0.5MiB", MIB // 2),
        ("17", 17),
        ("17B", 17),
        ("1kb", 1000),
    ],
)
def test_size_formats(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 parsecs", "1e9", "2GiBB"])
def test_invalid_size_is_rejected(text):
    with pytest.raises(ValueError, match="must be a size"):
        parse_size(text)


@pytest.mark.parametrize("num_bytes", [0, 1, 1023, 1024, 3 * MIB, 5 * GIB, 7 << 40])
def test_formatted_size_round_trips(num_bytes):
    assert parse_size(format_bytes(num_bytes)) == num_bytes


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        ({"port": "abc"}, {}, r"--port 'abc': must be a whole number"),
        ({}, {"MEDIALANE_STAGE": "pixels"}, r"MEDIALANE_STAGE 'pixels': must be one of auto, features, decoded, url"),
        ({"arena-size": "big"}, {}, r"--arena-size 'big': must be a size such as 2GiB"),
        ({"start-timeout": "soon"}, {}, r"--start-timeout 'soon': must be a number of seconds"),
        (
            {},
            {"MEDIALANE_WORKRES": "2"},
            r"unknown environment variable MEDIALANE_WORKRES; did you mean MEDIALANE_WORKERS\?",
        ),
        ({"workres": "2"}, {}, r"unknown setting --workres; did you mean workers\?"),
    ],
)
def test_invalid_value_or_name_error_names_its_source(flags, environ, message):
    with pytest.raises(StartupFailed, match=message):
        load(flags, environ=environ)


def test_secret_is_accepted_from_the_environment_only(file):
    assert load(environ={"MEDIALANE_RPC_SECRET": "170171172"}).rpc.shared_secret == "170171172"
    for refused in (lambda: load({"rpc-secret": "170171172"}), lambda: load(file=file('rpc-secret = "170171172"'))):
        with pytest.raises(StartupFailed, match="MEDIALANE_RPC_SECRET") as failed:
            refused()
        assert "170171172" not in failed.value.message


@pytest.mark.parametrize("name", ["MEDIALANE_RPC_SECRET", "MEDIALANE_ADMIN_KEY", "MEDIALANE_METRICS_KEY"])
def test_secret_is_in_no_repr(name):
    config = load(environ={name: "170171172"})
    assert "170171172" not in f"{config!r} {config} {config.rpc!r} {config.gateway!r}"


def test_unknown_setting_of_the_file_is_named(file):
    with pytest.raises(StartupFailed, match=r"medialane.toml: unknown setting arena-sise; did you mean arena-size\?"):
        load(file=file('arena-sise = "2GiB"'))


def test_missing_or_invalid_toml_file_is_named(file, tmp_path):
    with pytest.raises(StartupFailed, match=r"absent.toml: No such file"):
        load(file=str(tmp_path / "absent.toml"))
    with pytest.raises(StartupFailed, match="is not TOML"):
        load(file=file("workers: 2"))


def test_file_may_be_named_by_the_environment(file):
    assert load(environ={"MEDIALANE_CONFIG": file("workers = 5")}).cluster.num_workers == 5
