"""`helm install` and `helm upgrade` at an API server that stores objects: from the chart and values of the last
release, or from today's before there is one."""

import base64
import io
import json
import os
import re
import subprocess
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from test_charts import CHART, ROOT, program

from medialane import __version__

#: By group and version, the resources of the chart with their kinds.
RESOURCES = {
    "v1": {"secrets": "Secret", "services": "Service", "configmaps": "ConfigMap", "pods": "Pod"},
    "apps/v1": {"deployments": "Deployment"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
}
#: What Kubernetes refuses to change of an object that exists.
IMMUTABLE = {"Deployment": "selector", "Service": "clusterIP"}
NAMESPACE = "vision"


def discovered(path):
    if path == "/version":
        return {"major": "1", "minor": "36", "gitVersion": "v1.36.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = [each.split("/") for each in RESOURCES if "/" in each]
        found = [{"groupVersion": f"{name}/{version}", "version": version} for name, version in groups]
        return {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [
                {"name": name, "versions": [version], "preferredVersion": version}
                for (name, _), version in zip(groups, found, strict=True)
            ],
        }
    version = re.sub("^/apis?/", "", path)
    if version not in RESOURCES:
        return None
    verbs = ["create", "delete", "get", "list", "patch", "update"]
    resources = [
        {"name": name, "kind": kind, "singularName": kind.lower(), "namespaced": True, "verbs": verbs}
        for name, kind in RESOURCES[version].items()
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}


def fields(message):
    """Numbers and values of a protobuf message that has only integers and bytes."""

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    at = 0
    while at < len(message):
        tag = varint()
        value = varint()
        if tag & 7 == 2:
            at, value = at + value, message[at : at + value]
        yield tag >> 3, value


def secret_of_helm(body):
    """Where Helm keeps a release: the only object that it sends as protobuf (core/v1 of Kubernetes)."""
    found = {"metadata": {"labels": {}}, "data": {}}
    for number, value in fields(dict(fields(body.removeprefix(b"k8s\0")))[2]):
        if number == 1:
            for name, part in fields(value):
                if name == 1:
                    found["metadata"]["name"] = part.decode()
                if name == 11:
                    label = dict(fields(part))
                    found["metadata"]["labels"][label[1].decode()] = label[2].decode()
        if number == 2:
            entry = dict(fields(value))
            found["data"][entry[1].decode()] = base64.b64encode(entry[2]).decode()
        if number == 3:
            found["type"] = value.decode()
    return found


class Cluster:
    """Objects by kind and name. `apply` is a server-side apply of all fields."""

    def __init__(self):
        self.objects = {}
        self.changed = set()

    def apply(self, kind, found):
        if "stringData" in found:
            encoded = {name: base64.b64encode(text.encode()).decode() for name, text in found.pop("stringData").items()}
            found["data"] = found.get("data", {}) | encoded
        key = kind, found["metadata"]["name"]
        before = self.objects.get(key)
        field = IMMUTABLE.get(kind)
        if before is not None and field is not None and before["spec"].get(field) != found["spec"].get(field):
            raise ValueError(f"{kind} {key[1]}: spec.{field}: field is immutable")
        found["metadata"] |= {"namespace": NAMESPACE, "uid": "-".join(key), "resourceVersion": "1"}
        self.objects[key] = found
        self.changed.add(key)
        return found

    def listed(self, kind, selector):
        wanted = dict(each.split("=") for each in selector.split(",") if each)
        of_kind = [found for (each, _), found in self.objects.items() if each == kind]
        return [found for found in of_kind if wanted.items() <= found["metadata"].get("labels", {}).items()]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cluster: Cluster

    def log_message(self, *_):
        pass

    def answer(self, status, body):
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def refuse(self, status, reason, message):
        about = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": status}
        self.answer(status, about | {"message": message})

    def do(self):
        path, _, query = self.path.partition("?")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = secret_of_helm(body) if body.startswith(b"k8s\0") else yaml.safe_load(body)
        place = re.fullmatch(rf"/apis?/(.+)/namespaces/{NAMESPACE}/(\w+)(?:/([\w.-]+))?", path)
        if place is None:
            found = discovered(path)
            self.answer(200, found) if found else self.refuse(404, "NotFound", path)
            return
        version, resource, name = place.groups()
        kind = RESOURCES[version][resource]
        if self.command in {"POST", "PUT", "PATCH"}:
            try:
                self.answer(200, {"apiVersion": version, "kind": kind} | self.cluster.apply(kind, body))
            except ValueError as error:
                self.refuse(422, "Invalid", str(error))
        elif name is None:
            (selector,) = re.findall("labelSelector=([^&]*)", query) or [""]
            items = self.cluster.listed(kind, selector.replace("%3D", "=").replace("%2C", ","))
            self.answer(200, {"apiVersion": version, "kind": f"{kind}List", "metadata": {}, "items": items})
        elif (kind, name) not in self.cluster.objects:
            self.refuse(404, "NotFound", f'{resource} "{name}" not found')
        elif self.command == "DELETE":
            self.answer(200, self.cluster.objects.pop((kind, name)))
        else:
            self.answer(200, self.cluster.objects[kind, name])

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do  # noqa: N815 - names of http.server


@pytest.fixture
def cluster():
    found = Cluster()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"cluster": found}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_port}"
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def helm(cluster, tmp_path):
    def run(command, chart, *words):
        words = [program("helm"), command, "site", str(chart), "--namespace", NAMESPACE, "--timeout", "10s", *words]
        environ = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
        words += ["--kube-apiserver", cluster.url, "--disable-openapi-validation"]
        done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=15)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def released(folder):
    """The chart of the last release, or None."""
    git = ["git", "-C", str(ROOT)]
    tag = subprocess.run([*git, "describe", "--tags", "--abbrev=0", "--match=v*"], capture_output=True, text=True)
    if tag.returncode != 0:
        return None
    made = subprocess.run([*git, "archive", tag.stdout.strip(), "deploy/helm/medialane"], capture_output=True)
    with tarfile.open(fileobj=io.BytesIO(made.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "deploy" / "helm" / "medialane"


def secrets(cluster):
    ours = {name: found for (kind, name), found in cluster.objects.items() if kind == "Secret"}
    return {name: found["data"] for name, found in ours.items() if not name.startswith("sh.helm.")}


def test_values_of_the_last_release_are_still_accepted_and_secrets_stay(cluster, helm, tmp_path):
    before = released(tmp_path / "released") or CHART
    values = ["--values", str(before / "values.yaml"), "--set", "gateway.createApiKey=true"]
    helm("install", before, *values)
    kept = secrets(cluster)
    assert len(kept) == 2
    assert all(base64.b64decode(text) for data in kept.values() for text in data.values())
    cluster.changed.clear()
    helm("upgrade", CHART, *values)
    assert ("Deployment", "site-gateway") in cluster.changed
    assert secrets(cluster) == kept, "workers and clients have these"
    labels = cluster.objects["Deployment", "site-worker"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/version"] == __version__


def test_upgrade_with_other_values_changes_nothing_that_kubernetes_refuses(cluster, helm):
    helm("install", CHART)
    changed = ["gateway.workers=1", "workers.perPod=2", "model.servedName=other", "networkPolicy.enabled=false"]
    helm("upgrade", CHART, "--reuse-values", *(word for each in changed for word in ("--set", each)))
    args = cluster.objects["Deployment", "site-gateway"]["spec"]["template"]["spec"]["containers"][1]["args"]
    assert "--served-model-name=other" in args
    assert not [name for kind, name in cluster.objects if kind == "NetworkPolicy"], "what is left out is deleted"


def test_a_refusal_of_the_server_is_seen(cluster, helm):
    helm("install", CHART)
    for found in cluster.objects.values():
        if found.get("kind") == "Deployment":
            found["spec"]["selector"] = {}
    with pytest.raises(AssertionError, match="field is immutable"):
        helm("upgrade", CHART)
