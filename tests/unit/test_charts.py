"""The Helm chart, what is rendered from it, and the images: by the schemas of Kubernetes, Helm, hadolint and systemd.

Each command is parsed by our parser.
"""

import configparser
import importlib
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

import metric_reference
from medialane import __version__
from medialane.cli import COMMANDS, parse_words, serve
from medialane.cli.settings import given_settings
from medialane.cluster import model_groups
from medialane.config import load_config, load_models
from medialane.wire import RpcConfig, Security, parse_named, parse_tcp

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "medialane"
DOCKER = DEPLOY / "docker"
SYSTEMD = DEPLOY / "systemd"
UNITS = sorted(SYSTEMD.glob("*.service"))
#: The oldest Kubernetes release that is still maintained, and the newest one.
RELEASES = ("1.33", "1.36")
#: Defined by operators: no schema is at hand.
CUSTOM = {"PodMonitor", "PrometheusRule", "ScaledObject", "ServiceMonitor"}
_SECRET = "0123456789abcdef" * 2
_EVERYTHING = """
model: {hubTokenSecret: hub}
mediaFlags: [--media-max-items=8, --allow-media-domain=example.org]
drainTimeoutSeconds: 30
gateway:
  workers: 2
  encoders: 1
  preStopSeconds: 7
  flags: [--access-log]
  apiKeysSecret: keys
  adminKeySecret: admin
  metricsKeySecret: metrics
  tolerations: [{key: gpu, operator: Exists}]
  topologySpreadConstraints:
    - {maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: ScheduleAnyway}
workers: {perPod: 2, nodeSelector: {pool: gpu}, flags: [--log-format=json], affinity: {nodeAffinity: {}}}
autoscaling: {kind: KIND, workers: {enabled: true}, gateways: {enabled: true}}
monitoring: {enabled: true, labels: {release: prometheus}}
dashboards: {enabled: true}
networkPolicy:
  clients: [{namespaceSelector: {}}]
  scrapers: [{namespaceSelector: {matchLabels: {name: monitoring}}}]
image: {pullSecrets: [{name: registry}], tag: "1"}
priorityClassName: high
podLabels: {team: vision}
podAnnotations: {note: "1"}
"""


