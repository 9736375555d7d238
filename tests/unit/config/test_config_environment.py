import logging
import os

import pytest

from medialane.config import (
    Config,
    allowed_environ,
    as_environ,
    child_environ,
    enter_environ,
    load_config,
    settings,
    settings_environ,
    vllm_defaults,
    worker_environ,
)

#: What the environment of an operator may contain, and a process needs only if it is named there.
SECRETS = {
    "VLLM_API_KEY": {"gateway"},
    "MEDIALANE_API_KEYS": {"gateway"},
    "MEDIALANE_ADMIN_KEY": {"gateway"},
    "MEDIALANE_METRICS_KEY": {"gateway"},
    "MEDIALANE_RPC_SECRET": {"store", "worker", "gateway"},
    "HF_TOKEN": {"store", "worker", "gateway"},
    "HUGGING_FACE_HUB_TOKEN": {"store", "worker", "gateway"},
    "https_proxy": {"store", "worker", "gateway"},
    "OTEL_EXPORTER_OTLP_HEADERS": {"store", "worker", "gateway"},
    "AWS_SECRET_ACCESS_KEY": set(),
    "AWS_ACCESS_KEY_ID": set(),
    "RAY_AUTH_TOKEN": set(),
    "OPENAI_API_KEY": set(),
    "UCX_SOME_PASSWORD": set(),
    "HF_SOME_TOKEN": set(),
    "VLLM_S3_SECRET": set(),
    "DATABASE_URL": set(),
}


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
            case tuple() if setting.is_secret:
                variables[setting.variable] = '["one", "two, three"]'
            case tuple():
                changed[setting.name] = [1, 2] if setting.type == tuple[int, ...] else ["10.0.0.0/8", "a,b"]
            case str() if setting.is_secret:
                variables[setting.variable] = "123 text"
            case str() if "Literal" not in str(setting.type):  # those have values of their own
                changed[setting.name] = "123 text"
    config = load(changed, environ=variables)
    assert config.rpc.shared_secret == "123 text"
    assert config.gateway.api_keys == ("one", "two, three")
    assert load(environ=as_environ(config)) == config
    assert as_environ(Config()) == {}


def test_child_inherits_the_configuration_but_not_our_variables():
    config = load({"workers": "2", "arena-directory": "/tmp"})
    environ = {"HOME": "/root", "MEDIALANE_WORKERS": "9", "MEDIALANE_PORT": "1"}
    found = child_environ(config, "gateway", "name", [], on_gpu=False, environ=environ)
    assert found["HOME"] == "/root"
    assert "MEDIALANE_PORT" not in found
    assert load(environ=found) == config


def test_vllm_variables_set_by_the_user_are_kept():
    environ = {"VLLM_CPU_KVCACHE_SPACE": "40", "HF_HUB_OFFLINE": "0"}
    found = child_environ(Config(), "worker", "/", [], on_gpu=False, environ=environ)
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
    for name in ("VLLM_NO_USAGE_STATS", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    try:
        enter_environ(Config(), "worker", "name", [], on_gpu=False)
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0-3"
        assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.mark.parametrize("role", ["store", "worker", "gateway"])
def test_role_gets_only_the_secrets_that_it_needs(role):
    environ = dict.fromkeys(SECRETS, "a secret of sixteen") | {"PATH": "/bin"}
    found = child_environ(load(environ=environ), role, "name", [], on_gpu=True, environ=environ)
    assert found.keys() & SECRETS.keys() == {name for name, roles in SECRETS.items() if role in roles}
    assert found["PATH"] == "/bin"


@pytest.mark.parametrize("role", ["preparer", "mover"])
def test_process_that_handles_hostile_bytes_gets_no_secret_whatever_is_passed(role):
    environ = {name: "a secret of sixteen" for name in SECRETS if name != "DATABASE_URL"}
    found = allowed_environ(role, environ, ["*"])
    assert "a secret of sixteen" not in {v for k, v in found.items() if k not in _NOT_SECRET_BY_NAME}
    assert not any(name.startswith("MEDIALANE_") for name in found)


#: Passed on if the operator says so, since nothing in the name shows that they are secrets.
_NOT_SECRET_BY_NAME = {"AWS_ACCESS_KEY_ID", "https_proxy"}


@pytest.mark.parametrize("role", ["store", "worker", "gateway", "preparer", "mover"])
def test_what_programs_need_is_inherited(role):
    environ = dict.fromkeys(
        ("PATH", "HOME", "LC_ALL", "TZ", "PYTHONPATH", "LD_PRELOAD", "OMP_NUM_THREADS", "UCX_TLS"), "x"
    )
    assert allowed_environ(role, environ).items() >= environ.items()


def test_operator_passes_more_by_name_or_pattern():
    environ = {"AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "y", "MY_MODEL_X": "z", "OTHER": "o"}
    assert allowed_environ("worker", environ, ["AWS_*", "MY_MODEL_X"]).keys() == environ.keys() - {"OTHER"}
    config = load({"pass-env": "AWS_*,MY_MODEL_X"})
    assert child_environ(config, "store", "m", [], on_gpu=True, environ=environ)["MY_MODEL_X"] == "z"
    assert "MY_MODEL_X" in allowed_environ("preparer", environ, config.environment.pass_env)


def test_names_that_are_left_out_are_logged_for_who_looks(caplog):
    with caplog.at_level(logging.DEBUG, "medialane"):
        allowed_environ("mover", {"SOME_KEY": "its value"})
    assert "SOME_KEY" in caplog.text
    assert "its value" not in caplog.text


def test_worker_of_another_host_gets_the_secrets_of_that_host_only():
    config = load({"pass-env": "MY_X"}, environ={"MEDIALANE_RPC_SECRET": "of this host ...", "MEDIALANE_API_KEYS": "k"})
    passed = settings_environ(config)
    assert not {"MEDIALANE_RPC_SECRET", "MEDIALANE_API_KEYS"} & passed.keys()
    host = {"MEDIALANE_RPC_SECRET": "of that host ...", "MEDIALANE_API_KEYS": "k", "RAY_AUTH_TOKEN": "t", "MY_X": "1"}
    assert worker_environ(host, passed) == {"MEDIALANE_RPC_SECRET": "of that host ...", "MY_X": "1"}


def test_entered_process_keeps_nothing_that_its_role_does_not_need(monkeypatch):
    for name in SECRETS:
        monkeypatch.setenv(name, "a secret of sixteen")
    before = dict(os.environ)
    try:
        enter_environ(load(), "worker", "name", [], on_gpu=True)
        assert os.environ.keys() & SECRETS.keys() == {n for n, roles in SECRETS.items() if "worker" in roles} - {
            "MEDIALANE_RPC_SECRET"  # it is in the configuration; vLLM's processes do not need it
        }
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_secrets_are_not_shown_with_the_configuration():
    config = load(environ={"MEDIALANE_RPC_SECRET": "of this host ...", "MEDIALANE_API_KEYS": "one,two"})
    assert config.gateway.api_keys == ("one", "two")
    assert "of this host" not in repr(config)
    assert "api_keys=('***',)" in repr(config)


def test_empty_variable_means_no_api_key():
    assert load(environ={"MEDIALANE_API_KEYS": ""}).gateway.api_keys == ()
