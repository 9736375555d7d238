"""The examples: Kubernetes objects by their schemas, systemd units by systemd, commands and settings by our parser."""

import configparser
import importlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import msgspec
import pytest
import trustme
import yaml

from certificates import tls_settings
from medialane.cli.flags import given_settings
from medialane.cli.main import COMMANDS, parse_words
from medialane.cluster.local import check_join, check_join_listen
from medialane.cluster.ray import remote_workers
from medialane.cluster.ray.remote_workers import Nodes, with_join_addresses, worker_specs
from medialane.config import load_config
from medialane.wire.address import parse_tcp

EXAMPLES = Path(__file__).parents[2] / "examples"
MANIFESTS = sorted((EXAMPLES / "kubernetes").glob("*.yaml"))
UNITS = sorted((EXAMPLES / "systemd").glob("*.service"))
#: The oldest Kubernetes release that is still maintained, and the newest one.
RELEASES = ("1.33", "1.36")
_SECRET = "0123456789abcdef" * 2


def objects(path):
    return [found for found in yaml.safe_load_all(path.read_text()) if found]


def deployments():
    return [found for path in MANIFESTS for found in objects(path) if found["kind"] == "Deployment"]


def containers():
    return {
        container["name"] + " of " + found["metadata"]["name"]: container
        for found in deployments()
        for container in found["spec"]["template"]["spec"]["containers"]
    }


def parse(words, tmp_path):
    """Parse a command line with its settings; the secret's file exists only where the example runs."""
    secret = tmp_path / "secret"
    secret.write_text(_SECRET)
    secret.chmod(0o600)
    words = [re.sub(r"^(--rpc-secret-file=)?(/etc/medialane/secret|%d).*", rf"\g<1>{secret}", word) for word in words]
    name, *rest = [word.replace("$(POD_IP)", "10.0.0.9") for word in words]
    module = importlib.import_module(f"medialane.cli.{COMMANDS[name].module}")
    args = parse_words(name, COMMANDS[name], module.add_arguments, rest)
    return args, load_config(given_settings(args), sections=module.SECTIONS, environ={})


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_match_the_schemas_of_kubernetes(path, release):
    for found in objects(path):
        kubernetes_validate.validate(found, release, strict=True)


