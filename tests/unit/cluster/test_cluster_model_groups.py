"""Several models of one file: their settings, flags, GPUs, names, and the processes of each."""

import json
import socket

import pytest

from medialane.cluster import Hardware, local, model_groups
from medialane.config import load_models
from medialane.types.errors import StartupFailed

TWO = """
arena-size = "64MiB"
preparers = 1
[models.vision]
model = "org/vl"
workers = 2
flags = "--max-model-len 8192 --lora-modules cats=/a '{\\"name\\":\\"dogs\\",\\"path\\":\\"/b\\"}'"
[models."org/text"]
gateways = 2
preparers = 3
flags = ["--max-model-len", 4096, "--served-model-name", "text", "words"]
"""


@pytest.fixture
def load(tmp_path):
    """The configuration of all, and the groups, of a file's text."""

    def load(text, *, vllm_args=(), environ=None, **flags):
        path = tmp_path / "models.toml"
        path.write_text(text)
        config, tables = load_models(
            flags,
            file=str(path),
            environ=environ or {},
            sections=("cluster", "arena"),
            rules=model_groups.TABLES,
        )
        return config, [model_groups.group_of(table, vllm_args) for table in tables]

    return load


@pytest.fixture
def specs(load, tmp_path):
    """The processes of a file's text by name."""

    def specs(text, *, hardware=None, vllm_args=()):
        config, groups = load(text, vllm_args=vllm_args)
        folder = tmp_path / "run"
        folder.mkdir()
        with socket.socket() as listener:
            environ = {"PATH": "/bin", "VLLM_API_KEY": "key", "HF_TOKEN": "token"}
            run = local.HostRun(folder, hardware or Hardware((), 8), environ, listener)
            parts = model_groups.process_specs(groups, config, vllm_args, run)
        return {part.name: part for part in parts}

    return specs


def visible(part):
    return part.environ.get("CUDA_VISIBLE_DEVICES")


def test_settings_of_a_table_win_over_those_at_the_top(load):
    _, (vision, text) = load(TWO)
    assert (vision.model, text.model) == ("org/vl", "org/text")
    assert (vision.config.cluster.num_workers, text.config.cluster.num_workers) == (2, 1)
    assert (vision.config.prepare.num_preparers, text.config.prepare.num_preparers) == (1, 3)
    assert vision.config.arena.size_bytes == text.config.arena.size_bytes == 64 << 20


def test_flags_and_environment_win_over_tables(load):
    _, (vision, text) = load(TWO, environ={"MEDIALANE_PREPARERS": "5"}, workers="4")
    assert (vision.config.prepare.num_preparers, text.config.prepare.num_preparers) == (5, 5)
    assert (vision.config.cluster.num_workers, text.config.cluster.num_workers) == (4, 4)


def test_names_are_those_of_the_table_unless_the_flags_say_otherwise(load):
    _, (vision, text) = load(TWO, vllm_args=["--enforce-eager"])
    assert vision.served_names == ("vision",)
    assert vision.vllm_args[0] == "--enforce-eager"
    assert vision.vllm_args[-2:] == ("--served-model-name", "vision")
    assert text.served_names == ("text", "words")
    assert model_groups.adapters(vision) == ("cats", "dogs")
    assert text.vllm_args == ("--enforce-eager", "--max-model-len", "4096", "--served-model-name", "text", "words")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[models.a]\nworkres = 2", r"models\.a\.workres|unknown setting workres; did you mean workers"),
        ("[models.a]\nmodell = 'x'", "did you mean model"),
        ("[models.a]\nport = 1", "port is the same for all models: it belongs at the top"),
        ("[models.a]\nlog-level = 'debug'", "log-level is the same for all models"),
        ("[models.a]\nadmin-key-file = 'x'", "admin-key-file is the same for all models"),
        ("[models.a]\nray = true", "ray is the same for all models"),
        ("[models.a]\napi-keys = 'x'", "set MEDIALANE_API_KEYS in the environment"),
        ("[models.a]\nworkers = -1", r"models\.a: "),
        ("[models.a]\nmodel = 3", "models.a: model must be a folder"),
        ("[models.a]\nflags = {}", "models.a: flags must be a list of words"),
        ("[models.a]\nflags = '--api-key x'", "keys and tokens are shared by all models"),
        ("[models.a]\nflags = '--ssl-keyfile x'", "--ssl-keyfile is for all models: give it after `--`"),
        ("models = 3", r"must have a table for each model: \[models\.NAME\]"),
        ("[models]\na = 3", r"must have a table for each model"),
    ],
)
def test_wrong_tables_are_named(load, text, message):
    with pytest.raises(StartupFailed, match=message):
        load(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[models.a]\n[models.b]\nflags='--served-model-name a'", "the same model or adapter, a:"),
        ("[models.a]\nflags='--lora-modules b=/x'\n[models.b]", "the same model or adapter, b:"),
        ("[models.'x/y']\n[models.'x-y']", "the same table, x-y:"),
        ("metrics-port = 9000\n[models.a]\n[models.b]", "the same --metrics-port, 9000:"),
        ("arena-size = '100TiB'\n[models.a]", "the arena needs"),
    ],
)
def test_models_that_exclude_each_other_are_refused(load, text, message):
    with pytest.raises(StartupFailed, match=message):
        model_groups.check_groups(load(text)[1], [], {})


