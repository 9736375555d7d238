"""A worker process over the simulated engine at a TCP address, and a gateway's parts: secret and TLS as a user sets
them."""

import datetime as dt
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import gateway_parts
import msgspec
import pytest
import trustme
from gateway_parts import Parts, png, prompt

from certificates import tls_settings
from medialane.config import as_environ, load_config
from medialane.gateway import open_scope
from medialane.types.errors import AuthenticationFailed
from medialane.types.request import EngineRequest, ExpandedPrompt
from medialane.wire import Security
from waiting import eventually, wait_until

SECRET = "a secret of the tests"


@pytest.fixture
def ca():
    return trustme.CA()


@pytest.fixture
def gateway_rpc(tmp_path, ca):
    """The gateway's settings: its secret is in the environment."""
    return msgspec.structs.replace(gateway_parts.RPC, shared_secret=SECRET, **tls_settings(tmp_path / "gateway", ca))


@pytest.fixture
def worker(tmp_path, ca):
    """The address of a process whose secret is in a file, with the next one, and its log."""
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\nthe next secret of ours\n")
    file.chmod(0o600)
    files = {f"rpc-{name.replace('_', '-')}": path for name, path in tls_settings(tmp_path / "worker", ca).items()}
    environ = os.environ | as_environ(load_config({**files, "rpc-secret-file": str(file)}, environ={}))
    argv = [sys.executable, "-m", "medialane", "worker", "m", "--engine", "simulated", "--listen", "tcp://0.0.0.0:0"]
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(argv, env=environ, stderr=output)
    try:
        wait_until(lambda: "listens at" in log.read_text(), timeout_s=40, more=log.read_text)
        (port,) = re.findall(r"listens at tcp://0\.0\.0\.0:(\d+)$", log.read_text(), re.MULTILINE)
        yield SimpleNamespace(address=f"tcp://127.0.0.1:{port}", attaches=False, log=log)
    finally:
        process.terminate()
        process.wait(10)


@pytest.mark.timeout(60)
async def test_request_with_media_is_answered_over_tcp_with_secret_and_tls(worker, gateway_rpc, arena, preparers):
    async with Parts(arena, preparers, [worker], rpc=gateway_rpc) as parts:
        with open_scope():
            prepared = await parts.gateway.prepare(prompt(png(seed=1)))
            params = msgspec.msgpack.encode({"max_tokens": 4, "output_kind": 1})
            wanted = EngineRequest("r", ExpandedPrompt(prepared.token_ids), params)
            assert len(await parts.generate(wanted, prepared)) == 4


@pytest.mark.timeout(60)
async def test_gateway_with_another_secret_is_refused_and_both_logs_say_so(
    worker, gateway_rpc, arena, preparers, tmp_path, caplog
):
    file, new = tmp_path / "gateway's secret", tmp_path / "new secret"

    def keep(secret):
        new.write_text(secret)
        new.chmod(0o600)
        new.rename(file)
        Security.load.cache_clear()  # a process reads it once; this one is now like another

    keep(SECRET)
    rpc = msgspec.structs.replace(gateway_rpc, shared_secret="", secret_file=str(file))
    async with Parts(arena, preparers, [worker], rpc=rpc) as parts:
        link = parts.links.links[worker.address]
        keep("another secret of ours")
        await link.client.close()
        await eventually(lambda: isinstance(link.refusal, AuthenticationFailed))
        assert link.is_failing
        await eventually(lambda: "another secret" in worker.log.read_text())
        keep(SECRET)
        await eventually(lambda: parts.links.num_ready)
        assert link.refusal is None
    assert "--rpc-secret-file" in caplog.text
    assert SECRET not in worker.log.read_text() + caplog.text


@pytest.mark.timeout(60)
async def test_renewed_certificates_are_used_without_a_restart(worker, gateway_rpc, arena, preparers, tmp_path, ca):
    async with Parts(arena, preparers, [worker], rpc=gateway_rpc) as parts:
        for name in ("worker", "gateway"):
            tls_settings(tmp_path / name, ca, not_after=dt.datetime(2999, 1, 1, tzinfo=dt.UTC))
            await parts.links.links[worker.address].client.close()
            await eventually(lambda: parts.links.num_ready)
    assert "worker/tls_cert.pem is valid until Jan  1 00:00:00 2999" in worker.log.read_text()