def test_schemas_reject_an_unknown_field():
    found = objects(MANIFESTS[0])[0]
    found["spec"]["prots"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(found, RELEASES[-1], strict=True)


@pytest.mark.parametrize("name", containers())
def test_commands_of_the_containers_are_ours(name, tmp_path):
    container = containers()[name]
    program, *words = [*container["command"], *container["args"]]
    assert program == "medialane"
    args, config = parse(words, tmp_path)
    assert args.vllm_args
    ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
    expected = {
        "http": config.server.port,
        "join": parse_tcp(config.gateway.join_listen or "x:7100").port,
        "metrics": config.worker.metrics_port,
        "peer": parse_tcp(config.store.peer_listen or "x:7200").port,
    }
    assert ports == {key: expected[key] for key in ports}


@pytest.mark.parametrize("name", containers())
def test_probes_and_mounts_name_what_exists(name):
    container = containers()[name]
    ports = {port["name"] for port in container.get("ports", ())}
    known = {"gateway": {"/version", "/health"}, "worker": {"/health", "/ready"}}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        if container["name"] == "store":
            command = " ".join(container[probe]["exec"]["command"])
            (address,) = re.findall(r"medialane status --store (\S+?)(?:;|$)", command)
            assert f"--listen={address}" in container["args"]
        else:
            get = container[probe]["httpGet"]
            assert get["port"] in ports
            assert get["path"] in known[container["name"]]
    (pod,) = [
        found["spec"]["template"]["spec"]
        for found in deployments()
        if container in found["spec"]["template"]["spec"]["containers"]
    ]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounted["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    if "/etc/medialane" in mounted:
        assert not mounted["/etc/medialane"]["secret"]["defaultMode"] & 0o007, "we refuse a file that all may read"


def test_media_are_copied_from_store_to_store(tmp_path):
    """A gateway's store lets others copy, every worker has one, and the units' shared folder outlives a worker."""
    found = {name: parse([*c["command"][1:], *c["args"]], tmp_path) for name, c in containers().items()}
    gateway_store, worker_store = (found[f"store of medialane-{kind}"] for kind in ("gateway", "worker"))
    assert gateway_store[1].store.peer_listen == "10.0.0.9:7200"
    worker, _ = found["worker of medialane-worker"]
    assert worker.store == worker_store[0].listen == "unix:/run/medialane/store.sock"
    assert (worker_store[1].gateway.stage, worker_store[1].prepare.num_preparers) == ("url", 1)
    units = {path.name: unit(path)["Service"] for path in UNITS}
    assert "--peer-listen ${ADDRESS}:7200" in units["medialane-store.service"]["ExecStart"]
    workers = units["medialane-worker@.service"]
    assert "--store unix:/run/medialane/store.sock --start-store" in workers["ExecStart"]
    assert workers["RuntimeDirectoryPreserve"] == "yes"


@pytest.mark.parametrize("name", containers())
def test_no_flag_is_given_twice(name):
    flags = [arg.partition("=")[0] for arg in containers()[name]["args"]]
    assert len(flags) == len(set(flags))


def test_image_is_the_one_that_the_dockerfile_makes():
    recipe = EXAMPLES / "kubernetes" / "Dockerfile"
    (built,) = re.findall(r"docker build -t (\S+) -f examples/kubernetes/Dockerfile \.", recipe.read_text())
    assert f"docker build -t {built} -f examples/kubernetes/Dockerfile ." in (recipe.parent / "README.md").read_text()
    assert {container["image"] for container in containers().values()} == {built}
    for sources in re.findall(r"^COPY (.*) \S+$", recipe.read_text(), re.MULTILINE):
        assert all((EXAMPLES.parent / source).exists() for source in sources.split())
    assert all(f"-r {name}" in recipe.read_text() for name in re.findall(r"requirements/\w+\.txt", recipe.read_text()))


PAGES = [*EXAMPLES.rglob("*.md"), *(EXAMPLES.parent / "docs").glob("*.md")]


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


def test_workers_find_gateways_that_are_not_ready_yet():
    services = {
        found["metadata"]["name"]: found for path in MANIFESTS for found in objects(path) if found["kind"] == "Service"
    }
    (worker,) = [container for name, container in containers().items() if name.startswith("worker")]
    (join,) = [arg.partition("=")[2] for arg in worker["args"] if arg.startswith("--join=")]
    name, port = join.split(":")
    assert services[name]["spec"]["clusterIP"] == "None"
    assert services[name]["spec"]["publishNotReadyAddresses"] is True
    assert services[name]["spec"]["ports"][0]["port"] == int(port)
    labels = {found["metadata"]["name"]: found["spec"]["template"]["metadata"]["labels"] for found in deployments()}
    for service in services.values():
        assert service["spec"]["selector"].items() <= labels["medialane-gateway"].items()
        assert not service["spec"]["selector"].items() <= labels["medialane-worker"].items()


def test_media_are_copied_to_the_workers_from_the_gateways_store():
    store, worker = (containers()[name] for name in ("store of medialane-gateway", "worker of medialane-worker"))
    assert "--peer-listen=$(POD_IP):7200" in store["args"]
    (address,) = [entry for entry in store["env"] if entry["name"] == "POD_IP"]
    assert address["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert "--store=unix:/run/medialane/store.sock" in worker["args"]
    assert "/run/medialane" in {mount["mountPath"] for mount in worker["volumeMounts"]}


def test_pods_have_the_labels_of_llm_d_and_aibrix():
    labels = {found["metadata"]["name"]: found["spec"]["template"]["metadata"]["labels"] for found in deployments()}
    gateway, worker = labels["medialane-gateway"], labels["medialane-worker"]
    assert gateway["llm-d.ai/inference-serving"] == gateway["llm-d.ai/inferenceServing"] == "true"
    assert gateway["model.aibrix.ai/name"] == gateway["llm-d.ai/model"] == worker["llm-d.ai/model"]
    assert gateway["model.aibrix.ai/port"] == "8000"
    assert worker["model.aibrix.ai/metric-port"] == "8001"


def unit(path):
    found = configparser.ConfigParser(strict=True, interpolation=None, comment_prefixes="#")
    found.optionxform = str
    found.read_string(path.read_text())
    return found


def environment():
    lines = (EXAMPLES / "systemd" / "medialane.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_commands_of_the_units_are_ours(path, tmp_path):
    variables = environment()
    line = unit(path)["Service"]["ExecStart"].replace("%i", "0").replace("%H", "host")
    words = []
    for word in shlex.split(line):
        if word.startswith("$") and not word.startswith("${"):
            words += variables[word[1:]].split()  # as systemd does
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda found: variables[found[1]], word))
    assert words[0].endswith("/medialane")
    args, config = parse(words[1:], tmp_path)
    assert args.model == variables["MODEL"]
    assert args.vllm_args == variables["VLLM_FLAGS"].split()
    if path.name.startswith("medialane-worker"):
        assert (config.worker.join, config.worker.metrics_port) == (variables["GATEWAYS"], 8100)


def test_settings_of_the_environment_file_are_ours():
    names = {name: value for name, value in environment().items() if name.startswith("MEDIALANE_")}
    config = load_config({}, environ=names, sections=("rpc",))
    assert config.arena.size_bytes == 4 << 30
    assert config.rpc.tls_cert == "/etc/medialane/tls/cert.pem"


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


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_units_are_accepted_by_systemd(tmp_path):
    for path in UNITS:
        text = path.read_text().replace("/opt/medialane/bin/medialane", sys.executable)
        (tmp_path / path.name.replace("@.", "@0.")).write_text(text)
    files = sorted(str(path) for path in tmp_path.glob("*.service"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *files], capture_output=True, text=True, timeout=60, check=False
    )
    complaints = [line for line in done.stderr.splitlines() if "medialane" in line]
    assert complaints == []
