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
    """Flags, the context of a client, and what writes another certificate and returns it."""
    authority, context = trustme.CA(), ssl.create_default_context()
    authority.configure_trust(context)

    def renew():
        certificate = authority.issue_cert("127.0.0.1")
        certificate.private_key_pem.write_to_path(folder / "key.pem")
        certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
        return certificate.cert_chain_pems[0].bytes().decode()

    renew()
    return ["--ssl-keyfile", str(folder / "key.pem"), "--ssl-certfile", str(folder / "cert.pem")], context, renew


ADMIN = {"authorization": "Bearer new admin"}


async def test_process_serves_with_tls_and_keys_until_it_is_asked_to_stop(folder, tls):
    flags, context, renew = tls
    sockets = [str(folder / "a.sock")], [str(folder / "b.sock")]
    models = [{"label": name, "names": [name], "sockets": where} for name, where in zip("ab", sockets, strict=True)]
    (folder / "models.json").write_text(json.dumps(models))
    admin = folder / "admin.key"
    admin.touch(0o600)
    admin.write_text("admin")
    listener = bind_http("127.0.0.1", 0)
    port = listener.getsockname()[1]
    words = ["-m", "medialane", "name-router", str(folder / "models.json"), "--listen-fd", str(listener.fileno())]
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
    async with aiohttp.ClientSession(f"https://127.0.0.1:{port}", connector=connector) as session:

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
            admin.write_text("new admin")
            renewed = renew()
            router.send_signal(signal.SIGHUP)

            async def has_read_it():
                return (await session.post(CHAT, json={"model": "a"}, headers=ADMIN)).status == 200

            await eventually(has_read_it, "keys are read again", 10)
            shown = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
            assert shown == renewed
        finally:
            router.send_signal(signal.SIGTERM)
            status = await router.wait()
            server.should_exit = server.force_exit = True
            await serving
            sock.close()
    assert status == 0
