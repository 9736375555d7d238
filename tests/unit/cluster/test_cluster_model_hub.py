"""An unavailable model is reported within seconds, with its name and hub."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from medialane.cluster import model_hub
from medialane.cluster.model_hub import find_on_hub
from medialane.core.errors import StartupFailed


class Hub(ThreadingHTTPServer):
    """Answers each path with the status of `statuses`, 404 where it has none."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.statuses, self.headers, self.asked, self.delay_s = {}, {}, [], 0.0


class Handler(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.server.asked.append(self.path)
        time.sleep(self.server.delay_s)  # time: a slow hub's
        self.send_response(self.server.statuses.get(self.path, 404))
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_args):
        """Quiet."""


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(model_hub, "DEADLINE_S", 1.0)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("name", ["config.json", "params.json"])
def test_existing_hub_model_passes(hub, name):
    hub.statuses[f"/org/model/resolve/main/{name}"] = 200
    find_on_hub("org/model")


def test_revision_is_the_one_passed_to_vllm(hub):
    hub.statuses["/org/model/resolve/v2/config.json"] = 200
    find_on_hub("org/model", "v2")
    assert hub.asked == ["/org/model/resolve/v2/config.json"]


def refusal(hub, model="org/model"):
    with pytest.raises(StartupFailed) as refused:
        find_on_hub(model)
    assert model in refused.value.message
    return refused.value.message


def test_missing_hub_model_is_named(hub):
    assert "does not have it" in refusal(hub)


@pytest.mark.parametrize(
    ("status", "headers", "said"),
    [
        (401, {}, "HF_TOKEN"),
        (403, {"x-error-code": "GatedRepo"}, "requires an HF_TOKEN"),
        (503, {}, "returned status 503"),
    ],
)
def test_hub_rejection_is_reported_with_its_reason(hub, status, headers, said):
    hub.headers = headers
    for name in ("config.json", "params.json"):
        hub.statuses[f"/org/model/resolve/main/{name}"] = status
    message = refusal(hub)
    assert said in message
    assert constants.ENDPOINT in message


def test_unresponsive_hub_times_out(hub):
    hub.delay_s = 3.0
    started = time.monotonic()
    message = refusal(hub)
    assert "within" in message or "timed out" in message
    assert time.monotonic() - started < 2.5


def test_unreachable_hub_is_named(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert "cannot be reached" in refusal(hub)


def test_busy_hub_is_left_to_vllms_retries(hub):
    hub.statuses["/org/model/resolve/main/config.json"] = 429
    find_on_hub("org/model")


def test_offline_mode_makes_no_request(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refusal(hub)
    assert hub.asked == []


def test_cached_model_makes_no_request(hub, tmp_path):
    repository = tmp_path / "models--org--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "snapshots" / "abc" / "config.json").write_text("{}")
    find_on_hub("org/model")
    assert hub.asked == []
