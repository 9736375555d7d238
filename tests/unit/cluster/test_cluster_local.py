import socket
import tempfile
from itertools import pairwise

import pytest

from medialane.cluster import Hardware, local
from medialane.config import changed_imports, load_config
from medialane.types.errors import StartupFailed
from medialane.wire import bind_http


def config(**flags):
    return load_config({name.replace("_", "-"): value for name, value in flags.items()}, environ={})


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def make_parts(tmp_path, *, hardware=None, vllm_args=(), environ=None, listener=None, warm_start=False, **flags):
    return local.process_specs(
        config(**flags, warm_start=warm_start),
        "org/model",
        list(vllm_args),
        local.HostRun(
            tmp_path, hardware or Hardware((), 2), {"HOME": "/root"} if environ is None else environ, listener
        ),
    )


def test_port_in_use_is_one_clear_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartupFailed, match=f"cannot listen on 127.0.0.1 port {port}: the port is already in use"):
            bind_http("127.0.0.1", port).close()
    bind_http("127.0.0.1", port).close()


def test_address_of_another_machine_is_rejected():
    with pytest.raises(StartupFailed, match=r"cannot listen on 192\.0\.2\.1 port 8000: "):
        bind_http("192.0.2.1", 8000).close()


def test_port_0_becomes_a_free_port():
    chosen = local.with_port(config(port="0")).server.port
    assert chosen > 0
    bind_http("127.0.0.1", chosen).close()


def test_model_and_flags_are_checked_before_anything_starts(model):
    local.check(config(port="0"), model, ["--max-model-len=8192"], {})
    with pytest.raises(StartupFailed, match="--max-model-len"):
        local.check(config(port="0"), model, ["--max-model-len"], {})


def test_url_is_reachable_from_this_machine():
    assert local.base_url(config(host="0.0.0.0", port="80"), []) == "http://127.0.0.1:80"
    assert local.base_url(config(host="::", port="80"), []) == "http://[::1]:80"
    assert local.base_url(config(), ["--ssl-keyfile", "k"]) == "https://127.0.0.1:8000"


def flag(part, name):
    return part.argv[part.argv.index(name) + 1]


def test_processes_are_a_store_workers_and_a_gateway_with_their_addresses(tmp_path):
    store, first, second, gateway = make_parts(tmp_path, workers="2", vllm_args=["--max-model-len", "8"])
    assert [part.name for part in (store, first, second, gateway)] == ["store", "worker 0", "worker 1", "gateway"]
    assert [part.argv[3:6] for part in (store, first, gateway)] == [
        ("medialane", command, "org/model") for command in ("store", "worker", "gateway")
    ]
    assert store.is_ready_later
    for part in (first, second):
        assert flag(part, "--listen") == f"unix:{part.ready.path}"
        assert part.argv[-3:] == ("--", "--max-model-len", "8")
    for number, part in enumerate((first, second)):
        assert f"{socket.gethostname()}/{number}=unix:{part.ready.path}" in gateway.argv
    for part in (first, second, gateway):
        assert flag(part, "--store") == flag(store, "--listen")
    assert len({flag(part, "--listen") for part in (store, first, second)}) == 3


def test_processes_are_forks_of_the_warm_process_which_starts_first_and_stops_last(tmp_path):
    warm, store, *_ = parts = make_parts(
        tmp_path, workers="1", environ={"HOME": "/root", "HF_TOKEN": "hf_1", "VLLM_API_KEY": "k"}, warm_start=True
    )
    assert [part.warm for part in parts] == [None, *[store.warm] * 3]
    assert store.warm.path == warm.ready.path
    assert [part.after for part in parts] == [None, *[warm.name] * 3]
    assert warm.layer < store.layer
    assert warm.environ["HOME"] == "/root"
    assert not {"HF_TOKEN", "VLLM_API_KEY"} & warm.environ.keys()


def test_two_workers_on_a_cpu_are_forks_although_they_have_fewer_threads(tmp_path):
    _, _, first, second, _ = make_parts(tmp_path, workers="2", warm_start=True)
    for part in (first, second):
        assert part.environ["OMP_NUM_THREADS"] == "1"
        assert changed_imports(part.environ, part.warm.environ) == []


def test_variable_that_an_import_may_read_keeps_a_process_from_being_a_fork(tmp_path):
    (_, store, *_) = make_parts(tmp_path, workers="1", warm_start=True)
    for name in ("LD_PRELOAD", "PYTHONHASHSEED", "HF_HOME", "VLLM_TARGET_DEVICE"):
        assert changed_imports({**store.environ, name: "1"}, store.warm.environ) == [name]
    assert changed_imports({**store.environ, "HF_TOKEN": "1", "OTEL_SERVICE_NAME": "x"}, store.warm.environ) == []


def test_gateway_stops_before_the_store_and_the_workers_that_it_uses(tmp_path):
    store, worker, gateway = make_parts(tmp_path, workers="1")
    assert gateway.layer > worker.layer > store.layer
    assert gateway.ready.url == "http://127.0.0.1:8000/health"


