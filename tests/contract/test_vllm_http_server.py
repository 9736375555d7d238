"""The flags of vLLM's HTTP server take effect in ours as they do in vLLM's own."""

import asyncio
import json
import logging
import os
import socket
import ssl
from functools import partial

import aiohttp
import pytest
import trustme
from starlette.responses import PlainTextResponse

from medialane.gateway import BoundedServer, GatewayConfig, http_bounds
from medialane.runtime.stop import Stop
from medialane.types.errors import StartupFailed
from medialane.vllm_bridge.frontend.http_server import check_http, serve_http, uvicorn_config
from vllm_configs import vllm_args
from waiting import eventually

pytestmark = pytest.mark.timeout(120)


class App:
    def __init__(self):
        self.state = type("State", (), {})()
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            await self.gate.wait()
            await PlainTextResponse("ok")(scope, receive, send)
        else:
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": message["type"] + ".complete"})
            await send({"type": "lifespan.shutdown.complete"})


def config(*flags):
    return uvicorn_config(App(), vllm_args("model", flags))


@pytest.fixture(autouse=True)
def _logging_is_put_back():
    """uvicorn and vLLM configure the process's loggers."""
    names = ("uvicorn", "uvicorn.access", "uvicorn.error", "vllm")
    before = {
        n: (logging.getLogger(n).level, list(logging.getLogger(n).handlers), logging.getLogger(n).propagate)
        for n in names
    }
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    filters = list(logging.getLogger("uvicorn.access").filters)
    yield
    for name, (old, own, propagate) in before.items():
        logger = logging.getLogger(name)
        logger.setLevel(old)
        logger.handlers, logger.propagate, logger.disabled = own, propagate, False
    logging.getLogger("uvicorn.access").filters = filters
    root.setLevel(level)
    root.handlers = handlers


@pytest.fixture
def files(tmp_path):
    """A key and a certificate."""
    certificate = trustme.CA().issue_cert("localhost")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    return [f"--ssl-keyfile={tmp_path}/key.pem", f"--ssl-certfile={tmp_path}/cert.pem"]


class Server:
    """`App` served with these flags, for the time of a `with`."""

    def __init__(self, *flags, drain_timeout_s=1):
        self.stop = Stop()
        self.given_up = asyncio.Event()
        self._drain_timeout_s = drain_timeout_s
        self._args = vllm_args("model", flags)

    async def __aenter__(self):
        self._sock = socket.socket()
        self._sock.bind(("127.0.0.1", 0))
        self.port = self._sock.getsockname()[1]
        self._app = App()
        bounds, max_headers = http_bounds(GatewayConfig()), self._args.h11_max_header_count
        server_of = partial(BoundedServer, bounds=bounds, max_headers=max_headers)
        self._task = asyncio.create_task(
            serve_http(
                self._app,
                self._args,
                self._sock,
                self.stop,
                drain_timeout_s=self._drain_timeout_s,
                give_up=self._give_up,
                server_of=server_of,
            )
        )
        await eventually(lambda: self._has_started or self._task.done())
        assert not self._task.done(), self._task.exception()
        return self

    @property
    def _has_started(self):
        return getattr(getattr(self._app.state, "server", None), "started", False)

    async def __aexit__(self, *_):
        self.stop.asked.set()
        await self._task
        self._sock.close()

    def hold(self):
        """Requests are answered only when they are given up."""
        self._app.gate.clear()

    def _give_up(self):
        self.given_up.set()
        self._app.gate.set()

    async def status(self, headers=None, **options):
        scheme = "https" if "ssl" in options else "http"
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{scheme}://127.0.0.1:{self.port}/", headers=headers, **options) as response,
        ):
            return response.status


def test_keep_alive_follows_vllms_environment_variable(monkeypatch):
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "77")
    assert config().timeout_keep_alive == 77


def test_log_level_and_access_log_follow_the_flags():
    found = config("--uvicorn-log-level=warning", "--disable-uvicorn-access-log")
    assert (found.log_level, found.access_log) == ("warning", False)


def test_endpoints_are_excluded_from_the_access_log():
    config("--disable-access-log-for-endpoints=/health,/metrics")
    logger = logging.getLogger("uvicorn.access")
    kept = []
    for path in ("/health", "/v1/models"):
        record = logger.makeRecord(
            logger.name, logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', ("c", "GET", path, "1.1", 200), None
        )
        passes = all(handler.filter(record) for handler in logger.handlers) and logger.filter(record)
        kept += [path] if passes else []
    assert kept == ["/v1/models"]


