"""The examples: commands and settings by our parser, and what their pages say to type."""

import importlib
import re
import shlex
from pathlib import Path

import msgspec
import pytest
import trustme

from certificates import tls_settings
from medialane.cli.main import COMMANDS, parse_words
from medialane.cluster import model_groups
from medialane.cluster.local import check_join, check_join_listen
from medialane.cluster.placement import Hardware
from medialane.cluster.ray import remote_workers
from medialane.cluster.ray.remote_workers import Nodes, with_join_addresses, worker_specs
from medialane.config import load_config, load_models

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
_SECRET = "0123456789abcdef" * 2

PAGES = [page for folder in ("examples", "deploy", "docs") for page in (ROOT / folder).rglob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_folders_are_made_before_files_are_installed_into_them(page):
    made = set()
    for line in page.read_text().splitlines():
        if line.startswith(("mkdir -p ", "install -D ")):
            target = Path(re.search(r" (/(?!dev/)\S+)", line)[1])
            made |= {target, target.parent}
        if line.startswith("install -m") and "/systemd/system" not in line:  # with -D, install makes the folder
            target = re.search(r" (/(?!dev/)\S+)", line)[1]
            assert {Path(target), Path(target).parent} & made, line


def test_models_of_the_example_are_placed_on_four_gpus():
    _, tables = load_models(
        file=str(EXAMPLES / "models" / "models.toml"),
        environ={},
        sections=("cluster",),
        own=model_groups.OWN_MEMBERS,
        is_shared=model_groups.is_shared,
    )
    groups = [model_groups.group_of(table, ()) for table in tables]
    assert [group.served_names for group in groups] == [("vision",), ("Qwen/Qwen3-8B",), ("speech",), ("embed",)]
    assert model_groups.adapters(groups[1]) == ("support",)
    gpus = model_groups.split_gpus(groups, Hardware(("0", "1", "2", "3"), 16))
    assert gpus == [("0", "1"), ("2",), ("3",), ("3",)]


def test_settings_for_ray_are_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_workers, "vllm_is_for_cpu", lambda: False)
    text = (EXAMPLES / "ray" / "serve.toml").read_text()
    secret = tmp_path / "secret"
    secret.write_text(_SECRET)
    secret.chmod(0o600)
    text = text.replace("/etc/medialane/rpc-secret", str(secret))
    for name, path in tls_settings(tmp_path / "tls", trustme.CA()).items():
        text = text.replace(f"/etc/medialane/tls/{name.removeprefix('tls_')}.pem", path)
    (tmp_path / "serve.toml").write_text(text)
    config = load_config(
        file=str(tmp_path / "serve.toml"), environ={}, sections=("cluster", "gateway", "rpc", "worker")
    )
    assert config.cluster.gateway_nodes == "each"
    found = with_join_addresses(config, "10.0.0.1", ["10.0.0.2"])
    check_join(found)
    nowhere = msgspec.structs.replace(found, gateway=msgspec.structs.replace(found.gateway, join_listen="127.0.0.1:0"))
    check_join_listen(nowhere)
    nodes = Nodes("10.0.0.1", ["10.0.0.2"], "unix:/store.sock")
    specs = worker_specs(found, "m", (), nodes, has_gpus=True, folder="abc")
    assert [(spec.num_gpus, spec.num_cpus) for spec in specs] == [(1, 4)] * 4
    assert {spec.environ["MEDIALANE_JOIN"] for spec in specs} == {"10.0.0.1:7100,10.0.0.2:7100"}


def commands(path):
    lines = [line for block in re.findall(r"```\n(.*?)```", path.read_text(), re.DOTALL) for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("medialane ")]


def test_commands_for_ray_are_ours():
    parsed = []
    for _, name, *rest in commands(EXAMPLES / "ray" / "README.md"):
        module = importlib.import_module(f"medialane.cli.{COMMANDS[name].module}")
        parsed.append(parse_words(name, COMMANDS[name], module.add_arguments, rest))
    certs, serve, _status = parsed
    assert certs.hosts == ["10.0.0.1", "10.0.0.2"]
    assert serve.config == "serve.toml"