def test_processes_load_the_configuration_of_serve(tmp_path):
    store, worker, gateway = make_parts(
        tmp_path, workers="1", stage="url", rpc_secret_file="/a secret", store_max_uuids="7"
    )
    for part in (store, worker, gateway):
        loaded = load_config(environ=part.environ)
        assert (loaded.gateway.stage, loaded.rpc.secret_file, loaded.store.max_uuids) == ("url", "/a secret", 7)
    assert worker.environ["HOME"] == "/root"
    for part in (store, worker, gateway):
        assert "OMP_NUM_THREADS" not in part.environ


def test_thread_count_is_set_only_for_workers(tmp_path):
    store, worker, _, gateway = make_parts(tmp_path, workers="2")
    assert worker.environ["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in gateway.environ
    assert "OMP_NUM_THREADS" not in store.environ


def test_workers_on_one_gpu_start_sequentially(tmp_path):
    _, first, second, _ = make_parts(tmp_path, workers="2", single_gpu=True, hardware=Hardware(("0", "1"), 8))
    assert (first.after, second.after) == (None, "worker 0")
    assert second.argv[-2:] == ("--gpu-memory-utilization", "0.46")
    assert second.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_workers_on_separate_gpus_start_concurrently(tmp_path):
    parts = make_parts(tmp_path, workers="2", hardware=Hardware(("0", "1"), 8))
    assert [p.after for p in parts] == [None, None, None, None]
    assert [p.environ.get("CUDA_VISIBLE_DEVICES") for p in parts] == [None, "0", "1", None]
    assert "VLLM_CPU_KVCACHE_SPACE" not in parts[1].environ


def test_encoders_are_workers_with_a_role_that_the_gateway_knows_too(tmp_path):
    store, worker, first, second, gateway = make_parts(tmp_path, workers="1", encoders="2", metrics_port="9000")
    assert [part.name for part in (worker, first, second)] == ["worker 0", "encoder 0", "encoder 1"]
    assert "--role" not in worker.argv
    assert [flag(part, "--role") for part in (first, second)] == ["encoder"] * 2
    assert [flag(part, "--metrics-port") for part in (worker, first, second)] == ["9000", "9001", "9002"]
    assert len({part.ready.path for part in (worker, first, second)}) == 3
    for label, part in (("0", worker), ("encoder-0", first), ("encoder-1", second)):
        assert f"{socket.gethostname()}/{label}=unix:{part.ready.path}" in gateway.argv
        assert flag(part, "--store") == flag(store, "--listen")
        assert part.environ["OMP_NUM_THREADS"] == "1"


def test_workers_that_prefill_and_decode_have_their_roles(tmp_path):
    parts = make_parts(tmp_path, prefill="1", decode="2", encoders="1", worker_name="blue", metrics_port="9000")
    _store, *workers, gateway = parts
    assert [part.name for part in workers] == ["prefill 0", "decode 0", "decode 1", "encoder 0"]
    assert [flag(part, "--role") for part in workers] == ["prefill", "decode", "decode", "encoder"]
    assert [flag(part, "--metrics-port") for part in workers] == ["9000", "9001", "9002", "9003"]
    for label, part in zip(("prefill-0", "decode-0", "decode-1", "encoder-0"), workers, strict=True):
        assert f"blue/{label}=unix:{part.ready.path}" in gateway.argv


def test_ports_of_connectors_count_up_from_that_of_the_user(tmp_path):
    environ = {"VLLM_NIXL_SIDE_CHANNEL_PORT": "5600"}
    _store, *workers, _gateway = make_parts(tmp_path, prefill="1", decode="2", environ=environ, vllm_args=["-dp", "2"])
    assert [part.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] for part in workers] == ["5600", "5602", "5604"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"prefill": "1"}, "num_prefill and num_decode must be given together"),
        ({"decode": "1"}, "num_prefill and num_decode must be given together"),
        ({"prefill": "1", "decode": "1", "workers": "2"}, "num_workers is without --prefill and --decode"),
    ],
)
def test_numbers_of_prefill_and_decode_workers_are_checked(flags, reason):
    with pytest.raises(StartupFailed, match=reason):
        config(**flags).cluster.validate()


def test_encoder_on_the_gpu_of_a_worker_starts_after_it(tmp_path):
    hardware = Hardware(("0", "1"), 8)
    parts = make_parts(tmp_path, workers="2", encoders="3", encoder_gpu_share="0.2", hardware=hardware)
    after = {part.name: part.after for part in parts if part.name[-1].isdigit()}
    assert after == {
        "worker 0": None, "worker 1": None, "encoder 0": "worker 0", "encoder 1": "worker 1", "encoder 2": "encoder 0"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"stage": "url"}, "--encoders needs --stage auto or features"),
        ({"stage": "decoded"}, "--encoders needs --stage auto or features"),
        ({"transport": "inline"}, "--encoders needs --transport auto or shm, not inline"),
        ({"transport": "tcp"}, "--encoders needs --transport auto or shm, not tcp"),
        ({"encode_cache": "off"}, "--encoders needs --encode-cache auto or on"),
    ],
)
def test_encoders_that_could_do_nothing_are_refused(model, flags, reason):
    local.check(config(port="0", **flags), model, [], {})
    with pytest.raises(StartupFailed, match=reason):
        local.check(config(port="0", encoders="1", **flags), model, [], {})