@pytest.mark.filterwarnings("ignore:--log-config-file is deprecated:UserWarning")
@pytest.mark.parametrize("flag", ["--log-config-file", "--logging-config.pylogging_config_file"])
def test_log_config_file_configures_logging(tmp_path, flag):
    path = tmp_path / "log.json"
    path.write_text(json.dumps({"version": 1, "disable_existing_loggers": False, "loggers": {"a.b": {"level": 37}}}))
    config(f"{flag}={path}")
    assert logging.getLogger("a.b").level == 37


def test_missing_log_config_fails_the_start(tmp_path):
    with pytest.raises(StartupFailed, match="logging"):
        config(f"--logging-config.pylogging_config_file={tmp_path}/absent.json")


def test_ciphers_follow_the_flag(files):
    context = config(*files, "--ssl-ciphers=ECDHE-RSA-AES256-GCM-SHA384").ssl
    names = {cipher["name"] for cipher in context.get_ciphers() if not cipher["name"].startswith("TLS_")}
    assert names == {"ECDHE-RSA-AES256-GCM-SHA384"}


@pytest.mark.parametrize("flags", [["--ssl-ciphers=nonsense"], ["--ssl-ca-certs=/nowhere"]])
def test_invalid_tls_configuration_fails_the_start(files, flags):
    with pytest.raises(StartupFailed, match="TLS"):
        check_http(vllm_args("model", [*files, *flags]))


def test_ssl_refresh_requires_certificate_files():
    with pytest.raises(StartupFailed, match="--enable-ssl-refresh"):
        check_http(vllm_args("model", ["--enable-ssl-refresh"]))


def test_certificate_that_cannot_be_used_is_refused_before_anything_changes(files, tmp_path):
    server = BoundedServer(config(*files), bounds=http_bounds(GatewayConfig()))
    use, flags = server.read_certificate()
    use()
    assert flags == ["--ssl-certfile"]
    (tmp_path / "cert.pem").write_text("no certificate")
    with pytest.raises(StartupFailed, match="--ssl-certfile"):
        server.read_certificate()
    assert BoundedServer(config(), bounds=http_bounds(GatewayConfig())).read_certificate()[1] == ()


async def test_changed_certificate_is_reloaded(files, tmp_path):
    async with Server(*files, "--enable-ssl-refresh") as server:

        def certificate() -> str:
            return ssl.get_server_certificate(("127.0.0.1", server.port))

        first = await asyncio.to_thread(certificate)
        other = trustme.CA().issue_cert("localhost")
        other.private_key_pem.write_to_path(tmp_path / "key.pem")
        other.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")

        async def is_reloaded() -> bool:
            os.utime(tmp_path / "cert.pem")  # again: vLLM does not signal when its watcher has started
            return await asyncio.to_thread(certificate) != first

        await eventually(is_reloaded, timeout_s=20)


@pytest.mark.parametrize(
    ("flag", "headers"),
    [
        ("--h11-max-header-count=10", {f"x-{n}": "a" for n in range(20)}),
        ("--h11-max-incomplete-event-size=2048", {"x-long": "a" * 4000}),
    ],
)
async def test_header_limits_are_enforced(flag, headers):
    async with Server(flag) as server:
        assert await server.status() == 200
        assert await server.status(headers) == 431
    async with Server() as server:
        assert await server.status(headers) == 200


async def test_request_is_given_up_when_the_time_to_drain_is_over():
    async with Server(drain_timeout_s=0.3) as server:
        server.hold()
        answered = asyncio.create_task(server.status())
        await asyncio.sleep(0.1)  # time: the request is under way
        server.stop.ask()
        assert await answered == 200
        assert server.given_up.is_set()


async def test_second_signal_gives_requests_up_at_once():
    async with Server(drain_timeout_s=3600.0) as server:
        server.hold()
        answered = asyncio.create_task(server.status())
        await asyncio.sleep(0.1)  # time: the request is under way
        server.stop.ask()
        server.stop.ask()
        assert await answered == 200
        assert server.given_up.is_set()


async def test_request_that_ends_in_time_is_not_given_up():
    async with Server(drain_timeout_s=3600.0) as server:
        assert await server.status() == 200
    assert not server.given_up.is_set()
