"""The example for Ray over two nodes in network namespaces: gateways and a store on each, one worker with vLLM."""

import asyncio
import json
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from medialane_process import START_S, MedialaneProcess, kill
from openai_http import OpenAiHttp, chat, picture, text
from process_tree import arenas_of, command_of, descendants, is_alive

from medialane.cli import main
from ray_hosts import RayHosts, ray_hosts
from waiting import eventually

pytest.importorskip("ray", reason="ray is not installed (the extra ray)")

pytestmark = pytest.mark.vllm

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray"
ASK = text("What is in the picture?")


class OnRay(NamedTuple):
    hosts: RayHosts
    serve: MedialaneProcess
    runtime_directory: Path

    @property
    def urls(self) -> list[str]:
        """The gateways: of the node where `serve` runs, and of the other one."""
        return [f"http://{address}:{self.serve.port}" for address in self.hosts.addresses]

    def clients(self) -> list[OpenAiHttp]:
        return [OpenAiHttp(url, self.serve.model) for url in self.urls]

    def placed(self, *words: str) -> list[int]:
        """Processes below Ray's nodes whose commands have these words."""
        found = [pid for node in self.hosts.node_pids for pid in descendants(node)]
        return [pid for pid in found if all(word in command_of(pid) for word in words)]

    async def status(self, capsys: pytest.CaptureFixture[str]) -> list[dict]:
        words = [word for url in self.urls for word in ("--gateway", url)]
        await asyncio.to_thread(main, ["status", *words, "--json"])
        return json.loads(capsys.readouterr().out)

    async def is_well(self, capsys: pytest.CaptureFixture[str]) -> bool:
        return all(found["ok"] for found in await self.status(capsys))


def example_settings(hosts: RayHosts, folder: Path) -> Path:
    """The settings of the example, with this cluster's addresses and size, and the secret in `folder`."""
    text = (EXAMPLE / "serve.toml").read_text()
    ours = {
        "10.0.0.1:6379": hosts.head,
        "\nworkers = 4": "\nworkers = 1",
        "gpus-per-worker = 1": "gpus-per-worker = 0",
        "cpus-per-worker = 4": "cpus-per-worker = 1",
        "/etc/medialane/tls": str(folder / "tls" / "node"),
        "/etc/medialane": str(folder),
    }
    for there, here in ours.items():
        assert there in text
        text = text.replace(there, here)
    (folder / "serve.toml").write_text(text)
    return folder / "serve.toml"


@pytest.fixture(scope="session")
def starting_on_ray(tiny_model, vllm_environ, server_flags, tmp_path_factory, plain_vllm) -> Iterator[OnRay]:
    """Only the other node has a CPU: the worker is placed there."""
    runtime = Path(tempfile.mkdtemp(prefix="ml-ray-", dir="/tmp"))
    folder = tmp_path_factory.mktemp("ray")
    for name in ("rpc-secret", "ray-token"):
        (folder / name).touch(0o600)
        (folder / name).write_text(secrets.token_hex(32))
    assert main(["certs", str(folder / "tls"), "--host", "node"]) == 0
    environ = {
        **vllm_environ,
        "XDG_RUNTIME_DIR": str(runtime),
        "VLLM_RPC_BASE_PATH": str(runtime),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "ray-token"),
    }
    try:
        making = ray_hosts(environ, cpus=(0, 1))
        hosts = making.__enter__()
    except OSError as error:
        pytest.skip(f"NOT TESTED: two nodes of Ray in network namespaces, which cannot be created here: {error}")
    serve = MedialaneProcess.spawn(
        "serve",
        str(tiny_model),
        ["--config", str(example_settings(hosts, folder)), "--preparers", "1", "--arena-size", "128MiB"],
        server_flags,
        environ=environ,
        log=folder / "serve.log",
    )
    try:
        yield OnRay(hosts, serve, runtime)
    finally:
        serve.stop()
        making.__exit__(*sys.exc_info())
        shutil.rmtree(runtime)


@pytest.fixture
async def on_ray(starting_on_ray) -> OnRay:
    serve = starting_on_ray.serve

    def has_started() -> bool:
        assert serve.process.poll() is None, serve.tail()
        return "Ctrl-C stops it" in serve.log.read_text()

    await eventually(has_started, "all processes on Ray are ready", START_S, more=serve.tail)
    return starting_on_ray


async def test_gateways_of_both_nodes_answer_as_plain_vllm_does(on_ray, plain):
    for number, client in enumerate(on_ray.clients()):
        for body in (chat(text("Say something.")), chat(picture(120 + number), ASK)):
            assert (await client.succeed(body)).ids == (await plain.succeed(body)).ids
        page = await client.metrics()
        transport = ("pull", "shm")[number]
        assert page.value("medialane_worker_transport", transport=transport) == 1
        assert page.value("medialane_transfer_fallbacks_total") == 0
    assert (await on_ray.clients()[1].metrics()).value("medialane_store_pulls_total", mover="tcp") == 1


async def test_status_shows_hosts_gateways_workers_stores_and_links(on_ray, capsys):
    states = await on_ray.status(capsys)
    assert [state["health"] for state in states] == ["ok", "ok"]
    for state, store in zip(states, ("own", "gateway's"), strict=True):
        assert state["hosts"] == [{"name": on_ray.hosts.other_name, "num_ready": 1, "num_workers": 1, "store": store}]
        assert [worker["name"] for worker in state["workers"]] == [f"{on_ray.hosts.other_name}/0"]
        assert all(link["connected"] for link in state["links"])
        assert 0 < state["store"]["size_bytes"] <= 128 << 20


async def test_killed_worker_and_gateway_come_back_and_serve(on_ray, plain, capsys):
    (worker,) = on_ray.placed("medialane worker")
    (gateway,) = on_ray.placed("medialane gateway")
    (store,) = on_ray.placed("medialane store")
    kill(worker)
    kill(gateway)

    async def both_serve() -> bool:
        pids = on_ray.placed("medialane worker") + on_ray.placed("medialane gateway")
        return len(pids) == 2 and not {worker, gateway} & set(pids) and await on_ray.is_well(capsys)

    await eventually(both_serve, "new processes serve", START_S, more=on_ray.serve.log.read_text)
    assert on_ray.placed("medialane store") == [store]
    body = chat(picture(123), ASK)
    right = (await plain.succeed(body)).ids
    for client in on_ray.clients():
        assert (await client.succeed(body)).ids == right
    assert "worker 0: exited (killed by SIGKILL); restarting" in on_ray.serve.log.read_text()


async def test_sigterm_leaves_no_process_no_actor_no_arena_and_no_folder(on_ray):
    ours = [*descendants(on_ray.serve.pid), *on_ray.placed("medialane"), *on_ray.placed("SupervisingActor")]
    arenas = {arena for pid in ours for arena in arenas_of(pid)}
    assert len(arenas) == 2
    assert len(on_ray.placed("SupervisingActor")) == 2
    assert on_ray.serve.stop() == 0, on_ray.serve.tail()
    await eventually(lambda: not any(map(is_alive, ours)), "all have ended", 20, more=lambda: map(command_of, ours))
    assert not [path for path in arenas if path.exists()]
    assert not list(on_ray.runtime_directory.iterdir())