def test_served_name_is_the_one_used_by_requests():
    assert local.served_name("m", []) == "m"
    assert local.served_name("m", ["--served-model-name", "vision"]) == "vision"


def test_user_runtime_folder_is_preferred_unless_too_long_for_sockets(tmp_path):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        assert str(local.parent_directory({"XDG_RUNTIME_DIR": short})) == short
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    assert str(local.parent_directory({"XDG_RUNTIME_DIR": str(deep)})) == "/tmp"
    assert local.parent_directory({"TMPDIR": "relative"}).is_absolute()


def test_run_folder_is_created_there_and_removed():
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        folder = local.run_folder({"XDG_RUNTIME_DIR": short})
        assert folder.path.name.startswith("medialane-run-")
        folder.close()
        assert not folder.path.exists()


def test_each_process_gets_the_flags_that_it_uses(tmp_path):
    flags = ["--middleware", "m", "--kv-transfer-config", '{"url": "password"}', "--seed=1"]
    store, worker, gateway = make_parts(tmp_path, workers="1", vllm_args=flags)
    assert gateway.argv[-6:] == ("--", *flags)
    assert worker.argv[worker.argv.index("--") + 1 :] == tuple(flags[2:])
    assert store.argv[-2:] == ("--", "--seed=1")


def test_gateways_inherit_one_listening_socket_and_are_checked_on_their_own(tmp_path):
    with bind_http("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0
        *_, first, second, third = make_parts(
            tmp_path, gateways="3", listener=listener, vllm_args=["--chat-template", "t"]
        )
        descriptor = listener.fileno()
    gateways = [first, second, third]
    assert [part.name for part in gateways] == ["gateway 0", "gateway 1", "gateway 2"]
    paths = [tmp_path / f"gateway-{i}.sock" for i in range(3)]
    assert [part.ready.path for part in gateways] == paths
    for number, part in enumerate(gateways):
        assert part.pass_fds == (descriptor,)
        assert part.argv[part.argv.index("--listen-fd") + 1] == str(descriptor)
        assert part.argv[part.argv.index("--gateway-index") + 1] == str(number)
        sockets = [word for flag, word in pairwise(part.argv) if flag == "--gateway-socket"]
        assert sockets == list(map(str, paths))
        assert part.argv[-3:] == ("--", "--chat-template", "t")


def test_one_gateway_inherits_the_socket_too_but_is_no_group(tmp_path):
    with bind_http("127.0.0.1", 0) as listener:
        gateway = make_parts(tmp_path, listener=listener)[-1]
        assert (gateway.name, gateway.pass_fds) == ("gateway", (listener.fileno(),))
    assert "--listen-fd" in gateway.argv
    assert "--gateway-socket" not in gateway.argv
    assert gateway.ready.path is None


def test_shared_port_in_use_is_one_clear_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(StartupFailed, match="the port is already in use"):
            bind_http("127.0.0.1", taken.getsockname()[1]).close()


def flags_of(parts, name):
    return next(part.argv for part in parts if part.name == name)


def test_workers_of_a_host_have_metrics_ports_and_names_of_their_own(tmp_path):
    parts = make_parts(
        tmp_path, workers=2, metrics_port=8100, worker_name="here", vllm_args=["--data-parallel-size", "4"]
    )
    for number, port in enumerate(("8100", "8104")):
        argv = flags_of(parts, f"worker {number}")
        assert argv[argv.index("--metrics-port") + 1] == port
        assert argv[argv.index("--worker-name") + 1] == f"here/{number}"
    assert "--metrics-port" not in flags_of(make_parts(tmp_path, workers=2), "worker 1")


def test_ports_at_which_workers_join_several_gateways_are_checked_before_anything_starts(model):
    local.check(config(port="0", gateways=2, join_listen="tcp://127.0.0.1:7100"), model, [], {})
    with pytest.raises(StartupFailed, match="--join-listen needs 2 ports"):
        local.check(config(port="0", gateways=2, join_listen="tcp://127.0.0.1:0"), model, [], {})


def test_with_ray_this_host_has_no_workers(tmp_path):
    listen = "tcp://127.0.0.1:7100"
    store, gateway = make_parts(tmp_path, ray="true", workers="8", join_listen=listen, hardware=Hardware(("0",), 2))
    assert (store.name, gateway.name) == ("store", "gateway")
    assert "--worker" not in gateway.argv
    assert gateway.environ["MEDIALANE_JOIN_LISTEN"] == listen
    assert flag(gateway, "--store") == f"unix:{local.store_path(tmp_path)}"


def test_workers_have_the_same_names_after_a_restart(tmp_path):
    def names(folder):
        folder.mkdir()
        gateway = make_parts(folder, workers="1", encoders="1", worker_name="blue")[-1]
        given = [gateway.argv[i + 1] for i, word in enumerate(gateway.argv) if word == "--worker"]
        return [word.partition("=")[0] for word in given]

    assert names(tmp_path / "first") == names(tmp_path / "second") == ["blue/0", "blue/encoder-0"]
