"""`medialane name-router` as a process, with TLS and keys, in front of a gateway's socket."""

import asyncio
import json
import os
import signal
import ssl
import sys
import tempfile
from pathlib import Path

import aiohttp
import pytest
import trustme
import uvicorn

from medialane.cli.serve import SECTIONS
from medialane.cluster.model_groups import TABLES
from medialane.config import SettingsSource
from medialane.gateway import BoundedServer, GatewayConfig, http_bounds
from medialane.wire import bind_http, bind_unix
from waiting import eventually

CHAT = "/v1/chat/completions"
CLIENT = {"authorization": "Bearer client"}


async def gateway(scope, receive, send):
    while (await receive())["more_body"]:
        pass
    body = b"" if scope["path"] == "/health" else json.dumps([scope["scheme"], scope["client"]]).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="ml-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def tls(folder):
    """Flags, and the context of a client."""
    authority = trustme.CA()
    certificate, context = authority.issue_cert("127.0.0.1"), ssl.create_default_context()
    authority.configure_trust(context)
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    return ["--ssl-keyfile", str(folder / "key.pem"), "--ssl-certfile", str(folder / "cert.pem")], context


ADMIN = {"authorization": "Bearer new admin"}


async def test_process_serves_with_tls_and_keys_until_it_is_asked_to_stop(folder, tls):
    flags, context = tls
    sockets = [str(folder / "a.sock")], [str(folder / "b.sock")]
    models = [{"label": name, "names": [name], "sockets": where} for name, where in zip("ab", sockets, strict=True)]
    (folder / "models.json").write_text(json.dumps(models))
    admin = folder / "admin.key"
    admin.touch(0o600)
    admin.write_text("admin")
    settings = folder / "settings.toml"
    tables = "[models.a]\n[models.b]"
    settings.write_text(f'admin-key-file = "{admin}"\n{tables}')
    source = folder / "source.json"
    SettingsSource.of(SECTIONS, {}, str(settings), {}, rules=TABLES).write(source)
    listener = bind_http("127.0.0.1", 0)
    url = f"https://127.0.0.1:{listener.getsockname()[1]}"
    words = ["-m", "medialane", "name-router", str(folder / "models.json"), "--listen-fd", str(listener.fileno())]
    words += ["--settings-source", str(source)]
    router = await asyncio.create_subprocess_exec(
        sys.executable,
        *words,
        "--",
        *flags,
        pass_fds=(listener.fileno(),),
        start_new_session=True,  # without a terminal, whose end SIGHUP would mean
        env={**os.environ, "VLLM_API_KEY": "client", "MEDIALANE_ADMIN_KEY_FILE": str(admin)},
    )
    listener.close()
    config = uvicorn.Config(gateway, lifespan="off", log_config=None, access_log=False)
    server = BoundedServer(config, bounds=http_bounds(GatewayConfig()), is_behind_router=True)
    sock = bind_unix(sockets[0][0])
    serving = asyncio.create_task(server.serve([sock]))
    connector = aiohttp.TCPConnector(ssl=context)
    async with aiohttp.ClientSession(url, connector=connector) as session:

        async def answers():
            try:
                return (await session.get("/health")).status == 200
            except aiohttp.ClientConnectorError:
                return False

        try:
            await eventually(answers, "the router answers", 30)
            async with session.post(CHAT, json={"model": "a"}, headers=CLIENT) as response:
                scheme, (host, _) = await response.json(content_type=None)
                assert (scheme, host) == ("https", "127.0.0.1")
            assert (await session.post(CHAT, json={"model": "b"}, headers=CLIENT)).status == 503
            assert (await session.post(CHAT, json={"model": "a"})).status == 401
            assert (await session.post(CHAT, json={"model": "a"}, headers=ADMIN)).status == 401
            other = folder / "other.key"
            other.touch(0o600)
            other.write_text("new admin")
            settings.write_text(f'admin-key-file = "{other}"\n{tables}')
            router.send_signal(signal.SIGHUP)

            async def has_read_it():
                return (await session.post(CHAT, json={"model": "a"}, headers=ADMIN)).status == 200

            await eventually(has_read_it, "the settings and their files of keys are read again", 10)
        finally:
            router.send_signal(signal.SIGTERM)
            status = await router.wait()
            server.should_exit = server.force_exit = True
            await serving
            sock.close()
    assert status == 0