def test_each_model_has_processes_of_its_own(specs):
    parts = specs(TWO)
    assert list(parts) == [
        "vision warm process", "vision store", "vision worker 0", "vision worker 1", "vision gateway",
        "org-text warm process", "org-text store", "org-text worker 0", "org-text gateway 0", "org-text gateway 1",
        "name router",
    ]  # fmt: skip
    assert parts["vision store"].after == "vision warm process"
    assert parts["vision worker 1"].environ["OMP_NUM_THREADS"] == "2"  # three engines on seven cores
    assert parts["org-text worker 0"].environ["OMP_NUM_THREADS"] == "2"
    assert parts["org-text store"].environ["MEDIALANE_PREPARERS"] == "3"


def test_router_has_keys_and_knows_where_gateways_listen(specs, tmp_path):
    parts = specs(TWO)
    router = parts["name router"]
    assert router.environ["VLLM_API_KEY"] == "key"
    assert "HF_TOKEN" not in router.environ
    vision, text = json.loads((tmp_path / "run" / "models.json").read_bytes())
    assert vision["names"] == ["vision"]
    assert vision["adapters"] == ["cats", "dogs"]
    assert text["names"] == ["text", "words"]
    sockets = [part.argv[part.argv.index("--http-socket") + 1] for name, part in parts.items() if " gateway" in name]
    assert [*vision["sockets"], *text["sockets"]] == sockets
    assert len(set(sockets)) == 3


def test_router_stops_after_the_gateways_and_terminates_tls(specs):
    parts = specs(TWO, vllm_args=["--ssl-keyfile", "k", "--ssl-certfile", "c", "--enforce-eager"])
    assert parts["name router"].layer < parts["vision gateway"].layer
    assert "--ssl-keyfile" in parts["name router"].argv
    assert parts["name router"].ready.url.startswith("https://")
    assert "--ssl-keyfile" not in parts["vision gateway"].argv
    assert "--enforce-eager" in parts["vision gateway"].argv


def test_models_get_different_gpus(specs):
    parts = specs(TWO, hardware=Hardware(("0", "1", "2", "3"), 8))
    engines = [visible(part) for name, part in parts.items() if " worker" in name]
    assert engines == ["0", "1", "2"]


def test_named_gpus_are_left_to_their_model(specs):
    text = "[models.a]\n[models.b]\ngpus = [0]\n[models.c]\ngpus = '0'"
    parts = specs(text, hardware=Hardware(("0", "1"), 8))
    assert [visible(part) for name, part in parts.items() if " worker" in name] == ["1", "0", "0"]


def test_too_few_gpus_are_reported_by_model(specs):
    with pytest.raises(StartupFailed, match=r"the models need 3 GPUs \(vision 2, org/text 1\), 2 are free"):
        specs(TWO, hardware=Hardware(("0", "1"), 8))