@cache
def script():
    spec = importlib.util.spec_from_file_location("render_manifests", DEPLOY / "kubernetes" / "render.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def program(name):
    """A program of `make programs`, which only test-all installs."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.prefix) / "bin"))
    if found is None:
        pytest.skip(f"NOT TESTED: {name} is not installed (make programs)")
    return found


@cache
def everything(kind):
    text = _EVERYTHING.replace("KIND", kind)
    done = subprocess.run(
        [program("helm"), "template", "site", str(CHART), "--namespace", "vision", "--values", "-"],
        input=text, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.safe_load_all(done.stdout) if found]


@pytest.fixture(params=["manifests", "keda", "hpa"])
def objects(request):
    """The manifests of deploy/kubernetes, and the chart with everything turned on."""
    if request.param != "manifests":
        return everything(request.param)
    paths = [path for path in (DEPLOY / "kubernetes").rglob("*.yaml") if path.name != "kustomization.yaml"]
    return [found for path in sorted(paths) for found in yaml.safe_load_all(path.read_text())]


def of_kind(objects, *kinds):
    return {found["metadata"]["name"]: found for found in objects if found["kind"] in kinds}


def pods(objects):
    """Pods by their component, with the number of their deployment's processes."""
    found = of_kind(objects, "Deployment").values()
    return {each["metadata"]["labels"]["app.kubernetes.io/component"]: each["spec"]["template"] for each in found}


def containers(objects):
    return {
        (component, container["name"]): container
        for component, pod in pods(objects).items()
        for container in pod["spec"]["containers"]
    }


def parse(words, tmp_path):
    """Parse a command line with its settings; files of keys exist only where the command runs."""
    secret = tmp_path / "secret"
    secret.write_text(_SECRET)
    secret.chmod(0o600)
    in_their_place = {"$(POD_IP)": "10.0.0.9", "$(POD_NAME)": "pod"}
    parsed = []
    for word in words:
        word = re.sub(r"^(--[a-z]+-(?:secret|key)-file=)(?:/etc/medialane|%d).*", rf"\g<1>{secret}", word)
        for name, value in in_their_place.items():
            word = word.replace(name, value)
        parsed.append(word)
    name, *rest = parsed
    module = importlib.import_module(f"medialane.cli.{COMMANDS[name].module}")
    args = parse_words(name, COMMANDS[name], module.add_arguments, rest)
    return args, load_config(given_settings(args), sections=module.SECTIONS, environ={})


def test_manifests_and_units_are_those_of_the_chart():
    program("helm")
    for path, text in script().files():
        assert path.read_text() == text, "run `python deploy/kubernetes/render.py`"
    folder = DEPLOY / "kubernetes"
    listed = set(yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"])
    listed |= {
        f"monitoring/{name}"
        for name in yaml.safe_load((folder / "monitoring" / "kustomization.yaml").read_text())["resources"]
    }
    assert listed == set(script().MANIFESTS)
    assert {path.name for path in UNITS} == set(script().UNITS)


@pytest.mark.parametrize("release", RELEASES)
def test_objects_match_the_schemas_of_kubernetes(objects, release):
    for found in objects:
        if found["kind"] not in CUSTOM:
            kubernetes_validate.validate(found, release, strict=True)


def test_schemas_reject_an_unknown_field():
    (found,) = yaml.safe_load_all((DEPLOY / "kubernetes" / "gateway.yaml").read_text())
    found["spec"]["template"]["spec"]["containers"][0]["prots"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(found, RELEASES[-1], strict=True)


def test_chart_passes_helms_own_rules():
    lint = [program("helm"), "lint", "--strict", "--quiet", str(CHART)]
    done = subprocess.run(lint, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__


def notes(*values):
    """What Helm shows once the chart is installed."""
    settings = [word for value in values for word in ("--set", value)]
    words = [program("helm"), "install", "site", str(CHART), "--dry-run=client", "--namespace", "vision", *settings]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:")[2]


def test_service_with_our_name_sets_no_variables_of_pods(objects):
    """MEDIALANE_PORT=tcp://... would be read as a setting, and the others are none."""
    assert all(pod["spec"]["enableServiceLinks"] is False for pod in pods(objects).values())


def test_notes_say_which_keys_are_missing():
    api, admin = "gateway.apiKeysSecret=keys", "gateway.adminKeySecret=admin"
    assert "WARNING: NO API KEY IS SET (gateway.apiKeysSecret, gateway.createApiKey)" in notes()
    assert "drain workers" in notes()
    assert "drain workers" not in notes(admin)
    assert "WARNING" in notes(admin)
    assert "WARNING" not in notes(api)
    assert "WARNING" not in notes("gateway.createApiKey=true")
    assert "No admin key is set" in notes(api)
    assert "key is set" not in notes(api, admin)


def rendered(*words):
    done = subprocess.run(
        [program("helm"), "template", "site", str(CHART), *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.safe_load_all(done.stdout) if found]


@pytest.mark.parametrize(
    ("file", "asked"), [("values.yaml", "4 GPUs, 30 CPUs and 176 GiB"), ("small.yaml", "1 GPU, 5 CPUs and 26 GiB")]
)
def test_values_say_what_their_pods_ask_for(file, asked):
    objects = rendered("--values", str(CHART / file))
    gpus = cpus = memory = 0
    for deployment in of_kind(objects, "Deployment").values():
        for container in deployment["spec"]["template"]["spec"]["containers"]:
            replicas, resources = deployment["spec"]["replicas"], container["resources"]
            gpus += replicas * int(resources["limits"].get("nvidia.com/gpu", 0))
            cpus += replicas * int(resources["requests"]["cpu"])
            memory += replicas * int(resources["requests"]["memory"].removesuffix("Gi"))
    assert f"{gpus} GPU{'s' * (gpus > 1)}, {cpus} CPUs and {memory} GiB" == asked
    assert asked in (CHART / file).read_text()
    for found in objects:
        kubernetes_validate.validate(found, RELEASES[-1], strict=True)


def test_chart_has_a_pool_that_computes_prompts_and_one_that_generates(tmp_path):
    sets = (
        "prefill.replicas=2",
        "prefill.nodeSelector.pool=fast",
        "workers.nodeSelector.zone=a",
        "prefill.flags={--log-format=json}",
    )
    objects = rendered(*(word for each in sets for word in ("--set", each)))
    deployments = of_kind(objects, "Deployment")
    numbers = {name: each["spec"]["replicas"] for name, each in deployments.items()}
    assert numbers == {"site-gateway": 2, "site-worker": 4, "site-prefill": 2}
    policies, found, selected = of_kind(objects, "NetworkPolicy"), containers(objects), pods(objects)
    assert selected["prefill"]["spec"]["nodeSelector"] == {"pool": "fast", "zone": "a"}
    assert selected["worker"]["spec"]["nodeSelector"] == {"zone": "a"}
    for pool, role in (("worker", "decode"), ("prefill", "prefill")):
        args, config = parse(found[pool, "worker-0"]["args"], tmp_path)
        assert (args.role, config.worker.join) == (role, "site-join:7100")
        assert ("--log-format=json" in found[pool, "worker-0"]["args"]) == (pool == "prefill")
        assert selected[pool]["metadata"]["labels"]["llm-d.ai/role"] == role
        assert matches(deployments[f"site-{pool}"]["spec"]["selector"], selected) == [pool]
        assert matches(policies[f"site-{pool}"]["spec"]["podSelector"], selected) == [pool]
        peers = policies[f"site-{pool}"]["spec"]["ingress"][1]["from"]
        assert [matches(each["podSelector"], selected) for each in peers] == [["worker"], ["prefill"]]
        assert f"site-{pool}" in of_kind(objects, "PodDisruptionBudget")
    peers = policies["site-gateway"]["spec"]["ingress"][1]["from"]
    assert [matches(each["podSelector"], selected) for each in peers] == [["worker"], ["prefill"]]
    for each in objects:
        kubernetes_validate.validate(each, RELEASES[-1], strict=True)


def matches(selector, templates):
    """The components whose pods it selects."""
    wanted = selector["matchLabels"].items()
    return [name for name, pod in templates.items() if wanted <= pod["metadata"]["labels"].items()]


def test_chart_makes_an_api_key_on_request():
    objects = rendered("--set", "gateway.createApiKey=true")
    (secret,) = [each for name, each in of_kind(objects, "Secret").items() if name.endswith("api-keys")]
    assert len(secret["stringData"]["api-keys"]) == 48
    env = {each["name"]: each for each in containers(objects)["gateway", "gateway"]["env"]}
    reference = {"secretKeyRef": {"name": secret["metadata"]["name"], "key": "api-keys"}}
    assert env["MEDIALANE_API_KEYS"]["valueFrom"] == reference
    (pod,) = of_kind(objects, "Pod").values()
    assert pod["spec"]["containers"][0]["env"] == [{"name": "MEDIALANE_API_KEYS", "valueFrom": reference}], "helm test"


@pytest.mark.parametrize(
    "value",
    ["gateway.replica=2", "workers.perPod=0", "autoscaling.kind=vpa", "model.flags={--a b}", "rpc.secretName=1"],
)
def test_chart_refuses_values_that_it_does_not_know(value):
    program("helm")
    with pytest.raises(ValueError, match=re.escape(value.partition("=")[0].rpartition(".")[2])):
        script().template("--set", value)


def test_each_value_has_a_schema_and_each_schema_a_value():
    def same(values, schema):
        if not isinstance(values, dict) or "properties" not in schema:
            return
        assert set(schema["properties"]) - {"global"} == set(values)
        for name, value in values.items():
            same(value, schema["properties"][name])

    same(
        yaml.safe_load((CHART / "values.yaml").read_text()),
        yaml.safe_load((CHART / "values.schema.json").read_text()),
    )


def test_commands_of_the_containers_are_ours(objects, tmp_path):
    for (_, name), container in containers(objects).items():
        assert "command" not in container, "the image's ENTRYPOINT is medialane"
        args, config = parse(container["args"], tmp_path)
        assert args.vllm_args[0] == "--max-model-len=16384"
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
        expected = {
            "http": config.server.port,
            "join": parse_tcp(config.gateway.join_listen or "x:7100").port,
            "peer": parse_tcp(config.store.peer_listen or "x:7200").port,
            **{port: config.worker.metrics_port for port in ports if port.startswith("metrics-")},
        }
        assert ports == {key: expected[key] for key in ports}, name
        flags = [arg.partition("=")[0] for arg in container["args"][: container["args"].index("--")]]
        assert len(flags) - flags.count("--worker") == len(set(flags) - {"--worker"}), "a flag is given twice"


def test_probes_and_mounts_name_what_exists(objects):
    known = {name: {"/live", "/ready"} for name in ("gateway", "worker")}
    for (component, name), container in containers(objects).items():
        ports = {port["name"] for port in container.get("ports", ())}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if name == "store":
                command = " ".join(container[probe]["exec"]["command"])
                (address,) = re.findall(r"medialane status --store (\S+?)(?:;|$)", command)
                assert f"--listen={address}" in container["args"]
            else:
                get = container[probe]["httpGet"]
                assert get["port"] in ports
                assert get["path"] in known[container["args"][0]]
        volumes = {volume["name"]: volume for volume in pods(objects)[component]["spec"]["volumes"]}
        mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert mounted["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        for path in {"/etc/medialane", "/etc/medialane-admin", "/etc/medialane-metrics"} & set(mounted):
            assert not mounted[path]["secret"]["defaultMode"] & 0o007, "we refuse a file that all may read"
        for file in re.findall(r"=(/etc/medialane\S*?)/[\w.-]+(?:\s|$)", " ".join(container["args"])):
            assert file in mounted


def test_arena_fits_into_the_memory_of_its_pod(objects, tmp_path):
    for (component, name), container in containers(objects).items():
        if name == "store":
            _, config = parse(container["args"], tmp_path)
            (shm,) = [each for each in pods(objects)[component]["spec"]["volumes"] if each["name"] == "shm"]
            assert config.arena.size_bytes < int(shm["emptyDir"]["sizeLimit"].removesuffix("Gi")) << 30


def test_store_and_its_clients_have_the_same_settings_of_media(objects):
    def settings(container):
        return {arg for arg in container["args"] if arg.startswith(("--media-", "--allow-media-"))}

    found = containers(objects)
    assert settings(found["gateway", "store"]) == settings(found["gateway", "gateway"])


def test_media_are_copied_from_the_gateways_stores_to_the_workers(objects, tmp_path):
    found = {key: parse(container["args"], tmp_path) for key, container in containers(objects).items()}
    assert found["gateway", "store"][1].store.peer_listen == "10.0.0.9:7200"
    worker, _ = found["worker", "worker-0"]
    of_worker, settings = found["worker", "store"]
    assert worker.store == of_worker.listen == "unix:/run/medialane/store.sock"
    assert (settings.gateway.stage, settings.prepare.num_preparers) == ("url", 1)
    for pod in pods(objects).values():
        assert pod["spec"]["shareProcessNamespace"] is True


def _named(text):
    return parse_named(text, "--worker")


def test_gateway_connects_to_the_engines_of_its_pod(objects, tmp_path):
    found = containers(objects)
    gateway, _ = parse(found["gateway", "gateway"]["args"], tmp_path)
    engines = {}
    for (component, name), container in found.items():
        if component == "gateway" and container["args"][0] == "worker":
            args, config = parse(container["args"], tmp_path)
            engines[f"{config.worker.name}={args.listen}"] = args.role
            assert args.role in name
    assert sorted(map(_named, gateway.workers)) == sorted(map(_named, engines))


def test_workers_find_gateways_that_are_not_ready_yet(objects):
    services = of_kind(objects, "Service")
    args = containers(objects)["worker", "worker-0"]["args"]
    (join,) = [arg.partition("=")[2] for arg in args if arg.startswith("--join=")]
    name, port = join.split(":")
    assert services[name]["spec"]["clusterIP"] == "None"
    assert services[name]["spec"]["publishNotReadyAddresses"] is True
    assert services[name]["spec"]["ports"][0]["port"] == int(port)
    labels = {component: pod["metadata"]["labels"] for component, pod in pods(objects).items()}
    for service in services.values():
        assert service["spec"]["selector"].items() <= labels["gateway"].items()
        assert not service["spec"]["selector"].items() <= labels["worker"].items()


def test_pods_have_the_labels_of_llm_d_and_aibrix(objects):
    labels = {component: pod["metadata"]["labels"] for component, pod in pods(objects).items()}
    gateway, worker = labels["gateway"], labels["worker"]
    assert gateway["llm-d.ai/inference-serving"] == gateway["llm-d.ai/inferenceServing"] == "true"
    assert gateway["model.aibrix.ai/name"] == gateway["llm-d.ai/model"] == worker["llm-d.ai/model"]
    assert gateway["model.aibrix.ai/port"] == "8000"
    assert worker["model.aibrix.ai/metric-port"] == "8001"


def test_pods_live_until_their_processes_have_drained(objects, tmp_path):
    """The table of docs/deployment.md, with the hooks that keep a store for pods that drain beside it."""
    found = containers(objects)

    def hook(container):
        return int(container.get("lifecycle", {}).get("preStop", {"exec": {"command": ["", 0]}})["exec"]["command"][1])

    for component, pod in pods(objects).items():
        grace = pod["spec"]["terminationGracePeriodSeconds"]
        store = found[component, "store"]
        for container in pod["spec"]["containers"]:
            _, config = parse(container["args"], tmp_path)
            drain = config.stop.drain_timeout_s
            needed = drain + 10
            if container["args"][0] == "worker":
                needed = drain + config.rpc.release_timeout_s + config.worker.stop_timeout_s + 5
            assert hook(container) + needed <= grace
            if container is not store:
                assert hook(store) >= hook(container) + drain + 2


def test_disruption_budgets_and_autoscalers_are_for_deployments_that_exist(objects):
    deployments = of_kind(objects, "Deployment")
    budgets = of_kind(objects, "PodDisruptionBudget")
    assert set(budgets) == set(deployments)
    for name, budget in budgets.items():
        labels = deployments[name]["spec"]["template"]["metadata"]["labels"]
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
    known = {metric_reference.shown_name(each) for found in metric_reference.families().values() for each in found}
    scalers = of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject")
    for name, scaler in scalers.items():
        assert scaler["spec"]["scaleTargetRef"]["name"] == name in deployments
        assert "replicas" not in deployments[name]["spec"]
        assert set(re.findall(r"medialane_\w+", str(scaler["spec"].get("metrics", scaler["spec"].get("triggers")))))
        assert set(re.findall(r"medialane_\w+_seconds", str(scaler))) <= known
    assert scalers or all("replicas" in each["spec"] for each in deployments.values())


def test_network_policies_let_in_workers_and_scrapers(objects):
    labels = {component: pod["metadata"]["labels"] for component, pod in pods(objects).items()}
    policies = of_kind(objects, "NetworkPolicy")
    assert len(policies) == len(labels)
    for name, policy in policies.items():
        component = name.rpartition("-")[2]
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels[component].items()
        named, ranges = set(), []
        for rule in policy["spec"]["ingress"]:
            ports = [port["port"] for port in rule["ports"]]
            named |= {port for port in ports if isinstance(port, str)}
            ranges += [range(p["port"], p["endPort"] + 1) for p in rule["ports"] if "endPort" in p]
            if "join" in ports:
                (peer,) = rule["from"]
                assert peer["podSelector"]["matchLabels"].items() <= labels["worker"].items()
        of_pod = [
            port for (owner, _), c in containers(objects).items() if owner == component for port in c.get("ports", ())
        ]
        assert {port["name"] for port in of_pod if not port["name"].startswith("metrics-")} == named
        metrics = [port["containerPort"] for port in of_pod if port["name"].startswith("metrics-")]
        assert all(any(port in each for each in ranges) for port in metrics)


def test_scrapers_find_each_series_once(objects):
    monitors = of_kind(objects, "ServiceMonitor", "PodMonitor").values()
    gateways, engines = sorted(monitors, key=lambda each: each["kind"], reverse=True)
    (service,) = [
        each
        for each in of_kind(objects, "Service").values()
        if gateways["spec"]["selector"]["matchLabels"].items() <= each["metadata"]["labels"].items()
    ]
    (endpoint,) = gateways["spec"]["endpoints"]
    assert endpoint["port"] == service["spec"]["ports"][0]["name"]
    assert re.fullmatch(endpoint["metricRelabelings"][0]["regex"], "vllm:num_requests_running")
    assert gateways["spec"]["jobLabel"] == engines["spec"]["jobLabel"]
    ports = {port["name"] for c in containers(objects).values() for port in c.get("ports", ())}
    scraped = {each["port"] for each in engines["spec"]["podMetricsEndpoints"]}
    assert scraped == {name for name in ports if name.startswith("metrics-")}
    (rules,) = of_kind(objects, "PrometheusRule").values()
    assert rules["spec"] == yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())


def test_dashboards_are_config_maps_that_grafana_finds():
    maps = of_kind(everything("keda"), "ConfigMap").values()
    boards = {
        path.stem: path.read_text() for path in (DEPLOY / "grafana").glob("*.json") if path.name != "metrics.json"
    }
    assert len(maps) == len(boards)
    for found in maps:
        assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
        ((name, text),) = found["data"].items()
        assert boards[name.removeprefix("medialane-").removesuffix(".json")] == text


def test_secret_and_certificate_of_the_chart_are_accepted(tmp_path):
    (found,) = of_kind(everything("keda"), "Secret").values()
    for name, text in found["stringData"].items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    files = {f"tls_{name}": str(tmp_path / f"{name}.pem") for name in ("cert", "key", "ca")}
    Security.load(RpcConfig(**files))  # connects to itself
    assert len(found["stringData"]["secret"]) >= 32
    mounted = {
        volume["secret"]["secretName"]
        for pod in pods(everything("keda")).values()
        for volume in pod["spec"]["volumes"]
        if volume["name"] == "rpc-secret"
    }
    assert mounted == {found["metadata"]["name"]}


def test_helm_test_asks_the_gateways_for_an_answer():
    objects = everything("keda")
    (pod,) = of_kind(objects, "Pod").values()
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (code,) = pod["spec"]["containers"][0]["args"]
    compile(code, "test", "exec")
    (url,) = re.findall(r'"http://([\w-]+):(\d+)"', code)
    assert of_kind(objects, "Service")[url[0]]["spec"]["ports"][0]["port"] == int(url[1])


def unit(path):
    found = configparser.ConfigParser(strict=True, interpolation=None, comment_prefixes="#")
    found.optionxform = str
    found.read_string(path.read_text())
    return found


def environment():
    lines = (SYSTEMD / "medialane.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


PARTS = [path for path in UNITS if path.name != "medialane.service"]


@pytest.mark.parametrize("path", PARTS, ids=lambda path: path.name)
@pytest.mark.parametrize(("gpu", "port"), [("0", 6100), ("12", 61012)])
def test_commands_of_the_units_are_ours(path, gpu, port, tmp_path):
    variables = environment()
    line = unit(path)["Service"]["ExecStart"].replace("%i", gpu).replace("%H", "host")
    words = []
    for word in shlex.split(line):
        if word.startswith("$") and not word.startswith("${"):
            words += variables[word[1:]].split()  # as systemd does
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda found: variables[found[1]], word))
    assert words[0].endswith("/medialane")
    args, config = parse(words[1:], tmp_path)
    assert args.model == variables["MODEL"]
    assert args.vllm_args == variables["MODEL_FLAGS"].split()
    if path.name.startswith("medialane-worker"):
        assert (config.worker.join, config.worker.metrics_port) == (variables["GATEWAYS"], port)
    if path.name == "medialane-gateway.service":
        assert (config.server.host, config.gateway.require_api_key) == ("0.0.0.0", True)


def test_unit_of_one_host_serves_a_model_of_its_file_for_whoever_has_a_key(tmp_path):
    service = unit(SYSTEMD / "medialane.service")["Service"]
    assert service["ExecStart"] == "/opt/medialane/bin/medialane serve --config=/etc/medialane/serve.toml"
    (tmp_path / "admin-key").write_text(_SECRET)
    (tmp_path / "admin-key").chmod(0o600)
    file = tmp_path / "serve.toml"
    file.write_text((SYSTEMD / "serve.toml").read_text().replace("/etc/medialane", str(tmp_path)))
    config, (table,) = load_models(file=str(file), environ={}, sections=serve.SECTIONS, rules=model_groups.TABLES)
    assert config.gateway.require_api_key
    group = model_groups.group_of(table, ())
    assert group.model == environment()["MODEL"]
    assert list(group.vllm_args)[:2] == environment()["MODEL_FLAGS"].split()
    assert int(service["TimeoutStopSec"]) >= 3 * config.stop.drain_timeout_s + 60
    assert service["LogsDirectory"] == Path(config.cluster.log_dir).name


@pytest.mark.parametrize(("name", "most"), [("gateway", 3.0), ("store", 3.0), ("worker@", 4.0), ("", 4.0)])
def test_units_expose_little(name, most, tmp_path):
    """By `systemd-analyze security`; what needs a GPU has all devices and system calls."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("NOT TESTED: systemd-analyze is not installed")
    path = SYSTEMD / f"medialane-{name}.service".replace("-.", ".")
    file = tmp_path / path.name.replace("@.", "@0.")
    file.write_text(path.read_text())
    words = [
        "systemd-analyze",
        "security",
        "--offline=true",
        "--no-pager",
        f"--threshold={round(most * 10)}",
        str(file),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout.splitlines()[-1]


def test_preparers_of_units_with_a_system_call_filter_may_use_landlock():
    """Some releases of systemd have no group with these calls."""
    filters = [words.split() for path in UNITS if (words := unit(path)["Service"].get("SystemCallFilter"))]
    assert filters
    for words in filters:
        assert {"landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"} <= set(words)


def test_units_share_a_store_that_outlives_a_worker():
    units = {path.name: unit(path)["Service"] for path in UNITS}
    assert "--peer-listen=${ADDRESS}:7200" in units["medialane-store.service"]["ExecStart"]
    workers = units["medialane-worker@.service"]
    assert {"--store=unix:/run/medialane/store.sock", "--start-store"} <= set(workers["ExecStart"].split())
    assert workers["RuntimeDirectoryPreserve"] == "yes"


def test_settings_of_the_environment_file_are_ours():
    names = {name: value for name, value in environment().items() if name.startswith("MEDIALANE_")}
    config = load_config({}, environ=names, sections=("rpc",))
    assert config.arena.size_bytes == 4 << 30
    assert config.rpc.tls_cert == "/etc/medialane/tls/cert.pem"


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


RECIPE = (DOCKER / "Dockerfile").read_text()


def test_dockerfile_passes_hadolint():
    lint = [program("hadolint"), "--no-color", str(DOCKER / "Dockerfile")]
    done = subprocess.run(lint, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_images_have_the_vllm_and_torch_that_are_tested():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (version,) = re.findall(r"^ARG VLLM_VERSION=(\S+)$", RECIPE, re.MULTILINE)
    assert f"vllm=={version}" in extras["vllm"]
    (torch,) = set(re.findall(r"(torch==[\d.]+)\+cpu", RECIPE))
    assert torch in extras["cpu"]
    assert f"unhashed-cpu := {torch}+cpu" in (ROOT / "Makefile").read_text()
    assert f"medialane:{__version__} " in RECIPE


@pytest.mark.parametrize("stage", ["cpu", "gpu"])
def test_images_run_medialane_without_root_and_have_a_health_check(stage):
    (body,) = re.findall(rf"^FROM \S+ AS {stage}$(.*?)(?=^FROM|\Z)", RECIPE, re.MULTILINE | re.DOTALL)
    assert 'ENTRYPOINT ["medialane"]' in body
    assert "STOPSIGNAL SIGTERM" in body
    assert "HEALTHCHECK" in body
    (user,) = re.findall(r"^USER (\d+):\1$", body, re.MULTILINE)
    assert f"--uid {user} " in body
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values["podSecurityContext"]["runAsUser"] == int(user)


def test_images_copy_only_what_exists_and_is_in_the_build():
    kept = re.findall(r"^!(\S+)$", (DOCKER / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", RECIPE, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists()
            assert {source, source.split("/")[0]} & set(kept)


def test_image_for_gpus_leaves_out_what_vllms_image_has():
    """The patterns of the Dockerfile, applied to the lock files by sed."""
    delete, build = (re.search(rf"sed {flag} '([^']+)'", RECIPE)[1].replace(r"\\", "\\") for flag in ("-E", "-nE"))

    def packages(flag, pattern, lock):
        done = subprocess.run(["sed", flag, pattern, str(ROOT / "requirements" / lock)], capture_output=True, text=True)
        return set(re.findall(r"^([a-z0-9-]+)==", done.stdout, re.MULTILINE)), done.stdout

    rest, text = packages("-E", delete, "vllm.txt")
    assert {"av", "aiohttp", "transformers", "simplejpeg"} <= rest
    assert not {"torch", "torchvision", "vllm", "triton", "nvidia-nccl-cu13", "flashinfer-python"} & rest
    assert not re.search(r"^--hash|^\s*\n", text, re.MULTILINE)
    found, _ = packages("-nE", build, "cpu.txt")
    assert found == {"hatchling", "packaging", "pathspec", "pluggy", "trove-classifiers"}


class _Compose(yaml.SafeLoader):
    """Compose's own tag takes away what another file has set."""


_Compose.add_constructor("!reset", lambda _loader, _node: None)


def compose(name):
    return yaml.load((DOCKER / name).read_text(), _Compose)


def test_commands_of_compose_are_ours(tmp_path):
    services = compose("compose.yaml")["services"]
    found = {}
    for name, service in services.items():
        if "command" in service:
            words = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in service["command"]]
            found[name], _ = parse(words, tmp_path)
    assert set(found) == {"store", "gateway", "worker-0", "worker-1"}
    assert len({(args.model, *args.vllm_args) for args in found.values()}) == 1
    assert found["gateway"].workers == [f"{name}={found[name].listen}" for name in ("worker-0", "worker-1")]
    assert {found[name].store for name in ("gateway", "worker-0", "worker-1")} == {found["store"].listen}


def test_services_of_compose_are_one_host():
    services = compose("compose.yaml")["services"]
    for name in ("store", "gateway", "worker-0", "worker-1"):
        assert services[name]["ipc"] == services[name]["pid"] == "service:host"
        assert "run:/run/medialane" in services[name]["volumes"]
    assert (services["host"]["ipc"], services["host"]["init"]) == ("shareable", True)
    assert set(compose("compose.cpu.yaml")["services"]) == {"host", "store", "gateway", "worker-0", "worker-1"}
    for path in (volume.split(":")[0] for each in services.values() for volume in each.get("volumes", ())):
        assert not path.startswith("..") or (DOCKER / path).exists()


def test_prometheus_and_grafana_of_compose_find_the_gateway(tmp_path):
    found = compose("compose.yaml")
    configs = {name: yaml.safe_load(each["content"]) for name, each in found["configs"].items()}
    (job,) = configs["prometheus"]["scrape_configs"]
    assert (job["job_name"], job["static_configs"][0]["targets"]) == ("medialane", ["gateway:8000"])
    (source,) = configs["grafana-source"]["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = configs["grafana-boards"]["providers"]
    assert f"../grafana:{provider['options']['path']}:ro" in found["services"]["grafana"]["volumes"]
    configs["prometheus"]["rule_files"] = [str(DEPLOY / "prometheus" / "alerts.yaml")]
    path = tmp_path / "prometheus.yml"
    path.write_text(yaml.safe_dump(configs["prometheus"]))
    check = [program("promtool"), "check", "config", str(path)]
    done = subprocess.run(check, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
