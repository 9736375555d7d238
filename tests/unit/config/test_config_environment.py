import os

from medialane.config import (
    ARENA_DIR,
    Config,
    as_environ,
    child_environ,
    enter_environ,
    load_config,
    settings,
    vllm_defaults,
)


def load(flags=None, *, environ=None):
    return load_config(flags, environ=environ or {})


def test_another_process_loads_an_equal_configuration():
    changed, variables = {}, {}
    for setting in settings():
        match setting.default:
            case bool():
                changed[setting.name] = not setting.default
            case int() | float():
                changed[setting.name] = setting.default + 1
            case tuple():
                changed[setting.name] = [1, 2] if setting.type == tuple[int, ...] else ["10.0.0.0/8", "a,b"]
            case str() if setting.is_secret:
                variables[setting.variable] = "123 text"
            case str() if not setting.flag.endswith(
                (
                    "stage",
                    "transport",
                    "router",
                    "level",
                    "nixl",
                    "gpus-per-worker",
                    "gateway-nodes",
                    "encode-cache",
                    "encode-at",
                )
            ):
                changed[setting.name] = "123 text"
    config = load(changed, environ=variables)
    assert config.rpc.shared_secret == "123 text"
    assert load(environ=as_environ(config)) == config
    assert as_environ(Config()) == {}


def test_child_inherits_the_configuration_but_not_our_variables():
    config = load({"workers": "2", "arena-directory": "/tmp"})
    environ = {"HOME": "/root", "MEDIALANE_WORKERS": "9", "MEDIALANE_PORT": "1"}
    found = child_environ(config, "name", [], on_gpu=False, environ=environ)
    assert found["HOME"] == "/root"
    assert found[ARENA_DIR] == "/tmp"
    assert "MEDIALANE_PORT" not in found
    assert load(environ=found) == config


def test_vllm_variables_set_by_the_user_are_kept():
    environ = {"VLLM_CPU_KVCACHE_SPACE": "40", "HF_HUB_OFFLINE": "0"}
    found = child_environ(Config(), "/", [], on_gpu=False, environ=environ)
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "40"
    assert found["HF_HUB_OFFLINE"] == "0"
    assert found["VLLM_NO_USAGE_STATS"] == "1"


def test_hub_is_disabled_only_for_a_local_model(tmp_path):
    assert "HF_HUB_OFFLINE" not in vllm_defaults("org/name", [], on_gpu=True, num_workers=1)
    assert vllm_defaults(str(tmp_path), [], on_gpu=True, num_workers=1)["HF_HUB_OFFLINE"] == "1"


def test_kv_cache_flag_takes_precedence_over_the_variable():
    assert int(vllm_defaults("m", [], on_gpu=False, num_workers=2)["VLLM_CPU_KVCACHE_SPACE"]) >= 1
    flags = ["--kv_cache_memory_bytes=1G"]
    assert "VLLM_CPU_KVCACHE_SPACE" not in vllm_defaults("m", flags, on_gpu=False, num_workers=2)
    assert "VLLM_CPU_KVCACHE_SPACE" not in vllm_defaults("m", [], on_gpu=True, num_workers=2)


def test_process_environment_is_applied_once_without_overriding(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3")
    for name in ("VLLM_NO_USAGE_STATS", "VLLM_CPU_KVCACHE_SPACE", ARENA_DIR):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    try:
        enter_environ(Config(), "name", [], on_gpu=False)
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0-3"
        assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
        assert os.environ[ARENA_DIR] == Config().arena.directory
    finally:
        os.environ.clear()
        os.environ.update(before)
