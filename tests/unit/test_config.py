import msgspec
import pytest

from medialane.config import (
    ARENA_DIR,
    Config,
    as_environ,
    child_environ,
    enter_environ,
    format_size,
    load_config,
    parse_size,
    settings,
    vllm_defaults,
)
from medialane.core.errors import StartupFailed

MIB, GIB = 1 << 20, 1 << 30


def load(flags=None, *, environ=None, file=None, rooms=()):
    return load_config(flags, file=file, environ=environ or {}, rooms=rooms)


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "medialane.toml"
        path.write_text(text)
        return str(path)

    return write


def test_nothing_given_is_the_defaults():
    assert load() == Config()


def test_flag_wins_over_environment_over_file_over_default(file):
    path = file("workers = 2\npreparers = 2\nport = 2\n")
    config = load({"workers": "4"}, environ={"MEDIALANE_WORKERS": "3", "MEDIALANE_PREPARERS": "3"}, file=path)
    assert config.cluster.num_workers == 4
    assert config.prepare.num_preparers == 3
    assert config.server.port == 2
    assert config.server.host == Config().server.host


def test_flags_of_the_command_line_have_their_documented_names():
    names = {s.flag for s in settings()}
    assert {"--workers", "--preparers", "--host", "--port", "--arena-size", "--stage", "--transport"} <= names
    assert {"--single-gpu", "--log-level", "--rpc-token", "--allow-media-network"} <= names


def test_every_setting_has_a_name_of_its_own_and_a_description():
    found = settings()
    assert len({s.name for s in found}) == len(found)
    assert [s.name for s in found if not s.description] == []


def test_sizes_are_read_with_their_units():
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
def test_size_in_every_spelling(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 parsecs", "1e9", "2GiBB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="must be a size"):
        parse_size(text)


@pytest.mark.parametrize("num_bytes", [0, 1, 1023, 1024, 3 * MIB, 5 * GIB, 7 << 40])
def test_formatted_size_reads_back(num_bytes):
    assert parse_size(format_size(num_bytes)) == num_bytes


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
            r"unknown environment variable MEDIALANE_WORKRES; is MEDIALANE_WORKERS meant\?",
        ),
        ({"workres": "2"}, {}, r"unknown setting --workres; is workers meant\?"),
    ],
)
def test_wrong_value_or_name_is_told_by_where_it_came_from(flags, environ, message):
    with pytest.raises(StartupFailed, match=message):
        load(flags, environ=environ)


def test_secret_is_not_repeated_in_the_message(file):
    with pytest.raises(StartupFailed) as failed:
        load(file=file("rpc-token = [170171172]"))
    assert "170171172" not in failed.value.message


def test_unknown_setting_of_the_file_is_named(file):
    with pytest.raises(StartupFailed, match=r"medialane.toml: unknown setting arena-sise; is arena-size meant\?"):
        load(file=file('arena-sise = "2GiB"'))


def test_file_that_is_absent_or_no_toml_is_named(file, tmp_path):
    with pytest.raises(StartupFailed, match=r"absent.toml: No such file"):
        load(file=str(tmp_path / "absent.toml"))
    with pytest.raises(StartupFailed, match="is not TOML"):
        load(file=file("workers: 2"))


def test_file_may_be_named_by_the_environment(file):
    assert load(environ={"MEDIALANE_CONFIG": file("workers = 5")}).cluster.num_workers == 5


def test_room_complains_in_the_spelling_of_the_command_line():
    with pytest.raises(StartupFailed, match="--workers must be at least 1"):
        load({"workers": "0"}, rooms=("cluster",))
    with pytest.raises(StartupFailed, match="--restart-initial must be positive and at most --restart-max"):
        load({"restart-initial": "0"}, rooms=("cluster",))


def test_rooms_that_a_command_does_not_use_are_not_validated():
    assert load({"workers": "0"}, rooms=("server",)).cluster.num_workers == 0


def test_another_process_loads_an_equal_configuration():
    changed = {}
    for setting in settings():
        match setting.default:
            case bool():
                changed[setting.name] = not setting.default
            case int() | float():
                changed[setting.name] = setting.default + 1
            case tuple():
                changed[setting.name] = [1, 2] if setting.type == tuple[int, ...] else ["10.0.0.0/8", "a,b"]
            case str() if not setting.flag.endswith(("stage", "transport", "router", "level")):
                changed[setting.name] = "123 text"
    config = load(changed)
    assert config != Config()
    assert load(environ=as_environ(config)) == config
    assert as_environ(Config()) == {}


def test_child_inherits_the_configuration_and_not_our_variables():
    config = load({"workers": "2", "arena-directory": "/tmp"})
    environ = {"HOME": "/root", "MEDIALANE_WORKERS": "9", "MEDIALANE_PORT": "1"}
    found = child_environ(config, "name", [], on_gpu=False, environ=environ)
    assert found["HOME"] == "/root"
    assert found[ARENA_DIR] == "/tmp"
    assert "MEDIALANE_PORT" not in found
    assert load(environ=found) == config


def test_what_the_user_set_for_vllm_stays():
    environ = {"VLLM_CPU_KVCACHE_SPACE": "40", "HF_HUB_OFFLINE": "0"}
    found = child_environ(Config(), "/", [], on_gpu=False, environ=environ)
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "40"
    assert found["HF_HUB_OFFLINE"] == "0"
    assert found["VLLM_NO_USAGE_STATS"] == "1"


def test_hub_is_left_alone_only_for_a_local_model(tmp_path):
    assert "HF_HUB_OFFLINE" not in vllm_defaults("org/name", [], on_gpu=True, num_workers=1)
    assert vllm_defaults(str(tmp_path), [], on_gpu=True, num_workers=1)["HF_HUB_OFFLINE"] == "1"


def test_size_of_the_kv_cache_is_left_to_the_flag_that_gives_it():
    assert int(vllm_defaults("m", [], on_gpu=False, num_workers=2)["VLLM_CPU_KVCACHE_SPACE"]) >= 1
    flags = ["--kv_cache_memory_bytes=1G"]
    assert "VLLM_CPU_KVCACHE_SPACE" not in vllm_defaults("m", flags, on_gpu=False, num_workers=2)
    assert "VLLM_CPU_KVCACHE_SPACE" not in vllm_defaults("m", [], on_gpu=True, num_workers=2)


def test_process_environment_is_entered_once_and_overrides_nobody(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3")
    for name in ("VLLM_NO_USAGE_STATS", "VLLM_CPU_KVCACHE_SPACE", ARENA_DIR):
        monkeypatch.delenv(name, raising=False)
    import os

    before = dict(os.environ)
    try:
        enter_environ(Config(), "name", [], on_gpu=False)
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0-3"
        assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
        assert os.environ[ARENA_DIR] == Config().arena.directory
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_configuration_is_frozen():
    with pytest.raises(AttributeError):
        Config().server.port = 1
    assert msgspec.structs.replace(Config().server, port=1).port == 1
